# SPDX-License-Identifier: Apache-2.0
"""Reads a log from Python: the input is files, a live server or a kept log, and the output is Arrow batches.

Spark is not needed.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import SchemaInvalid
from penstock.limits import BATCH_BYTES_MAX, BATCH_ROWS_MAX, OFFSET_MAX
from penstock.model import Column, Secret, TableName, TablePatterns, TableSchema
from penstock.schema.history import SchemaHistory
from penstock.schema.server_defaults import ServerDefaults
from penstock.schema.statements.tokens import ServerSpelling
from penstock.schema.table_definition import TableDefinition
from penstock.source.bounds import BoundText, locate, parse_bound
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, Selection, read_range
from penstock.source.source import Source, SourceOptions, open_source, shown_tables
from penstock.source.spelling import spelling_of

# The types that callers may pass as `schemas`; see `load_schemas`.
Schemas = SchemaHistory | Mapping[str, Any] | str | os.PathLike[str]

_MAPPING_CHARSET = "utf8mb4"
_HINT_SCHEMAS = "Map 'shop.orders' to a TableSchema, or to {'id': 'int unsigned', 'name': 'varchar(20)'}"


def read_binlog(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    tables: str | list[str] | None = None,
    start: BoundText | None = None,
    end: BoundText | None = None,
    schemas: Schemas | None = None,
    *,
    columns: Sequence[str] | None = None,
    changes: Sequence[str] | None = None,
    emit: str = "typed",
    exclude_tables: str | list[str] | None = None,
    instance: str | None = None,
    password: str | Secret | None = None,
    batch_rows_max: int = BATCH_ROWS_MAX,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> Iterator[Batch]:
    """Yield the row changes in binlog files, or in the log of a live server or a daemon up to now.

    `source` is a path, a folder, a glob pattern, several of these, a log's folder, `mysql://user@host`, or
    `penstock://host/instance`. `tables` are patterns (`shop.orders`, `shop.*`, `/regex/`), None for all.
    `start` and `end` are positions (`mysql-bin.000003:1542`), GTID sets, or times; start inclusive, end
    exclusive. `schemas` supplies definitions that are missing from the log: a .sql or JSON file, a mapping,
    or a SchemaHistory. `columns` names the columns to decode, including system columns; `changes` the change
    types to emit. `emit` is "typed" (a table's own columns), "envelope" (all tables in one shape), "events"
    or "transactions".

    Typed batches have the table's columns, then `_change_type`, `_commit_version`, `_commit_timestamp` and
    `_metadata`. Rows of one table come in commit order. At unreadable data, all complete transactions before
    it are yielded first; then a PenstockError with the position is raised.
    """
    options = SourceOptions.parse(source, instance=instance, password=password)
    selection = TablePatterns(tables, exclude_tables)
    history = _validate_schemas(schemas)
    first = parse_bound(start) if start is not None else None
    last = parse_bound(end) if end is not None else None
    opened = open_source(options)
    kinds = None if changes is None else tuple(changes)
    column_names = None if columns is None else tuple(columns)

    # The checks above run at the call; the rest runs while the caller iterates.
    def batches() -> Iterator[Batch]:
        try:
            bounds = locate(opened, first, last)
            known = history or schemas_of_server(opened)
            if known is history and not isinstance(schemas, SchemaHistory):
                known = load_schemas(schemas, spelling_of(opened))
            chosen = Selection(shown_tables(opened, selection), column_names, kinds, bounds)
            for byte_range in opened.split(bounds.start, bounds.end, range_bytes=OFFSET_MAX):
                yield from read_range(
                    opened,
                    byte_range,
                    chosen,
                    known,
                    emit=emit,
                    batch_rows_max=batch_rows_max,
                    batch_bytes_max=batch_bytes_max,
                )
        finally:
            opened.close()

    return batches()


def load_schemas(schemas: Schemas | None, spelling: ServerSpelling | None = None) -> SchemaHistory | None:
    """Convert the `schemas` argument to a schema history. Raises SchemaInvalid.

    `spelling` is how the log's server spells names, by default as MySQL does. A mapping maps `database.table`
    to a TableSchema, to its JSON form, or to a mapping of column names to SQL types. Its default charset is
    utf8mb4. A CREATE TABLE in the log without a charset uses its database's, else the default in its event,
    else utf8mb4.
    """
    if schemas is None or isinstance(schemas, SchemaHistory):
        return schemas
    if isinstance(schemas, str | os.PathLike):
        return SchemaHistory.from_file(Path(schemas), spelling=spelling)
    history = SchemaHistory(ServerDefaults(spelling or ServerSpelling(), _MAPPING_CHARSET, {}, False))
    history.seed(
        (
            TableDefinition(_schema_of(TableName.parse(text), value), _MAPPING_CHARSET)
            for text, value in schemas.items()
        ),
        None,
    )
    return history


def _validate_schemas(schemas: Schemas | None) -> SchemaHistory | None:
    """Validate the schemas before the log's server is known. Raises SchemaInvalid."""
    try:
        return load_schemas(schemas)
    except SchemaInvalid as problem:
        try:
            return load_schemas(schemas, ServerSpelling(mariadb=True))
        except SchemaInvalid:
            raise problem from None


def _schema_of(name: TableName, value: object) -> TableSchema:
    if isinstance(value, TableSchema):
        return value
    if isinstance(value, Mapping) and "columns" in value and isinstance(value["columns"], list):
        return TableSchema.from_json({"database": name.database, "table": name.table, **value})
    if isinstance(value, Mapping) and all(isinstance(text, str) for text in value.values()):
        columns = tuple(Column(column, text, _charset_of(text)) for column, text in value.items())
        return TableSchema(name.database, name.table, columns)
    raise SchemaInvalid(f"the schema of {name} cannot be read", hint=_HINT_SCHEMAS)


_TEXT_TYPES = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "enum", "set")


def _charset_of(type_text: str) -> str | None:
    return _MAPPING_CHARSET if type_text.lower().split("(")[0].strip() in _TEXT_TYPES else None


def schemas_of_server(source: Source) -> SchemaHistory | LoggedTables | None:
    """Return the table definitions that the source itself supplies: a live server, or a log that keeps them.
    None for files.
    """
    if source.options.is_kept:
        return LoggedTables(source)
    address = source.options.address
    if address is None:
        return None
    # Imported here because reading files requires no MySQL client.
    from penstock.schema.server_tables import ServerTables

    return SchemaHistory(reread=ServerTables(address))
