# SPDX-License-Identifier: Apache-2.0
"""A worker's role in one job: it runs the job as a child process, and starts it again after a failure.

The lease in the pipeline's state ensures that only one process of a job works at a time. A child therefore
continues while the store does not answer the worker, and ends only when the worker loses the job.
"""

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BufferedWriter
from pathlib import Path

import structlog

from penstock.coordinate.lease import Lease
from penstock.coordinate.store import CoordinationStore
from penstock.errors import PenstockError
from penstock.fleet.jobs import (
    EXITS_KEPT,
    LINES_KEPT,
    JobExit,
    JobRun,
    JobSpec,
    check_job_name,
    job_path,
    read_run,
    run_path,
)
from penstock.retry import Backoff, Retry

# A process that ran for this long had started properly: if it ends, it is restarted without a long backoff.
_WELL_SECONDS = 60.0
_BACKOFF = Backoff(first=1.0, longest=300.0)
_RELEASE_BACKOFF = Backoff(longest=1.0)
# How long the job's process may take to stop. A pipeline needs less time to stop by itself.
_STOP_SECONDS_MAX = 20.0
# How long to wait for the rest of the output, which a descendant outside the process group may keep open.
_OUTPUT_SECONDS_MAX = 5.0

# A job's output is kept in two files of at most this size. In the store, lines are truncated.
_LOG_BYTES_MAX = 8 << 20
_LINE_CHARACTERS_MAX = 500
_LINE_BYTES_MAX = 64 * 1024
_WHY_LINES = 5

# The file in the job's folder with the address of the job's metrics.
ADDRESS_FILE = "metrics.address"

_log = structlog.get_logger(__name__)


