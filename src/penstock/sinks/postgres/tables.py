# SPDX-License-Identifier: Apache-2.0
"""Tables of a PostgreSQL target: what they have, what they have to have, and the statements between.

A MySQL database becomes a schema. Text is compared by its bytes there, so keys that differ in the source
differ in the target. Tables that somebody else made keep their types and further columns.
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
    """A table as the target has it: its columns' types by name, and the columns of its unique keys."""

    columns: dict[str, str]
    nullable: frozenset[str]
    generated: frozenset[str]
    primary_key: tuple[str, ...]
    keys: dict[str, tuple[str, ...]]
    owner: str | None

    @property
    def made_here(self) -> bool:
        """Whether a pipeline made it."""
        return self.owner is not None


def quoted(name: str) -> str:
    """Return a name as SQL. Raises OptionInvalid where PostgreSQL would cut it off."""
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
    """Return names as SQL, divided by commas."""
    return ", ".join(map(quoted, names))


def layout_of(session: Session, name: TableName) -> Layout | None:
    """Return what the target has, None where it has no such table."""
    found = session.run(
        "SELECT c.oid, obj_description(c.oid, 'pg_class') FROM pg_class c JOIN pg_namespace n"
        " ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
        (name.database, name.table),
    )
    if not found:
        return None
    ((oid, comment),) = found
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
        frozenset(column for column, _, _, made in columns if made),
        next((tuple(key) for _, primary, key in keys if primary), ()),
        {index: tuple(key) for index, _, key in keys},
        owner_of(comment),
    )


def types_of(target: Target) -> dict[str, str]:
    """Return the type of each column, as PostgreSQL itself writes it."""
    own = tuple(column for column in target.columns if column.name not in _FEED_TYPES)
    arrow = replace(target, columns=own).arrow()
    types = {column.name: _type_of(column, arrow.field(column.name).type) for column in own}
    # The columns of a feed have the names of what comes behind a table's own.
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
    # Over 38 digits a number is text on its way.
    if name in ("decimal", "numeric", "dec", "fixed"):
        return "numeric" + column.type_text[len(name) :].split(")")[0].replace(" ", "") + ")"
    return _ARROW_TYPES[kind]


def make_schema(session: Session, name: str) -> list[str]:
    """Return the statement that makes a schema, [] where it is there: not every account may make one."""
    found = session.run("SELECT 1 FROM pg_namespace WHERE nspname = %s", (name,))
    return [] if found else [f"CREATE SCHEMA IF NOT EXISTS {quoted(name)}"]


def statements(target: Target, found: Layout | None, evolution: Evolution, pipeline: str = "") -> list[str]:
    """Return what makes the target's table fit, [] where it does. Raises SchemaChanged."""
    if found is None:
        return create(target, pipeline)
    if evolution in (Evolution.ADD_ONLY, Evolution.IGNORE):
        clauses = _clauses_that_keep(target, found) if found.made_here else []
        if evolution is Evolution.ADD_ONLY:
            clauses += _clauses_that_add(target, found)
    else:
        added, changed = _clauses(target, found)
        clauses = changed + added
    if clauses and evolution is Evolution.STOP:
        raise SchemaChanged(
            f"the target's table {target.name} does not have the columns of its source: {'; '.join(clauses)}",
            hint="Change it by hand, or set schema_changes: evolve",
        )
    return [f"ALTER TABLE {table_sql(target.name)} {', '.join(clauses)}"] if clauses else []


def comment_sql(name: TableName, pipeline: str) -> str:
    """Return the statement that says which pipeline made a table."""
    text = comment_of(pipeline).replace("'", "''")
    return f"COMMENT ON TABLE {table_sql(name)} IS '{text}'"


def create(target: Target, pipeline: str = "") -> list[str]:
    """Return the statements that make a table for a target."""
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


def _clauses(target: Target, found: Layout) -> tuple[list[str], list[str]]:
    """Return the clauses of ALTER TABLE that add what is missing, and those that change what is there."""
    types = types_of(target)
    added = _added(types, found)
    if not found.made_here:
        return added, []
    changed = _keys_too_many(target, found)
    if found.primary_key and found.primary_key != target.primary_key:
        changed += [
            f"DROP CONSTRAINT {quoted(one)}" for one, key in found.keys.items() if key == found.primary_key
        ]
    for name, kind in found.columns.items():
        if name not in types:
            changed.append(f"DROP COLUMN {quoted(name)}")
        elif kind != types[name]:
            column = quoted(name)
            changed.append(f"ALTER COLUMN {column} TYPE {types[name]} USING {column}::{types[name]}")
        if name not in found.nullable and name in types and name not in target.primary_key:
            changed.append(f"ALTER COLUMN {quoted(name)} DROP NOT NULL")
    there = [set(key) for key in found.keys.values() if key != found.primary_key]
    added += [f"ADD UNIQUE ({names_sql(key)})" for key in target.unique_keys if set(key) not in there]
    if target.primary_key and target.primary_key != found.primary_key:
        added.append(f"ADD PRIMARY KEY ({names_sql(target.primary_key)})")
    return added, changed


def _added(types: Mapping[str, str], found: Layout) -> list[str]:
    return [f"ADD COLUMN {quoted(name)} {kind}" for name, kind in types.items() if name not in found.columns]


def _keys_too_many(target: Target, found: Layout) -> list[str]:
    """Return what drops the further unique keys that the source lacks: they would cost rows."""
    wanted = [set(key) for key in target.unique_keys]
    return [
        f"DROP CONSTRAINT {quoted(index)}"
        for index, key in found.keys.items()
        if key != found.primary_key and set(key) not in wanted
    ]


def _clauses_that_add(target: Target, found: Layout) -> list[str]:
    """Return the clauses that add columns. Raises SchemaChanged where others would have to change."""
    types = types_of(target)
    changed = [
        f"{name} {kind}"
        for name, kind in types.items()
        if found.made_here and found.columns.get(name, kind) != kind
    ]
    if changed:
        raise SchemaChanged(
            f"columns of {target.name} have other types now: {', '.join(changed)}",
            hint="Change them by hand, or set schema_changes: evolve",
        )
    return _added(types, found)


def _clauses_that_keep(target: Target, found: Layout) -> list[str]:
    """Return what a table needs whose columns stay, so that it loses and refuses no rows: it must not have a
    key that the source lacks, and only its key may not be null. Raises SchemaChanged."""
    refuse_other_key(target, found.primary_key)
    required = [
        name for name in found.columns if name not in found.nullable and name not in found.primary_key
    ]
    return _keys_too_many(target, found) + [f"ALTER COLUMN {quoted(name)} DROP NOT NULL" for name in required]
