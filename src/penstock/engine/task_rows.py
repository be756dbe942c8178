# SPDX-License-Identifier: Apache-2.0
"""The rows between the two stages of a batch, and the messages of its tasks.

Within a process, both are passed as tuples, and table rows are left unencoded if there are only a few.
Between processes and on disk, both are Arrow rows with the schema BETWEEN, in which the table rows are blobs.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pyarrow

from penstock.changes import Changes
from penstock.engine.parts import Run, blob_of, changes_of
from penstock.engine.task_plan import BETWEEN, ROWS
from penstock.limits import MIB

# Above this number, rows are compressed even within a process.
_PLAIN_BYTES_MAX = MIB


class Row(NamedTuple):
    """A row that a task emits: changes for a part, or a message for the engine. `body` contains the changes,
    or a blob that encodes them.
    """

    part: int
    work: int
    seq: int
    kind: str
    body: bytes | pyarrow.Buffer | tuple[Changes, ...]

    @property
    def nbytes(self) -> int:
        """The memory used by the body."""
        if isinstance(self.body, tuple):
            return sum(changes.rows.nbytes for changes in self.body)
        return len(self.body)

    def changes(self) -> Iterable[Changes]:
        """Return the changes of a row of kind ROWS, in order."""
        return self.body if isinstance(self.body, tuple) else changes_of(self.body)

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the row in the BETWEEN schema."""
        body = blob_of(self.body) if isinstance(self.body, tuple) else bytes(self.body)
        columns = [[self.part], [self.work], [self.seq], [self.kind], [body]]
        arrays = [pyarrow.array(values, field.type) for values, field in zip(columns, BETWEEN, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=BETWEEN)


def rows_in(batches: Iterable[pyarrow.RecordBatch]) -> Iterator[Row]:
    """Yield the rows in batches of the BETWEEN schema, without copying the table rows inside."""
    for batch in batches:
        *columns, bodies = batch.columns
        values = (column.to_pylist() for column in columns)
        for (part, work, seq, kind), body in zip(zip(*values, strict=True), bodies, strict=True):
            yield Row(part, work, seq, kind, body.as_buffer() if kind == ROWS else body.as_py())


def body_of(
    tables: Sequence[Changes], runs: Sequence[Run] | None = None, *, is_in_process: bool
) -> bytes | tuple[Changes, ...]:
    """Return changes as the body of a row; `runs` is their order, None for one table after another."""
    if not is_in_process or sum(changes.rows.nbytes for changes in tables) > _PLAIN_BYTES_MAX:
        return blob_of(tables, runs)
    if runs is None:
        return tuple(tables)
    return tuple(
        tables[run.table].with_rows(tables[run.table].rows.slice(run.first, run.rows)) for run in runs
    )
