# SPDX-License-Identifier: Apache-2.0
"""The fleet's records in the coordination store; `docs/formats/coordination.md` describes them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any, Self

import structlog

from penstock.capture.lease import Handover
from penstock.coordinate.lease import Holder
from penstock.coordinate.store import CoordinationStore, Record, decoded_name, path_of, reading_record
from penstock.errors import SchemaInvalid
from penstock.fleet.placement import Work
from penstock.gtid_sets import LoggedSet
from penstock.logstore.holds import Hold
from penstock.model import Position

# The format of records. A record with a larger format is refused, and a record without a format has format 0.
FORMAT = 1

# The records of the daemons, and of the workers that run jobs.
FLEET = path_of("fleet")
WORKERS = f"{FLEET}/workers"
# The members of both groups that an operator has drained.
DRAINED = f"{FLEET}/drained"

INSTANCES = f"{FLEET}/instances"
# The jobs that users want to run, and their runs.
JOBS = f"{FLEET}/jobs"
JOB_RUNS = f"{FLEET}/runs"

_log = structlog.get_logger(__name__)

HINT_VERSION = "Upgrade this member; all members of a fleet should have one version"


@dataclass(frozen=True)
class MemberRecord:
    """A running member: where clients reach it, and the instances in its settings, with weight and zone.

    `created` is the number of the change that created the record. It differs if the member registers again.
    """

    name: str
    address: str
    version: str
    zone: str = ""
    weight: float = 1.0
    host: str = ""
    process: int = 0
    since_us: int = 0
    instances: Mapping[str, Work] = field(default_factory=dict)
    created: int = field(default=0, compare=False)

    def encode(self) -> bytes:
        """Return the value of the record."""
        # Do not use `asdict`, which would copy thousands of instances.
        values = {name: value for name, value in vars(self).items() if name not in ("name", "created")}
        instances = {
            name: {"weight": work.weight, "zone": work.zone, "copies": work.copies}
            for name, work in self.instances.items()
        }
        return encode_record({**values, "instances": instances})

    @classmethod
    def of(cls, name: str, record: Record) -> Self:
        """Read a member's record. Raises SchemaInvalid."""
        # The instances are the last field. Most members have equal instances, which are then parsed only
        # once.
        fields, instances_mark, instances = record.value.partition(b', "instances": ')
        fields_record = replace(record, value=fields + (b"}" if instances_mark else b""))
        with reading_fields(f"the record of member {name}", fields_record) as values:
            return cls(
                name,
                str(values["address"]),
                str(values.get("version", "")),
                str(values.get("zone", "")),
                float(values.get("weight", 1.0)),
                str(values.get("host", "")),
                int(values.get("process", 0)),
                int(values.get("since_us", 0)),
                _read_instances(instances.removesuffix(b"}")),
                record.created,
            )


@lru_cache(maxsize=8)
def _read_instances(text: bytes) -> Mapping[str, Work]:
    """Return the instances of a member's settings. Raises ValueError, KeyError, TypeError."""
    return {
        name: Work(name, float(share["weight"]), share["zone"], int(share.get("copies", 1)))
        for name, share in json.loads(text).items()
    }


@dataclass(frozen=True)
class PlacementRecord:
    """The instances that a member should capture, and the instances whose logs it should copy.

    `token` is the token of the leader's lease when the leader wrote the record.
    """

    token: int = 0
    instances: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the value of the record."""
        return encode_record(
            {"token": self.token, "instances": list(self.instances), "copies": list(self.copies)}
        )

    @classmethod
    def of(cls, record: Record | None) -> Self:
        """Read the record; without a record, nothing is placed. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_fields("a placement", record) as values:
            return cls(
                int(values["token"]),
                tuple(map(str, values["instances"])),
                tuple(map(str, values.get("copies", ()))),
            )


