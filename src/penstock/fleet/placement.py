# SPDX-License-Identifier: Apache-2.0
"""Decides which member does which work. This is a pure function, so every leader makes the same decision.

    place_works(works, hosts, current) ─▶ the member of each work, and the members with copies of its log

Work stays where it is unless its member is gone, drained or overloaded. A member that has just returned
several times receives no work for a while (a damper), so that a flapping host does not move work back and
forth. If other members have copies of the log that the work belongs to, the work moves only to one of them,
so that the log continues without a gap. A member whose log is damaged is treated as if its disk were lost: it
is assigned the work only if no other member can do it.
"""

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

# A member may exceed its share by this fraction before work is taken from it.
TOLERANCE = 0.10

# A member that joined this often within the window is damped.
_JOINS_DAMPED = 3
_WINDOW_US = 600 * 1_000_000
_DAMPED_US_FIRST = 15 * 1_000_000
_DAMPED_US_MAX = 600 * 1_000_000


@dataclass(frozen=True)
class Work:
    """A piece of work that is done by exactly one member.

    The work is assigned to `member` as long as that member can do it, otherwise to a member in `zone` if
    there is one. The work's log exists `copies` times, including the log of the member that does the work.
    """

    name: str
    weight: float = 1.0
    zone: str | None = None
    copies: int = 1
    member: str | None = None


@dataclass(frozen=True)
class Host:
    """A member, as seen by placement.

    `works` contains the names of the work that the member can do, None for all. Hosts that are `drained` or
    temporarily `away` receive no work, but keep their copies of logs. A drained host with `hands_over` keeps
    each piece of work whose log has copies until one of these copies is in step. Any other drained host does
    no work. A host that is not `settled` keeps its work, and receives only work that no other host can do.
    The host's logs for the work in `damaged` cannot be continued.
    """

    name: str
    zone: str = ""
    weight: float = 1.0
    works: frozenset[str] | None = None
    drained: bool = False
    hands_over: bool = True
    settled: bool = True
    away: bool = False
    damaged: frozenset[str] = frozenset()

    @property
    def active(self) -> bool:
        """Whether the host may do work."""
        return not self.drained and not self.away

    def knows(self, work: Work) -> bool:
        """Return whether the host can do the work, regardless of the work's `member` and `zone`."""
        return self.active and self.may_keep(work) and work.name not in self.damaged

    def may_keep(self, work: Work) -> bool:
        """Return whether the host may keep an existing copy of a log."""
        return self.works is None or work.name in self.works

    def hands_over_log(self, work: Work) -> bool:
        """Return whether the host keeps a piece of work until a copy of its log is in step."""
        waits = self.drained and self.hands_over and not self.away
        return waits and work.copies > 1 and self.may_keep(work) and work.name not in self.damaged


@dataclass(frozen=True)
class Placement:
    """Which member does each piece of work, and which members should keep a copy of its log."""

    owners: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def settled_at_us(joined_us: Sequence[int]) -> int:
    """Return when a member that joined at these times (ascending) may receive work; 0 if at once."""
    if not joined_us:
        return 0
    last = joined_us[-1]
    recent = sum(1 for joined in joined_us if last - joined <= _WINDOW_US)
    if recent < _JOINS_DAMPED:
        return 0
    return last + min(_DAMPED_US_FIRST << (recent - _JOINS_DAMPED), _DAMPED_US_MAX)


def place_works(
    works: Sequence[Work],
    hosts: Sequence[Host],
    current: Placement,
    in_step: Callable[[str], Sequence[str]] = lambda work: (),
) -> Placement:
    """Return the placement of all work that any host can do.

    Work stays with its `current` member if possible. The rest goes to the members with the least load
    relative to their weight. Then work moves away from members that exceed their share by more than
    `TOLERANCE`, as far as whole pieces of work allow. `in_step` returns the members whose copies of a work's
    log are nearly complete, the most complete copy first. Work whose member is gone goes to a member with a
    copy. Work whose member is alive, drained or not, moves only to a member with a copy in step, so a member
    that should receive the work gets a copy first. A copy that is no longer wanted stays until those that
    replace it are in step.
    """

    def ready(work: str) -> list[str]:
        return [name for name in in_step(work) if name in current.copies.get(work, ())]

    placing = _Placing(_with_last_resorts(works, hosts))
    # The location of the log of each work with copies: its member, or the member whose copy continues the
    # log.
    anchors: dict[str, Host] = {}
    homeless = []
    for work in sorted(works, key=lambda work: (-work.weight, work.name)):
        host = placing.hosts.get(current.owners.get(work.name, ""))
        if host is not None and host.knows(work):
            anchors[work.name] = host
        if host is not None and host in placing.eligible(work):
            placing.give(work, host)
        else:
            homeless.append(work)
    for work in homeless:
        eligible, complete = placing.eligible(work), ready(work.name) if work.copies > 1 else []
        keepers = _keepers(work, placing, current, complete)
        keeper = min(
            keepers, key=lambda host: (host.name not in complete, host not in eligible), default=None
        )
        former = placing.hosts.get(current.owners.get(work.name, ""))
        if former is not None and former.hands_over_log(work) and (not keeper or keeper.name not in complete):
            anchors[work.name] = former
        elif keeper is not None:
            anchors.setdefault(work.name, keeper)
        target = next((host for host in keepers if host in eligible), None)
        target = target or placing.least_loaded(work, settled=True)
        target = target or placing.least_loaded(work, settled=False)
        if target is not None:
            placing.give(work, target)
    placing.balance()
    copying = _Copying(works, placing, anchors, current, ready)
    for work in sorted(works, key=lambda work: (-work.weight, work.name)):
        if work.copies > 1 and work.name in placing.owners:
            copying.copy(work)
    return Placement(dict(placing.owners), copying.copies)


