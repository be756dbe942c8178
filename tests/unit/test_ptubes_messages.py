# SPDX-License-Identifier: Apache-2.0
"""The messages of Ptubes clients, byte for byte and read by a protobuf library."""

import gc
import json
from typing import Any

import pyarrow
import pytest

from penstock._native import shard_slots
from penstock.errors import EventMalformed, OptionInvalid
from penstock.limits import PTUBES_FETCH_BYTES_MAX
from penstock.model import TableName
from penstock.serve.ptubes.heads import RequestHeads
from penstock.serve.ptubes.messages import (
    CheckpointMode,
    FetchRequest,
    PtubesCheckpoint,
    PtubesSubscription,
    ShardMessages,
    checkpoint_in,
    envelope,
    error_envelope,
)
from tests.support.ptubes.packet import (
    ERROR,
    PARTITIONED,
    Checkpoint,
    RdsEnvelope,
    RdsEvent,
    RdsPartitionedMessage,
)


def subscription(**changes: Any) -> bytes:
    """Return a subscribe request as the SDK's JSON library writes it."""
    whole: dict[str, Any] = {
        "partitionClusterInfo": {"partitionTotal": 11, "partitionSet": [3, 0, 3]},
        "serviceGroupInfo": {
            "taskName": "cache",
            "serviceGroupName": "shop",
            "databaseInfoSet": [{"databaseName": "shop", "tableNames": ["orders", "odd.name"]}],
        },
        "buffaloCheckpoint": {
            "versionTs": 7,
            "checkpointMode": "NORMAL",
            "uuid": "5c8e94a1-63a8-11ef-9f4e-0242ac110002",
            "transactionId": 12,
            "eventIndex": 2,
            "serverId": -5,
            "binlogFile": 3,
            "binlogOffset": 1542,
            "timestamp": 1_700_000_000_123,
        },
        "needEndTransaction": False,
        "needDDL": True,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        parent_object = whole
        for parent in parents:
            parent_object = parent_object[parent]
        if value is None:
            parent_object.pop(last)
        else:
            parent_object[last] = value
    return json.dumps(whole).encode()


def framed(*events: bytes) -> pyarrow.LargeBinaryArray:
    values = []
    for event in events:
        length = len(event)
        prefix = bytearray(b"\x1a")
        while length > 0x7F:
            prefix.append(length & 0x7F | 0x80)
            length >>= 7
        values.append(bytes(prefix) + bytes([length]) + event)
    return pyarrow.array(values, pyarrow.large_binary())


# --- Requests -------------------------------------------------------------------------------


def test_subscription_is_parsed_as_the_sdk_writes_it() -> None:
    actual = PtubesSubscription.parse(subscription())
    assert (actual.instance, actual.task) == ("shop", "cache")
    assert actual.tables == (TableName("shop", "orders"), TableName("shop", "odd.name"))
    assert (actual.shard_count, actual.shards) == (11, (0, 3))
    assert (actual.need_end, actual.need_ddl) == (False, True)
    assert actual.codec == "PROTOCOL_BUFFER"
    assert actual.checkpoint == PtubesCheckpoint(
        CheckpointMode.NORMAL,
        "5c8e94a1-63a8-11ef-9f4e-0242ac110002",
        transaction_id=12,
        event_index=2,
        server_id=-5,
        binlog_file=3,
        binlog_offset=1542,
        timestamp=1_700_000_000_123,
        version_ts=7,
    )


def test_omitted_subscription_fields_have_the_servers_defaults() -> None:
    actual = PtubesSubscription.parse(subscription(needEndTransaction=None, needDDL=None))
    assert (actual.need_end, actual.need_ddl) == (True, True)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        subscription(serviceGroupInfo=None),
        subscription(serviceGroupInfo__databaseInfoSet=[]),
        subscription(serviceGroupInfo__databaseInfoSet=[{"databaseName": "shop", "tableNames": [3]}]),
        subscription(serviceGroupInfo__serviceGroupName=5),
        subscription(partitionClusterInfo__partitionTotal=0),
        subscription(partitionClusterInfo__partitionTotal=40_000),
        subscription(partitionClusterInfo__partitionTotal=True),
        subscription(partitionClusterInfo__partitionSet=[11]),
        subscription(partitionClusterInfo__partitionSet=["1"]),
        subscription(buffaloCheckpoint=None),
        subscription(buffaloCheckpoint__checkpointMode="WHENEVER"),
        subscription(buffaloCheckpoint__binlogOffset=1 << 63),
        subscription(needDDL="yes"),
    ],
)
def test_invalid_subscription_is_refused(body: bytes) -> None:
    # Deep nesting uses up the stack, so run the finalizers of earlier tests first.
    gc.collect()
    with pytest.raises(OptionInvalid):
        PtubesSubscription.parse(body)


