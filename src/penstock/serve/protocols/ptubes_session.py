# SPDX-License-Identifier: Apache-2.0
"""One client of Ptubes on one connection: what it subscribed to, where it is, and its next answer.

nothing ──subscribe──▶ subscribed ──fetch──▶ subscribed        a subscription again begins anew
                                  ──the connection ends──▶ gone
"""

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from penstock.errors import PenstockError
from penstock.logstore.epochs import EpochRecord
from penstock.model import Position, TablePatterns
from penstock.serve.access import Account
from penstock.serve.connections import Connection
from penstock.serve.pieces import Piece, Pieces, View
from penstock.serve.protocols.ptubes_events import (
    HEARTBEAT_TABLES,
    EventRules,
    Events,
    Skip,
    Taken,
    answer,
)
from penstock.serve.protocols.ptubes_start import start_of
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscriber
from penstock.serve.subscription import Cursor
from penstock.serve.wire.ptubes_messages import FetchRequest, PtubesCheckpoint, PtubesSubscription

# A request's last moments are not worth waiting for: its answer has to reach the client in time.
_MARGIN_SECONDS = 0.010

# With something to send, what else arrives within so little goes into the same answer.
_LINGER_SECONDS = 0.001

_INT32 = 1 << 31


@dataclass
class Figures:
    """What a monitor is shown of a connection; times in milliseconds."""

    connected_ms: int
    inbound_bytes: int = 0
    outbound_bytes: int = 0
    subscribes: int = 0
    failed_subscribes: int = 0
    subscribe_ms: int = 0
    last_subscribe_ms: int = 0
    fetches: int = 0
    failed_fetches: int = 0
    fetch_ms: int = 0
    last_fetch_ms: int = 0
    last_checkpoint: PtubesCheckpoint | None = None


@dataclass(eq=False)
class Client:
    """One connection, with its session once it has subscribed."""

    connection: Connection
    figures: Figures
    session: "Session | None" = None
    # What shows the session among those who follow the instance.
    shown: ExitStack = field(default_factory=ExitStack)

    def leave(self) -> None:
        """Forget the session."""
        self.session = None
        self.shown.close()


