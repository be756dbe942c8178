# SPDX-License-Identifier: Apache-2.0
"""Reports the coordination store's state for metrics and health: whether it answers, and its subscriptions.

Uses a separate connection with short timeouts, so that a lost store delays a scrape by a few seconds at most.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar

import structlog

from penstock.coordinate.store import CoordinationStore, path_of, without_password
from penstock.coordinate.subscription_record import ShardView, Subscription, Subscriptions
from penstock.errors import PenstockError, SourceMissing, TransientError
from penstock.telemetry.counters import Histogram
from penstock.telemetry.definitions import SECONDS_BOUNDS
from penstock.telemetry.readings import Readings

_Answer = TypeVar("_Answer")

_log = structlog.get_logger(__name__)

# Frequent scrapes and probes share one answer, so that they do not load the store.
_FRESH_SECONDS = 5.0


@dataclass(frozen=True)
class _SubscriptionState:
    """A subscription, and how its shards are shared."""

    instance: str
    name: str
    members: int
    shards: int
    unowned: int
    rebalances: int


@dataclass(frozen=True)
class SubscriptionView:
    """A subscription, its members, and each of its shards."""

    subscription: Subscription
    members: Sequence[str]
    shards: Sequence[ShardView]


class CoordinationProbe:
    """Queries one coordination store. Thread-safe. Every method may block until the store's timeout."""

    def __init__(
        self, url: str, open_store: Callable[[], CoordinationStore], instances: Collection[str]
    ) -> None:
        self._url = without_password(url)
        self._open = open_store
        # The instances whose subscriptions are shown.
        self.instances = tuple(instances)
        self._lock = threading.Lock()
        self._store: CoordinationStore | None = None
        self._failure: PenstockError | None = None
        self._asked_at = float("-inf")
        self._states: list[_SubscriptionState] = []
        self._views: list[SubscriptionView] = []
        self._viewed_at = float("-inf")
        self._errors = 0
        self._seconds = Histogram(SECONDS_BOUNDS)

    def failure(self) -> PenstockError | None:
        """Return why the store does not answer, None if it does."""
        with self._lock:
            self._refresh()
            return self._failure

    def read(self, readings: Readings) -> None:
        """Add the state of the store and of the subscriptions of this daemon's instances."""
        with self._lock:
            self._refresh()
            readings.add("penstock_coordination_up", float(self._failure is None), store=self._url)
            readings.add("penstock_coordination_errors_total", self._errors, store=self._url)
            readings.add_histogram("penstock_coordination_request_seconds", self._seconds, store=self._url)
            for state in self._states if self._failure is None else ():
                labels = {"penstock_instance": state.instance, "subscription": state.name}
                readings.add("penstock_subscription_members", state.members, **labels)
                readings.add("penstock_subscription_shards", state.shards, **labels)
                readings.add("penstock_subscription_shards_unowned", state.unowned, **labels)
                readings.add("penstock_subscription_rebalances_total", state.rebalances, **labels)

    def subscriptions(self) -> Sequence[SubscriptionView]:
        """Return the subscriptions of this daemon's instances, as of a few seconds ago.

        Raises CoordinationLost if the store does not answer, SchemaInvalid for an unreadable record.
        """
        with self._lock:
            self._refresh()
            if self._failure is not None:
                raise self._failure
            assert self._store is not None, "it has answered"
            if self._viewed_at < self._asked_at:
                registry = Subscriptions(self._store)
                self._views = [
                    SubscriptionView(known, registry.members(known), registry.shards(known))
                    for instance in self.instances
                    for known in registry.list(instance)
                ]
                self._viewed_at = self._asked_at
            return self._views

    def change(self, work: Callable[[Subscriptions], _Answer]) -> _Answer:
        """Run a function that changes subscriptions, and return its result. The next call of `subscriptions`
        shows the change.

        Raises CoordinationLost if the store does not answer, and propagates errors from `work`.
        """
        with self._lock:
            self._refresh()
            if self._failure is not None:
                raise self._failure
            assert self._store is not None, "it has answered"
            self._asked_at = self._viewed_at = float("-inf")
            return work(Subscriptions(self._store))

    def change_slowly(self, work: Callable[[Subscriptions], _Answer]) -> _Answer:
        """Like `change`, but for a function that may have to wait for members.

        It runs over a separate connection, so that metrics and health checks do not wait for it. Raises
        CoordinationLost, and propagates errors from `work`.
        """
        with closing(self._open()) as store:
            try:
                return work(Subscriptions(store))
            finally:
                with self._lock:
                    self._asked_at = self._viewed_at = float("-inf")

    def close(self) -> None:
        """Close the connection to the store."""
        with self._lock:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._asked_at < _FRESH_SECONDS:
            return
        try:
            if self._store is None:
                self._store = self._open()
            # Measure only the duration of this request.
            self._store.list(path_of("subscriptions"))
            self._seconds.observe(time.monotonic() - now)
            self._states = [
                state
                for instance in self.instances
                for state in self._subscription_states(self._store, instance)
            ]
            self._failure = None
        except PenstockError as problem:
            self._errors += 1
            self._failure = problem
        self._asked_at = time.monotonic()

    def _subscription_states(self, store: CoordinationStore, instance: str) -> list[_SubscriptionState]:
        """Return the subscriptions of an instance. An unreadable record does not count as a failure of the
        store.
        """
        subscriptions = Subscriptions(store)
        try:
            return [self._state(store, subscriptions, known) for known in subscriptions.list(instance)]
        except TransientError:
            raise
        except PenstockError as problem:
            self._errors += 1
            _log.warning("subscriptions are missing from the metrics", instance=instance, why=str(problem))
            return []

    def _state(
        self, store: CoordinationStore, subscriptions: Subscriptions, subscription: Subscription
    ) -> _SubscriptionState:
        assignment = store.get(subscription.assignment_path)
        return _SubscriptionState(
            subscription.instance,
            subscription.name,
            len(subscriptions.members(subscription)),
            subscription.shard_count,
            subscription.shard_count - len(subscriptions.held(subscription)),
            0 if assignment is None else assignment.version,
        )


def needed_store(coordination: CoordinationProbe | None) -> CoordinationProbe:
    """Return the coordination store for a call that changes subscriptions. Raises SourceMissing if there is
    none.
    """
    if coordination is None:
        raise SourceMissing("this daemon has no coordination store", hint="Set coordination in penstock.yaml")
    return coordination


def find_subscription(registry: Subscriptions, instance: str, name: str) -> Subscription:
    """Return a subscription. Raises SourceMissing."""
    subscription = registry.get(instance, name)
    if subscription is None:
        raise SourceMissing(f"{instance} has no subscription {name!r}", hint="It may have been deleted")
    return subscription