def test_fetch_is_bounded_by_the_daemon_as_well() -> None:
    request = FetchRequest.parse(b'{"batchSize": 1000, "timeoutMs": 50, "maxByteSize": 1000000}')
    assert (request.events_max, request.bytes_max, request.seconds_max) == (1000, 1_000_000, 0.05)
    request = FetchRequest.parse(
        b'{"batchSize": 2000000000, "timeoutMs": 86400000, "maxByteSize": 2000000000}'
    )
    assert request.events_max < 100_000
    assert request.bytes_max == PTUBES_FETCH_BYTES_MAX
    assert request.seconds_max <= 10.0


@pytest.mark.parametrize("body", [b"{}", b'{"batchSize": 0, "timeoutMs": 5, "maxByteSize": 5}', b"null"])
def test_invalid_fetch_is_refused(body: bytes) -> None:
    with pytest.raises(OptionInvalid):
        FetchRequest.parse(body)


# --- Answers, byte for byte -----------------------------------------------------------------


def test_empty_envelope_is_its_message_type() -> None:
    assert envelope([], None) == b"\x10\x01"


def test_envelope_of_two_shards_is_encoded() -> None:
    single, both = ShardMessages(), ShardMessages()
    single.add(framed(b"AB"))
    both.add(framed(b"AB", b"C"))
    assert envelope([(0, single), (300, both)], b"\x28\x03") == bytes.fromhex(
        "1001"  # messageType PARTITIONEDMESSAGE
        "1a20"  # message: 32 bytes
        "0a0c 0800 1208"  # map entry of 12 bytes: key 0, an RdsMessage of 8 bytes
        "0801 1002 1a024142"  # messageCount 1, messageSize 2, AB
        "0a10 08ac02 120b"  # map entry: key 300, an RdsMessage of 11 bytes
        "0802 1003 1a024142 1a0143"  # messageCount 2, messageSize 3, AB, C
        "3003"  # totalEventCount: an event that goes to two shards counts twice
        "4202 2803".replace(" ", "")  # latestCheckpoint: binlogFile 3
    )


def test_sizes_are_computed_without_encoding_for_any_length() -> None:
    lengths = [0, 1, 127, 128, 129, 16_383, 16_384, 16_385, 2_097_151, 2_097_152]
    messages = ShardMessages()
    messages.add(framed(*(b"x" * length for length in lengths)))
    actual = RdsEnvelope.FromString(envelope([(4, messages)], None))
    (message,) = RdsPartitionedMessage.FromString(actual.message).partitionMessages.values()
    assert message.messageSize == sum(lengths)
    assert [len(this_message) for this_message in message.messages] == lengths


def test_slice_of_a_column_sends_only_its_rows() -> None:
    values = framed(b"first", b"second", b"third", b"fourth").slice(1, 2)
    messages = ShardMessages()
    messages.add(values)
    actual = RdsEnvelope.FromString(envelope([(1, messages)], None))
    (message,) = RdsPartitionedMessage.FromString(actual.message).partitionMessages.values()
    assert list(message.messages) == [b"second", b"third"]


