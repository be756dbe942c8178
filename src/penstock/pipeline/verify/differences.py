# SPDX-License-Identifier: Apache-2.0
"""Rows of two sides in full: which are missing, which are there besides, and which differ in what."""

import json
import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy
import pyarrow

from penstock.changes import Target
from penstock.pipeline.verify.hashed import Hashes, hashes
from penstock.pipeline.verify.kept_values import TEXTS
from penstock.sinks.mysql.odd import BROKEN_TEXT


class Kind(StrEnum):
    """How a row of the target differs from what it has to be."""

    MISSING = "missing"
    # There, though the source has no such row, or there twice.
    EXTRA = "extra"
    CHANGED = "changed"
    # Written by the source so often, or by a batch so unfinished, that nothing can be said of it.
    UNSETTLED = "unsettled"


@dataclass(frozen=True)
class Difference:
    """One row. `hash` is that of its key; rows are values of `Target.arrow()`, None where there is none.

    Behind them stands, under TEXTS, what no such type holds, by column. `columns` differ; in those of
    `not_held` the source has what the target's column cannot hold, and the target nothing.
    """

    kind: Kind
    hash: int
    source: dict[str, Any] | None
    target: dict[str, Any] | None
    columns: tuple[str, ...] = ()
    not_held: tuple[str, ...] = ()

    @property
    def row(self) -> dict[str, Any]:
        """The row of either side: for its key."""
        row = self.source if self.source is not None else self.target
        assert row is not None, "a difference has a row on one side at least"
        return row


def differences(
    target: Target,
    columns: Sequence[str],
    expected: Sequence[pyarrow.RecordBatch],
    target_rows: Sequence[pyarrow.RecordBatch],
) -> Iterator[Difference]:
    """Yield what differs between two sides, by key; without a key, by whole rows.

    Texts of JSON columns are the same where they say the same, as targets may write documents anew. Rows that
    differ only in what the target cannot hold come with no `columns`.
    """
    key = target.primary_key or tuple(columns)
    documents = {one.name for one in target.columns if one.type_text.lower() == "json"}
    theirs: dict[int, deque[dict[str, Any]]] = defaultdict(deque)
    for hashed, row in _rows(target_rows, key):
        theirs[hashed].append(row)
    left: list[tuple[int, dict[str, Any]]] = []
    for hashed, row in _rows(expected, key):
        # Of rows with one key those that agree are paired first.
        others = theirs[hashed]
        same = next((one for one in others if not _unlike(row, one, columns, documents)), None)
        if same is None:
            left.append((hashed, row))
        else:
            others.remove(same)
    for hashed, row in left:
        if theirs[hashed]:
            other = theirs[hashed].popleft()
            unlike = _unlike(row, other, columns, documents)
            lost = tuple(name for name in unlike if _is_not_held(row, other, name))
            differing = tuple(name for name in unlike if name not in lost)
            yield Difference(Kind.CHANGED, hashed, row, other, differing, lost)
        else:
            yield Difference(Kind.MISSING, hashed, row, None)
    for hashed, others in theirs.items():
        for other in others:
            yield Difference(Kind.EXTRA, hashed, None, other)


def hashes_of(found: Sequence[Difference]) -> Hashes:
    """Return, ascending, the hashes of the keys of differences."""
    return numpy.array(sorted({one.hash for one in found}), numpy.uint64)


def _rows(batches: Sequence[pyarrow.RecordBatch], key: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for batch in batches:
        for hashed, row in zip(hashes(batch, key).tolist(), batch.to_pylist(), strict=True):
            texts = row.pop(TEXTS, None)
            yield hashed, row if texts is None else row | {TEXTS: json.loads(texts)}


def _unlike(
    one: dict[str, Any], other: dict[str, Any], columns: Sequence[str], documents: set[str]
) -> tuple[str, ...]:
    """Return the columns in which two rows differ."""
    return tuple(
        name
        for name in columns
        if not _equal(one[name], other[name], is_document=name in documents)
        or _text(one, name) != _text(other, name)
    )


def _text(row: dict[str, Any], name: str) -> str | None:
    """Return the text of a value that Arrow's types cannot hold, None for all others."""
    text: str | None = row.get(TEXTS, {}).get(name)
    return text


def _is_not_held(source: dict[str, Any], target: dict[str, Any], name: str) -> bool:
    """Tell whether the source has bytes that are no text and the target none, as a text column there cannot
    have them."""
    text = _text(source, name) or ""
    return text.startswith(BROKEN_TEXT) and _text(target, name) is None and target[name] in (None, "")


def _equal(one: Any, other: Any, *, is_document: bool) -> bool:
    if one == other:
        return True
    if one is None or other is None:
        return False
    if isinstance(one, float) and isinstance(other, float):
        return math.isnan(one) and math.isnan(other)
    if is_document:
        try:
            return bool(json.loads(one) == json.loads(other))
        except ValueError:
            return False
    return False
