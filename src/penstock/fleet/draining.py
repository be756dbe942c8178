# SPDX-License-Identifier: Apache-2.0
"""Drains a member: an operator stores the request, and the leader carries it out."""

import time

from penstock.coordinate.lease import Holder
from penstock.coordinate.store import CoordinationStore, path_of
from penstock.errors import OptionInvalid, SourceMissing
from penstock.fleet.group import DAEMONS, JOB_WORKERS
from penstock.fleet.records import DRAINED, DrainRecord, names_below

_GROUPS = (DAEMONS, JOB_WORKERS)

_HINT = "See the members: penstock fleet status"


def drain(store: CoordinationStore, member: str, *, at_once: bool = False) -> None:
    """Give no work to the daemon and the worker of this name until `undrain`.

    Draining twice is harmless. If an instance's log has copies, the member keeps capturing the instance until
    a copy is up to date, unless it hands over `at_once`. Copies of logs stay, so that the member needs no new
    copies when it returns. Raises SourceMissing for an unknown member, OptionInvalid if no other member would
    be left, and CoordinationLost.
    """
    refuse_drain(store, member)
    store.put(DRAINED + path_of(member), DrainRecord(time.time_ns() // 1000, at_once).encode())


def refuse_drain(store: CoordinationStore, member: str) -> None:
    """Raise the errors of `drain` without draining."""
    drained = set(names_below(store, DRAINED))
    known = set(drained)
    for group in _GROUPS:
        running = set(names_below(store, group.members))
        known |= running | set(names_below(store, group.placements))
        if member in running and not running - drained - {member}:
            raise OptionInvalid(
                f"nobody would do what {member} does: no other member runs and is not drained",
                hint="Start another member first, or run: penstock fleet undrain",
            )
    if member not in known:
        raise SourceMissing(f"the fleet has no member {member!r}", hint=_HINT)


def undrain(store: CoordinationStore, member: str) -> None:
    """Let a member receive work again. Raises SourceMissing if it is not drained, CoordinationLost."""
    refuse_undrain(store, member)
    store.delete(DRAINED + path_of(member))


def refuse_undrain(store: CoordinationStore, member: str) -> None:
    """Raise SourceMissing if a member is not drained."""
    if member not in names_below(store, DRAINED):
        raise SourceMissing(f"member {member!r} is not drained", hint=_HINT)


def held_by(store: CoordinationStore, member: str) -> list[str]:
    """Return the instances and jobs whose lease a member holds. Raises CoordinationLost."""
    return [
        name
        for group in _GROUPS
        for name in names_below(store, group.leases)
        if (holder := Holder.of(store.get(group.leases + path_of(name, "lease")))) and holder.name == member
    ]
