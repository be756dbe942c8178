# SPDX-License-Identifier: Apache-2.0
"""The second stage of a batch: write the rows of a part in their order."""

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

from penstock.engine.allocator import return_large_buffers
from penstock.engine.part_writing import PartWriting
from penstock.engine.task_plan import (
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
from penstock.engine.task_rows import Row, receipt_body
from penstock.errors import PenstockError
from penstock.sinks.sink import Receipt


def write_parts(
    plan: TaskPlan, rows: Iterable[Row], resources: TaskResources = CLOSED_AFTER_USE
) -> Iterator[Row]:
    """Write the rows of a part. Yield its receipt and the messages for the engine.

    The input is sorted by work and seq, with the messages of earlier tasks first. If a message says that the
    batch cannot be written yet, no row is written. Sinks come from `resources`.
    """
    return_large_buffers()
    part = _Part(plan, resources)
    try:
        for row in rows:
            yield from part.take(row)
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

    def take(self, row: Row) -> Iterator[Row]:
        self._part = row.part
        if row.kind in (SURPRISE, PROBLEM):
            self._refused = True
            # Every part receives this message; part 0 returns it.
            if row.part == 0:
                yield row
        elif row.kind == COUNTS:
            yield row
        elif not self._refused:
            self._write(row)

    def _write(self, row: Row) -> None:
        if row.kind == ROWS:
            for changes in row.changes():
                self.writing.write(row.part, self._works[row.work].source, changes)
            return
        body: Any = row.body
        if row.kind == STATEMENT:
            self.writing.statement(self._part, pickle.loads(body))
        else:
            assert row.kind == EMPTIED, "nothing else comes"
            key, target, version = pickle.loads(body)
            self.writing.empty(self._part, key, target, version)

    def finish(self) -> Iterator[Row]:
        receipt = self.writing.finish()
        if receipt is not None:
            yield self.message(RECEIPT, receipt_body(receipt))

    def message(self, kind: str, body: bytes | Receipt) -> Row:
        return Row(self._part, 0, 0, kind, body)
