# SPDX-License-Identifier: Apache-2.0
"""Changes rows of a table with immutable files by rewriting the files that contain rows with any of the given
keys.

A file is skipped if its bounds or its key columns show that it contains none of the keys. A changed row is
written to the file that replaces the row's previous file. Tables therefore keep their load order, and changes
of neighbouring keys affect few files.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy
import pyarrow

from penstock.sinks.lake.key_index import KeyIndex
from penstock.sinks.lake.parquet_files import Bounds, DataFile, Folder, PartFiles

# Files are read in parallel, but few at a time, because each needs memory for a row group or two.
_THREADS_MAX = 4
# If there are more small files than this, merge them into few.
_SMALL_FILES_MAX = 16
# A file below this fraction of the target size is small.
_SMALL_FRACTION = 4

# Receives rows of a file, the number of each row's key (-1 for none), and the file's number; returns the
# replacement rows.
ReplaceRows = Callable[[pyarrow.Table, numpy.ndarray, int], pyarrow.Table]


@dataclass
class Rewritten:
    """The result of rewriting a table's files."""

    removed: list[DataFile] = field(default_factory=list)
    added: list[DataFile] = field(default_factory=list)
    # The number of rows in the removed files.
    rows: int = 0


class CopyOnWrite:
    """Rewrites the files of one folder that contain any of the keys."""

    def __init__(
        self,
        folder: Folder,
        schema: pyarrow.Schema,
        key: Sequence[str],
        index: KeyIndex,
        replace_rows: ReplaceRows,
    ) -> None:
        self._folder = folder
        self._schema = schema
        self._key = list(key)
        self._index = index
        self._replace_rows = replace_rows

    def rewrite(
        self, files: Sequence[DataFile], output: Callable[[], PartFiles], bytes_max: int
    ) -> Rewritten:
        """Rewrite the files that contain any of the keys; return the files removed and added.

        `replace_rows` is called for every row group that contains any of the keys. `output` creates writers
        for new files of about `bytes_max` bytes. If reading or writing fails, deletes the new files and
        raises the error.
        """
        bounds = [[file.bounds.get(name) for name in self._key] for file in files]
        with_keys = [
            number
            for number, file_bounds in enumerate(bounds)
            if self._index.may_have([_known_bounds(column) for column in file_bounds])
        ]
        small = [number for number, file in enumerate(files) if file.bytes * _SMALL_FRACTION < bytes_max]
        merged = set(small) if len(small) > _SMALL_FILES_MAX else set()
        selected = sorted(merged.union(with_keys), key=lambda number: _order(bounds[number]))
        threads = max(1, min(_THREADS_MAX, os.cpu_count() or 1, len(selected)))
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
            keys = pyarrow.schema([self._schema.field(name) for name in self._key])
            # A column may have become part of the key after the file was written.
            present = [name for name in self._key if name in opened.schema_arrow.names]
            groups = [
                self._index.find(in_schema(opened.read_row_group(group, columns=present), keys).columns)
                for group in range(opened.num_row_groups)
            ]
            if not merge and not any((key_numbers >= 0).any() for key_numbers in groups):
                return False
            for group, key_numbers in enumerate(groups):
                rows = in_schema(opened.read_row_group(group, use_threads=False), self._schema)
                writer.write(
                    self._replace_rows(rows, key_numbers, number) if (key_numbers >= 0).any() else rows
                )
        return True


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


def _order(bounds: Sequence[Bounds | None]) -> tuple[bool, object]:
    """Return a sort key that orders files by the bounds of their first key column. Files without bounds are
    last.
    """
    first = bounds[0]
    return (True, 0) if first is None or first.low is None else (False, first.low)
