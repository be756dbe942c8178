# SPDX-License-Identifier: Apache-2.0
"""Serves an instance that is captured by another process of this daemon."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import structlog

from penstock.capture.status import CaptureStatus, Failure, State
from penstock.errors import PenstockError, ProcessFailed, ServerBusy
from penstock.logstore.followed_log import FollowedLog, LogReport
from penstock.logstore.holds import BrokenHold
from penstock.logstore.memory import MemoryTier
from penstock.model import Position, TableName
from penstock.settings.daemon import InstanceSettings, LogSettings
from penstock.telemetry.counters import Counter

# The usual exit statuses: 70 is a defect or a panic.
_KNOWN_REASONS = ("70", "SIGABRT", "SIGKILL", "SIGSEGV", "silence")
# The timeout of a call that stores a definition, which the process writes to disk.
_GIVE_SECONDS = 30.0
# How long an exit raises an alert.
_ALERT_US = 300_000_000

_log = structlog.get_logger(__name__)


class CallProcess(Protocol):
    """Calls a function in the capture process of an instance.

    Propagates the function's errors. Raises ServerBusy if no process is running, or if the process does not
    answer within `seconds`.
    """

    def __call__(self, call: str, *arguments: Any, seconds: float = ...) -> Any:
        """Return the function's result."""


@dataclass(frozen=True)
class ProcessExit:
    """How a capture process ended: when (microseconds since 1970, UTC), why, and the last lines of its
    output.

    `reason` is a signal, an exit status or a word chosen by the supervisor. It is used in metrics.
    """

    time_us: int
    reason: str
    why: str
    lines: tuple[str, ...] = ()

    @property
    def is_recent(self) -> bool:
        """Whether the exit is so recent that it still raises an alert."""
        return now_us() - self.time_us < _ALERT_US

    def text(self) -> str:
        """Return why the process ended; after a defect the last line of its output names the error.

        For operators only: a line of output may name any table.
        """
        return f"{self.why}: {self.lines[-1]}" if self.reason.isdecimal() and self.lines else self.why


class RemoteSettler:
    """Forwards calls to the settler of a log, which runs in the process that captures the log; see
    `penstock.logstore.schemas.Settling`.
    """

    def __init__(self, instance: "ProcessInstance") -> None:
        self._instance = instance

    def wait(self, name: TableName, since: Position, seconds: float, *, again: bool = False) -> None:
        """Wait until the doubt about a table's definition is settled or refused, or the timeout expires."""
        try:
            self._instance.call(
                "wait_settled", self._instance.name, name, since, seconds, again, seconds=seconds + 1.0
            )
        except ServerBusy as problem:
            # Only log the error: the table stays in doubt until the process is running again.
            _log.info(
                "a table is not settled", instance=self._instance.name, table=str(name), why=str(problem)
            )

    def give(self, name: TableName, since: Position, definition: dict[str, Any]) -> None:
        """Store a table definition that an operator supplies, valid from a position on."""
        self._instance.call(
            "give_definition", self._instance.name, name, since, definition, seconds=_GIVE_SECONDS
        )


