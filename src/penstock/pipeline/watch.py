# SPDX-License-Identifier: Apache-2.0
"""Watches the pipelines whose state is in the daemon's configured stores, to report their alerts and the
metrics of comparisons.

A store may be slow to answer, or not answer at all. A separate thread therefore queries it, and alerts and
scrapes use the thread's last result.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from penstock.errors import PenstockError
from penstock.telemetry.alerts import Alert
from penstock.telemetry.readings import Readings

if TYPE_CHECKING:
    from penstock.coordinate.store import CoordinationStore
    from penstock.pipeline.state import PipelineState
    from penstock.pipeline.verification_record import VerificationRecord

_log = structlog.get_logger(__name__)

_PAUSE_SECONDS, _PAUSE_FACTOR = 10.0, 50
# An alert about rejected rows stays active for this long after the newest rejected row.
_REJECTED_SECONDS = 900.0


@dataclass
class _Seen:
    """The last observations of a sink or shard."""

    rejected: int = 0
    rejected_at: float | None = None
    retrying_since: float | None = None
    gone_since: float | None = None


# Keyed by pipeline and sink.
Comparisons = dict[tuple[str, str], "VerificationRecord"]


@dataclass(frozen=True)
class _Learned:
    """The last answer of a store: the alerts, and the last comparisons."""

    alerts: Sequence[Alert] = ()
    comparisons: "Comparisons" = field(default_factory=dict)


def store_of(pipeline: str) -> str:
    """Return the URL of a state store, from a pipeline file or that URL. Raises OptionInvalid."""
    from penstock.pipeline.settings import place_of_state

    return place_of_state(pipeline).state if pipeline.endswith((".yaml", ".yml")) else pipeline


def stores_of(pipelines: Iterable[str]) -> list[str]:
    """Return the URLs of state stores, each once, from URLs and pipeline files. Raises OptionInvalid."""
    return list(dict.fromkeys(map(store_of, pipelines)))


class PipelineWatch:
    """Watches the pipelines of state stores from `start` until `stop`. Thread-safe.

    A pipeline whose run has been retrying or missing for more than `after` seconds raises an alert. `clock`
    is monotonic seconds.
    """

    def __init__(
        self, pipelines: Sequence[str], after: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`pipelines` are files or URLs of state stores. Files are read by `look`, so a daemon starts without
        them.
        """
        self._pipelines = tuple(pipelines)
        self._after = after
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}
        # Keyed by the file or URL that names the store.
        self._learned: dict[str, _Learned] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pipeline-watch", daemon=True)

    def start(self) -> None:
        """Start watching, if there is anything to watch."""
        if self._pipelines:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching. Does not wait for a store that does not answer."""
        self._stopping.set()

    def alerts(self) -> list[Alert]:
        """Return the conditions that an operator should know about."""
        return [alert for learned in list(self._learned.values()) for alert in learned.alerts]

    def read(self, readings: Readings) -> None:
        """Add the metrics of the last comparisons."""
        for learned in list(self._learned.values()):
            for (pipeline, sink), record in learned.comparisons.items():
                labels = {"pipeline": pipeline, "sink": sink}
                success = record.equal_us / 1e6
                readings.add("penstock_verify_last_success_timestamp_seconds", success, **labels)
                readings.add("penstock_verify_last_timestamp_seconds", record.time_us / 1e6, **labels)
                readings.add("penstock_verify_differences", record.differences, **labels)
                readings.add("penstock_verify_rows", record.rows, **labels)

    def look(self) -> None:
        """Query every store once."""
        # Imported only if needed, because a daemon without pipelines needs neither the code of pipelines nor
        # its memory.
        from penstock.coordinate.store import open_store, without_password

        urls: set[str] = set()
        for pipeline in self._pipelines:
            shown = without_password(pipeline)
            try:
                url = store_of(pipeline)
            except PenstockError as problem:
                what = f"the pipeline's file cannot be used: {type(problem).__name__}"
                self._report_unknown(pipeline, shown, what, "May the daemon's account read it?")
                continue
            if url in urls:
                # Another file names the same store.
                self._learned.pop(pipeline, None)
                continue
            urls.add(url)
            try:
                with closing(open_store(url)) as store:
                    self._learned[pipeline] = self._learn(url, store)
            except PenstockError as problem:
                what = f"the state store of pipelines does not answer: {type(problem).__name__}"
                hint = "Is it running, and is its address right?"
                self._report_unknown(pipeline, without_password(url), what, hint)

    def _report_unknown(self, pipeline: str, shown: str, what: str, hint: str) -> None:
        """Replace the alerts of a store whose pipelines cannot be read now. Its last comparisons stay."""
        known = self._learned.get(pipeline, _Learned())
        alert = Alert("pipelines unknown", shown, what, hint, is_pipeline=True)
        self._learned[pipeline] = _Learned([alert], known.comparisons)

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = self._clock()
            self.look()
            # With this pause, watching thousands of pipelines costs at most a fiftieth of a core.
            self._stopping.wait(max(_PAUSE_SECONDS, _PAUSE_FACTOR * (self._clock() - began)))

    def _learn(self, url: str, store: "CoordinationStore") -> _Learned:
        from penstock.pipeline.summary import copied_states

        alerts: list[Alert] = []
        comparisons: Comparisons = {}
        for state in copied_states(store):
            try:
                alerts += self._alerts_of(url, state)
                comparisons |= _comparisons_of(state)
            except PenstockError as problem:
                what = f"its records cannot be read: {type(problem).__name__}"
                alerts.append(_alert("pipeline failed", state.name, what))
        alerts += [
            _alert(
                "target differs",
                _shown(*key),
                f"the last comparison found {record.differences:,} rows that differ",
            )
            for key, record in comparisons.items()
            if record.differences
        ]
        return _Learned(alerts, comparisons)

    def _alerts_of(self, url: str, state: "PipelineState") -> list[Alert]:
        from penstock.pipeline.summary import summarize_part

        alerts: list[Alert] = []
        for part in state.parts():
            summary = summarize_part(part)
            seen = self._seen.setdefault((url, part.shown_name), _Seen())
            alerts += self._state_alerts(part.shown_name, summary, seen)
            stopped = summary.get("stopped")
            if stopped:
                tables = ", ".join(sorted(stopped)[:5])
                what = f"their changes are not applied: {tables}"
                alerts.append(_alert("tables stopped", part.shown_name, what))
        return alerts

    def _state_alerts(self, name: str, summary: dict[str, Any], seen: _Seen) -> list[Alert]:
        alerts: list[Alert] = []
        now, progress = self._clock(), summary.get("progress", {})
        # Leave out the error's text: it may quote a value of a row, and many people may read the alert.
        error = str(progress.get("error", ""))
        if summary["state"] == "failed":
            alerts.append(_alert("pipeline failed", name, f"its run has ended with {error}"))
        if not summary.get("gone"):
            seen.gone_since = None
        else:
            seen.gone_since = now if seen.gone_since is None else seen.gone_since
            if now - seen.gone_since > self._after:
                what = "its run was killed, or its host is lost, and no process has taken it over"
                alerts.append(_alert("pipeline gone", name, what, "Start it again: penstock run"))
        if summary["state"] != "retrying":
            seen.retrying_since = None
        else:
            seen.retrying_since = now if seen.retrying_since is None else seen.retrying_since
            seconds = now - seen.retrying_since
            if seconds > self._after:
                alerts.append(_alert("pipeline retrying", name, f"for {seconds:.0f} s because of {error}"))
        rejected = int(progress.get("rejected", 0))
        if rejected > seen.rejected:
            seen.rejected_at = now
        # Each run counts rejected rows from 0.
        seen.rejected = rejected
        if seen.rejected_at is not None and now - seen.rejected_at < _REJECTED_SECONDS:
            what = f"{rejected:,} rows were rejected into the dead letters since the run began"
            alerts.append(
                _alert("rows rejected", name, what, "Run: penstock pipelines dead-letters pipeline.yaml")
            )
        return alerts


def _comparisons_of(state: "PipelineState") -> Comparisons:
    from penstock.pipeline.verification_record import read_verification

    sinks = [type(state)(state.store, state.name, sink) for sink in state.sinks()] or [state]
    records = {(state.name, sink.sink): read_verification(sink) for sink in sinks}
    return {key: record for key, record in records.items() if record is not None}


def _shown(pipeline: str, sink: str) -> str:
    return f"{pipeline}/{sink}" if sink else pipeline


def _alert(name: str, pipeline: str, summary: str, hint: str = "Run: penstock pipelines show") -> Alert:
    return Alert(name, pipeline, summary, hint, is_pipeline=True)
