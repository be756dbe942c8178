# SPDX-License-Identifier: Apache-2.0
"""Tables of a ClickHouse target: what they have, what they have to have, and the statements between.

A mirror is a ReplacingMergeTree, which keeps the row with the highest version of each key; a feed is a
MergeTree. A table that somebody else made keeps its engine, types and further columns;
missing ones are added.
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
# The columns of a feed behind the table's own.
FEED = {
    "_change_type": "LowCardinality(String)",
    "_commit_version": "Int64",
    "_commit_timestamp": "DateTime64(6, 'UTC')",
    "_row": "Int32",
}
MIRROR = {VERSION: "UInt64", DELETED: "UInt8"}

# So many inserts are remembered, so that one that comes again is not written twice.
_INSERTS_REMEMBERED = 10_000


@dataclass(frozen=True)
class Place:
    """A table of the target."""

    database: str
    table: str

    @property
    def sql(self) -> str:
        """The name as SQL."""
        return f"{quoted(self.database)}.{quoted(self.table)}"


@dataclass(frozen=True)
class Layout:
    """A table as the target has it: types by column, the sorting key's columns, and the pipeline that made
    it, as `owner_of` tells."""

    columns: Mapping[str, str]
    key: tuple[str, ...]
    owner: str | None

    @property
    def made_here(self) -> bool:
        """Whether a pipeline made it."""
        return self.owner is not None


def quoted(name: str) -> str:
    """Return a name as SQL."""
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def literal(text: str) -> str:
    """Return a text as SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def statements(
    target: Target, place: Place, found: Layout | None, evolution: Evolution, mirror: bool, pipeline: str = ""
) -> list[str]:
    """Return what makes the target's table fit, [] where it does. Raises SchemaChanged, OptionInvalid."""
    if mirror and not target.primary_key:
        raise OptionInvalid(
            f"{target.name} has no primary key, so its rows cannot be replaced",
            hint="Set write: append for it, in a pipeline of its own",
        )
    wanted = stored_columns(target)
    if found is None:
        return [
            f"CREATE DATABASE IF NOT EXISTS {quoted(place.database)}",
            _create(target, place, wanted, mirror, pipeline),
        ]
    _check_own(target, found, mirror)
    kept = _clauses_that_keep(wanted, found, MIRROR if mirror else FEED)
    if evolution is Evolution.IGNORE:
        return _altered(place, kept)
    added = [one for one in wanted if one.name not in found.columns]
    changed = [one for one in wanted if not holds(found.columns.get(one.name, one.declared), one.declared)]
    if evolution is Evolution.ADD_ONLY:
        # Whether they may be null is seen to.
        changed = [one for one in changed if not holds(found.columns[one.name], one.sql)]
    own = MIRROR if mirror else FEED
    gone = (
        [name for name in found.columns if name not in (*own, *target.column_names)]
        if found.made_here
        else []
    )
    clauses = [f"ADD COLUMN {quoted(one.name)} {one.declared}{_place_of(target, one)}" for one in added]
    modified = [f"MODIFY COLUMN {quoted(one.name)} {one.declared}" for one in changed]
    if (evolution is Evolution.STOP and (clauses or modified)) or (
        evolution is Evolution.ADD_ONLY and modified
    ):
        raise SchemaChanged(
            f"the target's table {place.sql} lacks what its source has: {'; '.join(clauses + modified)}",
            hint="Change it by hand, or set schema_changes: evolve",
        )
    for one in changed:
        _check_widens(place, one, found)
    clauses += modified
    if evolution is Evolution.EVOLVE:
        clauses += [f"DROP COLUMN {quoted(name)}" for name in gone if name not in found.key]
    elif evolution is Evolution.ADD_ONLY:
        clauses += kept
    return _altered(place, clauses)


def _altered(place: Place, clauses: Sequence[str]) -> list[str]:
    return [f"ALTER TABLE {place.sql} {', '.join(clauses)}"] if clauses else []


def _clauses_that_keep(wanted: Sequence[Stored], found: Layout, own: Mapping[str, str]) -> list[str]:
    """Return what a table made here needs whose columns stay: they take null where rows have it, as those do
    that the source dropped. ClickHouse would put a zero there."""
    if not found.made_here:
        return []
    nullable = {one.name: one.nullable for one in wanted}
    return [
        f"MODIFY COLUMN {quoted(name)} Nullable({kind})"
        for name, kind in found.columns.items()
        if nullable.get(name, True)
        and name not in (*own, *found.key)
        and not kind.startswith(("Nullable(", "Array("))
    ]


def _create(target: Target, place: Place, wanted: Sequence[Stored], mirror: bool, pipeline: str) -> str:
    own = MIRROR if mirror else FEED
    columns = [f"{quoted(one.name)} {one.declared}" for one in wanted]
    columns += [f"{quoted(name)} {text}" for name, text in own.items()]
    if mirror:
        engine = f"ReplacingMergeTree({VERSION}, {DELETED})"
        key = ", ".join(map(quoted, target.primary_key))
        more = ""
    else:
        engine, key = "MergeTree", "_commit_version, _row"
        more = f" SETTINGS non_replicated_deduplication_window = {_INSERTS_REMEMBERED}"
    return (
        f"CREATE TABLE IF NOT EXISTS {place.sql} ({', '.join(columns)}) ENGINE = {engine} ORDER BY ({key})"
        f"{more} COMMENT {literal(comment_of(pipeline))}"
    )


def _check_own(target: Target, found: Layout, mirror: bool) -> None:
    missing = [name for name in (MIRROR if mirror else FEED) if name not in found.columns]
    if missing:
        raise OptionInvalid(
            f"the target's table for {target.name} has no column {', '.join(missing)}",
            hint="Add it, or let the table be made: the guide of the clickhouse sink shows it",
        )
    if mirror and found.key != target.primary_key:
        raise SchemaChanged(
            f"the key of {target.name} is ({', '.join(target.primary_key)}), and the target's table is sorted"
            f" by ({', '.join(found.key)})",
            hint=f"ClickHouse cannot change that: rename the table there, then run penstock resnapshot for "
            f"{target.name}",
        )


def _check_widens(place: Place, wanted: Stored, found: Layout) -> None:
    there = found.columns[wanted.name]
    # What is stored must fit the new type; whether it may be null is another question.
    if wanted.name in found.key or not holds(f"Nullable({wanted.sql})", there):
        raise SchemaChanged(
            f"column {wanted.name} of {place.sql} is {there} and cannot become {wanted.declared}",
            hint="Rename the table there, then run penstock resnapshot for it",
        )


def _place_of(target: Target, column: Stored) -> str:
    before = target.column_names.index(column.name)
    return f" AFTER {quoted(target.column_names[before - 1])}" if before else " FIRST"
