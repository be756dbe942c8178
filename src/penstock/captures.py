# SPDX-License-Identifier: Apache-2.0
"""Creates the captures of one process, starts and stops them, and runs their periodic maintenance."""

import fnmatch
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from penstock.capture.alerts import conditions
from penstock.capture.kept_schemas import follow_schemas
from penstock.capture.lease import CaptureLease
from penstock.capture.readings import read_capture
from penstock.capture.run import Capture, CaptureParts
from penstock.capture.status import CaptureStatus, State
from penstock.errors import (
    LogFull,
    OptionInvalid,
    PenstockError,
    ServerBusy,
    SourceMissing,
    TransientError,
)
from penstock.logstore.disk import LocalDisk
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.logstore.upkeep import Upkeep
from penstock.model import ServerAddress
from penstock.mysql.start import LogLookup, StartAt
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import InstanceSettings, LogSettings, Settings
from penstock.settings.ticdc import is_ticdc_kafka
from penstock.settings.tidb import parse_commit_ts, pd_addresses
from penstock.source.bounds import parse_bound
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from penstock.telemetry.alerts import Alert
from penstock.telemetry.readings import Readings

if TYPE_CHECKING:
    from penstock.tidb.pump import Pump

_EARLIEST, _LATEST = "earliest", "latest"

_UPKEEP_SECONDS = 10.0
_LAG_SECONDS = 5.0
# How often to check for new connections, whose servers are then asked which part of their log they still
# have.
_SURVEY_POLL_SECONDS = 1.0

_log = structlog.get_logger(__name__)


def start_of(instance: InstanceSettings) -> StartAt:
    """Return where an empty log of an instance starts. Raises OptionInvalid."""
    if instance.start in (_EARLIEST, _LATEST):
        return StartAt(earliest=instance.start == _EARLIEST)
    commit_ts = parse_commit_ts(instance.start)
    if commit_ts is not None:
        return StartAt(commit_ts=commit_ts)
    bound = parse_bound(instance.start)
    return StartAt(position=bound.position, gtid_set=bound.gtid_set, time_us=bound.time_us)


def check_instances(settings: Settings) -> None:
    """Check what the settings' types cannot express. Raises OptionInvalid, which lists every problem."""
    problems = []
    for name, instance in settings.instances.items():
        try:
            start_of(instance)
        except OptionInvalid as problem:
            problems.append(f"instances.{name}.start: {problem.message}")
        if instance.semi_sync and settings.log_of(name).mode == "memory":
            problems.append(
                f"instances.{name}.semi_sync: a log in memory forgets with the process what it acknowledged"
            )
    folders: dict[str, str] = {}
    for name, instance in settings.instances.items():
        if instance.has_role("pump"):
            folders[str(settings.pump_log_of(name).folder.absolute())] = f"the Pump of {name}"
    for name in settings.instances:
        folder = str(settings.log_of(name).folder.absolute())
        if folder in folders:
            problems.append(f"instances.{name}.log.folder: {folder} is the log of {folders[folder]}")
        folders[folder] = name
    for index, account in enumerate(settings.access):
        for text in account.instances:
            if not fnmatch.filter(settings.instances, text):
                problems.append(f"access[{index}].instances: there is no instance {text}")
    if problems:
        raise OptionInvalid(
            "\n  ".join(["the settings have problems:", *problems]),
            hint="Write earliest, latest, mysql-bin.000003:1542, a GTID set or 2026-11-21T08:00:00Z;"
            " for TiDB also commit_ts:470639217768660992",
        )


