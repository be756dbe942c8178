# SPDX-License-Identifier: Apache-2.0
"""A subscriber for programs with an event loop.

from penstock.client import AsyncSubscriber

async with AsyncSubscriber("penstock://h1:7070/shop", name="orders-cache") as subscriber:
    async for batch in subscriber:
        await cache.put(batch.to_arrow())
"""

from penstock.client.consume_async import AsyncConsumption
from penstock.client.member import Member


class AsyncSubscriber(Member, AsyncConsumption):
    """One member of a subscription, for use in one event loop. It takes the options of
    `penstock.client.Subscriber`.

    A callback may be a coroutine function. Each shard has its own task, so that shards do not wait for each
    other.
    """
