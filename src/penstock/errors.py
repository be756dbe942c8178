# SPDX-License-Identifier: Apache-2.0
"""Every error Penstock raises, in one tree, grouped by who must act.

    PenstockError
    ├── OperatorError            fix the cause, then start again
    │   ├── OptionInvalid            an option, setting or argument is wrong or unknown
    │   ├── DependencyMissing        an optional package is not installed
    │   ├── AuthenticationFailed     the server refused the credentials
    │   ├── TlsFailed                no TLS settings that both sides accept
    │   ├── PrivilegeMissing         the account lacks a privilege
    │   ├── ServerUnsupported        the server's settings hide or corrupt changes
    │   ├── ServerChanged            the position belongs to a different server
    │   ├── PositionPurged           the position is no longer in the server's logs
    │   ├── PositionInvalid          the position does not exist in this source
    │   ├── SourceMissing            the file, folder or server does not exist
    │   ├── SchemaInvalid            a schema file, or a declared schema, cannot be used
    │   ├── ProcessFailed            a capture process ended too often at one position
    │   ├── LogLocked                another process writes this log
    │   ├── StateOutdated            the target has later batches than the pipeline's state
    │   ├── AccessDenied             the account is not allowed to do this
    │   └── DiskFailed               the operating system refused a read, a write or a sync
    ├── TransientError           retried automatically, within limits
    │   ├── ConnectionLost           the connection to the server was lost
    │   │   └── AnswerTimedOut           the server accepts connections but does not answer
    │   ├── ServerBusy               the server rejects requests temporarily
    │   ├── DumpReplaced             another replica connected with our server_id
    │   ├── ServerBehind             the server is missing transactions that the log has
    │   ├── SchemaPending            a table's definition is still being read from its server
    │   ├── LogFull                  the disk has no room for more log
    │   ├── CoordinationLost         the coordination store does not answer
    │   ├── VersionConflict          another process changed the record
    │   ├── LeaseLost                another process took over the lease
    │   ├── CapturedElsewhere        another member of the fleet captures the instance
    │   └── QuotaReached             the account has used up its quota for now
    └── StreamError              stop at this position
        ├── MagicInvalid             not a binlog file
        ├── FileTruncated            the bytes end inside an event or a transaction
        ├── ChecksumMismatch         an event's CRC32 does not match
        ├── EventMalformed           an event contradicts its own format
        ├── EventUnknown             an unknown event type
        ├── EventUnsupported         a known event that cannot be turned into row changes
        ├── SequenceGap              files or events are missing between two positions
        ├── BinlogInconsistent       binlogs of a TiDB transaction contradict each other
        ├── RangesDisagree           two adjacent ranges do not meet at an event boundary
        ├── LogEncrypted             the file is encrypted at rest
        ├── IncidentLogged           the server logged that changes may be lost
        ├── TableMapMissing          rows refer to a table without a table map event
        ├── SchemaUnknown            no definition of the table is known at this position
        ├── SchemaMismatch           the known definition does not fit the table map
        ├── SchemaChanged            the table changed while a stream declared its schema
        ├── StatementLogged          a change was logged as a statement, not as rows
        ├── TransactionRolledBack    rows were logged for a transaction that did not commit
        ├── PreparedMissing          the rows of a committed XA transaction cannot be found
        ├── ValueMalformed           a value contradicts its type
        ├── StepFailed               a pipeline step failed on a row
        ├── LimitExceeded            a limit in `penstock.limits` would be exceeded
        ├── TransactionLate          a TiDB Pump sent a transaction after later ones were merged
        ├── LogDamaged               a file of the kept log is corrupt
        └── LogTorn                  durable bytes of the kept log are gone

A bug in Penstock is an `AssertionError` and is never caught.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class PenstockError(Exception):
    """An error with its position and a hint.

    `position` is where the error happened, as text (`mysql-bin.000003:1542`), or None if it has no position.
    `hint` names the command or setting that helps. The class name is the stable error code: callers
    distinguish errors by class, never by text. Instances can be pickled, so that an executor's error reaches
    the driver with all its fields.
    """

    def __init__(self, message: str, *, position: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.position = position
        self.hint = hint

    def __str__(self) -> str:
        place = f" (at {self.position})" if self.position else ""
        way_out = f". {self.hint}" if self.hint else ""
        return f"{self.message}{place}{way_out}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.position, self.hint)


def _rebuild(
    kind: type[PenstockError], message: str, position: str | None, hint: str | None
) -> PenstockError:
    return kind(message, position=position, hint=hint)


class OperatorError(PenstockError):
    """Fix the cause, then start again."""


class OptionInvalid(OperatorError):
    """An option, setting or argument is wrong or unknown."""


class DependencyMissing(OperatorError):
    """An optional package is not installed."""


class AuthenticationFailed(OperatorError):
    """The server refused the credentials."""


class TlsFailed(OperatorError):
    """The TLS handshake failed: no settings that both sides accept."""


class PrivilegeMissing(OperatorError):
    """The account lacks a privilege."""


class ServerUnsupported(OperatorError):
    """The server's settings hide or corrupt changes."""


class ServerChanged(OperatorError):
    """The position belongs to a different server than the one that answered."""


class PositionPurged(OperatorError):
    """The position is no longer in the server's logs."""


