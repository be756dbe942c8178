# SPDX-License-Identifier: Apache-2.0
"""Delivers batches to a callback, with one thread per shard, or to a `for` loop, one batch at a time."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import structlog

from penstock.client.attempt import Attempt
from penstock.client.batch import ChangeBatch
from penstock.client.deliveries import Deliveries
from penstock.client.flow import FailurePolicy, Step
from penstock.client.owned import OwnedShard, roll_back
from penstock.client.supply import Supply, Taker
from penstock.errors import LeaseLost, OptionInvalid

ACKS = ("auto", "manual")

# How long a loop may keep a batch of a lost shard before the shard is released.
IN_HAND_SECONDS = 10.0

# The polling interval for a shard whose lease the store does not confirm.
UNSURE_SECONDS = 0.2

Callback = Callable[[ChangeBatch], Any]

_log = structlog.get_logger(__name__)


def try_ack(batch: ChangeBatch) -> bool:
    """Ack a batch; return whether its shard is still held."""
    try:
        batch.ack()
    except OptionInvalid:
        # Another task or thread rolled the batch back, so it is delivered again.
        return True
    except LeaseLost as problem:
        _log.warning("a shard was lost under its batch", shard=batch.shard, why=str(problem))
        return False
    return True


def answer_failure(
    policy: FailurePolicy, batch: ChangeBatch, tries: int, failure: Exception, deliveries: Deliveries
) -> tuple[Step, float]:
    """Return the next step after failed tries of a batch, and the seconds to pause before it.

    Logs and counts the failure.
    """
    step, pause = policy.after(tries)
    deliveries.failed(step)
    logger = _log.bind(
        table=batch.table, shard=batch.shard, position=str(batch.position), tries=tries, why=repr(failure)
    )
    if step is Step.STOP:
        logger.error("a batch failed, and the subscriber stops")
    elif step is Step.SKIP:
        logger.error("a batch failed, and is passed over")
    else:
        logger.warning("a batch failed, and is tried again", after_seconds=pause)
    return step, pause


class _Signal:
    """Wakes the thread of a shard.

    Setting it waits for no lock, so a suspended thread does not hold up the thread that fills all shards.
    """

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_set = False

    def set(self) -> None:
        """Wake the waiting thread, or let its next wait return at once."""
        if not self._is_set:
            self._is_set = True
            self._wakes.put(None)

    def clear(self) -> None:
        """Forget earlier calls of `set`. What they announced must be looked for after this call."""
        with suppress(queue.Empty):
            while True:
                self._wakes.get_nowait()
        # Not before the queue is empty: a call of `set` in between would leave it empty.
        self._is_set = False

    def wait(self, seconds: float | None) -> None:
        """Wait until it is set, for up to `seconds`."""
        with suppress(queue.Empty):
            self._wakes.get(timeout=seconds)


class Consumer:
    """The base class of `Consumption` and `AsyncConsumption`: the part of delivery that needs neither threads
    nor an event loop.
    """

    def __init__(self, supply: Supply, policy: FailurePolicy, ack: str = "auto") -> None:
        if ack not in ACKS:
            raise OptionInvalid(f"ack {ack!r} is unknown", hint=f"Use one of {', '.join(ACKS)}")
        self._supply = supply
        self._policy = policy
        self._auto = ack == "auto"
        self._in_hand: OwnedShard | None = None
        self._failure: BaseException | None = None
        # Whether the failure is that of a callback, after which nothing more is delivered.
        self._aborted = False
        # The shards of which a batch was taken or is about to be taken, and was not processed yet.
        self._busy: set[OwnedShard] = set()
        self._skipped = 0

    def rollback(self, shard: int | None = None) -> int:
        """Redeliver everything after the last ack; return the number of batches.

        Applies to one shard, or to all shards of this member. A batch delivered before the rollback can no
        longer be acked.
        """
        return roll_back(self._supply.shards(), shard)

    @property
    def skipped(self) -> int:
        """The number of batches skipped after failures."""
        return self._skipped

    def _is_done(self) -> bool:
        """Return whether everything that arrived before the end was processed, or whether the failure of a
        callback stopped processing.

        What arrived before an error of the supply is still delivered.
        """
        if self._aborted:
            return True
        return not self._busy and not any(shard.waiting for shard in self._supply.shards().values())

    def _auto_ack(self, shard: OwnedShard, batch: ChangeBatch) -> bool:
        """In `auto` mode, ack a batch that was processed; return whether its shard is still held."""
        return try_ack(batch) if self._auto and shard.is_current(batch) else True


class Consumption(Consumer):
    """Delivers the batches of a supply to one program: pass a callback to `run`, or iterate. As a context
    manager, it stops at the end of the block.

    With `ack` "auto", a batch is acked when the callback returns, or when the iteration requests the next
    batch. With "manual", it is acked by `batch.ack()`. Iteration ends after `stop`, or raises the error that
    ended the subscription.
    """

    def __init__(self, supply: Supply, policy: FailurePolicy, ack: str = "auto") -> None:
        super().__init__(supply, policy, ack)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._callback: Callback | None = None
        self._workers: dict[OwnedShard, threading.Thread] = {}
        self._loop_thread: int | None = None
        self._ended = False
        self._begun = False

    # --- For the program --------------------------------------------------------------------

    def run(self, callback: Callback) -> None:
        """Pass every batch to a callback until `stop`. Each shard has its own thread, which keeps the shard's
        batches in order.

        If a callback raises, `on_failure` decides whether the batch is retried, the batch is skipped, or the
        subscriber stops. If the subscriber stops, `run` raises the callback's error. `run` also raises any
        other error that ends the subscription.
        """
        self._begin(callback)
        try:
            with self._changed:
                # Wait with a timeout, because an unbounded wait would block KeyboardInterrupt.
                while not (self._stopping.is_set() or (self._ended and self._is_done())):
                    self._changed.wait(1.0)
        finally:
            self.stop()
        if self._failure is not None:
            raise self._failure

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield the batches of all shards; each shard's batches are in order.

        Leaving the loop only pauses delivery. `stop`, or the end of a `with` block, releases the shards.
        """
        self._loop_thread = threading.get_ident()
        self._begin(None)
        try:
            while True:
                self._arrived.clear()
                for shard, batch in self._next():
                    yield batch
                    self._auto_ack(shard, batch)
                    # A batch may have become due on a shard that was checked earlier, so check all
                    # shards again.
                    self._arrived.set()
                if self._stopping.is_set():
                    break
                if self._ended and self._is_done():
                    break
                self._arrived.wait(UNSURE_SECONDS)
        finally:
            with self._changed:
                self._in_hand = None
                self._loop_thread = None
                self._changed.notify_all()
            if self._stopping.is_set():
                self._supply.stop()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Wait for running callbacks, write checkpoints, and release the shards. Thread-safe."""
        self._stopping.set()
        self._wake()
        # `stop` was called inside a callback or loop whose current batch is still to be acked. The thread
        # that runs this batch finishes the stop.
        inside = threading.current_thread() in self._workers.values()
        if self._begun and not inside and self._loop_thread != threading.get_ident():
            self._supply.stop()

    @property
    def waiting(self) -> int:
        """The number of batches that have arrived but were not delivered yet, over all shards of this
        member.
        """
        return sum(shard.waiting for shard in self._supply.shards().values())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Leaving the block ends the loop inside it, even if the loop's iterator is still referenced.
        self._loop_thread = self._in_hand = None
        self.stop()

    # --- For the supply ---------------------------------------------------------------------

    def _begin(self, callback: Callback | None) -> None:
        if self._begun:
            raise OptionInvalid(
                "this subscriber has run already", hint="Make another one: its checkpoint goes on"
            )
        self._begun = True
        self._callback = callback
        self._supply.start(Taker(self._gained, self._lost, self._end))

    def _gained(self, shard: OwnedShard) -> None:
        if self._callback is None:
            shard.arrived = self._arrived.set
            return
        arrived = _Signal()
        shard.arrived = arrived.set
        worker = threading.Thread(
            target=self._work, args=(shard, arrived), name=f"penstock-shard-{shard.shard}", daemon=True
        )
        with self._changed:
            self._workers[shard] = worker
        worker.start()

    def _lost(self, shard: OwnedShard) -> None:
        """Return once nobody works on a lost shard any more. Waits up to IN_HAND_SECONDS for a loop to finish
        its batch.
        """
        with self._changed:
            worker = self._workers.get(shard)
        if worker is not None:
            shard.arrived()
            if worker is not threading.current_thread():
                worker.join()
            with self._changed:
                self._workers.pop(shard, None)
            return
        deadline = time.monotonic() + IN_HAND_SECONDS
        with self._changed:
            while self._in_hand is shard and time.monotonic() < deadline:
                self._changed.wait(deadline - time.monotonic())

    def _end(self, problem: BaseException | None) -> None:
        with self._changed:
            self._failure = self._failure or problem
            self._ended = True
        self._wake()

    def _abort(self, problem: BaseException) -> None:
        self._aborted = True
        self._end(problem)

    def _wake(self) -> None:
        self._arrived.set()
        with self._changed:
            self._changed.notify_all()
            workers = list(self._workers)
        for shard in workers:
            shard.arrived()

    # --- Callback ---------------------------------------------------------------------------

    def _work(self, shard: OwnedShard, arrived: "_Signal") -> None:
        while not (shard.over or self._stopping.is_set()):
            arrived.clear()
            self._busy.add(shard)
            try:
                batch = shard.take()
                if batch is not None and not self._deliver(shard, batch):
                    return
            except BaseException as problem:
                # Without this handler the shard would stop silently. An exit raised in a callback ends the
                # subscriber.
                self._abort(problem)
                raise
            finally:
                self._busy.discard(shard)
                if self._ended:
                    with self._changed:
                        self._changed.notify_all()
            if batch is None and not (shard.over or self._stopping.is_set()):
                # A shard with an uncertain lease delivers nothing, and no event reports that its lease is
                # confirmed again.
                arrived.wait(UNSURE_SECONDS if shard.waiting else None)

    def _deliver(self, shard: OwnedShard, batch: ChangeBatch) -> bool:
        """Pass one batch to the callback and retry as the policy says. Return False to end the shard's
        thread.
        """
        assert self._callback is not None, "threads work for a callback"
        tries = 0
        while True:
            with Attempt() as attempt:
                self._callback(batch)
            if attempt.failure is None:
                return self._auto_ack(shard, batch)
            tries += 1
            step, pause = answer_failure(self._policy, batch, tries, attempt.failure, shard.deliveries)
            if step is Step.STOP:
                self._abort(attempt.failure)
                return False
            if step is Step.SKIP:
                self._skipped += 1
                return try_ack(batch)
            if self._stopping.wait(pause) or shard.over:
                return False

    # --- Loop -------------------------------------------------------------------------------

    def _next(self) -> Iterator[tuple[OwnedShard, ChangeBatch]]:
        """Yield one batch from each shard that has a batch. The yielded batch is in hand until the next one
        is requested.
        """
        for shard in self._supply.shards().values():
            if self._stopping.is_set():
                return
            with self._changed:
                self._in_hand = shard
            batch = shard.take()
            if batch is not None:
                yield shard, batch
            with self._changed:
                self._in_hand = None
                self._changed.notify_all()
