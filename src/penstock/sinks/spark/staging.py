# SPDX-License-Identifier: Apache-2.0
"""Stages the rows of a batch as Parquet files, which Spark reads during the commit.

The files of a batch are in a folder named after the batch number. They are kept until a later batch is
committed, so that the batch's commit can be repeated.
"""

import os
from collections import Counter
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow
import pyarrow.compute as pc
from pyarrow import fs

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import TableName
from penstock.sinks.images import LastImages, puts, refuse_partial, unrepresentable_counts
from penstock.sinks.lake.parquet_files import Folder, PartFiles, translate_file_errors
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.sink import BatchMark, Receipt, Writer
from penstock.sinks.spark.statements import DELETED

if TYPE_CHECKING:
    from penstock.sinks.spark.sink import SparkSink

_FILE_BYTES = 128 << 20


class Staging:
    """The folder of staged files: a folder on this host, or a URL that pyarrow supports."""

    def __init__(self, path: str, path_in_spark: str | None) -> None:
        self.path = path.rstrip("/") if "://" in path else os.path.abspath(path)
        self._path_in_spark = (path_in_spark or self.path).rstrip("/")

    def folder(self, mark: BatchMark) -> Folder:
        """Return the folder of a batch. Raises OptionInvalid for an unknown URL, and errors about files."""
        return self._folder(_batch_folder(mark), make=True)

    def check(self) -> None:
        """Raise Penstock errors if the folder cannot be reached."""
        self._folder("", make=True)

    def in_spark(self, mark: BatchMark, name: str) -> str:
        """Return the path by which Spark reads a file."""
        path = f"{self._path_in_spark}/{_batch_folder(mark)}/{name}"
        # Hadoop does not decode paths: a space stays a space.
        return path if "://" in path else f"file://{path}"

    def remove_earlier(self, mark: BatchMark) -> None:
        """Remove the files of the batches before this one."""
        application = self._folder(_batch_folder(mark).rpartition("/")[0], make=False)
        with translate_file_errors(self.path):
            entries = application.filesystem.get_file_info(
                fs.FileSelector(application.path, allow_not_found=True)
            )
            for entry in entries:
                if entry.base_name.isdecimal() and int(entry.base_name) < mark.number:
                    application.filesystem.delete_dir(entry.path)

    def _folder(self, subfolder: str, *, make: bool) -> Folder:
        filesystem: Any = fs.LocalFileSystem()
        path = self.path
        with translate_file_errors(self.path):
            if "://" in path:
                try:
                    filesystem, path = fs.FileSystem.from_uri(path)
                except (ValueError, pyarrow.ArrowNotImplementedError) as problem:
                    raise OptionInvalid(
                        f"the staging folder {path} is not known: {problem}",
                        hint="Set staging of the spark sink to a folder, or to s3://, gs:// or hdfs://",
                    ) from problem
            folder = Folder(
                filesystem, f"{path}/{subfolder}".rstrip("/"), isinstance(filesystem, fs.LocalFileSystem)
            )
            if make:
                filesystem.create_dir(folder.path, recursive=True)
        return folder


def _batch_folder(mark: BatchMark) -> str:
    return f"{quote(mark.application, safe='/')}/{mark.number:012}"


class _StagedTable:
    """The rows of one table in one part. For a mirror, the last image of each key stays in memory."""

    def __init__(self, target: Target, folder: Folder, schema: pyarrow.Schema) -> None:
        self.target = target
        self.schema = schema
        self.images = LastImages(target)
        self._folder = folder
        self._files: PartFiles | None = None

    def add(self, rows: pyarrow.Table) -> None:
        """Write rows to the files."""
        if self._files is None:
            self._files = PartFiles(self._folder, rows.schema, bytes_max=_FILE_BYTES)
        self._files.write(rows)

    def finish(self) -> list[str]:
        """Close the files, and return their names."""
        return [] if self._files is None else [file.path for file in self._files.finish()]

    def abort(self) -> None:
        """Delete the files."""
        if self._files is not None:
            self._files.abort()


class StagingWriter(Writer):
    """Stages one task's part. A mirror gets only the last image of each key."""

    def __init__(self, sink: "SparkSink", mark: BatchMark) -> None:
        self._sink = sink
        self._folder = sink.staging.folder(mark)
        self._tables: dict[TableName, _StagedTable] = {}
        self._rows: Counter[str] = Counter()
        self._bytes = 0
        self._unrepresentable: Counter[str] = Counter()

    def write(self, changes: Changes) -> None:
        self._rows[str(changes.target.name)] += len(changes)
        self._bytes += changes.rows.nbytes
        with self.working_on(changes.target.name), translate_file_errors(self._folder.path):
            table = self._table(changes.target)
            if self._sink.keeps_state:
                refuse_partial(changes)
                table.images.add(changes)
                return
            rows = pyarrow.Table.from_batches([changes.rows])
            self._unrepresentable += unrepresentable_counts(table.target, rows)
            table.add(stored_rows(rows, table.schema))

    def empty(self, target: Target, version: int) -> None:
        if self._sink.keeps_state:
            self._table(target).images.empty(version)

    def finish(self) -> Receipt:
        staged = []
        for name, table in self._tables.items():
            with self.working_on(name), translate_file_errors(self._folder.path):
                self._stage_images(table)
                files = table.finish()
            emptied = table.images.emptied is not None
            staged.append({"target": table.target.to_json(), "files": files, "emptied": emptied})
        return Receipt(
            self._rows.total(), self._bytes, dict(self._rows), tuple(staged), dict(self._unrepresentable)
        )

    def abort(self) -> None:
        with translate_file_errors(self._folder.path):
            for table in self._tables.values():
                table.abort()

    def _table(self, target: Target) -> _StagedTable:
        if target.name not in self._tables:
            self._tables[target.name] = _StagedTable(target, self._folder, self._sink.schema_of(target))
        return self._tables[target.name]

    def _stage_images(self, table: _StagedTable) -> None:
        rows = table.images.rows()
        if rows is None or not rows.num_rows:
            return
        check_keys(table.target, rows)
        is_put = puts(rows)
        self._unrepresentable += unrepresentable_counts(table.target, rows, is_put)
        stored = stored_rows(rows, table.schema)
        table.add(stored.append_column(pyarrow.field(DELETED, pyarrow.bool_()), pc.invert(is_put)))
