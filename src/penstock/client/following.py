# SPDX-License-Identifier: Apache-2.0
"""A running member of a subscription. It obtains its shards from the coordination store, and their rows from
daemons or a server.
"""

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog

from penstock.client.daemons import EARLIEST, LATEST, Start
from penstock.client.deliveries import ERRORS, ROWS, Deliveries
from penstock.client.flow import Place, Step
from penstock.client.intake import Intake
from penstock.client.options import SubscriberOptions
from penstock.client.owned import OwnedShard, OwnedShards
from penstock.client.publishers import Publishers, open_publishers
from penstock.client.supply import Taker
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.held_shard import LOST, HeldShard
from penstock.coordinate.lease import Lease
from penstock.coordinate.member_statistics import MemberStatistics
from penstock.coordinate.membership import Member
from penstock.coordinate.store import CoordinationStore, Session, open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import CoordinationLost, LeaseLost, PenstockError, TransientError
from penstock.model import Position
from penstock.retry import Retry

# Members that start at the same time register one after another; each takes a few round trips.
_START_SECONDS_MAX = 60.0
_LOOK_SECONDS = 0.05

# The polling interval for a daemon with an empty log.
_EMPTY_SECONDS = 0.2

# How often a member records its statistics while they change.
_STATISTICS_SECONDS = 10.0

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class FollowingStatus:
    """The status of a member.

    `behind_bytes` is the size of the part of the log that has not been received, None until it is known.
    `shards` maps each shard of this member to the position before which everything has been consumed.
    `consumed_us` maps each shard to the commit time of the last transaction before that position, in
    microseconds UTC since 1970, 0 if unknown. `is_consumed` is true if the whole log has been consumed.
    """

    member: str
    daemon: str | None
    behind_bytes: int | None
    shards: Mapping[int, Position]
    consumed_us: Mapping[int, int]
    is_consumed: bool

    @property
    def lag_seconds(self) -> float | None:
        """The age of the last consumed commit in the shard that is furthest behind; None if unknown."""
        if self.is_consumed:
            return 0.0
        times = [self.consumed_us.get(shard, 0) for shard in self.shards]
        return max(0.0, time.time() - min(times) / 1e6) if times and all(times) else None


