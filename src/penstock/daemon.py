# SPDX-License-Identifier: Apache-2.0
"""The daemon: the only module that wires everything together, and the order of startup and shutdown.

    settings ─▶ ports ─▶ a capture thread for each instance, or processes ─▶ the listeners, in the main thread
                                                             └▶ a thread for periodic maintenance

SIGTERM and SIGINT stop the listener. Then the captures store what they have received, make it durable and
end. SIGHUP makes the daemon read the settings again, which adds, changes and removes instances.
"""

import gc
import resource
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from functools import partial
from typing import Any

import structlog

import penstock
from penstock.capture.run import Capture
from penstock.captures import (
    Maintenance,
    OwnInstances,
    RunningCapture,
    check_instances,
    make_capture,
    make_pump,
    open_log,
    read_pump,
)
from penstock.check.servers import check_servers
from penstock.coordinate.lease import Lease
from penstock.coordinate.session_guard import SessionGuard
from penstock.coordinate.store import CoordinationStore, open_store, without_password
from penstock.desired import DesiredSettings, SettingsState, SettingsThread, StoredInstances
from penstock.errors import OptionInvalid, SourceMissing
from penstock.fleet.control import FleetControl
from penstock.fleet.copy_tenure import CopyTenure
from penstock.fleet.copying import LogCopy
from penstock.fleet.group import DAEMONS
from penstock.fleet.instance import Directory, FleetInstance
from penstock.fleet.member import FleetMember, Membership
from penstock.fleet.placement import Work
from penstock.fleet.records import capturer_of
from penstock.fleet.status import fleet_status
from penstock.fleet.tenure import CaptureTenure, TenuredCapture
from penstock.limits import CONNECTIONS_MAX
from penstock.listeners import (
    as_served,
    canal_cluster,
    configure_served,
    coordination_probe,
    make_served,
    store_opener,
)
from penstock.logstore.disk import LocalDisk
from penstock.logstore.ending import put_aside
from penstock.logstore.log import Log
from penstock.model import Position, Secret, TablePatterns, Tls
from penstock.pipeline.watch import PipelineWatch
from penstock.processes.leased import LeasedCapture
from penstock.processes.listeners import ListenerProcesses
from penstock.processes.supervisor import Supervisor
from penstock.serve.access import Access
from penstock.serve.certificate import read_certificate
from penstock.serve.durable import DurableInstance
from penstock.serve.http import fleet_control as fleet_control_routes
from penstock.serve.http import instances as instance_routes
from penstock.serve.http import pumps as pump_routes
from penstock.serve.http import resume as resume_routes
from penstock.serve.http import server_check as check_routes
from penstock.serve.http import settings as settings_routes
from penstock.serve.listener import Listener
from penstock.serve.ports import Ports
from penstock.serve.served import Arrivals, Served, ServedInstance
from penstock.serve.telemetry import Alerting, Telemetry
from penstock.serve.usage import SharedUsages
from penstock.settings.changes import InstanceChange
from penstock.settings.daemon import Settings, split_host_port
from penstock.settings.shown import shown_settings
from penstock.source.daemon_address import DaemonAddress
from penstock.telemetry.alerts import Alert
from penstock.telemetry.channel import Channel
from penstock.telemetry.readings import Readings

__all__ = ["Daemon", "check_instances", "make_capture"]

_log = structlog.get_logger(__name__)

# How long to wait for all captures to end. Each capture may have to write a buffer and wait for a sync, or
# its server may not respond. After a signal, the command line waits for this time plus DRAIN_SECONDS_MAX.
_JOIN_SECONDS_MAX = 10.0
# Capture processes end by themselves within the time for all captures, and are killed soon after it.
_PROCESS_JOIN_SECONDS_MAX = 15.0

# File descriptors for segments, indexes and servers, in addition to connections.
_OWN_DESCRIPTORS = 4096

_FLEET_STATUS_SECONDS = 1.0