def make_capture(
    name: str,
    settings: Settings,
    arrived: Callable[[str], None],
    lease: CaptureLease | None = None,
    captures: Mapping[str, Capture] = MappingProxyType({}),
) -> Capture:
    """Create the capture of an instance without starting it. `arrived` is called with the instance's name
    when more of its log is visible.

    In a fleet, `lease` permits this daemon to capture. `captures` holds the captures of a merge's members.
    """
    instance, log = settings.instances[name], settings.log_of(name)
    parts = CaptureParts(
        open_log=lambda: open_log(name, log),
        open_lookup=_open_lookup,
        arrived=arrived,
        schemas_of=follow_schemas,
        metrics_tables=settings.metrics.tables,
        lease=lease,
    )
    if instance.merge:
        from penstock.merge.capture import MergeCapture

        members = {member: captures[member] for member in instance.merge}
        return MergeCapture(name, instance, log, start_of(instance), parts, members)
    if instance.is_tidb:
        # Imported here because only a TiDB cluster needs gRPC.
        from penstock.tidb.drainer import TidbCapture

        return TidbCapture(name, instance, log, start_of(instance), parts)
    if is_ticdc_kafka(instance.source):
        # Imported here because only topics need the Kafka client library.
        from penstock.ticdc.kafka_capture import TicdcKafkaCapture

        return TicdcKafkaCapture(name, instance, log, start_of(instance), parts)
    if instance.is_ticdc:
        from penstock.ticdc.capture import TicdcCapture

        return TicdcCapture(name, instance, log, start_of(instance), parts)
    return Capture(name, instance, log, start_of(instance), parts)


def make_pump(name: str, settings: Settings) -> "Pump":
    """Return an instance's Pump with its port bound. Raises OptionInvalid, TlsFailed, DependencyMissing."""
    # Imported here because gRPC is an optional extra, and importing it is slow.
    from penstock.tidb.channels import ClusterTls
    from penstock.tidb.pump import Pump

    instance = settings.instances[name]
    tls = instance.tidb.tls
    return Pump(
        name,
        pd_addresses(instance.source),
        instance.tidb.pump,
        settings.pump_log_of(name),
        None if tls is None else ClusterTls(tls.ca, tls.cert, tls.key),
        () if tls is None else tls.allowed_names,
    )


def read_pump(pump: "Pump", readings: Readings) -> None:
    """Add the metrics of a Pump."""
    from penstock.tidb.pump_readings import read_pump

    read_pump(pump, readings)


class RunningCapture(Protocol):
    """The capture of an instance, in this process or in a separate process."""

    def start(self) -> None:
        """Start capturing."""

    def stop(self) -> None:
        """Ask the capture to end. The capture first stores everything that it has received."""

    def join(self, seconds: float) -> bool:
        """Wait until everything is durable and the capture has ended; return whether it has ended."""

    def status(self) -> Mapping[str, Any]:
        """Return the status as plain JSON values, without waiting."""

    def log(self) -> ServedLog:
        """Return the log. Raises ServerBusy while the log is being opened, or the error that prevents
        opening.
        """


