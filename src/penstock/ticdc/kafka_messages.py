# SPDX-License-Identifier: Apache-2.0
"""TiCDC's canal-json messages in Kafka: rows, statements and watermarks.

There are no schema files in Kafka, so a table's definition is derived from its messages. `mysqlType` contains
the type of each column, including the length if the changefeed sets `content-compatible`. `pkNames` contains
the primary key. Other constraints are unknown, so every column outside the primary key is assumed to be
nullable. Source: "TiCDC Canal-JSON Protocol" in TiDB's documentation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from zoneinfo import ZoneInfo

from penstock.errors import EventMalformed, EventUnsupported
from penstock.ticdc.canal_json import CanalJsonRows, Message, commit_ts_of, parse_message
from penstock.ticdc.row_changes import RowChange
from penstock.ticdc.schema_files import SinkColumn, TableSchema, type_text_of

_WATERMARK = "TIDB_WATERMARK"
_TYPE = re.compile(r"([a-z0-9_]+)(?:\((.*)\))?((?: unsigned)?)(?: zerofill)?", re.ASCII | re.IGNORECASE)
# These types need their parameters. Without them, the types have a different range than the column.
_PARAMETERS_NEEDED = {"DECIMAL", "CHAR", "VARCHAR", "VAR_STRING", "BINARY", "VARBINARY", "BIT"}
_TIMES = {"DATETIME", "TIMESTAMP", "TIME"}


@dataclass(frozen=True)
class Watermark:
    """Reports that all changes with a lower commit timestamp were sent to the partition before this
    message.
    """

    commit_ts: int


@dataclass(frozen=True)
class SinkStatement:
    """A statement with its commit timestamp."""

    commit_ts: int
    schema: TableSchema


@dataclass(frozen=True)
class SinkRow:
    """A changed row of a table."""

    schema: TableSchema
    row: RowChange


class KafkaMessages:
    """Reads the messages of all tables."""

    def __init__(self, zone: ZoneInfo | None) -> None:
        self._zone = zone
        self._tables: dict[Any, tuple[TableSchema, CanalJsonRows]] = {}
        # The number of columns of each table's last row that was not deleted.
        self._widths: dict[tuple[str, str], int] = {}

    def read(self, content: bytes) -> Watermark | SinkStatement | SinkRow:
        """Read a message.

        Raises EventMalformed for a message in an unexpected format, EventUnsupported for a message that lacks
        its commit timestamp or columns, ValueMalformed, and OptionInvalid for a TIMESTAMP in an unknown zone.
        """
        message = parse_message(content)
        if message.get("type") == _WATERMARK:
            return Watermark(_watermark_ts(message))
        database, table = message.get("database"), message.get("table")
        if not isinstance(database, str) or not isinstance(table, str):
            raise EventMalformed(f"a message has no database and table: {content[:80]!r}")
        if message.get("isDdl") is True:
            query = message.get("sql")
            if not isinstance(query, str) or not query:
                raise EventMalformed(f"a message of a statement has the text {query!r}")
            commit_ts = commit_ts_of(message)
            return SinkStatement(commit_ts, TableSchema(database, table, commit_ts, query, ()))
        schema, rows = self._table_of(database, table, message)
        self._refuse_key_only(schema, message)
        return SinkRow(schema, rows.read_row(message))

    def _table_of(self, database: str, table: str, message: Message) -> tuple[TableSchema, CanalJsonRows]:
        types, key = message.get("mysqlType"), message.get("pkNames") or []
        if not isinstance(types, dict) or not isinstance(key, list):
            raise EventMalformed(f"a message of {database}.{table} has no mysqlType and pkNames")
        # Some versions of TiCDC write the columns of each message in another order, so the order does not
        # identify a definition.
        identity = (database, table, frozenset(types.items()), tuple(key))
        known = self._tables.get(identity)
        if known is None:
            columns = _columns(types, key)
            schema = TableSchema(database, table, 0, "", columns)
            known = self._tables[identity] = schema, CanalJsonRows(database, table, columns, self._zone)
        return known

    def _refuse_key_only(self, schema: TableSchema, message: Message) -> None:
        """Refuse a deleted row that has only the columns of its key."""
        name = schema.database, schema.table
        if message.get("type") != "DELETE":
            self._widths[name] = len(schema.columns)
        elif len(schema.columns) < self._widths.get(name, 0) and all(
            column.is_key for column in schema.columns
        ):
            raise EventUnsupported(
                f"a deleted row of {schema.database}.{schema.table} has the columns of its key only",
                hint="Set delete-only-output-handle-key-columns to false in the changefeed",
            )


def _watermark_ts(message: Message) -> int:
    extension = message.get("_tidb")
    commit_ts = extension.get("watermarkTs") if isinstance(extension, dict) else None
    if not isinstance(commit_ts, int) or not 0 < commit_ts < 1 << 63:
        raise EventMalformed(f"a watermark has the extension {extension!r}")
    return commit_ts


def _columns(types: Mapping[str, Any], key: list[Any]) -> tuple[SinkColumn, ...]:
    if unknown := [name for name in key if name not in types]:
        raise EventMalformed(f"the key column {unknown[0]!r} has no type")
    return tuple(_column(name, str(text), is_key=name in key) for name, text in types.items())


def _column(name: str, text: str, *, is_key: bool) -> SinkColumn:
    match = _TYPE.fullmatch(text)
    if match is None:
        raise EventUnsupported(f"the column `{name}` has the type {text[:80]!r}, which is not known")
    kind, parameters, unsigned = match[1].upper(), match[2], match[3]
    if kind in _PARAMETERS_NEEDED and parameters is None:
        raise EventUnsupported(
            f"the column `{name}` has the type {text}, without its length",
            hint="Set content-compatible=true in the sink URI of the changefeed",
        )
    precision, _, scale = (parameters or "").partition(",")
    if kind in _TIMES:
        precision, scale = "", precision
    type_text = type_text_of(
        name, kind, precision.strip() or None, scale.strip() or None, is_unsigned=bool(unsigned)
    )
    return SinkColumn(name, kind, type_text, is_nullable=not is_key, is_key=is_key)
