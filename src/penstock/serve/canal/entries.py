# SPDX-License-Identifier: Apache-2.0
"""Canal entries as encoded bytes: where each entry starts, how many entries fit into a batch, and where whole
transactions end.

The kernel has already framed each entry, so consecutive entries are copied as one piece of bytes, without
work per entry.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pyarrow
from numpy.typing import NDArray

from penstock.serve.pieces import Piece

_NO_END = -1


@dataclass(frozen=True)
class Taken:
    """Entries from one piece: their bytes, their number of changes, and the number of the entry after them.

    `end_offset` is the end of the last whole transaction among them, as an offset in the file that contains
    the piece's changes. It is None if no transaction ends among them.
    """

    parts: tuple[memoryview, ...]
    bytes: int
    rows: int
    next: int
    end_offset: int | None


@dataclass(frozen=True, eq=False)
class _Run:
    """The entries of one batch. `offsets` has one element more than there are entries."""

    offsets: NDArray[np.int64]
    content: memoryview
    rows_before: NDArray[np.int64]
    ends: NDArray[np.int64]


class Entries:
    """The entries of a piece, numbered from 0 across its batches."""

    def __init__(self, batches: tuple[pyarrow.RecordBatch, ...]) -> None:
        self._runs = [_run_of(batch) for batch in batches if batch.num_rows]
        self._starts = [0, *accumulate(len(run.ends) for run in self._runs)]
        self.count = self._starts[-1]

    def take(self, first: int, limit: int, *, at_least_one: bool) -> Taken:
        """Return entries from `first` on that fit into `limit` bytes; with `at_least_one`, the first entry
        may exceed the limit.

        Entries without bytes are hidden and skipped.
        """
        parts: list[memoryview] = []
        size = rows = 0
        at, end = first, _NO_END
        while at < self.count:
            index = bisect_right(self._starts, at) - 1
            run, row = self._runs[index], at - self._starts[index]
            begin = int(run.offsets[row])
            stop = int(np.searchsorted(run.offsets, begin + limit - size, side="right")) - 1
            if stop <= row:
                if parts or not at_least_one:
                    break
                stop = row + 1
            until = int(run.offsets[stop])
            if until > begin:
                parts.append(run.content[begin:until])
                size += until - begin
            rows += int(run.rows_before[stop] - run.rows_before[row])
            end = max(end, int(run.ends[stop - 1]) if run.ends[stop - 1] > _end_before(run, row) else _NO_END)
            at = self._starts[index] + stop
            if stop < len(run.ends):
                break
        return Taken(tuple(parts), size, rows, at, None if end == _NO_END else end)


def entries_of(piece: Piece) -> Entries:
    """Return a piece's entries, computed once for all consumers."""
    entries = piece.derived.get("canal")
    if entries is None:
        entries = piece.derived["canal"] = Entries(piece.arrow())
    assert isinstance(entries, Entries), "nobody else keeps anything under this name"
    return entries


def _end_before(run: _Run, row: int) -> int:
    return int(run.ends[row - 1]) if row else _NO_END


def _run_of(batch: pyarrow.RecordBatch) -> _Run:
    value = batch.column("value")
    _, offsets, content = value.buffers()
    begins = np.frombuffer(offsets, np.int64)[value.offset : value.offset + len(value) + 1]
    ends = batch.column("end_offset").fill_null(_NO_END).to_numpy(zero_copy_only=False)
    rows = batch.column("rows").to_numpy(zero_copy_only=False)
    return _Run(
        begins,
        memoryview(content) if content is not None else memoryview(b""),
        np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]),
        # The ends of transactions increase with the position in the log, so the latest end before an entry is
        # the maximum so far.
        np.maximum.accumulate(ends),
    )
