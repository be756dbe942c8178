# SPDX-License-Identifier: Apache-2.0
"""Places holds on the log at the checkpoints of named consumers: subscriptions, Canal clients and Ptubes
clients.

    consumers.note("shop", "orders-cache", position, account, shard_count=4, shards=[0, 2])
    consumers.forget("shop", "canal-1001")

Each consumer has one hold, at the lowest position of its shards. The hold follows the checkpoint with a delay
of up to `CONSUMER_HOLD_PAUSE_SECONDS`, and is never ahead of it. The hold of a consumer that does not return
within `log.retention.hold_age` expires; the other limits are the same as for every hold. A log in memory gets
no holds: its readers register themselves if they want backpressure.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import structlog

from penstock.errors import PenstockError
from penstock.limits import CONSUMER_HOLD_PAUSE_SECONDS, HOLD_AGE_SECONDS_DEFAULT, HOLDS_PER_ACCOUNT_MAX
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.holds import Hold, Holds, consumer_hold_name
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from penstock.serve.access import Account

_log = structlog.get_logger(__name__)

# An unchanged hold is renewed this many times before it would expire.
_RENEWALS = 8


@dataclass
class _Consumer:
    """A consumer seen since the daemon started, and the state of its hold."""

    account: Account
    shard_count: int
    positions: dict[int, Position] = field(default_factory=dict)
    updated_at: float = 0.0
    changed: bool = True
    held: Position | None = None
    renew_at: float = 0.0
    refused: bool = False

    def note(self, account: Account, shard_count: int, shards: Collection[int], position: Position) -> None:
        if shard_count != self.shard_count:
            # The number of shards has changed, so the rows are distributed differently and the old positions
            # are void.
            self.shard_count, self.positions = shard_count, {}
        self.account = account
        self.positions.update(dict.fromkeys(shards, position))
        self.updated_at = time.monotonic()
        self.changed = True

    @property
    def is_complete(self) -> bool:
        """Whether every shard has reported its position. Until then the previous hold stays."""
        return len(self.positions) >= self.shard_count


class Consumers:
    """The consumers that have connected, by instance. Belongs to the event loop.

    `hold_seconds` maps an instance to the time for which a disconnected consumer still holds the instance's
    log. With None, consumers hold nothing.
    """

    def __init__(
        self, log_of: Callable[[str], ServedLog], hold_seconds: Mapping[str, float | None] | None = None
    ) -> None:
        self._log_of = log_of
        self.hold_seconds = dict(hold_seconds or {})
        self._known: dict[tuple[str, str], _Consumer] = {}
        # The consumers of each instance and account at the last `write`, and the new consumers since then.
        self._counts: Counter[tuple[str, str]] = Counter()
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
        """Record that a consumer has permanently consumed everything before a position, in some of its
        shards. Consumers beyond the number of holds that their account may have are ignored."""
        if self._seconds(instance) is None:
            return
        key = instance, consumer
        self._forgotten.discard(key)
        if key not in self._known:
            owner = instance, account.name
            self._counts[owner] += 1
            if self._counts[owner] > HOLDS_PER_ACCOUNT_MAX:
                if self._counts[owner] == HOLDS_PER_ACCOUNT_MAX + 1:
                    what = "an account has too many consumers, and not all of them hold the log"
                    _log.warning(what, instance=instance, account=account.name, consumer=consumer)
                return
            self._known[key] = _Consumer(account, shard_count)
        self._known[key].note(account, shard_count, shards, position)

    def forget(self, instance: str, consumer: str) -> None:
        """Record that a consumer no longer exists."""
        self._known.pop((instance, consumer), None)
        self._forgotten.add((instance, consumer))

    def release(self, instance: str, reader: str) -> None:
        """Forget what the consumer of a hold has reported so far, because the hold was removed."""
        for key in [
            key for key in self._known if key[0] == instance and consumer_hold_name(key[1]) == reader
        ]:
            del self._known[key]

    def note_forwarded(self, note: "ConsumerNote") -> None:
        """Record what a consumer reported to another process of the daemon."""
        account = Account(note.account, admin=note.admin)
        self.note(
            note.instance,
            note.consumer,
            note.position,
            account,
            shard_count=note.shard_count,
            shards=note.shards,
        )

    async def run(self) -> None:
        """Write holds until cancelled."""
        while True:
            await asyncio.sleep(CONSUMER_HOLD_PAUSE_SECONDS)
            await self.write()

    async def write(self) -> None:
        """Write the holds of changed consumers, and remove the holds of forgotten consumers."""
        forgotten, self._forgotten = self._forgotten, set()
        for instance, consumer in forgotten:
            await asyncio.to_thread(self._remove, instance, consumer)
        for (instance, consumer), state in list(self._known.items()):
            if state.changed:
                state.changed = False
                lowest = min(state.positions.values())
                await asyncio.to_thread(self._write, instance, consumer, state, lowest, state.is_complete)
            elif time.monotonic() - state.updated_at > (self._seconds(instance) or 0.0):
                self._known.pop((instance, consumer), None)
        owners = ((instance, state.account.name) for (instance, _), state in self._known.items())
        self._counts = Counter(owners)

    def _write(
        self, instance: str, consumer: str, state: _Consumer, lowest: Position, is_complete: bool
    ) -> None:
        """Write a consumer's hold. Runs in a thread."""
        seconds = self._seconds(instance)
        if seconds is None:
            # The settings have changed, and absent consumers no longer hold the log.
            return
        now = time.monotonic()
        try:
            log = self._log_of(instance)
            if isinstance(log, MemoryLog):
                return
            holds = Holds(log.disk, log.layout)
            name = consumer_hold_name(consumer)
            if state.held is None:
                in_force = holds.readable(time.time_ns() // 1000)
                state.held = next((hold.position for hold in in_force if hold.name == name), None)
            position = lowest if is_complete or state.held is None else min(lowest, state.held)
            if position == state.held and now < state.renew_at:
                return
            expires_us = time.time_ns() // 1000 + int(seconds * 1_000_000)
            new_hold = Hold(name, position, expires_us, state.account.name)
            holds.put(new_hold, log=log, admin=state.account.admin)
        except PenstockError as problem:
            if not state.refused:
                state.refused = True
                _log.warning(
                    "a consumer cannot hold the log", instance=instance, consumer=consumer, why=str(problem)
                )
            return
        state.held, state.refused = position, False
        state.renew_at = now + seconds / _RENEWALS

    def _remove(self, instance: str, consumer: str) -> None:
        try:
            log = self._log_of(instance)
            if not isinstance(log, MemoryLog):
                Holds(log.disk, log.layout).remove(consumer_hold_name(consumer))
        except PenstockError as problem:
            _log.warning("a hold is left to expire", instance=instance, consumer=consumer, why=str(problem))

    def _seconds(self, instance: str) -> float | None:
        return self.hold_seconds.get(instance, float(HOLD_AGE_SECONDS_DEFAULT))


@dataclass(frozen=True)
class ConsumerNote:
    """A report of the position up to which a consumer has permanently consumed the log; see
    `Consumers.note`.
    """

    instance: str
    consumer: str
    position: Position
    account: str
    admin: bool
    shard_count: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class ConsumerForgotten:
    """A report that a consumer no longer exists; see `Consumers.forget`."""

    instance: str
    consumer: str


class ForwardedConsumers(Consumers):
    """The consumers served by one of several processes.

    The daemon's main process writes the consumers' holds. If different processes serve the shards of a
    consumer, the lowest position counts.
    """

    def __init__(
        self,
        log_of: Callable[[str], ServedLog],
        forward: Callable[[ConsumerNote | ConsumerForgotten], None],
    ) -> None:
        super().__init__(log_of)
        self._forward = forward

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
        """Forward what a consumer has permanently consumed."""
        note = ConsumerNote(
            instance, consumer, position, account.name, account.admin, shard_count, tuple(shards)
        )
        self._forward(note)

    def forget(self, instance: str, consumer: str) -> None:
        """Forward that a consumer no longer exists."""
        self._forward(ConsumerForgotten(instance, consumer))
