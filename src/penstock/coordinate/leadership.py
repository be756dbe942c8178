# SPDX-License-Identifier: Apache-2.0
"""What the leader of a subscription does: it says who is to have which shard, and ends what was begun.

All of it is written over versions, so that of two who both believe they lead one finds the other's word.
"""

import time

import structlog

from penstock.coordinate.assignment import Assignment, assign
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, CoordinationStore
from penstock.coordinate.subscription_record import Subscription, Subscriptions

# Members often come or go several at once; shards are assigned when they have been the same for so long.
SETTLE_SECONDS = 0.2

_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.2

_log = structlog.get_logger(__name__)


class Leadership:
    """The leader's part of a member, as long as the lease is held."""

    def __init__(self, store: CoordinationStore, lease: Lease, resize_seconds: float) -> None:
        self._store = store
        self._subscriptions = Subscriptions(store)
        self._lease = lease
        self._resize_seconds = resize_seconds
        self._members: frozenset[str] = frozenset()
        self._members_since = time.monotonic()
        self._resizing_since: float | None = None

    @property
    def held(self) -> bool:
        """Whether it is ours as far as can be known now."""
        return self._lease.held

    @property
    def lost(self) -> bool:
        """Whether it is over."""
        return self._lease.lost

    def lead(self, subscription: Subscription) -> float:
        """Do what is to be done now; return after how long there may be more. Raises CoordinationLost."""
        if not self.held:
            return _POLL_SECONDS
        if subscription.resizing is not None:
            return self._resize(subscription)
        self._resizing_since = None
        members = frozenset(self._subscriptions.members(subscription))
        if members != self._members:
            self._members, self._members_since = members, time.monotonic()
        unsettled = self._members_since + SETTLE_SECONDS - time.monotonic()
        if unsettled > 0:
            return unsettled
        self._unpin(subscription)
        self._assign(subscription)
        self._forget_generations(subscription)
        return _LOOK_SECONDS

    def _resize(self, subscription: Subscription) -> float:
        """End a change of the shards once nobody holds one, or the time for that is over."""
        now = time.monotonic()
        self._resizing_since = self._resizing_since or now
        if now < self._resizing_since + self._resize_seconds and self._subscriptions.held(subscription):
            return _POLL_SECONDS
        self._subscriptions.finish_resize(subscription)
        return 0.0

    def _unpin(self, subscription: Subscription) -> None:
        """Let go of shards that were moved to members who have left."""
        gone = {shard for shard, member in subscription.pins.items() if member not in self._members}
        if gone:
            self._subscriptions.unpin(subscription, gone)

    def _assign(self, subscription: Subscription) -> None:
        record = self._store.get(subscription.assignment_path)
        standing = Assignment.of(record)
        if standing.token > self._lease.token:
            _log.info("a later leader has assigned the shards", subscription=subscription.path)
            return
        same = standing.generation == subscription.generation
        owners = assign(
            subscription.shard_count,
            sorted(self._members),
            standing.owners if same else {},
            subscription.pins,
        )
        if same and owners == standing.owners:
            return
        wanted = Assignment(subscription.generation, self._lease.token, owners)
        self._store.put(
            subscription.assignment_path, wanted.encode(), ABSENT if record is None else record.version
        )
        _log.info("shards are assigned", subscription=subscription.path, members=len(self._members))

    def _forget_generations(self, subscription: Subscription) -> None:
        for generation in self._subscriptions.generations(subscription):
            # A later one than we know of is being made at this moment.
            if generation < subscription.generation:
                self._subscriptions.delete_generation(subscription, generation)
