# SPDX-License-Identifier: Apache-2.0
"""The daemon: the only file that builds everything, and the order in which it starts and ends.

    settings ─▶ ports ─▶ a capture thread for each instance ─▶ the listeners, in the main thread
                                                             └▶ a thread for what time brings

SIGTERM and SIGINT end the listener; then the captures store what they have received, make it durable and end.
"""

import fnmatch
import gc
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType

import structlog

from penstock.capture.kept_schemas import follow_schemas
from penstock.capture.run import Capture, CaptureParts
from penstock.capture.start import Places, StartAt
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.errors import LogFull, OptionInvalid, PenstockError, TransientError
from penstock.limits import CONNECTIONS_MAX
from penstock.logstore.disk import LocalDisk
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.logstore.upkeep import Upkeep
from penstock.model import ServerAddress
from penstock.serve.access import Access
from penstock.serve.listener import Listener
from penstock.serve.ports import Ports
from penstock.serve.served import Arrivals, Served
from penstock.settings import InstanceSettings, LogSettings, Settings
from penstock.source.bounds import parse_bound
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions

_log = structlog.get_logger(__name__)

_EARLIEST, _LATEST = "earliest", "latest"

# Captures that end have a buffer to write and a sync to wait for, or a server to give up: all of them within
# this time. Together with DRAIN_SECONDS_MAX that is half of what Kubernetes waits before it kills.
_JOIN_SECONDS_MAX = 10.0

# For segments, indexes and servers, beside those of connections.
_OWN_DESCRIPTORS = 4096

_UPKEEP_SECONDS = 10.0
_LAG_SECONDS = 5.0


def start_of(instance: InstanceSettings) -> StartAt:
    """Return where an empty log of an instance begins. Raises OptionInvalid."""
    if instance.start in (_EARLIEST, _LATEST):
        return StartAt(earliest=instance.start == _EARLIEST)
    bound = parse_bound(instance.start)
    return StartAt(position=bound.position, gtid_set=bound.gtid_set, time_us=bound.time_us)


def check(settings: Settings) -> None:
    """Prove what the settings' own types cannot. Raises OptionInvalid, which tells every problem."""
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
            hint="Write earliest, latest, mysql-bin.000003:1542, a GTID set or 2026-11-21T08:00:00Z",
        )


def make_capture(name: str, settings: Settings, arrived: Callable[[str], None]) -> Capture:
    """Return the capture of an instance, not started; `arrived` is told its name when more is visible."""
    instance, log = settings.instances[name], settings.log_of(name)
    parts = CaptureParts(
        open_log=lambda: _open_log(name, log),
        places_of=_places_of,
        arrived=arrived,
        schemas_of=follow_schemas,
    )
    return Capture(name, instance, log, start_of(instance), parts)


