# SPDX-License-Identifier: Apache-2.0
"""The merged log: binlog files that Penstock generates and appends to an instance's log as if a server had
sent them.

The files are `tidb-binlog.000001`, `tidb-binlog.000002` and so on. Each ends with a rotation at the first
transaction after 1 GiB. The content depends only on the transactions and their positions, so a restarted
drainer continues exactly at the log's end.
"""

import struct
from dataclasses import dataclass

from penstock._native import TidbTranscoder, tidb_file_head
from penstock.capture.generated_log import (
    EVENT_HEADER,
    SERVER_ID,
    GeneratedLog,
    begin_generated_log,
    scan_events,
)
from penstock.capture.receive import Receiver
from penstock.errors import LogDamaged
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.mysql.replica import FIRST_EVENT_OFFSET
from penstock.tidb.messages import BinlogKind, encode_binlog, physical_us

STEM = "tidb-binlog"
FLAVOR = "mysql"
VERSION = "8.0.36-TiDB"

# The commit and start timestamps in the event of a commit.
_COMMIT = struct.Struct("<QQQq")
_COMMIT_BYTES = EVENT_HEADER.size + _COMMIT.size
_ANONYMOUS_GTID_CODE = 34


def _commit_code() -> int:
    """Return the event type of a commit, as found in a transaction that the kernel writes."""
    transcoder = TidbTranscoder(cluster_id=0, server_id=SERVER_ID)
    payload = encode_binlog(BinlogKind.COMMIT, 1, 1)
    events = b"".join(transcoder.transaction([payload], FIRST_EVENT_OFFSET))
    _, first_size = EVENT_HEADER.unpack_from(events)
    code: int = EVENT_HEADER.unpack_from(events, first_size)[0]
    return code


_COMMIT_CODE = _commit_code()


def begin_merged_log(log: Log, server_key: str) -> None:
    """Begin the only epoch of a new log that Penstock writes itself. Raises DiskFailed, LogFull."""
    begin_generated_log(log, STEM, server_key, FLAVOR, VERSION)


def server_key_of(source: int | str) -> str:
    """Return the key that identifies a cluster in epochs (its id), or TiCDC's output (its URL)."""
    return f"tidb:{source}"


class MergedLog(GeneratedLog):
    """Appends the transactions of a cluster to a log."""

    def __init__(self, log: Log, receiver: Receiver) -> None:
        """Continue at the end of the log, or begin its first file. The log's epoch must have begun
        already.
        """
        super().__init__(log, receiver, STEM, FLAVOR)

    def begin_transaction(self, commit_ts: int) -> int:
        """Prepare for the events of a transaction, in a new file if the last file is full; return its offset.

        Propagates errors from the log.
        """
        return self.begin_transaction_at(physical_us(commit_ts) // 1_000_000)

    def _file_head(self, time_s: int) -> bytes:
        return tidb_file_head(server_id=SERVER_ID, time_s=time_s)


@dataclass(frozen=True)
class MergedEnd:
    """Identifies the last transaction of a merged log."""

    commit_ts: int = 0
    start_ts: int = 0


def end_of_merged_log(log: LogReader) -> MergedEnd:
    """Return the last transaction of a log. Reads its last blocks only.

    Raises LogDamaged, including for a transaction without a commit timestamp: the drainer would log it again.
    """
    has_transaction = False
    for extent in reversed(log.extents()):
        stop = extent.end
        while stop > extent.start:
            boundary = log.boundary_before(Position(extent.epoch, extent.file, stop - 1))
            start = max(boundary, extent.start)
            commit: tuple[int, int] | None = None
            for code, event in scan_events(log, extent, start, stop, _COMMIT_BYTES):
                has_transaction |= code == _ANONYMOUS_GTID_CODE
                if code == _COMMIT_CODE:
                    commit_ts, start_ts, _, _ = _COMMIT.unpack_from(event, EVENT_HEADER.size)
                    commit = commit_ts, start_ts
            if commit is not None:
                return MergedEnd(*commit)
            if has_transaction:
                raise LogDamaged(
                    f"the last transaction of {extent.file} has no commit timestamp",
                    position=str(Position(extent.epoch, extent.file, start)),
                    hint="Begin a new log: move the folder of this one away, and read the tables again",
                )
            stop = start
    return MergedEnd()