class OwnInstance:
    """An instance that this daemon captures, whose capture may be replaced; see `ServedInstance`.

    `make` returns a capture with the settings that are current when it is called. Only one thread at a time
    may call `start`, `stop`, `join` and `remove`.
    """

    def __init__(self, name: str, make: Callable[[], RunningCapture]) -> None:
        self._name = name
        self._make = make
        self._is_removed = False
        # A capture that is stopping continues to serve until it has ended.
        self.capture: RunningCapture | None = None
        # Why there is no capture, None while there is a capture.
        self.failure: PenstockError | None = None

    @property
    def name(self) -> str:
        """The name of the instance."""
        return self._name

    def start(self) -> None:
        """Start capturing. The previous capture must have ended. Raises an error for invalid settings."""
        self.failure = None
        self.make().start()

    def make(self) -> RunningCapture:
        """Return the capture that `start` uses; create it if needed. Raises an error for invalid settings."""
        self.capture = self.capture or self._make()
        return self.capture

    def stop(self) -> None:
        """Ask the capture to end."""
        capture = self.capture
        if capture is not None:
            capture.stop()

    def join(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the capture; return whether it has ended."""
        capture = self.capture
        if capture is not None and not capture.join(seconds):
            return False
        self.capture = None
        return True

    def remove(self) -> None:
        """From now on, report to readers that there is no such instance."""
        self._is_removed = True

    def status(self) -> Mapping[str, Any]:
        """Return the status of the capture. Never waits."""
        capture = self.capture
        if capture is not None:
            return capture.status()
        state = State.OPENING if self.failure is None else State.STOPPED
        why = None if self.failure is None else str(self.failure)
        return CaptureStatus.of_idle(self._name, state, why, [], []).to_json()

    def log(self) -> ServedLog:
        """Return the capture's log.

        Raises ServerBusy while no capture runs, SourceMissing once the instance is removed, and any error
        from opening the log.
        """
        capture = self.capture
        if self._is_removed:
            raise SourceMissing(f"instance {self._name} was removed", hint="See the others: penstock status")
        if capture is None and self.failure is not None:
            raise self.failure.with_traceback(None)
        if capture is None:
            raise ServerBusy(f"the capture of {self._name} is being started", hint="Ask again in a moment")
        return capture.log()


class OwnInstances:
    """The instances that a daemon without a fleet captures.

    `make` returns the capture of an instance without starting it. Only one thread at a time may call the
    methods that change instances.
    """

    def __init__(self, names: Collection[str], make: Callable[[str], RunningCapture]) -> None:
        self._make = make
        self.by_name = {name: self._new(name) for name in names}

    def make(self, names: Iterable[str]) -> None:
        """Make the captures of some instances before they start. Raises an error for invalid settings."""
        for name in names:
            self.by_name[name].make()

    def captures(self) -> list[Capture]:
        """Return the captures of this process."""
        captures = [instance.capture for instance in self.by_name.values()]
        return [capture for capture in captures if isinstance(capture, Capture)]

    def members(self, names: Iterable[str]) -> dict[str, Capture]:
        """Return the captures of the members of a merge, which may not have started yet."""
        captures = {name: self.by_name[name].make() for name in names}
        return {name: capture for name, capture in captures.items() if isinstance(capture, Capture)}

    def start(self) -> None:
        """Start all captures."""
        for instance in self.by_name.values():
            instance.start()

    def stop(self) -> None:
        """Ask all captures to end."""
        for instance in self.by_name.values():
            instance.stop()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the end of all captures."""
        deadline = time.monotonic() + seconds
        for instance in self.by_name.values():
            if not instance.join(max(0.0, deadline - time.monotonic())):
                _log.error("a capture does not end", instance=instance.name)

    def change(self, change: InstanceChange) -> list[OwnInstance]:
        """Change the set of instances; return those whose captures have to end before `go_on`.

        If an instance gets another log, its readers are asked to reconnect, as for a new instance.
        """
        before = self.by_name
        ending = [before[name] for name in (*change.removed, *change.changed)]
        after = {name: instance for name, instance in before.items() if name not in change.removed}
        after |= {name: self._new(name) for name in (*change.added, *change.with_other_log)}
        self.by_name = after
        for name in change.removed:
            before[name].remove()
        for instance in ending:
            instance.stop()
        return ending

    def go_on(self, change: InstanceChange) -> None:
        """Start the captures of changed and added instances."""
        for name in (*change.changed, *change.added):
            try:
                self.by_name[name].start()
            except (PenstockError, RuntimeError) as problem:
                # Unchanged captures continue. A RuntimeError means that no thread could be started.
                _log.error("a capture is not started", instance=name, why=str(problem))
                self.by_name[name].failure = (
                    problem
                    if isinstance(problem, PenstockError)
                    else ServerBusy(f"the capture of {name} cannot be started: {problem}")
                )

    def _new(self, name: str) -> OwnInstance:
        return OwnInstance(name, partial(self._make, name))


class Maintenance:
    """Maintains the logs of captures, measures the captured servers, and reports on both.

    `captures` returns the running captures of the instances `names`. `further_works` contains named functions
    that run alongside the upkeep of the logs. `copies` returns additional logs by instance. Raises
    DependencyMissing if a tier's package is not installed.
    """

    def __init__(
        self,
        settings: Settings,
        names: Sequence[str],
        captures: Callable[[], list[Capture]],
        further_works: Sequence[tuple[str, Callable[[], None]]] = (),
        copies: Callable[[], Mapping[str, Log]] = dict,
    ) -> None:
        self._settings = settings
        self._captures = captures
        self._further_works = tuple(further_works)
        self._copies = copies
        self._upkeep: dict[str, Upkeep] = {}
        self.change(settings, names)
        self._stopping = threading.Event()
        self._clock = threading.Thread(target=self._run_upkeep, name="clock", daemon=True)
        self._meter = threading.Thread(target=self._measure, name="lag", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._clock.start()
        self._meter.start()

    def change(self, settings: Settings, names: Collection[str], replaced: Collection[str] = ()) -> None:
        """Maintain the logs of these instances from now on. The settings of the instances in `replaced` have
        changed.
        """
        kept = {name: upkeep for name, upkeep in self._upkeep.items() if name not in replaced}
        self._upkeep = {
            name: kept.get(name)
            or Upkeep(LocalDisk(), Layout(settings.log_of(name).folder), settings.log_of(name))
            for name in names
            # Leave out logs in memory, which remove consumed data themselves.
            if settings.log_of(name).mode != "memory"
        }

    def stop(self) -> None:
        """Ask the threads to end."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the upkeep, which changes files, to end."""
        self._clock.join(seconds)

    def read(self, readings: Readings) -> None:
        """Add the metrics of the captures."""
        for capture in self._captures():
            read_capture(readings, capture, by_table=self._settings.metrics.tables > 0)
            upkeep = self._upkeep.get(capture.name)
            if upkeep is not None:
                readings.add_counter(
                    "penstock_log_tier_uploads_total",
                    upkeep.uploads,
                    penstock_instance=capture.name,
                )

    def alerts(self) -> list[Alert]:
        """Return the conditions of the captures that an operator should know about."""
        settings = self._settings.alerts
        if settings is None:
            return []
        return [alert for capture in self._captures() for alert in conditions(capture, settings)]

    def _run_upkeep(self) -> None:
        """Trim, compress and tier each log, in small steps."""
        while not self._stopping.wait(_UPKEEP_SECONDS):
            upkeep = self._upkeep
            works: list[tuple[str, Callable[[], None]]] = [
                (capture.name, partial(self._maintain, capture, upkeep[capture.name]))
                for capture in self._captures()
                if capture.name in upkeep
            ]
            works += [
                (name, partial(upkeep[name].run, log))
                for name, log in self._copies().items()
                if name in upkeep
            ]
            for name, work in [*works, *self._further_works]:
                try:
                    work()
                except TransientError as problem:
                    _log.info("upkeep waits", instance=name, why=str(problem))
                except PenstockError as problem:
                    _log.error("upkeep failed", instance=name, error=type(problem).__name__, why=str(problem))

    def _maintain(self, capture: Capture, upkeep: Upkeep) -> None:
        upkeep.run(capture.log())

    def _measure(self) -> None:
        """Measure the lag and the extent of the servers' logs, in a separate thread because measuring may
        block.
        """
        measured_at = time.monotonic()
        while not self._stopping.wait(_SURVEY_POLL_SECONDS):
            is_lag_due = time.monotonic() - measured_at >= _LAG_SECONDS
            measured_at = time.monotonic() if is_lag_due else measured_at
            for capture in self._captures():
                try:
                    capture.survey_server()
                    if is_lag_due:
                        capture.measure_lag()
                except PenstockError as problem:
                    _log.debug("lag is not known", instance=capture.name, why=str(problem))


def open_log(name: str, settings: LogSettings) -> Log:
    """Open the log of an instance for writing. Raises LogFull, DiskFailed, LogDamaged."""
    if settings.mode == "memory":
        return MemoryLog.open_memory(settings, instance=name)
    try:
        return Log.open(settings.folder, settings, instance=name)
    except LogFull:
        # Without an open log, upkeep would not run, and nothing else would free space on a full disk.
        try:
            Upkeep(LocalDisk(), Layout(settings.folder), settings).make_room()
        except PenstockError as problem:
            _log.error("no room could be made", instance=name, error=type(problem).__name__, why=str(problem))
        raise


def _open_lookup(address: ServerAddress, epoch: int, server_key: str) -> LogLookup:
    options = SourceOptions(
        address=replace(address, server_id=None), instance=str(address), epoch=epoch, server_key=server_key
    )
    return ServerSource(options)
