# SPDX-License-Identifier: Apache-2.0
"""Which rows of a target a pipeline answers for, and how one goes that its source no longer has.

Comparing and removing both ask here: a row that another pipeline wrote, or that is to stay, is not extra.
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
    """What steps make a pipeline's part of the target of one table. Pickles.

    `removes` tells whether rows go that the source no longer has; `slots` which rows are the pipeline's, all
    where there are none. Rows that go are marked in the columns of `marks`: whether, and when ("" for none).
    """

    removes: bool = True
    slots: tuple[Slots, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()

    def deleted(self, deletes: Changes) -> Changes:
        """Return deletes of rows as the target takes them: as updates of the marks, where there are any."""
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
        # An update is its two images, one after the other.
        paired = both.take(pyarrow.array(numpy.arange(2 * count).reshape(2, count).T.ravel()))
        pairs = deletes.with_rows(paired)
        version = rows.column("_commit_version")[0].as_py()
        return with_version(pairs, version, ["update_preimage", "update_postimage"] * count)


def scope_of(chain: Sequence[Step], steps: Sequence[StepSettings], table: Target) -> Scope:
    """Return a pipeline's part of the target of a source's table. `chain` are the steps, `steps` their
    settings.

    Raises OptionInvalid where the target does not have what tells its rows from those of others.
    """
    found = Scope()
    target: Target | None = table
    for number, step in enumerate(chain):
        if target is None:
            return found
        later = steps[number + 1 :]
        found = replace(found, removes=found.removes and step.removes(target))
        slots = step.slots_of(target)
        if slots is not None:
            _refuse_changed(table, step, slots.columns, later)
            found = replace(found, slots=(*found.slots, slots))
        if isinstance(step, SoftDeleteStep) and step.settings.concerns(target):
            mark = (step.settings.column, step.settings.at or "")
            _refuse_changed(table, step, [name for name in mark if name], later)
            found = replace(found, marks=(*found.marks, mark))
        target = step.target(target)
    wanted = [name for one in found.slots for name in one.columns]
    wanted += [name for mark in found.marks for name in mark if name]
    missing = [name for name in wanted if target is not None and name not in target.column_names]
    if missing:
        raise _unknown(table, "the steps", missing)
    return found


def scopes_of(tables: Iterable[Target], steps: Sequence[StepSettings]) -> list[Scope]:
    """Return the parts of several tables, in their order. Raises OptionInvalid as `scope_of` does."""
    chain = [one.make() for one in steps]
    try:
        return [scope_of(chain, steps, table) for table in tables]
    finally:
        for step in chain:
            step.close()


def joint_slots(scopes: Iterable[Scope]) -> tuple[Slots, ...]:
    """Return the slots of tables whose rows come into one target.

    Raises OptionInvalid where they differ: no row tells of which of the tables it is.
    """
    found = list(dict.fromkeys(one.slots for one in scopes))
    if len(found) > 1:
        raise OptionInvalid(
            "tables that become one pass different shards, so that no row of it tells whose it is",
            hint="Write one shard step for all tables that become one",
        )
    return found[0] if found else ()


def in_slots(rows: pyarrow.RecordBatch, slots: Iterable[Slots]) -> npt.NDArray[numpy.bool_]:
    """Tell of each row of a target whether it is of the shards that a pipeline lets pass."""
    found = numpy.ones(rows.num_rows, numpy.bool_)
    for one in slots:
        numbers = pyarrow.array(shard_slots(rows, list(one.columns))).to_numpy()
        found &= numpy.isin(numbers % one.of, one.keep)
    return found


def _filled(
    rows: pyarrow.RecordBatch, name: str, value: pyarrow.Scalar | pyarrow.Array
) -> pyarrow.RecordBatch:
    place = rows.schema.get_field_index(name)
    field = rows.schema.field(place)
    made = pc.cast(value, field.type)
    column = pyarrow.repeat(made, rows.num_rows) if isinstance(made, pyarrow.Scalar) else made
    return rows.set_column(place, field, column)


def _refuse_changed(table: Target, step: Step, names: Iterable[str], later: Sequence[StepSettings]) -> None:
    changed = [name for name in names if not keeps_column(later, name)]
    if changed:
        raise _unknown(table, step.verb, changed)


def _unknown(table: Target, verb: str, names: Sequence[str]) -> OptionInvalid:
    return OptionInvalid(
        f"the rows of {table.name} that are in its target cannot be told by {', '.join(names)} ({verb}):"
        " a later step changes or drops it",
        hint=f"Write the {verb} step after the step that changes {', '.join(names)}",
    )
