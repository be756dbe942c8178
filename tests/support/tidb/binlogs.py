# SPDX-License-Identifier: Apache-2.0
"""Binlogs as TiDB's pump client sends them, with rows that are never decoded."""

from penstock.protobuf import encode
from penstock.tidb.messages import BinlogKind, encode_binlog


def prewrite(start_ts: int, rows: bytes = b"rows") -> bytes:
    """Return the prewrite of a transaction."""
    return encode((1, 0), (2, start_ts), (3, 0), (4, key_of(start_ts)), (5, rows), (7, 0), (8, 0))


def commit(start_ts: int, commit_ts: int) -> bytes:
    """Return the commit of a transaction."""
    return encode_binlog(BinlogKind.COMMIT, start_ts, commit_ts)


def rollback(start_ts: int) -> bytes:
    """Return the rollback of a transaction."""
    return encode_binlog(BinlogKind.ROLLBACK, start_ts, 0)


def matched(start_ts: int, commit_ts: int, rows: bytes = b"rows") -> bytes:
    """Return the commit with the prewrite's rows, as a Pump sends it to Drainers."""
    return encode((1, 1), (2, start_ts), (3, commit_ts), (4, key_of(start_ts)), (5, rows), (7, 0), (8, 0))


def key_of(start_ts: int) -> bytes:
    """Return the primary key of a transaction in TiKV."""
    return b"t\x80_r" + start_ts.to_bytes(8, "big")
