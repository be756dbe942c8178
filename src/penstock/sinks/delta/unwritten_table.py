# SPDX-License-Identifier: Apache-2.0
"""Delta tables of this host that are prepared and have no version yet.

Their first commit creates the table, adds its first rows and stores the batch number, all at once. To create
the table before that would cost another commit, and that the log is read again. Until then, a file in the
table's folder has the name and the columns with which the table was prepared. Without this file, a table that
was dropped by hand could not be told from one that was never written, and later rows would recreate it.
"""

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import deltalake
import pyarrow
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.transaction import create_table_with_add_actions

from penstock.errors import VersionConflict
from penstock.sinks.delta.table import (
    DEFAULT_PROPERTIES,
    add_actions,
    is_local,
    translate_errors,
    with_numbers,
)
from penstock.sinks.lake.parquet_files import DataFile, local_folder
from penstock.sinks.lake.table import LakeTable

# Readers and VACUUM ignore files whose names begin with a dot.
_FILE_NAME = ".penstock-unwritten"
_NAME_KEY = b"penstock.name"


class UnwrittenDelta(LakeTable):
    """A table without a version. It has no files, and no batch is in it."""

    def __init__(self, url: str, path: str, schema: pyarrow.Schema) -> None:
        self._url = url
        self._file = f"{path}/{_FILE_NAME}"
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
        now = int(time.time() * 1000)
        with translate_errors(self._url):
            try:
                create_table_with_add_actions(
                    self._url,
                    deltalake.Schema.from_arrow(self.schema),
                    add_actions(added, now),
                    mode="error",
                    name=self._name,
                    configuration=DEFAULT_PROPERTIES,
                    commit_properties=with_numbers(numbers, now),
                )
            except DeltaError as problem:
                if DeltaTable.is_deltatable(self._url):
                    raise VersionConflict(
                        f"the table {self._url} was created by somebody else meanwhile",
                        hint="The batch is tried again; let one pipeline write a table",
                    ) from problem
                raise
        _remove(self._file)

    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        """Add columns. See `StoredTable`."""
        self.widen(pyarrow.schema([*self.schema, *columns]))

    def widen(self, schema: pyarrow.Schema) -> None:
        """Replace the columns. See `StoredTable`."""
        self.schema = as_stored(schema)
        self.save()

    def save(self) -> None:
        """Write the file with the name and the columns, whole or not at all."""
        schema = self.schema.with_metadata({_NAME_KEY: self._name.encode()})
        written = f"{self._file}-{os.getpid()}"
        with open(written, "wb") as file:
            file.write(schema.serialize())
        os.replace(written, self._file)


def prepare_unwritten(url: str, name: str, schema: pyarrow.Schema) -> UnwrittenDelta:
    """Prepare a table of this host that does not exist."""
    with translate_errors(url):
        path = _path(url)
        os.makedirs(path, exist_ok=True)
        named = as_stored(schema).with_metadata({_NAME_KEY: name.encode()})
        table = UnwrittenDelta(url, path, named)
        table.save()
    return table


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
        # The host lost power before the file was durable. The table has to be prepared again.
        return None
    return UnwrittenDelta(url, path, schema)


def as_stored(schema: pyarrow.Schema) -> pyarrow.Schema:
    """Return columns in the types that a table of Delta has for them."""
    return pyarrow.schema(deltalake.Schema.from_arrow(schema).to_arrow())


def _has_version(path: str) -> bool:
    try:
        names = os.listdir(f"{path}/_delta_log")
    except FileNotFoundError:
        return False
    # A commit that did not end may have left a file with another extension.
    return any(name.endswith((".json", ".parquet")) for name in names)


def _remove(path: str) -> None:
    # Two processes may remove the file of the same table.
    with suppress(FileNotFoundError):
        os.unlink(path)


def _path(url: str) -> str:
    return url.removeprefix("file://").rstrip("/")
