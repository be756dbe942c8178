# SPDX-License-Identifier: Apache-2.0
"""A member of a group: one running daemon or worker, which does its share of the work.

Members register under a session. One of them holds the leader's lease, and places the work. Each member does
the work placed on it, once the previous holder has released the lease or lost its session. One thread makes
all decisions; another records progress and loads.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import structlog

import penstock.coordinate.lease as leases
from penstock.coordinate.store import CoordinationStore, Session, Watch, path_of
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    SchemaInvalid,
    SourceMissing,
    TransientError,
    VersionConflict,
)
from penstock.fleet.group import Begin, BeginCopy, Group, Tenure
from penstock.fleet.leader import FleetLeadership
from penstock.fleet.placement import Work
from penstock.fleet.records import DRAINED, DamageRecord, LoadRecord, MemberRecord, PlacementRecord

# How often progress is recorded. After a takeover, another host re-reads at most this much time of a server's
# log.
RECORD_SECONDS = 5.0

# Upper limits for polling intervals; watches wake the thread earlier.
_LOOK_SECONDS_MAX = 5.0
_RETRY_SECONDS = 0.5
# Work that this member cannot begin is retried after this time.
_REFUSED_SECONDS = 5.0
# A load is written again once it has changed by a tenth, but no more often than this.
_LOAD_SECONDS = 10.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Membership:
    """How a member describes itself to the fleet. `works` contains the instances in the member's settings,
    None if it can do all work.
    """

    name: str
    address: str
    version: str
    zone: str
    weight: float
    session_seconds: float
    works: Mapping[str, Work] | None


class FleetMember:
    """This process as a member of a group. `start` and `stop` must be called from the main thread.

    `open_store` opens the store, and is called again later if the store does not answer. `begin` begins a
    piece of work under its lease, and `begin_copy` begins a copy of the work's log. `bytes_per_second`
    measures the load of all work. `stop` waits up to `end_seconds` for the work to end. `joined` is called
    with each new session.
    """

    def __init__(
        self,
        open_store: Callable[[], CoordinationStore],
        group: Group,
        membership: Membership,
        begin: Begin,
        begin_copy: BeginCopy | None = None,
        bytes_per_second: Callable[[], float] = lambda: 0.0,
        end_seconds: float = 10.0,
        joined: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self._open_store = open_store
        self._group = group
        self._self = membership
        self._begin = begin
        self._begin_copy = begin_copy
        self._bytes_per_second = bytes_per_second
        self._end_seconds = end_seconds
        self._joined = joined
        self._store: CoordinationStore | None = None
        self._session: Session | None = None
        # This member's record in the session, which lists all instances in its settings.
        self._record_value = b""
        self._joined_us = 0
        # Set by `change` for the member's thread: whether the record has changed, and the work that must
        # restart.
        self._change_lock = threading.Lock()
        self._has_other_works = False
        self._restarted: set[str] = set()
        self._registration: int | None = None
        self._leadership: FleetLeadership | None = None
        self._tenures: dict[str, Tenure] = {}
        self._copies: dict[str, Tenure] = {}
        self._leaving: list[Tenure] = []
        # Work whose lease the session may hold without doing the work, because an answer was lost.
        self._doubtful: set[str] = set()
        # Work whose progress is no longer recorded, because recording it raised an unexpected error.
        self._unrecorded: list[Tenure] = []
        # The damaged logs in the session's record, and the logs that should be in it.
        self._damage_recorded = self._damage = DamageRecord()
        # Work that could not be begun, and when it is retried, in monotonic seconds.
        self._refused: dict[str, float] = {}
        self._watches: dict[str, Watch] = {}
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._refused_since: float | None = None
        self._load = LoadRecord()
        self._failure: PenstockError | None = None
        self._failed: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="fleet", daemon=True)
        self._recording = self._new_recording()

    @property
    def name(self) -> str:
        """The member's name."""
        return self._self.name

    @property
    def registration(self) -> int | None:
        """The number of the change that created this member's record, None before it has registered."""
        return self._registration

    @property
    def failure(self) -> PenstockError | None:
        """Why this daemon no longer takes part in the fleet, None while it does."""
        return self._failure

    def start(self, failed: Callable[[], None]) -> None:
        """Start taking part in the fleet; `failed` is called once `failure` is set."""
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

    def change(self, works: Mapping[str, Work], restarted: Collection[str]) -> None:
        """Do this work from now on. Work in `restarted` ends and begins again."""
        with self._change_lock:
            self._self = replace(self._self, works=works)
            self._has_other_works = True
            self._restarted.update(restarted)
        self._news.set()

    @property
    def store(self) -> CoordinationStore | None:
        """The store, None until it has answered for the first time."""
        return self._store

    def tenures(self) -> Mapping[str, Tenure]:
        """Return this member's current roles, by name of the work."""
        return dict(self._tenures)

    def copies(self) -> Mapping[str, Tenure]:
        """Return the copies of logs that this member keeps, by name of their work."""
        return dict(self._copies)

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self._failure is None:
                self._news.clear()
                self._news.wait(self._run_step())
        except Exception as defect:
            # The exception ends the thread, which prints the traceback. Other members take over.
            self._failure = _defect("this process's part in the fleet", defect)
            raise
        finally:
            for name in tuple(self._tenures):
                self._give_up(self._tenures, name, "stopping")
            for name in tuple(self._copies):
                self._give_up(self._copies, name, "stopping")
            deadline = time.monotonic() + self._end_seconds
            for tenure in self._leaving:
                if not tenure.wait_left(max(0.0, deadline - time.monotonic())):
                    _log.error("work does not end", work=tenure.name)
            for path in tuple(self._watches):
                self._unwatch(path)
            if self._store is not None:
                self._store.close()
            if self._failure is not None:
                self._failed()

    def _run_step(self) -> float:
        """Do all work that is due; return the maximum number of seconds until the next check."""
        try:
            if self._store is None:
                self._store = self._open_store()
            if self._session is None or not self._session.alive:
                self._join(self._store)
            return self._step(self._store)
        except TransientError as problem:
            _log.warning("a member cannot do its part now", member=self.name, why=str(problem))
            self._give_up_lost()
            return _RETRY_SECONDS
        except SchemaInvalid as problem:
            # A later version may have written the record. The current work continues.
            _log.error("a record of the fleet cannot be read", member=self.name, why=str(problem))
            self._give_up_lost()
            return _LOOK_SECONDS_MAX
        except PenstockError as problem:
            # Work may continue only under a lease, so all work ends.
            _log.error("a member leaves the fleet", member=self.name, why=str(problem))
            self._failure = problem
            return 0.0

    def _join(self, store: CoordinationStore) -> None:
        """Start a session, and give up everything that was held under the previous session."""
        self._give_up_lost()
        self._leadership = None
        self._refused_since = None
        self._doubtful.clear()
        self._damage_recorded = DamageRecord()
        session = store.session(self._self.session_seconds)
        self._joined(session)
        session.on_lost(self._news.set)
        self._session = session
        self._joined_us = time.time_ns() // 1000
        self._record_value = self._member_record().encode()
        self._watch(store, self._group.placements + path_of(self.name))

    def _step(self, store: CoordinationStore) -> float:
        self._apply_change()
        if not self._register():
            return _RETRY_SECONDS
        pause = self._lead(store)
        placed = PlacementRecord.of(store.get(self._group.placements + path_of(self.name)))
        works = self._self.works
        wanted = {name for name in placed.instances if works is None or name in works}
        self._give_up_lost()
        self._record_damage()
        for name in [name for name in self._tenures if name not in wanted]:
            self._give_up(self._tenures, name, "placed elsewhere")
        self._leaving = [tenure for tenure in self._leaving if not tenure.left]
        self._unrecorded = [tenure for tenure in self._unrecorded if not tenure.left]
        self._release_doubtful(wanted)
        copied = {name for name in placed.copies if works is None or name in works} - wanted
        for name in [name for name, copy in self._copies.items() if copy in self._unrecorded]:
            # Give up a copy whose progress can no longer be recorded. Otherwise its old record would remain
            # and count as a copy.
            self._give_up(self._copies, name, "a defect")
        for name in [name for name in self._copies if name not in copied]:
            self._give_up(self._copies, name, "captured here" if name in wanted else "placed elsewhere")
        pause = min(pause, self._take_placed(store, wanted))
        self._take_copies(store, copied)
        return pause

    def _record_damage(self) -> None:
        """Report damaged logs to the leader until their copies begin again. Raises CoordinationLost."""
        assert self._session is not None
        known = {name: why for name, why in self._damage.logs.items() if name not in self._copies}
        damages = {name: why for name, tenure in self._tenures.items() if (why := tenure.damage)}
        self._damage = DamageRecord(known | damages)
        if self._damage == self._damage_recorded:
            return
        path = self._group.damaged + path_of(self.name)
        # Remove the old record first, because a session's record cannot be overwritten.
        self._session.remove(path)
        if self._damage.logs:
            _log.error("logs are damaged", member=self.name, logs=dict(self._damage.logs))
            self._session.put_ephemeral(path, self._damage.encode())
        self._damage_recorded = self._damage

    def _apply_change(self) -> None:
        """Register with the changed work, and end the work that has to restart. After CoordinationLost the
        call is repeated.
        """
        assert self._session is not None
        with self._change_lock:
            if not self._has_other_works:
                return
            # Keep the join time, so that the damper does not count a changed record as a new join.
            self._record_value = self._member_record().encode()
            self._session.remove(self._group.members + path_of(self.name))
            self._has_other_works = False
            restarted, self._restarted = self._restarted, set()
        for tenures in (self._tenures, self._copies):
            for name in restarted & tenures.keys():
                self._give_up(tenures, name, "its settings have changed")

    def _register(self) -> bool:
        """Register this member; return False while another process has its name. Raises OptionInvalid."""
        assert self._session is not None
        member = self._self
        try:
            self._registration = self._session.put_ephemeral(
                self._group.members + path_of(member.name), self._record_value
            )
        except VersionConflict as problem:
            # The record may belong to a previous process of this member. It then disappears with that
            # process's session.
            now = time.monotonic()
            if self._refused_since is None or not self._session.certain:
                self._refused_since = now
            if now - self._refused_since > 2 * self._session.seconds:
                raise OptionInvalid(
                    f"the fleet has another member {member.name!r}",
                    hint="Give each process its own name: fleet.member, or penstock worker --name",
                ) from problem
            return False
        self._refused_since = None
        return True

    def _member_record(self) -> MemberRecord:
        member = self._self
        return MemberRecord(
            member.name,
            member.address,
            member.version,
            member.zone,
            member.weight,
            socket.gethostname(),
            os.getpid(),
            self._joined_us,
            member.works or {},
        )

    def _lead(self, store: CoordinationStore) -> float:
        """Become the leader if there is none; return the seconds until the next check."""
        assert self._session is not None
        if self._leadership is None or self._leadership.lost:
            self._leadership = None
            self._watch(store, self._group.leader)
            lease = self._acquire(store, self._group.leader)
            if lease is not None:
                self._leadership = FleetLeadership(store, lease, self._group)
                self._unwatch(self._group.leader)
                self._watch(store, self._group.members)
                self._watch(store, DRAINED)
                self._watch(store, self._group.damaged)
                if self._group.work_path is not None:
                    self._watch(store, self._group.work_path, self._forget_work)
        if self._leadership is None:
            self._unwatch(self._group.members)
            self._unwatch(DRAINED)
            self._unwatch(self._group.damaged)
            if self._group.work_path is not None:
                self._unwatch(self._group.work_path)
            return _LOOK_SECONDS_MAX
        try:
            return self._leadership.lead()
        except SchemaInvalid as problem:
            # A member of another version may be able to read the records, so let it try to lead.
            _log.error("the work cannot be placed", member=self.name, why=str(problem))
            self._leadership.resign()
            return _LOOK_SECONDS_MAX

    # --- Taking and giving up work ----------------------------------------------------------

    def _take_placed(self, store: CoordinationStore, wanted: set[str]) -> float:
        """Take the leases of placed work that nobody holds; return the seconds until the next check."""
        assert self._session is not None
        leaving = {tenure.name for tenure in self._leaving}
        missing = wanted - self._tenures.keys()
        lease_paths = {self._lease_path(name) for name in missing}
        for path in [path for path in self._watches if path.endswith("/lease") and path not in lease_paths]:
            self._unwatch(path)
        if not self._session.certain or self._stopping.is_set():
            return _RETRY_SECONDS
        now = time.monotonic()
        self._refused = {name: due for name, due in self._refused.items() if name in missing and due > now}
        for name in sorted(missing - leaving - self._refused.keys()):
            self._take(store, name)
        return _LOOK_SECONDS_MAX

    def _release_doubtful(self, wanted: set[str]) -> None:
        """Release leases that the session may hold for work that has since been placed elsewhere.

        Otherwise, no other member could do that work while the session is alive.
        """
        assert self._session is not None
        done_here = {*self._tenures, *(tenure.name for tenure in self._leaving)}
        for name in self._doubtful - wanted - done_here:
            self._session.remove(self._lease_path(name))
            self._doubtful.discard(name)

    def _take(self, store: CoordinationStore, name: str) -> None:
        path = self._lease_path(name)
        self._watch(store, path)
        self._doubtful.add(name)
        lease = self._acquire(store, path)
        if lease is None:
            self._doubtful.discard(name)
            return
        self._unwatch(path)
        try:
            self._tenures[name] = self._begin(store, name, lease)
        except PenstockError as problem:
            _log.warning("work is not begun here", work=name, why=str(problem))
            self._refused[name] = time.monotonic() + _REFUSED_SECONDS
            lease.release()
            self._doubtful.discard(name)
            return
        self._doubtful.discard(name)
        # Forget the damage of this log, because the log may have been repaired.
        self._damage = DamageRecord({work: why for work, why in self._damage.logs.items() if work != name})
        _log.info("work is begun here", work=name, member=self.name, token=lease.token)

    def _take_copies(self, store: CoordinationStore, wanted: set[str]) -> None:
        """Begin the copies that are placed on this member, once it no longer uses their logs for anything
        else.
        """
        busy = {*self._tenures, *self._copies, *(tenure.name for tenure in self._leaving)}
        if self._begin_copy is None or self._stopping.is_set():
            return
        for name in sorted(wanted - busy):
            try:
                self._copies[name] = self._begin_copy(store, name)
            except SourceMissing as problem:
                _log.info("a copy is not begun here", work=name, why=str(problem))
            else:
                _log.info("a copy is begun here", work=name, member=self.name)

    def _acquire(self, store: CoordinationStore, path: str) -> leases.Lease | None:
        """Acquire a lease that nobody holds, or that this member holds without knowing because a response was
        lost.
        """
        assert self._session is not None
        holder = leases.Holder.of(store.get(path))
        if holder is not None and holder.name != self.name:
            return None
        return leases.Lease.acquire(store, self._session, path, self.name)

    def _give_up_lost(self) -> None:
        for name in [name for name, tenure in self._tenures.items() if tenure.is_lost]:
            self._give_up(self._tenures, name, "the lease was lost")

    def _give_up(self, tenures: dict[str, Tenure], name: str, why: str) -> None:
        tenure = tenures[name]
        self._leaving.append(tenure)
        what = "work" if tenures is self._tenures else "a copy"
        _log.info(f"{what} is given up", work=name, member=self.name, why=why)
        tenure.leave(why, self._news.set)
        del tenures[name]

    def _lease_path(self, name: str) -> str:
        return self._group.leases + path_of(name, "lease")

    def _forget_work(self) -> None:
        leadership = self._leadership
        if leadership is not None:
            leadership.forget_work()
        self._news.set()

    def _watch(self, store: CoordinationStore, path: str, changed: Callable[[], None] | None = None) -> None:
        if path not in self._watches:
            self._watches[path] = store.watch(path, changed or self._news.set)

    def _unwatch(self, path: str) -> None:
        watch = self._watches.pop(path, None)
        if watch is not None:
            watch.close()

    # --- Recording --------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the progress of all work and this member's load, until stopped."""
        load_due = 0.0
        tenure: Tenure | None = None
        try:
            while not self._stopping.wait(RECORD_SECONDS):
                for tenure in (*self._tenures.values(), *self._copies.values()):
                    if tenure not in self._unrecorded:
                        self._record_progress(tenure)
                tenure = None
                if time.monotonic() >= load_due:
                    load_due = time.monotonic() + _LOAD_SECONDS
                    self._record_load()
        except Exception as defect:
            # The exception ends the thread, which prints the traceback.
            if tenure is None:
                self._failure = _defect("the recording of progress", defect)
            else:
                # Do not release the work: otherwise the defect would also end the next member that takes it
                # over, and so on.
                _log.error("a defect: progress is recorded no more", work=tenure.name, why=repr(defect))
                self._unrecorded.append(tenure)
                self._recording = self._new_recording()
                self._recording.start()
            self._news.set()
            raise

    def _new_recording(self) -> threading.Thread:
        return threading.Thread(target=self._record, name="fleet-records", daemon=True)

    def _record_progress(self, tenure: Tenure) -> None:
        try:
            tenure.record()
        except PenstockError as problem:
            _log.warning("progress is not recorded", work=tenure.name, why=str(problem))
            # Wake the member's thread, which gives up a lost lease.
            self._news.set()
        if tenure.damage and tenure.name not in self._damage.logs:
            self._news.set()

    def _record_load(self) -> None:
        works, rate = len(self._tenures), self._bytes_per_second()
        load, store = self._load, self._store
        is_same = load.captures == works and abs(rate - load.bytes_per_second) <= rate / 10
        if store is None or is_same:
            return
        self._load = LoadRecord(works, rate, time.time_ns() // 1000)
        try:
            store.put(self._group.loads + path_of(self.name), self._load.encode())
        except PenstockError as problem:
            _log.info("the load is not recorded", member=self.name, why=str(problem))


def _defect(part: str, defect: Exception) -> PenstockError:
    return PenstockError(
        f"a defect ended {part}: {defect!r}",
        hint="Standard error has the traceback; start the process again",
    )
