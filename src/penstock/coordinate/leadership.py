# SPDX-License-Identifier: Apache-2.0
"""The leader's work for a subscription: assigning the shards, and finishing interrupted changes.

All writes are conditional on versions, so that if two processes both believe that they lead, one of them
detects the other.
"""

import time

import structlog

from penstock.coordinate.assignment import Assignment, assign
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, CoordinationStore
from penstock.coordinate.subscription_record import Subscription, Subscriptions

# Members often join or leave together, so shards are assigned once membership is stable for this long.
SETTLE_SECONDS = 0.2

_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.2

_log = structlog.get_logger(__name__)


class Leadership:
    """The work of a member that is the leader, for as long as it holds the leader's lease."""

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
        """Whether this member is known to hold the lease."""
        return self._lease.held

    @property
    def lost(self) -> bool:
        """Whether leadership has ended."""
        return self._lease.lost

    def lead(self, subscription: Subscription) -> float:
        """Do all work that is due; return the seconds until the next check. Raises CoordinationLost."""
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
        self._delete_old_generations(subscription)
        return _LOOK_SECONDS

    def _resize(self, subscription: Subscription) -> float:
        """Finish a resize once nobody holds a shard, or once its time limit has passed."""
        now = time.monotonic()
        self._resizing_since = self._resizing_since or now
        if now < self._resizing_since + self._resize_seconds and self._subscriptions.held(subscription):
            return _POLL_SECONDS
        self._subscriptions.finish_resize(subscription)
        return 0.0

    def _unpin(self, subscription: Subscription) -> None:
        """Remove the pins of members that have left."""
        unpinned = {shard for shard, member in subscription.pins.items() if member not in self._members}
        if unpinned:
            self._subscriptions.unpin(subscription, unpinned)

    def _assign(self, subscription: Subscription) -> None:
        record = self._store.get(subscription.assignment_path)
        current = Assignment.of(record)
        if current.token > self._lease.token:
            _log.info("a later leader has assigned the shards", subscription=subscription.path)
            return
        same = current.generation == subscription.generation
        owners = assign(
            subscription.shard_count,
            sorted(self._members),
            current.owners if same else {},
            subscription.pins,
        )
        if same and owners == current.owners:
            return
        assignment = Assignment(subscription.generation, self._lease.token, owners)
        self._store.put(
            subscription.assignment_path, assignment.encode(), ABSENT if record is None else record.version
        )
        _log.info("shards are assigned", subscription=subscription.path, members=len(self._members))

    def _delete_old_generations(self, subscription: Subscription) -> None:
        for generation in self._subscriptions.generations(subscription):
            # A generation with a higher number is being created, so keep it.
            if generation < subscription.generation:
                self._subscriptions.delete_generation(subscription, generation)
