# SPDX-License-Identifier: Apache-2.0
"""The pipelines that the console shows, as their state stores have them at this moment."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.coordinate.store import CoordinationStore, open_store, without_password
from penstock.errors import PenstockError, SourceMissing
from penstock.pipeline.state import PipelineState
from penstock.pipeline.summary import summarize_pipeline


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

    def pause(self, number: int, name: str, why: str) -> None:
        """Stop a pipeline after its current batch. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            state.pause(why)

    def resume(self, number: int, name: str) -> None:
        """Allow a paused pipeline to start again. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            state.resume()

    @contextmanager
    def _state(self, number: int, name: str) -> Iterator[PipelineState]:
        if not 0 <= number < len(self._urls):
            raise SourceMissing("there is no such state store", hint="Open the page of pipelines again")
        with closing(open_store(self._urls[number])) as store:
            if name not in PipelineState.names(store):
                raise SourceMissing(f"there is no pipeline {name!r}", hint="It may have been removed")
            yield PipelineState(store, name)


def _rows_of(number: int, name: str, store: CoordinationStore) -> list[PipelineRow]:
    summary = summarize_pipeline(PipelineState(store, name))
    sinks = summary.get("sinks")
    if sinks is None:
        return [PipelineRow(number, name, "", summary)]
    return [PipelineRow(number, name, sink, part) for sink, part in sinks.items()]