class Following:
    """See `penstock.client.supply.Supply`."""

    def __init__(self, options: SubscriberOptions) -> None:
        self._options = options
        self._owned = OwnedShards()
        self._deliveries = Deliveries()
        self._held: dict[HeldShard, OwnedShard] = {}
        self._store: CoordinationStore | None = None
        self._publishers: Publishers | None = None
        self._member: Member | None = None
        self._intake: Intake | None = None
        self._taker: Taker | None = None
        self._held_lock = threading.Lock()
        self._stop_lock = threading.Lock()
        self._stopping = threading.Event()
        self._log_is_empty = False

    def shards(self) -> Mapping[int, OwnedShard]:
        """Return the shards that this member has now."""
        return self._owned.all()

    def status(self) -> FollowingStatus:
        """Return the status of this member."""
        intake = self._intake
        behind_bytes = None if intake is None else intake.behind_bytes
        places = {number: (shard.done, shard.read) for number, shard in self.shards().items()}
        return FollowingStatus(
            self._options.member,
            None if intake is None else intake.url,
            behind_bytes,
            {number: done.position for number, (done, _) in places.items()},
            {number: done.time_us for number, (done, _) in places.items()},
            behind_bytes == 0 and all(done == read for done, read in places.values()),
        )

    def start(self, taker: Taker) -> None:
        """Join the subscription and start reading, or return early if `stop` is called.

        Waits for an unavailable store or daemon, like a running member. Raises OptionInvalid if another
        subscription has the name, PositionPurged if no log contains the start.
        """
        options = self._options
        self._taker = taker
        self._publishers = open_publishers(options.address, options.instance)
        try:
            self._store = self._until_answered(partial(open_store, options.coordination))
            self._join(self._store, self._publishers)
        except BaseException as problem:
            # A start that `stop` interrupted has not failed.
            was_stopped = self._stopping.is_set() and isinstance(problem, TransientError)
            self.stop()
            if not was_stopped:
                raise
            _log.info("stopped while it started", member=self._options.member, why=str(problem))

    def stop(self) -> None:
        """Release every shard, write checkpoints, and end."""
        self._stopping.set()
        with self._stop_lock:
            if self._intake is not None:
                self._intake.end()
            if self._member is not None:
                # Release the shards first: other members are waiting for them, while nothing waits for the
                # reader.
                self._member.stop()
            if self._intake is not None:
                self._intake.join()
            if self._publishers is not None:
                self._publishers.close()
            if self._store is not None:
                self._store.close()

    # --- Joining ----------------------------------------------------------------------------

    def _join(self, store: CoordinationStore, publishers: Publishers) -> None:
        options = self._options
        registry = Subscriptions(store)
        subscription = self._until_answered(lambda: registry.create(self._requested_subscription(registry)))
        self._wait_for_log(publishers)
        with closing(self._until_answered(store.session)) as session:
            start_lease = self._acquire_start_lease(store, session, subscription)
            self._set_start(registry, subscription, publishers)
            self._intake = Intake(
                publishers,
                self._owned,
                options.request(),
                zlib.crc32(options.member.encode()),
                self._failed,
            )
            self._member = Member(
                store,
                subscription,
                options.member,
                self._gained,
                self._lost,
                session_seconds=options.session_seconds,
                checkpoint_seconds=options.checkpoint_seconds,
            )
            self._intake.start()
            self._member.start()
            threading.Thread(
                target=self._watch_member, args=(self._member,), name="penstock-member", daemon=True
            ).start()
            threading.Thread(
                target=self._record, args=(registry, subscription), name="penstock-statistics", daemon=True
            ).start()
            self._wait_registered(registry, subscription, self._member)
            start_lease.release()

    def _wait_for_log(self, publishers: Publishers) -> None:
        """Wait until a daemon has the first bytes of its log. For an empty log, `latest` means its
        beginning.
        """
        while not self._until_answered(publishers.have_something):
            if not self._log_is_empty:
                _log.info("waiting for the first change", source=str(self._options.address))
            self._log_is_empty = True
            if self._stopping.wait(_EMPTY_SECONDS):
                return

    def _until_answered(self, request: Callable[[], _Answer]) -> _Answer:
        """Retry until there is an answer, with exponential backoff. Raises a TransientError once stopped."""
        return Retry("asking again", stop=self._stopping).run(request)

    def _requested_subscription(self, registry: Subscriptions) -> Subscription:
        options = self._options
        count = options.shards
        if count is None:
            existing = registry.get(options.instance, options.name)
            count = 1 if existing is None else existing.shard_count
        return Subscription(
            options.instance,
            options.name,
            options.tables,
            options.exclude,
            count,
            dict(options.shard_columns),
        )

    def _acquire_start_lease(
        self, store: CoordinationStore, session: Session, subscription: Subscription
    ) -> Lease:
        """Wait for the exclusive right to set the subscription's start."""
        deadline = time.monotonic() + _START_SECONDS_MAX
        path = f"{subscription.path}/start"
        while (lease := Lease.acquire(store, session, path, self._options.member)) is None:
            if time.monotonic() > deadline:
                raise CoordinationLost(
                    f"another member of {subscription.name} has been starting for {_START_SECONDS_MAX:g} s",
                    hint="See who: penstock subscriptions show",
                )
            time.sleep(_LOOK_SECONDS)
        return lease

    def _set_start(self, registry: Subscriptions, subscription: Subscription, publishers: Publishers) -> None:
        """Set a checkpoint for each shard that has none, or for all shards, before any member takes them.

        All shards start at the same place, so that a shard taken later misses nothing.
        """
        options = self._options
        states = registry.shards(subscription)
        if options.start is not None:
            members = registry.members(subscription)
            if not members:
                registry.reset(
                    subscription.instance, subscription.name, self._place(publishers, options.start)
                )
                return
            _log.warning(
                "the start is not applied, as others are at work: reading goes on from the checkpoint",
                start=str(options.start),
                members=list(members),
            )
        missing = [view.shard for view in states if view.state.checkpoint is None]
        if missing:
            checkpoint = self._place(publishers, options.begin)
            everything = len(missing) == len(states)
            for shard in [None] if everything else missing:
                registry.reset(subscription.instance, subscription.name, checkpoint, shard)

    def _place(self, publishers: Publishers, start: Start) -> Checkpoint:
        if self._log_is_empty and start.end == LATEST:
            start = Start(end=EARLIEST)
        place = self._until_answered(lambda: publishers.locate_start(start))
        _log.info("the subscription starts", name=self._options.name, position=str(place.position))
        return _checkpoint_of(place)

    def _wait_registered(self, registry: Subscriptions, subscription: Subscription, member: Member) -> None:
        """Wait until other members that are starting can see this member."""
        deadline = time.monotonic() + _START_SECONDS_MAX
        while member.name not in registry.members(subscription):
            if member.failure is not None:
                raise member.failure
            if time.monotonic() > deadline:
                raise CoordinationLost(
                    f"the store does not show member {member.name}", hint="Is the coordination store up?"
                )
            time.sleep(_LOOK_SECONDS)

    # --- Shards -----------------------------------------------------------------------------

    def _gained(self, held: HeldShard) -> None:
        if held.checkpoint is not None:
            self._begin(held, held.checkpoint)
        else:
            # The checkpoint was reset while this member was running. Another thread asks the daemons, because
            # that may take time.
            threading.Thread(
                target=self._find_begin, args=(held,), name="penstock-begin", daemon=True
            ).start()

    def _find_begin(self, held: HeldShard) -> None:
        assert self._publishers is not None
        retry = Retry("no daemon says where to begin", stop=self._stopping)
        while held.leaving is None and not self._stopping.is_set():
            try:
                checkpoint = self._place(self._publishers, self._options.begin)
            except TransientError as problem:
                retry.wait(problem, shard=held.shard)
            except PenstockError as problem:
                self._failed(problem)
                return
            else:
                try:
                    # Store the place, so that the next holder starts from it even if nothing is acked until
                    # then.
                    held.note(checkpoint)
                except LeaseLost:
                    return
                self._begin(held, checkpoint)
                return

    def _begin(self, held: HeldShard, checkpoint: Checkpoint) -> None:
        assert self._taker is not None
        assert self._intake is not None
        shard = OwnedShard(
            held.shard,
            held.token,
            _place_of(checkpoint),
            lambda place: held.note_later(partial(_checkpoint_of, place)),
            held.floors,
            lambda: held.held,
            count=held.subscription.shard_count,
            revision=(held.subscription.generation, held.subscription.revision),
            selection=held.subscription.selection,
            shard_columns=held.subscription.shard_columns,
            stored=lambda: _place_of(held.written or checkpoint),
            deliveries=self._deliveries,
        )
        with self._held_lock:
            if held.leaving is not None:
                return
            self._held[held] = shard
            self._taker.gained(shard)
            self._owned.gain(shard)
        self._intake.turn()

    def _lost(self, held: HeldShard, why: str) -> None:
        """Return once nobody works on the shard any more, so that another member may take it."""
        assert self._taker is not None
        with self._held_lock:
            shard = self._held.pop(held, None)
        if shard is None:
            # The shard was released before its start was known.
            return
        self._owned.leave(shard)
        if why == LOST:
            shard.lose()
        if self._intake is not None:
            self._intake.turn()
        self._taker.lost(shard)
        shard.lose()

    # --- Statistics -------------------------------------------------------------------------

    def _record(self, registry: Subscriptions, subscription: Subscription) -> None:
        """Record this member's statistics whenever they change, until the member stops."""
        recorded, measured_at = MemberStatistics(), time.monotonic()
        is_first = True
        while not self._stopping.wait(_STATISTICS_SECONDS):
            status, counts, now = self.status(), self._deliveries.counts(), time.monotonic()
            statistics = MemberStatistics(
                counts[ROWS],
                (counts[ROWS] - recorded.rows) / (now - measured_at),
                counts[ERRORS],
                counts[Step.RETRY.value],
                counts[Step.SKIP.value],
                status.behind_bytes,
                status.lag_seconds,
            )
            measured_at = now
            if statistics == replace(recorded, updated_us=0):
                continue
            recorded = replace(statistics, updated_us=time.time_ns() // 1000)
            try:
                if is_first:
                    registry.forget_statistics(subscription)
                registry.record_statistics(subscription, self._options.member, recorded)
                is_first = False
            except PenstockError as problem:
                _log.debug("statistics are not recorded", member=self._options.member, why=str(problem))

    # --- The end ----------------------------------------------------------------------------

    def _watch_member(self, member: Member) -> None:
        try:
            member.wait()
        except PenstockError as problem:
            self._failed(problem)

    def _failed(self, problem: BaseException) -> None:
        assert self._taker is not None
        self._taker.ended(problem)


def _place_of(checkpoint: Checkpoint) -> Place:
    return Place(
        Position.parse(checkpoint.position),
        checkpoint.gtid_set,
        checkpoint.server_key,
        checkpoint.time_us,
        checkpoint.fingerprint,
    )


def _checkpoint_of(place: Place) -> Checkpoint:
    return Checkpoint.now(
        str(place.position), place.gtid_set, place.server_key, place.time_us, place.fingerprint
    )
