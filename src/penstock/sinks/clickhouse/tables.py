# SPDX-License-Identifier: Apache-2.0
"""Tables of a ClickHouse target, and the statements that create and alter them.

A mirror is a ReplacingMergeTree, which keeps the row with the highest version of each key. A feed is a
MergeTree. A table that was created by someone else keeps its engine, types and additional columns; missing
columns are added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.changes import Target
from penstock.errors import OptionInvalid, SchemaChanged
from penstock.sinks.clickhouse.types import Stored, holds, stored_columns
from penstock.sinks.sink import Evolution
from penstock.sinks.sql.table_owner import comment_of

VERSION = "_version"
DELETED = "_is_deleted"
# The additional columns of a feed.
FEED = {
    "_change_type": "LowCardinality(String)",
    "_commit_version": "Int64",
    "_commit_timestamp": "DateTime64(6, 'UTC')",
    "_row": "Int32",
}
MIRROR = {VERSION: "UInt64", DELETED: "UInt8"}

# How many inserts the server remembers in order to recognize retries.
_INSERTS_REMEMBERED = 10_000


@dataclass(frozen=True)
class TableLocation:
    """A table of the target."""

    database: str
    table: str

    @property
    def sql(self) -> str:
        """The quoted name."""
        return f"{quoted(self.database)}.{quoted(self.table)}"


@dataclass(frozen=True)
class Layout:
    """An existing table: column types, the columns of the sorting key, and its owner.

    The owner is the pipeline that created it, see `owner_of`.
    """

    columns: Mapping[str, str]
    key: tuple[str, ...]
    owner: str | None

    @property
    def created_by_pipeline(self) -> bool:
        """Whether a pipeline created it."""
        return self.owner is not None


def quoted(name: str) -> str:
    """Return a name as SQL."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def statements(
    target: Target,
    location: TableLocation,
    layout: Layout | None,
    evolution: Evolution,
    mirror: bool,
    pipeline: str = "",
) -> list[str]:
    """Return the statements that make the target's table fit, [] if it already fits.

    Raises SchemaChanged, OptionInvalid.
    """
    if mirror and not target.primary_key:
        raise OptionInvalid(
            f"{target.name} has no primary key, so its rows cannot be replaced",
            hint="Set write: append for it, in a pipeline of its own",
        )
    stored = stored_columns(target)
    if layout is None:
        return [
            f"CREATE DATABASE IF NOT EXISTS {quoted(location.database)}",
            _create(target, location, stored, mirror, pipeline),
        ]
    _check_own(target, layout, mirror)
    kept = _nullable_clauses(stored, layout, MIRROR if mirror else FEED)
    if evolution is Evolution.IGNORE:
        return _alter_statements(location, kept)
    added = [column for column in stored if column.name not in layout.columns]
    changed = [
        column
        for column in stored
        if not holds(layout.columns.get(column.name, column.declared), column.declared)
    ]
    if evolution is Evolution.ADD_ONLY:
        # Changes of nullability alone are not counted here: `kept` covers them.
        changed = [column for column in changed if not holds(layout.columns[column.name], column.sql)]
    own = MIRROR if mirror else FEED
    obsolete = (
        [name for name in layout.columns if name not in (*own, *target.column_names)]
        if layout.created_by_pipeline
        else []
    )
    clauses = [
        f"ADD COLUMN {quoted(column.name)} {column.declared}{_column_position(target, column)}"
        for column in added
    ]
    modified = [f"MODIFY COLUMN {quoted(column.name)} {column.declared}" for column in changed]
    if (evolution is Evolution.STOP and (clauses or modified)) or (
        evolution is Evolution.ADD_ONLY and modified
    ):
        raise SchemaChanged(
            f"the target's table {location.sql} lacks what its source has: {'; '.join(clauses + modified)}",
            hint="Change it by hand, or set schema_changes: evolve",
        )
    for column in changed:
        _check_widens(location, column, layout)
    clauses += modified
    if evolution is Evolution.EVOLVE:
        clauses += [f"DROP COLUMN {quoted(name)}" for name in obsolete if name not in layout.key]
    elif evolution is Evolution.ADD_ONLY:
        clauses += kept
    return _alter_statements(location, clauses)


def _alter_statements(location: TableLocation, clauses: Sequence[str]) -> list[str]:
    return [f"ALTER TABLE {location.sql} {', '.join(clauses)}"] if clauses else []


def _nullable_clauses(stored: Sequence[Stored], layout: Layout, own: Mapping[str, str]) -> list[str]:
    """Return clauses that make retained columns nullable in a table that a pipeline created.

    The source may have dropped such a column, so new rows have null in this column. ClickHouse would store
    zero.
    """
    if not layout.created_by_pipeline:
        return []
    nullable = {column.name: column.nullable for column in stored}
    return [
        f"MODIFY COLUMN {quoted(name)} Nullable({kind})"
        for name, kind in layout.columns.items()
        if nullable.get(name, True)
        and name not in (*own, *layout.key)
        and not kind.startswith(("Nullable(", "Array("))
    ]


def _create(
    target: Target, location: TableLocation, stored: Sequence[Stored], mirror: bool, pipeline: str
) -> str:
    own = MIRROR if mirror else FEED
    columns = [f"{quoted(column.name)} {column.declared}" for column in stored]
    columns += [f"{quoted(name)} {text}" for name, text in own.items()]
    if mirror:
        engine = f"ReplacingMergeTree({VERSION}, {DELETED})"
        key = ", ".join(map(quoted, target.primary_key))
        suffix = ""
    else:
        engine, key = "MergeTree", "_commit_version, _row"
        suffix = f" SETTINGS non_replicated_deduplication_window = {_INSERTS_REMEMBERED}"
    return (
        f"CREATE TABLE IF NOT EXISTS {location.sql} ({', '.join(columns)}) ENGINE = {engine} ORDER BY ({key})"
        f"{suffix} COMMENT {literal(comment_of(pipeline))}"
    )


def _check_own(target: Target, layout: Layout, mirror: bool) -> None:
    missing = [name for name in (MIRROR if mirror else FEED) if name not in layout.columns]
    if missing:
        raise OptionInvalid(
            f"the target's table for {target.name} has no column {', '.join(missing)}",
            hint="Add it, or let the table be made: the guide of the clickhouse sink shows it",
        )
    if mirror and layout.key != target.primary_key:
        raise SchemaChanged(
            f"the key of {target.name} is ({', '.join(target.primary_key)}), and the target's table is sorted"
            f" by ({', '.join(layout.key)})",
            hint=f"ClickHouse cannot change that: rename the table there, then run penstock resnapshot for "
            f"{target.name}",
        )


def _check_widens(location: TableLocation, column: Stored, layout: Layout) -> None:
    existing = layout.columns[column.name]
    # Stored values must fit the new type. Nullability is checked separately.
    if column.name in layout.key or not holds(f"Nullable({column.sql})", existing):
        raise SchemaChanged(
            f"column {column.name} of {location.sql} is {existing} and cannot become {column.declared}",
            hint="Rename the table there, then run penstock resnapshot for it",
        )


def _column_position(target: Target, column: Stored) -> str:
    before = target.column_names.index(column.name)
    return f" AFTER {quoted(target.column_names[before - 1])}" if before else " FIRST"
