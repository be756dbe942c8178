# SPDX-License-Identifier: Apache-2.0
"""A fleet in one thread: the real members, leaders and placement over a store with a simulated clock.

A step of the simulation is a step of one member. Heartbeats, the end of sessions, watches and the duration of
work follow the simulated clock, so that a run with a seed is the same every time.
"""

import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random

import pytest

from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, CoordinationStore, Record
from penstock.errors import CoordinationLost, PenstockError, VersionConflict
from penstock.fleet import leader, member
from penstock.fleet.group import DAEMONS, Group
from penstock.fleet.member import FleetMember, Membership
from penstock.fleet.placement import Work
from penstock.fleet.records import CopyRecord, copy_path
from penstock.model import Position

SESSION_SECONDS = 10.0
_HEARTBEAT_SECONDS = SESSION_SECONDS / 3
_BEGUN_US = 1_700_000_000 * 1_000_000
_COPIED = Position(0, "mysql-bin.000001", 4)


class SimulatedTime:
    """Replaces the module `time`. `jump_us` is the error of the wall clock on the host whose code is
    currently running.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.jump_us = 0

    def monotonic(self) -> float:
        """Return the simulated time in seconds, the same on all hosts."""
        return self.now

    def time_ns(self) -> int:
        """Return the wall clock of the host that runs now."""
        return (_BEGUN_US + int(self.now * 1_000_000) + self.jump_us) * 1000


class Space:
    """The records and sessions of the simulated ensemble. `operations` counts the operations on it by
    kind.
    """

    def __init__(self, time: SimulatedTime) -> None:
        self.time = time
        self.records: dict[str, tuple[Record, SimulatedSession | None]] = {}
        self.operations: Counter[str] = Counter()
        self._children: dict[str, set[str]] = defaultdict(set)
        self._numbers = itertools.count(1)
        self._watches: dict[str, list[SimulatedWatch]] = defaultdict(list)
        self.sessions: set[SimulatedSession] = set()

    def expire(self) -> None:
        """End the sessions without a heartbeat."""
        for session in sorted(self.sessions, key=lambda session: session.number):
            if self.time.now >= session.expires:
                self.drop(session)

    def drop(self, session: "SimulatedSession") -> None:
        """End a session, and delete its records."""
        self.sessions.discard(session)
        for path in [path for path, (_, owner) in self.records.items() if owner is session]:
            self.remove(path)

    def write(self, path: str, value: bytes, owner: "SimulatedSession | None" = None) -> Record:
        """Write a record."""
        number, before = next(self._numbers), self.records.get(path)
        record = (
            Record(value, 0, number, of_session=owner is not None)
            if before is None
            else replace(before[0], value=value, version=before[0].version + 1)
        )
        self.records[path] = record, owner if before is None else before[1]
        name = path
        while before is None and name:
            parent, _, child = name.rpartition("/")
            self._children[parent].add(child)
            name = parent
        self._tell(path)
        return record

    def remove(self, path: str) -> None:
        """Delete a record."""
        next(self._numbers)
        del self.records[path]
        name = path
        while name and name not in self.records and not self._children.get(name):
            parent, _, child = name.rpartition("/")
            self._children[parent].discard(child)
            name = parent
        self._tell(path)

    def children(self, path: str) -> list[str]:
        """Return the names below a path."""
        return sorted(self._children.get(path, ()))

    def add_watch(self, watch: "SimulatedWatch") -> None:
        """Call a watch after each change below its path."""
        self._watches[watch.path].append(watch)

    def remove_watch(self, watch: "SimulatedWatch") -> None:
        """Stop calling a watch."""
        if watch in self._watches[watch.path]:
            self._watches[watch.path].remove(watch)

    def _tell(self, path: str) -> None:
        top = path
        while top:
            for watch in tuple(self._watches.get(top, ())):
                watch.changed()
            top = top.rpartition("/")[0]


@dataclass(eq=False)
class SimulatedWatch:
    """A watch that one member has set."""

    space: Space
    path: str
    changed: Callable[[], None]

    def close(self) -> None:
        """Stop calling the watch."""
        self.space.remove_watch(self)


class SimulatedSession:
    """A session whose heartbeats the simulation sends."""

    def __init__(self, store: "SimulatedStore", number: int) -> None:
        self.number = number
        self._store = store
        self._space = store.space
        # When the session ends according to the store and to the member. The member counts from when it sent
        # the heartbeat.
        self.expires = self._confirmed_until = self._space.time.now + SESSION_SECONDS
        self._lost: list[Callable[[], None]] = []
        self._ended = False
        self._space.sessions.add(self)

    @property
    def seconds(self) -> float:
        return SESSION_SECONDS

    @property
    def alive(self) -> bool:
        return not self._ended and self._space.time.now < self._confirmed_until

    @property
    def certain(self) -> bool:
        return self.alive and self._store.reachable

    def on_lost(self, lost: Callable[[], None]) -> None:
        self._lost.append(lost)

    def beat(self) -> None:
        """Send a heartbeat, or detect that the session has ended."""
        if not self._ended and self._store.reachable and self in self._space.sessions:
            self.expires = self._confirmed_until = self._space.time.now + SESSION_SECONDS
        elif not self._ended and (not self.alive or self._store.reachable):
            self._ended = True
            for lost in self._lost:
                lost()

    def put_ephemeral(self, path: str, value: bytes, *, plain: bool = False) -> int:
        self._store.operate("put_ephemeral")
        if self._ended or self not in self._space.sessions:
            raise CoordinationLost("the session has ended", position=path)
        present = self._space.records.get(path)
        if present is None:
            record = self._space.write(path, value, self)
            self._store.answer()
            return record.created
        if present[1] is not self:
            raise VersionConflict("another process's record exists there", position=path)
        return present[0].created

    def remove(self, path: str) -> None:
        self._store.operate("remove")
        present = self._space.records.get(path)
        if present is not None and present[1] is self:
            self._space.remove(path)
            self._store.answer()

    def close(self) -> None:
        self._ended = True
        if self._store.reachable:
            self._space.drop(self)


class SimulatedStore:
    """A member's connection to the simulated ensemble. While it is not `reachable`, operations get no
    answer.
    """

    url = "memory://simulation"

    def __init__(self, space: Space, loses_answer: Callable[[], bool]) -> None:
        self.space = space
        self.reachable = True
        self.session_now: SimulatedSession | None = None
        self._loses_answer = loses_answer
        self._watches: list[SimulatedWatch] = []

    def operate(self, kind: str) -> None:
        """Count an operation. Raises CoordinationLost while the store is unreachable."""
        if not self.reachable:
            raise CoordinationLost("the store does not answer")
        self.space.operations[kind] += 1

    def answer(self) -> None:
        """Sometimes lose the answer to a completed change."""
        if self._loses_answer():
            raise CoordinationLost("the answer was lost")

    def get(self, path: str, *, latest: bool = False) -> Record | None:
        self.operate("get")
        entry = self.space.records.get(path)
        return None if entry is None else entry[0]

    def put(self, path: str, value: bytes, version: int | None = None) -> int:
        self.operate("put")
        self._prove_version(path, version)
        record = self.space.write(path, value)
        self.answer()
        return record.version

    def delete(self, path: str, version: int | None = None) -> None:
        self.operate("delete")
        self._prove_version(path, version)
        if path in self.space.records:
            self.space.remove(path)
            self.answer()

    def _prove_version(self, path: str, version: int | None) -> None:
        entry = self.space.records.get(path)
        present = ABSENT if entry is None else entry[0].version
        if version is not None and version != present:
            raise VersionConflict(f"the record has version {present}, not {version}", position=path)

    def list(self, path: str) -> Sequence[str]:
        self.operate("list")
        return self.space.children(path)

    def read_below(self, path: str, wanted: Callable[[str], bool]) -> dict[str, Record | None]:
        self.operate("read_below")
        return {
            known: record if wanted(known) else None
            for known, (record, _) in self.space.records.items()
            if known.startswith(path + "/")
        }

    def watch(self, path: str, changed: Callable[[], None]) -> SimulatedWatch:
        watch = SimulatedWatch(self.space, path, changed)
        self.space.add_watch(watch)
        self._watches.append(watch)
        return watch

    def session(self, seconds: float = SESSION_SECONDS) -> SimulatedSession:
        self.operate("session")
        self.session_now = SimulatedSession(self, next(_session_numbers))
        return self.session_now

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


_session_numbers = itertools.count(1)


class SimulatedTenure:
    """The tenure of a member's work, or of a copy, which has no lease. It ends some time after the member
    gives it up.
    """

    def __init__(self, simulation: "Simulation", process: "Process", name: str, lease: Lease | None) -> None:
        self.name = name
        self.lease = lease
        self.left = False
        self._simulation = simulation
        self._process = process

    @property
    def is_lost(self) -> bool:
        return self.lease is not None and self.lease.lost

    @property
    def damage(self) -> None:
        """Return no damage, because the log exists only in name."""

    def record(self) -> None:
        """Do nothing: simulated work has no record."""

    def leave(self, why: str, left: Callable[[], None]) -> None:
        delay = self._simulation.random.uniform(0.0, 1.0)
        self._simulation.at(delay, lambda: self._end(left))

    def _end(self, left: Callable[[], None]) -> None:
        if self._process.is_paused:
            self._simulation.at(0.5, lambda: self._end(left))
            return
        if self.lease is not None and not self.lease.expired and not self._process.is_dead:
            try:
                self.lease.release()
            except PenstockError:
                self._simulation.at(0.5, lambda: self._end(left))
                return
        self.left = True
        left()

    def wait_left(self, seconds: float) -> bool:
        return self.left


@dataclass(eq=False)
class Process:
    """A process of a member, from its start to its death."""

    name: str
    store: SimulatedStore
    member: FleetMember
    jump_us: int = 0
    due: float = 0.0
    paused_until: float = 0.0
    is_paused: bool = False
    is_dead: bool = False


@dataclass
class Simulation:
    """The members of a group, and the events that happen to them. `zones` are assigned to members in turn."""

    random: Random
    time: SimulatedTime
    works: Mapping[str, Work]
    group: Group = DAEMONS
    zones: Sequence[str] = ("",)
    lost_answers: float = 0.0
    steps: int = 0
    processes: dict[str, Process] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.space = Space(self.time)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._beaten = 0.0

    def at(self, seconds: float, event: Callable[[], None]) -> None:
        """Call a function after this many seconds."""
        heapq.heappush(self._events, (self.time.now + seconds, next(self._numbers), event))

    # --- What happens to members ------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start the process of a member, whose name ends with its number."""
        store = SimulatedStore(self.space, lambda: self.random.random() < self.lost_answers)
        zone = self.zones[int(name.rpartition("-")[2]) % len(self.zones)]
        works = self.works if self.group.work_path is None else None
        membership = Membership(name, f"{name}:1", "1", zone, 1.0, SESSION_SECONDS, works)

        def begin(store: CoordinationStore, work: str, lease: Lease) -> SimulatedTenure:
            return SimulatedTenure(self, process, work, lease)

        def begin_copy(store: CoordinationStore, work: str) -> SimulatedTenure:
            record = CopyRecord(_COPIED, 0, in_step=True, registration=process.member.registration)
            store.put(copy_path(work, name), record.encode())
            return SimulatedTenure(self, process, work, None)

        member = FleetMember(lambda: store, self.group, membership, begin, begin_copy)
        process = Process(name, store, member, due=self.time.now)
        self.processes[name] = process

    def kill(self, name: str) -> None:
        """End a process at once. Its session stays until it expires."""
        process = self.processes.pop(name)
        process.is_dead = True
        process.store.reachable = False

    def pause(self, name: str, seconds: float) -> None:
        """Freeze a process."""
        process = self.processes[name]
        process.is_paused, process.paused_until = True, self.time.now + seconds

    def cut(self, name: str, seconds: float) -> None:
        """Cut a member off from the store."""
        process = self.processes[name]
        process.store.reachable = False

        def heal() -> None:
            if not process.is_dead:
                process.store.reachable = True
                process.member._news.set()

        self.at(seconds, heal)

    # --- Running ----------------------------------------------------------------------------

    def run(self, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Run for a time; `check` is called after every step."""
        until = self.time.now + seconds
        while True:
            moment = self._next_moment()
            if moment > until:
                self.time.now = until
                return
            self.time.now = max(self.time.now, moment)
            self._happen()
            for process in list(self.processes.values()):
                if not process.is_paused and (process.due <= self.time.now or process.member._news.is_set()):
                    self._step(process)
                    check()

    def _next_moment(self) -> float:
        moments = [self._beaten + _HEARTBEAT_SECONDS / 4]
        if self._events:
            moments.append(self._events[0][0])
        for process in self.processes.values():
            if process.is_paused:
                moments.append(process.paused_until)
            else:
                moments.append(self.time.now if process.member._news.is_set() else process.due)
        return min(moments)

    def _happen(self) -> None:
        """Run the due events that are not steps of members."""
        while self._events and self._events[0][0] <= self.time.now:
            heapq.heappop(self._events)[2]()
        for process in self.processes.values():
            if process.is_paused and process.paused_until <= self.time.now:
                process.is_paused = False
        if self.time.now >= self._beaten + _HEARTBEAT_SECONDS / 4:
            self._beaten = self.time.now
            self.space.expire()
            for process in self.processes.values():
                if process.store.session_now is not None and not process.is_paused:
                    process.store.session_now.beat()

    def _step(self, process: Process) -> None:
        self.steps += 1
        self.time.jump_us = process.jump_us
        process.member._news.clear()
        process.due = self.time.now + max(process.member._run_step(), 0.001)
        assert process.member.failure is None, process.member.failure

    # --- The current state ---------------------------------------------------------------------

    def holders(self) -> dict[str, list[tuple[str, int]]]:
        """Return, for each work, the members that now believe that they hold its lease, with their tokens."""
        holders: dict[str, list[tuple[str, int]]] = defaultdict(list)
        for process in self.processes.values():
            tenures = [*process.member._tenures.values(), *process.member._leaving]
            for tenure in tenures:
                assert isinstance(tenure, SimulatedTenure)
                if tenure.lease is not None and not tenure.left and tenure.lease.held:
                    holders[tenure.name].append((process.name, tenure.lease.token))
        return holders

    def loads(self) -> Counter[str]:
        """Return the number of works of each member."""
        return Counter({process.name: len(process.member._tenures) for process in self.processes.values()})

    def are_all_held(self) -> bool:
        """Return whether every work has a holder."""
        return self.holders().keys() == set(self.works)


class _SilentLog:
    """A log that writes nothing, because 300 members would write too much."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words, **fields: None


@contextmanager
def simulated_time() -> Iterator[SimulatedTime]:
    """Make members and leaders use the simulated time inside the block."""
    time = SimulatedTime()
    with pytest.MonkeyPatch.context() as patch:
        for module in (leader, member):
            patch.setattr(module, "time", time)
            patch.setattr(module, "_log", _SilentLog())
        yield time
