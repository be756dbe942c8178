# SPDX-License-Identifier: Apache-2.0
"""Determines which rows of a merged target belong to which source table.

A shard column may identify the rows of each source table. When a source table is emptied, its rows in the
target must be known, so that the other tables' rows are kept.
"""

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
    """How emptying a source table affects its targets."""

    # Each target is emptied too.
    WHOLE = auto()
    # The targets may have other rows, so the rows to delete are found by comparing.
    COMPARED = auto()
    # The targets keep the rows that their source lost.
    STAYS = auto()
    # Rows have to be deleted, but comparing cannot identify them, because full loads are filtered out.
    UNKNOWN = auto()


def emptied_through(chain: Sequence[Step], table: Target) -> Emptied:
    """Return the effect that emptying a source table has after a chain of steps."""
    effect, loads = Emptied.WHOLE, True
    target: Target | None = table
    for step in chain:
        if target is None:
            return Emptied.STAYS
        removes, empties = step.removes(target), step.empties(target)
        if not removes and not empties:
            return Emptied.STAYS
        loads = loads and removes
        if not empties or step.named_by_rows(target):
            effect = Emptied.COMPARED
        target = step.target(target)
    if target is None:
        return Emptied.STAYS
    return effect if loads or effect is Emptied.WHOLE else Emptied.UNKNOWN


def may_have_other_rows(
    chain: Sequence[Step], tables: Mapping[str, Target], key: str, *, first: bool = False
) -> bool:
    """Return whether a table's target may have rows other than the table's current rows.

    Such rows may come from other tables, or from shards that other pipelines write. Unless it is the `first`
    load, they may also be rows that the table has lost. `tables` are the source tables by key. Other
    pipelines that write to the same target are not known here.
    """
    target: Target | None = tables[key]
    for step in chain:
        if target is None:
            return False
        marks_deletes = isinstance(step, SoftDeleteStep) and step.settings.applies_to(target)
        keeps_lost = marks_deletes or not step.removes(target)
        if step.slots_of(target) is not None or step.named_by_rows(target) or (keeps_lost and not first):
            return True
        target = step.target(target)
    other_targets = (target_through(chain, table) for other_key, table in tables.items() if other_key != key)
    return target is not None and any(
        other is not None and other.name == target.name for other in other_targets
    )


def targets_of_table(chain: Sequence[Step], table: Target, known: Collection[TableName]) -> list[Target]:
    """Return the targets of a source table. If the values of its rows determine the targets, return every
    known table that they could name.
    """
    target = target_through(chain, table)
    if target is None:
        return []
    if not named_by_rows(chain, table):
        return [target]
    return [replace(target, name=name) for name in sorted(known) if could_be_named(target.name, name)]


def shard_of(
    chain: Sequence[Step], steps: Sequence[StepSettings], table: Target, instance: str
) -> ShardValue | None:
    """Return the shard value of all rows from a source table, None if no column identifies them.

    `chain` are the steps, `steps` their settings.
    """
    kept_shard: ShardValue | None = None
    target: Target | None = table
    for number, step in enumerate(chain):
        if target is None:
            return None
        shard = step.shard_of(target, instance)
        if shard is not None and keeps_column(steps[number + 1 :], shard.column):
            kept_shard = shard
        target = step.target(target)
    return (
        kept_shard if target is not None and kept_shard and kept_shard.column in target.column_names else None
    )


def may_share_rows(first: ShardValue | None, second: ShardValue | None) -> bool:
    """Return whether a row of a target may come from either of two tables."""
    if first is None or second is None or first.column != second.column:
        return True
    # Some targets treat texts that differ only in case as equal.
    return first.value.casefold() == second.value.casefold()


def in_shard(rows: pyarrow.RecordBatch, shard: ShardValue) -> npt.NDArray[numpy.bool_]:
    """Return a mask of the rows of a target that belong to a shard."""
    values = rows.column(shard.column)
    equal = pc.fill_null(pc.equal(values, pyarrow.scalar(shard.value).cast(values.type)), False)
    mask: npt.NDArray[numpy.bool_] = equal.to_numpy(zero_copy_only=False)
    return mask
