# SPDX-License-Identifier: Apache-2.0
"""Determines which rows of a target a pipeline owns, and how a missing source row is deleted in the target.

Used both to compare and to delete: a row that another pipeline wrote, or that must be kept, does not count as
an extra row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as pc

from penstock._native import shard_slots
from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.pipeline.settings import StepSettings
from penstock.pipeline.step import Slots, Step
from penstock.pipeline.steps.soft_delete import SoftDeleteStep
from penstock.pipeline.verify.kept_keys import keeps_column
from penstock.pipeline.verify.system_columns import with_version


@dataclass(frozen=True)
class Scope:
    """Which rows of a table's target belong to a pipeline, according to its steps. Can be pickled.

    `removes` is true if rows that the source no longer has are deleted. `slots` selects the rows that belong
    to the pipeline; if it is empty, all rows do. `marks` contains the columns that mark deleted rows: pairs
    of a flag and a time, which is "" if there is none.
    """

    removes: bool = True
    slots: tuple[Slots, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()

    def deleted(self, deletes: Changes) -> Changes:
        """Return deletes in the form that the target needs: if it marks deleted rows, as updates that set the
        marks.
        """
        if not self.marks:
            return deletes
        rows = deletes.rows
        marked = rows
        for column, at in self.marks:
            marked = _filled(marked, column, pyarrow.scalar(1))
            if at:
                marked = _filled(marked, at, rows.column("_commit_timestamp"))
        both = pyarrow.Table.from_batches([rows, marked]).combine_chunks().to_batches()[0]
        count = rows.num_rows
        # Put the two images of each update next to each other.
        paired = both.take(pyarrow.array(numpy.arange(2 * count).reshape(2, count).T.ravel()))
        pairs = deletes.with_rows(paired)
        version = rows.column("_commit_version")[0].as_py()
        return with_version(pairs, version, ["update_preimage", "update_postimage"] * count)


def scope_of(chain: Sequence[Step], steps: Sequence[StepSettings], table: Target) -> Scope:
    """Return which part of a source table's target belongs to a pipeline.

    `chain` are the steps, `steps` their settings. Raises OptionInvalid if a column that identifies the
    pipeline's rows is missing from the target.
    """
    scope = Scope()
    target: Target | None = table
    for number, step in enumerate(chain):
        if target is None:
            return scope
        later = steps[number + 1 :]
        scope = replace(scope, removes=scope.removes and step.removes(target))
        slots = step.slots_of(target)
        if slots is not None:
            _refuse_changed(table, step, slots.columns, later)
            scope = replace(scope, slots=(*scope.slots, slots))
        if isinstance(step, SoftDeleteStep) and step.settings.applies_to(target):
            mark = (step.settings.column, step.settings.at or "")
            _refuse_changed(table, step, [name for name in mark if name], later)
            scope = replace(scope, marks=(*scope.marks, mark))
        target = step.target(target)
    needed = [name for owned_slots in scope.slots for name in owned_slots.columns]
    needed += [name for mark in scope.marks for name in mark if name]
    missing = [name for name in needed if target is not None and name not in target.column_names]
    if missing:
        raise _unknown(table, "the steps", missing)
    return scope


def scopes_of(tables: Iterable[Target], steps: Sequence[StepSettings]) -> list[Scope]:
    """Return the parts of several tables, in order. Raises OptionInvalid like `scope_of`."""
    chain = [step_settings.make() for step_settings in steps]
    try:
        return [scope_of(chain, steps, table) for table in tables]
    finally:
        for step in chain:
            step.close()


def joint_slots(scopes: Iterable[Scope]) -> tuple[Slots, ...]:
    """Return the slots of tables whose rows go to the same target.

    Raises OptionInvalid if they differ, because no row identifies its table.
    """
    distinct = list(dict.fromkeys(scope.slots for scope in scopes))
    if len(distinct) > 1:
        raise OptionInvalid(
            "tables that become one pass different shards, so that no row of it tells whose it is",
            hint="Write one shard step for all tables that become one",
        )
    return distinct[0] if distinct else ()


def in_slots(rows: pyarrow.RecordBatch, slots: Iterable[Slots]) -> npt.NDArray[numpy.bool_]:
    """Return a mask of the target's rows that pass every step that selects rows by a hash of columns."""
    mask = numpy.ones(rows.num_rows, numpy.bool_)
    for owned in slots:
        numbers = pyarrow.array(shard_slots(rows, list(owned.columns))).to_numpy()
        mask &= numpy.isin(numbers % owned.of, owned.keep)
    return mask


def _filled(
    rows: pyarrow.RecordBatch, name: str, value: pyarrow.Scalar | pyarrow.Array
) -> pyarrow.RecordBatch:
    index = rows.schema.get_field_index(name)
    field = rows.schema.field(index)
    scalar_or_array = pc.cast(value, field.type)
    column = (
        pyarrow.repeat(scalar_or_array, rows.num_rows)
        if isinstance(scalar_or_array, pyarrow.Scalar)
        else scalar_or_array
    )
    return rows.set_column(index, field, column)


def _refuse_changed(table: Target, step: Step, names: Iterable[str], later: Sequence[StepSettings]) -> None:
    changed = [name for name in names if not keeps_column(later, name)]
    if changed:
        raise _unknown(table, step.verb, changed)


def _unknown(table: Target, verb: str, names: Sequence[str]) -> OptionInvalid:
    return OptionInvalid(
        f"the rows of {table.name} cannot be identified in its target by {', '.join(names)} ({verb}):"
        " a later step changes or drops it",
        hint=f"Write the {verb} step after the step that changes {', '.join(names)}",
    )
