# SPDX-License-Identifier: Apache-2.0
"""Tables of a PostgreSQL target, and the statements that create and alter them.

A MySQL database becomes a schema. The target compares text byte by byte, so keys that differ in the source
also differ in the target. Tables that someone else created keep their types and additional columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow

from penstock.changes import Target
from penstock.errors import OptionInvalid, SchemaChanged
from penstock.model import Column, TableName
from penstock.sinks.postgres.connection import Session
from penstock.sinks.sink import Evolution
from penstock.sinks.sql.rows import FEED_COLUMNS, refuse_other_key
from penstock.sinks.sql.table_owner import comment_of, owner_of

_NAME_BYTES_MAX = 63

_ARROW_TYPES: dict[pyarrow.DataType, str] = {
    pyarrow.int8(): "smallint",
    pyarrow.int16(): "smallint",
    pyarrow.int32(): "integer",
    pyarrow.int64(): "bigint",
    pyarrow.float32(): "real",
    pyarrow.float64(): "double precision",
    pyarrow.date32(): "date",
    pyarrow.duration("us"): "interval",
    pyarrow.timestamp("us"): "timestamp without time zone",
    pyarrow.timestamp("us", "UTC"): "timestamp with time zone",
    pyarrow.string(): "text",
    pyarrow.binary(): "bytea",
}

_FEED_TYPES = dict(
    zip(
        (column.name for column in FEED_COLUMNS),
        ("text", "bigint", "timestamp with time zone", "integer"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Layout:
    """An existing table: its column types by name, and the columns of its unique keys."""

    columns: dict[str, str]
    nullable: frozenset[str]
    generated: frozenset[str]
    primary_key: tuple[str, ...]
    keys: dict[str, tuple[str, ...]]
    owner: str | None

    @property
    def created_by_pipeline(self) -> bool:
        """Whether a pipeline created it."""
        return self.owner is not None


def quoted(name: str) -> str:
    """Return a name as SQL. Raises OptionInvalid for a name that PostgreSQL would truncate."""
    if len(name.encode()) > _NAME_BYTES_MAX:
        raise OptionInvalid(
            f"the name {name!r} has more than {_NAME_BYTES_MAX} bytes, which PostgreSQL cuts off",
            hint="Rename it on the way, by a route or a map step",
        )
    return '"' + name.replace('"', '""') + '"'


def table_sql(name: TableName) -> str:
    """Return a table's name as SQL."""
    return f"{quoted(name.database)}.{quoted(name.table)}"


def names_sql(names: Sequence[str]) -> str:
    """Return names as SQL, separated by commas."""
    return ", ".join(map(quoted, names))


def layout_of(session: Session, name: TableName) -> Layout | None:
    """Return the layout of a target table, None if the table does not exist."""
    tables = session.run(
        "SELECT c.oid, obj_description(c.oid, 'pg_class') FROM pg_class c JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
        (name.database, name.table),
    )
    if not tables:
        return None
    ((oid, comment),) = tables
    columns = session.run(
        "SELECT attname, format_type(atttypid, atttypmod), attnotnull,"
        " attgenerated <> '' OR attidentity = 'a' FROM pg_attribute"
        " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        (oid,),
    )
    keys = session.run(
        "SELECT i.relname, x.indisprimary, array_agg(a.attname ORDER BY k.place) FROM pg_index x"
        " JOIN pg_class i ON i.oid = x.indexrelid"
        " CROSS JOIN LATERAL unnest(x.indkey::int[]) WITH ORDINALITY AS k(number, place)"
        " JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.number"
        " WHERE x.indrelid = %s AND x.indisunique AND x.indpred IS NULL AND x.indexprs IS NULL"
        " GROUP BY i.relname, x.indisprimary ORDER BY x.indisprimary DESC, i.relname",
        (oid,),
    )
    return Layout(
        {column: kind for column, kind, _, _ in columns},
        frozenset(column for column, _, required, _ in columns if not required),
        frozenset(column for column, _, _, generated in columns if generated),
        next((tuple(key) for _, primary, key in keys if primary), ()),
        {index: tuple(key) for index, _, key in keys},
        owner_of(comment),
    )


def column_names(session: Session, name: TableName) -> set[str]:
    """Return the columns of a target table, empty if the table does not exist."""
    rows = session.run(
        "SELECT a.attname FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')"
        " AND a.attnum > 0 AND NOT a.attisdropped",
        (name.database, name.table),
    )
    return {column for (column,) in rows}


def types_of(target: Target) -> dict[str, str]:
    """Return the type of each column, as PostgreSQL displays it."""
    own = tuple(column for column in target.columns if column.name not in _FEED_TYPES)
    arrow = replace(target, columns=own).arrow()
    types = {column.name: _type_of(column, arrow.field(column.name).type) for column in own}
    # A feed's additional columns have the same names as system columns.
    return {name: types.get(name) or _FEED_TYPES[name] for name in target.column_names}


def _type_of(column: Column, kind: pyarrow.DataType) -> str:
    name = column.type_text.split("(")[0].strip().lower()
    if name in ("uuid", "json") and column.charset is None:
        return name
    if name in ("inet4", "inet6"):
        return "inet"
    if pyarrow.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    if pyarrow.types.is_list(kind):
        return "real[]"
    # Numbers with more than 38 digits are transferred as text.
    if name in ("decimal", "numeric", "dec", "fixed"):
        return "numeric" + column.type_text[len(name) :].split(")")[0].replace(" ", "") + ")"
    return _ARROW_TYPES[kind]


