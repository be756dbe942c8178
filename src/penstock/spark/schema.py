# SPDX-License-Identifier: Apache-2.0
"""The columns of a read: those of the table's newest definition, or those of the envelope.

The Arrow schema determines the Spark schema, whose types and nullability are chosen so that Spark accepts the
batches unchanged.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock import _native
from penstock.errors import OptionInvalid, SchemaUnknown
from penstock.limits import OFFSET_MAX
from penstock.model import Column, ServerAddress, TableName
from penstock.schema.history import SchemaHistory
from penstock.source.bounds import Bounds
from penstock.source.decoding import RangeDecoding
from penstock.source.reading import SYSTEM_COLUMNS
from penstock.source.source import Source

# In Spark 4.0 and 4.1, `to_arrow_schema` has no parameter `timezone` and always uses UTC.
_UTC: dict[str, Any] = (
    {"timezone": "UTC"} if "timezone" in inspect.signature(to_arrow_schema).parameters else {}
)


@dataclass(frozen=True)
class TableShape:
    """The columns that a typed read declares, and the server family that their types come from. Can be
    pickled.
    """

    name: TableName
    columns: tuple[Column, ...]
    mariadb: bool

    def arrow(self, wanted: tuple[str, ...] | None = None) -> pyarrow.Schema:
        """Return the Arrow schema of typed batches. Raises OptionInvalid for an unknown column."""
        known_names = [column.name for column in self.columns]
        for name in wanted or ():
            if name not in known_names and name not in SYSTEM_COLUMNS:
                raise OptionInvalid(
                    f"{self.name} has no column {name!r}",
                    hint=f"It has {', '.join(known_names)}, and {', '.join(SYSTEM_COLUMNS)}",
                )
        columns = [
            (column.name, column.type_text, column.charset, column.nullable) for column in self.columns
        ]
        chosen = None if wanted is None else list(wanted)
        return pyarrow.schema(_native.arrow_schema(columns, mariadb=self.mariadb, wanted=chosen))


def envelope_arrow() -> pyarrow.Schema:
    """Return the Arrow schema of envelope batches."""
    return pyarrow.schema(_native.envelope_schema())


def spark_schema(arrow: pyarrow.Schema) -> StructType:
    """Return the Spark schema with which Spark accepts batches that have an Arrow schema."""
    schema = from_arrow_schema(arrow, prefer_timestamp_ntz=True)
    assert to_arrow_schema(schema, **_UTC).equals(arrow), f"Spark would not take {arrow}"
    return schema


def newest_on_server(address: ServerAddress, name: TableName) -> TableShape:
    """Return a table's current definition from the server's information_schema. Raises SchemaUnknown."""
    # Imported here, because a read of files does not need a client for servers.
    from penstock.mysql.connection import MARIADB, READING_SECONDS_MAX, connect
    from penstock.schema.reader import read_table

    with connect(address, READING_SECONDS_MAX) as connection:
        definition = read_table(connection, name)
        mariadb = connection.identity().flavor == MARIADB
    if definition is None:
        raise SchemaUnknown(
            f"{address} has no table {name}, or this account may not see it",
            hint=f"GRANT SELECT ON {name.sql} TO the account, or name another table",
        )
    return TableShape(name, definition.schema.columns, mariadb)


def newest_kept(source: Source, bounds: Bounds, name: TableName) -> TableShape | None:
    """Return a table's definition at the end of the read, according to the schemas stored in the log; None if
    there is no such definition.
    """
    if not source.options.is_kept:
        return None
    try:
        history = source.schema_history(bounds.end or source.head(), name)
    except SchemaUnknown:
        return None
    if history is None or history.needs_reread(name):
        return None
    schema = history.schema(name.database, name.table)
    return TableShape(name, schema.columns, history.mariadb) if schema is not None else None


def newest_in_log(
    source: Source, bounds: Bounds, name: TableName, history: SchemaHistory | None
) -> TableShape:
    """Return a table's newest definition in the log, otherwise that of the schema history.

    Scans event headers and table maps from the last file backwards, and stops at the first file that has the
    table. `history` has every statement of the log. Raises SchemaUnknown.
    """
    for byte_range in reversed(source.split(bounds.start, bounds.end, range_bytes=OFFSET_MAX)):
        decoding = RangeDecoding(source, byte_range, emit="typed", verify_checksum=False)
        shape: TableShape | None = None
        for state in decoding.states(drop_open=True):
            if state == "statement":
                decoding.decoder.take_statement()
                continue
            request = decoding.decoder.table_request()
            decoding.decoder.answer_table(None)
            if TableName(request.database, request.table) == name:
                mariadb = decoding.decoder.mariadb
                columns = (
                    tuple(Column(*fields) for fields in request.columns)
                    if request.complete
                    else _known_columns(history, name, request.position)
                )
                shape = TableShape(name, columns, mariadb)
        if shape is not None:
            return shape
    table_schema = history.schema(name.database, name.table) if history is not None else None
    if table_schema is None:
        raise SchemaUnknown(
            f"the log has no change of {name}",
            hint="Check the name with: penstock inspect FILE, or give its definition with schemas",
        )
    return TableShape(name, table_schema.columns, _is_mariadb(source))


def _known_columns(history: SchemaHistory | None, name: TableName, position: str) -> tuple[Column, ...]:
    table_schema = history.schema(name.database, name.table) if history is not None else None
    if table_schema is None:
        raise SchemaUnknown(
            f"the log does not name the columns of {name}",
            position=position,
            hint="Give the tables' definitions: option schemas, a file of CREATE TABLE statements",
        )
    return table_schema.columns


def _is_mariadb(source: Source) -> bool:
    """Determine the server family from the first bytes of a log."""
    first = source.earliest()
    decoding = RangeDecoding(source, source.split(first, None)[0], emit="transactions")
    for state in decoding.states(drop_open=True):
        if state == "statement":
            decoding.decoder.take_statement()
        break
    return bool(decoding.decoder.mariadb)
