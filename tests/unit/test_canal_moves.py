# SPDX-License-Identifier: Apache-2.0
"""A Canal client may connect to any listener process, and its state follows the connection."""

import asyncio
import pickle
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from penstock.coordinate.backends.memory import MemoryStore
from penstock.errors import AccessDenied, LeaseLost
from penstock.logstore.log import Log
from penstock.model import TablePatterns
from penstock.processes.canal_moves import (
    ClientGranted,
    ClientMoves,
    ClientRecalled,
    ClientReturned,
    ClientWanted,
    WantedClients,
)
from penstock.serve.access import WHOLE, Account
from penstock.serve.arrivals import Arrivals
from penstock.serve.canal.clients import Client, Clients
from penstock.serve.canal.cursor import Cursor
from penstock.serve.canal.tables import CanalTables
from penstock.serve.pieces import View
from penstock.serve.served import Served
from tests.support.daemon.served_log import INSTANCE, LogInstance, captured_log
from tests.support.suite.patience import WAIT_SECONDS_MAX


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


class Processes:
    """Listener processes that serve one log, and the daemon's state about them. All run in one event loop."""

    def __init__(self, log: Log, count: int = 2, return_seconds_max: float = WAIT_SECONDS_MAX) -> None:
        self.store = MemoryStore(f"moves-{id(self)}")
        self.moves = ClientMoves(self._to_process, return_seconds_max)
        self.wanted = [WantedClients(self._to_daemon(number)) for number in range(count)]
        self.clients = [
            Clients(
                Served({INSTANCE: LogInstance(log)}, Arrivals()),
                self.store,
                f"process {number}",
                bring=wanted.bring,
            )
            for number, wanted in enumerate(self.wanted)
        ]
        self.is_frozen = False
        self.superseded: list[str] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(
        self, number: int, owner: str, account: Account = WHOLE, asked: str = ""
    ) -> tuple[Client, Cursor]:
        """Subscribe over a connection that has reached a process."""
        client = self.clients[number].get(INSTANCE, 7)
        await self.clients[number].hold(
            client, owner, lambda why: self.superseded.append(owner), account, asked
        )
        cursor = await client.at()
        assert cursor is not None
        return client, cursor

    def _to_daemon(self, number: int) -> Callable[[object], None]:
        def send(message: object) -> None:
            received = pickle.loads(pickle.dumps(message))
            if isinstance(received, ClientWanted):
                self._run(self.moves.move(number, received))
            else:
                assert isinstance(received, ClientReturned)
                self.moves.returned(received)

        return send

    def _to_process(self, number: int, message: object) -> None:
        received = pickle.loads(pickle.dumps(message))
        if isinstance(received, ClientGranted):
            self.wanted[number].granted(received)
        elif not self.is_frozen:
            assert isinstance(received, ClientRecalled)
            self._run(self.wanted[number].recalled(received, self.clients[number]))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def take(cursor: Cursor, size: int) -> tuple[int, bytes]:
    """Return the next batch of a cursor: its id and its entries."""
    gathered = await cursor.gather(size, 0)
    assert gathered is not None
    return cursor.give(gathered).id, b"".join(gathered.parts)


def test_client_that_reaches_another_process_goes_on_at_its_last_acknowledged_entry(log: Log) -> None:
    async def scenario() -> None:
        processes = Processes(log)
        client, cursor = await processes.connect(0, "first")
        expected = []
        for _ in range(3):
            # Batches are cut at entries, not at transactions: the last batch is inside a transaction.
            expected.append((await take(cursor, 1))[1])
        cursor.acknowledge(1)
        client.note()
        # The new connection gets the client, and the entries that are not acknowledged, under new ids.
        moved, cursor = await processes.connect(1, "second")
        assert processes.superseded == ["first"]
        assert (client.owner, client.cursor) == (None, None)
        assert [await take(cursor, 1) for _ in range(2)] == [(4, expected[1]), (5, expected[2])]
        cursor.acknowledge(4)
        moved.note()
        await processes.clients[1].release(moved, "second")
        # The client also keeps its unacknowledged entries after its connection has ended.
        _, cursor = await processes.connect(0, "third")
        assert await take(cursor, 1) == (6, expected[2])
        assert processes.superseded == ["first"]

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_client_of_a_process_that_has_ended_goes_on_at_its_checkpoint(log: Log, end: str) -> None:
    async def scenario() -> None:
        processes = Processes(log, return_seconds_max=0.01)
        client, cursor = first = await processes.connect(0, "first")
        _, acknowledged = await take(cursor, 1 << 12)
        cursor.acknowledge(1)
        client.note()
        writing = client._writing
        assert writing is not None
        assert await asyncio.to_thread(writing.flush, WAIT_SECONDS_MAX)
        _, rest = await take(cursor, 1 << 24)
        if end == "killed":
            processes.moves.lost(0)
        else:
            processes.is_frozen = True
        moved, cursor = await processes.connect(1, "second")
        _, again = await take(cursor, 1 << 24)
        # A checkpoint is at the end of a transaction, so the entries of an unfinished transaction are
        # delivered again.
        assert again.endswith(rest)
        assert len(again) < len(acknowledged) + len(rest)
        cursor.acknowledge(1)
        moved.note()
        # Late writes of the previous process are fenced.
        first[1].acknowledge(2)
        client.note()
        with pytest.raises(LeaseLost):
            await asyncio.to_thread(writing.flush, WAIT_SECONDS_MAX)

    asyncio.run(scenario())


def test_account_without_rights_takes_no_client_from_another_process(log: Log) -> None:
    async def scenario() -> None:
        processes = Processes(log)
        client, cursor = await processes.connect(0, "first", Account("owner"))
        with pytest.raises(AccessDenied, match="belongs to account owner"):
            await processes.connect(1, "second", Account("other"))
        assert (processes.superseded, client.cursor) == ([], cursor)

    asyncio.run(scenario())


def test_client_that_unsubscribes_at_another_process_starts_again(log: Log) -> None:
    async def scenario() -> None:
        processes = Processes(log)
        client, cursor = await processes.connect(0, "first")
        _, begin = await take(cursor, 1)
        cursor.acknowledge(1)
        client.note()
        await processes.clients[1].forget(processes.clients[1].get(INSTANCE, 7), "second", WHOLE)
        assert processes.superseded == ["first"]
        for number in (0, 1):
            _, cursor = await processes.connect(number, f"again {number}")
            assert (await take(cursor, 1))[1] == begin

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["killed", "unsubscribed"])
def test_client_that_returns_without_a_filter_has_the_last_one_that_was_set_anywhere(
    log: Log, end: str
) -> None:
    async def scenario() -> None:
        processes = Processes(log)
        await processes.connect(0, "first", asked="shop\\.a")
        client, _ = await processes.connect(1, "second", asked="shop\\.b")
        if end == "killed":
            processes.moves.lost(1)
        else:
            await processes.clients[1].forget(client, "second", WHOLE)
        client, cursor = await processes.connect(0, "third")
        assert client.filter == {"killed": "shop\\.b", "unsubscribed": ""}[end]
        tables = cursor.view.tables
        assert isinstance(tables, CanalTables)
        assert tables.filter == client.filter

    asyncio.run(scenario())


def test_view_of_another_process_has_the_hash_of_this_one() -> None:
    view = View("canal", CanalTables("shop\\..*", TablePatterns()))
    there = View("canal", CanalTables("shop\\..*", TablePatterns()))
    # The hashes of strings differ between processes.
    object.__setattr__(there, "_hash", hash(view) + 1)
    moved = pickle.loads(pickle.dumps(there))
    assert {view: "shared"}[moved] == "shared"
