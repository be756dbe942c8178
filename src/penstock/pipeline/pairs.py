# SPDX-License-Identifier: Apache-2.0
"""Handles updates as pairs of row images: which two images belong together, and what becomes of the update if
only one of them is kept.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as compute

from penstock.changes import Changes
from penstock.errors import StepFailed
from penstock.pipeline.step import Rejected

KINDS = ("insert", "update_preimage", "update_postimage", "delete")
INSERT, PREIMAGE, POSTIMAGE, DELETE = range(4)

Mask = npt.NDArray[numpy.bool_]
Kinds = npt.NDArray[numpy.int8]

_KIND_COLUMN = "_change_type"


@cache
def _kind_names() -> pyarrow.StringArray:
    """Return KINDS as an Arrow array. Built at first use, because building it makes pyarrow import pandas."""
    return pyarrow.array(KINDS)


def kinds_of(rows: pyarrow.RecordBatch) -> Kinds:
    """Return the kind of each row, as indexes into KINDS."""
    kinds: Kinds = compute.index_in(rows.column(_KIND_COLUMN), value_set=_kind_names()).to_numpy(
        zero_copy_only=False
    )
    return kinds.astype(numpy.int8)


def with_kinds(rows: pyarrow.RecordBatch, kinds: Kinds) -> pyarrow.RecordBatch:
    """Return rows with other kinds, indexes into KINDS."""
    index = rows.schema.get_field_index(_KIND_COLUMN)
    names = _kind_names().take(pyarrow.array(kinds))
    return rows.set_column(index, rows.schema.field(index), names)


def firsts_of_pairs(rows: pyarrow.RecordBatch, kinds: Kinds) -> Mask:
    """Return a mask of the preimages that are directly followed by their postimage."""
    first = numpy.zeros(len(kinds), dtype=bool)
    if len(kinds) < 2:
        return first
    versions = rows.column("_commit_version").to_numpy()
    numbers = compute.struct_field(rows.column("_metadata"), "row").to_numpy(zero_copy_only=False)
    first[:-1] = (
        (kinds[:-1] == PREIMAGE)
        & (kinds[1:] == POSTIMAGE)
        & (versions[:-1] == versions[1:])
        & (numbers[:-1] == numbers[1:])
    )
    return first


def seconds_of_pairs(first: Mask) -> Mask:
    """Return a mask of the postimages that directly follow their preimage."""
    second = numpy.zeros_like(first)
    second[1:] = first[:-1]
    return second


def filter_pairs(changes: Changes, passes: Mask) -> Changes:
    """Return the rows that pass. An update with one passing image becomes a delete or an insert.

    This keeps the state of a target correct: a row that stops matching is deleted from the target, and a row
    that starts to match is inserted.
    """
    rows = changes.rows
    if passes.all():
        return changes
    if not passes.any():
        return changes.with_rows(rows.slice(0, 0))
    kinds = kinds_of(rows)
    first = firsts_of_pairs(rows, kinds)
    other = numpy.ones_like(passes)
    other[:-1][first[:-1]] = passes[1:][first[:-1]]
    second = seconds_of_pairs(first)
    other[1:][second[1:]] = passes[:-1][second[1:]]
    kinds = numpy.where(first & ~other, DELETE, kinds)
    kinds = numpy.where(second & ~other, INSERT, kinds).astype(numpy.int8)
    return changes.with_rows(with_kinds(rows, kinds).filter(pyarrow.array(passes)))


def split_lone_images(changes: Changes) -> Changes:
    """Return rows in which each image without its counterpart becomes a delete or an insert."""
    kinds = kinds_of(changes.rows)
    first = firsts_of_pairs(changes.rows, kinds)
    second = seconds_of_pairs(first)
    kinds = numpy.where((kinds == PREIMAGE) & ~first, DELETE, kinds)
    alone = numpy.where((kinds == POSTIMAGE) & ~second, INSERT, kinds).astype(numpy.int8)
    return changes.with_rows(with_kinds(changes.rows, alone))


# --- Rows that fail -------------------------------------------------------------------------


def position_of(changes: Changes) -> str | None:
    """Return the log position of the first change, as text."""
    if not len(changes):
        return None
    metadata = changes.rows.column("_metadata")[0].as_py()
    return f"{metadata['file']}:{metadata['offset']}"


def try_splitting(
    changes: Changes, work: Callable[[Changes], Changes], on_error: str | None, verb: str
) -> Iterator[Changes | Rejected]:
    """Yield the result of `work` on changes, and separately each single change on which `work` fails.

    If `work` raises StepFailed, it is retried on halves, down to a single change whose images stay together.
    With `on_error` "stop" or None the error is raised with the first row's position.
    """
    try:
        changed: Any = work(changes)
    except StepFailed as problem:
        problem.position = problem.position or position_of(changes)
        if on_error in (None, "stop"):
            problem.hint = problem.hint or _HINT
            raise
        middle = _middle(changes)
        if middle is None:
            yield Rejected(changes, verb, problem, kept=on_error == "dead_letter")
            return
        for half in (changes.rows.slice(0, middle), changes.rows.slice(middle)):
            yield from try_splitting(replace(changes, rows=half), work, on_error, verb)
        return
    yield changed


_HINT = "To go on without such rows, write on_error: dead_letter in the step, or errors: {rows: dead_letter}"


def _middle(changes: Changes) -> int | None:
    """Return where to divide changes without splitting a pair, None for a single change."""
    rows = len(changes)
    if rows < 2:
        return None
    first = firsts_of_pairs(changes.rows, kinds_of(changes.rows))
    middle = rows // 2
    if first[middle - 1]:
        middle += 1
    return middle if middle < rows else None
