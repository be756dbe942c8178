# SPDX-License-Identifier: Apache-2.0
"""Named consumers hold the log at their checkpoints: subscriptions, clients of Canal and of Ptubes.

    consumers.note("shop", "orders-cache", position, account, shard_count=4, shards=[0, 2])
    consumers.forget("shop", "canal-1001")

Each consumer has one hold, at the least place of all its shards. It is written behind, at most
`CONSUMER_HOLD_PAUSE_SECONDS` after the checkpoint has moved, so it is never ahead of it. A consumer that does
not come back within `log.retention.hold_age` holds nothing any longer; the other bounds are those of every
hold. A log in memory is not held: its readers hold it themselves where they want to hold the server back.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import structlog

from penstock.errors import PenstockError
from penstock.limits import CONSUMER_HOLD_PAUSE_SECONDS, HOLD_AGE_SECONDS_DEFAULT
from penstock.logstore.holds import Hold, Holds, consumer_hold_name
from penstock.logstore.log import Log
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from penstock.serve.access import Account

_log = structlog.get_logger(__name__)

# A hold that has not moved is renewed so many times before it would expire.
_RENEWALS = 8


@dataclass
class _Consumer:
    """A consumer that came since the daemon began, and what was written for it."""

    account: Account
    shard_count: int
    places: dict[int, Position] = field(default_factory=dict)
    noted_at: float = 0.0
    changed: bool = True
    held: Position | None = None
    renew_at: float = 0.0
    refused: bool = False

    def note(self, account: Account, shard_count: int, shards: Collection[int], position: Position) -> None:
        if shard_count != self.shard_count:
            # Its rows are shared out otherwise now.
            self.shard_count, self.places = shard_count, {}
        self.account = account
        self.places.update(dict.fromkeys(shards, position))
        self.noted_at = time.monotonic()
        self.changed = True

    @property
    def is_complete(self) -> bool:
        """Whether every shard has told its place; until then the hold of before goes on."""
        return len(self.places) >= self.shard_count


class Consumers:
    """The consumers of every instance that have come. Belongs to the event loop.

    `hold_seconds` tells by instance how long a consumer that does not come back holds its log, None for not
    at all.
    """

    def __init__(
        self, log_of: Callable[[str], Log], hold_seconds: Mapping[str, float | None] | None = None
    ) -> None:
        self._log_of = log_of
        self._hold_seconds = dict(hold_seconds or {})
        self._known: dict[tuple[str, str], _Consumer] = {}
        self._forgotten: set[tuple[str, str]] = set()

    def note(
        self,
        instance: str,
        consumer: str,
        position: Position,
        account: Account,
        *,
        shard_count: int = 1,
        shards: Collection[int] = (0,),
    ) -> None:
        """Note that a consumer has consumed everything before a position for good, in some of its shards."""
        if self._seconds(instance) is None:
            return
        key = instance, consumer
        self._forgotten.discard(key)
        if key not in self._known:
            self._known[key] = _Consumer(account, shard_count)
        self._known[key].note(account, shard_count, shards, position)

    def forget(self, instance: str, consumer: str) -> None:
        """Note that there is no such consumer any more."""
        self._known.pop((instance, consumer), None)
        self._forgotten.add((instance, consumer))

    def release(self, instance: str, reader: str) -> None:
        """Forget what the consumer of a hold told until now; the hold has been removed."""
        for key in [
            key for key in self._known if key[0] == instance and consumer_hold_name(key[1]) == reader
        ]:
            del self._known[key]

    async def run(self) -> None:
        """Write holds until it is cancelled."""
        while True:
            await asyncio.sleep(CONSUMER_HOLD_PAUSE_SECONDS)
            await self.write()

    async def write(self) -> None:
        """Write the holds of consumers that came since the last time, and remove those of forgotten ones."""
        forgotten, self._forgotten = self._forgotten, set()
        for instance, consumer in forgotten:
            await asyncio.to_thread(self._remove, instance, consumer)
        for (instance, consumer), found in list(self._known.items()):
            if found.changed:
                found.changed = False
                least = min(found.places.values())
                await asyncio.to_thread(self._write, instance, consumer, found, least, found.is_complete)
            elif time.monotonic() - found.noted_at > (self._seconds(instance) or 0.0):
                self._known.pop((instance, consumer), None)

    def _write(
        self, instance: str, consumer: str, found: _Consumer, least: Position, is_complete: bool
    ) -> None:
        """Hold the log for a consumer, in a thread."""
        seconds = self._seconds(instance)
        assert seconds is not None, "nothing is noted of others"
        now = time.monotonic()
        try:
            log = self._log_of(instance)
            if isinstance(log, MemoryLog):
                return
            holds = Holds(log.disk, log.layout)
            name = consumer_hold_name(consumer)
            if found.held is None:
                in_force = holds.readable(time.time_ns() // 1000)
                found.held = next((one.position for one in in_force if one.name == name), None)
            place = least if is_complete or found.held is None else min(least, found.held)
            if place == found.held and now < found.renew_at:
                return
            expires_us = time.time_ns() // 1000 + int(seconds * 1_000_000)
            hold = Hold(name, place, expires_us, found.account.name)
            holds.put(hold, prove=log.locate_position, admin=found.account.admin)
        except PenstockError as problem:
            if not found.refused:
                found.refused = True
                _log.warning(
                    "a consumer cannot hold the log", instance=instance, consumer=consumer, why=str(problem)
                )
            return
        found.held, found.refused = place, False
        found.renew_at = now + seconds / _RENEWALS

    def _remove(self, instance: str, consumer: str) -> None:
        try:
            log = self._log_of(instance)
            if not isinstance(log, MemoryLog):
                Holds(log.disk, log.layout).remove(consumer_hold_name(consumer))
        except PenstockError as problem:
            _log.warning("a hold is left to expire", instance=instance, consumer=consumer, why=str(problem))

    def _seconds(self, instance: str) -> float | None:
        return self._hold_seconds.get(instance, float(HOLD_AGE_SECONDS_DEFAULT))
