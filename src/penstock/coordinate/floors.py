# SPDX-License-Identifier: Apache-2.0
"""The rows that were already consumed when the number of shards changed.

The old shards were at different positions. A new shard has slots from several old shards, so it starts at the
lowest of their checkpoints. For each slot, it skips the rows that the slot's old shard had consumed, which
are the rows with a commit version below that shard's floor.
"""

from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.limits import SLOTS
from penstock.model import Position


@dataclass(frozen=True)
class Floors:
    """The floor of each shard before a resize: rows with a lower commit version were consumed by then.

    Slot s was in old shard s % len(versions). Floors apply only to rows from the server and epoch for which
    they were recorded. The object is false if it skips no rows.
    """

    versions: tuple[int, ...] = ()
    server_key: str = ""
    epoch: int = 0

    def __bool__(self) -> bool:
        return any(self.versions)

    def table(self, server_key: str, epoch: int) -> NDArray[np.int64]:
        """Return the lowest commit version to consume, for every slot.

        The result has 32768 versions, which apply to the rows of one epoch of the log. A row is consumed if
        `commit_version >= table[slot]`, which also works on whole columns. The last version is for slot -1,
        which belongs to every shard and has no floor, so its rows may be repeated. Floors from another server
        or epoch skip nothing: rows may be repeated, but none are missed.
        """
        minimums = np.zeros(SLOTS + 1, dtype=np.int64)
        if self and (self.server_key, self.epoch) == (server_key, epoch):
            versions = np.asarray(self.versions, dtype=np.int64)
            minimums[:SLOTS] = versions[np.arange(SLOTS) % len(versions)]
        return minimums

    def after(self, position: str, server_key: str) -> "Floors":
        """Return the floors that remain once everything before a position has been consumed.

        None remain on another server or in a later epoch, where floors do not apply.
        """
        if not self:
            return self
        passed = Position.parse(position)
        if server_key != self.server_key or passed.epoch != self.epoch:
            return NO_FLOORS
        return NO_FLOORS if max(self.versions) <= passed.commit_version else self

    def to_json(self) -> dict[str, Any]:
        """Return the floors as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Parse the result of `to_json`."""
        return cls(tuple(values["versions"]), values["server_key"], values["epoch"])


NO_FLOORS = Floors()