def _with_last_resorts(works: Sequence[Work], hosts: Sequence[Host]) -> list[Host]:
    """Let hosts with a damaged log do the work if no other host can. The state of the work then names the
    damage.
    """
    damaged = frozenset().union(*(host.damaged for host in hosts))
    needed = {
        work.name for work in works if work.name in damaged and not any(host.knows(work) for host in hosts)
    }
    return [replace(host, damaged=host.damaged - needed) if host.damaged else host for host in hosts]


def _keepers(work: Work, placing: "_Placing", current: Placement, complete: Sequence[str]) -> list[Host]:
    """Return the members whose copies can continue a work's log, `complete` copies first."""
    names = current.copies.get(work.name, ()) if work.copies > 1 else ()
    ordered = [*complete, *(name for name in names if name not in complete)]
    keepers = [placing.hosts[name] for name in ordered if name in placing.hosts]
    return [host for host in keepers if host.knows(work)]


class _Copying:
    """Places the copies of logs, after the work itself has been placed."""

    def __init__(
        self,
        works: Sequence[Work],
        placing: "_Placing",
        anchors: Mapping[str, Host],
        current: Placement,
        ready: Callable[[str], Sequence[str]],
    ) -> None:
        self.copies: dict[str, tuple[str, ...]] = {}
        self._placing = placing
        self._anchors = anchors
        self._current = current
        self._ready = ready
        weights = {work.name: work.weight for work in works}
        for name, hosts in current.copies.items():
            for host in hosts:
                if name in weights and host in placing.hosts:
                    placing.add_load(placing.hosts[host], weights[name])

    def copy(self, work: Work) -> None:
        """Choose the members with copies of a work's log."""
        placing, name = self._placing, work.name
        anchor = self._anchors.get(name)
        owner = placing.hosts[placing.owners[name]]
        awaited: Host | None = None
        if anchor is not None and anchor != owner and owner.name not in self._ready(name):
            owner, awaited = anchor, owner
            placing.give(work, owner)
        kept = [
            placing.hosts[copy]
            for copy in self._current.copies.get(name, ())
            if copy in placing.hosts and placing.hosts[copy].may_keep(work) and copy != owner.name
        ]
        chosen = self._choose(work, owner, [host for host in kept if host != awaited], awaited)
        retired = [host for host in kept if host not in chosen and host != awaited]
        if retired and set(self._ready(name)).issuperset(host.name for host in chosen):
            retired = []
        copies = {host.name for host in (*chosen, *([] if awaited is None else [awaited]), *retired)}
        self.copies[name] = tuple(sorted(copies))

    def _choose(self, work: Work, owner: Host, kept: Sequence[Host], awaited: Host | None) -> list[Host]:
        """Return the members with copies, preferably in different zones, and members that already have a copy
        first.
        """
        holders = sorted(kept, key=lambda host: host.name)
        # A drained owner keeps its copy, so the awaited copy is an additional one.
        chosen = [awaited] if awaited is not None and owner.drained else []
        former = self._placing.hosts.get(self._current.owners.get(work.name, ""))
        if former is not None and former.may_keep(work) and former not in (owner, *holders):
            # The former owner's log is complete until the work moves, so it counts as a copy.
            holders.append(former)
        while len(chosen) < work.copies - 1:
            taken = {owner, *chosen, *([] if awaited is None else [awaited])}
            zones = {owner.zone, *(host.zone for host in chosen)}
            host = self._next(work, holders, taken, zones)
            if host is None:
                break
            chosen.append(host)
            if host not in kept:
                self._placing.add_load(host, work.weight)
        return chosen

    def _next(
        self, work: Work, holders: Sequence[Host], taken: Collection[Host], zones: Collection[str]
    ) -> Host | None:
        free = [host for host in holders if host not in taken]
        apart = next((host for host in free if host.zone not in zones), None)
        if apart is None and not self._placing.zones <= set(zones):
            apart = self._first(
                lambda host: host.knows(work) and host not in taken and host.zone not in zones
            )
        if apart is not None or free:
            return apart or free[0]
        return self._first(lambda host: host.knows(work) and host not in taken)

    def _first(self, may: Callable[[Host], bool]) -> Host | None:
        """Return the least loaded host that may receive a copy, preferably a settled host."""
        return self._placing.first(lambda host: may(host) and host.settled) or self._placing.first(may)


