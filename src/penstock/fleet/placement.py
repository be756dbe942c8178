# SPDX-License-Identifier: Apache-2.0
"""Which member does which work: a pure function, so that every leader decides alike.

    place_works(works, hosts, current) ─▶ the member of each work

Work stays where it is unless its member is gone, drained or overloaded. A member that has just come back
several times gains nothing for a while (a damper), so that a host that flaps does not drag work along.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# A member may have this much more than its share before work is taken from it.
TOLERANCE = 0.10

# A member that joined this often within the window is damped.
_JOINS_DAMPED = 3
_WINDOW_US = 600 * 1_000_000
_DAMPED_US_FIRST = 15 * 1_000_000
_DAMPED_US_MAX = 600 * 1_000_000


@dataclass(frozen=True)
class Work:
    """Something that exactly one member does. While `zone` has a member, one of them does it."""

    name: str
    weight: float = 1.0
    zone: str | None = None


@dataclass(frozen=True)
class Host:
    """A member that is alive. `works` are the names that it knows, None for all.

    A drained host keeps nothing. A host that is not `settled` keeps what it has and gains only what nobody
    else can do.
    """

    name: str
    zone: str = ""
    weight: float = 1.0
    works: frozenset[str] | None = None
    drained: bool = False
    settled: bool = True

    def knows(self, work: Work) -> bool:
        """Return whether the host could do the work, wherever it is."""
        return not self.drained and (self.works is None or work.name in self.works)


def settled_at_us(joined_us: Sequence[int]) -> int:
    """Return when a member that joined at these times (ascending) may gain work; 0 if at once."""
    if not joined_us:
        return 0
    last = joined_us[-1]
    recent = sum(1 for joined in joined_us if last - joined <= _WINDOW_US)
    if recent < _JOINS_DAMPED:
        return 0
    return last + min(_DAMPED_US_FIRST << (recent - _JOINS_DAMPED), _DAMPED_US_MAX)


def place_works(works: Sequence[Work], hosts: Sequence[Host], current: Mapping[str, str]) -> dict[str, str]:
    """Return the member of each work that any host can do.

    Work stays with its `current` member if it may. The rest goes to the members with the least load relative
    to their weight. Then work moves from members with more than their share and `TOLERANCE`, as far as whole
    pieces of work allow.
    """
    placing = _Placing(hosts)
    homeless = []
    for work in sorted(works, key=lambda work: (-work.weight, work.name)):
        host = placing.hosts.get(current.get(work.name, ""))
        if host is not None and host in placing.eligible(work):
            placing.give(work, host)
        else:
            homeless.append(work)
    for work in homeless:
        target = placing.least_loaded(work, settled=True) or placing.least_loaded(work, settled=False)
        if target is not None:
            placing.give(work, target)
    placing.balance()
    return dict(placing.owners)


class _Placing:
    """The loads while a placement is made."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self.hosts = {host.name: host for host in hosts}
        self.owners: dict[str, str] = {}
        self._works: dict[str, dict[str, Work]] = {host.name: {} for host in hosts}
        self._loads: dict[str, float] = {host.name: 0.0 for host in hosts}
        self._heap = [(0.0, name) for name in sorted(self.hosts)]
        self._zones = {host.zone for host in hosts if not host.drained}

    def eligible(self, work: Work) -> "_Eligible":
        """Return the hosts that may do a work."""
        return _Eligible(work, work.zone if work.zone in self._zones else None)

    def give(self, work: Work, host: Host) -> None:
        """Place a work; it leaves the host that had it."""
        before = self.owners.get(work.name)
        if before is not None:
            del self._works[before][work.name]
            self._change_load(before, -work.weight)
        self.owners[work.name] = host.name
        self._works[host.name][work.name] = work
        self._change_load(host.name, work.weight)

    def least_loaded(self, work: Work, *, settled: bool) -> Host | None:
        """Return the host with the smallest relative load that may gain a work, None if there is none."""
        eligible = self.eligible(work)
        passed = []
        chosen = None
        for load, host in self._ascending():
            passed.append((load, host.name))
            if host in eligible and (host.settled or not settled):
                chosen = host
                break
        for loaded in passed:
            heapq.heappush(self._heap, loaded)
        return chosen

    def balance(self) -> None:
        """Move work from overloaded hosts while that brings both hosts closer to their share."""
        active = [host for host in self.hosts.values() if not host.drained]
        weight = sum(host.weight for host in active)
        if not active or not weight:
            return
        bound = (1 + TOLERANCE) * sum(self._loads.values()) / weight
        for donor in sorted(active, key=lambda host: (-self._relative(host.name), host.name)):
            self._relieve(donor, bound)

    def _relieve(self, donor: Host, bound: float) -> None:
        # Large pieces first need the fewest moves.
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
        """Take the hosts off the heap by relative load; entries of earlier loads are dropped."""
        taken = set()
        while self._heap:
            load, name = heapq.heappop(self._heap)
            if load == self._relative(name) and name not in taken:
                taken.add(name)
                yield load, self.hosts[name]


@dataclass(frozen=True)
class _Eligible:
    """The hosts that may do a work: those that know it, in its zone if that has a host."""

    work: Work
    zone: str | None

    def __contains__(self, host: Host) -> bool:
        return host.knows(self.work) and self.zone in (None, host.zone)