def create_schema(session: Session, name: str) -> list[str]:
    """Return the statement that creates a schema, [] if it exists.

    An account may lack the privilege to create schemas.
    """
    existing = session.run("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,))
    return [] if existing else [f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}"]


def statements(target: Target, layout: Layout | None, evolution: Evolution, pipeline: str = "") -> list[str]:
    """Return the statements that make the target's table fit, [] if it already fits. Raises SchemaChanged."""
    if layout is None:
        return create(target, pipeline)
    if evolution in (Evolution.ADD_ONLY, Evolution.IGNORE):
        clauses = _clauses_to_accept_rows(target, layout) if layout.created_by_pipeline else []
        if evolution is Evolution.ADD_ONLY:
            clauses += _clauses_to_add(target, layout)
    else:
        added, changed = _clauses(target, layout)
        clauses = changed + added
    if clauses and evolution is Evolution.STOP:
        raise SchemaChanged(
            f"the target's table {target.name} does not have the columns of its source: {'; '.join(clauses)}",
            hint="Change it by hand, or set schema_changes: evolve",
        )
    return [f"ALTER TABLE {table_sql(target.name)} {', '.join(clauses)}"] if clauses else []


def comment_sql(name: TableName, pipeline: str) -> str:
    """Return the statement that records which pipeline created a table."""
    text = comment_of(pipeline).replace("'", "''")
    return f"COMMENT ON TABLE {table_sql(name)} IS '{text}'"


def create(target: Target, pipeline: str = "") -> list[str]:
    """Return the statements that create a table for a target."""
    required = set(target.primary_key)
    lines = [
        f"{quoted(name)} {kind}{' NOT NULL' if name in required else ''}"
        for name, kind in types_of(target).items()
    ]
    if target.primary_key:
        lines.append(f"PRIMARY KEY ({names_sql(target.primary_key)})")
    lines += [f"UNIQUE ({names_sql(key)})" for key in target.unique_keys]
    name = table_sql(target.name)
    return [f"CREATE TABLE {name} ({', '.join(lines)})", comment_sql(target.name, pipeline)]


def _clauses(target: Target, layout: Layout) -> tuple[list[str], list[str]]:
    """Return the clauses of ALTER TABLE that add missing parts, and the clauses that change existing
    parts.
    """
    types = types_of(target)
    added = _column_additions(types, layout)
    if not layout.created_by_pipeline:
        return added, []
    changed = _surplus_keys(target, layout)
    if layout.primary_key and layout.primary_key != target.primary_key:
        changed += [
            f"DROP CONSTRAINT {quoted(constraint)}"
            for constraint, key in layout.keys.items()
            if key == layout.primary_key
        ]
    for name, kind in layout.columns.items():
        if name not in types:
            changed.append(f"DROP COLUMN {quoted(name)}")
        elif kind != types[name]:
            column = quoted(name)
            changed.append(f"ALTER COLUMN {column} TYPE {types[name]} USING {column}::{types[name]}")
        if name not in layout.nullable and name in types and name not in target.primary_key:
            changed.append(f"ALTER COLUMN {quoted(name)} DROP NOT NULL")
    existing_keys = [set(key) for key in layout.keys.values() if key != layout.primary_key]
    added += [f"ADD UNIQUE ({names_sql(key)})" for key in target.unique_keys if set(key) not in existing_keys]
    if target.primary_key and target.primary_key != layout.primary_key:
        added.append(f"ADD PRIMARY KEY ({names_sql(target.primary_key)})")
    return added, changed


def _column_additions(types: Mapping[str, str], layout: Layout) -> list[str]:
    return [f"ADD COLUMN {quoted(name)} {kind}" for name, kind in types.items() if name not in layout.columns]


def _surplus_keys(target: Target, layout: Layout) -> list[str]:
    """Return the clauses that drop unique keys which the source does not have. Such keys would lose rows."""
    source_keys = [set(key) for key in target.unique_keys]
    return [
        f"DROP CONSTRAINT {quoted(index)}"
        for index, key in layout.keys.items()
        if key != layout.primary_key and set(key) not in source_keys
    ]


def _clauses_to_add(target: Target, layout: Layout) -> list[str]:
    """Return the clauses that add columns. Raises SchemaChanged if other columns would have to change."""
    types = types_of(target)
    changed = [
        f"{name} {kind}"
        for name, kind in types.items()
        if layout.created_by_pipeline and layout.columns.get(name, kind) != kind
    ]
    if changed:
        raise SchemaChanged(
            f"columns of {target.name} have other types now: {', '.join(changed)}",
            hint="Change them by hand, or set schema_changes: evolve",
        )
    return _column_additions(types, layout)


def _clauses_to_accept_rows(target: Target, layout: Layout) -> list[str]:
    """Return the clauses that a table with retained columns needs to accept all rows.

    The table must not have a key that the source does not have, and only key columns may be NOT NULL. Raises
    SchemaChanged.
    """
    refuse_other_key(target, layout.primary_key)
    required = [
        name for name in layout.columns if name not in layout.nullable and name not in layout.primary_key
    ]
    return _surplus_keys(target, layout) + [f"ALTER COLUMN {quoted(name)} DROP NOT NULL" for name in required]
