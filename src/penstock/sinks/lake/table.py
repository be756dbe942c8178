# SPDX-License-Identifier: Apache-2.0
"""The interface of lake tables in any format, for mirrors, feeds and histories."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow

from penstock.sinks.lake.parquet_files import DataFile, Folder
from penstock.sinks.lake.syncing import sync_paths


@dataclass(frozen=True)
class NextVersion:
    """The next version of a table, whose files are written but not committed. `rows` are changed.

    The files in `leftover` belong to no version and are deleted after the commit.
    """

    added: Sequence[DataFile]
    removed: Sequence[DataFile]
    rows: int
    leftover: Sequence[DataFile] = ()


class StoredTable(ABC):
    """A table: its columns, its rows, and the batch numbers that its commits stored."""

    # The columns, as stored.
    schema: pyarrow.Schema

    def release(self) -> None:
        """Let the next user of the table have what was read of it. Do not use this object afterwards."""

    @abstractmethod
    def number(self, application: str) -> int | None:
        """Return the number that an application's last commit stored, None if there is none."""

    @abstractmethod
    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        """Add columns, which are null in existing rows."""

    @abstractmethod
    def widen(self, schema: pyarrow.Schema) -> None:
        """Change columns to wider types, and add further columns. Values are unchanged."""

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield all rows, with the requested columns that exist in the table."""


class LakeTable(StoredTable):
    """A table at the version that was opened: its files, and commits of new versions."""

    # The folder of the data files, and the prefix of their names.
    folder: Folder
    file_prefix: str = "part"

    @abstractmethod
    def files(self) -> list[DataFile]:
        """Return the data files, with their known bounds."""

    @abstractmethod
    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        """Commit a table version that adds and removes files and stores each application's last batch number.

        Raises VersionConflict if the table has been changed since it was opened; then nothing is changed. The
        version is durable only after `sync_tables`.
        """

    def unsynced(self) -> list[str]:
        """Return the paths of this host that have to be synced to make the last version durable."""
        return []

    def note_synced(self) -> None:
        """Note that the paths of `unsynced` are durable."""

    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of all files, with the requested columns that exist in the table."""
        names = [name for name in columns if name in self.schema.names]
        for file in self.files():
            with self.folder.open(file.path) as opened:
                present = [name for name in names if name in opened.schema_arrow.names]
                yield from opened.iter_batches(columns=present)

    def describe(self, file: DataFile) -> DataFile:
        """Return the description of a file in the folder, from its footer."""
        return self.folder.describe(file.path)


def sync_tables(tables: Sequence[LakeTable]) -> None:
    """Make the last versions of tables durable, all at once."""
    sync_paths(path for table in tables for path in table.unsynced())
    for table in tables:
        table.note_synced()


class StagedChanges(ABC):
    """The changes of one batch to one table, which are staged as files and then committed."""

    def __init__(self, table: LakeTable) -> None:
        self.table = table
        self._version: NextVersion | None = None

    @abstractmethod
    def stage(self) -> None:
        """Write the files of the table's next version, which `commit` adds to the table."""

    def commit(self, numbers: Mapping[str, int]) -> int:
        """Commit the table's next version, and return the number of rows changed.

        Stages the version first if `stage` was not called.
        """
        if self._version is None:
            self.stage()
        assert self._version is not None, "it is staged"
        # If the commit's answer is lost, the commit may exist. Keep its files whatever it raises.
        version, self._version = self._version, None
        self.table.commit(version.added, version.removed, numbers)
        self.table.folder.delete([file.path for file in version.leftover])
        return version.rows

    def _delete_staged(self) -> None:
        """Delete the files that were staged but not committed."""
        version, self._version = self._version, None
        if version is not None:
            self.table.folder.delete([file.path for file in (*version.added, *version.leftover)])
