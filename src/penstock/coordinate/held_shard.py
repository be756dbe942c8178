# SPDX-License-Identifier: Apache-2.0
"""A shard that this process holds: from the lease taken to the lease given back."""

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

# Why a shard is given up.
MOVED = "moved"
RESET = "reset"
RESIZED = "resized"
DELETED = "deleted"
STOPPING = "stopping"
LOST = "lost"

_RETRY_SECONDS = 0.5

_log = structlog.get_logger(__name__)


class HeldShard:
    """A shard that was taken. The consumer begins at `checkpoint` and leaves out what is below `floors`.

    `token` rises with each holder of the shard, and may be given to a sink that wants to fence as well.
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
        """Whether it is ours as far as can be known now.

        False as long as the store does not confirm our session: deliver nothing new meanwhile. It becomes
        True again, or the shard is given up.
        """
        return self._lease.held and self._writing.lost is None and not self._over.is_set()

    @property
    def leaving(self) -> str | None:
        """Why it is being given up, None where it is not: begin nothing new, and end what was begun."""
        return self._leaving

    @property
    def written(self) -> Checkpoint | None:
        """The newest checkpoint that this holder has in the store."""
        return self._writing.written

    def note(self, checkpoint: Checkpoint) -> None:
        """Have a checkpoint written within the writer's time.

        Raises LeaseLost once the shard is another's.
        """
        self._writing.note(checkpoint)

    def flush(self, seconds: float) -> bool:
        """Have what was noted written now; tell whether it was within the time. Raises LeaseLost."""
        return self._writing.flush(seconds)

    def __repr__(self) -> str:
        return f"HeldShard({self.subscription.path!r}, {self.shard}, token={self.token}, held={self.held})"

    # --- For the member ---------------------------------------------------------------------

    @property
    def left(self) -> bool:
        """Whether it was given back, so that anybody may take it."""
        return self._left.is_set()

    @property
    def is_lost(self) -> bool:
        """Whether it is gone for good without having been given up."""
        return self._lease.lost or self._writing.lost is not None

    def wait_left(self, seconds: float) -> bool:
        """Wait until it was given back, at most so long; tell whether it was."""
        return self._left.wait(seconds)

    def leave(
        self, why: str, lost: Callable[["HeldShard", str], None], grace: float, left: Callable[[], None]
    ) -> None:
        """Have the consumer end it, then give it back, in threads of its own, and call `left`.

        `lost` returns when the consumer has ended. After `grace` seconds the shard is given back all the
        same, and what is noted then is refused.
        """
        assert self._leaving is None
        self._leaving = why
        deadline = time.monotonic() + grace
        for step in (partial(self._end, why, lost, deadline), partial(self._give_back, deadline, left)):
            threading.Thread(target=step, name=f"leave-shard-{self.shard}", daemon=True).start()

    def _end(self, why: str, lost: Callable[["HeldShard", str], None], deadline: float) -> None:
        try:
            lost(self, why)
            if not self._writing.flush(max(0.0, deadline - time.monotonic())):
                _log.warning("the last checkpoint of a shard was not written in time", shard=self.shard)
        except LeaseLost as error:
            _log.info("the last checkpoint of a shard was not written", shard=self.shard, error=str(error))
        finally:
            self._over.set()

    def _give_back(self, deadline: float, left: Callable[[], None]) -> None:
        """Give the lease back once the consumer has ended, or its time is over."""
        if not self._over.wait(max(0.0, deadline - time.monotonic())):
            _log.warning("a shard is given back before its consumer has ended", shard=self.shard)
            self._over.set()
        self._writing.close()
        while not self._lease.expired:
            try:
                self._lease.release()
                break
            except PenstockError as error:
                # As long as its session lives nobody else can have the shard, so this is tried until it ends.
                _log.warning("a shard cannot be given back yet", shard=self.shard, error=str(error))
                time.sleep(_RETRY_SECONDS)
        self._left.set()
        left()
