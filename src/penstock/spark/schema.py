# SPDX-License-Identifier: Apache-2.0
"""Which columns a read has: from the newest definition of its table, or those of the envelope.

Arrow decides and Spark follows: its type for every Arrow field, and its nullability, are those under which
Spark takes the batches as they are.
"""

from dataclasses import dataclass

import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType

from penstock import _native
from penstock.errors import OptionInvalid, SchemaUnknown
from penstock.limits import OFFSET_MAX
from penstock.model import Column, ServerAddress, TableName
from penstock.mysql.connection import MARIADB, READING_SECONDS_MAX, connect
from penstock.schema.history import SchemaHistory
from penstock.schema.reader import read_table
from penstock.source.bounds import Bounds
from penstock.source.decoding import RangeDecoding
from penstock.source.reading import SYSTEM_COLUMNS
from penstock.source.source import Source


@dataclass(frozen=True)
class TableShape:
    """The columns a typed read declares, and whose types they are. Pickles."""

    name: TableName
    columns: tuple[Column, ...]
    mariadb: bool

    def arrow(self, wanted: tuple[str, ...] | None = None) -> pyarrow.Schema:
        """Return the Arrow schema of typed batches. Raises OptionInvalid for a column there is not."""
        known = [column.name for column in self.columns]
        for name in wanted or ():
            if name not in known and name not in SYSTEM_COLUMNS:
                raise OptionInvalid(
                    f"{self.name} has no column {name!r}",
                    hint=f"It has {', '.join(known)}, and {', '.join(SYSTEM_COLUMNS)}",
                )
        columns = [(one.name, one.type_text, one.charset, one.nullable) for one in self.columns]
        chosen = None if wanted is None else list(wanted)
        return pyarrow.schema(_native.arrow_schema(columns, mariadb=self.mariadb, wanted=chosen))


def envelope_arrow() -> pyarrow.Schema:
    """Return the Arrow schema of envelope batches."""
    return pyarrow.schema(_native.envelope_schema())


def spark_schema(arrow: pyarrow.Schema) -> StructType:
    """Return the Spark schema under which Spark takes batches of this Arrow schema."""
    schema = from_arrow_schema(arrow, prefer_timestamp_ntz=True)
    assert to_arrow_schema(schema, timezone="UTC").equals(arrow), f"Spark would not take {arrow}"
    return schema


def newest_on_server(address: ServerAddress, name: TableName) -> TableShape:
    """Return a table's definition now, as the server's information_schema tells it. Raises SchemaUnknown."""
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
    """Return a table's definition at the end of what is read, as a log keeps it; None where it keeps none."""
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
    """Return the newest definition of a table that the log names, else that of the schema history.

    Walks event headers and table maps back from the last file, and stops at the first file that has the
    table. `history` has every statement of the log behind it. Raises SchemaUnknown.
    """
    for byte_range in reversed(source.split(bounds.start, bounds.end, range_bytes=OFFSET_MAX)):
        decoding = RangeDecoding(source, byte_range, emit="typed", verify_checksum=False)
        found: TableShape | None = None
        for state in decoding.states(drop_open=True):
            if state == "statement":
                decoding.decoder.take_statement()
                continue
            request = decoding.decoder.table_request()
            decoding.decoder.answer_table(None)
            if TableName(request.database, request.table) == name:
                mariadb = decoding.decoder.mariadb
                columns = (
                    tuple(Column(*one) for one in request.columns)
                    if request.complete
                    else _known_columns(history, name, request.position)
                )
                found = TableShape(name, columns, mariadb)
        if found is not None:
            return found
    known = history.schema(name.database, name.table) if history is not None else None
    if known is None:
        raise SchemaUnknown(
            f"the log has no change of {name}",
            hint="Check the name with: penstock inspect FILE, or give its definition with schemas",
        )
    return TableShape(name, known.columns, _is_mariadb(source))


def _known_columns(history: SchemaHistory | None, name: TableName, place: str) -> tuple[Column, ...]:
    known = history.schema(name.database, name.table) if history is not None else None
    if known is None:
        raise SchemaUnknown(
            f"the log does not name the columns of {name}",
            position=place,
            hint="Give the tables' definitions: option schemas, a file of CREATE TABLE statements",
        )
    return known.columns


def _is_mariadb(source: Source) -> bool:
    """Tell from a log's first bytes whose it is."""
    first = source.earliest()
    decoding = RangeDecoding(source, source.split(first, None)[0], emit="transactions")
    for state in decoding.states(drop_open=True):
        if state == "statement":
            decoding.decoder.take_statement()
        break
    return bool(decoding.decoder.mariadb)
