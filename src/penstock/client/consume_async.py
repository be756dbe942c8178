# SPDX-License-Identifier: Apache-2.0
"""Delivers batches to a coroutine, with one task per shard, or to an `async for` loop, one batch at a time.

Separate threads receive the batches; the program's event loop delivers them.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import structlog

from penstock.client.attempt import Attempt
from penstock.client.batch import ChangeBatch
from penstock.client.consume import IN_HAND_SECONDS, UNSURE_SECONDS, Consumer, answer_failure, try_ack
from penstock.client.flow import FailurePolicy, Step
from penstock.client.owned import OwnedShard
from penstock.client.supply import Supply, Taker
from penstock.errors import OptionInvalid

AsyncCallback = Callable[[ChangeBatch], Awaitable[Any] | Any]

_log = structlog.get_logger(__name__)


class AsyncConsumption(Consumer):
    """Delivers the batches of a supply in one event loop: `await run(callback)`, or `async for`. An async
    context manager.

    With `ack` "auto", a batch is acked when the callback is done, or when the iteration requests the next
    batch. With "manual", it is acked by `batch.ack()`, which never blocks.
    """

    def __init__(self, supply: Supply, policy: FailurePolicy, ack: str = "auto") -> None:
        super().__init__(supply, policy, ack)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        # Set when nothing more is to be delivered, although something may be waiting.
        self._halted = asyncio.Event()
        self._arrived = asyncio.Event()
        self._batch_finished = asyncio.Event()
        self._callback: AsyncCallback | None = None
        self._workers: dict[OwnedShard, asyncio.Task[None]] = {}
        self._loop_task: asyncio.Task[Any] | None = None
        self._stopping = False

    # --- For the program --------------------------------------------------------------------

    async def run(self, callback: AsyncCallback) -> None:
        """Pass every batch to a callback until `stop`. Shards run concurrently, and each keeps its batches in
        order.

        Raises the same errors as the synchronous version.
        """
        await self._begin(callback)
        try:
            await self._over.wait()
            while not (self._stopping or self._is_done()):
                await asyncio.sleep(UNSURE_SECONDS / 10)
        finally:
            await self.stop()
        if self._failure is not None:
            raise self._failure

    async def __aiter__(self) -> AsyncIterator[ChangeBatch]:
        """Yield the batches of all shards; each shard's batches are in order."""
        self._loop_task = asyncio.current_task()
        await self._begin(None)
        try:
            while True:
                self._arrived.clear()
                for shard in self._supply.shards().values():
                    batch = None if self._stopping else self._pick_up(shard)
                    if batch is not None:
                        yield batch
                        self._auto_ack(shard, batch)
                        self._arrived.set()
                    self._put_away()
                over = self._stopping or self._over.is_set()
                if over and (self._stopping or self._is_done()):
                    break
                await self._wait(self._arrived, UNSURE_SECONDS)
        finally:
            self._put_away()
            self._loop_task = None
        if self._stopping:
            await asyncio.to_thread(self._supply.stop)
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        """Wait for running callbacks, write checkpoints, and release the shards."""
        self._stopping = True
        self._over.set()
        self._halted.set()
        self._wake()
        # The event loop closes the iterator of an abandoned `async for` a moment later.
        for _ in range(2):
            await asyncio.sleep(0)
        # `stop` was called inside a callback or loop whose current batch is still to be acked. The task that
        # runs this batch finishes the stop.
        here = asyncio.current_task()
        if self._loop is not None and here not in self._workers.values() and self._loop_task is not here:
            await asyncio.to_thread(self._supply.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Leaving the block ends the loop inside it, even if the loop's iterator is still referenced.
        self._loop_task = self._in_hand = None
        await self.stop()

    # --- For the supply, in its threads -----------------------------------------------------

    async def _begin(self, callback: AsyncCallback | None) -> None:
        if self._loop is not None:
            raise OptionInvalid(
                "this subscriber has run already", hint="Make another one: its checkpoint goes on"
            )
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        await asyncio.to_thread(self._supply.start, Taker(self._gained, self._lost, self._end))

    def _in_loop(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Schedule a call in the event loop; does nothing if the loop is closed."""
        assert self._loop is not None, "the supply was started in it"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *arguments)

    def _gained(self, shard: OwnedShard) -> None:
        if self._callback is None:
            shard.arrived = lambda: self._in_loop(self._arrived.set)
            return
        arrived = asyncio.Event()
        shard.arrived = lambda: self._in_loop(arrived.set)
        self._in_loop(self._start_worker, shard, arrived)

    def _start_worker(self, shard: OwnedShard, arrived: asyncio.Event) -> None:
        self._workers[shard] = asyncio.ensure_future(self._work(shard, arrived))

    def _lost(self, shard: OwnedShard) -> None:
        """Return once nobody works on a lost shard any more. Waits up to IN_HAND_SECONDS for a loop to finish
        its batch.
        """
        assert self._loop is not None, "the supply was started in it"
        if not self._loop.is_running():
            return
        shard.arrived()
        asyncio.run_coroutine_threadsafe(self._wait_worker(shard), self._loop).result()

    async def _wait_worker(self, shard: OwnedShard) -> None:
        worker = self._workers.pop(shard, None)
        if worker is not None:
            await asyncio.wait([worker])
            return
        deadline = asyncio.get_running_loop().time() + IN_HAND_SECONDS
        while self._in_hand is shard and (remaining := deadline - asyncio.get_running_loop().time()) > 0:
            self._batch_finished.clear()
            await self._wait(self._batch_finished, remaining)

    def _end(self, problem: BaseException | None) -> None:
        self._in_loop(self._finish, problem)

    def _finish(self, problem: BaseException | None) -> None:
        self._failure = self._failure or problem
        self._over.set()
        self._wake()

    def _abort(self, problem: BaseException) -> None:
        self._aborted = True
        self._halted.set()
        self._finish(problem)

    def _wake(self) -> None:
        self._arrived.set()
        for shard in list(self._workers):
            shard.arrived()

    # --- Callback ---------------------------------------------------------------------------

    async def _work(self, shard: OwnedShard, arrived: asyncio.Event) -> None:
        while not (shard.over or self._stopping):
            arrived.clear()
            batch = shard.take()
            if batch is None:
                if not (shard.over or self._stopping):
                    # A shard with an uncertain lease delivers nothing, and no event reports that its lease is
                    # confirmed again.
                    await self._wait(arrived, UNSURE_SECONDS if shard.waiting else None)
                continue
            self._busy.add(shard)
            try:
                if not await self._deliver(shard, batch):
                    return
            except BaseException as problem:
                # Without this handler the shard would stop silently. An exit raised in a callback ends the
                # subscriber.
                self._abort(problem)
                raise
            finally:
                self._busy.discard(shard)

    async def _deliver(self, shard: OwnedShard, batch: ChangeBatch) -> bool:
        """Pass one batch to the callback and retry as the policy says. Return False to end the shard's
        task.
        """
        assert self._callback is not None, "tasks work for a callback"
        tries = 0
        while True:
            with Attempt() as attempt:
                result = self._callback(batch)
                if inspect.isawaitable(result):
                    await result
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
            await self._wait(self._halted, pause)
            if self._stopping or shard.over:
                return False

    async def _wait(self, event: asyncio.Event, seconds: float | None) -> None:
        """Wait for an event, for up to `seconds`."""
        try:
            await asyncio.wait_for(event.wait(), seconds)
        except TimeoutError:
            return

    # --- Loop -------------------------------------------------------------------------------

    def _pick_up(self, shard: OwnedShard) -> ChangeBatch | None:
        self._in_hand = shard
        return shard.take()

    def _put_away(self) -> None:
        self._in_hand = None
        self._batch_finished.set()
