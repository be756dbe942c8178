# SPDX-License-Identifier: Apache-2.0
"""The processes of a local pipeline with shards. The parent starts them, and restarts those that fail.

    parent ─▶ one thread a shard ─▶ penstock run --local --shard 1-of-4 FILE ─▶ reports, a line of JSON each

The operating system kills a child process when the thread that started it ends, so no shard outlives the
parent. Each shard has a separate lease, so two parents of the same pipeline exclude each other. When the
number of shards changes, the previous shards first run up to a common position, where
`penstock.pipeline.handover` gives their tables to the new shards.
"""

import json
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any, Protocol

import structlog

import penstock.errors as errors
from penstock.engine.beginning import refuse_lost_state, refuse_undividable
from penstock.errors import (
    CoordinationLost,
    OperatorError,
    OptionInvalid,
    PenstockError,
    StreamError,
    TransientError,
)
from penstock.pipeline.handover import barrier_of, hand_over, is_at, remove_leftovers
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.shards import Shard
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.retry import Backoff, Retry

_log = structlog.get_logger(__name__)

_RESTARTS = Backoff(first=1.0, longest=300.0)
_STORE_BACKOFF = Backoff(first=0.5)
_POLL_SECONDS = 0.2
# The errors that correspond to the exit codes of the command line. Any other PenstockError counts as a
# defect.
_KINDS: Mapping[int, type[PenstockError]] = {1: PenstockError, 2: OperatorError, 3: StreamError}

Report = Callable[[Mapping[str, Any]], None]


class ShardCommand(Protocol):
    """Returns the command line of a shard's process. With `to_barrier`, the process ends at the barrier of
    all shards.
    """

    def __call__(self, shard: Shard, *, to_barrier: bool = False) -> Sequence[str]: ...


