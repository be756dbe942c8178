# SPDX-License-Identifier: Apache-2.0
"""Coordination store records of another version are rejected with an error that names them, and a hint."""

import json
import zlib
from collections.abc import Callable

import pytest

from penstock.coordinate.assignment import Assignment
from penstock.coordinate.checkpoint import ShardState
from penstock.coordinate.lease import Holder
from penstock.coordinate.store import Record
from penstock.coordinate.subscription_record import Subscription
from penstock.errors import SchemaInvalid
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.resnapshot import Resnapshot
from penstock.pipeline.state import Checkpoint

READERS: dict[str, Callable[[bytes], object]] = {
    "standing": Checkpoint.decode,
    "resnapshot": Resnapshot.decode,
    "subscription": Subscription.decode,
    "shard": lambda value: ShardState.of(Record(value, 1, 1)),
    "assignment": lambda value: Assignment.of(Record(value, 1, 1)),
    "lease": lambda value: Holder.of(Record(value, 1, 1)),
    "batch": lambda value: BatchRecord.from_json(json.loads(zlib.decompress(value))),
}
PACKED = {"standing", "batch"}
VALUES = [None, [], {}, "text", 7, {"loads": 1}, {"format": 9, "later": {}}, {"ranges": {"a": 1}}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("kind", READERS)
def test_record_of_another_version_is_refused_by_name(kind: str, value: object) -> None:
    text = json.dumps(value).encode()
    with pytest.raises(SchemaInvalid, match="cannot be read") as caught:
        READERS[kind](zlib.compress(text) if kind in PACKED else text)
    assert caught.value.hint


@pytest.mark.parametrize("kind", sorted(READERS.keys() - {"batch"}))
@pytest.mark.parametrize("value", [b"", b"\xff\xfe", b"{", zlib.compress(b"{")], ids=repr)
def test_damaged_bytes_are_refused_by_name(kind: str, value: bytes) -> None:
    with pytest.raises(SchemaInvalid, match="cannot be read"):
        READERS[kind](value)