class PositionInvalid(OperatorError):
    """The position does not exist in this source."""


class SourceMissing(OperatorError):
    """The file, folder or server does not exist."""


class SchemaInvalid(OperatorError):
    """A schema file, or a declared schema, cannot be used."""


class ProcessFailed(OperatorError):
    """A capture process ended too often at one position and is not started again."""


class LogLocked(OperatorError):
    """Another process writes this log."""


class StateOutdated(OperatorError):
    """The target has later batches than the pipeline's state, as after the restore of a backup."""


class AccessDenied(OperatorError):
    """The account is authenticated but not allowed to do this."""


class DiskFailed(OperatorError):
    """The operating system refused a read, a write or a sync."""


class TransientError(PenstockError):
    """A retry may succeed. Penstock retries within limits."""


class ConnectionLost(TransientError):
    """The connection to the server was lost."""

    def __init__(
        self, message: str, *, position: str | None = None, hint: str | None = None, silent_seconds: float = 0
    ) -> None:
        super().__init__(message, position=position, hint=hint)
        # How long the server had sent nothing when the connection was given up.
        self.silent_seconds = silent_seconds


class AnswerTimedOut(ConnectionLost):
    """The server accepted the connection but does not answer: it hangs, or the network drops packets."""


class ServerBusy(TransientError):
    """The server rejects requests temporarily."""


class DumpReplaced(TransientError):
    """Another replica connected with our server_id and took over the stream."""


class ServerBehind(TransientError):
    """The server is missing transactions that the log has; `missing` lists them ("" if unknown)."""

    def __init__(
        self, message: str, *, position: str | None = None, hint: str | None = None, missing: str = ""
    ) -> None:
        super().__init__(message, position=position, hint=hint)
        self.missing = missing


class SchemaPending(TransientError):
    """A table's definition is still being read from its server."""


class LogFull(TransientError):
    """The disk has no room for more log."""


class CoordinationLost(TransientError):
    """The coordination store, which keeps leases and checkpoints, does not answer."""


class VersionConflict(TransientError):
    """Another process changed the record after it was read."""


class LeaseLost(TransientError):
    """Another process took over the lease, so this process must not write."""


class CapturedElsewhere(TransientError):
    """Another member of the fleet captures the instance; `address` is its host:port, None if unknown."""

    def __init__(
        self,
        message: str,
        *,
        position: str | None = None,
        hint: str | None = None,
        address: str | None = None,
    ) -> None:
        super().__init__(message, position=position, hint=hint)
        self.address = address


class QuotaReached(TransientError):
    """The account has used up its quota for now."""


class StreamError(PenstockError):
    """The log cannot be followed past this position."""


class MagicInvalid(StreamError):
    """The file is not a binlog."""


class FileTruncated(StreamError):
    """The bytes end inside an event or a transaction."""


class ChecksumMismatch(StreamError):
    """An event's CRC32 does not match its bytes."""


class EventMalformed(StreamError):
    """An event contradicts its own format."""


class EventUnknown(StreamError):
    """The event type is unknown and not marked ignorable."""


class EventUnsupported(StreamError):
    """The event is known but cannot be turned into row changes."""


class SequenceGap(StreamError):
    """Files or events are missing between two positions."""


class BinlogInconsistent(StreamError):
    """Binlogs of a TiDB transaction contradict each other, or timestamps go backwards; `reason` says how."""

    def __init__(
        self, message: str, *, position: str | None = None, hint: str | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, position=position, hint=hint)
        self.reason = reason


class RangesDisagree(StreamError):
    """Two adjacent ranges of a plan do not meet at an event boundary."""


class LogEncrypted(StreamError):
    """The file is encrypted at rest."""


class IncidentLogged(StreamError):
    """The server logged that changes may have been lost."""


class TableMapMissing(StreamError):
    """Rows refer to a table for which no table map event was logged."""


class SchemaUnknown(StreamError):
    """No definition of the table is known at this position."""


class SchemaMismatch(StreamError):
    """The known table definition does not fit the table map."""


class SchemaChanged(StreamError):
    """The table changed while a stream with a declared schema was reading it."""


class StatementLogged(StreamError):
    """A change was logged as a statement, so its rows are not in the log."""


class TransactionRolledBack(StreamError):
    """Rows were logged for a transaction that did not commit."""


class PreparedMissing(StreamError):
    """An XA transaction was committed, but its prepared events cannot be found."""


class ValueMalformed(StreamError):
    """A value contradicts its type."""


class StepFailed(StreamError):
    """A pipeline step failed on a row."""


class LimitExceeded(StreamError):
    """A limit in `penstock.limits` would be exceeded."""


class TransactionLate(StreamError):
    """A Pump of a TiDB cluster sent a transaction after later ones had been merged."""


class LogDamaged(StreamError):
    """A file of the kept log is corrupt: it differs from what was written."""


class LogTorn(StreamError):
    """Bytes that the kept log had made durable are gone."""


@contextmanager
def translate_spill_errors() -> Iterator[None]:
    """Translate the errors of files that buffer a batch's rows. Raises DiskFailed."""
    try:
        yield
    except OSError as problem:
        raise DiskFailed(
            f"rows of a batch cannot be spilled to the folder of temporary files: {problem}",
            hint="Rows that exceed the memory bound are spilled there: set TMPDIR to a larger disk",
        ) from problem
