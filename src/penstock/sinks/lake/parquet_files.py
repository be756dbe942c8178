# SPDX-License-Identifier: Apache-2.0
"""Writes Parquet files to a local folder or an object store, and reads their footers."""

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Self

import pyarrow
import pyarrow.fs
import pyarrow.parquet as parquet

from penstock.errors import ConnectionLost, DiskFailed, PenstockError
from penstock.sinks.lake.syncing import sync_paths

# The maximum number of rows, and of bytes in memory, of a row group, which is buffered while a file is
# written or read.
ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 32 << 20
# For up to this many rows, building dictionaries of their values costs more than the dictionaries save.
_PLAIN_ROWS_MAX = 64
# Bounds of longer texts are omitted, because they would make file lists large.
_BOUND_CHARACTERS_MAX = 64


@dataclass(frozen=True)
class Bounds:
    """A column's bounds from a file's footer.

    The minimum and maximum are None if unknown, the number of nulls is -1 if unknown.
    """

    low: Any
    high: Any
    nulls: int


@dataclass(frozen=True)
class DataFile:
    """A file of a table. `path` is relative to the table's folder; `bytes` is its size."""

    path: str
    rows: int
    bytes: int
    bounds: Mapping[str, Bounds] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, without the bounds, which are in the file's footer."""
        return {"path": self.path, "rows": self.rows, "bytes": self.bytes}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(value["path"], value["rows"], value["bytes"])


@dataclass(frozen=True)
class Folder:
    """A table's folder in a file system."""

    filesystem: pyarrow.fs.FileSystem
    path: str
    # Whether files are on this host's disk and synced before they are committed.
    local: bool

    def file(self, name: str) -> str:
        """Return the path of a file by its name in the folder."""
        return f"{self.path}/{name}" if self.path else name

    def open(self, name: str) -> parquet.ParquetFile:
        """Open a Parquet file."""
        return parquet.ParquetFile(self.filesystem.open_input_file(self.file(name)))

    def delete(self, names: Sequence[str]) -> None:
        """Delete unreferenced files, ignoring those that no longer exist."""
        for name in names:
            try:
                self.filesystem.delete_file(self.file(name))
            except FileNotFoundError:
                continue

    def describe(self, name: str) -> DataFile:
        """Return the description of a file from its footer."""
        with self.filesystem.open_input_file(self.file(name)) as opened:
            footer = parquet.read_metadata(opened)
            return DataFile(name, footer.num_rows, opened.size(), bounds_of(footer))


@contextmanager
def translate_file_errors(location: str) -> Iterator[None]:
    """Translate file system exceptions into Penstock errors.

    Raises DiskFailed, or ConnectionLost for errors without an errno and for errors of remote connections.
    """
    try:
        yield
    except OSError as problem:
        is_far = problem.errno is None or isinstance(problem, ConnectionError | TimeoutError)
        kind: type[PenstockError] = ConnectionLost if is_far else DiskFailed
        raise kind(
            f"{location} cannot be reached: {problem}", hint="See the sink's path or catalog, and its room"
        ) from problem


def local_folder(path: str, *, make: bool = True) -> Folder:
    """Return a folder of this host, and create it by default."""
    if make:
        os.makedirs(path, exist_ok=True)
    return Folder(pyarrow.fs.LocalFileSystem(), path.rstrip("/"), local=True)