class _Placing:
    """The loads of the hosts while a placement is made."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.owners: dict[str, str] = {}
        self._works: dict[str, dict[str, Work]] = {host.name: {} for host in hosts}
        self._loads: dict[str, float] = {host.name: 0.0 for host in hosts}
        self._heap = [(0.0, name) for name in sorted(self.hosts)]
        self.zones = {host.zone for host in hosts if host.active}

    def eligible(self, work: Work) -> "_Eligible":
        """Return the hosts that may do a piece of work."""
        chosen = None if work.member is None else self.hosts.get(work.member)
        if chosen is not None and chosen.knows(work):
            return _Eligible(work, None, chosen.name)
        return _Eligible(work, work.zone if work.zone in self.zones else None, None)

    def give(self, work: Work, host: Host) -> None:
        """Place a piece of work on a host, and take it away from the host that had it."""
        before = self.owners.get(work.name)
        if before is not None:
            del self._works[before][work.name]
            self._change_load(before, -work.weight)
        self.owners[work.name] = host.name
        self._works[host.name][work.name] = work
        self._change_load(host.name, work.weight)

    def least_loaded(self, work: Work, *, settled: bool) -> Host | None:
        """Return the host with the smallest relative load that may receive a piece of work, None if there is
        none.
        """
        eligible = self.eligible(work)
        return self.first(lambda host: host in eligible and (host.settled or not settled))

    def first(self, may: Callable[[Host], bool]) -> Host | None:
        """Return the host with the smallest relative load for which `may` is true, None if there is none."""
        passed = []
        chosen = None
        for load, host in self._ascending():
            passed.append((load, host.name))
            if may(host):
                chosen = host
                break
        for loaded in passed:
            heapq.heappush(self._heap, loaded)
        return chosen

    def add_load(self, host: Host, weight: float) -> None:
        """Count the load of a copy."""
        self._change_load(host.name, weight)

    def balance(self) -> None:
        """Move work from overloaded hosts to others, as long as a move brings both hosts closer to their
        shares.
        """
        active = [host for host in self.hosts.values() if host.active]
        weight = sum(host.weight for host in active)
        if not active or not weight:
            return
        bound = (1 + TOLERANCE) * sum(self._loads.values()) / weight
        for donor in sorted(active, key=lambda host: (-self._relative(host.name), host.name)):
            self._relieve(donor, bound)

    def _relieve(self, donor: Host, bound: float) -> None:
        # Starting with large pieces needs the fewest moves.
        for work in sorted(self._works[donor.name].values(), key=lambda work: (-work.weight, work.name)):
            load = self._relative(donor.name)
            if load <= bound:
                return
            target = self.least_loaded(work, settled=True)
            if target is None or target.name == donor.name:
                continue
            if self._relative(target.name) + work.weight / target.weight < load:
                self.give(work, target)

    def _relative(self, name: str) -> float:
        return self._loads[name] / self.hosts[name].weight

    def _change_load(self, name: str, change: float) -> None:
        self._loads[name] += change
        heapq.heappush(self._heap, (self._relative(name), name))

    def _ascending(self) -> Iterator[tuple[float, Host]]:
        """Pop hosts from the heap by relative load; entries for outdated loads are dropped."""
        taken = set()
        while self._heap:
            load, name = heapq.heappop(self._heap)
            if load == self._relative(name) and name not in taken:
                taken.add(name)
                yield load, self.hosts[name]


@dataclass(frozen=True)
class _Eligible:
    """The hosts that may do a piece of work: those that know it. With a `member` or a `zone`, only that
    member or the hosts in that zone.
    """

    work: Work
    zone: str | None
    member: str | None

    def __contains__(self, host: Host) -> bool:
        is_apart = self.zone not in (None, host.zone) or self.member not in (None, host.name)
        return host.knows(self.work) and not is_apart
