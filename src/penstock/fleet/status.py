# SPDX-License-Identifier: Apache-2.0
"""The state of a fleet according to its coordination store: its members, and which member captures which
instance.
"""

from collections.abc import Collection, Mapping
from typing import Any

from penstock.coordinate.lease import Holder
from penstock.coordinate.store import CoordinationStore, path_of
from penstock.fleet.group import DAEMONS, JOB_WORKERS
from penstock.fleet.records import (
    DRAINED,
    INSTANCES,
    CaptureRecord,
    CopyRecord,
    LoadRecord,
    MemberRecord,
    PlacementRecord,
    capture_path,
    copy_path,
    lease_path,
    member_of,
    names_below,
    read_damages,
)
from penstock.fleet.wanted import read_wanted


def fleet_status(store: CoordinationStore) -> dict[str, Any]:
    """Return the members and instances as plain JSON values.

    A member that does not run is listed as away if work is placed on it or it is drained. Times are
    microseconds UTC since 1970. Raises CoordinationLost, SchemaInvalid.
    """
    drained = set(names_below(store, DRAINED))
    placed = {
        name: PlacementRecord.of(store.get(DAEMONS.placements + path_of(name)))
        for name in names_below(store, DAEMONS.placements)
    }
    members = {name: member_of(store, name) for name in names_below(store, DAEMONS.members)}
    running = {name: member for name, member in members.items() if member is not None}
    names = {instance for member in running.values() for instance in member.instances}
    # A captured instance may be defined only in the settings file of a member that is not running.
    removed = {name for name, wanted in read_wanted(store).items() if wanted.text is None}
    names |= set(names_below(store, INSTANCES)) - removed
    damages = read_damages(store, DAEMONS.damaged)
    placed_on = {instance: name for name, record in placed.items() for instance in record.instances}
    copied_on = {
        instance: [name for name, record in placed.items() if instance in record.copies] for instance in names
    }
    leader = Holder.of(store.get(DAEMONS.leader))
    away = sorted(({name for name, record in placed.items() if _works_of(record)} | drained) - running.keys())
    return {
        "leader": None if leader is None else leader.name,
        "members": [
            *(
                _member_status(store, member, placed.get(name, PlacementRecord()), name in drained)
                for name, member in sorted(running.items())
            ),
            *(
                {
                    "member": name,
                    "state": "away",
                    "drained": name in drained,
                    "placed": _works_of(placed.get(name, PlacementRecord())),
                }
                for name in away
            ),
        ],
        "instances": [
            {
                **_instance_status(store, instance, placed_on.get(instance), running),
                "copies": [_copy_status(store, instance, name, running) for name in copied_on[instance]],
                "damaged": [
                    {"member": name, "why": record.logs[instance]}
                    for name, record in damages.items()
                    if instance in record.logs
                ],
            }
            for instance in sorted(names)
        ],
        "workers": worker_statuses(store, drained),
    }


def worker_statuses(store: CoordinationStore, drained: Collection[str]) -> list[dict[str, Any]]:
    """Return the running workers as plain JSON values. Raises CoordinationLost, SchemaInvalid."""
    return [_worker_status(store, name, drained) for name in names_below(store, JOB_WORKERS.members)]


def _works_of(placement: PlacementRecord) -> int:
    """Return the number of logs that a member captures or copies."""
    return len(placement.instances) + len(placement.copies)


def _copy_status(
    store: CoordinationStore, instance: str, name: str, running: Mapping[str, MemberRecord]
) -> dict[str, Any]:
    """Return a member's copy of an instance's log, with its progress at the member's last record."""
    record = CopyRecord.of(instance, store.get(copy_path(instance, name))) or CopyRecord()
    member = running.get(name)
    return {
        "member": name,
        "state": "away" if member is None else "in step" if record.is_in_step(member) else "behind",
        "position": None if record.position is None else str(record.position),
        "behind_bytes": record.behind_bytes,
        "why": record.why,
        "recorded_us": record.updated_us or None,
    }


def _worker_status(store: CoordinationStore, name: str, drained: Collection[str]) -> dict[str, Any]:
    """Return a worker. Its jobs are listed by `penstock jobs list`."""
    record = store.get(JOB_WORKERS.members + path_of(name))
    member = None if record is None else MemberRecord.of(name, record)
    placed = PlacementRecord.of(store.get(JOB_WORKERS.placements + path_of(name)))
    return {
        "member": name,
        "state": "drained" if name in drained else "running",
        "drained": name in drained,
        "zone": "" if member is None else member.zone,
        "version": "" if member is None else member.version,
        "since_us": None if member is None else member.since_us,
        "placed": len(placed.instances),
    }


def _member_status(
    store: CoordinationStore, member: MemberRecord, placed: PlacementRecord, is_drained: bool
) -> dict[str, Any]:
    """Return a running member. It is draining while copies of the logs that it captures are behind."""
    load = LoadRecord.of(store.get(DAEMONS.loads + path_of(member.name)))
    return {
        "member": member.name,
        "state": "running" if not is_drained else "draining" if placed.instances else "drained",
        "drained": is_drained,
        "address": member.address,
        "zone": member.zone,
        "weight": member.weight,
        "version": member.version,
        "host": member.host,
        "process": member.process,
        "since_us": member.since_us,
        "placed": _works_of(placed),
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
        # The capturing member's last record. The member may have died since.
        "state": (record.state or None) if record is not None and holder is not None else None,
        "why": record.why if record is not None and holder is not None else None,
        "position": None if handover is None else str(handover.reached),
        "begins": None if handover is None else str(handover.position),
        "recorded_us": None if record is None else record.updated_us,
    }
