# SPDX-License-Identifier: Apache-2.0
"""The rows between the two stages of a batch, and the messages of its tasks.

Within a process, both are passed as tuples. Counts and receipts are left unencoded, and so are table rows if
there are only a few. Between processes and on disk, both are Arrow rows with the schema BETWEEN, in which the
table rows are blobs.
"""

import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow

from penstock.changes import Changes
from penstock.engine.parts import Run, blob_of, changes_of
from penstock.engine.task_plan import BETWEEN, ROWS, Counts
from penstock.limits import MIB
from penstock.sinks.sink import Receipt

# Above this number, rows are compressed even within a process.
_PLAIN_BYTES_MAX = MIB


class Row(NamedTuple):
    """A row that a task emits: changes for a part, or a message for the engine. `body` contains the changes,
    the counts or the receipt, or bytes that encode them.
    """

    part: int
    work: int
    seq: int
    kind: str
    body: bytes | pyarrow.Buffer | tuple[Changes, ...] | Counts | Receipt

    @property
    def nbytes(self) -> int:
        """The memory used by the changes of a row of kind ROWS."""
        body: Any = self.body
        return sum(changes.rows.nbytes for changes in body) if isinstance(body, tuple) else len(body)

    def changes(self) -> Iterable[Changes]:
        """Return the changes of a row of kind ROWS, in order."""
        body: Any = self.body
        return body if isinstance(body, tuple) else changes_of(body)

    def counts(self) -> Counts:
        """Return the counts of a row of kind COUNTS."""
        body: Any = self.body
        return body if isinstance(body, Counts) else pickle.loads(body)

    def receipt(self) -> Receipt:
        """Return the receipt of a row of kind RECEIPT."""
        body: Any = self.body
        if isinstance(body, Receipt):
            return body
        value = json.loads(bytes(body))
        return Receipt(**{**value, "staged": tuple(value["staged"])})

    def to_arrow(self) -> pyarrow.RecordBatch:
        """Return the row in the BETWEEN schema."""
        columns = [[self.part], [self.work], [self.seq], [self.kind], [self._encoded_body()]]
        arrays = [pyarrow.array(values, field.type) for values, field in zip(columns, BETWEEN, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=BETWEEN)

    def _encoded_body(self) -> bytes:
        body: Any = self.body
        if isinstance(body, tuple):
            return blob_of(body)
        if isinstance(body, Counts):
            return pickle.dumps(body)
        return _as_json(body) if isinstance(body, Receipt) else bytes(body)


def receipt_body(receipt: Receipt) -> Receipt | bytes:
    """Return a receipt as the body of a row. What the sink has staged is always plain JSON for its commit."""
    return _as_json(receipt) if receipt.staged else receipt


def _as_json(receipt: Receipt) -> bytes:
    value = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in vars(receipt).items()
    }
    return json.dumps(value).encode()


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
