# SPDX-License-Identifier: Apache-2.0
"""Delta tables of this host that are prepared and have no version yet.

Their first commit creates the table, adds its first rows and stores the batch number, all at once. To create
the table before that would cost another commit, and that the log is read again. Until then, a file in the
table's folder has the name and the columns with which the table was prepared. Without this file, a table that
was dropped by hand could not be told from one that was never written, and later rows would recreate it.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress

import deltalake
import pyarrow

from penstock.errors import VersionConflict
from penstock.sinks.delta.first_entry import FIRST_ENTRY, is_whole, write_first_entry
from penstock.sinks.delta.table import DEFAULT_PROPERTIES, is_local, log_paths, translate_errors
from penstock.sinks.lake.parquet_files import DataFile, local_folder, translate_file_errors
from penstock.sinks.lake.syncing import sync_paths
from penstock.sinks.lake.table import LakeTable

# Readers and VACUUM ignore files whose names begin with a dot.
_FILE_NAME = ".penstock-unwritten"
_NAME_KEY = b"penstock.name"


class UnwrittenDelta(LakeTable):
    """A table without a version. It has no files, and no batch is in it."""

    def __init__(self, url: str, path: str, schema: pyarrow.Schema) -> None:
        self._url = url
        self._path = path
        self._name = (schema.metadata or {}).get(_NAME_KEY, b"").decode()
        self.schema = schema.remove_metadata()
        self.folder = local_folder(path, make=False)

    def number(self, application: str) -> int | None:
        """Return None. See `LakeTable`."""
        return None

    def files(self) -> list[DataFile]:
        """Return no files. See `LakeTable`."""
        return []

    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        """Create the table with files and batch numbers. See `LakeTable`."""
        assert not removed, "a table without a version has no files"
        with translate_errors(self._url):
            try:
                write_first_entry(
                    self.folder.file("_delta_log"),
                    self.schema,
                    self._name,
                    DEFAULT_PROPERTIES,
                    added,
                    numbers,
                )
            except FileExistsError as problem:
                raise VersionConflict(
                    f"the table {self._url} was created by somebody else meanwhile",
                    hint="The batch is tried again; let one pipeline write a table",
                ) from problem

    def unsynced(self) -> list[str]:
        """Return the log entries to sync. See `LakeTable`."""
        return log_paths(self.folder, 0)

    def note_synced(self) -> None:
        """Remove the file, without which the table needs its log entry. See `LakeTable`."""
        with translate_errors(self._url):
            _remove(f"{self._path}/{_FILE_NAME}")

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        """Add columns. See `StoredTable`."""
        self.widen(pyarrow.schema([*self.schema, *columns]))

    def widen(self, schema: pyarrow.Schema) -> None:
        """Replace the columns. See `StoredTable`."""
        self.schema = as_stored(schema)
        save_tables([self])

    @property
    def file_beside(self) -> str:
        """Where the file is written before it replaces the previous file."""
        return f"{self._path}/{_FILE_NAME}-new"

    def write_beside(self) -> list[str]:
        """Write the name and the columns to `file_beside`; return the folders that have new names."""
        with translate_errors(self._url):
            folders = _make_folder(self._path)
            with open(self.file_beside, "wb") as file:
                file.write(self.schema.with_metadata({_NAME_KEY: self._name.encode()}).serialize())
        return folders

    def put_in_place(self) -> None:
        """Replace the file by what `write_beside` wrote."""
        os.replace(self.file_beside, f"{self._path}/{_FILE_NAME}")


def new_unwritten(url: str, name: str, schema: pyarrow.Schema) -> UnwrittenDelta:
    """Return a table of this host that does not exist. `save_tables` prepares it."""
    return UnwrittenDelta(url, _path(url), as_stored(schema).with_metadata({_NAME_KEY: name.encode()}))


def save_tables(tables: Sequence[UnwrittenDelta]) -> None:
    """Write the files of tables durably, each of them whole or not at all. Raises DiskFailed."""
    folders = {folder for table in tables for folder in table.write_beside()}
    with translate_file_errors("the folder of a new table"):
        sync_paths(table.file_beside for table in tables)
        for table in tables:
            table.put_in_place()
        sync_paths(folders)


def open_unwritten(url: str) -> UnwrittenDelta | None:
    """Return a table that was prepared and has no version, None for any other."""
    if not is_local(url):
        return None
    path = _path(url)
    with translate_errors(url):
        try:
            with open(f"{path}/{_FILE_NAME}", "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return None
        if _has_version(path):
            # The process ended after its commit. If the table is dropped from now on, it is missing.
            _remove(f"{path}/{_FILE_NAME}")
            return None
    try:
        schema = pyarrow.ipc.read_schema(pyarrow.py_buffer(content))
    except (pyarrow.ArrowInvalid, OSError):
        # An earlier version did not make the file durable, and the host lost power. The table has to be
        # prepared again.
        return None
    return UnwrittenDelta(url, path, schema)


def as_stored(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return columns in the types that a table of Delta has for them."""
    return pyarrow.schema(deltalake.Schema.from_arrow(schema).to_arrow())


def _make_folder(path: str) -> list[str]:
    """Create a folder; return it, and the folders above it up to the lowest that existed."""
    folders = [os.path.abspath(path)]
    while not os.path.isdir(folders[-1]):
        folders.append(os.path.dirname(folders[-1]))
    os.makedirs(path, exist_ok=True)
    return folders


def _has_version(path: str) -> bool:
    try:
        names = os.listdir(f"{path}/_delta_log")
    except FileNotFoundError:
        return False
    # A commit that did not end may have left a file with another extension.
    entries = [name for name in names if name.endswith((".json", ".parquet"))]
    first = f"{path}/_delta_log/{FIRST_ENTRY}"
    if entries == [FIRST_ENTRY] and not is_whole(first):
        # The host lost power before the entry was durable, so its batch was not recorded and comes again.
        os.unlink(first)
        return False
    return bool(entries)


def _remove(path: str) -> None:
    # Two processes may remove the file of the same table.
    with suppress(FileNotFoundError):
        os.unlink(path)


def _path(url: str) -> str:
    return url.removeprefix("file://").rstrip("/")
