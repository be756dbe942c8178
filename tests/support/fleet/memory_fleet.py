# SPDX-License-Identifier: Apache-2.0
"""Members of a fleet in one process, over a store in memory."""

import itertools
from functools import partial
from pathlib import Path

from penstock.capture.run import Capture
from penstock.captures import make_capture
from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import CoordinationStore
from penstock.fleet.copy_tenure import CopyTenure
from penstock.fleet.copying import LogCopy
from penstock.fleet.group import DAEMONS
from penstock.fleet.member import FleetMember, Membership
from penstock.fleet.placement import Work
from penstock.fleet.tenure import CaptureTenure
from penstock.logstore.disk import LocalDisk
from penstock.logstore.ending import put_aside
from penstock.logstore.log import Log
from penstock.settings.daemon import Settings

_numbers = itertools.count(1)


class MemoryFleet:
    """Members that share one store in memory. Their captures are real, but the captured server does not
    answer.
    """

    def __init__(self, folder: Path, instances: int, copies: int = 1) -> None:
        self.name = f"memory-fleet-{next(_numbers)}"
        self.folder = folder
        names = [f"shop-{number}" for number in range(instances)]
        self.works = {name: Work(name, copies=copies) for name in names}
        # The store keeps the records while members are stopped and started again.
        self.store = MemoryStore(self.name)
        self.stores: dict[str, MemoryStore] = {}
        self.members: dict[str, FleetMember] = {}

    def start(self, name: str) -> FleetMember:
        """Start a member."""
        store = self.stores[name] = MemoryStore(self.name)
        settings = Settings.model_validate(
            {
                "log": {"folder": str(self.folder / name)},
                "instances": {work: {"source": "mysql://u@127.0.0.1:1"} for work in self.works},
            }
        )

        def begin(store: CoordinationStore, instance: str, lease: Lease) -> CaptureTenure:
            tenure = CaptureTenure(store, instance, lease, lambda _: None)
            tenure.start(lambda permit: make_capture(instance, settings, lambda _: None, permit))
            return tenure

        def begin_copy(store: CoordinationStore, instance: str) -> CopyTenure:
            log = settings.log_of(instance)
            aside = partial(put_aside, LocalDisk(), log.folder)
            copy = LogCopy(instance, lambda: Log.open(log.folder, log), lambda: None, aside)
            tenure = CopyTenure(store, instance, name, copy, lambda: self.members[name].registration)
            copy.start()
            return tenure

        member = self.members[name] = FleetMember(
            lambda: store,
            DAEMONS,
            Membership(name, f"{name}:7070", "1", "", 1.0, 10.0, self.works),
            begin,
            begin_copy,
        )
        member.start(failed=lambda: None)
        return member

    def captured(self, name: str) -> set[str]:
        """Return the instances that a member captures."""
        return set(self.members[name].tenures())

    def copied(self, name: str) -> set[str]:
        """Return the instances whose logs a member copies."""
        return set(self.members[name].copies())

    def capture_of(self, name: str, instance: str) -> Capture | None:
        """Return a member's capture of an instance."""
        tenure = self.members[name].tenures().get(instance)
        return tenure.capture if isinstance(tenure, CaptureTenure) else None

    def all_captured(self, *names: str) -> bool:
        """Return whether each instance is captured by one of these members."""
        return set().union(*map(self.captured, names)) == set(self.works)

    def stop(self) -> None:
        """Stop every member."""
        for member in self.members.values():
            member.stop()
        self.store.close()
