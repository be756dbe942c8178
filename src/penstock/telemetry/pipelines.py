# SPDX-License-Identifier: Apache-2.0
"""The metrics of a pipeline, from the reports of its run.

    meter = PipelineMeter()
    pipeline.run(report=meter.observe)

`read` adds them to a scrape: see `penstock.telemetry.publish`.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.model import Position
from penstock.telemetry.counters import Counter, Histogram
from penstock.telemetry.definitions import BATCH_BOUNDS
from penstock.telemetry.readings import Readings

# The states of a run, by their names in reports.
_STATES = {
    "loading": "loading",
    "running": "running",
    "long batch": "running",
    "waiting for changes": "waiting",
    "retrying": "retrying",
    "failed": "failed",
}
_LOG_OPERATIONS = ("insert", "update", "delete")
# The operations of each stage. Rows of a load count as a separate operation.
_STAGES = {
    "read": _LOG_OPERATIONS,
    "loaded": ("load",),
    **dict.fromkeys(("dead", "written"), (*_LOG_OPERATIONS, "load")),
}


@dataclass
class _SinkMeter:
    """The state of one sink, from the reports about it."""

    state: str = ""
    reported: float = 0.0
    # The commit time of the last applied change, and the time when everything had been applied; seconds since
    # 1970.
    applied: float | None = None
    caught_up: float | None = None
    # The start of a batch that is still in progress. Only long batches are reported before their end.
    batch_begun: float | None = None
    last_error: float | None = None
    positions: Mapping[str, str] = field(default_factory=dict)
    sources_aside: frozenset[str] = frozenset()
    lease_held: bool | None = None
    tables: Mapping[str, int] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
    load_seconds: float | None = None
    load_started: float | None = None
    schema_changes: Counter = field(default_factory=lambda: Counter("applied", "ignored", "refused"))
    rows: Counter = field(default_factory=lambda: _new_rows_counter())
    # Rows of stages whose operations are unknown.
    rows_without_operation: dict[str, int] = field(default_factory=lambda: {"filtered": 0, "outdated": 0})
    read_bytes: float = 0.0
    batches: int = 0
    dead_letters: float = 0.0
    unrepresentable: float = 0.0
    retries: Counter = field(default_factory=Counter)
    failures: Counter = field(default_factory=Counter)
    phases: dict[str, Histogram] = field(default_factory=dict)


class PipelineMeter:
    """Counts the events that a pipeline's run reports, for each of its sinks and shards. Thread-safe.

    `clock` returns the seconds since 1970. `store` is the URL of the state store, without its password.
    """

    def __init__(self, clock: Callable[[], float] = time.time, store: str = "") -> None:
        self._clock = clock
        self._store = store
        self._lock = threading.Lock()
        self._sinks: dict[tuple[str, str, str], _SinkMeter] = {}

    def observe(self, report: Mapping[str, Any]) -> None:
        """Count a report of a run."""
        with self._lock:
            key = (str(report["pipeline"]), str(report.get("sink", "")), str(report.get("shard", "")))
            meter, now = self._sinks.setdefault(key, _SinkMeter()), self._clock()
            state = _STATES[report["state"]]
            meter.batch_begun = None
            if state in ("retrying", "failed"):
                (meter.retries if state == "retrying" else meter.failures).add(report["error"])
                meter.last_error = now
            elif state == "waiting":
                meter.caught_up = now
                meter.load_seconds, meter.load_started, meter.chunks = None, None, {}
            elif "running_seconds" in report:
                _count_long_batch(meter, now - report["running_seconds"])
            else:
                _count_batch(meter, report, now)
            if not ("running_seconds" in report and meter.state == "loading"):
                meter.state = state
            meter.reported = now
            for outcome, count in report.get("schema_changes", {}).items():
                meter.schema_changes.add(outcome, by=count)
            meter.lease_held = report.get("lease_held")
            meter.sources_aside = frozenset(report.get("sources_aside", {}))

    def is_ready(self) -> bool:
        """Return True unless every sink has failed. A run with nothing to do sends no reports, and is
        ready.
        """
        with self._lock:
            states = [meter.state for meter in self._sinks.values()]
        return not states or any(state != "failed" for state in states)

    def read(self, readings: Readings) -> None:
        """Add the metrics of every sink and shard."""
        with self._lock:
            for (pipeline, sink, shard), meter in self._sinks.items():
                _read_sink(readings, meter, self._clock(), pipeline=pipeline, sink=sink, shard=shard)
                # Leave out the lease of a run that has failed, because the run has released it.
                if meter.lease_held is not None and meter.state != "failed":
                    readings.add(
                        "penstock_lease_held",
                        float(meter.lease_held),
                        store=self._store,
                        kind="pipeline",
                        work="/".join(filter(None, (pipeline, sink, shard))),
                    )


def _new_rows_counter() -> Counter:
    """Return a counter of rows by stage and operation, with each at 0."""
    rows = Counter()
    for stage, operations in _STAGES.items():
        for operation in operations:
            rows.add(stage, operation, by=0)
    return rows


def _count_long_batch(meter: _SinkMeter, begun: float) -> None:
    meter.batch_begun = begun
    if _is_caught_up(meter):
        # The target was up to date until this batch began.
        meter.caught_up = max(begun, meter.caught_up or 0.0)


def _count_batch(meter: _SinkMeter, report: Mapping[str, Any], now: float) -> None:
    meter.batches += 1
    meter.rows.add("loaded", "load", by=report["loaded"])
    for stage, operations in report["operations"].items():
        for operation, rows in operations.items():
            meter.rows.add(stage, operation, by=rows)
    for stage in meter.rows_without_operation:
        meter.rows_without_operation[stage] += report.get(stage, 0)
    meter.read_bytes += report["bytes"]
    meter.dead_letters += report["batch_rejected"]
    meter.unrepresentable += sum(report.get("unrepresentable", {}).values())
    for phase, seconds in report["phases"].items():
        meter.phases.setdefault(phase, Histogram(BATCH_BOUNDS)).observe(seconds)
    meter.tables = dict(report["tables"])
    if "chunks" in report:
        done = report["chunks_done"]
        meter.chunks = {"done": done, "remaining": report["chunks"] - done}
        meter.load_seconds = report.get("load_ends_in_seconds")
        meter.load_started = report["load_started_us"] / 1e6
    if "positions" in report:
        # Keep the positions of the other sources, because a batch report contains only sources with changes.
        meter.positions = {**meter.positions, **_without_gtids(report["positions"])}
        if all(meter.positions.get(source) == head for source, head in report["heads"].items()):
            meter.caught_up = now
    if "lag_seconds" in report:
        meter.applied = max(meter.applied or 0.0, now - report["lag_seconds"])


def _read_sink(readings: Readings, meter: _SinkMeter, now: float, **labels: str) -> None:
    readings.add_states("penstock_pipeline_state", meter.state, _STATES.values(), **labels)
    readings.add("penstock_pipeline_last_report_timestamp_seconds", meter.reported, **labels)
    readings.add("penstock_pipeline_lag_seconds", _lag(meter, now), **labels)
    readings.add("penstock_pipeline_position_timestamp_seconds", meter.applied, **labels)
    readings.add("penstock_pipeline_last_error_timestamp_seconds", meter.last_error, **labels)
    for source, text in meter.positions.items():
        position = Position.parse(text)
        readings.add("penstock_pipeline_binlog_file", position.file_number, source=source, **labels)
        readings.add("penstock_pipeline_binlog_position", position.offset, source=source, **labels)
    for source in meter.positions.keys() | meter.sources_aside:
        is_aside = float(source in meter.sources_aside)
        readings.add("penstock_pipeline_source_aside", is_aside, source=source, **labels)
    for state, count in meter.tables.items():
        readings.add("penstock_pipeline_tables", count, state=state, **labels)
    for state, count in meter.chunks.items():
        readings.add("penstock_load_chunks", count, state=state, **labels)
    readings.add("penstock_load_started_timestamp_seconds", meter.load_started, **labels)
    readings.add("penstock_load_remaining_seconds", meter.load_seconds, **labels)
    readings.add_counter("penstock_schema_changes_total", meter.schema_changes, **labels)
    running = 0.0 if meter.batch_begun is None else max(0.0, now - meter.batch_begun)
    readings.add("penstock_pipeline_batch_running_seconds", running, **labels)
    readings.add("penstock_pipeline_batches_total", meter.batches, **labels)
    readings.add_counter("penstock_pipeline_rows_total", meter.rows, **labels)
    for stage, rows in meter.rows_without_operation.items():
        readings.add("penstock_pipeline_rows_total", rows, stage=stage, **labels)
    readings.add("penstock_pipeline_read_bytes_total", meter.read_bytes, **labels)
    readings.add("penstock_pipeline_dead_letters_total", meter.dead_letters, **labels)
    readings.add("penstock_pipeline_unrepresentable_total", meter.unrepresentable, **labels)
    readings.add_counter("penstock_pipeline_retries_total", meter.retries, **labels)
    readings.add_counter("penstock_pipeline_failures_total", meter.failures, **labels)
    for phase, histogram in meter.phases.items():
        readings.add_histogram("penstock_pipeline_batch_seconds", histogram, phase=phase, **labels)


def _lag(meter: _SinkMeter, now: float) -> float | None:
    """Return how far the target is behind: 0 if the last batch ended at the end of the logs.

    A lag of 0 stays correct while no new report arrives: a new change would begin a batch, and long batches
    and failed sources are reported.
    """
    reached = max(meter.applied or 0.0, meter.caught_up or 0.0)
    if not reached:
        return None
    if _is_caught_up(meter) and meter.batch_begun is None and meter.state in ("running", "waiting"):
        return 0.0
    return max(0.0, now - reached)


def _is_caught_up(meter: _SinkMeter) -> bool:
    """Return whether the last batch ended at the end of the logs."""
    return meter.caught_up is not None and meter.caught_up >= (meter.applied or 0.0)


def _without_gtids(positions: Mapping[str, str]) -> dict[str, str]:
    """Return positions by source without the GTID sets that may follow them."""
    return {source: text.partition(" ")[0] for source, text in positions.items()}
