# SPDX-License-Identifier: Apache-2.0
"""Supplies a subscriber with shards. Shards may be added and taken away at any time, and are filled by other
threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.client.owned import OwnedShard


@dataclass(frozen=True)
class Taker:
    """The callbacks of a consumer, called by the supply's threads.

    `gained` is called with a shard before it has any content. `lost` is called with a released shard, and
    returns once none of the shard's batches is being processed any more; only then may another member take
    the shard. `ended` is called when nothing more will arrive, with the error or None.
    """

    gained: Callable[[OwnedShard], None]
    lost: Callable[[OwnedShard], None]
    ended: Callable[[BaseException | None], None]


class Supply(Protocol):
    """Supplies shards to a consumer, from daemons and a coordination store, or from a test's input."""

    def start(self, taker: Taker) -> None:
        """Start supplying shards. Raises the error that prevents the start."""

    def stop(self) -> None:
        """Release every shard, store its progress, and end. May be called several times."""

    def shards(self) -> Mapping[int, OwnedShard]:
        """Return the shards that this member has now."""