class ShardRuns:
    """Runs all shards of a pipeline, each in its own process.

    A failed shard is restarted after a pause that doubles up to five minutes, while the others continue. Once
    all shards have failed, `run` raises the worst of their errors. With `until_caught_up`, a shard that ended
    with an error is not started again: `run` raises the worst error after the others have caught up.
    `command` is the command line of a shard's process. `report` is called with the reports of all shards, by
    one thread at a time. Each report names its `shard`.
    """

    def __init__(
        self,
        settings: PipelineSettings,
        command: ShardCommand,
        *,
        until_caught_up: bool = False,
        stop: threading.Event | None = None,
        report: Report | None = None,
    ) -> None:
        self._settings = settings
        self._command = command
        self._until_caught_up = until_caught_up
        self._stop = stop or threading.Event()
        self._report = report
        self._lock = threading.Lock()

    def run(self) -> None:
        """Run until stopped, paused or caught up.

        Raises OptionInvalid if the pipeline cannot have shards, or their number cannot change now; LeaseLost
        if another process runs the pipeline; or a shard's error as described above.
        """
        refuse_undividable(self._settings)
        self.agree_on_shards()
        if not self._stop.is_set():
            self._run_shards(Shard.all_of(self._settings.shards), until_caught_up=self._until_caught_up)

    # --- The number of shards ---------------------------------------------------------------

    def agree_on_shards(self) -> None:
        """Hand the recorded progress over to the shards that the settings name. Raises the same errors as
        `run`.
        """
        retries = Retry(
            "waiting for the coordination store",
            backoff=_STORE_BACKOFF,
            seconds=self._settings.errors.retry_for,
            stop=self._stop,
        )
        retries.run(self._change_shards, CoordinationLost)

    def _change_shards(self) -> None:
        with closing(PipelineState.of(self._settings)) as state:
            before = state.shard_states()
            if self._is_handed_over(state, before):
                return
            _log.info(
                "the number of shards changes",
                pipeline=self._settings.name,
                before=len(before),
                after=self._settings.shards,
            )
            self._run_shards(Shard.all_of(len(before)), until_caught_up=True, to_barrier=True)
            if not self._stop.is_set() and not self._is_handed_over(state, before):
                raise OptionInvalid(
                    f"the shards of the pipeline {self._settings.name} have not reached one position",
                    hint=f"Set shards: {len(before)}, and run: penstock run --local FILE --until caught-up",
                )

    def _is_handed_over(self, state: PipelineState, before: Sequence[PipelineState]) -> bool:
        """Hand over the progress if necessary. Return False if the shards first have to run to a barrier.

        The lease of the whole pipeline ensures that no other parent process does this at the same time.
        """
        state.hold()
        try:
            for shard_state in before:
                if shard_state.shard is not None:
                    shard_state.refuse_while_run()
            if len(before) == self._settings.shards:
                remove_leftovers(state, before)
                return True
            barrier = barrier_of(before)
            if barrier is None:
                self._refuse_lost_state(before)
            checkpoints = [shard_state.checkpoint() for shard_state in before]
            if barrier is not None and not all(
                checkpoint is not None and is_at(shard_state, checkpoint, barrier)
                for shard_state, checkpoint in zip(before, checkpoints, strict=True)
            ):
                state.shards.set_barrier(barrier)
                return False
            hand_over(before, self._settings.each_shard())
            state.shards.set_barrier(None)
            return True
        finally:
            state.release()

    def _refuse_lost_state(self, before: Sequence[PipelineState]) -> None:
        """Raise OptionInvalid if the state is empty and the target is not, unless the pipeline was reset."""
        earlier = next(filter(None, (shard_state.get_large("reset") for shard_state in before)), None)
        with closing(self._settings.make_sink()) as sink:
            refuse_lost_state(self._settings, sink, Checkpoint.new(earlier))

    # --- The processes ----------------------------------------------------------------------

    def _run_shards(
        self, shards: Sequence[Shard], *, until_caught_up: bool, to_barrier: bool = False
    ) -> None:
        """Run a process for each shard until all have ended. Raises the worst error."""
        processes = [
            _ShardProcess(
                shard,
                self._command(shard, to_barrier=to_barrier),
                Retry(
                    "a shard has failed, and is started again",
                    backoff=_RESTARTS,
                    seconds=self._settings.errors.retry_for if until_caught_up else None,
                    stop=self._stop,
                ),
                self._stop,
                self._pass_on,
            )
            for shard in shards
        ]

        def is_restarted(process: "_ShardProcess") -> bool:
            if process.failure is None:
                if not until_caught_up:
                    # The pipeline is paused. Other shards might not notice before it is resumed, so end them
                    # all.
                    self._stop.set()
                return False
            if until_caught_up:
                return process.was_killed
            if all(other.failure is not None for other in processes):
                _log.error("all shards have failed", pipeline=self._settings.name)
                self._stop.set()
            return not self._stop.is_set()

        threads = [
            threading.Thread(
                target=process.run, args=(is_restarted,), name=f"shard-{process.shard}", daemon=True
            )
            for process in processes
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(_POLL_SECONDS)
                    if self._stop.is_set():
                        _stop_all(processes)
        finally:
            _stop_all(processes)
            for thread in threads:
                thread.join()
        failures = [process.failure for process in processes if process.failure is not None]
        if failures:
            raise min(failures, key=_severity)

    def _pass_on(self, report: Mapping[str, Any]) -> None:
        if self._report is not None:
            with self._lock:
                self._report(report)


class _ShardProcess:
    """The process of one shard, started again when it fails. A separate thread calls `run`."""

    def __init__(
        self, shard: Shard, command: Sequence[str], retries: Retry, stop: threading.Event, report: Report
    ) -> None:
        self.shard = shard
        # Why the last process ended, None while the process runs or if it succeeded.
        self.failure: PenstockError | None = None
        # Whether a signal ended the last process.
        self.was_killed = False
        self._command = command
        self._retries = retries
        self._stop = stop
        self._report = report
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._is_stopping = False

    def run(self, is_restarted: Callable[["_ShardProcess"], bool]) -> None:
        """Run the process until it is stopped, or until `is_restarted` returns False after the process
        ended.
        """
        try:
            while True:
                try:
                    process = self._start()
                except OptionInvalid as problem:
                    self.failure, self.was_killed = problem, False
                else:
                    if process is None:
                        return
                    self.failure = self._wait(process)
                if not is_restarted(self):
                    return
                assert self.failure is not None, "only a failure is tried again"
                self._retries.wait(self.failure, shard=str(self.shard))
        except PenstockError as problem:
            self.failure = problem
        except Exception as defect:
            # When this thread ends, the kernel also ends the shard's process, so stop the other shards too.
            # Raising the exception ends the thread and prints the traceback.
            self.failure = PenstockError(f"a defect ended the thread of shard {self.shard}: {defect!r}")
            self._stop.set()
            raise

    def stop(self) -> None:
        """Ask the process to end. Call this only once, because a second signal would kill the process."""
        with self._lock:
            if not self._is_stopping and self._process is not None:
                self._process.send_signal(signal.SIGTERM)
            self._is_stopping = True

    def _start(self) -> "subprocess.Popen[str] | None":
        """Start the process, unless it has been told to stop. Raises OptionInvalid if the system refuses."""
        with self._lock:
            if self._is_stopping or self._stop.is_set():
                return None
            try:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    encoding="utf-8",
                    errors="replace",
                    # An interrupt at the terminal should reach only the parent, which stops its children.
                    start_new_session=True,
                )
            except OSError as problem:
                raise OptionInvalid(f"shard {self.shard} cannot be started: {problem}") from problem
            return self._process

    def _wait(self, process: "subprocess.Popen[str]") -> PenstockError | None:
        """Pass on the reports of the process until it ends; return why it failed, None if it succeeded."""
        assert process.stdout is not None
        last: Mapping[str, Any] = {}
        for line in process.stdout:
            report = _report_of(line)
            if report is None:
                _log.info("output of a shard", shard=str(self.shard), line=line.rstrip("\n"))
                continue
            last = report
            if last["state"] in ("loading", "running"):
                self.failure = None
                self._retries.succeeded()
            self._report(last)
        status = process.wait()
        self.was_killed = status < 0 or status > 128
        if status == 0 or (self.was_killed and self._is_stopping):
            return None
        if last.get("state") != "failed" or self.was_killed:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            return _KINDS.get(status, TransientError)(
                f"the process of shard {self.shard} ended with {how}", hint="Its log lines say why"
            )
        kind: type[PenstockError] = getattr(errors, last["error"])
        return kind(f"shard {self.shard}: {last['what']}")


def _report_of(line: str) -> Mapping[str, Any] | None:
    """Return the report in a line of a shard's output; None for any other output, such as that of a Python
    step.
    """
    try:
        report = json.loads(line)
    except ValueError:
        return None
    return report if isinstance(report, dict) and {"pipeline", "state"} <= report.keys() else None


def _stop_all(processes: Sequence[_ShardProcess]) -> None:
    for process in processes:
        process.stop()


def _severity(problem: PenstockError) -> int:
    """Return the rank of an error: 0, the worst, for a defect, then the errors that only an operator can
    correct.
    """
    kinds = (TransientError, StreamError, OperatorError)
    return next((len(kinds) - rank for rank, kind in enumerate(kinds) if isinstance(problem, kind)), 0)
