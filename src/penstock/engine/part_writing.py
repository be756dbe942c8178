# SPDX-License-Identifier: Apache-2.0
"""The writer of one part of a batch, and the source tables whose rows it writes into each target.

A sink knows only its targets. If it rejects rows of a target, the engine needs the source table of these
rows.
"""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from penstock.changes import Changes, DefiningStatement, Target
from penstock.engine.row_counts import count_changes
from penstock.engine.task_plan import Failure, TaskPlan
from penstock.engine.task_resources import TaskResources
from penstock.errors import PenstockError
from penstock.model import TableName
from penstock.pipeline.state import table_key
from penstock.sinks.sink import Receipt, Sink, Writer


class PartWriting:
    """Writes one part. Opens the sink's writer with the first rows.

    `refused` says whether the sink raised the last error.
    """

    def __init__(self, plan: TaskPlan, resources: TaskResources) -> None:
        self._plan = plan
        self._resources = resources
        self._writer: Writer | None = None
        self._sink: Sink | None = None
        self._part = 0
        self._tables: dict[TableName, set[str]] = {}
        self._operations: Counter[str] = Counter()
        self._seconds = 0.0
        self.refused = False

    def write(self, part: int, source: str, changes: Changes) -> None:
        """Write changes of a source table. Raises any error from the sink."""
        self._note(changes.target, table_key(source, changes.source))
        with self._asking():
            self._opened(part).write(changes)
        self._operations.update(count_changes(changes))

    def empty(self, part: int, key: str, target: Target, version: int) -> None:
        """Empty the target of a table, as `Writer.empty` does. Raises any error from the sink."""
        self._note(target, key)
        with self._asking():
            self._opened(part).empty(target, version)

    def statement(self, part: int, statement: DefiningStatement) -> None:
        """Write a statement, as `Writer.statement` does. Raises any error from the sink."""
        with self._asking():
            self._opened(part).statement(statement)

    def finish(self) -> Receipt | None:
        """Return the receipt, None if there were no rows. Raises any error from the sink."""
        if self._writer is None:
            return None
        with self._asking():
            receipt = self._writer.finish()
        self._writer = None
        self._release_sink(is_intact=True)
        return replace(receipt, operations=dict(self._operations), seconds=self._seconds)

    def abort(self) -> None:
        """Abandon the rows and release the writer."""
        with suppress(PenstockError):
            if self._writer is not None:
                self._writer.abort()
            self._release_sink(is_intact=False)

    def failures(self, problem: PenstockError) -> list[Failure]:
        """Return a sink's error as failures, one for each source table of the target."""
        at = None if self._writer is None else self._writer.at
        keys = self._tables.get(at, set()) if at is not None else set()
        return [Failure(problem, table=key) for key in sorted(keys)] or [Failure(problem)]

    def _note(self, target: Target, key: str) -> None:
        self._tables.setdefault(target.name, set()).add(key)

    def _opened(self, part: int) -> Writer:
        if self._writer is None:
            settings = self._plan.sink
            # The producer is transactional, so it must belong to the same part in every batch.
            self._part, self._sink = part, self._resources.take((settings, part), settings.make)
            self._writer = self._sink.open(self._plan.mark, part)
        return self._writer

    def _release_sink(self, *, is_intact: bool) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            self._resources.give_back(
                (self._plan.sink, self._part), sink, is_intact=is_intact and sink.keeps_connections
            )

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.refused = True
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began
        self.refused = False
