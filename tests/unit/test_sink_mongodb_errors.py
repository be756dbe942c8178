# SPDX-License-Identifier: Apache-2.0
"""The MongoDB sink's errors are short enough for a log line and omit the driver's list of servers."""

import pytest

from penstock.errors import ConnectionLost
from penstock.sinks.mongodb import sink
from tools.servers.ports import free_port


def test_servers_that_do_not_answer_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_SELECT_MILLISECONDS_MAX", 100)
    port = free_port()
    unreachable = sink.make(sink.Settings(url=f"mongodb://127.0.0.1:{port}"))
    with pytest.raises(ConnectionLost) as raised:
        unreachable.check()
    assert (
        raised.value.message == f"MongoDB does not answer: 127.0.0.1:{port}: [Errno 111] Connection refused"
    )