class Clients:
    """Every connection that asked for something, until it ends. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: dict[Connection, Client] = {}
        self.started_ms = time.time_ns() // 1_000_000

    def of(self, connection: Connection) -> Client:
        """Return a connection's client, which is forgotten when the connection ends."""
        known = self._known.get(connection)
        if known is None:
            known = self._known[connection] = Client(connection, Figures(connection.since_us // 1000))
            connection.when_lost(lambda: self._lost(connection))
        return known

    def __iter__(self) -> Iterator[Client]:
        return iter(list(self._known.values()))

    def tasks(self, account: Account) -> list[str]:
        """Return the names of those who follow what an account may read, sorted, each once."""
        followed = [one.session.subscription for one in self if one.session is not None]
        return sorted({one.task for one in followed if account.may_read(one.instance)})

    def _lost(self, connection: Connection) -> None:
        client = self._known.pop(connection, None)
        if client is not None:
            client.leave()


_clients: WeakKeyDictionary[Served, Clients] = WeakKeyDictionary()


def clients_of(served: Served) -> Clients:
    """Return the clients of Ptubes of what is served; its monitor asks for the same."""
    return _clients.setdefault(served, Clients())


class Session:
    """A subscription that is being consumed. One request at a time, as its connection has them."""

    def __init__(
        self,
        subscription: PtubesSubscription,
        account: Account,
        cursor: Cursor,
        skip: Skip | None,
        shown: Subscriber,
    ) -> None:
        self.subscription = subscription
        self.account = account
        self._cursor = cursor
        self._skip = skip
        self._shown = shown
        self._rules = EventRules(
            subscription.shard_count, subscription.shards, subscription.need_end, subscription.need_ddl
        )
        self._ready: list[Events] = []
        self._piece: Piece | None = None
        self._time_us = subscription.checkpoint.timestamp * 1000
        self.last_checkpoint: PtubesCheckpoint | None = None
        # Where the last answers began, oldest first.
        self._answered: deque[Position] = deque([cursor.position], maxlen=2)

    @property
    def consumed(self) -> Position:
        """Before which place the client has consumed everything: where the answer before the last one began.

        It keeps its checkpoint to itself, but has taken an answer once it asks for the next.
        """
        return self._answered[0]

    @classmethod
    async def open(
        cls,
        pieces: Pieces,
        subscription: PtubesSubscription,
        account: Account,
        view: View,
        shown: Subscriber,
    ) -> "Session":
        """Return a session at its checkpoint. Raises what `start_of` raises."""
        started, skip = await start_of(pieces, subscription.checkpoint)
        return cls(subscription, account, Cursor(pieces, view, started, in_parts=True), skip, shown)

    async def fetch(self, request: FetchRequest, hurry: asyncio.Event) -> bytes:
        """Return the next envelope.

        It is full, or the time is up, or `hurry` was set, or there is something and nothing more is at hand;
        without events it still tells how far the session has come. Raises what decoding raises, after
        everything before it was returned.
        """
        self._answered.append(self._cursor.position)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max(request.seconds_max - _MARGIN_SECONDS, 0.0)
        parts: list[Taken] = []
        count = size = 0
        while True:
            while self._ready and count < request.events_max and size < request.bytes_max:
                taken = self._ready[0].take(request.events_max - count, request.bytes_max - size)
                if not self._ready[0].left:
                    self._ready.pop(0)
                count, size = self._add(parts, taken, count, size)
            if count >= request.events_max or size >= request.bytes_max:
                break
            if parts:
                deadline = min(deadline, loop.time() + _LINGER_SECONDS)
            if not await self._more(deadline, hurry, bool(parts)):
                break
        return self._envelope(parts)

    def _add(self, parts: list[Taken], taken: Taken, count: int, size: int) -> tuple[int, int]:
        """Add what was taken, in place of a commit that it begins with another of."""
        if parts and taken.begins_with_end:
            before = parts[-1]
            parts[-1] = before.without_last_end(len(self._rules.shards))
            count += parts[-1].count - before.count
            size += parts[-1].size - before.size
        parts.append(taken)
        return count + taken.count, size + taken.size

    async def _more(self, deadline: float, hurry: asyncio.Event, has_some: bool) -> bool:
        """Make the next events ready; return False where none came in time, though the place may move on.

        An error that comes behind events waits until they were sent.
        """
        loop = asyncio.get_running_loop()
        try:
            piece = await self._cursor.next(0.0)
            if piece is None and loop.time() < deadline and not hurry.is_set():
                piece = await self._wait(deadline - loop.time(), hurry)
        except PenstockError:
            if has_some:
                return False
            raise
        if piece is None:
            return False
        # Inside a large transaction the events alone tell the place.
        self._piece = piece if piece.is_whole else None
        self._time_us = piece.time_us or self._time_us
        for batch in piece.arrow():
            events = Events(batch, self._rules, self._skip)
            if events.left:
                self._ready.append(events)
        if piece.is_whole:
            # Its transaction was whole by now, or came before.
            self._skip = None
        # What is in memory comes without a wait, and others want their turn.
        await asyncio.sleep(0)
        # Far behind, with nothing that is wanted, the time is up all the same.
        return bool(self._ready) or loop.time() < deadline

    async def _wait(self, seconds: float, hurry: asyncio.Event) -> Piece | None:
        following = asyncio.ensure_future(self._cursor.next(seconds))
        hurried = asyncio.ensure_future(hurry.wait())
        try:
            await asyncio.wait({following, hurried}, return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else None
        finally:
            hurried.cancel()
            following.cancel()

    def _envelope(self, parts: list[Taken]) -> bytes:
        parts = [part for part in parts if part.count]
        latest: bytes | None = None
        if parts:
            latest = parts[-1].last_checkpoint()
            self.last_checkpoint = PtubesCheckpoint.decode(latest)
        else:
            self.last_checkpoint = self._place() or self.last_checkpoint
            if self.last_checkpoint is not None:
                latest = self.last_checkpoint.encode()
        content = answer(parts, self._rules, latest)
        self._shown.sent(len(content), sum(part.count for part in parts), self._cursor.position)
        return content

    def _place(self) -> PtubesCheckpoint | None:
        """Return the checkpoint of the cursor's place, between two transactions; None before any piece."""
        if self._piece is None:
            return None
        position = self._piece.end
        epoch = self._cursor.pieces.log.epochs.get(position.epoch)
        assert epoch is not None, "what was read belongs to an epoch"
        uuid, number = _last_transaction(self._piece.gtid_set)
        return PtubesCheckpoint(
            uuid=uuid,
            transaction_id=number,
            server_id=_int32(epoch),
            binlog_file=position.file_number,
            binlog_offset=position.offset,
            timestamp=self._time_us // 1000,
        )

    def no_events(self) -> bytes:
        """Return an envelope that says nothing, for who has to wait."""
        return answer([], self._rules, None)


def tables_for(account: Account, subscription: PtubesSubscription) -> TablePatterns:
    """Return the tables of a subscription as far as an account may read them, and those of heartbeats.

    Raises AccessDenied.
    """
    beats = [name for name in HEARTBEAT_TABLES if account.may_read_table(name.database, name.table)]
    tables = TablePatterns([name.sql for name in (*subscription.tables, *beats)])
    return account.readable(subscription.instance, subscription.task, tables)


def _int32(epoch: EpochRecord) -> int:
    return (epoch.server_id + _INT32) % (2 * _INT32) - _INT32


def _last_transaction(gtid_set: str) -> tuple[str, int]:
    """Return the last transaction of a set that is one run of one source, else nothing."""
    uuid, colon, numbers = gtid_set.strip().rpartition(":")
    last = numbers.rpartition("-")[2]
    if not colon or not last.isdecimal() or "," in gtid_set or ":" in uuid:
        return "", 0
    return uuid, int(last)
