# SPDX-License-Identifier: Apache-2.0
"""The handling of responses from Redis, without a server."""

import socket

import pyarrow
import pytest

from penstock.errors import PenstockError
from penstock.sinks.redis.connection import Pipeline


@pytest.mark.parametrize(("key", "shown"), [("é".encode(), "key 'é'"), (b"a\xff", r"key 'a\\xff'")])
def test_refused_command_names_its_key_in_any_encoding(key: bytes, shown: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"+OK\r\n-WRONGTYPE Operation against a key\r\n")
        pipeline = Pipeline(ours)
        # The keys that SCAN returns may contain any bytes, even in a text column.
        keys = pyarrow.array([b"first", key]).view(pyarrow.string())
        pipeline.send(pyarrow.array(["SET 1\r\n", "SET 2\r\n"]), keys)
        with pytest.raises(PenstockError, match="WRONGTYPE") as refused:
            pipeline.finish()
        assert refused.value.position == shown
