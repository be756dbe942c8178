# SPDX-License-Identifier: Apache-2.0
"""A subscriber for programs with an event loop.

from penstock.client import AsyncSubscriber

async with AsyncSubscriber("penstock://h1:7070/shop", name="orders-cache") as subscriber:
    async for batch in subscriber:
        await cache.put(batch.to_arrow())
"""

from collections.abc import Mapping
from typing import Unpack

from penstock.client.consume_async import AsyncConsumption
from penstock.client.following import Following, FollowingStatus
from penstock.client.options import Options, read_options
from penstock.source.daemon_address import DaemonAddress


class AsyncSubscriber(AsyncConsumption):
    """One member of a subscription for one event loop; it takes the words of `penstock.client.Subscriber`.

    A callback may be a coroutine function; each shard has a task, so shards wait for each other nowhere.
    """

    def __init__(self, source: str | DaemonAddress, *, name: str, **options: Unpack[Options]) -> None:
        found = read_options(source, name=name, **options)
        self.options = found
        self._following = Following(found)
        super().__init__(self._following, found.policy, found.ack)

    def status(self) -> FollowingStatus:
        """Return how this member stands now; never waits."""
        return self._following.status()

    @property
    def positions(self) -> Mapping[int, str]:
        """Where each shard that is ours stands: everything before its position is consumed."""
        return {number: str(shard.done.position) for number, shard in self._following.shards().items()}
