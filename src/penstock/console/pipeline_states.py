# SPDX-License-Identifier: Apache-2.0
"""The pipelines that the console shows, as their state stores have them at this moment."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.coordinate.store import CoordinationStore, open_store, without_password
from penstock.errors import PenstockError, SourceMissing
from penstock.model import TableName
from penstock.pipeline.state import PipelineState
from penstock.pipeline.summary import summaries_by_part, summarize_pipeline
from penstock.pipeline.table_states import TableState, table_states


@dataclass(frozen=True)
class PipelineRow:
    """One sink of a pipeline: `store` is the number of its state store, `summary` as in `pipelines show`."""

    store: int
    name: str
    sink: str
    summary: dict[str, Any]


class PipelineStates:
    """The state stores of pipelines, by number. Thread-safe; every method waits for the stores."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    @property
    def names(self) -> list[str]:
        """The stores, without their passwords."""
        return [without_password(url) for url in self._urls]

    def url(self, number: int) -> str | None:
        """Return the URL of a state store, None if there is no such store."""
        return self._urls[number] if 0 <= number < len(self._urls) else None

    def rows(self) -> tuple[list[PipelineRow], dict[str, PenstockError]]:
        """Return every pipeline and sink, and why stores do not answer."""
        rows: list[PipelineRow] = []
        problems: dict[str, PenstockError] = {}
        for number, url in enumerate(self._urls):
            try:
                with closing(open_store(url)) as store:
                    for name in PipelineState.names(store):
                        rows += _rows_of(number, name, store)
            except PenstockError as problem:
                problems[without_password(url)] = problem
        return rows, problems

    def rows_of(self, number: int, name: str) -> list[PipelineRow]:
        """Return the sinks of one pipeline. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            return _rows_of(number, name, state.store)

    def tables(self, number: int, name: str, sink: str) -> list[TableState]:
        """Return the tables of a pipeline's sink, by name. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name, sink) as state:
            return table_states(state)

    def last_batch(self, number: int, name: str, sink: str) -> dict[str, Any]:
        """Return the last report of a pipeline's sink. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name, sink) as state:
            return state.shown()

    def resnapshot(self, number: int, name: str, sink: str, source: str, table: str) -> str:
        """Ask a pipeline to read a table again; return the request's number.

        Raises SourceMissing, OptionInvalid, CoordinationLost.
        """
        if (source, table) not in {(row.source, row.table) for row in self.tables(number, name, sink)}:
            raise SourceMissing(f"the pipeline {name} has no table {table} of {source}")
        with self._state(number, name, sink) as state:
            return state.request_resnapshot(source, TableName.parse(table))

    def pause(self, number: int, name: str, why: str) -> None:
        """Stop a pipeline after its current batch. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            state.pause(why)

    def resume(self, number: int, name: str) -> None:
        """Allow a paused pipeline to start again. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            state.resume()

    @contextmanager
    def _state(self, number: int, name: str, sink: str = "") -> Iterator[PipelineState]:
        if not 0 <= number < len(self._urls):
            raise SourceMissing("there is no such state store", hint="Open the page of pipelines again")
        with closing(open_store(self._urls[number])) as store:
            if name not in PipelineState.names(store):
                raise SourceMissing(f"there is no pipeline {name!r}", hint="It may have been removed")
            whole = PipelineState(store, name)
            parts = {"": whole, **{part.part: part for part in whole.parts()}}
            if sink not in parts:
                raise SourceMissing(f"the pipeline {name} has no sink or shard {sink!r}")
            yield parts[sink]


def _rows_of(number: int, name: str, store: CoordinationStore) -> list[PipelineRow]:
    summary = summarize_pipeline(PipelineState(store, name))
    return [PipelineRow(number, name, part, status) for part, status in summaries_by_part(summary).items()]
