# SPDX-License-Identifier: Apache-2.0
"""Passes rows between the two stages of a batch: they are buffered in memory up to a limit, then spilled to
disk.

A batch ends at the end of a transaction, so it is as large as the largest transaction. Rows beyond the memory
limit are written to one Arrow IPC file per work item. The files have no name, so nothing is left on the disk
even if the process is killed.
"""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import IO

import pyarrow

from penstock.engine.task_plan import BETWEEN, ROWS
from penstock.engine.task_rows import Row, rows_in
from penstock.errors import translate_spill_errors


class Shuffle:
    """Collects the rows that works emit and returns them by part. Safe for threads.

    Holds rows of up to `bytes_max` in memory and spills the rest.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._lock = threading.Lock()
        self._outputs: list[WorkOutput] = []

    def output_of(self, work: int) -> "WorkOutput":
        """Return the output of a work, for one thread to append to."""
        output = WorkOutput(self, work)
        with self._lock:
            self._outputs.append(output)
        return output

    def reserve(self, size: int) -> bool:
        """Reserve memory for this many bytes. Return whether the bound allows it."""
        with self._lock:
            if self._bytes + size > self._bytes_max:
                return False
            self._bytes += size
            return True

    def parts(self) -> list[int]:
        """Return the parts that contain rows or messages, in ascending order."""
        return sorted({part for output in self._outputs for part in output.parts})

    def rows_of(self, part: int) -> Iterator[Row]:
        """Yield the rows of a part: messages first, then rows by work and sequence number.

        Call this once per part, after every work has finished. Each row is released after it is yielded.
        """
        outputs = sorted(self._outputs, key=lambda output: output.work)
        for output in outputs:
            yield from output.messages_of(part)
        for output in outputs:
            yield from output.rows_of(part)

    def close(self) -> None:
        """Release the memory and delete the files."""
        for output in self._outputs:
            output.close()


class WorkOutput:
    """The output of one work, by part: rows in memory, and the numbers of spilled rows, in the order in which
    they were emitted.
    """

    def __init__(self, shuffle: Shuffle, work: int) -> None:
        self.work = work
        self.parts: dict[int, list[Row | int]] = {}
        self._messages: dict[int, list[Row]] = {}
        self._shuffle = shuffle
        self._spill: _SpillFile | None = None

    def append(self, row: Row) -> None:
        """Append a row. Raises DiskFailed."""
        rows = self.parts.setdefault(row.part, [])
        if row.work < 0:
            self._messages.setdefault(row.part, []).append(row)
        elif row.kind != ROWS or self._shuffle.reserve(row.nbytes):
            rows.append(row)
        else:
            if self._spill is None:
                self._spill = _SpillFile()
            rows.append(self._spill.write(row))

    def messages_of(self, part: int) -> list[Row]:
        """Return the messages that come before all rows of a part."""
        return self._messages.get(part, [])

    def rows_of(self, part: int) -> Iterator[Row]:
        """Yield the rows of a part in the order they were appended."""
        rows = self.parts.get(part, [])
        rows.reverse()
        while rows:
            row = rows.pop()
            if isinstance(row, int):
                assert self._spill is not None, "a spilled row has a file"
                row = self._spill.read(row)
            yield row

    def close(self) -> None:
        """Release the memory and delete the file."""
        self.parts.clear()
        if self._spill is not None:
            self._spill.close()


class _SpillFile:
    """An unnamed file of rows. One thread writes the file, then several threads read it."""

    def __init__(self) -> None:
        with translate_spill_errors():
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="penstock-")  # noqa: SIM115
            self._writer = pyarrow.ipc.new_file(self._file, BETWEEN)
        self._reader: pyarrow.ipc.RecordBatchFileReader | None = None
        self._lock = threading.Lock()
        self._written = 0

    def write(self, row: Row) -> int:
        """Append a row and return its number."""
        with translate_spill_errors():
            self._writer.write_batch(row.to_arrow())
        self._written += 1
        return self._written - 1

    def read(self, number: int) -> Row:
        """Return a row by its number. The first call ends writing."""
        with self._lock, translate_spill_errors():
            if self._reader is None:
                self._writer.close()
                self._reader = pyarrow.ipc.open_file(self._file)
            return next(rows_in([self._reader.get_batch(number)]))

    def close(self) -> None:
        # A full disk refuses the rest of the content again, which nobody reads.
        with suppress(OSError):
            self._file.close()
