# SPDX-License-Identifier: Apache-2.0
"""What was consumed already when the number of shards was changed.

Shards of the old number stood at different places. A new shard takes slots of several of them, so it begins
at the least of their checkpoints, and leaves out the rows that the old shard of their slot had consumed:
those whose commit version is below that shard's floor.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.limits import SLOTS
from penstock.model import Position


@dataclass(frozen=True)
class Floors:
    """The floors of the old shards: slot s lay in old shard s % len(versions), whose floor is a commit
    version.

    They hold for rows of the server and epoch that they were taken in, and no others. False where nothing
    is left out.
    """

    versions: tuple[int, ...] = ()
    server_key: str = ""
    epoch: int = 0

    def __bool__(self) -> bool:
        return any(self.versions)

    def table(self, server_key: str, epoch: int) -> NDArray[np.int64]:
        """Return the commit version from which on rows are to be consumed, for every slot.

        32768 numbers, for rows of an epoch of the log that is read: a row is to be consumed where
        `commit_version >= table[slot]`, both of which may be whole columns. The last number is for slot -1,
        which belongs to every shard: it has no floor, and may come again. Floors of another server or epoch
        leave nothing out, so rows may come again, and none is missed.
        """
        found = np.zeros(SLOTS + 1, dtype=np.int64)
        if self and (self.server_key, self.epoch) == (server_key, epoch):
            versions = np.asarray(self.versions, dtype=np.int64)
            found[:SLOTS] = versions[np.arange(SLOTS) % len(versions)]
        return found

    def after(self, position: str, server_key: str) -> "Floors":
        """Return what is left of them once everything before a position was consumed.

        Nothing is left on another server or in a later epoch: they say nothing there.
        """
        if not self:
            return self
        passed = Position.parse(position)
        if server_key != self.server_key or passed.epoch != self.epoch:
            return NO_FLOORS
        return NO_FLOORS if max(self.versions) <= passed.commit_version else self

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON keeps them."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Self:
        """Read what `to_json` gave."""
        return cls(tuple(found["versions"]), found["server_key"], found["epoch"])


NO_FLOORS = Floors()
