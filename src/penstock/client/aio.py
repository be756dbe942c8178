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
from penstock.client.readings import read_member
from penstock.model import ServerAddress
from penstock.source.daemon_address import DaemonAddress
from penstock.telemetry.readings import Readings


class AsyncSubscriber(AsyncConsumption):
    """One member of a subscription for one event loop; it takes the options of `penstock.client.Subscriber`.

    A callback may be a coroutine function. Each shard has its own task, so shards never wait for each other.
    """

    def __init__(
        self, source: str | DaemonAddress | ServerAddress, *, name: str, **options: Unpack[Options]
    ) -> None:
        parsed = read_options(source, name=name, **options)
        self.options = parsed
        self._following = Following(parsed)
        super().__init__(self._following, parsed.policy, parsed.ack)

    def status(self) -> FollowingStatus:
        """Return the current status of this member, without waiting."""
        return self._following.status()

    def read_metrics(self, readings: Readings) -> None:
        """Add the metrics of this member to a scrape; see `penstock.telemetry.publish`. Thread-safe."""
        read_member(readings, self.options.name, self.status(), self.skipped)

    @property
    def positions(self) -> Mapping[int, str]:
        """The position of each shard that is ours: everything before it is consumed."""
        return {number: str(shard.done.position) for number, shard in self._following.shards().items()}
