# SPDX-License-Identifier: Apache-2.0
"""A temporary file for what the writers of many tables cannot keep in memory.

The file has no name, so nothing is left on the disk even if the process is killed.
"""

import tempfile
import threading
from contextlib import suppress
from typing import IO

import pyarrow

from penstock.errors import translate_spill_errors


class SpillFile:
    """Keeps Arrow tables on the disk. Created with the first table. Safe for threads."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._lock = threading.Lock()

    def write(self, rows: pyarrow.Table) -> int:
        """Append a table, and return its offset. Raises DiskFailed."""
        with self._lock, translate_spill_errors():
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115
            offset = self._file.seek(0, 2)
            with pyarrow.ipc.new_stream(self._file, rows.schema) as stream:
                stream.write_table(rows)
        return offset

    def read(self, offset: int) -> pyarrow.Table:
        """Return the table at an offset. Raises DiskFailed."""
        assert self._file is not None, "a table was written"
        with self._lock, translate_spill_errors():
            self._file.seek(offset)
            with pyarrow.ipc.open_stream(self._file) as stream:
                return stream.read_all()

    def close(self) -> None:
        """Delete the file."""
        file, self._file = self._file, None
        if file is not None:
            # A full disk refuses the rest of the content again, which nobody reads.
            with suppress(OSError):
                file.close()