class Daemon:
    """Everything that one process captures and serves. The main thread calls `run`."""

    _listener_processes: ListenerProcesses | None = None

    def __init__(self, settings: Settings, desired: DesiredSettings) -> None:
        """`settings` are the first desired settings."""
        check_instances(settings)
        self._settings, self._desired = settings, desired
        self._changing, self._stopping = threading.Lock(), threading.Event()
        self._settings_thread = SettingsThread(desired, self.change)
        self._arrivals, self._pipelines = Arrivals(), PipelineWatch(*settings.pipelines_to_watch())
        self._ports = Ports.take(settings.listen)
        captured = [name for name, instance in settings.instances.items() if instance.is_captured]
        groups = settings.process_groups() if isinstance(settings.processes, int) else []
        self._guard = SessionGuard()
        self._supervisor = Supervisor(settings, groups, self._arrived, inherited=self._guard.descriptors)
        parts = (settings, self._ports, self._arrivals, self._supervisor, self._arrived, self._guard)
        self._fleet = None if settings.fleet is None else _Fleet(*parts)
        self._groups = dict(self._supervisor.instances)
        own = [name for name in captured if self._fleet is None and name not in self._groups]
        # Put the merges last, because a merge waits until its members have started.
        own.sort(key=lambda name: bool(settings.instances[name].merge))
        self._own = OwnInstances(own, self._make_capture)
        # Created before anything starts, so that a problem is reported immediately.
        self._own.make([name for name in own if not settings.has_process(name)])
        pumps = [name for name, instance in settings.instances.items() if instance.has_role("pump")]
        self._pumps = {name: make_pump(name, settings) for name in pumps}
        # Created before anything starts, so that a tier's missing package is reported immediately.
        self._maintenance = Maintenance(
            settings,
            self._maintained(settings),
            self._captures,
            [(name, pump.run_upkeep) for name, pump in self._pumps.items()],
            dict if self._fleet is None else self._fleet.copies,
        )
        is_here: Callable[[str], bool] = self._captures_itself if self._fleet is None else self._fleet.is_here
        self._served = served = make_served(settings, self._instances(), self._arrivals, is_here)
        self._canal_cluster = canal_cluster(settings, self._ports, is_here, self._guard)
        self._coordination = coordination_probe(settings)
        self._listener = Listener(
            settings.listen,
            served,
            self._make_access(served),
            self._ports,
            store_opener(settings),
            Telemetry(
                served,
                self._ports,
                [
                    self._maintenance.read,
                    self._supervisor.read,
                    self._read_listeners,
                    self._read_daemon,
                    *(partial(read_pump, pump) for pump in self._pumps.values()),
                ],
                self._coordination,
                settings.metrics,
                settings.telemetry,
                None if settings.alerts is None else Alerting(self._alerts, Channel(settings.alerts)),
            ),
            None if self._fleet is None else self._fleet.status,
            [
                *settings_routes.routes(served, lambda: shown_settings(self._settings)),
                *instance_routes.routes(served, StoredInstances(desired, self._plan, self.reload)),
                *fleet_control_routes.routes(served, _fleet_control(settings)),
                *pump_routes.routes(served, self._pumps),
                *check_routes.routes(served, self._check_servers, served.threads.searching),
                *resume_routes.routes(
                    served, self._supervisor.resume if self._fleet is None else self._fleet.resume
                ),
            ],
            self._listener_processes,
        )

    @property
    def address(self) -> str:
        """The HTTP address, host:port."""
        return self._listener.address

    def run(self) -> None:
        """Capture and serve until `stop`; then shut down in order."""
        _allow_descriptors()
        # Objects loaded so far live until the end. Freezing them spares every reader the garbage collector's
        # pauses.
        gc.collect()
        gc.freeze()
        if self._fleet is not None or self._canal_cluster is not None:
            self._guard.start()
        # This starts the capture processes that exist now. In a fleet, a capture under a lease starts its own
        # process.
        self._supervisor.start()
        self._own.start()
        if self._fleet is not None:
            self._fleet.start(failed=self.stop)
        if self._canal_cluster is not None:
            self._canal_cluster.start()
        for pump in self._pumps.values():
            pump.start()
        self._maintenance.start()
        self._pipelines.start()
        self._settings_thread.start()
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
            instances=sorted(self._settings.instances),
        )
        try:
            self._listener.serve_until_stopped()
        finally:
            self._end()
        if self._fleet is not None and self._fleet.member.failure is not None:
            raise self._fleet.member.failure

    def stop(self) -> None:
        """Stop, from any thread."""
        self._listener.stop()
        _log.info("ending")

    def reload(self, *, reads_file: bool = False) -> None:
        """Read the settings again soon. May be called by any thread."""
        self._settings_thread.reload(reads_file=reads_file)

    # --- Changing ---------------------------------------------------------------------------

    def change(self, settings: Settings) -> InstanceChange:
        """Add, change and remove instances according to new settings. Other instances are not disturbed.

        Returns once the captures that had to end have ended. If the new settings have problems, or differ in
        anything but instances, raises OptionInvalid or DependencyMissing and changes nothing.
        """
        with self._changing:
            check_instances(settings)
            change = InstanceChange.between(self._settings, settings)
            if not change:
                return change
            # This step comes first, because it fails if the package of a tier is not installed.
            self._maintenance.change(settings, self._maintained(settings), change.changed)
            self._settings = settings
            self._supervisor.change(settings)
            ending = self._own.change(change) if self._fleet is None else []
            if self._fleet is not None:
                self._fleet.change(settings, change)
            configure_served(self._served, settings, self._instances(change))
            if self._coordination is not None:
                self._coordination.instances = tuple(settings.instances)
            if self._canal_cluster is not None:
                self._canal_cluster.change(settings.instances)
            for instance in ending:
                # Wait until the previous capture has ended, because two captures must never write the same
                # log.
                while not instance.join(_JOIN_SECONDS_MAX):
                    _log.warning("a capture does not end yet", instance=instance.name)
            if self._fleet is None and not self._stopping.is_set():
                self._own.go_on(change)
            for name in (*change.removed, *change.changed):
                self._arrived(name)
            return change

    def _plan(self, settings: Settings) -> InstanceChange:
        """Return what new settings would change. Raises OptionInvalid for changes that need a restart."""
        check_instances(settings)
        return InstanceChange.between(self._settings, settings)

    def _instances(self, change: InstanceChange | None = None) -> Mapping[str, ServedInstance]:
        """Return the instances as readers see them. A change keeps the objects of unchanged instances."""
        if self._fleet is not None:
            return self._fleet.instances
        own: dict[str, ServedInstance] = dict(self._own.by_name)
        kept: dict[str, ServedInstance] = {}
        if change is not None:
            renewed = {*change.added, *change.with_other_log}
            kept = {name: self._served.instances[name] for name in own if name not in renewed}
        new = {name: instance for name, instance in own.items() if name not in kept}
        return {**kept, **as_served(self._settings, new, self._arrivals), **self._groups}

    def _maintained(self, settings: Settings) -> list[str]:
        """Return the instances whose logs this process maintains."""
        return [
            name
            for name, instance in settings.instances.items()
            if instance.is_captured and (self._fleet is not None or not settings.has_process(name))
        ]

    def _make_capture(self, name: str) -> RunningCapture:
        if self._settings.has_process(name):
            return LeasedCapture(self._supervisor, name, None)
        members = self._own.members(self._settings.instances[name].merge)
        return make_capture(name, self._settings, self._arrived, captures=members)

    # --- Parts ------------------------------------------------------------------------------

    def _make_access(self, served: Served) -> Access:
        """Return the accounts. If there are listener processes, the accounts' usages are shared with them."""
        settings = self._settings
        if settings.listeners == "single":
            return Access.of_settings(settings.listen, settings.access)
        usages = SharedUsages(len(settings.access), settings.listeners + 1)
        self._listener_processes = ListenerProcesses(
            settings, settings.listeners, served, self._ports.connections, usages
        )
        # The shared usages have an entry for each listener process, and the daemon's own entry is the last.
        usage_of = partial(usages.usage, process=settings.listeners)
        return Access.of_settings(settings.listen, settings.access, usage_of)

    def _arrived(self, name: str) -> None:
        """Announce newly visible data of an instance to readers, including those of listener processes."""
        self._arrivals.arrived(name)
        if self._listener_processes is not None:
            self._listener_processes.arrived(name)

    def _read_listeners(self, readings: Readings) -> None:
        if self._listener_processes is not None:
            self._listener_processes.read(readings)

    def _read_daemon(self, readings: Readings) -> None:
        readings.add_states("penstock_settings_state", self._settings_thread.state, SettingsState)
        read_certificate(readings, self._settings.listen.tls)
        self._pipelines.read(readings)
        if self._fleet is not None:
            self._fleet.read(readings)

    def _captures_itself(self, name: str) -> bool:
        return name in self._own.by_name or name in self._groups

    def _captures(self) -> list[Capture]:
        """Return the captures that run in this process."""
        return self._own.captures() if self._fleet is None else self._fleet.captures()

    def _check_servers(self, name: str) -> list[dict[str, Any]]:
        """Return the findings of `penstock check` for each server of an instance. Raises OptionInvalid."""
        instance = self._settings.instances[name]
        if instance.is_tidb or instance.is_ticdc or instance.merge:
            raise OptionInvalid(
                f"{name} is no MySQL or MariaDB server", hint="Run: penstock check URL --config penstock.yaml"
            )
        patterns = TablePatterns(list(instance.tables), list(instance.exclude_tables))
        return check_servers(instance.addresses(), patterns)

    def _alerts(self) -> list[Alert]:
        alerts = self._maintenance.alerts() + self._supervisor.alerts() + self._pipelines.alerts()
        return alerts if self._listener_processes is None else alerts + self._listener_processes.alerts()

    def _end(self) -> None:
        self._stopping.set()
        self._settings_thread.stop()
        self._pipelines.stop()
        self._own.stop()
        # From this point on, a settings change in progress starts no more captures.
        if self._changing.acquire(timeout=_JOIN_SECONDS_MAX):
            self._changing.release()
        self._maintenance.stop()
        self._supervisor.stop()
        if self._canal_cluster is not None:
            self._canal_cluster.stop()
        self._own.stop()
        for pump in self._pumps.values():
            pump.stop()
        if self._fleet is not None:
            self._fleet.stop()
        deadline = time.monotonic() + _JOIN_SECONDS_MAX
        self._own.join(max(0.0, deadline - time.monotonic()))
        for name, pump in self._pumps.items():
            if not pump.join(max(0.0, deadline - time.monotonic())):
                _log.error("a Pump does not end", instance=name)
        self._maintenance.join(max(0.0, deadline - time.monotonic()))
        # The supervisor kills processes that do not end in time.
        if not self._supervisor.join(_PROCESS_JOIN_SECONDS_MAX):
            _log.error("a capture process does not end")
        self._guard.stop()
        _log.info("ended")


