# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of TiDB-Binlog, PD, etcd and TiKV, limited to the fields that Penstock uses.

The field numbers are those of `binlog.proto` and `pump.proto` (pingcap/tipb), `pdpb`, `metapb` and `kvrpcpb`
(pingcap/kvproto), and etcd's `rpc.proto`. A `Binlog` always has its required integers, also where they are
0, because Go's encoder writes them.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from penstock._native import Chunk, tidb_heads, tidb_write_request
from penstock.protobuf import Message, encode

# --- Binlogs --------------------------------------------------------------------------------


class BinlogKind(IntEnum):
    """What a binlog contains about its transaction."""

    PREWRITE = 0
    COMMIT = 1
    ROLLBACK = 2
    PRE_DDL = 3
    POST_DDL = 4


@dataclass(frozen=True)
class BinlogHead:
    """The fields of a binlog that identify its transaction."""

    kind: BinlogKind
    start_ts: int
    commit_ts: int
    ddl_job_id: int = 0

    @classmethod
    def decode(cls, payload: bytes | memoryview) -> Self:
        """Read a binlog's head. Raises EventMalformed if the payload is not a binlog."""
        ((kind, start_ts, commit_ts, ddl_job_id),) = tidb_heads([payload])
        return cls(BinlogKind(kind), start_ts, commit_ts, ddl_job_id)

    @property
    def is_fake(self) -> bool:
        """Whether the binlog only shows how far its Pump has advanced."""
        return self.kind is BinlogKind.ROLLBACK and self.start_ts == self.commit_ts


def encode_binlog(kind: BinlogKind, start_ts: int, commit_ts: int) -> bytes:
    """Return a binlog without content: a commit, a rollback (commit 0), or a fake (start equals commit)."""
    return encode((1, int(kind)), (2, start_ts), (3, commit_ts), (7, 0), (8, 0))


# --- Pump and Cistern -----------------------------------------------------------------------

WRITE_BINLOG = "/binlog.Pump/WriteBinlog"
PULL_BINLOGS = "/binlog.Pump/PullBinlogs"
NOTIFY = "/binlog.Cistern/Notify"


def read_write_binlog_request(request: bytes | Chunk) -> tuple[int, memoryview]:
    """Return the cluster id and the payload of a WriteBinlogReq, without a copy. Raises EventMalformed."""
    cluster_id, start, end = tidb_write_request(request)
    return cluster_id, memoryview(request)[start:end]


def pull_binlogs_request(cluster_id: int, after_ts: int) -> bytes:
    """Return a PullBinlogReq for everything with a commit timestamp above `after_ts`."""
    return encode((1, cluster_id), (2, encode((2, after_ts))))


def read_pull_binlogs_request(request: bytes | Chunk) -> tuple[int, int]:
    """Return the cluster id and the exclusive start of a PullBinlogReq. Raises EventMalformed."""
    fields = Message(memoryview(request))
    return fields.unsigned(1), fields.message(2).signed(2)


def pull_binlogs_response(commit_ts: int, payload: bytes) -> bytes:
    """Return a PullBinlogResp with one binlog."""
    # Write the empty `meta`, as Go's encoder does.
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
    """The members of PD: the id of the cluster, the URLs of the leader, and the URLs of all members."""

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
    """The region that contains a key, and the store that holds the region's leader. The epoch and the peer
    stay encoded.
    """

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
        """Read a GetRegionResponse; None if PD currently knows no such region or no leader for it."""
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
    """Return a ScanRequest for [start, end). In reverse order, the request starts with the end of the
    range.
    """
    first, last = (end, start) if reverse else (start, end)
    numbers = ((3, limit), (4, version), (6, int(reverse)))
    return encode((1, region.context), (2, first), *numbers, (7, last))


# --- etcd -----------------------------------------------------------------------------------

ETCD_RANGE = "/etcdserverpb.KV/Range"
ETCD_TXN = "/etcdserverpb.KV/Txn"

_EQUAL, _GREATER = 0, 1
_MOD_REVISION = 2


def etcd_prefix_request(prefix: str) -> bytes:
    """Return a RangeRequest for the keys with a prefix."""
    start = prefix.encode()
    return encode((1, start), (2, start[:-1] + bytes([start[-1] + 1])))


def etcd_key_request(key: str) -> bytes:
    """Return a RangeRequest for one key."""
    return encode((1, key))


def etcd_key_values(response: bytes) -> list[tuple[str, bytes]]:
    """Return the keys and values of a RangeResponse. Raises EventMalformed."""
    return [(pair.text(1), pair.content(5)) for pair in Message(response).messages(2)]


def etcd_revision(response: bytes) -> int:
    """Return the revision of the only key of a RangeResponse, 0 if there is no key. Raises EventMalformed."""
    return sum(pair.unsigned(3) for pair in Message(response).messages(2))


def etcd_put_request(key: str, value: bytes, *, exists: bool) -> bytes:
    """Return a TxnRequest that puts a value, on the condition that the key exists or that it is missing."""
    return _put_if(key, value, _GREATER if exists else _EQUAL, 0)


def etcd_replace_request(key: str, value: bytes, revision: int) -> bytes:
    """Return a TxnRequest that puts a value, on the condition that the key is unchanged since a revision.
    With the revision 0, the key must be missing.
    """
    return _put_if(key, value, _EQUAL, revision)


def _put_if(key: str, value: bytes, comparison: int, revision: int) -> bytes:
    compare = encode((1, comparison), (2, _MOD_REVISION), (3, key), (6, revision))
    put = encode((2, encode((1, key), (2, value))))
    return encode((1, compare), (2, put))


def etcd_txn_succeeded(response: bytes) -> bool:
    """Return whether the comparison of a TxnRequest held. Raises EventMalformed."""
    return bool(Message(response).unsigned(2))
