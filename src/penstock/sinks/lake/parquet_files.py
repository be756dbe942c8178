# SPDX-License-Identifier: Apache-2.0
"""Parquet files in a folder, local or in an object store: written up to a size, and what footers say."""

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Self

import pyarrow
import pyarrow.fs
import pyarrow.parquet as parquet

from penstock.errors import ConnectionLost, DiskFailed, PenstockError

# One row group is what is held of a file while it is written or gone through: so many rows at most, so many
# bytes in memory.
ROW_GROUP_ROWS = 128 * 1024
_ROW_GROUP_BYTES = 64 << 20
# The bounds of longer texts are left out: they would make the lists of files long.
_BOUND_CHARACTERS_MAX = 64


@dataclass(frozen=True)
class Bounds:
    """What a file's footer says of one column: its lowest and highest value, None where it does not say, and
    how many of its values are null, -1 where it does not say."""

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
        """Return plain JSON values, without the bounds, which are in the file."""
        value = asdict(self)
        del value["bounds"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(value["path"], value["rows"], value["bytes"])


@dataclass(frozen=True)
class Folder:
    """A table's folder in a file system."""

    filesystem: pyarrow.fs.FileSystem
    path: str
    # Whether files are synced before they count: on a disk of this host.
    local: bool

    def file(self, name: str) -> str:
        """Return the path of a file by its name in the folder."""
        return f"{self.path}/{name}" if self.path else name

    def open(self, name: str) -> parquet.ParquetFile:
        """Open a Parquet file."""
        return parquet.ParquetFile(self.filesystem.open_input_file(self.file(name)))

    def delete(self, names: Sequence[str]) -> None:
        """Delete files that nothing refers to; one that is gone is none."""
        for name in names:
            try:
                self.filesystem.delete_file(self.file(name))
            except FileNotFoundError:
                continue

    def described(self, name: str) -> DataFile:
        """Return what a file's footer says of it."""
        with self.filesystem.open_input_file(self.file(name)) as opened:
            footer = parquet.read_metadata(opened)
            return DataFile(name, footer.num_rows, opened.size(), bounds_of(footer))


@contextmanager
def files_told(place: str) -> Iterator[None]:
    """Raise what a file system raises as errors of this house.

    DiskFailed; ConnectionLost where what failed is no call of this host's system, or one to another host.
    """
    try:
        yield
    except OSError as problem:
        is_far = problem.errno is None or isinstance(problem, ConnectionError | TimeoutError)
        kind: type[PenstockError] = ConnectionLost if is_far else DiskFailed
        raise kind(
            f"{place} cannot be reached: {problem}", hint="See the sink's path or catalog, and its room"
        ) from problem


def local_folder(path: str, *, make: bool = True) -> Folder:
    """Return a folder of this host, which is made unless told otherwise."""
    if make:
        os.makedirs(path, exist_ok=True)
    return Folder(pyarrow.fs.LocalFileSystem(), path.rstrip("/"), local=True)


class PartFiles:
    """Writes rows into new files of a folder, each up to about a number of bytes. Not for several threads."""

    def __init__(
        self,
        folder: Folder,
        schema: pyarrow.Schema,
        *,
        bytes_max: int,
        compression: str = "snappy",
        prefix: str = "part",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._schema = schema.with_metadata(metadata) if metadata else schema
        self._bytes_max = bytes_max
        self._compression = compression
        self._prefix = prefix
        self._written: list[DataFile] = []
        self._name = ""
        self._stream: Any = None
        self._writer: parquet.ParquetWriter | None = None
        self._pending: list[pyarrow.Table] = []
        self._pending_rows = 0

    def write(self, rows: pyarrow.Table) -> None:
        """Take rows with the schema's columns."""
        if not rows.num_rows:
            return
        group_rows = max(1, min(ROW_GROUP_ROWS, _ROW_GROUP_BYTES * rows.num_rows // max(1, rows.nbytes)))
        while rows.num_rows:
            part = rows.slice(0, max(1, group_rows - self._pending_rows))
            rows = rows.slice(part.num_rows)
            self._pending.append(part)
            self._pending_rows += part.num_rows
            if self._pending_rows >= group_rows:
                self._write_group()

    def finish(self) -> list[DataFile]:
        """Close the last file, and return all that were written, which are durable on a disk of this host."""
        self._write_group()
        self._close()
        return self._written

    def abort(self) -> None:
        """Delete what was written."""
        if self._stream is not None:
            self._stream.close()
            self._written.append(DataFile(self._name, 0, 0))
            self._stream = self._writer = None
        self._folder.delete([one.path for one in self._written])
        self._written = []

    def _write_group(self) -> None:
        if not self._pending_rows:
            return
        rows = pyarrow.concat_tables(self._pending)
        self._pending, self._pending_rows = [], 0
        if self._writer is None:
            self._name = f"{self._prefix}-{uuid.uuid4()}.{self._compression}.parquet"
            self._stream = self._folder.filesystem.open_output_stream(self._folder.file(self._name))
            self._writer = parquet.ParquetWriter(self._stream, self._schema, compression=self._compression)
        self._writer.write_table(rows.cast(self._schema), row_group_size=ROW_GROUP_ROWS)
        if self._stream.tell() >= self._bytes_max:
            self._close()

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        size = self._stream.tell()
        self._stream.close()
        if self._folder.local:
            _sync(self._folder.file(self._name))
        footer = self._writer.writer.metadata
        self._written.append(DataFile(self._name, footer.num_rows, size, bounds_of(footer)))
        self._writer = self._stream = None


def _sync(path: str) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def bounds_of(footer: parquet.FileMetaData) -> dict[str, Bounds]:
    """Return the bounds of a file's columns, of those that are no lists, maps or structs."""
    found: dict[str, Bounds] = {}
    for number in range(footer.num_columns):
        column = footer.schema.column(number)
        if column.path != column.name or column.max_repetition_level:
            continue
        parts = [footer.row_group(group).column(number).statistics for group in range(footer.num_row_groups)]
        found[column.name] = _joined(parts, footer)
    return found


def _joined(parts: Sequence[Any], footer: parquet.FileMetaData) -> Bounds:
    nulls = -1
    if all(one is not None and one.has_null_count for one in parts):
        nulls = sum(one.null_count for one in parts)
    filled = [
        one
        for group, one in enumerate(parts)
        if one is None or one.null_count < footer.row_group(group).num_rows
    ]
    if not filled or not all(one is not None and one.has_min_max for one in filled):
        return Bounds(None, None, nulls)
    try:
        low, high = min(one.min for one in filled), max(one.max for one in filled)
    except (ValueError, OverflowError):
        # A day that Python's calendar lacks, such as one of the year 0.
        return Bounds(None, None, nulls)
    if not _is_told(low) or not _is_told(high):
        return Bounds(None, None, nulls)
    return Bounds(low, high, nulls)


def _is_told(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= _BOUND_CHARACTERS_MAX
    if isinstance(value, float):
        return value == value
    return isinstance(value, int | date | datetime | Decimal)