def test_checkpoint_round_trips_through_the_protobuf_library() -> None:
    checkpoint = PtubesCheckpoint(
        uuid="5c8e94a1-63a8-11ef-9f4e-0242ac110002",
        transaction_id=1 << 40,
        event_index=-1,
        server_id=-5,
        binlog_file=3,
        binlog_offset=5 << 30,
        timestamp=1_700_000_000_123,
        version_ts=7,
    )
    message = Checkpoint(
        uuid=checkpoint.uuid,
        transactionId=1 << 40,
        eventIndex=-1,
        serverId=-5,
        binlogFile=3,
        binlogOffset=5 << 30,
        timestamp=1_700_000_000_123,
        versionTs=7,
    )
    assert checkpoint.encode() == message.SerializeToString(deterministic=True)
    assert PtubesCheckpoint.decode(message.SerializeToString()) == checkpoint


def test_checkpoint_of_an_event_is_parsed_at_any_field_position() -> None:
    event = RdsEvent(sql="x" * 300)
    event.header.tableName = "shop.orders"
    event.header.version = 1
    event.header.checkpoint.eventIndex = 5
    (value,) = framed(event.SerializeToString()).to_pylist()
    assert PtubesCheckpoint.decode(checkpoint_in(value)).event_index == 5
    for cut in range(len(value) - 1):
        with pytest.raises(EventMalformed):
            checkpoint_in(value[:cut])


def test_error_is_an_envelope_with_a_code() -> None:
    envelope = RdsEnvelope.FromString(error_envelope(3, "purged"))
    assert (envelope.messageType, envelope.error_code, envelope.error_message) == (ERROR, 3, "purged")
    assert envelope.messageType != PARTITIONED


# --- Shards ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "kind", "slot", "shard"),
    [
        (0, pyarrow.int64(), 961, 4),
        (1, pyarrow.int64(), 962, 5),
        (42, pyarrow.int32(), 1003, 2),
        (1001, pyarrow.int64(), 1962, 4),
        (-1, pyarrow.int64(), 961, 4),
        (2_147_483_648, pyarrow.int64(), 31_808, 7),
        (1_099_511_627_783, pyarrow.int64(), 1224, 3),
        (1_000_000_000_000_000, pyarrow.int64(), 9528, 2),
        ("", pyarrow.string(), 992, 2),
        ("abc", pyarrow.string(), 31_812, 0),
        ("1", pyarrow.string(), 1041, 7),
        ("order-10001", pyarrow.string(), 12_646, 7),
        ("10.50", pyarrow.string(), 3644, 3),
        ("用户", pyarrow.string(), 5644, 1),
    ],
)
def test_shard_of_a_single_column_key_is_computed(key: object, kind: Any, slot: int, shard: int) -> None:
    batch = pyarrow.record_batch({"id": pyarrow.array([key], kind)})
    (actual_rows,) = pyarrow.array(shard_slots(batch, ["id"])).to_pylist()
    assert (actual_rows, actual_rows % 11) == (slot, shard)


def test_shard_of_a_two_column_key_is_computed() -> None:
    batch = pyarrow.record_batch({"id": pyarrow.array([12]), "name": pyarrow.array(["ab"])})
    assert pyarrow.array(shard_slots(batch, ["id", "name"])).to_pylist() == [4624]


# --- Heads ----------------------------------------------------------------------------------

_BODY = b'{"batchSize": 1}'
_HEAD = b"POST /v1/fetchMessages HTTP/1.1\r\ncontent-length: 16\r\n\r\n"
_NAMED = b"POST /v1/fetchMessages HTTP/1.1\r\nHost: localhost\r\ncontent-length: 16\r\n\r\n"


@pytest.mark.parametrize("step", [1, 7, 33, 1000])
def test_missing_host_header_is_added_for_any_packet_boundaries(step: int) -> None:
    came = (_HEAD + _BODY) * 3
    heads = RequestHeads()
    read = b"".join(heads.feed(came[at : at + step]) for at in range(0, len(came), step))
    assert read == (_NAMED + _BODY) * 3


def test_body_resembling_a_head_stays_unchanged() -> None:
    body = b"GET / HTTP/1.1\r\n\r\n"
    head = b"POST / HTTP/1.1\r\nContent-Length: 18\r\nHost: there\r\n\r\n"
    assert RequestHeads().feed(head + body + head) == head + body + head


def test_unterminated_head_is_bounded_in_memory() -> None:
    heads = RequestHeads()
    read = b"".join(heads.feed(b"x" * 10_000) for _ in range(20))
    assert read == b"x" * 200_000
