# SPDX-License-Identifier: Apache-2.0
"""Every error Penstock raises, in one tree, split by who must act.

    PenstockError
    ├── OperatorError            fix something, then start again
    │   ├── OptionInvalid            an option, setting or argument is wrong or unknown
    │   ├── DependencyMissing        an optional package is not installed
    │   ├── AuthenticationFailed     the server refused the credentials
    │   ├── TlsFailed                no encrypted connection that both sides accept
    │   ├── PrivilegeMissing         the account lacks a privilege
    │   ├── ServerUnsupported        the server's settings hide or break changes
    │   ├── ServerChanged            another server answers than the one the position names
    │   ├── PositionPurged           the position is no longer in the server's logs
    │   ├── PositionInvalid          the position names no place in this source
    │   ├── SourceMissing            no such file, folder or server
    │   ├── SchemaInvalid            a schema file, or a declared schema, cannot be used
    │   ├── LogLocked                another process writes this log
    │   ├── AccessDenied             the account is known, and may not do this
    │   └── DiskFailed               the operating system refused a read, a write or a sync
    ├── TransientError           we retry, within bounds
    │   ├── ConnectionLost           the server went away
    │   │   └── AnswerTimedOut           the server accepts connections, and does not answer
    │   ├── ServerBusy               the server refuses for now
    │   ├── DumpReplaced             another replica took our server id
    │   ├── ServerBehind             the server lacks transactions that the log has
    │   ├── SchemaPending            a table's definition is still being read from its server
    │   ├── LogFull                  there is no room to keep more of the log
    │   ├── CoordinationLost         the place where leases and checkpoints are kept does not answer
    │   ├── VersionConflict          a record was changed by somebody else meanwhile
    │   ├── LeaseLost                another process holds what we held
    │   └── QuotaReached             an account has used what it may use for now
    └── StreamError              stop at this position
        ├── MagicInvalid             not a binlog file
        ├── FileTruncated            the bytes end inside an event or a transaction
        ├── ChecksumMismatch         an event's CRC32 does not match
        ├── EventMalformed           an event contradicts its own format
        ├── EventUnknown             an event type that is not understood
        ├── EventUnsupported         an event that is understood, but cannot be turned into changes
        ├── SequenceGap              files or events are missing between two positions
        ├── RangesDisagree           two ranges of one plan do not meet at an event
        ├── LogEncrypted             the file is encrypted at rest
        ├── IncidentLogged           the server logged that changes may be lost
        ├── TableMapMissing          rows arrive for a table that was not announced
        ├── SchemaUnknown            no schema for a table at its position
        ├── SchemaMismatch           the schema at hand does not fit the table map
        ├── SchemaChanged            the table changed under a stream with a declared schema
        ├── StatementLogged          a change was logged as a statement, not as rows
        ├── TransactionRolledBack    rows were logged for a transaction that did not commit
        ├── PreparedMissing          an XA commit whose rows cannot be reached
        ├── ValueMalformed           a value contradicts its type
        ├── StepFailed               a step of a pipeline cannot work on a row
        ├── LimitExceeded            one of the bounds in `limits` would be passed
        ├── LogDamaged               a file of the kept log is not what was written
        └── LogTorn                  bytes that the kept log had made durable are gone

A bug in Penstock is an `AssertionError` and is never caught.
"""

from typing import Any


class PenstockError(Exception):
    """An error with a place and a way out.

    `position` is where it happened, as text (`mysql-bin.000003:1542`), or None
    where there is no place. `hint` names the command or setting that helps.
    The class name is the stable code: callers choose by class, never by text.
    Instances pickle, so an executor's error reaches the driver whole.
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
    """Somebody must fix something, then start again."""


class OptionInvalid(OperatorError):
    """An option, setting or argument is wrong or unknown."""


class DependencyMissing(OperatorError):
    """An optional package is not installed."""


class AuthenticationFailed(OperatorError):
    """The server refused the credentials."""


class TlsFailed(OperatorError):
    """No encrypted connection to the server that both sides accept."""


class PrivilegeMissing(OperatorError):
    """The account lacks a privilege."""


class ServerUnsupported(OperatorError):
    """The server's settings hide or break changes."""


class ServerChanged(OperatorError):
    """Another server answers than the one the position names."""


class PositionPurged(OperatorError):
    """The position is no longer in the server's logs."""


class PositionInvalid(OperatorError):
    """The position names no place in this source."""


class SourceMissing(OperatorError):
    """There is no such file, folder or server."""


class SchemaInvalid(OperatorError):
    """A schema file, or a declared schema, cannot be used."""


class LogLocked(OperatorError):
    """Another process writes this log."""


class AccessDenied(OperatorError):
    """The account is known, and may not do this."""


class DiskFailed(OperatorError):
    """The operating system refused a read, a write or a sync."""


class TransientError(PenstockError):
    """Trying again may succeed; we do so within bounds."""


class ConnectionLost(TransientError):
    """The server went away."""


class AnswerTimedOut(ConnectionLost):
    """The server accepted the connection but does not answer: it hangs, or the network drops packets."""


class ServerBusy(TransientError):
    """The server refuses for now."""


class DumpReplaced(TransientError):
    """Another replica connected with our server id and took the stream."""


class ServerBehind(TransientError):
    """The server lacks transactions that the log has; `missing` names them, "" where that is not known."""

    def __init__(
        self, message: str, *, position: str | None = None, hint: str | None = None, missing: str = ""
    ) -> None:
        super().__init__(message, position=position, hint=hint)
        self.missing = missing


class SchemaPending(TransientError):
    """A table's definition is still being read from its server."""


class LogFull(TransientError):
    """There is no room to keep more of the log."""


class CoordinationLost(TransientError):
    """The place where leases and checkpoints are kept does not answer."""


class VersionConflict(TransientError):
    """A record was changed by somebody else since it was read."""


class LeaseLost(TransientError):
    """Another process holds what we held, so nothing may be written in its name."""


class QuotaReached(TransientError):
    """An account has used what it may use for now."""


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
    """An event type is not understood and is not marked ignorable."""


class EventUnsupported(StreamError):
    """An event is understood but cannot be turned into changes."""


class SequenceGap(StreamError):
    """Files or events are missing between two positions."""


class RangesDisagree(StreamError):
    """Two ranges of one plan do not meet at an event."""


class LogEncrypted(StreamError):
    """The file is encrypted at rest."""


class IncidentLogged(StreamError):
    """The server logged that changes may have been lost."""


class TableMapMissing(StreamError):
    """Rows arrive for a table that was not announced."""


class SchemaUnknown(StreamError):
    """There is no schema for a table at its position."""


class SchemaMismatch(StreamError):
    """The schema at hand does not fit the table map."""


class SchemaChanged(StreamError):
    """The table changed under a stream whose schema was declared."""


class StatementLogged(StreamError):
    """A change was logged as a statement, so its rows are not in the log."""


class TransactionRolledBack(StreamError):
    """Rows were logged for a transaction that did not commit."""


class PreparedMissing(StreamError):
    """An XA transaction is committed, and the events that prepared it cannot be reached."""


class ValueMalformed(StreamError):
    """A value contradicts its type."""


class StepFailed(StreamError):
    """A step of a pipeline cannot work on a row."""


class LimitExceeded(StreamError):
    """One of the bounds in `penstock.limits` would be passed."""


class LogDamaged(StreamError):
    """A file of the kept log is not what was written."""


class LogTorn(StreamError):
    """Bytes that the kept log had made durable are gone."""
