# SPDX-License-Identifier: Apache-2.0
"""Shards of a pipeline, each in a separate process: which tables belong to which shard.

The hash of a target's name determines the shard of the target and of all its source tables. Every target is
therefore written by one shard only, even if several tables are merged into it. Each shard reads the whole
log, from its own position, and drops the changes of other shards' tables before it decodes their values.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from penstock.model import TableName, TablePatterns
from penstock.narrowed_patterns import NarrowedPatterns
from penstock.pipeline.ghosts import PipelinePatterns, table_of_ghost
from penstock.pipeline.step_section import StepSection


@dataclass(frozen=True)
class Shard:
    """One of `count` shards, which are numbered from 0. Text form `1-of-4`."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}-of-{self.count}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text form. Raises ValueError."""
        number, word, count = text.partition("-of-")
        shard = cls(int(number), int(count))
        if not word or not 0 <= shard.number < shard.count:
            raise ValueError(f"{text!r} is not a shard")
        return shard

    @classmethod
    def all_of(cls, count: int) -> list[Self]:
        """Return all shards for a number of shards."""
        return [cls(number, count) for number in range(count)]

    def owns(self, target: TableName) -> bool:
        """Return whether a target belongs to this shard. The hash never changes."""
        # Ignore the case, because some targets do not distinguish names by case.
        name = f"{target.database}.{target.table}".casefold()
        return zlib.crc32(name.encode(errors="surrogatepass")) % self.count == self.number


class ShardTables(TablePatterns):
    """The source tables whose targets belong to a shard. Like its base class, it is hashable and can be
    pickled.
    """

    def __init__(self, shard: Shard, steps: Sequence[Any], source_tables: TablePatterns) -> None:
        """Create the tables of a shard.

        `steps` are the settings of the pipeline's steps, which may rename tables. `source_tables` selects the
        source's tables for all shards, and determines which of them are ghost tables.
        """
        super().__init__()
        self.shard = shard
        self._source_tables = PipelinePatterns(source_tables)
        self._steps = tuple(steps)
        self._owned: dict[TableName, bool] = {}

    @property
    def selects_all(self) -> bool:
        """False: other shards have tables too."""
        return False

    def matches(self, database: str, table: str) -> bool:
        """Return whether the table's target belongs to the shard."""
        name = TableName(database, table)
        owned = self._owned.get(name)
        if owned is None:
            # The copy that a schema change tool makes of a table belongs to the table's shard.
            is_own = self._source_tables.matches(database, table)
            owner = name if is_own else table_of_ghost(name) or name
            owned = self._owned[name] = self.shard.owns(target_name(self._steps, owner))
        return owned

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_owned": {}}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardTables):
            return NotImplemented
        return (self.shard, self._steps, self._source_tables) == (
            other.shard,
            other._steps,
            other._source_tables,
        )

    def __hash__(self) -> int:
        return hash(self.shard)


def whole_patterns(tables: TablePatterns) -> TablePatterns:
    """Return the tables of a source, without the restriction to a shard."""
    if isinstance(tables, NarrowedPatterns) and isinstance(tables.narrower, ShardTables):
        return tables.requested
    return tables


def target_name(steps: Sequence[Any], name: TableName) -> TableName:
    """Return the name that a table's target has after all steps. `steps` are their settings."""
    for step in steps:
        if isinstance(step, StepSection):
            name = step.target_name(name)
    return name
