# SPDX-License-Identifier: Apache-2.0
"""The driver's state of one table of a source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.changes import Target
from penstock.model import Column, TableName
from penstock.pipeline.table_changes import keeps_rows

# A primary key, and the other unique keys.
Keys = tuple[tuple[str, ...], frozenset[tuple[str, ...]]]


@dataclass
class TrackedTable:
    """A table of a source: its definitions by number, and its current definition.

    `logged` and `keys` are its columns and keys at the position up to which the log has been read, or None if
    unknown. The log contains every row of a `streamed` table since its creation, so it is never loaded.
    `gone` is true if the table is dropped at that position, even if its server has since recreated it.
    `was_gone` is the value of `gone` after the last completed batch. `dropped` contains the lower-case names
    of all columns that were ever dropped from the table, because targets may still have their values.
    """

    current: Target
    definitions: dict[int, Target]
    gone: bool = False
    was_gone: bool = False
    logged: tuple[Column, ...] | None = None
    streamed: bool = False
    dropped: frozenset[str] = frozenset()
    keys: Keys | None = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """The objects that `to_json` serializes. They are never modified, only replaced."""
        known = (self.current, self.was_gone, self.logged, self.streamed, self.dropped, self.keys)
        return (*known, *self.definitions, *self.definitions.values())

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values with the state at the end of the last completed batch."""
        return {
            "current": self.current.to_json(),
            "definitions": [[number, target.to_json()] for number, target in self.definitions.items()],
            # A batch that is run again reads the same statements and must reach the same decisions.
            "gone": self.was_gone,
            "logged": None if self.logged is None else [column.to_json() for column in self.logged],
            "streamed": self.streamed,
            "dropped": sorted(self.dropped),
            "keys": None if self.keys is None else [list(self.keys[0]), sorted(map(list, self.keys[1]))],
        }

    def has_same_rows(self, copy: Target) -> bool:
        """Return whether a copy that replaced the table has the same rows with the same values.

        Schema-change tools truncate and round values to the copy's types, and drop rows that are duplicates
        under the copy's keys.
        """
        if self.logged is None or self.keys is None:
            return False
        return self.keys == keys_of(copy) and keeps_rows(self.logged, copy.columns)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Parse the output of `to_json`."""
        logged, keys = value["logged"], value.get("keys")
        return cls(
            Target.from_json(value["current"]),
            {int(number): Target.from_json(target) for number, target in value["definitions"]},
            value["gone"],
            value["gone"],
            None if logged is None else tuple(Column.from_json(column) for column in logged),
            value["streamed"],
            # Version 0.1 wrote neither dropped columns nor keys.
            frozenset(value.get("dropped", ())),
            None if keys is None else (tuple(keys[0]), frozenset(map(tuple, keys[1]))),
        )


def keys_of(target: Target) -> Keys:
    """Return a table's primary key, and its unique keys in no particular order."""
    return target.primary_key, frozenset(target.unique_keys)


def with_known_keys(target: Target, before: Target) -> Target:
    """Return a target without the unique keys that it did not have earlier."""
    return replace(target, unique_keys=tuple(key for key in target.unique_keys if key in before.unique_keys))


def logged_target(definition: Mapping[str, Any], tracked: TrackedTable | None, *, mariadb: bool) -> Target:
    """Return a table as the log defines it, with the keys of the tracked table that the log does not have.

    `mariadb` says whether an untracked table is MariaDB's.
    """
    name, columns, key = definition["table"], tuple(definition["columns"]), tuple(definition["primary_key"])
    if tracked is None:
        return Target(name, columns, key, mariadb=mariadb)
    current = tracked.current
    return Target(name, columns, key or current.primary_key, current.unique_keys, current.mariadb)


def columns_agree(target: Target, columns: Sequence[Any]) -> bool:
    """Return whether logged columns have the names and Arrow types of a target's columns."""
    if [column.name for column in columns] != list(target.column_names):
        return False
    logged = Target(target.name, tuple(columns), mariadb=target.mariadb)
    return bool(logged.arrow().types == target.arrow().types)


@dataclass
class Learned:
    """The outcome of processing the surprises of one batch.

    `statements` are the handled statements, as in `TaskPlan`. All rows of the tables in `together` go to one
    part. The chunks of the tables in `unread` are skipped. `again` contains the tables of `unread` whose
    loads restart. `altered` counts how often each table was altered while it was being read.
    """

    statements: dict[str, dict[str, TableName]] = field(default_factory=dict)
    together: set[TableName] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    again: set[str] = field(default_factory=set)
    altered: dict[str, int] = field(default_factory=dict)
