# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of TiDB-Binlog, PD, etcd and TiKV, limited to the fields that Penstock uses.

The field numbers are those of `binlog.proto` and `pump.proto` (pingcap/tipb), `pdpb`, `metapb` and `kvrpcpb`
(pingcap/kvproto), and etcd's `rpc.proto`. A `Binlog` always has its required integers, also where they are
0, because Go's encoder writes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from penstock._native import tidb_heads
from penstock.errors import EventMalformed

_UINT64 = (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Value = int | bytes | memoryview


# --- Encoding -------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    """Return an integer of 64 bits as a varint; a negative one in two's complement."""
    value &= _UINT64
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def encode(*fields: tuple[int, Value | str | bool]) -> bytes:
    """Return a message with these fields in this order: integers as varints, the others with a length."""
    parts: list[bytes | memoryview] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += (varint(number << 3 | _VARINT), varint(value))
        else:
            content = value.encode() if isinstance(value, str) else value
            parts += (varint(number << 3 | _BYTES), varint(len(content)), content)
    return b"".join(parts)


# --- Decoding -------------------------------------------------------------------------------


class Message:
    """A decoded message: the values of each field, by number. A missing field has protobuf's default."""

    def __init__(self, content: bytes | memoryview) -> None:
        """Decode a message without copying its fields. Raises EventMalformed."""
        self._values: dict[int, list[int | memoryview]] = {}
        for number, value in _fields(memoryview(content)):
            self._values.setdefault(number, []).append(value)

    def has(self, number: int) -> bool:
        """Return whether a field is present."""
        return number in self._values

    def unsigned(self, number: int) -> int:
        """Return the last value of an integer field as uint64. Raises EventMalformed."""
        values = self._values.get(number)
        if values is None:
            return 0
        value = values[-1]
        if not isinstance(value, int):
            raise EventMalformed(f"field {number} of a message is no integer")
        return value

    def signed(self, number: int) -> int:
        """Return the last value of an integer field as int64. Raises EventMalformed."""
        value = self.unsigned(number)
        return value - (1 << 64) if value >> 63 else value

    def view(self, number: int) -> memoryview:
        """Return the last value of a field with a length, without a copy. Raises EventMalformed."""
        views = self.views(number)
        return views[-1] if views else memoryview(b"")

    def content(self, number: int) -> bytes:
        """Return the last value of a field with a length. Raises EventMalformed."""
        return bytes(self.view(number))

    def text(self, number: int) -> str:
        """Return the last value of a text field; invalid UTF-8 is replaced. Raises EventMalformed."""
        return self.content(number).decode(errors="replace")

    def views(self, number: int) -> list[memoryview]:
        """Return all values of a repeated field with a length. Raises EventMalformed."""
        values = self._values.get(number, [])
        views = [value for value in values if isinstance(value, memoryview)]
        if len(views) < len(values):
            raise EventMalformed(f"field {number} of a message has no length")
        return views

    def message(self, number: int) -> "Message":
        """Return the last value of a message field; an empty message if it is missing."""
        return Message(self.view(number))

    def messages(self, number: int) -> list["Message"]:
        """Return all values of a repeated message field."""
        return [Message(view) for view in self.views(number)]


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at, end = 0, len(message)
    while at < end:
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise EventMalformed("a message has a field 0")
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        if size is None:
            raise EventMalformed(f"a message has a field {number} of wire type {kind}")
        if at + size > end:
            raise EventMalformed(f"field {number} of a message ends {at + size - end} bytes after it")
        yield number, message[at : at + size]
        at += size


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, at
        shift += 7
    raise EventMalformed("a message ends inside an integer, or has one of more than 64 bits")


# --- Binlogs --------------------------------------------------------------------------------


class BinlogKind(IntEnum):
    """What a binlog says about its transaction."""

    PREWRITE = 0
    COMMIT = 1
    ROLLBACK = 2
    PRE_DDL = 3
    POST_DDL = 4


@dataclass(frozen=True)
class BinlogHead:
    """The fields of a binlog that say which transaction it belongs to."""

    kind: BinlogKind
    start_ts: int
    commit_ts: int
    ddl_job_id: int = 0

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Self:
        """Read a binlog's head. Raises EventMalformed if the payload is no binlog."""
        ((kind, start_ts, commit_ts, ddl_job_id),) = tidb_heads([payload])
        return cls(BinlogKind(kind), start_ts, commit_ts, ddl_job_id)

    @property
    def is_fake(self) -> bool:
        """Whether it only says how far its Pump is."""
        return self.kind is BinlogKind.ROLLBACK and self.start_ts == self.commit_ts


def encode_binlog(kind: BinlogKind, start_ts: int, commit_ts: int) -> bytes:
    """Return a binlog without content: a commit, a rollback (commit 0), or a fake (start equals commit)."""
    return encode((1, int(kind)), (2, start_ts), (3, commit_ts), (7, 0), (8, 0))


# --- Pump and Cistern -----------------------------------------------------------------------

WRITE_BINLOG = "/binlog.Pump/WriteBinlog"
PULL_BINLOGS = "/binlog.Pump/PullBinlogs"
NOTIFY = "/binlog.Cistern/Notify"


def write_binlog_request(cluster_id: int, payload: bytes) -> bytes:
    """Return a WriteBinlogReq."""
    return encode((1, cluster_id), (2, payload))


def read_write_binlog_request(request: bytes) -> tuple[int, memoryview]:
    """Return the cluster id and the payload of a WriteBinlogReq, without a copy. Raises EventMalformed."""
    fields = Message(request)
    return fields.unsigned(1), fields.view(2)


def write_binlog_response(error: str = "") -> bytes:
    """Return a WriteBinlogResp; without an error the binlog was accepted."""
    return encode((1, error)) if error else b""


def pull_binlogs_request(cluster_id: int, after_ts: int) -> bytes:
    """Return a PullBinlogReq for everything with a commit timestamp above `after_ts`."""
    return encode((1, cluster_id), (2, encode((2, after_ts))))


def read_pull_binlogs_request(request: bytes) -> tuple[int, int]:
    """Return the cluster id and the exclusive start of a PullBinlogReq. Raises EventMalformed."""
    fields = Message(request)
    return fields.unsigned(1), fields.message(2).signed(2)


def pull_binlogs_response(commit_ts: int, payload: bytes) -> bytes:
    """Return a PullBinlogResp with one binlog."""
    # Go's encoder writes the empty `meta`.
    return encode((1, encode((1, encode((2, commit_ts))), (2, payload), (4, b""))))


def read_pull_binlogs_response(response: bytes) -> bytes:
    """Return the payload of a PullBinlogResp. Raises EventMalformed."""
    return Message(response).message(1).content(2)


# --- PD -------------------------------------------------------------------------------------

GET_MEMBERS = "/pdpb.PD/GetMembers"
TSO = "/pdpb.PD/Tso"
GET_REGION = "/pdpb.PD/GetRegion"
GET_STORE = "/pdpb.PD/GetStore"

# The physical part of a timestamp is in milliseconds; the logical part has this many bits.
LOGICAL_BITS = 18


def physical_us(timestamp: int) -> int:
    """Return the time of a cluster timestamp, in microseconds UTC since 1970."""
    return (timestamp >> LOGICAL_BITS) * 1000


@dataclass(frozen=True)
class Members:
    """The members of PD: the cluster's id, the leader's URLs, and all members' URLs."""

    cluster_id: int
    leader_urls: tuple[str, ...]
    urls: tuple[str, ...]

    @classmethod
    def decode(cls, response: bytes) -> Self:
        """Read a GetMembersResponse. Raises EventMalformed."""
        fields = Message(response)

        def urls_of(member: Message) -> tuple[str, ...]:
            return tuple(bytes(url).decode(errors="replace") for url in member.views(4))

        return cls(
            fields.message(1).unsigned(1),
            urls_of(fields.message(3)),
            tuple(url for member in fields.messages(2) for url in urls_of(member)),
        )


def pd_header(cluster_id: int) -> tuple[int, bytes]:
    """Return the header field of a request to PD."""
    return 1, encode((1, cluster_id))


def pd_error(response: Message) -> str:
    """Return the error in the header of a PD response, "" if there is none."""
    header = response.message(1)
    return header.message(2).text(2) or "an error without text" if header.has(2) else ""


def timestamp_of(response: Message) -> int:
    """Return the timestamp of a TsoResponse."""
    timestamp = response.message(3)
    return timestamp.unsigned(1) << LOGICAL_BITS | timestamp.unsigned(2)


@dataclass(frozen=True)
class Region:
    """The region that has a key, and the store of its leader. The epoch and the peer are kept encoded."""

    id: int
    epoch: bytes
    leader: bytes
    store_id: int
    end_key: bytes = b""

    @property
    def context(self) -> bytes:
        """The context of a request to the region's store."""
        return encode((1, self.id), (2, self.epoch), (3, self.leader))

    @classmethod
    def of(cls, response: Message) -> Self | None:
        """Read a GetRegionResponse; None if PD knows no such region or no leader of it now."""
        region, leader = response.message(2), response.message(3)
        if not region.unsigned(1) or not leader.unsigned(2):
            return None
        return cls(
            region.unsigned(1), region.content(4), response.content(3), leader.unsigned(2), region.content(3)
        )


# --- TiKV -----------------------------------------------------------------------------------

CHECK_TXN_STATUS = "/tikvpb.Tikv/KvCheckTxnStatus"
SCAN = "/tikvpb.Tikv/KvScan"


def check_txn_status_request(
    region: Region, primary_key: bytes, start_ts: int, current_ts: int, roll_back: bool
) -> bytes:
    """Return a CheckTxnStatusRequest.

    With `current_ts` 0 no lock expires, and without `roll_back` nothing is written, so the request changes
    nothing in the cluster.
    """
    numbers = ((3, start_ts), (4, 0), (5, current_ts), (6, int(roll_back)))
    return encode((1, region.context), (2, primary_key), *numbers)


def scan_request(
    region: Region, start: bytes, end: bytes, limit: int, version: int, *, reverse: bool
) -> bytes:
    """Return a ScanRequest for [start, end); in reverse order the range is named from its end."""
    first, last = (end, start) if reverse else (start, end)
    numbers = ((3, limit), (4, version), (6, int(reverse)))
    return encode((1, region.context), (2, first), *numbers, (7, last))


# --- etcd -----------------------------------------------------------------------------------

ETCD_RANGE = "/etcdserverpb.KV/Range"
ETCD_TXN = "/etcdserverpb.KV/Txn"

_EQUAL, _GREATER = 0, 1
_MOD_REVISION = 2


def etcd_prefix_request(prefix: str) -> bytes:
    """Return a RangeRequest for all keys below a prefix that ends in a slash."""
    start = prefix.encode()
    return encode((1, start), (2, start[:-1] + bytes([start[-1] + 1])))


def etcd_key_request(key: str) -> bytes:
    """Return a RangeRequest for one key."""
    return encode((1, key))


def etcd_key_values(response: bytes) -> list[tuple[str, bytes]]:
    """Return the keys and values of a RangeResponse. Raises EventMalformed."""
    return [(pair.text(1), pair.content(5)) for pair in Message(response).messages(2)]


def etcd_revision(response: bytes) -> int:
    """Return the revision of the only key of a RangeResponse, 0 without one. Raises EventMalformed."""
    return sum(pair.unsigned(3) for pair in Message(response).messages(2))


def etcd_put_request(key: str, value: bytes, *, exists: bool) -> bytes:
    """Return a TxnRequest that puts a value if the key exists, or if it does not."""
    return _put_if(key, value, _GREATER if exists else _EQUAL, 0)


def etcd_replace_request(key: str, value: bytes, revision: int) -> bytes:
    """Return a TxnRequest that puts a value if the key is unchanged since a revision; 0: if it is missing."""
    return _put_if(key, value, _EQUAL, revision)


def _put_if(key: str, value: bytes, comparison: int, revision: int) -> bytes:
    compare = encode((1, comparison), (2, _MOD_REVISION), (3, key), (6, revision))
    put = encode((2, encode((1, key), (2, value))))
    return encode((1, compare), (2, put))


def etcd_txn_succeeded(response: bytes) -> bool:
    """Return whether the comparison of a TxnRequest held. Raises EventMalformed."""
    return bool(Message(response).unsigned(2))
