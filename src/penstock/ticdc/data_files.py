# SPDX-License-Identifier: Apache-2.0
"""Reads one data file and returns its rows in the order of their commit timestamps."""

from collections import deque
from typing import Protocol

from penstock.errors import EventMalformed, PenstockError
from penstock.limits import MIB
from penstock.ticdc.layout import DataFile
from penstock.ticdc.row_changes import RowChange
from penstock.ticdc.storage import SinkStorage

_CHUNK_BYTES = MIB
# The number of bytes that are read from a file to determine the commit timestamp of its first row. A backlog
# may have a large number of files.
_PROBE_BYTES = 64 << 10


class RowFormat(Protocol):
    """Reads rows of one version of a table from the content of a file."""

    def read(self, content: bytes) -> tuple[list[RowChange], int]:
        """Return the rows in the content, and the number of bytes that they occupy. An incomplete row at the
        end is not consumed.

        Raises StreamError and OptionInvalid.
        """


class DataReader:
    """Reads the rows of a file whose commit timestamps are above a given timestamp. Memory use is limited to
    a piece of the file and one row.
    """

    def __init__(self, storage: SinkStorage, file: DataFile, rows: RowFormat, position: int) -> None:
        """Rows up to `position` are skipped: they were read before, or are repeated by a restarted TiCDC."""
        self.file = file
        # The commit timestamp of the last skipped row.
        self.skipped_ts: int | None = None
        self._storage = storage
        self._format = rows
        self._position = position
        self._offset = 0
        self._size = 0
        self._last_ts = 0
        self._rows: deque[RowChange] = deque()
        # The commit timestamp of the row at the offset, set while no rows are buffered.
        self._peeked_ts: int | None = None
        # The size of a file that ended inside a row, and the checkpoint at that time.
        self._torn: tuple[int, int] | None = None

    @property
    def next_ts(self) -> int | None:
        """The commit timestamp of the next row; None if there is no row now."""
        return self._rows[0].commit_ts if self._rows else self._peeked_ts

    @property
    def finished_size(self) -> int | None:
        """The size up to which all rows were taken. None if rows are left, or the file ends inside a row."""
        has_rows = self._rows or self._peeked_ts is not None
        return None if has_rows or self._offset < self._size else self._size

    def grow(self, size: int, checkpoint: int) -> None:
        """Record the size of the file. All rows below the checkpoint are complete.

        Raises EventMalformed for a file that ends inside a row although the checkpoint has advanced, or that
        has become smaller.
        """
        if size < self._size:
            raise EventMalformed(
                f"{self.file.path} has {size} bytes, and had {self._size} before",
                hint="It was replaced: begin a new changefeed, in a folder of its own, and a new log",
            )
        self._size = size
        if self._torn is not None and self._torn[0] == size and checkpoint > self._torn[1]:
            raise EventMalformed(
                f"{self.file.path} ends inside a row",
                position=f"{self.file.path}, byte {self._offset}",
                hint="The file is damaged: copy it from where TiCDC wrote it",
            )
        if self.next_ts is None:
            offset, last_ts = self._offset, self._last_ts
            self._fill(checkpoint, _PROBE_BYTES)
            if self._rows:
                self._peeked_ts = self.next_ts
                self._rows.clear()
                self._offset, self._last_ts = offset, last_ts

    def take(self, commit_ts: int, checkpoint: int) -> list[RowChange]:
        """Remove and return the next rows of a commit timestamp."""
        if self._peeked_ts is not None:
            self._peeked_ts = None
            self._fill(checkpoint, _CHUNK_BYTES)
        rows = []
        while self._rows and self._rows[0].commit_ts == commit_ts:
            rows.append(self._rows.popleft())
            if not self._rows:
                self._fill(checkpoint, _CHUNK_BYTES)
        return rows

    def _fill(self, checkpoint: int, chunk_bytes: int) -> None:
        """Read the next rows. Raises EventMalformed, and propagates errors from the format's reader with the
        file and the byte.
        """
        while not self._rows and self._offset < self._size:
            wanted = min(chunk_bytes, self._size - self._offset)
            content = self._storage.read(self.file.path, self._offset, wanted)
            try:
                rows, taken = self._format.read(content)
            except PenstockError as problem:
                problem.position = problem.position or f"{self.file.path}, from byte {self._offset}"
                raise
            if not taken:
                if self._offset + wanted >= self._size:
                    self._torn = (self._size, checkpoint)
                    return
                # A row is longer than the piece, so read a longer piece.
                chunk_bytes *= 2
                continue
            self._offset += taken
            self._keep(rows)

    def _keep(self, rows: list[RowChange]) -> None:
        for row in rows:
            if row.commit_ts < self._last_ts:
                raise EventMalformed(
                    f"{self.file.path} goes back from commit timestamp {self._last_ts} to {row.commit_ts}",
                    position=f"{self.file.path}, before byte {self._offset}",
                    hint="Report it with the version of TiCDC",
                )
            self._last_ts = row.commit_ts
            if row.commit_ts > self._position:
                self._rows.append(row)
            else:
                self.skipped_ts = row.commit_ts
