# SPDX-License-Identifier: Apache-2.0
"""Handing batches to a callback, with one thread for each shard, or to a loop, one after the other."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import structlog

from penstock.client.batch import ChangeBatch
from penstock.client.flow import FailurePolicy, Step
from penstock.client.owned import OwnedShard, roll_back
from penstock.client.supply import Supply, Taker
from penstock.errors import LeaseLost, OptionInvalid

ACKS = ("auto", "manual")

# A loop that has a batch of a lost shard in its hands is waited for so long.
IN_HAND_SECONDS = 10.0

# A shard whose lease the store does not confirm is looked at so often.
UNSURE_SECONDS = 0.2

Callback = Callable[[ChangeBatch], Any]

_log = structlog.get_logger(__name__)


class Attempt:
    """A run of the program's own code. `failure` is the error that it raised, of whatever class."""

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        # An interrupt is no failure: it goes on.
        self.failure = error if isinstance(error, Exception) else None
        return self.failure is not None


def answer_failure(
    policy: FailurePolicy, batch: ChangeBatch, tries: int, failure: Exception
) -> tuple[Step, float]:
    """Return what follows so many failed tries of a batch, and the seconds to pause before it; log it."""
    step, pause = policy.after(tries)
    told = _log.bind(
        table=batch.table, shard=batch.shard, position=str(batch.position), tries=tries, why=repr(failure)
    )
    if step is Step.STOP:
        told.error("a batch failed, and the subscriber stops")
    elif step is Step.SKIP:
        told.error("a batch failed, and is passed over")
    else:
        told.warning("a batch failed, and is tried again", after_seconds=pause)
    return step, pause


