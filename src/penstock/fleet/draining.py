# SPDX-License-Identifier: Apache-2.0
"""Draining a member: an operator's wish in the store, which the leader carries out."""

import json
import time

from penstock.coordinate.lease import Holder
from penstock.coordinate.store import CoordinationStore, path_of
from penstock.errors import OptionInvalid, SourceMissing
from penstock.fleet.records import (
    DRAINED,
    FORMAT,
    INSTANCES,
    MEMBERS,
    PLACEMENTS,
    lease_path,
    names_below,
)

_HINT = "See the members: penstock fleet status"


def drain(store: CoordinationStore, member: str) -> None:
    """Let a member keep no instances until `undrain`. Draining it again is harmless.

    Raises SourceMissing for an unknown member, OptionInvalid if no other member would be left, and
    CoordinationLost.
    """
    running, drained = set(names_below(store, MEMBERS)), set(names_below(store, DRAINED))
    if member not in running | drained | set(names_below(store, PLACEMENTS)):
        raise SourceMissing(f"the fleet has no member {member!r}", hint=_HINT)
    if not running - drained - {member}:
        raise OptionInvalid(
            f"nobody would capture what {member} captures: no other member runs and is not drained",
            hint="Start another member first, or run: penstock fleet undrain",
        )
    values = {"format": FORMAT, "since_us": time.time_ns() // 1000}
    store.put(DRAINED + path_of(member), json.dumps(values).encode())


def undrain(store: CoordinationStore, member: str) -> None:
    """Let a member gain instances again. Raises SourceMissing if it is not drained, CoordinationLost."""
    if member not in names_below(store, DRAINED):
        raise SourceMissing(f"member {member!r} is not drained", hint=_HINT)
    store.delete(DRAINED + path_of(member))


def captured_by(store: CoordinationStore, member: str) -> list[str]:
    """Return the instances whose lease a member holds. Raises CoordinationLost."""
    holders = {name: Holder.of(store.get(lease_path(name))) for name in names_below(store, INSTANCES)}
    return [name for name, holder in holders.items() if holder is not None and holder.name == member]
