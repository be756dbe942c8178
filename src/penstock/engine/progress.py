# SPDX-License-Identifier: Apache-2.0
"""A run's progress reports: a log line for each batch, and a record for `penstock pipelines show`."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import structlog

from penstock.engine.job import Outcome
from penstock.errors import CoordinationLost, PenstockError, SchemaInvalid
from penstock.pipeline.record import BatchRecord
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.source.offsets import Offset

_log = structlog.get_logger(__name__)

# How often an idle run logs that there is nothing to do.
SECONDS_SHOWN = 5.0
# The minimum interval at which a run records and logs its progress. Every batch is reported.
_PAUSE_SECONDS = 1.0
# The state that is reported for a run whose batch takes a long time.
_LONG_BATCH = "long batch"
# How long a batch runs before it is reported, and how often it is reported from then on.
_LONG_BATCH_SECONDS = 10.0
# What a record says about the last batch and the rows of its run.
_OF_BATCH = frozenset(
    (
        *(
            "batch",
            "rows",
            "written",
            "seconds",
            "rows_per_second",
            "rows_in_all",
            "rejected",
            "batch_rejected",
        ),
        *("loaded", "bytes", "phases", "tables", "operations", "filtered", "positions", "heads"),
        *("unrepresentable", "outdated"),
    )
)


class Progress:
    """The counts and rates of one run."""

    def __init__(
        self, settings: PipelineSettings, report: Callable[[Mapping[str, Any]], None] | None
    ) -> None:
        names = {"pipeline": settings.name, "sink": settings.sink.name, "shard": settings.shard}
        self._names = {kind: str(name) for kind, name in names.items() if name}
        self._report = report
        self._rows = 0
        self._written = 0
        self._heads: dict[str, str] = {}
        self._shown: dict[str, Any] = {}
        # The report of the last batch of an earlier run, until this run completes a batch.
        self._earlier: dict[str, Any] = {}
        self._shown_at = 0.0
        self._failing = False
        # The number of the batch in progress, and when the batch began, by `time.monotonic`.
        self._batch: tuple[int, float] | None = None
        self._batch_lock = threading.Lock()
        # Whether batches were completed since the progress was last recorded.
        self._is_behind = False
        # The number of rows in the last batch, and the number of rows in its chunks.
        self.rows_of_batch = 0
        self._loading_since = 0.0
        self._load_started_us = 0
        self._loaded = 0
        self._rejected = 0
        # The number of schema changes made to targets since the last report, by outcome.
        self.schema_changes: Counter[str] = Counter()
        # The error of each source that the run continues without.
        self.aside: Mapping[str, PenstockError] = {}

    def seen(self, source: str, end: Offset, head: Offset) -> None:
        """Record how far a source's log extends."""
        self._heads[source] = str(head.position)

    @contextmanager
    def watching_batches(self, state: Callable[[], PipelineState | None]) -> Iterator[None]:
        """Report a long-running batch at intervals while the block runs, because a hung batch reports nothing
        itself.

        `state` returns the pipeline's state if it is open.
        """
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(_LONG_BATCH_SECONDS):
                self._report_long_batch(state())

        # The thread may be waiting for the state store when the block ends, so do not join it.
        threading.Thread(target=watch, name="watch-batches", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def begin_batch(self, record: BatchRecord) -> None:
        """Record that a batch begins."""
        with self._batch_lock:
            self._batch = record.number, time.monotonic()

    def _end_batch(self) -> None:
        with self._batch_lock:
            self._batch = None

    def _report_long_batch(self, state: PipelineState | None) -> None:
        # Hold the lock, so that the end of the batch can only be reported after this report.
        with self._batch_lock:
            if self._batch is None:
                return
            number, began = self._batch
            seconds = time.monotonic() - began
            if seconds >= _LONG_BATCH_SECONDS:
                running = {"running_batch": number, "running_seconds": round(seconds, 3)}
                self._write_if_held({**self._shown, "state": _LONG_BATCH, **running}, state)
                self._tell({"state": _LONG_BATCH, **running}, state)

    def batch(
        self,
        checkpoint: Checkpoint,
        record: BatchRecord,
        outcome: Outcome,
        phases: Mapping[str, float],
        state: PipelineState,
    ) -> None:
        """Report a completed batch. `phases` are the seconds of each of its phases."""
        self._end_batch()
        self._earlier = {}
        seconds = sum(phases.values())
        rows = sum(counts.rows + counts.chunk_rows for counts in outcome.counts)
        chunk_rows = sum(counts.chunk_rows for counts in outcome.counts)
        written = sum(receipt.rows for receipt in outcome.receipts)
        time_us = max((counts.time_us for counts in outcome.counts), default=0)
        self.rows_of_batch = rows
        self._rows += rows
        self._written += written
        self._loaded += chunk_rows
        rejected = sum(counts.rejected for counts in outcome.counts)
        self._rejected += rejected
        unrepresentable: dict[str, int] = {}
        for receipt in outcome.receipts:
            for name, count in receipt.unrepresentable.items():
                unrepresentable[name] = unrepresentable.get(name, 0) + count
        shown: dict[str, Any] = {
            "state": "loading" if checkpoint.loading else "running",
            "batch": record.number,
            "rows": rows,
            "written": written,
            "seconds": round(seconds, 3),
            "rows_per_second": round(rows / seconds) if seconds else 0,
            "rows_in_all": self._rows,
            "rejected": self._rejected,
            "batch_rejected": rejected,
            "loaded": chunk_rows,
            "bytes": sum(counts.bytes for counts in outcome.counts),
            "phases": {name: round(spent, 3) for name, spent in phases.items()},
            "tables": _count_tables(checkpoint),
            "operations": _count_operations(outcome),
            "filtered": sum(counts.filtered for counts in outcome.counts),
        }
        if record.end:
            shown["positions"] = {name: str(Offset.from_json(offset)) for name, offset in record.end.items()}
            shown["heads"] = dict(self._heads)
        if time_us:
            shown["lag_seconds"] = round(max(0.0, time.time() - time_us / 1e6), 3)
        if unrepresentable:
            shown["unrepresentable"] = unrepresentable
        if outdated := sum(receipt.outdated for receipt in outcome.receipts):
            shown["outdated"] = outdated
        if record.chunks:
            shown |= self._of_load(checkpoint, record)
        if not self._failing and not record.chunks and time.monotonic() < self._shown_at + _PAUSE_SECONDS:
            # Batches may take milliseconds, and recording the progress takes as long, so record it at
            # intervals.
            self._shown, self._is_behind = shown, True
            self._tell(shown, state)
            return
        logged = {name: value for name, value in {**self._names, **shown}.items() if name != "state"}
        _log.info("a batch is done", **logged)
        self._show(shown, state)

    def _of_load(self, checkpoint: Checkpoint, record: BatchRecord) -> dict[str, Any]:
        now = time.monotonic()
        self._loading_since = self._loading_since or now
        self._load_started_us = self._load_started_us or time.time_ns() // 1000
        chunks = sum(load.chunks for load in checkpoint.loads.values())
        done = sum(load.done for load in checkpoint.loads.values())
        shown: dict[str, Any] = {"chunks": chunks, "chunks_done": done, "rows_loaded": self._loaded}
        shown["load_started_us"] = self._load_started_us
        elapsed = now - self._loading_since
        since = done - len(record.chunks)
        if elapsed > 0 and since > 0:
            shown["load_ends_in_seconds"] = round((chunks - done) * elapsed / since)
        return shown

    def idle(self, checkpoint: Checkpoint, state: PipelineState) -> None:
        """Report at intervals that there is nothing to do."""
        self._end_batch()
        pause = _PAUSE_SECONDS if self._is_behind else SECONDS_SHOWN
        if time.monotonic() - self._shown_at >= pause:
            self._show({**self._shown, "state": "waiting for changes"}, state, tell=self._failing)

    def begin(self, state: PipelineState) -> None:
        """Record that a run begins. Its first batch may take a long time.

        The record of the last batch of an earlier run is kept until then.
        """
        try:
            shown = state.shown()
        except SchemaInvalid as problem:
            _log.warning("the progress of an earlier run is replaced", why=str(problem), hint=problem.hint)
            shown = {}
        self._earlier = {name: value for name, value in shown.items() if name in _OF_BATCH}
        self._write({"state": "starting"}, state)

    def end(self, state: PipelineState | None) -> None:
        """Record the latest progress, and that the run ended normally.

        A run with neither this record nor an error was killed.
        """
        self._is_behind = False
        self._write_if_held({**self._shown, "ended": True}, state)

    def retrying(self, problem: PenstockError, state: PipelineState | None) -> None:
        """Report an error that is being retried, until the next batch is done or there is nothing to do."""
        self._failing = True
        self._shown_at = 0.0
        self._tell_problem("retrying", problem, state)

    def failed(self, problem: PenstockError, state: PipelineState | None) -> None:
        """Show what ended the run."""
        self._tell_problem("failed", problem, state)

    def _tell_problem(self, what: str, problem: PenstockError, state: PipelineState | None) -> None:
        self._end_batch()
        shown = {**self._shown, "state": what, "error": type(problem).__name__, "what": str(problem)}
        if not isinstance(problem, CoordinationLost):
            self._write_if_held(shown, state)
        self._tell(shown, state)

    def _write_if_held(self, shown: dict[str, Any], state: PipelineState | None) -> None:
        # A runner without the lease must not overwrite the pipeline's recorded progress.
        if state is not None and state.held:
            with suppress(CoordinationLost):
                self._write(shown, state)

    def _show(self, shown: dict[str, Any], state: PipelineState, *, tell: bool = True) -> None:
        self._shown = shown
        self._write(shown, state)
        self._shown_at = time.monotonic()
        self._failing = self._is_behind = False
        if tell:
            self._tell(shown, state)

    def _write(self, shown: dict[str, Any], state: PipelineState) -> None:
        written = {"updated_us": time.time_ns() // 1000, "ended": False, **self._earlier, **shown}
        state.show({**self._names, **written, **self._of_sources()})

    def _tell(self, shown: dict[str, Any], state: PipelineState | None) -> None:
        if self._report is not None:
            lease = {"lease_held": state is not None and state.held}
            changes = dict(self.schema_changes)
            self.schema_changes.clear()
            changed = {"schema_changes": changes} if changes else {}
            self._report({**self._names, **shown, **lease, **changed, **self._of_sources()})

    def _of_sources(self) -> dict[str, Any]:
        aside = {name: str(problem) for name, problem in self.aside.items()}
        return {"sources_aside": aside} if aside else {}


def _count_operations(outcome: Outcome) -> dict[str, dict[str, int]]:
    """Return the changes of a batch by stage and operation."""
    stages: dict[str, Counter[str]] = {}
    for counts in outcome.counts:
        for stage, operations in counts.by_stage.items():
            stages.setdefault(stage, Counter()).update(operations)
    written = Counter[str]()
    for receipt in outcome.receipts:
        written.update(receipt.operations)
    return {stage: dict(counted) for stage, counted in {**stages, "written": written}.items() if counted}


def _count_tables(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how many tables are being loaded, how many have been loaded, and how many an error has
    stopped.
    """
    loaded = sum(load.finished for load in checkpoint.loads.values())
    return {"loading": len(checkpoint.loads) - loaded, "loaded": loaded, "stopped": len(checkpoint.stopped)}
