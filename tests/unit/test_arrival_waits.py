# SPDX-License-Identifier: Apache-2.0
"""An arrival wakes a request that waits for changes; the request neither polls nor waits for its timeout.

The test checks the order of events and the timers of the event loop, so it does not depend on the speed of
the machine.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from penstock.logstore.log import Log
from penstock.model import Position, TablePatterns
from penstock.serve.access import WHOLE
from penstock.serve.arrivals import Arrivals
from penstock.serve.canal.cursor import Cursor as CanalCursor
from penstock.serve.canal.cursor import Mark
from penstock.serve.pieces import PieceMemory, Pieces, View
from penstock.serve.ptubes.messages import CheckpointMode, FetchRequest, PtubesCheckpoint, PtubesSubscription
from penstock.serve.ptubes.session import Session
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscriber
from penstock.serve.subscription import Cursor, Start, Started
from penstock.serve.threads import Threads
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, open_log
from tests.support.ptubes.packet import RdsEnvelope
from tests.support.suite.patience import WAIT_SECONDS_MAX

HOUR_SECONDS = 3600.0
ALL_TABLES = TablePatterns("*.*")
# When the request arrives, the log ends at this position, inside a file with more transactions.
PIECES_BEFORE = 5


class Interrupted(Exception):
    """Raised where the capture pauses."""


class Instance:
    """A served log whose `arrivals` count the tasks that started to wait."""

    name = "shop"

    def __init__(self, log: Log) -> None:
        self._log = log
        self.arrivals = CountedArrivals()

    def status(self) -> dict[str, Any]:
        return {"lag_seconds": 0.0}

    def log(self) -> Log:
        return self._log


class CountedArrivals(Arrivals):
    """Counts the tasks that started to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    @contextmanager
    def waiting(self, instance: str) -> Iterator[asyncio.Event]:
        with super().waiting(instance) as event:
            self.waits += 1
            yield event


class TimedLoop(asyncio.SelectorEventLoop):
    """Records the delay of every timer that is set."""

    def __init__(self) -> None:
        super().__init__()
        self.timers: list[float] = []

    def call_at(self, when: float, *arguments: Any, **more: Any) -> asyncio.TimerHandle:  # type: ignore[override]
        self.timers.append(when - self.time())
        return super().call_at(when, *arguments, **more)


Wait = Callable[[Instance, Pieces, Position], Awaitable[object]]


async def canal_entries(_: Instance, pieces: Pieces, start: Position) -> object:
    cursor = CanalCursor("1", pieces, View("canal", ALL_TABLES), Mark(start, "", 0))
    return await cursor.gather(1, HOUR_SECONDS)


async def canal_entries_without_deadline(_: Instance, pieces: Pieces, start: Position) -> object:
    cursor = CanalCursor("1", pieces, View("canal", ALL_TABLES), Mark(start, "", 0))
    return await cursor.gather(1, None)


async def changes(_: Instance, pieces: Pieces, start: Position) -> object:
    return await Cursor(pieces, View("typed", ALL_TABLES), Started(start)).next(HOUR_SECONDS)


async def ptubes_events(_: Instance, pieces: Pieces, start: Position) -> object:
    latest = PtubesCheckpoint(CheckpointMode.LATEST)
    subscription = PtubesSubscription("shop", "task", (), 1, (0,), latest)
    shown = Subscriber("ptubes", "shop", "task", "", "", 0)
    session = await Session.open(pieces, subscription, WHOLE, View("ptubes", ALL_TABLES), shown)
    answer = await session.fetch(FetchRequest(1, 1 << 20, HOUR_SECONDS), asyncio.Event())
    return RdsEnvelope.FromString(answer).totalEventCount


async def position(instance: Instance, _: Pieces, start: Position) -> object:
    served = Served({instance.name: instance}, instance.arrivals)
    reached = await served.wait_behind(instance.name, start, HOUR_SECONDS)
    return reached is not None and reached > start


@pytest.fixture
def log() -> Iterator[Log]:
    """A log whose capture paused inside a file."""

    def pause(_: Captured, number: int) -> None:
        if number == PIECES_BEFORE:
            raise Interrupted

    with open_log(SimulatedDisk()) as log:
        with pytest.raises(Interrupted):
            Captured(log, each=pause).run()
        yield log


@pytest.mark.parametrize(
    "wait", [canal_entries, canal_entries_without_deadline, changes, ptubes_events, position]
)
def test_arrival_wakes_only_the_waiting_request(log: Log, wait: Wait) -> None:
    instance = Instance(log)
    loop = TimedLoop()

    def capture() -> None:
        Captured(log).run()
        instance.arrivals.arrived(instance.name)

    async def answer() -> object:
        start = log.visible
        assert start is not None
        with ThreadPoolExecutor(1) as pool:
            pieces = Pieces(
                instance, instance.arrivals, PieceMemory(), Threads(decoding=pool, searching=pool)
            )
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                loop.timers.clear()
                request = asyncio.ensure_future(wait(instance, pieces, start))
                while not instance.arrivals.waits:
                    await asyncio.sleep(0)
                # A task sets its timer in the step in which it starts to wait.
                assert all(seconds > HOUR_SECONDS - WAIT_SECONDS_MAX for seconds in loop.timers), "it polls"
                assert not request.done()
                # Each additional task delays an arrival by one turn of the event loop. A Ptubes session needs
                # two additional tasks, because it also waits for the next request on its connection.
                tasks_max = 4 if wait is ptubes_events else 2
                assert len(asyncio.all_tasks()) == tasks_max
                capturing = threading.Thread(target=capture)
                capturing.start()
                try:
                    return await request
                finally:
                    capturing.join()

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert runner.run(answer())
    # `wait_behind` checks once more while it is registered.
    assert instance.arrivals.waits <= 2


