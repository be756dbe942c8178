# SPDX-License-Identifier: Apache-2.0
"""Changes rows of a table with immutable files by rewriting the files that contain rows with any of the given
keys.

A file is skipped if its bounds or its key columns show that it contains none of the keys. A changed row is
written to the file that replaces the row's previous file. Tables therefore keep their load order, and changes
of neighbouring keys affect few files.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy
import pyarrow
import pyarrow.parquet as parquet

from penstock.sinks.lake.key_index import KeyIndex, plain
from penstock.sinks.lake.parquet_files import ROW_GROUP_BYTES, Bounds, DataFile, Folder, PartFiles

# Files are read in parallel, but few at a time, because each needs memory for a row group.
_THREADS_MAX = 4
# Files are rewritten in batches of up to this many rows, or of this many uncompressed bytes.
_BATCH_ROWS_MAX, _BATCH_BYTES = 1 << 15, 8 << 20
# A file of up to this many bytes is read once. In a larger file, the keys are looked up before other columns
# are read.
_WHOLE_BYTES_MAX = 64 << 10
# If there are more small files than this, merge them into few.
_SMALL_FILES_MAX = 16
# A file below this fraction of the target size is small.
_SMALL_FRACTION = 4

# Receives rows of a file, the number of each row's key (-1 for none), and the file's number; returns the
# replacement rows.
ReplaceRows = Callable[[pyarrow.Table, numpy.ndarray, int], pyarrow.Table]
# Receives consecutive rows of a file and the number of the first of them; returns the replacement rows.
ReplaceBatch = Callable[[pyarrow.Table, int], pyarrow.Table]


@dataclass
class Rewritten:
    """The result of rewriting a table's files."""

    removed: list[DataFile] = field(default_factory=list)
    added: list[DataFile] = field(default_factory=list)
    # The number of rows in the removed files.
    rows: int = 0


class Replacement(Protocol):
    """Decides which files are rewritten, and with which rows."""

    def may_change(self, number: int, file: DataFile) -> bool:
        """Return whether any row of a file may change, without reading the file."""

    def of_file(self, number: int, opened: parquet.ParquetFile) -> ReplaceBatch | None:
        """Return what replaces the rows of a file, None if no row changes."""

    def of_rows(self, number: int, rows: pyarrow.Table) -> pyarrow.Table | None:
        """Return what replaces all rows of a file, None if no row changes."""


class KeyedReplacement:
    """Replaces the rows whose keys are in an index. Looks up every row of files that may contain any key."""

    def __init__(
        self, schema: pyarrow.Schema, key: Sequence[str], index: KeyIndex, replace_rows: ReplaceRows
    ) -> None:
        self._schema = schema
        self._key = list(key)
        self._index = index
        self._replace_rows = replace_rows

    def may_change(self, number: int, file: DataFile) -> bool:
        return self._index.may_have([_known_bounds(file.bounds.get(name)) for name in self._key])

    def of_file(self, number: int, opened: parquet.ParquetFile) -> ReplaceBatch | None:
        numbers_of_groups = list(find_rows(opened, self._schema, self._key, self._index))
        if not any((numbers >= 0).any() for numbers in numbers_of_groups):
            return None
        key_numbers = numpy.concatenate(numbers_of_groups)

        def replace(rows: pyarrow.Table, first: int) -> pyarrow.Table:
            numbers = key_numbers[first : first + rows.num_rows]
            return self._replace_rows(rows, numbers, number) if (numbers >= 0).any() else rows

        return replace

    def of_rows(self, number: int, rows: pyarrow.Table) -> pyarrow.Table | None:
        key_numbers = self._index.find(rows.select(self._key).columns)
        return self._replace_rows(rows, key_numbers, number) if (key_numbers >= 0).any() else None


class MaskedReplacement:
    """Drops the rows that a mask marks. `masks` has the packed bits of each file with such rows, by the
    number of the file.
    """

    def __init__(self, masks: Mapping[int, numpy.ndarray]) -> None:
        self._masks = masks

    def may_change(self, number: int, file: DataFile) -> bool:
        return number in self._masks

    def of_file(self, number: int, opened: parquet.ParquetFile) -> ReplaceBatch | None:
        if number not in self._masks:
            return None
        dropped = numpy.unpackbits(self._masks[number], count=opened.metadata.num_rows).view(numpy.bool_)

        def replace(rows: pyarrow.Table, first: int) -> pyarrow.Table:
            return rows.filter(pyarrow.array(~dropped[first : first + rows.num_rows]))

        return replace

    def of_rows(self, number: int, rows: pyarrow.Table) -> pyarrow.Table | None:
        if number not in self._masks:
            return None
        dropped = numpy.unpackbits(self._masks[number], count=rows.num_rows).view(numpy.bool_)
        return rows.filter(pyarrow.array(~dropped))


