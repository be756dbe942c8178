# SPDX-License-Identifier: Apache-2.0
"""A member of the fleet: one running daemon, which captures its share of the instances.

Members register under a session. One of them is the leader by a lease, and places the instances. Each member
captures the instances that are placed on it, once the previous holder has released their leases or its
session has ended. One thread does everything that decides; another records positions and loads.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

import penstock.coordinate.lease as leases
from penstock.capture.lease import CaptureLease
from penstock.capture.run import Capture
from penstock.coordinate.store import CoordinationStore, Session, Watch, path_of
from penstock.errors import OptionInvalid, PenstockError, TransientError, VersionConflict
from penstock.fleet.leader import FleetLeadership
from penstock.fleet.placement import Work
from penstock.fleet.records import (
    DRAINED,
    LEADER,
    LOADS,
    MEMBERS,
    PLACEMENTS,
    LoadRecord,
    MemberRecord,
    PlacementRecord,
    lease_path,
)
from penstock.fleet.tenure import RECORD_SECONDS, Tenure

# Upper bounds on polling; watches wake the thread earlier.
_LOOK_SECONDS_MAX = 5.0
_RETRY_SECONDS = 0.5
# A load is written again once it has changed by a tenth, at most this often.
_LOAD_SECONDS = 10.0
_END_SECONDS_MAX = 10.0

_log = structlog.get_logger(__name__)

MakeCapture = Callable[[str, CaptureLease], Capture]


@dataclass(frozen=True)
class Membership:
    """What a member says of itself."""

    name: str
    address: str
    version: str
    zone: str
    weight: float
    session_seconds: float
    works: Mapping[str, Work]


class FleetMember:
    """This daemon's part in the fleet. `start` and `stop` belong to the main thread.

    `open_store` opens the store; a store that does not answer yet is opened later. `arrived` is called with
    an instance's name when its capture here begins or ends.
    """

    def __init__(
        self,
        open_store: Callable[[], CoordinationStore],
        membership: Membership,
        make_capture: MakeCapture,
        arrived: Callable[[str], None],
    ) -> None:
        self._open_store = open_store
        self._self = membership
        self._make_capture = make_capture
        self._arrived = arrived
        self._store: CoordinationStore | None = None
        self._session: Session | None = None
        self._leadership: FleetLeadership | None = None
        self._tenures: dict[str, Tenure] = {}
        self._leaving: list[Tenure] = []
        self._watches: dict[str, Watch] = {}
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._refused_since: float | None = None
        self._load = LoadRecord()
        self._failure: PenstockError | None = None
        self._failed: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._recording = threading.Thread(target=self._record, name="fleet-records", daemon=True)

    @property
    def name(self) -> str:
        """The member's name."""
        return self._self.name

    @property
    def failure(self) -> PenstockError | None:
        """Why this daemon takes part no more, None while it does."""
        return self._failure

    def start(self, failed: Callable[[], None]) -> None:
        """Start taking part; `failed` is called once `failure` is set."""
        self._failed = failed
        self._thread.start()
        self._recording.start()

    def stop(self) -> None:
        """End all captures, release their leases and leave the fleet."""
        self._stopping.set()
        self._news.set()
        for thread in (self._thread, self._recording):
            if thread.is_alive():
                thread.join()

    def capture_of(self, instance: str) -> Capture | None:
        """Return the capture of an instance, None if it is not captured here."""
        tenure = self._tenures.get(instance)
        return None if tenure is None else tenure.capture

    def captures(self) -> list[Capture]:
        """Return the captures that run here."""
        captures = [tenure.capture for tenure in tuple(self._tenures.values())]
        return [capture for capture in captures if capture is not None]

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self._failure is None:
                self._news.clear()
                self._news.wait(self._run_step())
        except Exception as defect:
            # The end of the thread prints the traceback. Other members take over.
            self._failure = PenstockError(
                f"a defect ended this daemon's part in the fleet: {defect!r}",
                hint="The daemon's standard error has the traceback; start the daemon again",
            )
            raise
        finally:
            for instance in tuple(self._tenures):
                self._give_up(instance, "stopping")
            deadline = time.monotonic() + _END_SECONDS_MAX
            for tenure in self._leaving:
                if not tenure.wait_left(max(0.0, deadline - time.monotonic())):
                    _log.error("a capture does not end", instance=tenure.instance)
            for path in tuple(self._watches):
                self._unwatch(path)
            if self._store is not None:
                self._store.close()
            if self._failure is not None:
                self._failed()

    def _run_step(self) -> float:
        """Do the work that is due; return the maximum seconds until the next check."""
        try:
            if self._store is None:
                self._store = self._open_store()
            if self._session is None or not self._session.alive:
                self._join(self._store)
            return self._step(self._store)
        except TransientError as problem:
            _log.warning("the fleet is not served now", member=self.name, why=str(problem))
            self._give_up_lost()
            return _RETRY_SECONDS
        except PenstockError as problem:
            # Captures go on only under a lease, so all of them end.
            _log.error("this daemon leaves the fleet", member=self.name, why=str(problem))
            self._failure = problem
            return 0.0

    def _join(self, store: CoordinationStore) -> None:
        """Start a session; everything held under the previous session is given up."""
        self._give_up_lost()
        self._leadership = None
        self._refused_since = None
        session = store.session(self._self.session_seconds)
        session.on_lost(self._news.set)
        self._session = session
        self._watch(store, PLACEMENTS + path_of(self.name))

    def _step(self, store: CoordinationStore) -> float:
        if not self._register():
            return _RETRY_SECONDS
        pause = self._lead(store)
        placed = PlacementRecord.of(store.get(PLACEMENTS + path_of(self.name)))
        wanted = {name for name in placed.instances if name in self._self.works}
        self._give_up_lost()
        for instance in [instance for instance in self._tenures if instance not in wanted]:
            self._give_up(instance, "placed elsewhere")
        return min(pause, self._take_placed(store, wanted))

    def _register(self) -> bool:
        """Register this member; return False while another process has its name. Raises OptionInvalid."""
        assert self._session is not None
        member = self._self
        record = MemberRecord(
            member.name,
            member.address,
            member.version,
            member.zone,
            member.weight,
            socket.gethostname(),
            os.getpid(),
            time.time_ns() // 1000,
            member.works,
        )
        try:
            self._session.put_ephemeral(MEMBERS + path_of(member.name), record.encode())
        except VersionConflict as problem:
            # The record may be left over from a previous process; it then ends with that session.
            now = time.monotonic()
            if self._refused_since is None or not self._session.certain:
                self._refused_since = now
            if now - self._refused_since > 2 * self._session.seconds:
                raise OptionInvalid(
                    f"the fleet has another member {member.name!r}",
                    hint="Give each daemon its own fleet.member",
                ) from problem
            return False
        self._refused_since = None
        return True

    def _lead(self, store: CoordinationStore) -> float:
        """Become the leader if there is none; return the seconds until the next check."""
        assert self._session is not None
        if self._leadership is None or self._leadership.lost:
            self._leadership = None
            self._watch(store, LEADER)
            lease = self._acquire(store, LEADER)
            if lease is not None:
                self._leadership = FleetLeadership(store, lease)
                self._unwatch(LEADER)
                self._watch(store, MEMBERS)
                self._watch(store, DRAINED)
        if self._leadership is None:
            self._unwatch(MEMBERS)
            self._unwatch(DRAINED)
            return _LOOK_SECONDS_MAX
        return self._leadership.lead()

    # --- Taking and giving up instances -----------------------------------------------------

    def _take_placed(self, store: CoordinationStore, wanted: set[str]) -> float:
        """Take the leases of placed instances that nobody holds; return the seconds until the next check."""
        assert self._session is not None
        self._leaving = [tenure for tenure in self._leaving if not tenure.left]
        leaving = {tenure.instance for tenure in self._leaving}
        missing = wanted - self._tenures.keys()
        lease_paths = {lease_path(instance) for instance in missing}
        for path in [path for path in self._watches if path.endswith("/lease") and path not in lease_paths]:
            self._unwatch(path)
        if not self._session.certain or self._stopping.is_set():
            return _RETRY_SECONDS
        for instance in sorted(missing - leaving):
            self._take(store, instance)
        return _LOOK_SECONDS_MAX

    def _take(self, store: CoordinationStore, instance: str) -> None:
        path = lease_path(instance)
        self._watch(store, path)
        lease = self._acquire(store, path)
        if lease is None:
            return
        self._unwatch(path)
        try:
            tenure = Tenure(store, instance, lease)
        except PenstockError as problem:
            _log.warning("an instance is not captured here", instance=instance, why=str(problem))
            lease.release()
            return
        tenure.start(lambda capture_lease: self._make_capture(instance, capture_lease))
        self._tenures[instance] = tenure
        _log.info("an instance is captured here", instance=instance, member=self.name, token=tenure.token)
        self._arrived(instance)

    def _acquire(self, store: CoordinationStore, path: str) -> leases.Lease | None:
        """Acquire a lease that nobody holds, or that we hold without knowing because a response was lost."""
        assert self._session is not None
        holder = leases.Holder.of(store.get(path))
        if holder is not None and holder.name != self.name:
            return None
        return leases.Lease.acquire(store, self._session, path, self.name)

    def _give_up_lost(self) -> None:
        for instance in [instance for instance, tenure in self._tenures.items() if tenure.is_lost]:
            self._give_up(instance, "the lease was lost")

    def _give_up(self, instance: str, why: str) -> None:
        tenure = self._tenures[instance]
        self._leaving.append(tenure)
        tenure.leave(why, self._arrived, self._news.set)
        del self._tenures[instance]

    def _watch(self, store: CoordinationStore, path: str) -> None:
        if path not in self._watches:
            self._watches[path] = store.watch(path, self._news.set)

    def _unwatch(self, path: str) -> None:
        watch = self._watches.pop(path, None)
        if watch is not None:
            watch.close()

    # --- Recording --------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the position of each capture and the load of this member, until stopped."""
        load_due = 0.0
        while not self._stopping.wait(RECORD_SECONDS):
            for tenure in tuple(self._tenures.values()):
                try:
                    tenure.record()
                except PenstockError as problem:
                    _log.warning("a position is not recorded", instance=tenure.instance, why=str(problem))
                    # A lost lease is given up by the other thread.
                    self._news.set()
            if time.monotonic() >= load_due:
                load_due = time.monotonic() + _LOAD_SECONDS
                self._record_load()

    def _record_load(self) -> None:
        captures = self.captures()
        rate = sum(capture.snapshot().bytes_per_second for capture in captures)
        load, store = self._load, self._store
        is_same = load.captures == len(captures) and abs(rate - load.bytes_per_second) <= rate / 10
        if store is None or is_same:
            return
        self._load = LoadRecord(len(captures), rate, time.time_ns() // 1000)
        try:
            store.put(LOADS + path_of(self.name), self._load.encode())
        except PenstockError as problem:
            _log.info("the load is not recorded", member=self.name, why=str(problem))