class PartFiles:
    """Writes rows to new files of a folder. Each file has up to about a given number of bytes. Used by one
    thread.

    If `with_bounds` is false, the returned `DataFile`s have no bounds. With `syncs_later` the caller makes
    the files of `take_unsynced` durable.
    """

    def __init__(
        self,
        folder: Folder,
        schema: pyarrow.Schema,
        *,
        bytes_max: int,
        compression: str = "snappy",
        prefix: str = "part",
        with_bounds: bool = True,
        syncs_later: bool = False,
    ) -> None:
        self._syncs_later = syncs_later
        self._folder = folder
        self._schema = schema
        self._bytes_max = bytes_max
        self._compression = compression
        self._prefix = prefix
        self._with_bounds = with_bounds
        self._written: list[DataFile] = []
        self._unsynced: list[str] = []
        self._name = ""
        self._stream: Any = None
        self._writer: parquet.ParquetWriter | None = None
        self._pending: list[pyarrow.Table] = []
        self._pending_rows = 0
        self._pending_bytes = 0

    @property
    def bytes(self) -> int:
        """The approximate memory used by rows that are not written yet."""
        return self._pending_bytes

    def write(self, rows: pyarrow.Table) -> None:
        """Write rows with the schema's columns."""
        if not rows.num_rows:
            return
        size = rows.nbytes
        self._pending_bytes += size
        group_rows = max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES * rows.num_rows // max(1, size)))
        while rows.num_rows:
            part = rows.slice(0, max(1, group_rows - self._pending_rows))
            rows = rows.slice(part.num_rows)
            self._pending.append(part)
            self._pending_rows += part.num_rows
            if self._pending_rows >= group_rows:
                self._write_group()

    def spill(self) -> None:
        """Write the pending rows, and close their file: a process can open only some hundred files."""
        self._write_group()
        self._close()

    def finish(self) -> list[DataFile]:
        """Close the last file, and return all files written.

        Local files are durable, unless `syncs_later` is set.
        """
        self.close()
        if not self._syncs_later:
            sync_paths(self.take_unsynced())
        return self._written

    def close(self) -> list[DataFile]:
        """Close the last file, and return all files written. The files that `take_unsynced` returns are not
        durable yet.
        """
        self.spill()
        return self._written

    def take_unsynced(self) -> list[str]:
        """Return the paths of the files that the caller has to sync."""
        unsynced, self._unsynced = self._unsynced, []
        return unsynced

    def abort(self) -> None:
        """Delete the files written."""
        if self._stream is not None:
            if self._writer is not None:
                # Otherwise it would write the rest of the file when it is deleted.
                self._writer.is_open = False
            stream, self._stream, self._writer = self._stream, None, None
            self._written.append(DataFile(self._name, 0, 0))
            # A full disk may refuse the rest of the file, which is deleted in any case.
            with suppress(OSError):
                stream.close()
        self._folder.delete([file.path for file in self._written])
        self._written = []

    def _write_group(self) -> None:
        if not self._pending_rows:
            return
        rows = pyarrow.concat_tables(self._pending)
        self._pending, self._pending_rows, self._pending_bytes = [], 0, 0
        if self._writer is None:
            self._name = f"{self._prefix}-{uuid.uuid4()}.{self._compression}.parquet"
            self._stream = self._folder.filesystem.open_output_stream(self._folder.file(self._name))
            self._writer = parquet.ParquetWriter(
                self._stream,
                self._schema,
                compression=self._compression,
                use_dictionary=rows.num_rows > _PLAIN_ROWS_MAX,
            )
        if not rows.schema.equals(self._schema):
            rows = rows.cast(self._schema)
        self._writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
        if self._stream.tell() >= self._bytes_max:
            self._close()

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        if self._folder.local:
            self._unsynced.append(self._folder.file(self._name))
        footer = self._writer.writer.metadata
        bounds = bounds_of(footer) if self._with_bounds else {}
        self._written.append(DataFile(self._name, footer.num_rows, size, bounds))
        self._writer = self._stream = None


def bounds_of(footer: parquet.FileMetaData) -> dict[str, Bounds]:
    """Return the bounds of a file's columns, except for lists, maps and structs."""
    bounds: dict[str, Bounds] = {}
    for number in range(footer.num_columns):
        column = footer.schema.column(number)
        if column.path != column.name or column.max_repetition_level:
            continue
        parts = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
        bounds[column.name] = _combine_statistics(parts, footer)
    return bounds


def _combine_statistics(parts: Sequence[Any], footer: parquet.FileMetaData) -> Bounds:
    nulls = -1
    if all(statistics is not None and statistics.has_null_count for statistics in parts):
        nulls = sum(statistics.null_count for statistics in parts)
    filled = [
        statistics
        for group, statistics in enumerate(parts)
        if statistics is None or statistics.null_count < footer.row_group(group).num_rows
    ]
    if not filled or not all(statistics is not None and statistics.has_min_max for statistics in filled):
        return Bounds(None, None, nulls)
    try:
        low, high = min(statistics.min for statistics in filled), max(statistics.max for statistics in filled)
    except (ValueError, OverflowError):
        # The bound is a date outside Python's calendar, such as one in the year 0.
        return Bounds(None, None, nulls)
    if not _is_usable_bound(low) or not _is_usable_bound(high):
        return Bounds(None, None, nulls)
    return Bounds(low, high, nulls)


def _is_usable_bound(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _BOUND_CHARACTERS_MAX
    if isinstance(value, float):
        return value == value
    return isinstance(value, int | date | datetime | Decimal)
