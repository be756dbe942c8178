# SPDX-License-Identifier: Apache-2.0
"""The second stage of a batch: write the rows of a part in their order."""

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow

from penstock.engine.allocator import return_large_buffers
from penstock.engine.decode_task import as_json
from penstock.engine.part_writing import PartWriting
from penstock.engine.parts import changes_of
from penstock.engine.task_plan import (
    BETWEEN,
    COUNTS,
    EMPTIED,
    PROBLEM,
    RECEIPT,
    ROWS,
    STATEMENT,
    SURPRISE,
    TaskPlan,
)
from penstock.engine.task_resources import CLOSED_AFTER_USE, TaskResources
from penstock.errors import PenstockError


def write_parts(
    plan: TaskPlan, batches: Iterable[pyarrow.RecordBatch], resources: TaskResources = CLOSED_AFTER_USE
) -> Iterator[pyarrow.RecordBatch]:
    """Write the rows of a part. Yield its receipt and the messages for the engine, in the columns of BETWEEN.

    The input is sorted by work and seq, with the messages of earlier tasks first. If a message says that the
    batch cannot be written yet, no row is written. Sinks come from `resources`.
    """
    return_large_buffers()
    part = _Part(plan, resources)
    try:
        for batch in batches:
            yield from part.take(batch)
        yield from part.finish()
    except PenstockError as problem:
        part.writing.abort()
        for failure in part.writing.failures(problem):
            yield part.message(PROBLEM, pickle.dumps(failure))
    except BaseException:
        part.writing.abort()
        raise


class _Part:
    """Writes one part of a batch."""

    def __init__(self, plan: TaskPlan, resources: TaskResources) -> None:
        self._works = plan.record.works
        self._part = 0
        self._refused = False
        self.writing = PartWriting(plan, resources)

    def take(self, batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
        kinds, bodies = batch.column("kind"), batch.column("body")
        for at in range(batch.num_rows):
            self._part = batch.column("part")[at].as_py()
            kind = kinds[at].as_py()
            if kind in (SURPRISE, PROBLEM):
                self._refused = True
                # Every part receives this message; part 0 returns it.
                if self._part == 0:
                    yield batch.slice(at, 1)
            elif kind == COUNTS:
                yield batch.slice(at, 1)
            elif not self._refused:
                self._write(kind, batch.column("work")[at].as_py(), bodies[at].as_buffer())

    def _write(self, kind: str, work: int, body: Any) -> None:
        if kind == ROWS:
            for changes in changes_of(body):
                self.writing.write(self._part, self._works[work].source, changes)
        elif kind == STATEMENT:
            self.writing.statement(self._part, pickle.loads(body))
        else:
            assert kind == EMPTIED, "nothing else comes"
            key, target, version = pickle.loads(body)
            self.writing.empty(self._part, key, target, version)

    def finish(self) -> Iterator[pyarrow.RecordBatch]:
        receipt = self.writing.finish()
        if receipt is not None:
            yield self.message(RECEIPT, as_json(receipt))

    def message(self, kind: str, body: bytes) -> pyarrow.RecordBatch:
        values: list[list[Any]] = [[self._part], [0], [0], [kind], [body]]
        arrays = [
            pyarrow.array(column_values, field.type)
            for column_values, field in zip(values, BETWEEN, strict=True)
        ]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=BETWEEN)
