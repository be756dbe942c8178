# SPDX-License-Identifier: Apache-2.0
"""The rows of a batch that were spilled to files of their table, and which of these rows are superseded.

A run has at most one row per key. Its rows are in files of the table. The keys of all its rows, also of
deleted rows, are in a spill file. Few keys at a time are read into memory, however large the batch is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy
import pyarrow

from penstock.sinks.lake.key_index import KeyIndex
from penstock.sinks.lake.parquet_files import DataFile
from penstock.sinks.lake.spill_file import SpillFile

# The column beside the key. No column of a table has this name.
_VERSION = "\0version"
# What a row of an index needs in memory, including what is needed to build it.
_INDEXED_ROW_BYTES = 128


@dataclass
class _Run:
    """A run's files, the offset of its keys in the spill file, and which of its rows are superseded."""

    files: list[DataFile]
    offset: int
    rows: int
    superseded: numpy.ndarray
    is_put: numpy.ndarray


class _Winners:
    """The last row of each key in some consecutive runs."""

    def __init__(self, runs: Sequence[int], keys: Sequence[pyarrow.Table]) -> None:
        table = pyarrow.concat_tables(keys)
        versions = table.column(_VERSION).to_numpy()
        self._versions = versions
        self._runs = numpy.repeat(
            numpy.array(runs, numpy.int32), numpy.array([len(part) for part in keys], numpy.int64)
        )
        table = _key_of(table)
        if not _are_ordered(keys):
            order = numpy.lexsort((self._runs, versions))
            self._versions, self._runs = versions[order], self._runs[order]
            table = table.take(pyarrow.array(order))
        self.index = KeyIndex(table)

    def supersede(self, run: int, keys: pyarrow.Table) -> numpy.ndarray:
        """Return which rows of a run have a later row here."""
        last = self.index.find(_key_of(keys).columns)
        versions, own = self._versions[last], keys.column(_VERSION).to_numpy()
        is_later = (versions > own) | ((versions == own) & (self._runs[last] > run))
        superseded: numpy.ndarray = (last >= 0) & is_later
        return superseded


class SpilledRuns:
    """The spilled runs of one table, in the order in which they were added."""

    def __init__(self, file: SpillFile, memory_bytes: int) -> None:
        self._file = file
        self._memory_bytes = memory_bytes
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def files(self) -> list[DataFile]:
        """The files of all runs."""
        return [file for run in self._runs for file in run.files]

    def add(
        self, keys: pyarrow.Table, versions: numpy.ndarray, is_put: numpy.ndarray, files: list[DataFile]
    ) -> None:
        """Add a run: the key, the version and the kind of each row, and the files of the rows that are
        written, in the same order.
        """
        offset = self._file.write(keys.append_column(_VERSION, pyarrow.array(versions)))
        superseded = numpy.zeros(len(keys), numpy.bool_)
        self._runs.append(_Run(files, offset, len(keys), superseded, is_put))

    def clear(self) -> None:
        """Forget the runs."""
        self._runs = []

    def find_superseded(self, visit: Callable[[KeyIndex], None]) -> int:
        """Determine which rows a later row of the same key supersedes; return the number of distinct keys.

        `visit` is called with the keys of some runs at a time, each of which is within the memory.
        """
        for first, stop in self._groups():
            winners = _Winners(range(first, stop), [self._keys(number) for number in range(first, stop)])
            for number, run in enumerate(self._runs):
                run.superseded |= winners.supersede(number, self._keys(number))
            visit(winners.index)
        return sum(len(run.superseded) - int(run.superseded.sum()) for run in self._runs)

    def masks(self) -> Iterator[numpy.ndarray | None]:
        """Yield the superseded rows of each file as packed bits, None if it has no such row."""
        for run in self._runs:
            of_rows, first = run.superseded[run.is_put], 0
            for file in run.files:
                mask = of_rows[first : first + file.rows]
                first += file.rows
                yield numpy.packbits(mask) if mask.any() else None
            assert first == len(of_rows), "the files have the rows that are written"

    def _groups(self) -> Iterator[tuple[int, int]]:
        """Yield consecutive runs whose keys fit into the memory."""
        first = rows = 0
        rows_max = self._memory_bytes // _INDEXED_ROW_BYTES
        for number, run in enumerate(self._runs):
            if number > first and rows + run.rows > rows_max:
                yield first, number
                first, rows = number, 0
            rows += run.rows
        if first < len(self._runs):
            yield first, len(self._runs)

    def _keys(self, number: int) -> pyarrow.Table:
        return self._file.read(self._runs[number].offset)


def _key_of(keys: pyarrow.Table) -> pyarrow.Table:
    return keys.drop_columns([_VERSION])


def _are_ordered(keys: Sequence[pyarrow.Table]) -> bool:
    """Return whether no version of a run is below a version of the run before."""
    bounds = [
        (int(versions.min()), int(versions.max()))
        for versions in (part.column(_VERSION).to_numpy() for part in keys)
        if len(versions)
    ]
    return all(before[1] <= after[0] for before, after in pairwise(bounds))
