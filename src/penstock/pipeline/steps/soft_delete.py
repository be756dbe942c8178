# SPDX-License-Identifier: Apache-2.0
"""`soft_delete`: keep deleted rows, and mark them in a column.

- soft_delete: {column: is_deleted, at: deleted_at}

A delete becomes an update. If a row's primary key changes, the row is inserted under its new key, and the row
under the old key is marked as deleted.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import numpy
import pyarrow
import pyarrow.compute as compute
from pydantic import Field

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Column
from penstock.pipeline.pairs import (
    DELETE,
    INSERT,
    POSTIMAGE,
    PREIMAGE,
    Mask,
    firsts_of_pairs,
    kinds_of,
    seconds_of_pairs,
    with_kinds,
)
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import StepSection


class Settings(StepSection):
    """How a deleted row is marked."""

    SHORTHAND: ClassVar[str] = "column"

    column: str = Field(
        default="_deleted", min_length=1, description="the marker column: 1 for a deleted row, otherwise 0"
    )
    at: str | None = Field(default=None, min_length=1, description="a column for the time of the delete")


class SoftDeleteStep(Step):
    """Turns deletes into updates of a marker column."""

    verb = "soft_delete"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def target(self, target: Target) -> Target | None:
        if not self.settings.applies_to(target):
            return target
        added = [Column(self.settings.column, "tinyint", None, False)]
        if self.settings.at is not None:
            added.append(Column(self.settings.at, "timestamp(6)", None, True))
        known = {name.casefold() for name in target.column_names}
        for column in added:
            if column.name.casefold() in known:
                raise OptionInvalid(
                    f"soft_delete: {target.name} has a column {column.name!r} already",
                    hint="Choose another name with column or at",
                )
        # A deleted row keeps its values, which the source may now use in another row, so only the primary key
        # stays unique.
        return replace(target, columns=(*target.columns, *added), unique_keys=())

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        target = self.target(changes.target)
        assert target is not None, "rows of every table pass"
        if target is changes.target:
            return [changes]
        return [replace(changes, target=target, rows=self._mark_deleted(changes))]

    def _mark_deleted(self, changes: Changes) -> pyarrow.RecordBatch:
        """Return rows with the added columns. Each delete becomes both images of an update."""
        rows = changes.rows
        kinds = kinds_of(rows)
        first = firsts_of_pairs(rows, kinds)
        moved = first & self._key_moved(changes, first)
        # A preimage without a postimage means that no row has its key any more, like a delete.
        deleted = (kinds == DELETE) | ((kinds == PREIMAGE) & ~first) | moved
        kinds = numpy.where(seconds_of_pairs(moved), INSERT, kinds).astype(numpy.int8)
        # Each deleted row is repeated: first as it was, then marked.
        index = numpy.repeat(numpy.arange(len(kinds)), numpy.where(deleted, 2, 1))
        marked = numpy.zeros(len(index), dtype=bool)
        marked[1:] = index[1:] == index[:-1]
        before = numpy.zeros(len(index), dtype=bool)
        before[:-1] = marked[1:]
        kinds = kinds[index]
        kinds = numpy.where(before, PREIMAGE, numpy.where(marked, POSTIMAGE, kinds)).astype(numpy.int8)
        if len(index) != rows.num_rows:
            rows = rows.take(pyarrow.array(index))
        rows = with_kinds(rows, kinds)
        column_index = len(changes.target.columns)
        rows = rows.add_column(column_index, self.settings.column, pyarrow.array(marked).cast(pyarrow.int8()))
        if self.settings.at is not None:
            times = rows.column("_commit_timestamp")
            at = compute.if_else(pyarrow.array(marked), times, pyarrow.scalar(None, times.type))
            rows = rows.add_column(column_index + 1, self.settings.at, at)
        return rows

    def _key_moved(self, changes: Changes, first: Mask) -> Mask:
        moved = numpy.zeros_like(first)
        for name in changes.target.primary_key:
            column = changes.rows.column(name)
            if len(column) > 1:
                same = compute.fill_null(
                    compute.equal(column.slice(0, len(column) - 1), column.slice(1)), False
                )
                moved[:-1] |= ~same.to_numpy(zero_copy_only=False)
        return moved

    def empties(self, target: Target) -> bool:
        # Existing rows stay and are marked, as after a delete.
        return not self.settings.applies_to(target)


make = SoftDeleteStep
