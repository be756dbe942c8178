# SPDX-License-Identifier: Apache-2.0
"""The state of a fleet as its coordination store has it: members, and who captures which instance."""

from typing import Any

from penstock.coordinate.lease import Holder
from penstock.coordinate.store import CoordinationStore, path_of
from penstock.fleet.records import (
    DRAINED,
    INSTANCES,
    LEADER,
    LOADS,
    MEMBERS,
    PLACEMENTS,
    CaptureRecord,
    LoadRecord,
    MemberRecord,
    PlacementRecord,
    capture_path,
    lease_path,
    member_of,
    names_below,
)


def fleet_status(store: CoordinationStore) -> dict[str, Any]:
    """Return the members and instances as plain JSON values.

    A member that is placed or drained but does not run is listed as away. Times are microseconds UTC since
    1970. Raises CoordinationLost, SchemaInvalid.
    """
    drained = set(names_below(store, DRAINED))
    placed = {
        name: PlacementRecord.of(store.get(PLACEMENTS + path_of(name))).instances
        for name in names_below(store, PLACEMENTS)
    }
    members = {name: member_of(store, name) for name in names_below(store, MEMBERS)}
    running = {name: member for name, member in members.items() if member is not None}
    names = {instance for member in running.values() for instance in member.instances}
    names |= set(names_below(store, INSTANCES))
    placed_on = {instance: name for name, instances in placed.items() for instance in instances}
    leader = Holder.of(store.get(LEADER))
    away = sorted(({name for name, instances in placed.items() if instances} | drained) - running.keys())
    return {
        "leader": None if leader is None else leader.name,
        "members": [
            *(
                _member_status(store, member, len(placed.get(name, ())), name in drained)
                for name, member in sorted(running.items())
            ),
            *(
                {
                    "member": name,
                    "state": "away",
                    "drained": name in drained,
                    "placed": len(placed.get(name, ())),
                }
                for name in away
            ),
        ],
        "instances": [
            _instance_status(store, instance, placed_on.get(instance), running) for instance in sorted(names)
        ],
    }


def _member_status(
    store: CoordinationStore, member: MemberRecord, placed: int, is_drained: bool
) -> dict[str, Any]:
    load = LoadRecord.of(store.get(LOADS + path_of(member.name)))
    return {
        "member": member.name,
        "state": "drained" if is_drained else "running",
        "drained": is_drained,
        "address": member.address,
        "zone": member.zone,
        "weight": member.weight,
        "version": member.version,
        "host": member.host,
        "process": member.process,
        "since_us": member.since_us,
        "placed": placed,
        "bytes_per_second": load.bytes_per_second,
    }


def _instance_status(
    store: CoordinationStore, instance: str, placed_on: str | None, running: dict[str, MemberRecord]
) -> dict[str, Any]:
    holder = Holder.of(store.get(lease_path(instance)))
    record = CaptureRecord.of(instance, store.get(capture_path(instance)))
    handover = None if record is None else record.handover
    member = None if holder is None else running.get(holder.name)
    return {
        "instance": instance,
        "placed_on": placed_on,
        "captured_by": None if holder is None else holder.name,
        "address": None if member is None else member.address,
        "token": None if holder is None else holder.token,
        "since_us": None if holder is None else holder.since_us,
        # What the last capturer recorded, which may have died since.
        "state": (record.state or None) if record is not None and holder is not None else None,
        "why": record.why if record is not None and holder is not None else None,
        "position": None if handover is None else str(handover.reached),
        "begins": None if handover is None else str(handover.position),
        "recorded_us": None if record is None else record.updated_us,
    }
