# SPDX-License-Identifier: Apache-2.0
"""A shard held by this process, from acquiring the lease to releasing it."""

import threading
import time
from collections.abc import Callable
from functools import partial

import structlog

from penstock.coordinate.checkpoint import Checkpoint, ShardState
from penstock.coordinate.checkpoint_writer import ShardCheckpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.subscription_record import Subscription
from penstock.errors import LeaseLost, PenstockError
from penstock.retry import Backoff, Retry

# The reasons why a shard is given up.
MOVED = "moved"
RESET = "reset"
RESIZED = "resized"
SELECTED = "the selection has changed"
PAUSED = "paused"
DELETED = "deleted"
STOPPING = "stopping"
LOST = "lost"

_BACKOFF = Backoff(longest=1.0)

_log = structlog.get_logger(__name__)


class HeldShard:
    """A shard that this process has taken.

    The consumer starts at `checkpoint` and skips rows below `floors`. `token` increases with each new holder
    of the shard, so a sink can use it as a fencing token.
    """

    def __init__(
        self,
        subscription: Subscription,
        shard: int,
        lease: Lease,
        state: ShardState,
        writing: ShardCheckpoint,
    ) -> None:
        self.subscription = subscription
        self.shard = shard
        self.token = lease.token
        self.checkpoint = state.checkpoint
        self.floors = state.floors
        self._lease = lease
        self._writing = writing
        self._leaving: str | None = None
        self._over = threading.Event()
        self._left = threading.Event()

    @property
    def held(self) -> bool:
        """Whether this member is known to have the shard.

        While the store does not confirm the session, this is false, and nothing new may be delivered.
        Afterwards it becomes true again, or the shard is given up.
        """
        return self._lease.held and self._writing.lost is None and not self._over.is_set()

    @property
    def leaving(self) -> str | None:
        """Why the shard is being given up, else None.

        Once it is set, start no new work, and finish the work in progress.
        """
        return self._leaving

    @property
    def written(self) -> Checkpoint | None:
        """The newest checkpoint that this holder has written to the store."""
        return self._writing.written

    def note(self, checkpoint: Checkpoint) -> None:
        """Schedule a checkpoint write.

        Raises LeaseLost once another member has the shard.
        """
        self._writing.note(checkpoint)

    def note_later(self, make: Callable[[], Checkpoint]) -> None:
        """Like `note`, for a checkpoint that is made when it is written."""
        self._writing.note_later(make)

    def flush(self, seconds: float) -> bool:
        """Write the noted checkpoint now; return whether it was written in time. Raises LeaseLost."""
        return self._writing.flush(seconds)

    def __repr__(self) -> str:
        return f"HeldShard({self.subscription.path!r}, {self.shard}, token={self.token}, held={self.held})"

    # --- For the member ---------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether the shard has been released, so that any member may take it."""
        return self._left.is_set()

    @property
    def is_lost(self) -> bool:
        """Whether the shard was permanently lost before this member gave it up."""
        return self._lease.lost or self._writing.lost is not None

    def wait_left(self, seconds: float) -> bool:
        """Wait up to `seconds` for the shard's release; return whether it has been released."""
        return self._left.wait(seconds)

    def leave(
        self, why: str, lost: Callable[["HeldShard", str], None], grace: float, left: Callable[[], None]
    ) -> None:
        """Let the consumer finish, then release the shard and call `left`, in separate threads.

        `lost` returns when the consumer has finished. After `grace` seconds the shard is released anyway, and
        later checkpoints are rejected.
        """
        assert self._leaving is None
        self._leaving = why
        deadline = time.monotonic() + grace
        for step in (
            partial(self._end_consumer, why, lost, deadline),
            partial(self._release, deadline, left),
        ):
            threading.Thread(target=step, name=f"leave-shard-{self.shard}", daemon=True).start()

    def _end_consumer(self, why: str, lost: Callable[["HeldShard", str], None], deadline: float) -> None:
        try:
            lost(self, why)
            if not self._writing.flush(max(0.0, deadline - time.monotonic())):
                _log.warning("the last checkpoint of a shard was not written in time", shard=self.shard)
        except LeaseLost as error:
            _log.info("the last checkpoint of a shard was not written", shard=self.shard, error=str(error))
        finally:
            self._over.set()

    def _release(self, deadline: float, left: Callable[[], None]) -> None:
        """Release the lease once the consumer has finished, or its grace period is over."""
        if not self._over.wait(max(0.0, deadline - time.monotonic())):
            _log.warning("a shard is given back before its consumer has ended", shard=self.shard)
            self._over.set()
        self._writing.close()
        # While the session is alive, nobody else can take the shard, so retry until the session ends.
        retry = Retry("a shard cannot be given back yet", backoff=_BACKOFF)
        while not self._lease.expired:
            try:
                self._lease.release()
                break
            except PenstockError as problem:
                retry.wait(problem, shard=self.shard)
        self._left.set()
        left()
