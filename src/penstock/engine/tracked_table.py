# SPDX-License-Identifier: Apache-2.0
"""What the driver keeps of one table of a source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.changes import Target
from penstock.model import Column, TableName

# A primary key, and the further unique ones.
Keys = tuple[tuple[str, ...], frozenset[tuple[str, ...]]]


@dataclass
class TrackedTable:
    """A table of a source: its definitions by number, and the one that counts now.

    `logged` are its columns where the log was read to, None where they cannot be told. Of a `streamed` one
    the log has every row since it was made, so it is never loaded. `gone` follows the log alone, whatever its
    server has by now, and `was_gone` tells the same of where the last batch that is done ended. `dropped` are
    the columns that it ever lost, in lower case: targets may have their values still. `keys` are its primary
    and unique keys where the log was read to, None where they cannot be told.
    """

    current: Target
    definitions: dict[int, Target]
    gone: bool = False
    was_gone: bool = False
    logged: tuple[Column, ...] | None = None
    streamed: bool = False
    dropped: frozenset[str] = frozenset()
    keys: Keys | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as of where the last batch that is done ended."""
        return {
            "current": self.current.to_json(),
            "definitions": [[number, target.to_json()] for number, target in self.definitions.items()],
            # A batch that is run again meets the same statements, and has to learn the same from them.
            "gone": self.was_gone,
            "logged": None if self.logged is None else [column.to_json() for column in self.logged],
            "streamed": self.streamed,
            "dropped": sorted(self.dropped),
            "keys": None if self.keys is None else [list(self.keys[0]), sorted(map(list, self.keys[1]))],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        logged, keys = value["logged"], value.get("keys")
        return cls(
            Target.from_json(value["current"]),
            {int(number): Target.from_json(target) for number, target in value["definitions"]},
            value["gone"],
            value["gone"],
            None if logged is None else tuple(Column.from_json(column) for column in logged),
            value["streamed"],
            # Earlier versions wrote neither these nor keys.
            frozenset(value.get("dropped", ())),
            None if keys is None else (tuple(keys[0]), frozenset(map(tuple, keys[1]))),
        )


def keys_of(target: Target) -> Keys:
    """Return a table's keys, the unique ones in no order."""
    return target.primary_key, frozenset(target.unique_keys)


def with_known_keys(target: Target, before: Target) -> Target:
    """Return a target without the unique keys that it had not before."""
    return replace(target, unique_keys=tuple(key for key in target.unique_keys if key in before.unique_keys))


def columns_agree(target: Target, columns: Sequence[Any]) -> bool:
    """Tell whether logged columns are those of a target, whatever words they are declared in."""
    if [column.name for column in columns] != list(target.column_names):
        return False
    logged = Target(target.name, tuple(columns), mariadb=target.mariadb)
    return bool(logged.arrow().types == target.arrow().types)


@dataclass
class Learned:
    """What surprises taught, for one batch: statements dealt with, tables that stay in one part, and those
    whose chunks are left out. `altered` counts how often a table was found altered while it was read."""

    statements: dict[str, dict[str, TableName]] = field(default_factory=dict)
    together: set[TableName] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    altered: dict[str, int] = field(default_factory=dict)
