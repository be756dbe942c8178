# SPDX-License-Identifier: Apache-2.0
"""The captures of one process: how each is built, and what is done for them while they run."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import structlog

from penstock.capture.alerts import conditions
from penstock.capture.kept_schemas import follow_schemas
from penstock.capture.lease import CaptureLease
from penstock.capture.readings import read_capture
from penstock.capture.run import Capture, CaptureParts
from penstock.errors import LogFull, PenstockError, TransientError
from penstock.logstore.disk import LocalDisk
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.logstore.upkeep import Upkeep
from penstock.model import ServerAddress
from penstock.mysql.start import LogLookup, StartAt
from penstock.settings.daemon import InstanceSettings, LogSettings, Settings
from penstock.settings.ticdc import is_ticdc_kafka
from penstock.settings.tidb import parse_commit_ts
from penstock.source.bounds import parse_bound
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from penstock.telemetry.alerts import Alert
from penstock.telemetry.readings import Readings

_EARLIEST, _LATEST = "earliest", "latest"

_UPKEEP_SECONDS = 10.0
_LAG_SECONDS = 5.0
# How soon the server of a new connection is asked what it keeps.
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


def make_captures(
    names: Iterable[str],
    settings: Settings,
    arrived: Callable[[str], None],
    lease: CaptureLease | None = None,
) -> dict[str, Capture]:
    """Return the captures of instances by name, as `make_capture` does. Those of a merge find each other."""
    captures: dict[str, Capture] = {}
    # A merge needs the captures of its members.
    for name in sorted(names, key=lambda name: bool(settings.instances[name].merge)):
        captures[name] = make_capture(name, settings, arrived, lease, captures)
    return captures


def make_capture(
    name: str,
    settings: Settings,
    arrived: Callable[[str], None],
    lease: CaptureLease | None = None,
    captures: Mapping[str, Capture] = MappingProxyType({}),
) -> Capture:
    """Return the capture of an instance, not started; `arrived` is called with its name when more is visible.

    In a fleet, `lease` permits this daemon to capture. `captures` has those of the members of a merge.
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
        # Only a TiDB cluster needs gRPC.
        from penstock.tidb.drainer import TidbCapture

        return TidbCapture(name, instance, log, start_of(instance), parts)
    if is_ticdc_kafka(instance.source):
        # Only topics need the client library of Kafka.
        from penstock.ticdc.kafka_capture import TicdcKafkaCapture

        return TicdcKafkaCapture(name, instance, log, start_of(instance), parts)
    if instance.is_ticdc:
        from penstock.ticdc.capture import TicdcCapture

        return TicdcCapture(name, instance, log, start_of(instance), parts)
    return Capture(name, instance, log, start_of(instance), parts)


class Maintenance:
    """Maintains the logs of captures, measures their servers and reports on both.

    `captures` returns those that run now, among the instances `names`. `further_works` are done with the
    upkeep of the logs, by name, and `copies` returns further logs by instance. Raises DependencyMissing for a
    tier with a missing package.
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
        self._upkeep = {
            name: Upkeep(LocalDisk(), Layout(settings.log_of(name).folder), settings.log_of(name))
            for name in names
            # A log in memory removes consumed data itself.
            if settings.log_of(name).mode != "memory"
        }
        self._stopping = threading.Event()
        self._clock = threading.Thread(target=self._run_upkeep, name="clock", daemon=True)
        self._meter = threading.Thread(target=self._measure, name="lag", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._clock.start()
        self._meter.start()

    def stop(self) -> None:
        """Ask the threads to end."""
        self._stopping.set()

    def join(self, seconds: float) -> None:
        """Wait up to `seconds` for the end of the upkeep, which changes files."""
        self._clock.join(seconds)

    def read(self, readings: Readings) -> None:
        """Add the metrics of the captures."""
        for capture in self._captures():
            read_capture(readings, capture, by_table=self._settings.metrics.tables > 0)
            if capture.name in self._upkeep:
                readings.add_counter(
                    "penstock_log_tier_uploads_total",
                    self._upkeep[capture.name].uploads,
                    penstock_instance=capture.name,
                )

    def alerts(self) -> list[Alert]:
        """Return the conditions of the captures that an operator should know of."""
        settings = self._settings.alerts
        if settings is None:
            return []
        return [alert for capture in self._captures() for alert in conditions(capture, settings)]

    def _run_upkeep(self) -> None:
        """Trim, compress and tier each log, in small steps."""
        while not self._stopping.wait(_UPKEEP_SECONDS):
            captures = [capture for capture in self._captures() if capture.name in self._upkeep]
            works: list[tuple[str, Callable[[], None]]] = [
                (capture.name, partial(self._maintain, capture)) for capture in captures
            ]
            works += [(name, partial(self._upkeep[name].run, log)) for name, log in self._copies().items()]
            for name, work in [*works, *self._further_works]:
                try:
                    work()
                except TransientError as problem:
                    _log.info("upkeep waits", instance=name, why=str(problem))
                except PenstockError as problem:
                    _log.error("upkeep failed", instance=name, error=type(problem).__name__, why=str(problem))

    def _maintain(self, capture: Capture) -> None:
        self._upkeep[capture.name].run(capture.log())

    def _measure(self) -> None:
        """Measure the lag and what the servers keep, in a separate thread because it may block."""
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
        # Without an open log, upkeep would not run, and nothing else would free space.
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