def find_rows(
    opened: parquet.ParquetFile, schema: pyarrow.Schema, key: Sequence[str], index: KeyIndex
) -> Iterator[numpy.ndarray]:
    """Yield, for each row group, the number of each row's key in an index, -1 for none."""
    keys = pyarrow.schema([schema.field(name) for name in key])
    # A column may have become part of the key after the file was written.
    present = [name for name in key if name in opened.schema_arrow.names]
    for group in range(opened.num_row_groups):
        yield index.find(in_schema(opened.read_row_group(group, columns=present), keys).columns)


class CopyOnWrite:
    """Rewrites the files of one folder whose rows change."""

    def __init__(
        self, folder: Folder, schema: pyarrow.Schema, key: Sequence[str], replacement: Replacement
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._key = list(key)
        self._replacement = replacement

    def rewrite(
        self, files: Sequence[DataFile], output: Callable[[], PartFiles], bytes_max: int, memory_bytes: int
    ) -> Rewritten:
        """Rewrite the files with changed rows; return the files removed and added.

        `output` creates writers for new files of about `bytes_max` bytes. Uses about `memory_bytes`. If
        reading or writing fails, deletes the new files and raises the error.
        """
        changed = [number for number, file in enumerate(files) if self._replacement.may_change(number, file)]
        small = [number for number, file in enumerate(files) if file.bytes * _SMALL_FRACTION < bytes_max]
        merged = set(small) if len(small) > _SMALL_FILES_MAX else set()
        key_column = self._schema.field(self._key[0])
        selected = sorted(merged.union(changed), key=lambda number: _order(files[number], key_column))
        threads = min(_THREADS_MAX, os.cpu_count() or 1, len(selected), memory_bytes // ROW_GROUP_BYTES // 2)
        threads = max(1, threads)
        # Give neighbouring files to one writer, so that the new files have narrow bounds.
        shares = [share.tolist() for share in numpy.array_split(numpy.array(selected, numpy.int64), threads)]
        writers = [output() for _ in shares]

        def work(share: list[int], writer: PartFiles) -> list[int]:
            return [
                number
                for number in share
                if self._rewrite_file(files[number], number, writer, number in merged)
            ]

        rewritten = Rewritten()
        try:
            if threads == 1:
                # Most tables of a wide batch have one small file, for which a thread would cost more.
                touched = work(shares[0], writers[0])
            else:
                with ThreadPoolExecutor(threads) as pool:
                    touched = [number for share in pool.map(work, shares, writers) for number in share]
            for writer in writers:
                rewritten.added += writer.finish()
        except BaseException:
            for writer in writers:
                writer.abort()
            raise
        rewritten.removed = [files[number] for number in touched]
        rewritten.rows = sum(file.rows for file in rewritten.removed)
        return rewritten

    def _rewrite_file(self, file: DataFile, number: int, writer: PartFiles, merge: bool) -> bool:
        """Rewrite a file, and return whether that was necessary."""
        with self._folder.open(file.path) as opened:
            if file.bytes <= _WHOLE_BYTES_MAX and opened.metadata.num_rows <= _BATCH_ROWS_MAX:
                rows = in_schema(opened.read(use_threads=False), self._schema)
                replaced = self._replacement.of_rows(number, rows)
                if replaced is None and not merge:
                    return False
                writer.write(rows if replaced is None else replaced)
                return True
            replace = self._replacement.of_file(number, opened)
            if replace is None and not merge:
                return False
            first = 0
            for batch in opened.iter_batches(_batch_rows(opened.metadata), use_threads=False):
                rows = in_schema(pyarrow.Table.from_batches([batch]), self._schema)
                writer.write(rows if replace is None else replace(rows, first))
                first += batch.num_rows
        return True


def _batch_rows(footer: parquet.FileMetaData) -> int:
    """Return the number of rows of a file that are rewritten at once."""
    rows: int = footer.num_rows
    size: int = sum(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
    return max(1, min(_BATCH_ROWS_MAX, _BATCH_BYTES * rows // max(1, size)))


def in_schema(rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
    """Return rows of an older file in the current schema, with null for added columns."""
    if rows.schema.equals(schema):
        return rows
    columns = [
        rows.column(field.name).cast(field.type)
        if field.name in rows.schema.names
        else pyarrow.nulls(rows.num_rows, field.type)
        for field in schema
    ]
    return pyarrow.Table.from_arrays(columns, schema=schema)


def _known_bounds(bounds: Bounds | None) -> tuple[object, object, bool] | None:
    if bounds is None or bounds.low is None or bounds.high is None:
        return None
    return bounds.low, bounds.high, bounds.nulls != 0


def _order(file: DataFile, column: pyarrow.Field) -> tuple[bool, object]:
    """Return a sort key that orders files by their bounds of a column. Files without bounds are last.

    The bounds of a new file come from its footer and those of a committed file from the table's log, so that
    they may be of different Python types.
    """
    bounds = file.bounds.get(column.name)
    if bounds is None or bounds.low is None:
        return True, 0
    return False, plain(pyarrow.chunked_array([[bounds.low]], column.type))[0].as_py()
