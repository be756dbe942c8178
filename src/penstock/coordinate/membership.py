# SPDX-License-Identifier: Apache-2.0
"""A member of a subscription: one running subscriber, which takes its part of the shards.

Members show themselves under a session. One of them, by a lease, is the leader and writes which member is
to have which shard; each takes what it is to have once the member before has given it back, or that one's
session has ended. One thread does it all, woken by watches, and looks again every now and then in case one
was missed.
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
from penstock.coordinate.held_shard import DELETED, LOST, MOVED, RESET, RESIZED, STOPPING, HeldShard
from penstock.coordinate.leadership import Leadership
from penstock.coordinate.lease import Holder, Lease
from penstock.coordinate.store import SESSION_SECONDS, CoordinationStore, Session, Watch, path_of
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.errors import OptionInvalid, PenstockError, TransientError, VersionConflict

# A member that is to give up a shard has so long to finish what it is at.
GRACE_SECONDS = 10.0

# Nothing rests on these: watches wake the thread sooner.
_LOOK_SECONDS_MAX = 5.0
_RETRY_SECONDS = 0.5

_log = structlog.get_logger(__name__)

Gained = Callable[[HeldShard], None]
Given = Callable[[HeldShard, str], None]


class Member:
    """Takes part in a subscription; as a context manager it does so inside the block.

    `gained` is called with each shard that was taken, in the member's thread, and must not block. `lost` is
    called with a shard that is given up and why (the words of `held_shard`), in a thread of its own; it
    returns when nothing of the shard is being consumed any more. It has `grace_seconds`, and may note
    checkpoints until it returns.

    When its session is lost the member gives up everything and joins again. It fails for good where the
    subscription was deleted or another process has its name: see `failure`.
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
        """Begin to take part."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Give up every shard, leave, and return once that is done; bounded by the grace. Again is fine."""
        self._stopping.set()
        self._news.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it has ended; tell whether it has. Raises what it failed with, once it has."""
        ended = self._ended.wait(seconds)
        if ended and self._failure is not None:
            raise self._failure
        return ended

    @property
    def failure(self) -> PenstockError | None:
        """Why it takes part no more; None where it does, or was stopped."""
        return self._failure

    @property
    def subscription(self) -> Subscription:
        """The subscription, as it was last read."""
        return self._subscription

    @property
    def shards(self) -> Mapping[int, HeldShard]:
        """What it holds now, by number."""
        return dict(self._held)

    @property
    def leads(self) -> bool:
        """Whether it is the leader, as far as can be known now."""
        return self._leadership is not None and self._leadership.held

    # --- The thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self._failure is None:
                self._news.clear()
                self._news.wait(self._look())
        finally:
            self._give_up_all(DELETED if self._failure is not None else STOPPING)
            deadline = time.monotonic() + self._grace_seconds + _RETRY_SECONDS
            for held in self._leaving:
                # What cannot be given back in time goes with the session.
                held.wait_left(max(0.0, deadline - time.monotonic()))
            self._close()
            self._ended.set()

    def _look(self) -> float:
        """See what is to be done and do it; return after how long to look again at the latest."""
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
        """Begin a session; what was held under the last one is given up."""
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
        found = self._subscriptions.get(self._subscription.instance, self._subscription.name)
        if found is None:
            self._failure = OptionInvalid(
                f"subscription {self._subscription.name} was deleted", hint="Start the subscriber again"
            )
            return 0.0
        self._subscription = found
        if not self._show():
            return _RETRY_SECONDS
        look = self._lead()
        wanted: frozenset[int] = frozenset()
        assignment = Assignment.of(self._store.get(found.assignment_path))
        if found.resizing is None and assignment.generation == found.generation:
            wanted = assignment.shards_of(self.name)
        self._give_up_lost()
        self._give_up_unwanted(wanted, reset=self._resets_seen != found.resets)
        self._resets_seen = found.resets
        return min(look, self._take(wanted))

    def _show(self) -> bool:
        """Show that we are there; False as long as another process has our name."""
        assert self._session is not None
        about = {"host": socket.gethostname(), "process": os.getpid(), "since_us": time.time_ns() // 1000}
        try:
            path = self._subscription.members_path + path_of(self.name)
            self._session.put_ephemeral(path, json.dumps(about).encode())
        except VersionConflict:
            # It may be what a process before us left behind; then it goes when that one's session ends. Where
            # everything stood still for so long that ours may have ended too, that one's time begins anew.
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
        """Lead where nobody does; return after how long to look again."""
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

    # --- Taking and giving up ---------------------------------------------------------------

    def _take(self, wanted: frozenset[int]) -> float:
        """Take what we are to have and nobody holds; return after how long to look again."""
        assert self._session is not None
        self._leaving = [held for held in self._leaving if not held.left]
        leaving = {held.shard for held in self._leaving}
        if not self._session.certain or self._stopping.is_set():
            return _RETRY_SECONDS
        look = min(_LOOK_SECONDS_MAX, self._session.seconds)
        lease_paths = {self._subscription.lease_path(shard) for shard in wanted - self._held.keys()}
        for path in [path for path in self._watches if path.endswith("/lease") and path not in lease_paths]:
            self._unwatch(path)
        for shard in sorted(wanted - self._held.keys()):
            # What we are giving back ourselves wakes us when it is done.
            if shard not in leaving:
                self._take_shard(shard)
        return look

    def _acquire(self, path: str) -> Lease | None:
        """Take a lease that nobody holds, or that we hold without knowing, since an answer was lost."""
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
            state = checkpoints.take(shard, lease.token)
            found = self._subscriptions.get(subscription.instance, subscription.name)
        except PenstockError as error:
            _log.warning("a shard is not taken", member=self.name, shard=shard, error=str(error))
            lease.release()
            return
        # The checkpoints of a generation that was deleted begin anew, and must not be consumed.
        if found is None or found.generation != subscription.generation or found.resizing is not None:
            lease.release()
            if found is None:
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

    def _give_up_unwanted(self, wanted: frozenset[int], reset: bool) -> None:
        subscription = self._subscription
        checkpoints = subscription.checkpoints(self._store)
        for shard, held in tuple(self._held.items()):
            if subscription.resizing is not None or held.subscription.generation != subscription.generation:
                self._give_up(held, RESIZED)
            elif shard not in wanted:
                self._give_up(held, MOVED)
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
