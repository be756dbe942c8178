# SPDX-License-Identifier: Apache-2.0
"""Captures one instance, in a thread of its own, from opening the log until the daemon ends.

    open the log ─▶ choose a server ─▶ find where to resume ─▶ receive ─▶ (lost) back off ─▶ choose ...

Failures that can heal by themselves, or by repairing the server, are retried forever; the status shows the
state and the last error. Other failures stop only this instance, and the status names the error.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from penstock._native import BlockCutter, CutCounts
from penstock.capture.attempts import Attempts
from penstock.capture.lease import CaptureLease, Handover
from penstock.capture.receive import Progress, Receiver, Schemas
from penstock.capture.resume import OpenLookup, Resumption
from penstock.capture.server_log import ServerLog, bytes_after, read_server_log
from penstock.capture.status import CaptureCounts, CaptureStatus, Failure, State, lag_seconds
from penstock.errors import (
    ConnectionLost,
    DiskFailed,
    DumpReplaced,
    LogFull,
    PenstockError,
    PositionInvalid,
    ServerBehind,
    ServerBusy,
)
from penstock.limits import CAPTURE_CHUNK_BYTES, SILENCE_SECONDS_MAX, TRANSACTION_HELD_BYTES_MAX
from penstock.logstore.ending import end_log
from penstock.logstore.log import Log
from penstock.logstore.prepared import old_prepared
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import ANSWER_SECONDS_MAX, Connection, ServerIdentity, connect
from penstock.mysql.replica import DumpStart, ReplicaName, ReplicaStream, open_stream
from penstock.mysql.start import Beginning, StartAt
from penstock.settings.daemon import InstanceSettings, LogSettings

_log = structlog.get_logger(__name__)

# A log in memory holds at least this many chunks.
_MEMORY_CHUNKS_MIN = 32
# A login over TLS to a busy server takes this long, so `fail_over_after` must not shorten the timeout
# further.
_ANSWER_SECONDS_MIN = 2.0

_SURVEY_SECONDS = 60.0

OpenLog = Callable[[], Log]


@dataclass(frozen=True)
class CaptureParts:
    """The daemon's callbacks for a capture: opening its log, looking up positions, notifying readers.

    `schemas_of` returns the schemas that are updated by the statements of an opened log, or None for no
    schemas. Its arguments are the log, a session with the server and the position where capture resumes.
    `arrived` is called with the instance's name after new data became visible. Changes of the first
    `metrics_tables` tables are counted by table. If hosts share the instance, `lease` permits this host to
    capture.
    """

    open_log: OpenLog
    open_lookup: OpenLookup
    arrived: Callable[[str], None]
    schemas_of: Callable[[Log, Connection, Position], Schemas | None] = lambda log, connection, position: None
    metrics_tables: int = 0
    lease: CaptureLease | None = None


class Capture:
    """Captures the servers of one instance into its log. `start`, `stop` and `join` belong to one thread."""

    def __init__(
        self, name: str, settings: InstanceSettings, log: LogSettings, start: StartAt, parts: CaptureParts
    ) -> None:
        self._name = name
        self._settings = settings
        self._log_settings = log
        self._start_at = start
        self._parts = parts
        self._addresses = settings.addresses()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"capture-{name}", daemon=True)
        self._log: Log | None = None
        self._stream: ReplicaStream | None = None
        self._progress = Progress(counts=CutCounts(parts.metrics_tables, TRANSACTION_HELD_BYTES_MAX))
        # The values of the status. Only the capturing thread assigns them.
        self._state = State.OPENING
        self._why: str | None = None
        self._failure: Failure | None = None
        self._refusal: PenstockError | None = None
        self._missing_gtids: str | None = None
        self._server: tuple[ServerAddress, ServerIdentity] | None = None
        self._session_start: Position | None = None
        self._note: str | None = None
        self._connects = 0
        self._lag_bytes: int | None = None
        self.counts = CaptureCounts()
        # When the capture last left the running state, in monotonic seconds.
        self.last_running = time.monotonic()
        # The extent of the server's log, from the latest survey.
        self.server_log: ServerLog | None = None
        # The connection for which the latest survey was made, and when the next survey is due.
        self._surveyed = (0, 0.0)
        self._attempts = Attempts(len(self._addresses), settings.fail_over_after)
        # After `fail_over_after` another server is tried, so there is no point in waiting longer for a
        # response.
        patience = settings.fail_over_after if len(self._addresses) > 1 else ANSWER_SECONDS_MAX
        self._answer_seconds = min(ANSWER_SECONDS_MAX, max(patience, _ANSWER_SECONDS_MIN))
        self._reached: Position | None = None
        self._replica = ReplicaName.choose(settings.server_id)

    # --- Outside ----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The instance's name."""
        return self._name

    def start(self) -> None:
        """Start capturing in a separate thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end. The thread first stores everything that it has received."""
        self._stopping.set()
        stream = self._stream
        if stream is not None:
            stream.interrupt()

    def join(self, seconds: float) -> bool:
        """Wait until the thread has made everything durable and ended; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def log(self) -> Log:
        """Return the log. Raises ServerBusy while the log is being opened, or the error if opening failed."""
        log = self._log
        if log is None:
            if self._refusal is not None:
                # All callers share one error object, and each raise would extend its traceback.
                raise self._refusal.with_traceback(None)
            raise ServerBusy(f"the log of {self._name} is being opened", hint="Ask again in a moment")
        return log

    @property
    def server(self) -> tuple[ServerAddress, ServerIdentity] | None:
        """The server of the current or most recent connection, None before the first connection."""
        return self._server

    @property
    def session_start(self) -> Position | None:
        """Where the session began in the server's log. The log may still contain no data from the session's
        epoch.
        """
        return self._session_start

    @property
    def progress(self) -> Progress:
        """What has been received."""
        return self._progress

    def status(self) -> dict[str, Any]:
        """Return the state of the capture as plain JSON values. Never waits."""
        return self.snapshot().to_json()

    def snapshot(self) -> CaptureStatus:
        """Return the state of the capture. Never waits."""
        log, progress, server, clock = self._log, self._progress, self._server, time.monotonic()
        caught_up = progress.caught_up and self._state is State.RUNNING
        stored = log.status() if log is not None else None
        return CaptureStatus(
            instance=self._name,
            state=self._state,
            why=self._why,
            server=str(server[0]) if server else None,
            server_version=server[1].version_text if server else None,
            epoch=stored.epoch if stored else None,
            position=_text(log.visible) if log else None,
            durable=_text(log.durable) if log else None,
            earliest=_text(log.earliest()) if log else None,
            gtid_set=progress.gtid_set,
            time_us=progress.time_us or None,
            lag_seconds=lag_seconds(time.time(), progress.heard_at, progress.time_us, caught_up),
            lag_bytes=0 if caught_up else self._lag_bytes,
            bytes_per_second=progress.bytes_rate.per_second(clock),
            transactions_per_second=progress.transactions_rate.per_second(clock),
            rows_per_second=progress.changes_rate.per_second(clock),
            log_bytes=stored.bytes if stored else 0,
            segments=stored.segments if stored else 0,
            semi_sync=bool(self._stream and self._stream.semi_sync),
            connects=self._connects,
            note=self._note,
            error=self._failure,
            missing_gtids=self._missing_gtids,
            tables_in_doubt=log.settler.listed() if log is not None and log.settler is not None else [],
            tables=list(self._settings.tables),
            exclude_tables=list(self._settings.exclude_tables),
            prepared=old_prepared(log) if log is not None else [],
        )

    def measure_lag(self) -> None:
        """Query the server for the number of bytes still to be received. Raises an error if the session
        fails.
        """
        log, server = self._log, self._server
        # A paused capture receives nothing, so its status may still claim that it is caught up.
        caught_up = self._progress.caught_up and self._state is State.RUNNING
        if caught_up or log is None or server is None or self._state is State.STOPPED:
            return
        position = log.visible
        with connect(server[0]) as connection:
            epoch = log.epoch
            if position is None or epoch is None or epoch.server_key != connection.identity().key:
                # Nothing has arrived from the current server yet.
                return
            self._lag_bytes = bytes_after(connection.binary_logs(), position)

    def survey_server(self) -> None:
        """Query the server for the extent of its log, after each connect and then once a minute.

        Raises an error if the session fails.
        """
        log, server, now = self._log, self._server, time.monotonic()
        survey = self._connects, now + _SURVEY_SECONDS
        if log is None or server is None or (survey[0] == self._surveyed[0] and now < self._surveyed[1]):
            return
        self._surveyed = survey
        with connect(server[0]) as connection:
            epoch, position = log.epoch, log.visible
            is_followed = epoch is not None and epoch.server_key == connection.identity().key
            self.server_log = read_server_log(
                connection, server[0], position if is_followed else None, self.server_log
            )

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """Capture until stopped, or until a failure that only an operator can repair."""
        ended = State.STOPPED
        try:
            while not self._stopping.is_set():
                try:
                    self._attempt()
                except PenstockError as problem:
                    if self._stopping.is_set():
                        break
                    if self._is_final(problem):
                        self._keep_serving()
                        return
                    self._pause(problem)
            ended = State.CLOSED
        except Exception as defect:
            # The exception ends the thread, which prints the traceback. Other instances continue.
            failure = PenstockError(
                f"a defect ended the capture of {self._name}: {defect!r}",
                hint="The daemon's standard error has the traceback; start the daemon again",
            )
            self._record_error(failure)
            self._stop_with(failure)
            raise
        finally:
            try:
                self._close_log()
            finally:
                self._set_state(ended, self._why if ended is State.STOPPED else None)

    def _keep_serving(self) -> None:
        """Keep serving the captured log until the daemon ends."""
        self._set_state(State.STOPPED, self._why)
        if self._log is not None:
            try:
                self._log.sync()
            except PenstockError as problem:
                _log.error("a log could not be made durable", instance=self._name, why=str(problem))
        self._stopping.wait()

    def _attempt(self) -> None:
        """Open the log if necessary, connect, and receive until something fails."""
        log = self._opened_log()
        if self._attempts.chosen is None:
            self._attempts.chosen = self._index_of_last_server()
        address = self._addresses[self._attempts.chosen]
        self._set_state(State.CONNECTING, f"asking {address}")
        with connect(address, self._answer_seconds) as connection:
            identity = connection.identity()
            beginning = self._beginning(address, connection, identity)
            schemas = self._parts.schemas_of(log, connection, beginning.position)
        try:
            self._receive(address, identity, beginning, schemas)
        finally:
            if schemas is not None:
                schemas.close()

    def _opened_log(self) -> Log:
        """Return the log; if necessary, open it and notify readers."""
        if self._log is None:
            self._set_state(State.OPENING)
            log = self._parts.open_log()
            try:
                if self._parts.lease is not None:
                    self._parts.lease.log_opened(log)
            except BaseException:
                log.abandon()
                raise
            self._log = log
            self._parts.arrived(self._name)
        return self._log

    def _receive(
        self, address: ServerAddress, identity: ServerIdentity, beginning: Beginning, schemas: Schemas | None
    ) -> None:
        log = self._log
        assert log is not None, "the log was opened before"
        position = beginning.position
        semi_sync = self._settings.semi_sync
        if semi_sync:
            # The server treats the start of a dump as acknowledged and releases the commits before it.
            log.sync()
        stream = open_stream(address, DumpStart(position), name=self._replica, semi_sync=semi_sync)
        with stream:
            if stream.identity.key != identity.key:
                raise ConnectionLost(f"{address} became another server between two connections")
            if stream.start.position != position:
                raise PositionInvalid(
                    f"{address} cannot send its log from an offset past 4 GiB without GTIDs",
                    position=str(position),
                    hint="Set max_binlog_size to 1 GiB, or gtid_mode to ON",
                )
            previous = self._server
            self._session_start = position
            self._server, self._stream = (address, identity), stream
            self._connects += 1
            if previous is not None and previous[0] != address:
                self.counts.failovers += 1
            self._note = beginning.note or self._note
            note_field = {"note": beginning.note} if beginning.note else {}
            _log.info("capturing", instance=self._name, server=str(address), at=str(position), **note_field)
            self._missing_gtids = None
            self._set_state(State.RUNNING)
            cutter = self._cutter(log, beginning, identity, stream, statements=schemas is not None)
            receiver = Receiver(
                log,
                self._progress,
                self._stopping,
                epoch=position.epoch,
                server_id=identity.server_id,
                flavor=identity.flavor,
                chunk_bytes=self._chunk_bytes(),
                schemas=schemas,
                hold=self._hold,
                arrived=self._handle_arrival,
                begin_epoch=None
                if log.epoch is not None and log.epoch.epoch == position.epoch
                else partial(self._begin_epoch, log, address, identity, beginning),
                pause_reason=self._pause_reason,
            )
            opened_at = time.monotonic()
            try:
                receiver.receive(stream, cutter)
            except PenstockError as problem:
                self.counts.disconnects.add(type(problem).__name__)
                raise
            finally:
                self._stream = None
                self._progress.caught_up = False
                if time.monotonic() - opened_at > SILENCE_SECONDS_MAX:
                    # An idle server sends only heartbeats, which counts as progress.
                    self._attempts.progressed()

    # --- Where to resume ------------------------------------------------------------------------

    def _beginning(
        self, address: ServerAddress, connection: Connection, identity: ServerIdentity
    ) -> Beginning:
        """Return where to receive from, in a new epoch if the log is empty or comes from another server.

        An epoch is recorded together with its first byte, so no epoch is created if the server refuses the
        dump.
        """
        log = self._log
        assert log is not None, "the log was opened before"
        beginning = Resumption(
            log,
            connection,
            self._parts.open_lookup,
            instance=self._name,
            start_at=self._start_at,
            accept_loss=not self._settings.fail_on_data_loss,
            handover=self._handover(),
        ).find()
        if log.epoch is None:
            # Record the start of a new log immediately. Otherwise, a capture that is restarted would choose a
            # later start.
            self._begin_epoch(log, address, identity, beginning)
        return beginning

    def _begin_epoch(
        self, log: Log, address: ServerAddress, identity: ServerIdentity, beginning: Beginning
    ) -> None:
        """Record that the log continues with another server, or at another position of the same server."""
        position = beginning.position
        lease = self._parts.lease
        if lease is not None:
            # Without this agreement, another host could use the number for another server. So the log records
            # an epoch only after all hosts agree.
            lease.begin_epoch(
                Handover(position, identity.key, beginning.gtid_set, log.time_max_us, "", reached=position)
            )
        log.begin_epoch(
            epoch=position.epoch,
            server_key=identity.key,
            server_id=identity.server_id,
            flavor=identity.flavor,
            version=identity.version_text,
            file=position.file,
            offset=position.offset,
            gtid_set=beginning.gtid_set,
        )
        _log.info(
            "an epoch begins",
            instance=self._name,
            server=str(address),
            key=identity.key,
            at=str(position),
            note=beginning.note,
        )

    def _handover(self) -> Handover | None:
        """Return the last host's capture position, None if the instance is not shared."""
        lease = self._parts.lease
        return None if lease is None else lease.handover()

    def _pause_reason(self) -> str | None:
        lease = self._parts.lease
        return None if lease is None else lease.pause_reason()

    def _chunk_bytes(self) -> int:
        """Return the size of the chunks appended to the log. A small log in memory needs small chunks."""
        log = self._log_settings
        if log.mode != "memory":
            return CAPTURE_CHUNK_BYTES
        return min(CAPTURE_CHUNK_BYTES, log.memory_bytes // _MEMORY_CHUNKS_MIN)

    def _cutter(
        self,
        log: Log,
        beginning: Beginning,
        identity: ServerIdentity,
        stream: ReplicaStream,
        *,
        statements: bool,
    ) -> BlockCutter:
        return BlockCutter(
            epoch=beginning.position.epoch,
            file=beginning.position.file,
            offset=beginning.position.offset,
            gtid_set=beginning.gtid_set,
            flavor=identity.flavor,
            block_bytes=self._log_settings.block_bytes,
            time_max_us=log.time_max_us,
            live=True,
            semi_sync=stream.semi_sync,
            counts=self._progress.counts,
            # Without schemas, nothing consumes the statements, so they would pile up for the whole session.
            statements=statements,
        )

    # --- Servers and retries --------------------------------------------------------------------

    def _index_of_last_server(self) -> int:
        """Return the index of the server that was captured last, by this host or another, 0 if there is none.

        A restart therefore does not fail over.
        """
        assert self._log is not None, "the log was opened before"
        last_epoch, handover = self._log.epoch, self._handover()
        last_key = None if last_epoch is None else last_epoch.server_key
        if handover is not None and (last_epoch is None or last_epoch.epoch < handover.position.epoch):
            last_key = handover.server_key
        if last_key is None or len(self._addresses) == 1:
            return 0
        for index, address in enumerate(self._addresses):
            if self._stopping.is_set():
                break
            try:
                with connect(address, self._answer_seconds) as connection:
                    if connection.identity().key == last_key:
                        return index
            except PenstockError as problem:
                _log.warning("no answer", instance=self._name, server=str(address), why=str(problem))
        return 0

    def _is_final(self, problem: PenstockError) -> bool:
        """Record a failure; return whether there is nothing left to try."""
        self._record_error(problem)
        if isinstance(problem, DiskFailed):
            # After a failed sync, the contents of the disk are unknown until the file is read again, so leave
            # the files unchanged.
            self._close_log(finish=False)
        if isinstance(problem, ServerBehind):
            self._missing_gtids = problem.missing
        if isinstance(problem, DumpReplaced) and self._settings.server_id is None:
            self._replica = ReplicaName.choose(None)
        stops = self._attempts.failed(problem)
        return stops is not None and self._stop_with(stops)

    def _pause(self, problem: PenstockError) -> None:
        """Wait before the next attempt, and show the reason in the status."""
        seconds = self._attempts.pause_seconds()
        states = {LogFull: State.HELD, ServerBehind: State.BEHIND}
        state = states.get(type(problem), State.WAITING)
        self._set_state(state, f"{problem.message}; next try in {seconds:.1f} s")
        self._stopping.wait(seconds)

    def _stop_with(self, problem: PenstockError) -> bool:
        self._refusal = problem
        self._why = problem.message
        _log.error("an instance stops", instance=self._name, error=type(problem).__name__, why=str(problem))
        return True

    def _handle_arrival(self) -> None:
        """Handle newly arrived data. A previous failure is over once complete transactions have arrived."""
        log = self._log
        if log is not None and log.visible != self._reached:
            self._reached = log.visible
            self._missing_gtids = None
            self._attempts.progressed()
        self._parts.arrived(self._name)

    # --- Status ---------------------------------------------------------------------------------

    def _hold(self, why: str | None) -> None:
        if why is None:
            self._set_state(State.RUNNING)
        elif self._state is not State.HELD:
            _log.warning("held", instance=self._name, why=why)
            # The server continues to write, so query how much is still to be received.
            self._progress.caught_up = False
            self._set_state(State.HELD, why)

    def _set_state(self, state: State, why: str | None = None) -> None:
        failure = self._failure
        if state is State.RUNNING and failure is not None and failure.cleared_us is None:
            self._failure = replace(failure, cleared_us=time.time_ns() // 1000)
        if self._state is State.RUNNING:
            self.last_running = time.monotonic()
        self._why = why
        self._state = state

    def _record_error(self, problem: PenstockError) -> None:
        self.counts.errors.add(type(problem).__name__)
        self._failure = Failure(
            type(problem).__name__, problem.message, problem.position, problem.hint, time.time_ns() // 1000
        )
        _log.warning("capture failed", instance=self._name, error=type(problem).__name__, why=str(problem))

    def _close_log(self, *, finish: bool = True) -> None:
        """Release the log in any case. Without `finish`, the files stay unchanged for recovery when the log
        is next opened.
        """
        log, self._log = self._log, None
        if log is not None:
            end_log(log, self._name, finish=finish)


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)
