# SPDX-License-Identifier: Apache-2.0
"""The pipelines that the console shows, according to the current content of their state stores."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.coordinate.store import open_store, without_password
from penstock.errors import PenstockError, SchemaInvalid, SourceMissing
from penstock.model import TableName
from penstock.pipeline.handover import adopt, refuse_adopting
from penstock.pipeline.moving import parts_of_sink, reset_progress
from penstock.pipeline.state import PipelineState
from penstock.pipeline.summary import copied_states, name_state, summarize_part
from penstock.pipeline.table_states import TableState, table_states
from penstock.pipeline.verification_record import VerificationRecord, read_verification
from penstock.serve.masking import HIDDEN_TEXT


@dataclass(frozen=True)
class PipelineRow:
    """One sink or shard of a pipeline.

    `store` is the number of the pipeline's state store. A page about thousands of pipelines sorts them by
    `state`, and computes `summary` for only a few. With `hides_texts`, the summary omits the texts of errors
    and conditions, which may contain table values.
    """

    store: int
    part: PipelineState
    hides_texts: bool = False

    @property
    def name(self) -> str:
        """The name of the pipeline."""
        return self.part.name

    @property
    def sink(self) -> str:
        """The names of the sink and the shard, "" if the pipeline has only one of each."""
        return self.part.part

    @cached_property
    def state(self) -> str:
        """The name of the pipeline's state. A pipeline with unreadable records counts as failed."""
        try:
            return name_state(self.part)
        except SchemaInvalid:
            return "failed"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The pipeline's status, as in `pipelines show`."""
        try:
            summary = summarize_part(self.part)
        except SchemaInvalid as problem:
            error = {"error": type(problem).__name__, "what": problem.message}
            return {"state": self.state, "runner": None, "progress": error}
        return _without_texts(summary) if self.hides_texts else summary


class PipelineStates:
    """The state stores of pipelines, by number. Thread-safe. Every method waits for the stores."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    @property
    def names(self) -> list[str]:
        """The stores, without their passwords."""
        return [without_password(url) for url in self._urls]

    def url(self, number: int) -> str | None:
        """Return the URL of a state store, None if there is no such store."""
        return self._urls[number] if 0 <= number < len(self._urls) else None

    def rows(self, *, hides_texts: bool = False) -> tuple[list[PipelineRow], dict[str, PenstockError]]:
        """Return every pipeline and sink, and the errors of stores that do not answer."""
        rows: list[PipelineRow] = []
        problems: dict[str, PenstockError] = {}
        for number, url in enumerate(self._urls):
            try:
                with closing(open_store(url)) as store:
                    rows += [
                        PipelineRow(number, part, hides_texts)
                        for state in copied_states(store)
                        for part in state.parts()
                    ]
            except PenstockError as problem:
                problems[without_password(url)] = problem
        return rows, problems

    def rows_of(self, number: int, name: str, *, hides_texts: bool = False) -> list[PipelineRow]:
        """Return the sinks and shards of one pipeline. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            rows = [PipelineRow(number, part, hides_texts) for part in state.parts()]
            for row in rows:
                # The summary reads the store, so compute it while the store is open.
                _ = row.state, row.summary
            return rows

    def tables(self, number: int, name: str, sink: str) -> list[TableState]:
        """Return the tables of a pipeline's sink, by name. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name, sink) as state:
            return table_states(state)

    def last_batch(self, number: int, name: str, sink: str) -> dict[str, Any]:
        """Return the last report of a pipeline's sink. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name, sink) as state:
            return state.shown()

    def last_comparison(self, number: int, name: str, sink: str) -> VerificationRecord | None:
        """Return the result of the last comparison of a pipeline's sink, whoever ran it. Raises
        SourceMissing.
        """
        with self._state(number, name, sink) as state:
            return read_verification(state)

    def prove_table(self, number: int, name: str, sink: str, source: str, table: str) -> None:
        """Raise SourceMissing unless a pipeline's sink has a table from a source. Raises CoordinationLost."""
        if (source, table) not in {(row.source, row.table) for row in self.tables(number, name, sink)}:
            raise SourceMissing(f"the pipeline {name} has no table {table} of {source}")

    def resnapshot(
        self,
        number: int,
        name: str,
        sink: str,
        source: str,
        table: str,
        where: str | None = None,
        *,
        remove: bool = True,
    ) -> str:
        """Ask a pipeline to read one of its tables again; return the request's number.

        `where` restricts the read to some rows. With `remove`, rows that only the target has are deleted.
        Raises SourceMissing, OptionInvalid, CoordinationLost.
        """
        with self._state(number, name, sink) as state:
            return state.request_resnapshot(source, TableName.parse(table), where, remove=remove, reuse=True)

    def pause(self, number: int, name: str, why: str) -> None:
        """Stop a pipeline after its current batch. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            state.pause(why)

    def resume(self, number: int, name: str) -> None:
        """Allow a paused pipeline to start again. Raises SourceMissing, CoordinationLost."""
        with self._state(number, name) as state:
            state.resume()

    def reset(self, number: int, name: str, sink: str | None, *, dry_run: bool) -> list[str]:
        """Forget the progress of one sink of a pipeline, or of all sinks; return the sinks and shards that
        have progress.

        A dry run forgets nothing. Raises SourceMissing, OptionInvalid, and LeaseLost while the pipeline runs.
        """
        with self._state(number, name) as state:
            parts = parts_of_sink(state, sink)
            for part in parts:
                part.refuse_while_run()
            begun = [part.shown_name for part in parts if part.checkpoint() is not None]
            if not dry_run:
                reset_progress(state, sink)
            return begun

    def adopt(self, number: int, name: str, sink: str, *, dry_run: bool) -> None:
        """Give the progress of a pipeline with `sink` to one of its `sinks`.

        A dry run changes nothing. Raises SourceMissing, OptionInvalid, and LeaseLost while the pipeline runs.
        """
        with self._state(number, name) as state:
            (refuse_adopting if dry_run else adopt)(state, sink)

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


def _without_texts(summary: dict[str, Any]) -> dict[str, Any]:
    shown = {**summary, "why": HIDDEN_TEXT if summary["why"] else None}
    if "what" in (progress := summary.get("progress", {})):
        shown["progress"] = {**progress, "what": HIDDEN_TEXT}
    for texts in ("stopped", "resnapshots"):
        shown[texts] = dict.fromkeys(summary.get(texts, ()), HIDDEN_TEXT)
    return shown