@dataclass(frozen=True)
class CaptureRecord:
    """The capture of an instance: the token of the lease whose holder may write, and the position where
    another host would begin.

    `holds` are the holds on the capturing member's log, which the log of the next host takes over. It is None
    before the first log. `state` and `why` describe the capture at `updated_us`, when the record was written.
    `member` is the holder of the lease with the token.
    """

    token: int
    handover: Handover | None = None
    holds: tuple[Hold, ...] | None = None
    state: str = ""
    why: str | None = None
    updated_us: int = 0
    member: str = ""

    def encode(self) -> bytes:
        """Return the value of the record."""
        begins = self.handover
        handover = begins and {
            "position": str(begins.position),
            "server_key": begins.server_key,
            "gtid_set": begins.gtid_set,
            "time_us": begins.time_us,
            "fingerprint": begins.fingerprint,
            "reached": str(begins.reached),
        }
        values: dict[str, Any] = {
            "token": self.token,
            "handover": handover,
            "state": self.state,
            "why": self.why,
            "updated_us": self.updated_us,
            "member": self.member,
        }
        if self.holds is not None:
            values["holds"] = [{**asdict(hold), "position": str(hold.position)} for hold in self.holds]
        return encode_record(values)

    @classmethod
    def of(cls, instance: str, record: Record | None) -> Self | None:
        """Read the record, None if there is none. Raises SchemaInvalid."""
        if record is None:
            return None
        with reading_fields(f"the capture record of {instance}", record) as values:
            return cls(
                int(values["token"]),
                _handover_of(values["handover"]),
                None if values.get("holds") is None else tuple(map(hold_of, values["holds"])),
                str(values.get("state", "")),
                values.get("why"),
                int(values.get("updated_us", 0)),
                str(values.get("member", "")),
            )


@dataclass(frozen=True)
class CopyRecord:
    """A member's copy of an instance's log, as of `updated_us`.

    `position` is the end of the copy, None if it is empty. `in_step` is true if the copy contains nearly
    everything that the capturing member has. `why` is the reason if the copy cannot follow. `registration`
    was the member's `MemberRecord.created` at that time, and is None in records of earlier versions.
    """

    position: Position | None = None
    behind_bytes: int | None = None
    in_step: bool = False
    why: str | None = None
    updated_us: int = 0
    registration: int | None = None

    def is_in_step(self, member: MemberRecord) -> bool:
        """Return whether the copy is in step. A record that predates the member's restart does not count."""
        return self.in_step and self.registration in (None, member.created)

    def encode(self) -> bytes:
        """Return the value of the record."""
        position = None if self.position is None else str(self.position)
        return encode_record({**asdict(self), "position": position})

    @classmethod
    def of(cls, instance: str, record: Record | None) -> Self | None:
        """Read the record, None if there is none. Raises SchemaInvalid."""
        if record is None:
            return None
        what = f"the record of a copy of {instance}"
        with reading_fields(what, record) as values:
            position, behind_bytes = values["position"], values["behind_bytes"]
            registration = values.get("registration")
            return cls(
                None if position is None else Position.parse(position),
                None if behind_bytes is None else int(behind_bytes),
                bool(values["in_step"]),
                values.get("why"),
                int(values.get("updated_us", 0)),
                None if registration is None else int(registration),
            )


@dataclass(frozen=True)
class DrainRecord:
    """An operator's request to drain a member, made at `since_us`.

    With `at_once`, the member hands over logs even to copies that are behind.
    """

    since_us: int = 0
    at_once: bool = False

    def encode(self) -> bytes:
        """Return the value of the record."""
        return encode_record(asdict(self))

    @classmethod
    def of(cls, member: str, record: Record | None) -> Self | None:
        """Read the record, None if there is none. Raises SchemaInvalid."""
        if record is None:
            return None
        with reading_fields(f"the request to drain {member}", record) as values:
            return cls(int(values.get("since_us", 0)), bool(values.get("at_once", False)))


@dataclass(frozen=True)
class LoadRecord:
    """A member's current load. It is written every few seconds as long as it changes."""

    captures: int = 0
    bytes_per_second: float = 0.0
    updated_us: int = 0

    def encode(self) -> bytes:
        """Return the value of the record."""
        return encode_record(asdict(self))

    @classmethod
    def of(cls, record: Record | None) -> Self:
        """Read the record. Without a record, the member does nothing. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_fields("a member's load", record) as values:
            return cls(int(values["captures"]), float(values["bytes_per_second"]), int(values["updated_us"]))


@dataclass(frozen=True)
class DamageRecord:
    """The damaged logs on a running member, by instance, and the kind of damage.

    A member with a damaged log captures that instance only if no other member can.
    """

    logs: Mapping[str, str] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the value of the record."""
        return encode_record({"logs": dict(self.logs)})

    @classmethod
    def of(cls, member: str, record: Record | None) -> Self:
        """Read the record. Without a record, no log is damaged. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_fields(f"the damaged logs of {member}", record) as values:
            return cls({str(name): str(why) for name, why in values["logs"].items()})


def lease_path(instance: str) -> str:
    """Return the path of the lease to capture an instance."""
    return INSTANCES + path_of(instance, "lease")


def job_lease_path(job: str) -> str:
    """Return the path of the lease to run a job."""
    return JOB_RUNS + path_of(job, "lease")


def capture_path(instance: str) -> str:
    """Return the path of an instance's capture record."""
    return INSTANCES + path_of(instance, "capture")


