# SPDX-License-Identifier: Apache-2.0
"""Determines which tables of a pipeline write to the same target, and what happens in the target when one of
these tables is emptied.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from penstock.changes import Target
from penstock.engine.tracked_table import TrackedTable
from penstock.model import TableName
from penstock.pipeline.evolution import joined_targets
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import split_key
from penstock.pipeline.step import ShardValue, Step, could_be_named, named_by_rows, target_through
from penstock.pipeline.verify.merges import Emptied, emptied_through, may_share_rows, shard_of


class SharedTargets:
    """Determines the targets of a pipeline's tables. `tables` contains all known tables by key, and later
    tables as they are added.
    """

    def __init__(
        self, settings: PipelineSettings, steps: Sequence[Step], tables: Mapping[str, TrackedTable]
    ) -> None:
        self._settings = settings
        self._steps = steps
        self._tables = tables

    def target_of(self, key: str) -> Target | None:
        """Return the target that the steps give to a table, None if the steps drop all of its rows."""
        table = self._tables.get(key)
        return None if table is None else target_through(self._steps, table.current)

    def sharing(self, key: str, target: TableName) -> Iterator[str]:
        """Yield the other tables, by key, whose rows are written to a target."""
        for other in self._tables:
            if other != key:
                other_target = self.target_of(other)
                if other_target is not None and other_target.name == target:
                    yield other

    def may_meet(self, keys: Collection[str]) -> bool:
        """Return whether rows of other tables may have the same keys as rows of these tables in the same
        target.
        """
        by_target: dict[TableName, list[str]] = {}
        for key in self._tables:
            target = self.target_of(key)
            if target is not None:
                by_target.setdefault(target.name, []).append(key)
        return any(self._some_meet(group, keys) for group in by_target.values() if len(group) > 1)

    def _some_meet(self, group: Sequence[str], keys: Collection[str]) -> bool:
        """Return whether rows of the tables in `keys` may have the same keys as rows of the group's other
        tables.
        """
        shards = {key: self._shard_of(key) for key in group}
        return any(
            other != key and may_share_rows(shards[key], shards[other])
            for key in group
            if key in keys
            for other in group
        )

    def may_be_shared_with(self, key: str, sources: Collection[str]) -> bool:
        """Return whether tables of the given sources may write to a table's target."""
        target = self.target_of(key)
        if target is None:
            return False
        is_named_by_rows = named_by_rows(self._steps, self._tables[key].current)
        return any(
            is_named_by_rows or other_target.name == target.name or named_by_rows(self._steps, table.current)
            for other, table in self._tables.items()
            if split_key(other)[0] in sources and (other_target := self.target_of(other)) is not None
        )

    def emptied(self, key: str, prepared: Collection[TableName]) -> Emptied:
        """Return how emptying a source table changes its target. `prepared` are the targets that exist."""
        target = self.target_of(key)
        if target is None:
            return Emptied.STAYS
        source = self._tables[key].current
        if target.name not in prepared and not named_by_rows(self._steps, source):
            return Emptied.STAYS
        effect = emptied_through(self._steps, source)
        is_shared = effect is Emptied.WHOLE and any(self.sharing(key, target.name))
        return Emptied.COMPARED if is_shared else effect

    def wanted(
        self, stopped: Collection[str], known: Collection[TableName]
    ) -> dict[TableName, tuple[Target, str]]:
        """Return the targets that the tables need now, each with the key of one of its tables.

        `stopped` contains the tables that the pipeline continues without. `known` contains the targets that
        the rows' own columns may select.
        """
        wanted: dict[TableName, tuple[Target, str]] = {}
        for key, table in sorted(self._tables.items()):
            if key in stopped or table.gone:
                continue
            stepped = target_through(self._steps, table.current)
            if stepped is None:
                continue
            for name in self.names_of(table.current, stepped, known):
                before = wanted.get(name)
                # Several tables share a target, which keeps a column until all of them have dropped it.
                joined = stepped if before is None else joined_targets(before[0], stepped)
                wanted[name] = (replace(joined, name=name), key)
        return wanted

    def names_of(self, source: Target, stepped: Target, known: Collection[TableName]) -> list[TableName]:
        """Return the names of a table's targets. If a target's name depends on the row, the target is known
        only after such a row has been read.
        """
        if not named_by_rows(self._steps, source):
            return [stepped.name]
        return [name for name in sorted(known) if could_be_named(stepped.name, name)]

    def _shard_of(self, key: str) -> ShardValue | None:
        return shard_of(self._steps, self._settings.steps, self._tables[key].current, split_key(key)[0])
