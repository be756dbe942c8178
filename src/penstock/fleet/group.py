# SPDX-License-Identifier: Apache-2.0
"""A group of members that share one kind of work, and a member's role in a piece of work."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.coordinate.lease import Lease
from penstock.coordinate.store import CoordinationStore
from penstock.fleet.jobs import works_of_jobs
from penstock.fleet.placement import Work
from penstock.fleet.records import FLEET, INSTANCES, JOB_RUNS, JOBS, WORKERS, MemberRecord


@dataclass(frozen=True)
class Group:
    """The paths of a group's records, and the group's work.

    The leader watches `work_path` for new work. `work_path` is None if the members' records list the work.
    `works` returns the work listed in the members' records and the store.
    """

    top: str
    leases: str
    work_path: str | None
    works: Callable[[CoordinationStore, Mapping[str, MemberRecord]], list[Work]]

    @property
    def members(self) -> str:
        """The path of the running members."""
        return f"{self.top}/members"

    @property
    def leader(self) -> str:
        """The path of the leader's lease."""
        return f"{self.top}/leader"

    @property
    def placements(self) -> str:
        """The path of the placements by member."""
        return f"{self.top}/placements"

    @property
    def damaged(self) -> str:
        """The path of the damaged logs by member."""
        return f"{self.top}/damaged"

    @property
    def joins(self) -> str:
        """The path of the times at which members joined."""
        return f"{self.top}/joins"

    @property
    def loads(self) -> str:
        """The path of the loads by member."""
        return f"{self.top}/loads"


def _works_of_members(store: CoordinationStore, members: Mapping[str, MemberRecord]) -> list[Work]:
    """Return every instance in the settings of any member. If members have different settings for an
    instance, the newest member's settings apply.
    """
    works: dict[str, Work] = {}
    for member in sorted(members.values(), key=lambda member: member.since_us):
        works.update(member.instances)
    return list(works.values())


DAEMONS = Group(FLEET, INSTANCES, None, _works_of_members)
JOB_WORKERS = Group(WORKERS, JOB_RUNS, JOBS, lambda store, members: works_of_jobs(store))


class Tenure(Protocol):
    """A member's role in one piece of work, from acquiring its lease to releasing it."""

    @property
    def name(self) -> str:
        """The name of the work."""

    @property
    def is_lost(self) -> bool:
        """Whether the lease was permanently lost before this member gave it up."""

    @property
    def damage(self) -> str | None:
        """Why this member's log of the work cannot be continued, as of the last `record`; None if it can be
        continued.
        """

    @property
    def left(self) -> bool:
        """Whether the work has ended and the lease has been released."""

    def record(self) -> None:
        """Record the progress of the work, if it has changed. Raises LeaseLost, CoordinationLost."""

    def leave(self, why: str, left: Callable[[], None]) -> None:
        """End the work and release the lease, in a separate thread; then call `left`."""

    def wait_left(self, seconds: float) -> bool:
        """Wait up to `seconds` for the release of the lease; return whether it has been released."""


# Begins work under a lease.
Begin = Callable[[CoordinationStore, str, Lease], Tenure]
# Begins to copy a work's log. The copy needs no lease, because its bytes prove whether it is valid.
BeginCopy = Callable[[CoordinationStore, str], Tenure]