class _Fleet:
    """This daemon's role in a fleet: its member, and the instances that it serves."""

    def __init__(
        self,
        settings: Settings,
        ports: Ports,
        arrivals: Arrivals,
        supervisor: Supervisor,
        arrived: Callable[[str], None],
        guard: SessionGuard,
    ) -> None:
        """`arrived` is called with an instance's name when more of the instance's log is visible."""
        part = settings.fleet
        assert part is not None, "the daemon is a member"
        self._open_store = partial(open_store, settings.coordination_url())
        membership = Membership(
            part.member_name(),
            part.client_address(settings.listen, split_host_port(ports.address("http"))[1]),
            penstock.__version__,
            part.zone,
            part.weight,
            part.session,
            _works_of(settings),
        )
        self._settings = settings
        self._supervisor = supervisor
        self._arrived = arrived
        self._arrivals = arrivals
        self.member = FleetMember(
            self._open_store,
            DAEMONS,
            membership,
            self._begin,
            self._begin_copy,
            lambda: sum(capture.status()["bytes_per_second"] for capture in self._tenured()),
            # This timeout is longer than a capture process may take to end, because the lease of its instance
            # is released only afterwards.
            end_seconds=_PROCESS_JOIN_SECONDS_MAX,
            joined=partial(guard.note, "fleet", settings.coordination_url()),
        )
        self._status_lock = threading.Lock()
        self._status: dict[str, Any] = {}
        self._status_at = float("-inf")
        self._directory = Directory(self._open_store, membership.name)
        self.instances = self._new_instances(settings.instances)

    def change(self, settings: Settings, change: InstanceChange) -> None:
        """Continue in the fleet with changed instances. Their captures and copies end and start again."""
        self._settings = settings
        kept = settings.instances.keys() - {*change.added, *change.changed}
        self.instances = {
            **{name: self.instances[name] for name in kept},
            **self._new_instances((*change.added, *change.changed)),
        }
        self.member.change(_works_of(settings), change.changed)

    def _new_instances(self, names: Iterable[str]) -> dict[str, ServedInstance]:
        by_name = self._settings.instances
        instances = {
            name: FleetInstance(
                name,
                partial(self._capture_of, name),
                self._directory,
                list(by_name[name].tables),
                list(by_name[name].exclude_tables),
            )
            for name in names
        }
        return as_served(self._settings, instances, self._arrivals)

    def start(self, failed: Callable[[], None]) -> None:
        """Take part in the fleet; `failed` is called if this daemon cannot take part."""
        self._directory.start()
        self.member.start(failed)

    def stop(self) -> None:
        """End all captures, and leave the fleet."""
        self.member.stop()
        self._directory.stop()

    def read(self, readings: Readings) -> None:
        """Add a metric for each instance that this member captures: whether it holds the instance's lease."""
        store = without_password(self._settings.coordination_url())
        for name, tenure in self.member.tenures().items():
            if isinstance(tenure, CaptureTenure):
                labels = {"store": store, "kind": "capture", "work": name}
                readings.add("penstock_lease_held", float(tenure.is_held), **labels)

    def captures(self) -> list[Capture]:
        """Return the captures that run in this process."""
        return [capture for capture in self._tenured() if isinstance(capture, Capture)]

    def resume(self, name: str) -> None:
        """Start an instance that was set aside. Raises CapturedElsewhere, SourceMissing, OptionInvalid."""
        if not self.is_here(name):
            raise self._directory.elsewhere(name)
        self._supervisor.resume(name)

    def _tenured(self) -> list[TenuredCapture]:
        captures = map(self._capture_of, self.member.tenures())
        return [capture for capture in captures if capture is not None]

    def _begin(self, store: CoordinationStore, name: str, lease: Lease) -> CaptureTenure:
        settings = self._settings_with(name)
        tenure = CaptureTenure(store, name, lease, self._arrived)
        tenure.start(partial(self._capture_under, settings, name))
        self._arrived(name)
        return tenure

    def _capture_under(self, settings: Settings, name: str, tenure: CaptureTenure) -> TenuredCapture:
        if settings.has_process(name):
            return LeasedCapture(self._supervisor, name, tenure)
        return make_capture(name, settings, self._arrived, tenure)

    def _settings_with(self, name: str) -> Settings:
        """Return the settings with the instance. Raises SourceMissing if it is being removed."""
        settings = self._settings
        if name not in settings.instances:
            raise SourceMissing(
                f"instance {name} is being removed", hint="See the instances: penstock status"
            )
        return settings

    def copies(self) -> dict[str, Log]:
        """Return the open copies of logs that other members capture."""
        copies = {
            name: tenure.copy.log()
            for name, tenure in self.member.copies().items()
            if isinstance(tenure, CopyTenure)
        }
        return {name: log for name, log in copies.items() if log is not None}

    def _begin_copy(self, store: CoordinationStore, name: str) -> CopyTenure:
        copy = LogCopy(
            name,
            partial(open_log, name, self._settings_with(name).log_of(name)),
            partial(self._address_of_capturer, store, name),
            partial(put_aside, LocalDisk(), self._settings_with(name).log_of(name).folder),
            self.member.name,
            partial(self._note_readable, name),
        )
        # Start the copy only once its record exists. If recording fails, the log has not been opened yet, so
        # a later attempt can open it.
        tenure = CopyTenure(store, name, self.member.name, copy, lambda: self.member.registration)
        copy.start()
        return tenure

    def _note_readable(self, name: str, position: Position) -> None:
        instance = self.instances.get(name)
        if isinstance(instance, DurableInstance):
            instance.note_readable(position)

    def _address_of_capturer(self, store: CoordinationStore, name: str) -> DaemonAddress | None:
        """Return the address of the daemon that captures an instance, None if no other daemon does."""
        member = capturer_of(store, name)
        if member is None or member.name == self.member.name:
            return None
        settings = self._settings
        part = settings.fleet
        assert part is not None, "the daemon is a member"
        authority = None if part.ssl_ca is None else str(part.ssl_ca)
        return DaemonAddress(
            hosts=(split_host_port(member.address),),
            instance=name,
            token=settings.operator_token() or Secret(""),
            tls=None if settings.listen.tls is None else Tls(mode="verify_identity", ca=authority),
        )

    def is_here(self, name: str) -> bool:
        """Return whether an instance is captured here."""
        return self._capture_of(name) is not None

    def _capture_of(self, name: str) -> TenuredCapture | None:
        """Return the capture of an instance, None if it is not captured here."""
        tenure = self.member.tenures().get(name)
        return tenure.capture if isinstance(tenure, CaptureTenure) else None

    def status(self) -> dict[str, Any]:
        """Return the state of the whole fleet, from the store. Raises CoordinationLost, SchemaInvalid."""
        with self._status_lock:
            # Frequent requests share one response, which limits the load on the store.
            if time.monotonic() - self._status_at > _FLEET_STATUS_SECONDS:
                with closing(self._open_store()) as store:
                    self._status, self._status_at = fleet_status(store), time.monotonic()
            return self._status


def _fleet_control(settings: Settings) -> FleetControl | None:
    """Return the fleet's members and jobs from the settings' store; None without a store."""
    if settings.coordination is None:
        return None
    return FleetControl(partial(open_store, settings.coordination_url()))


def _works_of(settings: Settings) -> dict[str, Work]:
    return {
        name: Work(name, instance.weight, instance.zone, settings.log_of(name).copies)
        for name, instance in settings.instances.items()
    }


def _allow_descriptors() -> None:
    """Raise the descriptor limit, so that connections cannot use up the descriptors that the log needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = CONNECTIONS_MAX + _OWN_DESCRIPTORS
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
