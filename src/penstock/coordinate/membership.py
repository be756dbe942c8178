# SPDX-License-Identifier: Apache-2.0
"""A member of a subscription: one running subscriber, which consumes its share of the shards.

Members register under a session. One of them holds the leader's lease, and writes the assignment of shards.
Each member takes its assigned shards once the previous holder has released them or lost its session. One
thread does all of this. Watches wake the thread, which also polls in case a watch was missed.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import structlog

from penstock.coordinate.assignment import Assignment
from penstock.coordinate.checkpoint_writer import CHECKPOINT_SECONDS, CheckpointWriter
from penstock.coordinate.held_shard import (
    DELETED,
    LOST,
    MOVED,
    PAUSED,
    RESET,
    RESIZED,
    SELECTED,
    STOPPING,
    HeldShard,
)
from penstock.coordinate.leadership import Leadership
from penstock.coordinate.lease import Holder, Lease
from penstock.coordinate.store import SESSION_SECONDS, CoordinationStore, Session, Watch, path_of
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import OptionInvalid, PenstockError, TransientError, VersionConflict

# The time that a member has to finish its work on a shard before giving it up.
GRACE_SECONDS = 10.0

# Upper limits for polling intervals; watches wake the thread earlier.
_LOOK_SECONDS_MAX = 5.0
_RETRY_SECONDS = 0.5

_log = structlog.get_logger(__name__)

Gained = Callable[[HeldShard], None]
Given = Callable[[HeldShard, str], None]


class Member:
    """A member of a subscription. As a context manager, it participates inside the block.

    `gained` is called with each acquired shard in the member's thread, and must not block. `lost` is called
    in a thread of its own, with a shard to give up and the reason (see `held_shard`). It must return within
    `grace_seconds`, once the shard is no longer being consumed, and may note checkpoints until then. If its
    session is lost, the member gives up all shards and joins again. It fails permanently if the subscription
    is deleted or another process uses the member's name: see `failure`.
    """

    def __init__(
        self,
        store: CoordinationStore,
        subscription: Subscription,
        name: str,
        gained: Gained,
        lost: Given,
        *,
        session_seconds: float = SESSION_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> None:
        self.name = name
        self._store = store
        self._subscriptions = Subscriptions(store)
        self._subscription = subscription
        self._gained = gained
        self._lost = lost
        self._session_seconds = session_seconds
        self._grace_seconds = grace_seconds
        self._writer = CheckpointWriter(checkpoint_seconds)
        self._session: Session | None = None
        self._leadership: Leadership | None = None
        self._held: dict[int, HeldShard] = {}
        self._leaving: list[HeldShard] = []
        self._watches: dict[str, Watch] = {}
        self._refused_since: float | None = None
        self._resets_seen = subscription.resets
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._failure: PenstockError | None = None
        self._thread = threading.Thread(target=self._run, name=f"member-{name}", daemon=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start taking part in the subscription."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Give up every shard, leave the subscription, and return once that is done, within the grace period.

        Safe to repeat.
        """
        self._stopping.set()
        self._news.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the member has ended; return whether it has. Raises the member's error if it failed."""
        ended = self._ended.wait(seconds)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    @property
    def failure(self) -> PenstockError | None:
        """Why the member failed, None if it is running or was stopped."""
        return self._failure

    @property
    def subscription(self) -> Subscription:
        """The subscription, as last read."""
        return self._subscription

    @property
    def shards(self) -> Mapping[int, HeldShard]:
        """The shards held now, by number."""
        return dict(self._held)

    @property
    def leads(self) -> bool:
        """Whether the member is known to be the leader."""
        return self._leadership is not None and self._leadership.held

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self._failure is None:
                self._news.clear()
                self._news.wait(self._run_step())
        finally:
            self._give_up_all(DELETED if self._failure is not None else STOPPING)
            deadline = time.monotonic() + self._grace_seconds + _RETRY_SECONDS
            for held in self._leaving:
                # If a shard cannot be released in time, the end of the session releases it.
                held.wait_left(max(0.0, deadline - time.monotonic()))
            self._close()
            self._ended.set()

    def _run_step(self) -> float:
        """Do the work that is due; return the maximum number of seconds until the next check."""
        try:
            if self._session is None or not self._session.alive:
                self._join()
            return self._step()
        except TransientError as error:
            _log.warning("a member cannot do its part now", member=self.name, error=str(error))
            self._give_up_lost()
            return _RETRY_SECONDS
        except PenstockError as error:
            _log.error("a member takes part no more", member=self.name, error=str(error))
            self._failure = error
            return 0.0

    def _join(self) -> None:
        """Start a session, and give up everything that was held under the previous session."""
        self._give_up_lost()
        self._leadership = None
        self._refused_since = None
        session = self._store.session(self._session_seconds)
        session.on_lost(self._news.set)
        self._session = session
        subscription = self._subscription
        for path in (subscription.record_path, subscription.members_path, subscription.assignment_path):
            self._watch(path)

    def _step(self) -> float:
        subscription = self._subscriptions.get(self._subscription.instance, self._subscription.name)
        if subscription is None:
            self._failure = OptionInvalid(
                f"subscription {self._subscription.name} was deleted", hint="Start the subscriber again"
            )
            return 0.0
        self._subscription = subscription
        if not self._register():
            return _RETRY_SECONDS
        pause = self._lead()
        assigned: frozenset[int] = frozenset()
        assignment = Assignment.of(self._store.get(subscription.assignment_path))
        is_consumed = subscription.resizing is None and not subscription.paused
        if is_consumed and assignment.generation == subscription.generation:
            assigned = assignment.shards_of(self.name)
        self._give_up_lost()
        self._give_up_unwanted(assigned, reset=self._resets_seen != subscription.resets)
        self._resets_seen = subscription.resets
        return min(pause, self._take_assigned(assigned))

    def _register(self) -> bool:
        """Register this member; return False while another process has its name."""
        assert self._session is not None
        description = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since_us": time.time_ns() // 1000,
        }
        try:
            path = self._subscription.members_path + path_of(self.name)
            self._session.put_ephemeral(path, json.dumps(description).encode())
        except VersionConflict:
            # If the record belongs to a previous process, it is deleted with that process's session. If this
            # process was paused so long that its session may have ended as well, the wait for the other
            # session starts over.
            now = time.monotonic()
            if self._refused_since is None or not self._session.certain:
                self._refused_since = now
            if now - self._refused_since > 2 * self._session.seconds:
                self._failure = OptionInvalid(
                    f"subscription {self._subscription.name} has a member {self.name!r} already",
                    hint="Give each subscriber its own member name",
                )
            return False
        self._refused_since = None
        return True

    def _lead(self) -> float:
        """Become the leader if there is none; return the seconds until the next check."""
        assert self._session is not None
        if self._leadership is None or self._leadership.lost:
            self._leadership = None
            path = self._subscription.leader_path
            self._watch(path)
            lease = self._acquire(path)
            if lease is not None:
                self._leadership = Leadership(self._store, lease, self._grace_seconds)
                self._unwatch(path)
        if self._leadership is None:
            return min(_LOOK_SECONDS_MAX, self._session.seconds)
        return self._leadership.lead(self._subscription)

    # --- Taking and giving up shards --------------------------------------------------------

    def _take_assigned(self, assigned: frozenset[int]) -> float:
        """Take the assigned shards that nobody holds; return the seconds until the next check."""
        assert self._session is not None
        self._leaving = [held for held in self._leaving if not held.left]
        leaving = {held.shard for held in self._leaving}
        if not self._session.certain or self._stopping.is_set():
            return _RETRY_SECONDS
        pause = min(_LOOK_SECONDS_MAX, self._session.seconds)
        lease_paths = {self._subscription.lease_path(shard) for shard in assigned - self._held.keys()}
        for path in [path for path in self._watches if path.endswith("/lease") and path not in lease_paths]:
            self._unwatch(path)
        for shard in sorted(assigned - self._held.keys()):
            # If this member is still releasing a shard, the release wakes this thread again.
            if shard not in leaving:
                self._take_shard(shard)
        return pause

    def _acquire(self, path: str) -> Lease | None:
        """Acquire a lease that nobody holds, or that this member holds without knowing because a response was
        lost.
        """
        assert self._session is not None
        holder = Holder.of(self._store.get(path))
        if holder is not None and holder.name != self.name:
            return None
        return Lease.acquire(self._store, self._session, path, self.name)

    def _take_shard(self, shard: int) -> None:
        subscription = self._subscription
        path = subscription.lease_path(shard)
        self._watch(path)
        lease = self._acquire(path)
        if lease is None:
            return
        self._unwatch(path)
        checkpoints = subscription.checkpoints(self._store)
        try:
            state = checkpoints.take(shard, lease.token, subscription.revision)
            current = self._subscriptions.get(subscription.instance, subscription.name)
        except PenstockError as error:
            _log.warning("a shard is not taken", member=self.name, shard=shard, error=str(error))
            lease.release()
            return
        # If the generation was deleted in the meantime, its checkpoints were created again, and must not be
        # consumed.
        if current is None or not _same_shards(current, subscription):
            lease.release()
            if current is None:
                self._subscriptions.delete_generation(subscription, subscription.generation)
            self._news.set()
            return
        writing = self._writer.open(checkpoints, shard, lease.token, lambda error: self._news.set())
        held = HeldShard(subscription, shard, lease, state, writing)
        _log.info("a shard is taken", member=self.name, shard=shard, token=lease.token)
        self._gained(held)
        self._held[shard] = held

    def _give_up_lost(self) -> None:
        for held in [held for held in self._held.values() if held.is_lost]:
            self._give_up(held, LOST)

    def _give_up_unwanted(self, assigned: frozenset[int], reset: bool) -> None:
        subscription = self._subscription
        checkpoints = subscription.checkpoints(self._store)
        for shard, held in tuple(self._held.items()):
            if subscription.resizing is not None or held.subscription.generation != subscription.generation:
                self._give_up(held, RESIZED)
            elif held.subscription.revision != subscription.revision:
                self._give_up(held, SELECTED)
            elif shard not in assigned:
                self._give_up(held, PAUSED if subscription.paused else MOVED)
            elif reset and checkpoints.state(shard).fence >= held.token:
                self._give_up(held, RESET)

    def _give_up_all(self, why: str) -> None:
        for held in tuple(self._held.values()):
            self._give_up(held, why)

    def _give_up(self, held: HeldShard, why: str) -> None:
        _log.info("a shard is given up", member=self.name, shard=held.shard, token=held.token, why=why)
        del self._held[held.shard]
        self._leaving.append(held)
        held.leave(why, self._lost, self._grace_seconds, self._news.set)

    def _watch(self, path: str) -> None:
        if path not in self._watches:
            self._watches[path] = self._store.watch(path, self._news.set)

    def _unwatch(self, path: str) -> None:
        watch = self._watches.pop(path, None)
        if watch is not None:
            watch.close()

    def _close(self) -> None:
        for path in tuple(self._watches):
            self._unwatch(path)
        self._writer.close()
        if self._session is not None:
            self._session.close()


def _same_shards(current: Subscription, subscription: Subscription) -> bool:
    """Return whether a subscription, after being read again, still allows the same shards to be taken."""
    return (
        (current.generation, current.revision) == (subscription.generation, subscription.revision)
        and current.resizing is None
        and not current.paused
    )