class ProcessInstance:
    """An instance captured by another process; see `penstock.serve.served.ServedInstance`. Thread-safe.

    The thread that watches the process calls `began`, `report`, `update` and the methods about the process's
    end. `call` calls a function in the process that currently captures the instance.
    """

    call: CallProcess

    def __init__(self, name: str, settings: InstanceSettings, log: LogSettings) -> None:
        self.name = name
        self._log_settings = log
        self._followed: FollowedLog | None = None
        self._refusal: PenstockError | None = None
        self._status: Mapping[str, Any] = CaptureStatus.of_idle(
            name, State.OPENING, None, list(settings.tables), list(settings.exclude_tables)
        ).to_json()
        self._lock = threading.Lock()
        self._process: int | None = None
        self._starts = 0
        self._exits: tuple[ProcessExit, ...] = ()
        # All exits since the daemon's start, by reason.
        self.exit_counts = Counter(*_KNOWN_REASONS)
        # The state and its reason while there is no process.
        self._down: tuple[State, Failure] | None = None
        self._set_aside: Failure | None = None

    # --- For readers ------------------------------------------------------------------------

    def log(self) -> FollowedLog:
        """Return the log. Raises ServerBusy while it is being opened, and the error if opening failed."""
        followed, refusal = self._followed, self._refusal
        if refusal is not None:
            # All callers share one error object, and each raise would extend its traceback.
            raise refusal.with_traceback(None)
        if followed is None:
            raise ServerBusy(f"the log of {self.name} is being opened", hint="Ask again in a moment")
        return followed

    def status(self) -> Mapping[str, Any]:
        """Return the status as plain JSON values. Never waits."""
        with self._lock:
            status, followed, down = dict(self._status), self._followed, self._down
            exits = self._exits
            status["process"] = {
                "pid": self._process,
                "starts": self._starts,
                "exits": [asdict(process_exit) for process_exit in exits],
                "set_aside": self._set_aside is not None,
            }
        if followed is not None:
            status["position"], status["durable"] = _text(followed.visible), _text(followed.durable)
        if down is not None:
            state, failure = down
            status.update(
                state=state.value,
                why=failure.message,
                error=asdict(failure),
                lag_seconds=None,
                bytes_per_second=0.0,
                transactions_per_second=0.0,
                rows_per_second=0.0,
                semi_sync=False,
            )
        return status

    @property
    def pid(self) -> int | None:
        """The id of the instance's process, None if there is none."""
        return self._process

    @property
    def position(self) -> Position | None:
        """The end of the last whole transaction, according to the reports."""
        return None if self._followed is None else self._followed.visible

    @property
    def exits(self) -> Sequence[ProcessExit]:
        """The latest exits of the instance's process, the newest last."""
        return self._exits

    @property
    def set_aside(self) -> Failure | None:
        """Why the process is not started again, None if it will be started again."""
        return self._set_aside

    @property
    def memory(self) -> MemoryTier | None:
        """The newest bytes of the instance's log, None if none are kept."""
        return None if self._followed is None else self._followed.memory

    # --- For the thread that watches the process --------------------------------------------

    def began(self, process: int) -> None:
        """Note that a process was started."""
        with self._lock:
            self._process = process
            self._starts += 1
            self._set_aside = None
        if self._followed is not None:
            self._followed.forget_writer()

    def report(self, report: LogReport) -> None:
        """Make the bytes that the process has stored visible; an error is logged, and the next report tries
        again.
        """
        try:
            if self._followed is None:
                self._followed = FollowedLog(self._log_settings, RemoteSettler(self))
            self._followed.apply(report)
            self._refusal = None
        except PenstockError as problem:
            _log.warning("a log cannot be followed", instance=self.name, why=str(problem))

    def update(
        self,
        status: Mapping[str, Any],
        refusal: PenstockError | None,
        broken_holds: Sequence[BrokenHold],
    ) -> None:
        """Note the status of the process."""
        with self._lock:
            self._status, self._down = status, None
        self._refusal = refusal
        if self._followed is not None:
            self._followed.broken_holds = broken_holds

    def ended(self, process_exit: ProcessExit, exits_kept: int) -> None:
        """Note that the process has ended; it will be started again."""
        message = f"its process ended: {process_exit.why}"
        with self._lock:
            self._process = None
            self.exit_counts.add(process_exit.reason)
            # Keep only the output of the newest exit. The daemon's log has the output of all exits.
            earlier = [replace(earlier_exit, lines=()) for earlier_exit in self._exits]
            self._exits = (*earlier, process_exit)[-exits_kept:]
            self._down = State.WAITING, self._failure(message, process_exit, "See the daemon's log")

    def put_aside(self, exits: int) -> None:
        """Record that the process will not be started again automatically. Readers can still read the log."""
        last = self._exits[-1]
        message = f"set aside: its process ended {exits} times without progress, the last time by {last.why}"
        hint = f"Repair the cause, then run: penstock resume {self.name}"
        failure = self._failure(message, last, hint)
        if self._followed is None:
            self._refusal = ProcessFailed(message, position=failure.position, hint=hint)
        with self._lock:
            self._set_aside = failure
            self._down = State.STOPPED, failure

    def leave(self, why: PenstockError) -> None:
        """Refuse readers, because the log may change without reports. The log is opened again after the next
        report.
        """
        followed = self._followed
        self._refusal, self._followed = why, None
        if followed is not None:
            # Close the followed log. Its current readers continue from the disk.
            followed.close()

    def close(self) -> None:
        """Close the log."""
        if self._followed is not None:
            self._followed.close()

    def _failure(self, message: str, process_exit: ProcessExit, hint: str) -> Failure:
        return Failure(ProcessFailed.__name__, message, _text(self.position), hint, process_exit.time_us)


def now_us() -> int:
    """Return the time in microseconds UTC since 1970."""
    return time.time_ns() // 1000


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)