def test_arrivals_between_two_turns_of_the_loop_wake_it_once() -> None:
    arrivals = Arrivals()

    class CountedLoop(asyncio.SelectorEventLoop):
        calls = 0

        def call_soon_threadsafe(self, *arguments: Any, **more: Any) -> asyncio.Handle:  # type: ignore[override]
            self.calls += 1
            return super().call_soon_threadsafe(*arguments, **more)

    async def wait(loop: CountedLoop) -> None:
        for turn in range(1, 3):
            with arrivals.waiting("shop") as arrival:
                for _ in range(5):
                    arrivals.arrived("shop")
                async with asyncio.timeout(WAIT_SECONDS_MAX):
                    await arrival.wait()
                assert loop.calls == turn

    for _ in range(2):
        # An event loop that ended before its turn does not block the next event loop.
        loop = CountedLoop()
        with asyncio.Runner(loop_factory=lambda loop=loop: loop) as runner:  # type: ignore[misc]
            runner.run(wait(loop))
        arrivals._due.add("shop")


def test_pieces_of_a_view_are_further_apart_the_more_followers_it_has(log: Log) -> None:
    class FrozenLoop(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 1000.0

    async def gaps() -> list[float]:
        assert log.visible is not None
        instance, view = Instance(log), View("typed", ALL_TABLES)
        pieces = Pieces(instance, instance.arrivals, PieceMemory(), Threads())
        cursors: list[Cursor] = []
        measured: list[float] = []
        for count in (1, 10, 1000):
            cursors += [Cursor(pieces, view, Started(log.visible)) for _ in range(count - len(cursors))]
            pieces._decoded_at[view] = 1000.0
            measured.append(pieces.gap_seconds(view, log.visible))
        # A follower that catches up does not wait for other followers.
        far_behind = replace(log.visible, offset=log.visible.offset - (1 << 20))
        return [*measured, pieces.gap_seconds(view, far_behind)]

    with asyncio.Runner(loop_factory=FrozenLoop) as runner:
        assert runner.run(gaps()) == pytest.approx([0.001, 0.001, 0.1, 0.0])


@pytest.mark.parametrize("ends", [False, True])
def test_follower_to_whose_piece_nothing_is_added_does_not_wait_for_others(log: Log, ends: bool) -> None:
    if not ends:
        # This follower is in an earlier file than the followers at the end.
        Captured(log).run()
    start = log.earliest()
    assert start is not None
    loop = TimedLoop()

    async def follow() -> None:
        instance, view = Instance(log), View("typed", ALL_TABLES)
        until = Start(edge="latest") if ends else None
        with ThreadPoolExecutor(1) as pool:
            pieces = Pieces(
                instance, instance.arrivals, PieceMemory(), Threads(decoding=pool, searching=pool)
            )
            cursors = [Cursor(pieces, view, Started(start), until) for _ in range(1000)]
            pieces._decoded_at[view] = loop.time()
            assert await cursors[0].next(0) is not None

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(follow())
    assert not loop.timers


def test_follower_is_not_woken_in_gaps_in_which_transactions_keep_arriving(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, view = Instance(log), View("typed", ALL_TABLES)

    end = log.visible

    def pause(*_: object) -> None:
        if log.visible != end:
            raise Interrupted

    async def waits_of(pieces: Pieces, cursor: Cursor, *, arrives: bool) -> int:
        """Let a wait end in a gap or at its timeout; return how often the follower asked to be woken."""
        before = instance.arrivals.waits
        pieces._decoded_at[view] = asyncio.get_running_loop().time()
        request = asyncio.ensure_future(cursor.next(HOUR_SECONDS if arrives else 0.001))
        if arrives:
            while instance.arrivals.waits == before:
                await asyncio.sleep(0)
            monkeypatch.setattr("penstock.serve.pieces.PIECE_GAP_SECONDS", 0.05)
            with pytest.raises(Interrupted):
                Captured(log, each=pause).run()
            instance.arrivals.arrived(instance.name)
        assert (await request is not None) is arrives
        return instance.arrivals.waits - before

    async def follow() -> None:
        assert log.visible is not None
        with ThreadPoolExecutor(1) as pool:
            pieces = Pieces(
                instance, instance.arrivals, PieceMemory(), Threads(decoding=pool, searching=pool)
            )
            cursor = Cursor(pieces, view, Started(log.visible))
            assert await waits_of(pieces, cursor, arrives=False) == 1
            assert await waits_of(pieces, cursor, arrives=True) == 1
            while await cursor.next(0) is not None:
                pass
            monkeypatch.setattr("penstock.serve.pieces.PIECE_GAP_SECONDS", HOUR_SECONDS)
            assert await waits_of(pieces, cursor, arrives=False) == 0
            # Nothing has arrived in the last gap.
            assert await waits_of(pieces, cursor, arrives=False) == 1

    asyncio.run(follow())