class Daemon:
    """Everything that one process captures and serves. `run` belongs to the main thread."""

    def __init__(self, settings: Settings) -> None:
        check(settings)
        self._settings = settings
        self._arrivals = Arrivals()
        self._captures = {
            name: make_capture(name, settings, self._arrivals.arrived) for name in settings.instances
        }
        # Made before anything starts: a tier whose package is missing is told now.
        self._upkeep = {
            name: Upkeep(LocalDisk(), Layout(settings.log_of(name).folder), settings.log_of(name))
            for name in settings.instances
            # A log in memory lets go by itself of what its readers have consumed.
            if settings.log_of(name).mode != "memory"
        }
        self._stopping = threading.Event()
        shard_columns = {name: one.shard_columns for name, one in settings.instances.items()}
        canal_gtid = [name for name, one in settings.instances.items() if one.canal_gtid]
        hold_seconds = {name: settings.log_of(name).retention.hold_age for name in settings.instances}
        self._ports = Ports.take(settings.listen)
        self._listener = Listener(
            settings.listen,
            Served(self._captures, self._arrivals, shard_columns, canal_gtid, hold_seconds),
            Access.of_settings(settings.listen, settings.access),
            self._ports,
            _store_opener(settings),
        )

    @property
    def address(self) -> str:
        """Where it listens for HTTP, host:port."""
        return self._listener.address

    def run(self) -> None:
        """Capture and serve until a signal or `stop`; then end in order."""
        clock = threading.Thread(target=self._keep_time, name="clock", daemon=True)
        meter = threading.Thread(target=self._measure, name="lag", daemon=True)
        _allow_descriptors()
        # What is loaded by now stays until the end: to look through all of it for garbage, again and again,
        # keeps every reader waiting.
        gc.collect()
        gc.freeze()
        with self._ending_on_signals():
            for capture in self._captures.values():
                capture.start()
            clock.start()
            meter.start()
            listen = self._settings.listen
            addresses = self._ports.addresses()
            if not listen.loopback and listen.tls is None:
                _log.warning("ports are open to the network without TLS", **addresses)
            further = {name: address for name, address in addresses.items() if name != "http"}
            _log.info(
                "serving",
                address=self.address,
                **further,
                tls=listen.tls is not None,
                instances=sorted(self._captures),
            )
            try:
                self._listener.serve_until_stopped()
            finally:
                self._end(clock)

    def stop(self) -> None:
        """End, from any thread or a signal."""
        self._listener.stop()

    def _end(self, clock: threading.Thread) -> None:
        self._stopping.set()
        for capture in self._captures.values():
            capture.stop()
        deadline = time.monotonic() + _JOIN_SECONDS_MAX
        for capture in self._captures.values():
            if not capture.join(max(0.0, deadline - time.monotonic())):
                _log.error("a capture does not end", instance=capture.name)
        clock.join(max(0.0, deadline - time.monotonic()))
        _log.info("ended")

    # --- What time brings -------------------------------------------------------------------

    def _keep_time(self) -> None:
        """Trim, compress and tier each log, a little at a time."""
        while not self._stopping.wait(_UPKEEP_SECONDS):
            for name, upkeep in self._upkeep.items():
                try:
                    upkeep.run(self._captures[name].log())
                except TransientError as problem:
                    _log.info("upkeep waits", instance=name, why=str(problem))
                except PenstockError as problem:
                    _log.error("upkeep failed", instance=name, error=type(problem).__name__, why=str(problem))

    def _measure(self) -> None:
        """Ask servers how far behind we are. It may wait long, so it has a thread of its own."""
        while not self._stopping.wait(_LAG_SECONDS):
            for capture in self._captures.values():
                try:
                    capture.measure_lag()
                except PenstockError as problem:
                    _log.debug("lag is not known", instance=capture.name, why=str(problem))

    @contextmanager
    def _ending_on_signals(self) -> Iterator[None]:
        def end(number: int, frame: FrameType | None) -> None:
            _log.info("ending", signal=signal.Signals(number).name)
            self.stop()

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, kept in before.items():
                signal.signal(number, kept)


def _allow_descriptors() -> None:
    """Let connections take descriptors without taking those of the log: the system allows more when asked."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + _OWN_DESCRIPTORS
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def _store_opener(settings: Settings) -> Callable[[], CoordinationStore] | None:
    """Return what opens the place of the cursors of Canal's clients, if there may be any.

    A file is proved now; an ensemble may be away for a while, and then capture goes on without it. Raises
    OptionInvalid, DiskFailed.
    """
    if settings.listen.canal is None:
        return None
    if settings.coordination is None:
        settings.log.folder.mkdir(parents=True, exist_ok=True)
    url = settings.coordination_url()
    if url.startswith("sqlite:"):
        open_store(url).close()
    return partial(open_store, url)


def _open_log(name: str, settings: LogSettings) -> Log:
    if settings.mode == "memory":
        return MemoryLog.open_memory(settings, instance=name)
    try:
        return Log.open(settings.folder, settings, instance=name)
    except LogFull:
        # Upkeep has no log to work on, and nothing else would ever make room.
        try:
            Upkeep(LocalDisk(), Layout(settings.folder), settings).make_room()
        except PenstockError as problem:
            _log.error("no room could be made", instance=name, error=type(problem).__name__, why=str(problem))
        raise


def _places_of(address: ServerAddress, epoch: int, server_key: str) -> Places:
    options = SourceOptions(
        address=replace(address, server_id=None), instance=str(address), epoch=epoch, server_key=server_key
    )
    return ServerSource(options)
