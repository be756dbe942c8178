# SPDX-License-Identifier: Apache-2.0
"""Which rows of a target belong to which of its sources: where a shard column tells, and where a table is
emptied."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.model import TableName
from penstock.pipeline.settings import StepSettings
from penstock.pipeline.step import ShardValue, Step, could_be_named, named_by_rows, target_through
from penstock.pipeline.steps.soft_delete import SoftDeleteStep
from penstock.pipeline.verify.kept_keys import keeps_column


class Emptied(Enum):
    """What an emptied table of a source means for its targets."""

    # Each is emptied with it.
    WHOLE = auto()
    # Other rows may be in them, so the rows that go are found by comparing.
    COMPARED = auto()
    # They keep what their source lost.
    STAYS = auto()
    # Rows have to go, and comparing cannot tell which: loads do not pass.
    UNKNOWN = auto()


def emptied_through(chain: Sequence[Step], table: Target) -> Emptied:
    """Return what steps make of emptying a source's table."""
    found, loads = Emptied.WHOLE, True
    target: Target | None = table
    for step in chain:
        if target is None:
            return Emptied.STAYS
        removes, empties = step.removes(target), step.empties(target)
        if not removes and not empties:
            return Emptied.STAYS
        loads = loads and removes
        if not empties or step.named_by_rows(target):
            found = Emptied.COMPARED
        target = step.target(target)
    if target is None:
        return Emptied.STAYS
    return found if loads or found is Emptied.WHOLE else Emptied.UNKNOWN


def may_have_others(
    chain: Sequence[Step], tables: Mapping[str, Target], key: str, *, first: bool = False
) -> bool:
    """Tell whether a table's target may have rows that are not the table's as it is now: of other tables, of
    shards that other pipelines write, or, unless it is the `first` load, rows that the table lost.

    `tables` are those of sources, by key. What other pipelines write under the same name is not known.
    """
    target: Target | None = tables[key]
    for step in chain:
        if target is None:
            return False
        marks = isinstance(step, SoftDeleteStep) and step.settings.concerns(target)
        keeps_lost = marks or not step.removes(target)
        if step.slots_of(target) is not None or step.named_by_rows(target) or (keeps_lost and not first):
            return True
        target = step.target(target)
    others = (target_through(chain, table) for other, table in tables.items() if other != key)
    return target is not None and any(other is not None and other.name == target.name for other in others)


def targets_of_table(chain: Sequence[Step], table: Target, known: Collection[TableName]) -> list[Target]:
    """Return the targets of a source's table; where its rows name them, those of the known ones that fit."""
    target = target_through(chain, table)
    if target is None:
        return []
    if not named_by_rows(chain, table):
        return [target]
    return [replace(target, name=name) for name in sorted(known) if could_be_named(target.name, name)]


def shard_of(
    chain: Sequence[Step], steps: Sequence[StepSettings], table: Target, instance: str
) -> ShardValue | None:
    """Return what a shard column has in all rows that come from a source's table; None where no column tells.

    `chain` are the steps, `steps` their settings.
    """
    found: ShardValue | None = None
    target: Target | None = table
    for number, step in enumerate(chain):
        if target is None:
            return None
        shard = step.shard_of(target, instance)
        if shard is not None and keeps_column(steps[number + 1 :], shard.column):
            found = shard
        target = step.target(target)
    return found if target is not None and found and found.column in target.column_names else None


def may_share_rows(one: ShardValue | None, other: ShardValue | None) -> bool:
    """Tell whether a row of a target may come from either of two tables."""
    if one is None or other is None or one.column != other.column:
        return True
    # Some targets take texts that differ in case alone for the same.
    return one.value.casefold() == other.value.casefold()


def in_shard(rows: pyarrow.RecordBatch, shard: ShardValue) -> npt.NDArray[numpy.bool_]:
    """Tell of each row of a target whether it is of a shard."""
    values = rows.column(shard.column)
    equal = pc.fill_null(pc.equal(values, pyarrow.scalar(shard.value).cast(values.type)), False)
    found: npt.NDArray[numpy.bool_] = equal.to_numpy(zero_copy_only=False)
    return found