def copy_path(instance: str, member: str) -> str:
    """Return the path of the record of a member's copy of an instance's log."""
    return INSTANCES + path_of(instance, "copies") + path_of(member)


def members_in_step(
    store: CoordinationStore, members: Mapping[str, MemberRecord], instance: str
) -> list[str]:
    """Return the running members that have nearly all of an instance's log, the most complete first.

    A record that predates a member's registration does not count, because the member's host may have lost
    bytes since. Raises SchemaInvalid, CoordinationLost.
    """
    positions: list[tuple[Position, str]] = []
    # An instance whose server writes nothing has an empty log, and its copies are empty as well.
    empty: list[str] = []
    for name in names_below(store, INSTANCES + path_of(instance, "copies")):
        member = members.get(name)
        if member is None:
            continue
        copy = CopyRecord.of(instance, store.get(copy_path(instance, name), latest=True))
        if copy is None or not copy.is_in_step(member):
            continue
        if copy.position is None:
            empty.append(name)
        else:
            positions.append((copy.position, name))
    return [*(name for _, name in sorted(positions, reverse=True)), *empty]


def names_below(store: CoordinationStore, path: str) -> list[str]:
    """Return the names of the records below a path. Raises CoordinationLost."""
    return [decoded_name(name) for name in store.list(path)]


def member_of(store: CoordinationStore, name: str) -> MemberRecord | None:
    """Return a running member, None if it is not running. Raises SchemaInvalid, CoordinationLost."""
    record = store.get(f"{FLEET}/members" + path_of(name))
    return None if record is None else MemberRecord.of(name, record)


def capturer_of(store: CoordinationStore, instance: str) -> MemberRecord | None:
    """Return the member that captures an instance now, None if no member does. Raises SchemaInvalid,
    CoordinationLost.
    """
    holder = Holder.of(store.get(lease_path(instance)))
    return None if holder is None else member_of(store, holder.name)


def read_damages(store: CoordinationStore, path: str) -> dict[str, DamageRecord]:
    """Return the damaged logs by member, read below a path, without unreadable records.

    Raises CoordinationLost.
    """
    damages = {}
    for name in names_below(store, path):
        try:
            damages[name] = DamageRecord.of(name, store.get(path + path_of(name)))
        except SchemaInvalid as problem:
            # A member of a later version may have written the record. Unreadable records must not prevent the
            # placement of other work.
            _log.error("damaged logs cannot be read", member=name, why=str(problem), hint=problem.hint)
    return damages


def read_joins(record: Record | None) -> dict[str, Sequence[int]]:
    """Return when each member recently joined, in microseconds UTC since 1970. Raises SchemaInvalid."""
    if record is None:
        return {}
    with reading_fields("the members' history", record) as values:
        return {str(name): [int(time_us) for time_us in times] for name, times in values["members"].items()}


def encode_joins(joins: Mapping[str, Sequence[int]]) -> bytes:
    """Return the value of the record that `read_joins` reads."""
    return encode_record({"members": {name: list(times) for name, times in joins.items()}})


def hold_of(values: Mapping[str, Any]) -> Hold:
    """Return a hold from its fields."""
    expires_us = values["expires_us"]
    return Hold(
        str(values["name"]),
        Position.parse(values["position"]),
        None if expires_us is None else int(expires_us),
        str(values["account"]),
    )


def _handover_of(values: Mapping[str, Any] | None) -> Handover | None:
    if values is None:
        return None
    return Handover(
        Position.parse(values["position"]),
        str(values["server_key"]),
        LoggedSet(values["gtid_set"]),
        int(values["time_us"]),
        str(values["fingerprint"]),
        Position.parse(values["reached"]),
    )


def encode_record(values: Mapping[str, Any]) -> bytes:
    """Return the value of a record of the current format."""
    return json.dumps({"format": FORMAT, **values}).encode()


@contextmanager
def reading_fields(what: str, record: Record) -> Iterator[dict[str, Any]]:
    """Yield the fields of a record. Raises SchemaInvalid for a later format, or if the block cannot read a
    field.

    `what` names the record in the errors.
    """
    with reading_record(what, HINT_VERSION):
        values: dict[str, Any] = json.loads(record.value)
        if int(values.get("format", 0)) > FORMAT:
            raise SchemaInvalid(f"{what} was written by a later version of Penstock", hint=HINT_VERSION)
        yield values