class Consumption:
    """A supply's batches for one program: `run` a callback, or iterate. A context manager stops at its end.

    With `ack` "auto" a batch is acked when the callback returns, or when the loop asks for the next one; with
    "manual" by `batch.ack()`. A loop ends after `stop`, and raises what ended it otherwise.
    """

    def __init__(self, supply: Supply, policy: FailurePolicy, ack: str = "auto") -> None:
        if ack not in ACKS:
            raise OptionInvalid(f"ack {ack!r} is unknown", hint=f"Use one of {', '.join(ACKS)}")
        self._supply = supply
        self._policy = policy
        self._auto = ack == "auto"
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._callback: Callback | None = None
        self._workers: dict[OwnedShard, threading.Thread] = {}
        self._in_hand: OwnedShard | None = None
        self._looping: int | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._busy = 0
        self._begun = False
        self._skipped = 0

    # --- For the program --------------------------------------------------------------------

    def run(self, callback: Callback) -> None:
        """Give every batch to a callback, each shard's in order on a thread of its own, until `stop`.

        A callback that raises gets its batch again, or the batch is passed over, or the subscriber ends, as
        `on_failure` says; then its error is raised here. Raises what ends the subscription otherwise.
        """
        self._begin(callback)
        try:
            with self._changed:
                # A wait without a bound would keep an interrupt from the keyboard out.
                while not (self._stopping.is_set() or (self._ended and self._is_done())):
                    self._changed.wait(1.0)
        finally:
            self.stop()
        if self._failure is not None:
            raise self._failure

    def __iter__(self) -> Iterator[ChangeBatch]:
        """Yield the batches of all shards, each shard's in order.

        A loop that is left goes no further; `stop`, or the end of a `with` block, gives the shards up.
        """
        self._looping = threading.get_ident()
        self._begin(None)
        try:
            while True:
                self._arrived.clear()
                for shard, batch in self._next():
                    yield batch
                    self._put_down(shard, batch)
                    # Another batch may be due before the shards that were not looked at yet.
                    self._arrived.set()
                if self._stopping.is_set():
                    break
                if self._ended and self._is_done():
                    break
                self._arrived.wait(UNSURE_SECONDS)
        finally:
            with self._changed:
                self._in_hand = None
                self._looping = None
                self._changed.notify_all()
            if self._stopping.is_set():
                self._supply.stop()
        if self._failure is not None:
            raise self._failure

    def rollback(self, shard: int | None = None) -> int:
        """Let everything behind the last ack be delivered again; return how many batches that is.

        Of one shard, or of all that are ours. A batch from before the rollback can no longer be acked.
        """
        return roll_back(self._supply.shards(), shard)

    def stop(self) -> None:
        """End: callbacks that run are waited for, checkpoints written, shards given up. Safe for threads."""
        self._stopping.set()
        self._wake()
        # Inside a callback or a loop the batch in hand is still to be acked: who runs them does the rest.
        inside = threading.current_thread() in self._workers.values()
        if self._begun and not inside and self._looping != threading.get_ident():
            self._supply.stop()

    @property
    def waiting(self) -> int:
        """How many batches have arrived and were not given out yet, of all shards that are ours."""
        return sum(shard.waiting for shard in self._supply.shards().values())

    @property
    def skipped(self) -> int:
        """How many batches were passed over after failures."""
        return self._skipped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Whoever leaves the block has left its loop, even if something holds on to that.
        self._looping = self._in_hand = None
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
        arrived = threading.Event()
        shard.arrived = arrived.set
        worker = threading.Thread(
            target=self._work, args=(shard, arrived), name=f"penstock-shard-{shard.shard}", daemon=True
        )
        with self._changed:
            self._workers[shard] = worker
        worker.start()

    def _lost(self, shard: OwnedShard) -> None:
        """Return when nobody works on a lost shard any more; a loop is waited for IN_HAND_SECONDS."""
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

    def _wake(self) -> None:
        self._arrived.set()
        with self._changed:
            self._changed.notify_all()
            workers = list(self._workers)
        for shard in workers:
            shard.arrived()

    def _is_done(self) -> bool:
        """Whether everything that came before the end was worked on; a failure lets nothing more be."""
        if self._failure is not None:
            return True
        return not self._busy and not any(one.waiting for one in self._supply.shards().values())

    # --- Callback ---------------------------------------------------------------------------

    def _work(self, shard: OwnedShard, arrived: threading.Event) -> None:
        while not (shard.over or self._stopping.is_set()):
            arrived.clear()
            with self._working():
                try:
                    batch = shard.take()
                    if batch is not None and not self._deliver(shard, batch):
                        return
                except BaseException as problem:
                    # The shard would stand still with nobody told: an exit is the subscriber's.
                    self._end(problem)
                    raise
            if batch is None and not (shard.over or self._stopping.is_set()):
                # A shard that is not surely ours gives nothing, and nobody tells when it is again.
                arrived.wait(UNSURE_SECONDS if shard.waiting else None)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count who has taken, or is about to take, a batch."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                if self._ended:
                    self._changed.notify_all()

    def _deliver(self, shard: OwnedShard, batch: ChangeBatch) -> bool:
        """Give one batch to the callback as often as the policy says. False ends the shard's thread."""
        assert self._callback is not None, "threads work for a callback"
        tries = 0
        while True:
            with Attempt() as attempt:
                self._callback(batch)
            if attempt.failure is None:
                return self._settle(shard, batch)
            tries += 1
            step, pause = answer_failure(self._policy, batch, tries, attempt.failure)
            if step is Step.STOP:
                self._end(attempt.failure)
                return False
            if step is Step.SKIP:
                self._skipped += 1
                return self._acked(batch)
            if self._stopping.wait(pause) or shard.over:
                return False

    def _settle(self, shard: OwnedShard, batch: ChangeBatch) -> bool:
        """Ack a batch that its callback has returned from, if that is how acks are given."""
        return self._acked(batch) if self._auto and shard.is_current(batch) else True

    def _acked(self, batch: ChangeBatch) -> bool:
        try:
            batch.ack()
        except OptionInvalid:
            # It was rolled back by another thread meanwhile, and comes again.
            return True
        except LeaseLost as problem:
            _log.warning("a shard was lost under its batch", shard=batch.shard, why=str(problem))
            return False
        return True

    # --- Loop -------------------------------------------------------------------------------

    def _next(self) -> Iterator[tuple[OwnedShard, ChangeBatch]]:
        """Yield one batch of each shard that has one; it is in hand until `_put_down`."""
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

    def _put_down(self, shard: OwnedShard, batch: ChangeBatch) -> None:
        if self._auto and shard.is_current(batch):
            self._acked(batch)
