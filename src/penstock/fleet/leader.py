# SPDX-License-Identifier: Apache-2.0
"""The leader's work for a group: placing work on the members that are alive.

All writes are conditional on versions and carry the leader's token, so that if two processes both believe
that they lead, one of them detects the other.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import structlog

from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, CoordinationStore, Record, path_of
from penstock.errors import PenstockError, SchemaInvalid
from penstock.fleet.group import Group
from penstock.fleet.placement import Host, Placement, Work, place_works, settled_at_us
from penstock.fleet.records import (
    DRAINED,
    DrainRecord,
    MemberRecord,
    PlacementRecord,
    encode_joins,
    members_in_step,
    names_below,
    read_damages,
    read_joins,
)

# Members often join or leave together, so work is placed once membership is stable for this long.
SETTLE_SECONDS = 0.2
# When the first members start, no work is placed yet. Wait for members that start at the same time, so that
# all share the work.
FIRST_SETTLE_SECONDS = 1.0

# A member that returns within this time keeps its copies of logs. After that, the copies go to other members.
AWAY_SECONDS = 60.0

_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.2

# The number of recorded join times per member.
_JOINS_KEPT = 8
_JOINS_KEPT_US = 3_600 * 1_000_000

_log = structlog.get_logger(__name__)


class FleetLeadership:
    """The work of a member that is the leader, for as long as it holds the leader's lease. Used by the
    member's thread only.
    """

    def __init__(self, store: CoordinationStore, lease: Lease, group: Group) -> None:
        self._store = store
        self._group = group
        self._lease = lease
        # Each member's record, and the change that created it. The change differs when a member joins again.
        self._members: dict[str, tuple[int, MemberRecord]] = {}
        self._members_since = time.monotonic()
        # Members that have work but are not running, and since when, in monotonic seconds.
        self._away: dict[str, tuple[float, Host]] = {}
        self._placements: dict[str, tuple[int, PlacementRecord]] | None = None
        self._joins: tuple[int, dict[str, list[int]]] | None = None
        self._works: list[Work] = []
        # Set when the watch reports a change of the work, possibly while the work is being read.
        self._has_new_work = threading.Event()

    @property
    def lost(self) -> bool:
        """Whether leadership has ended."""
        return self._lease.lost

    def resign(self) -> None:
        """Let another member lead. Raises CoordinationLost."""
        self._lease.release()

    def forget_work(self) -> None:
        """Note that the work has changed, so that the leader reads it again. May be called by any thread."""
        self._has_new_work.set()

    def lead(self) -> float:
        """Do all work that is due; return the seconds until the next check.

        Raises CoordinationLost, VersionConflict, SchemaInvalid.
        """
        if not self._lease.held:
            return _POLL_SECONDS
        self._read_members()
        if self._placements is None:
            self._placements = self._read_placements()
        is_first = not any(record.instances for _, record in self._placements.values())
        settle = FIRST_SETTLE_SECONDS if is_first else SETTLE_SECONDS
        unsettled = self._members_since + settle - time.monotonic()
        if unsettled > 0:
            return unsettled
        return self._place_works(self._placements)

    # --- Members ----------------------------------------------------------------------------

    def _read_members(self) -> None:
        """Read the members that are alive. For known members, read only the change that created them."""
        members = {}
        for name in names_below(self._store, self._group.members):
            record = self._store.get(self._group.members + path_of(name))
            if record is None:
                continue
            known = self._members.get(name)
            if known is not None and known[0] == record.created:
                members[name] = known
                continue
            try:
                members[name] = record.created, MemberRecord.of(name, record)
            except SchemaInvalid as problem:
                # Skip a member of a later version. It receives work once a member of that version leads.
                _log.error("a member cannot be read", member=name, why=str(problem), hint=problem.hint)
        before = {name: created for name, (created, _) in self._members.items()}
        now = {name: created for name, (created, _) in members.items()}
        if before == now:
            return
        for name in before.keys() - now.keys():
            self._away[name] = time.monotonic(), self._host_of(name, self._members[name][1])
        self._members, self._members_since = members, time.monotonic()
        self.forget_work()
        self._note_joins(sorted(name for name, created in now.items() if before.get(name) != created))

    def _note_joins(self, joined: list[str]) -> None:
        """Record that members joined. A new leader finds most of them already recorded."""
        version, joins = self._joins or self._read_joins()
        changed = False
        for name in joined:
            since_us = self._members[name][1].since_us
            times = joins.setdefault(name, [])
            if since_us not in times:
                times[:] = sorted([*times, since_us])[-_JOINS_KEPT:]
                changed = True
        if changed:
            # Forget old join times, because only members that join again soon are damped.
            recent_us = time.time_ns() // 1000 - _JOINS_KEPT_US
            for name in [name for name, times in joins.items() if times[-1] < recent_us]:
                del joins[name]
            version = self._store.put(self._group.joins, encode_joins(joins), version)
        self._joins = version, joins

    def _read_joins(self) -> tuple[int, dict[str, list[int]]]:
        record = self._store.get(self._group.joins, latest=True)
        joins = {name: list(times) for name, times in read_joins(record).items()}
        return (ABSENT if record is None else record.version), joins

    # --- Placing ----------------------------------------------------------------------------

    def _read_placements(self) -> dict[str, tuple[int, PlacementRecord]]:
        placements = {}
        for name in names_below(self._store, self._group.placements):
            record: Record | None = self._store.get(self._group.placements + path_of(name), latest=True)
            if record is not None:
                placements[name] = record.version, PlacementRecord.of(record)
                # This member has work placed on it but is not running, so it left at the same time as the
                # last leader. Its zone is unknown, because its record is gone.
                self._away.setdefault(name, (time.monotonic(), Host(name)))
        return placements

    def _place_works(self, placements: dict[str, tuple[int, PlacementRecord]]) -> float:
        """Write the placements that have changed; return the seconds until a damped member may receive work,
        at most the polling interval.
        """
        now_us = time.time_ns() // 1000
        joins = self._joins[1] if self._joins is not None else {}
        settled_us = {name: settled_at_us(joins.get(name, ())) for name in self._members}
        members = {name: member for name, (_, member) in sorted(self._members.items())}
        hosts = [
            replace(self._host_of(name, member), settled=settled_us[name] <= now_us)
            for name, member in members.items()
        ]
        self._forget_away()
        hosts += [replace(host, away=True) for _, host in self._away.values()]
        self._read_works()
        placement = place_works(
            self._works,
            self._with_damages(self._with_drains(hosts)),
            _placement_of(placements),
            partial(members_in_step, self._store, members),
        )
        self._write(placements, placement)
        waits = [(us - now_us) / 1e6 for us in settled_us.values() if us > now_us]
        return min([_LOOK_SECONDS, *waits])

    def _host_of(self, name: str, member: MemberRecord) -> Host:
        known = frozenset(member.instances) if self._group.work_path is None else None
        return Host(name, member.zone, member.weight, known)

    def _with_drains(self, hosts: list[Host]) -> list[Host]:
        drains = {
            name: DrainRecord.of(name, self._store.get(DRAINED + path_of(name)))
            for name in names_below(self._store, DRAINED)
        }
        return [
            host if drain is None else replace(host, drained=True, hands_over=not drain.at_once)
            for host, drain in ((host, drains.get(host.name)) for host in hosts)
        ]

    def _with_damages(self, hosts: list[Host]) -> list[Host]:
        damages = read_damages(self._store, self._group.damaged)
        return [
            replace(host, damaged=frozenset(damages[host.name].logs)) if host.name in damages else host
            for host in hosts
        ]

    def _forget_away(self) -> None:
        """Forget members that have returned or have been away for too long."""
        now = time.monotonic()
        self._away = {
            name: (since, host)
            for name, (since, host) in sorted(self._away.items())
            if name not in self._members and now - since < AWAY_SECONDS
        }

    def _read_works(self) -> None:
        if not self._has_new_work.is_set():
            return
        self._has_new_work.clear()
        members = {name: member for name, (_, member) in self._members.items()}
        try:
            self._works = self._group.works(self._store, members)
        except PenstockError:
            self._has_new_work.set()
            raise

    def _write(self, placements: dict[str, tuple[int, PlacementRecord]], placement: Placement) -> None:
        wanted: dict[str, list[str]] = {name: [] for name in (*self._members, *self._away, *placements)}
        copies: dict[str, list[str]] = {name: [] for name in wanted}
        for work, name in placement.owners.items():
            wanted[name].append(work)
        for work, names in placement.copies.items():
            for name in names:
                copies[name].append(work)
        for name, instances in wanted.items():
            version, placed = placements.get(name, (ABSENT, PlacementRecord()))
            if placed.token > self._lease.token:
                _log.info("a later leader has placed the work", member=name)
                self._placements = None
                return
            record = PlacementRecord(self._lease.token, tuple(sorted(instances)), tuple(sorted(copies[name])))
            if replace(record, token=placed.token) == placed and version != ABSENT:
                if name not in self._members and not instances and not copies[name]:
                    # Delete the placement of a member that is gone. Its copies are gone with it.
                    self._store.delete(self._group.placements + path_of(name), version)
                    del placements[name]
                continue
            # Forget the placements until the write has succeeded: if its answer is lost, they are read again.
            self._placements = None
            version = self._store.put(self._group.placements + path_of(name), record.encode(), version)
            placements[name], self._placements = (version, record), placements
            _log.info("work is placed", member=name, works=len(instances), copies=len(copies[name]))


def _placement_of(placements: Mapping[str, tuple[int, PlacementRecord]]) -> Placement:
    owners: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}
    for name, (_, placed) in sorted(placements.items()):
        owners.update(dict.fromkeys(placed.instances, name))
        for work in placed.copies:
            copies[work] = (*copies.get(work, ()), name)
    return Placement(owners, copies)