class JobTenure:
    """A job that this worker runs; see `penstock.fleet.group.Tenure`.

    `command` is the program; the job's verb, file and options are appended to it. The job's file and output
    are in the job's own folder below `folder`. The process must write the address of its metrics to a file in
    that folder; the environment variable `address_variable` contains the file's path.
    """

    def __init__(
        self,
        store: CoordinationStore,
        name: str,
        lease: Lease,
        folder: Path,
        command: Sequence[str],
        address_variable: str | None = None,
    ) -> None:
        """Start running the job. Raises CoordinationLost, SchemaInvalid, OptionInvalid."""
        check_job_name(name)
        self.name = name
        self._store = store
        self._lease = lease
        self._folder = folder / name
        self._command = tuple(command)
        self._address_variable = address_variable
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._left = threading.Event()
        self._on_left: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        before = read_run(store, name)
        self._run_record = replace(
            before, worker=lease.holder, state="waiting", process=None, log=str(self._folder / "output.log")
        )
        self._written: JobRun | None = None
        self._output_lock = threading.Lock()
        self._output: BufferedWriter | None = None
        self._lines: deque[str] = deque(before.lines, LINES_KEPT)
        self._watch = store.watch(job_path(name), self._news.set)
        self._thread = threading.Thread(target=self._run, name=f"job-{name}", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether the lease was permanently lost before this worker gave it up."""
        return self._lease.lost

    @property
    def damage(self) -> None:
        """Always None: a job has no log."""

    @property
    def left(self) -> bool:
        """Whether the process has ended and the lease has been released."""
        return self._left.is_set()

    def leave(self, why: str, left: Callable[[], None]) -> None:
        """Stop the process and release the lease, in the job's thread; then call `left`."""
        self._on_left = left
        self._stopping.set()
        self._news.set()

    def wait_left(self, seconds: float) -> bool:
        """Wait up to `seconds` for the release of the lease; return whether it has been released."""
        return self._left.wait(seconds)

    def record(self) -> None:
        """Record the state and the newest output, if either has changed. Raises CoordinationLost."""
        if not self._lease.held:
            return
        with self._lock:
            record = replace(self._run_record, lines=tuple(self._lines))
            if record != self._written:
                self._store.put(run_path(self.name), record.encode())
                self._written = record

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Run the job until it is given up. When this thread ends, the kernel ends the child."""
        failures = 0
        try:
            while not self._stopping.is_set():
                self._news.clear()
                job = self._read_job()
                if job is None or job.paused:
                    # Wait: the leader takes a removed or paused job away from this worker.
                    self._note(state="stopped")
                    self._news.wait()
                    continue
                if job.work == self._run_record.ended:
                    # Wait: the job has ended successfully, perhaps on another worker.
                    self._wait_for_change(job, None)
                    continue
                started_at = time.monotonic()
                status = self._run_once(job)
                if status is None:
                    failures = 0
                    continue
                failures = 1 if time.monotonic() - started_at >= _WELL_SECONDS else failures + 1
                self._wait_for_change(job, None if status == 0 else _BACKOFF.pause(failures))
        finally:
            self._watch.close()
            self._note(state="stopped", process=None)
            self._release()
            self._left.set()
            self._on_left()

    def _run_once(self, job: JobSpec) -> int | None:
        """Run the job's process; return its exit status, or None if this worker stopped it."""
        try:
            process = self._start(job)
        except (OSError, ValueError) as problem:
            # ValueError: the command or environment contains a character that is not allowed there.
            self._note_exit(JobExit(-1, f"it cannot be started: {problem}", _now_us()))
            return -1
        reading = threading.Thread(
            target=self._read_output, args=(process,), name=f"output-{self.name}", daemon=True
        )
        reading.start()
        self._note(
            state="running",
            process=process.pid,
            version=job.version,
            since_us=_now_us(),
            starts=self._run_record.starts + 1,
        )
        _log.info("a job is started", job=self.name, version=job.version, process=process.pid)
        was_stopped = False
        while process.poll() is None:
            if self._news.wait(0.2):
                self._news.clear()
                current = self._read_job()
                if self._stopping.is_set() or current is None or not current.is_same_work(job):
                    was_stopped = True
                    _stop(process)
        # Kill the process group: processes that the job started must not write to the target at the same time
        # as the next process.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        reading.join(_OUTPUT_SECONDS_MAX)
        why = "\n".join(list(self._lines)[-_WHY_LINES:])
        _log.info("a job has ended", job=self.name, status=process.returncode, stopped=was_stopped)
        if was_stopped:
            self._note(state="waiting", process=None)
            return None
        self._note_exit(JobExit(process.returncode, why, _now_us()))
        return process.returncode

    def _start(self, job: JobSpec) -> "subprocess.Popen[bytes]":
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self.name}.yaml"
        # Only this user may read the pipeline file, because it may contain a password.
        file.touch(mode=0o600)
        file.write_text(job.text, encoding="utf-8")
        return subprocess.Popen(
            [*self._command, job.verb, str(file), *job.options],
            env={**os.environ, **job.values, **self._variables()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Start a new session: an interrupt at the terminal stops only the worker, which stops its jobs.
            start_new_session=True,
        )

    def _variables(self) -> dict[str, str]:
        if self._address_variable is None:
            return {}
        file = self._folder / ADDRESS_FILE
        # Remove the address of the previous process, because another program may use its port by now.
        file.unlink(missing_ok=True)
        return {self._address_variable: str(file)}

    def _read_output(self, process: "subprocess.Popen[bytes]") -> None:
        """Store the output of the process in bounded files, and its newest lines in memory.

        If the disk is full, output is lost, because the process must not wait.
        """
        assert process.stdout is not None
        was_refused = False
        for line in iter(partial(process.stdout.readline, _LINE_BYTES_MAX), b""):
            try:
                with self._output_lock:
                    self._write_output(line)
            except OSError as problem:
                if not was_refused:
                    _log.error("a job's output is lost", job=self.name, why=str(problem))
                was_refused = True
            text = line.decode(errors="replace").rstrip("\n")[:_LINE_CHARACTERS_MAX]
            with self._lock:
                self._lines.append(text)
        with self._output_lock:
            if self._output is not None:
                self._output.close()
                self._output = None

    def _write_output(self, line: bytes) -> None:
        path = self._folder / "output.log"
        if self._output is not None and self._output.tell() >= _LOG_BYTES_MAX:
            self._output.close()
            self._output = None
            path.replace(path.with_suffix(".log.1"))
        if self._output is None:
            self._output = path.open("ab")
        self._output.write(line)
        self._output.flush()

    def _wait_for_change(self, job: JobSpec, seconds: float | None) -> None:
        """Wait for some time, or until the job is given up or changed.

        If the job has ended successfully, wait without a time limit.
        """
        if seconds is None:
            self._note(state="ended", ended=job.work)
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self._stopping.is_set():
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                return
            if not self._news.wait(remaining):
                return
            self._news.clear()
            current = self._read_job()
            if current is None or not current.is_same_work(job):
                return

    def _read_job(self) -> JobSpec | None:
        """Return the desired state. Retries until the store answers or the job is given up."""
        retry = Retry("a job's state is not known", backoff=_RELEASE_BACKOFF, stop=self._stopping)
        while not self._stopping.is_set():
            try:
                return JobSpec.of(self.name, self._store.get(job_path(self.name), latest=True))
            except PenstockError as problem:
                retry.wait(problem, job=self.name)
        return None

    def _note_exit(self, job_exit: JobExit) -> None:
        exits = (*self._run_record.exits, job_exit)[-EXITS_KEPT:]
        self._note(state="waiting", process=None, exits=exits)

    def _note(self, **changes: object) -> None:
        with self._lock:
            self._run_record = replace(self._run_record, **changes)  # type: ignore[arg-type]
        try:
            self.record()
        except PenstockError as problem:
            _log.info("a job's state is not recorded", job=self.name, why=str(problem))

    def _release(self) -> None:
        retry = Retry("a job's lease cannot be given back yet", backoff=_RELEASE_BACKOFF)
        while not self._lease.expired:
            try:
                self._lease.release()
                break
            except PenstockError as problem:
                retry.wait(problem, job=self.name)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _now_us() -> int:
    return time.time_ns() // 1000
