# SPDX-License-Identifier: Apache-2.0
"""What a mirror, a feed and a history need of a table in a lake, whichever format it has."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import pyarrow

from penstock.sinks.lake.parquet_files import DataFile, Folder


class LakeTable(ABC):
    """A table as it was when it was opened: its columns, its files, and a commit that makes a version."""

    # Its columns, as stored.
    schema: pyarrow.Schema
    # Where its data files are, and what their names begin with there.
    folder: Folder
    file_prefix: str = "part"

    @abstractmethod
    def number(self, application: str) -> int | None:
        """Return the number that an application's last commit stored, None where there is none."""

    @abstractmethod
    def files(self) -> list[DataFile]:
        """Return its data files, with the bounds that are known."""

    @abstractmethod
    def commit(
        self, added: Sequence[DataFile], removed: Sequence[DataFile], numbers: Mapping[str, int]
    ) -> None:
        """Make one version with these files more and those fewer, which stores applications' numbers.

        Raises VersionConflict where somebody else changed it since, so that it cannot be made; then nothing
        is changed.
        """

    @abstractmethod
    def add_columns(self, columns: Sequence[pyarrow.Field]) -> None:
        """Add columns, which are null in the rows that there are."""

    @abstractmethod
    def widen(self, schema: pyarrow.Schema) -> None:
        """Take on columns of wider types, and further ones; values stay as they are."""

    @abstractmethod
    def batches(self, columns: Sequence[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of all files, in those of the columns that the table has."""

    def described(self, file: DataFile) -> DataFile:
        """Return what the footer of a file in its folder says."""
        return self.folder.described(file.path)
