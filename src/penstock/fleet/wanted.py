# SPDX-License-Identifier: Apache-2.0
"""Instances that users have stored in the coordination store. They override the instances of the settings
files.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Self

import structlog

from penstock.coordinate.store import ABSENT, CoordinationStore, Record, path_of
from penstock.errors import SchemaInvalid, SourceMissing
from penstock.fleet.records import FLEET, INSTANCES, encode_record, member_of, names_below, reading_fields

# The path below which the wanted instances are stored.
WANTED = f"{FLEET}/wanted"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class WantedInstance:
    """The desired state of an instance: the text of its section of a settings file, or None if it was
    removed.

    `${NAME}` in the text is replaced by its value in `values`, or else in the environment of each daemon.
    `version` counts changes of the instance.
    """

    name: str
    text: str | None = field(repr=False)
    values: Mapping[str, str] = field(default_factory=dict, repr=False)
    version: int = 1
    updated_us: int = 0

    def encode(self) -> bytes:
        """Return the value of the record."""
        values = asdict(self)
        del values["name"]
        return encode_record(values)

    @classmethod
    def of(cls, name: str, record: Record | None) -> Self | None:
        """Read the record, None if there is none. Raises SchemaInvalid."""
        if record is None:
            return None
        with reading_fields(f"the record of instance {name}", record) as values:
            return cls(
                name,
                values["text"],
                dict(values["values"]),
                int(values["version"]),
                int(values["updated_us"]),
            )


def read_wanted(store: CoordinationStore) -> dict[str, WantedInstance]:
    """Return all wanted and removed instances by name, without unreadable ones. Raises CoordinationLost."""
    instances = {}
    for name in names_below(store, WANTED):
        try:
            wanted = WantedInstance.of(name, store.get(WANTED + path_of(name), latest=True))
        except SchemaInvalid as problem:
            _log.error("a wanted instance cannot be read", instance=name, why=str(problem), hint=problem.hint)
            continue
        if wanted is not None:
            instances[name] = wanted
    return instances


def known_instances(store: CoordinationStore) -> set[str]:
    """Return the names of wanted instances, of running members' instances, and of instances captured
    earlier.
    """
    names = set(names_below(store, INSTANCES))
    names |= {name for name, wanted in read_wanted(store).items() if wanted.text is not None}
    for member in names_below(store, f"{FLEET}/members"):
        record = member_of(store, member)
        names |= set() if record is None else record.instances.keys()
    return names


def want_instance(store: CoordinationStore, wanted: WantedInstance) -> tuple[WantedInstance, bool]:
    """Store an instance; return it, and whether it has changed.

    Raises VersionConflict if another client changes it at the same time, SchemaInvalid, CoordinationLost.
    """
    path = WANTED + path_of(wanted.name)
    record = store.get(path, latest=True)
    before = WantedInstance.of(wanted.name, record)
    following = next_version(before, wanted)
    if following is before:
        return following, False
    stored = replace(following, updated_us=time.time_ns() // 1000)
    store.put(path, stored.encode(), ABSENT if record is None else record.version)
    return stored, True


def next_version(before: WantedInstance | None, wanted: WantedInstance) -> WantedInstance:
    """Return an instance with the version that it would receive when stored, or `before` itself if the
    instance is equal.
    """
    if before is None:
        return replace(wanted, version=1)
    is_equal = (before.text, before.values) == (wanted.text, wanted.values)
    return before if is_equal else replace(wanted, version=before.version + 1)


def forget_instance(store: CoordinationStore, name: str) -> None:
    """Apply the settings files to an instance again. Raises SourceMissing, CoordinationLost."""
    store.delete(WANTED + path_of(name), refuse_forgetting(store, name).version)


def refuse_forgetting(store: CoordinationStore, name: str) -> Record:
    """Return the record of a stored instance. Raises SourceMissing, CoordinationLost."""
    record = store.get(WANTED + path_of(name), latest=True)
    if record is None:
        raise SourceMissing(f"the store has no instance {name!r}", hint="Only the settings files may name it")
    return record
