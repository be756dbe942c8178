# SPDX-License-Identifier: Apache-2.0
"""Changes rows of a table whose files never change: files that hold one of the keys are written anew.

A file is passed over where its bounds show that it has none of the keys, or its key columns do. What takes
the place of a row stands in the file that takes the place of its file, so tables keep the order in which they
were loaded, and changes of neighbouring keys touch few files.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy
import pyarrow

from penstock.sinks.lake.key_index import KeyIndex
from penstock.sinks.lake.parquet_files import Bounds, DataFile, Folder, PartFiles

# Files are gone through side by side, but no more of them, as each costs the memory of a row group or two.
_THREADS_MAX = 4
# With so many small files, all of them are written anew as few.
_SMALL_FILES_MAX = 16
# A file is small below this part of the size that files are to have.
_SMALL_FRACTION = 4

# Given rows of a file, the number of each one's key or -1, and which file it is: what is in their place.
Mend = Callable[[pyarrow.Table, numpy.ndarray, int], pyarrow.Table]


@dataclass
class Rewritten:
    """What became of a table's files."""

    removed: list[DataFile] = field(default_factory=list)
    added: list[DataFile] = field(default_factory=list)
    # The rows that were in the files that are removed.
    rows: int = 0


class CopyOnWrite:
    """Goes through files of one folder, and writes anew those that hold one of the keys."""

    def __init__(
        self, folder: Folder, schema: pyarrow.Schema, key: Sequence[str], index: KeyIndex, mend: Mend
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._key = list(key)
        self._index = index
        self._mend = mend

    def rewrite(
        self, files: Sequence[DataFile], output: Callable[[], PartFiles], bytes_max: int
    ) -> Rewritten:
        """Return what takes the place of files, in which `mend` was asked about every row group that holds
        one of the keys. `output` makes writers of new files, which may have about `bytes_max` bytes.

        Raises what reading and writing raise; then what was written is deleted.
        """
        bounds = [[one.bounds.get(name) for name in self._key] for one in files]
        chosen = [
            number
            for number, of_file in enumerate(bounds)
            if self._index.may_have([_told(one) for one in of_file])
        ]
        small = [number for number, one in enumerate(files) if one.bytes * _SMALL_FRACTION < bytes_max]
        joined = set(small) if len(small) > _SMALL_FILES_MAX else set()
        todo = sorted(joined.union(chosen), key=lambda number: _order(bounds[number]))
        threads = max(1, min(_THREADS_MAX, os.cpu_count() or 1, len(todo)))
        # Neighbours go to one writer, so that what is written has narrow bounds too.
        shares = [share.tolist() for share in numpy.array_split(numpy.array(todo, numpy.int64), threads)]
        writers = [output() for _ in shares]

        def work(share: list[int], writer: PartFiles) -> list[int]:
            return [number for number in share if self._one(files[number], number, writer, number in joined)]

        done = Rewritten()
        try:
            with ThreadPoolExecutor(threads) as pool:
                touched = [number for found in pool.map(work, shares, writers) for number in found]
            for writer in writers:
                done.added += writer.finish()
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        done.removed = [files[number] for number in touched]
        done.rows = sum(one.rows for one in done.removed)
        return done

    def _one(self, file: DataFile, number: int, writer: PartFiles, anyway: bool) -> bool:
        """Write a file anew, and tell whether that was needed."""
        with self._folder.open(file.path) as opened:
            keys = pyarrow.schema([self._schema.field(name) for name in self._key])
            # A column may have become one of the key after the file was written.
            there = [name for name in self._key if name in opened.schema_arrow.names]
            groups = [
                self._index.find(in_schema(opened.read_row_group(group, columns=there), keys).columns)
                for group in range(opened.num_row_groups)
            ]
            if not anyway and not any((found >= 0).any() for found in groups):
                return False
            for group, found in enumerate(groups):
                rows = in_schema(opened.read_row_group(group, use_threads=False), self._schema)
                writer.write(self._mend(rows, found, number) if (found >= 0).any() else rows)
        return True


def in_schema(rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    """Return rows of an older file, which may lack columns that were added since, or have one more."""
    if rows.schema.equals(schema):
        return rows
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.schema.names
        else pyarrow.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _told(bounds: Bounds | None) -> tuple[object, object, bool] | None:
    if bounds is None or bounds.low is None or bounds.high is None:
        return None
    return bounds.low, bounds.high, bounds.nulls != 0


def _order(bounds: Sequence[Bounds | None]) -> tuple[bool, object]:
    """Return what puts files in the order of their first key column, those without bounds last."""
    first = bounds[0]
    return (True, 0) if first is None or first.low is None else (False, first.low)
