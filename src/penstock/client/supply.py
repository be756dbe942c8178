# SPDX-License-Identifier: Apache-2.0
"""What every kind of subscriber consumes from: shards that come and go, filled by somebody else."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.client.owned import OwnedShard


@dataclass(frozen=True)
class Taker:
    """Who consumes. `gained` is called with a shard before anything is in it.

    `lost` is called with a shard that has been given up, and returns when nobody works on its batches any
    more: only then another may have it. `ended` is called when nothing will come any more, with what went
    wrong, or None. All are called by the supply's own threads.
    """

    gained: Callable[[OwnedShard], None]
    lost: Callable[[OwnedShard], None]
    ended: Callable[[BaseException | None], None]


class Supply(Protocol):
    """Where shards come from: daemons and a coordination store, or what a test feeds."""

    def start(self, taker: Taker) -> None:
        """Begin. Raises what keeps it from beginning."""

    def stop(self) -> None:
        """Give every shard up, note how far each was consumed, and end. Again is fine."""

    def shards(self) -> Mapping[int, OwnedShard]:
        """Return the shards that are ours now."""
