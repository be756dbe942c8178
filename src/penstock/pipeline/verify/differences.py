# SPDX-License-Identifier: Apache-2.0
"""Compares full rows of two sides: missing rows, extra rows, and the columns that differ."""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy
import pyarrow

from penstock.changes import BROKEN_TEXT, Target
from penstock.pipeline.verify.hashed import Hashes, hashes
from penstock.pipeline.verify.kept_values import TEXTS


class Kind(StrEnum):
    """How a row of the target differs from the expected row."""

    MISSING = "missing"
    # The source has no such row, or the target has it more than once.
    EXTRA = "extra"
    CHANGED = "changed"
    # The row changes too often, or belongs to an unfinished batch, so it cannot be judged.
    UNSETTLED = "unsettled"


@dataclass(frozen=True)
class Difference:
    """A row that differs. `hash` is the hash of its key.

    `source` and `target` are the rows of the two sides, with values as in `Target.arrow()`, or None where
    there is no row. Their key TEXTS maps columns to the text of values that Arrow cannot represent. `columns`
    are the columns that differ. In the columns of `not_held`, the source has a value that the target cannot
    represent, and the target's value is empty.
    """

    kind: Kind
    hash: int
    source: dict[str, Any] | None
    target: dict[str, Any] | None
    columns: tuple[str, ...] = ()
    not_held: tuple[str, ...] = ()

    @property
    def row(self) -> dict[str, Any]:
        """The row of the source, or else of the target, from which the key is read."""
        row = self.source if self.source is not None else self.target
        assert row is not None, "a difference has a row on one side at least"
        return row


def differences(
    target: Target,
    columns: Sequence[str],
    expected: Sequence[pyarrow.RecordBatch],
    target_rows: Sequence[pyarrow.RecordBatch],
) -> Iterator[Difference]:
    """Yield the differences between two sides, by key; without a key, by whole rows.

    JSON texts are compared as documents, because targets may reformat them. Rows that differ only in values
    that the target cannot represent are yielded without `columns`.
    """
    key = target.primary_key or tuple(columns)
    documents = {column.name for column in target.columns if column.type_text.lower() == "json"}
    target_by_key: dict[int, deque[dict[str, Any]]] = defaultdict(deque)
    for hashed, row in _rows(target_rows, key):
        target_by_key[hashed].append(row)
    unmatched: list[tuple[int, dict[str, Any]]] = []
    for hashed, row in _rows(expected, key):
        # Of rows with equal keys, pair equal rows first.
        candidates = target_by_key[hashed]
        equal_row = next(
            (
                candidate
                for candidate in candidates
                if not _differing_columns(row, candidate, columns, documents)
            ),
            None,
        )
        if equal_row is None:
            unmatched.append((hashed, row))
        else:
            candidates.remove(equal_row)
    for hashed, row in unmatched:
        if target_by_key[hashed]:
            target_row = target_by_key[hashed].popleft()
            unlike = _differing_columns(row, target_row, columns, documents)
            not_held = tuple(name for name in unlike if _is_not_held(row, target_row, name))
            differing = tuple(name for name in unlike if name not in not_held)
            yield Difference(Kind.CHANGED, hashed, row, target_row, differing, not_held)
        else:
            yield Difference(Kind.MISSING, hashed, row, None)
    for hashed, candidates in target_by_key.items():
        for target_row in candidates:
            yield Difference(Kind.EXTRA, hashed, None, target_row)


def hashes_of(all_differences: Sequence[Difference]) -> Hashes:
    """Return the hashes of the keys of differences, ascending."""
    return numpy.array(sorted({difference.hash for difference in all_differences}), numpy.uint64)


def _rows(batches: Sequence[pyarrow.RecordBatch], key: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for batch in batches:
        for hashed, row in zip(hashes(batch, key).tolist(), batch.to_pylist(), strict=True):
            texts = row.pop(TEXTS, None)
            yield hashed, row if texts is None else row | {TEXTS: json.loads(texts)}


def _differing_columns(
    source: dict[str, Any], target: dict[str, Any], columns: Sequence[str], documents: set[str]
) -> tuple[str, ...]:
    """Return the columns in which two rows differ."""
    return tuple(
        name
        for name in columns
        if not _equal(source[name], target[name], is_document=name in documents)
        or _text(source, name) != _text(target, name)
    )


def _text(row: dict[str, Any], name: str) -> str | None:
    """Return the text of a value that Arrow cannot represent, None for all other values."""
    text: str | None = row.get(TEXTS, {}).get(name)
    return text


def _is_not_held(source: dict[str, Any], target: dict[str, Any], name: str) -> bool:
    """Return whether the source's text is invalid and the target's text column therefore holds null or an
    empty text.
    """
    text = _text(source, name) or ""
    return text.startswith(BROKEN_TEXT) and _text(target, name) is None and target[name] in (None, "")


def _equal(source: Any, target: Any, *, is_document: bool) -> bool:
    if source == target:
        return True
    if source is None or target is None:
        return False
    if isinstance(source, float) and isinstance(target, float):
        return math.isnan(source) and math.isnan(target)
    if is_document:
        try:
            return bool(json.loads(source) == json.loads(target))
        except ValueError:
            return False
    return False
