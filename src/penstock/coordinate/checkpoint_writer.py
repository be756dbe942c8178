# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints asynchronously, with a bounded delay.

One thread serves all shards of a process. For each shard, the thread writes the newest noted checkpoint once
the previous write is old enough. A store therefore sees about one write per second and shard, regardless of
the consumer's speed. After a crash, a consumer repeats at most the work since the last write.
"""

import threading
import time
from collections.abc import Callable

import structlog

from penstock.closing import Closing
from penstock.coordinate.checkpoint import Checkpoint, Checkpoints
from penstock.errors import LeaseLost, PenstockError

# The maximum age of the stored checkpoint while the store answers.
CHECKPOINT_SECONDS = 1.0

# The retry interval for a store that does not answer.
_RETRY_SECONDS = 0.5

_log = structlog.get_logger(__name__)


class ShardCheckpoint:
    """The checkpoint of one shard under one token, including a pending write.

    Create it with `CheckpointWriter.open`.
    """

    def __init__(
        self,
        writer: "CheckpointWriter",
        checkpoints: Checkpoints,
        shard: int,
        token: int,
        on_lost: Callable[[PenstockError], None] | None,
    ) -> None:
        self._writer = writer
        self._checkpoints = checkpoints
        self._on_lost = on_lost
        # Returns the checkpoint that is written next.
        self._noted: Callable[[], Checkpoint] | None = None
        self._writing = False
        self._written: Checkpoint | None = None
        self._due = 0.0
        self._closed = False
        self.shard = shard
        self.token = token
        # Why checkpoints are no longer written, None while the shard is held.
        self.lost: PenstockError | None = None

    @property
    def written(self) -> Checkpoint | None:
        """The newest checkpoint written by this writer."""
        return self._written

    def note(self, checkpoint: Checkpoint) -> None:
        """Schedule a write of this checkpoint, replacing an unwritten one.

        Returns at once. Raises LeaseLost once the shard is lost.
        """
        self.note_later(lambda: checkpoint)

    def note_later(self, make: Callable[[], Checkpoint]) -> None:
        """Like `note`, for a checkpoint that is made when it is written. Most are replaced before that."""
        with self._writer.news:
            self._check()
            waits = self._noted is not None
            self._noted = make
            if not waits:
                # A pending write already has a due time. Waking the thread for each checkpoint would be too
                # expensive.
                self._writer.news.notify_all()

    def flush(self, seconds: float) -> bool:
        """Write the noted checkpoint now and wait up to `seconds` for the write; return whether it completed.

        Raises LeaseLost.
        """
        with self._writer.news:
            self._due = 0.0
            self._writer.news.notify_all()
            self._writer.news.wait_for(lambda: self._is_idle or self.lost is not None, seconds)
            self._check()
            return self._is_idle

    def close(self) -> None:
        """Stop writing, without waiting for a write in progress. Closing again does nothing."""
        with self._writer.news:
            self._closed = True
            self._noted = None
            self._writer.forget(self)

    # --- For the writer's thread, which holds `news` ----------------------------------------

    @property
    def due(self) -> float | None:
        """When the next write is due, by the monotonic clock; None if nothing is pending."""
        return None if self._noted is None or self.lost is not None else self._due

    def begin(self) -> Checkpoint:
        """Return the pending checkpoint and mark it as being written."""
        assert self._noted is not None
        make, self._noted, self._writing = self._noted, None, True
        return make()

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the checkpoint to the store, without holding `news`."""
        self._checkpoints.write(self.shard, self.token, checkpoint)

    def end(self, checkpoint: Checkpoint, error: PenstockError | None, staleness: float) -> None:
        """Record the outcome of a write.

        A failed checkpoint becomes pending again unless there is a newer one.
        """
        self._writing = False
        if error is None:
            self._written = checkpoint
            self._due = time.monotonic() + staleness
        elif isinstance(error, LeaseLost):
            self.lost = error
        else:
            if self._noted is None and not self._closed:
                self._noted = lambda: checkpoint
            self._due = time.monotonic() + _RETRY_SECONDS

    def tell(self) -> None:
        """Notify the consumer that its shard is lost."""
        if self.lost is not None and self._on_lost is not None:
            self._on_lost(self.lost)

    @property
    def _is_idle(self) -> bool:
        return self._noted is None and not self._writing

    def _check(self) -> None:
        if self.lost is not None:
            raise LeaseLost(self.lost.message, position=self.lost.position)
        if self._closed:
            raise LeaseLost("the shard was given back", position=f"shard {self.shard}")


class CheckpointWriter(Closing):
    """A thread that writes checkpoints. As a context manager, it runs the thread inside the block.

    `seconds` limits the age of the stored checkpoint. If the store is unavailable, the error is logged and
    the newest checkpoint is retried. LeaseLost ends the shard, and the thread calls the shard's `on_lost`.
    """

    def __init__(self, seconds: float = CHECKPOINT_SECONDS) -> None:
        self._seconds = seconds
        self._shards: list[ShardCheckpoint] = []
        self._closed = False
        self.news = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self._thread.start()

    def open(
        self,
        checkpoints: Checkpoints,
        shard: int,
        token: int,
        on_lost: Callable[[PenstockError], None] | None = None,
    ) -> ShardCheckpoint:
        """Start writing the checkpoints of a shard that is held under a fencing token.

        `on_lost` must not block.
        """
        with self.news:
            opened = ShardCheckpoint(self, checkpoints, shard, token, on_lost)
            self._shards.append(opened)
            return opened

    def forget(self, shard: ShardCheckpoint) -> None:
        """Stop serving a shard; the caller holds `news`."""
        if shard in self._shards:
            self._shards.remove(shard)
        self.news.notify_all()

    def close(self, seconds: float = CHECKPOINT_SECONDS) -> None:
        """Write the pending checkpoints, for up to `seconds`, and stop."""
        deadline = time.monotonic() + seconds
        for shard in tuple(self._shards):
            try:
                shard.flush(max(0.0, deadline - time.monotonic()))
            except LeaseLost:
                _log.info("a checkpoint was not written: its shard is lost", shard=shard.shard)
        with self.news:
            self._closed = True
            self.news.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self.news:
                shard = self._next()
                if shard is None:
                    return
                checkpoint = shard.begin()
            error: PenstockError | None = None
            try:
                shard.write(checkpoint)
            except PenstockError as problem:
                error = problem
                _log.warning(
                    "a checkpoint was not written",
                    shard=shard.shard,
                    position=checkpoint.position,
                    error=str(problem),
                )
            with self.news:
                shard.end(checkpoint, error, self._seconds)
                self.news.notify_all()
            shard.tell()

    def _next(self) -> ShardCheckpoint | None:
        """Wait for a shard that is due, and return it; None when the writer is closed."""
        while not self._closed:
            due = [
                (when, number) for number, shard in enumerate(self._shards) if (when := shard.due) is not None
            ]
            when, number = min(due, default=(None, 0))
            now = time.monotonic()
            if when is not None and when <= now:
                return self._shards[number]
            self.news.wait(None if when is None else when - now)
        return None
