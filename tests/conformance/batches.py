# SPDX-License-Identifier: Apache-2.0
"""Batches for the sinks' conformance suite, and the selection of backends for a test."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.changes import Changes, Target
from penstock.sinks.sink import BatchMark, Evolution, Receipt, Sink
from tests.support.pipeline.changes_made import Made, changes_of
from tests.support.sinks.backends import Row, SinkBackend

COLUMNS = {"id": "int", "name": "varchar(40)"}
MakeTarget = Callable[..., Target]
Choice = Callable[[type[SinkBackend]], bool]
_Test = TypeVar("_Test", bound=Callable[..., None])


def runs_on(choice: Choice) -> Callable[[_Test], _Test]:
    """Run a test on the backends that satisfy a condition; by default on every mirror."""

    def decorate(test: _Test) -> _Test:
        test.runs_on = choice  # type: ignore[attr-defined]
        return test

    return decorate


class Pipe:
    """Writes consecutive batches, as a pipeline does."""

    def __init__(self, sink: Sink, evolution: Evolution = Evolution.EVOLVE) -> None:
        self.sink = sink
        self.evolution = evolution
        self.number = 0

    def batch(self, *parts: Sequence[Changes], again: bool = False) -> list[Receipt]:
        """Write a batch with a part for each task; `again` repeats the last batch."""
        self.number += 0 if again else 1
        mark = BatchMark("conformance", "1", self.number)
        receipts = []
        for number, part in enumerate(parts):
            for changes in part:
                self.sink.prepare(changes.target, self.evolution)
            writer = self.sink.open(mark, number)
            for changes in part:
                writer.write(changes)
            receipts.append(writer.finish())
        self.sink.commit(mark, receipts)
        return receipts

    def changes(self, target: Target, *groups: list[Made], again: bool = False) -> list[Receipt]:
        """Write changes of one table in one part."""
        return self.batch([changes_of(target, *groups)], again=again)


def row(number: int, name: str | None = None) -> Row:
    """Return a row of a table with COLUMNS."""
    return {"id": number, "name": name}
