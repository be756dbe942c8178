# SPDX-License-Identifier: Apache-2.0
"""TiCDC's canal-json messages with the TiDB extension, which has the commit timestamp.

The files of the storage sink have one message in a line. Values are text: a byte of a binary value is written
as the character of ISO 8859-1, and ENUM and SET are numbers. `old` has all columns of the old row, or with
`only-output-updated-columns` only the changed columns. Source: "TiCDC Canal-JSON Protocol" in TiDB's
documentation.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any
from zoneinfo import ZoneInfo

from penstock.errors import EventMalformed, EventUnsupported, ValueMalformed
from penstock.ticdc.row_changes import Cells, Change, RowChange, check_fraction, utc_text
from penstock.ticdc.schema_files import SinkColumn

_FIELDS = {
    *("id", "database", "table", "pkNames", "isDdl", "type", "es", "ts", "sql"),
    *("sqlType", "mysqlType", "old", "data", "_tidb"),
}
_EXTENSION_FIELDS = {"commitTs", "onlyHandleKey", "claimCheckLocation", "tableId", "partitionId", "checksum"}
_CHANGES = {"INSERT": Change.INSERT, "UPDATE": Change.UPDATE, "DELETE": Change.DELETE}
_COLUMNS_SHOWN_MAX = 5
_HINT_TYPES = "Set content-compatible=true in the sink URI of a changefeed to Kafka"

Message = dict[str, Any]


class CanalJsonRows:
    """Reads Canal-JSON messages for one version of a table."""

    def __init__(
        self, database: str, table: str, columns: Sequence[SinkColumn], zone: ZoneInfo | None
    ) -> None:
        self._names = (database, table)
        self._columns = {column.name: _reader(column, zone) for column in columns}

    def read(self, content: bytes) -> tuple[list[RowChange], int]:
        """Return the rows of all complete lines, and the number of bytes that they occupy. Propagates errors
        from `read_message`.
        """
        end = content.rfind(b"\n") + 1
        return [self.read_message(line) for line in content[:end].split(b"\n")[:-1]], end

    def read_message(self, line: bytes) -> RowChange:
        """Read a message.

        Raises EventMalformed for a message in an unexpected format, EventUnsupported for a message that lacks
        its commit timestamp or columns, ValueMalformed, and OptionInvalid for a TIMESTAMP in an unknown zone.
        """
        return self.read_row(parse_message(line))

    def read_row(self, message: Message) -> RowChange:
        """Return the row of a parsed message. Propagates errors from `read_message`."""
        if (message.get("database"), message.get("table")) != self._names:
            raise EventMalformed(
                f"a message is about {message.get('database')}.{message.get('table')}, in a file of"
                f" {'.'.join(self._names)}"
            )
        change = _CHANGES.get(str(message.get("type")))
        if change is None or message.get("isDdl") is not False:
            raise EventMalformed(f"a message has the type {message.get('type')!r}")
        data, old = self._row(message, "data"), self._row(message, "old")
        if data is None or (old is not None) != (change is Change.UPDATE):
            raise EventUnsupported(
                f"a message of the type {message['type']} does not have the rows of its type",
                hint="Set enable-old-value and output-old-value in the changefeed",
            )
        commit_ts = commit_ts_of(message)
        if change is Change.INSERT:
            return RowChange(commit_ts, change, None, self._cells(data))
        if change is Change.DELETE:
            return RowChange(commit_ts, change, self._cells(data), None)
        return RowChange(commit_ts, change, self._cells(data | (old or {})), self._cells(data))

    @staticmethod
    def _row(message: dict[str, Any], field: str) -> dict[str, Any] | None:
        rows = message.get(field)
        if rows is None:
            return None
        if not isinstance(rows, list) or len(rows) != 1 or not isinstance(rows[0], dict):
            raise EventMalformed(f"{field} of a message is not one row")
        return rows[0]

    def _cells(self, row: dict[str, Any]) -> Cells:
        if row.keys() != self._columns.keys():
            lacking, surplus = (
                ", ".join(sorted(names)[:_COLUMNS_SHOWN_MAX]) or "none"
                for names in (self._columns.keys() - row.keys(), row.keys() - self._columns.keys())
            )
            raise EventUnsupported(
                f"a row of {'.'.join(self._names)} lacks columns of its schema file ({lacking}), or has other"
                f" ones ({surplus})",
                hint="Set delete-only-output-handle-key-columns to false; list virtual generated columns in"
                " ticdc.virtual_columns",
            )
        return tuple(None if row[name] is None else read(row[name]) for name, read in self._columns.items())


def parse_message(content: bytes) -> Message:
    """Parse a message. Raises EventMalformed for a message of another form."""
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as problem:
        raise EventMalformed(f"a message is not JSON: {content[:80]!r}") from problem
    if not isinstance(message, dict):
        raise EventMalformed(f"a message is not an object: {content[:80]!r}")
    if unknown := message.keys() - _FIELDS:
        raise EventMalformed(f"a message has the fields {sorted(unknown)}, which canal-json does not have")
    return message


def commit_ts_of(message: Message) -> int:
    """Return the commit timestamp of a message. Raises EventUnsupported, EventMalformed."""
    extension = message.get("_tidb")
    if not isinstance(extension, dict):
        raise EventUnsupported(
            "a message has no commit timestamp, so transactions cannot be told apart",
            hint="Set enable-tidb-extension=true in the sink URI of the changefeed",
        )
    unknown = extension.keys() - _EXTENSION_FIELDS
    if unknown or extension.get("onlyHandleKey") or extension.get("claimCheckLocation"):
        raise EventUnsupported(
            f"a message has the extension {extension}: its row is not complete, or of an unknown form",
            hint="Set large-message-handle-option to none in the changefeed",
        )
    commit_ts = extension.get("commitTs")
    if not isinstance(commit_ts, int) or not 0 < commit_ts < 1 << 63:
        raise EventMalformed(f"a message has the commit timestamp {commit_ts!r}")
    return commit_ts


def _reader(column: SinkColumn, zone: ZoneInfo | None) -> Callable[[Any], bytes]:
    """Return the function that converts a value of a column into the text to write."""
    encoding = "latin-1" if column.is_binary else "utf-8"
    has_fraction = column.fraction_digits is not None

    def read(value: Any) -> bytes:
        if not isinstance(value, str):
            raise ValueMalformed(f"the column `{column.name}` has {value!r}, which is not text")
        if has_fraction:
            check_fraction(value, column, _HINT_TYPES)
        text = utc_text(value, zone, column) if column.kind == "TIMESTAMP" else value
        try:
            return text.encode(encoding)
        except UnicodeEncodeError as problem:
            raise ValueMalformed(
                f"the column `{column.name}` has a value that is not {encoding}"
            ) from problem

    def refuse_number(value: Any) -> bytes:
        raise EventUnsupported(
            f"the column `{column.name}` is {column.kind}: canal-json has the numbers of its members only",
            hint="Use the csv protocol for the table, which has their names",
        )

    return refuse_number if column.kind in ("ENUM", "SET") else read
