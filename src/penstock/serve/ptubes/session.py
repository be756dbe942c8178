# SPDX-License-Identifier: Apache-2.0
"""One Ptubes client on one connection: its subscription, its position, and its next response.

nothing ──subscribe──▶ subscribed ──fetch──▶ subscribed        subscribing again starts over
                                  ──the connection ends──▶ gone
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from weakref import WeakKeyDictionary

from penstock.errors import PenstockError
from penstock.logstore.epochs import EpochRecord
from penstock.model import Position, TablePatterns
from penstock.serve.access import Account
from penstock.serve.connections import Connection
from penstock.serve.pieces import Piece, Pieces, View
from penstock.serve.ptubes.events import HEARTBEAT_TABLES, EventRules, Events, Skip, Taken, answer
from penstock.serve.ptubes.messages import FetchRequest, PtubesCheckpoint, PtubesSubscription
from penstock.serve.ptubes.start import start_of
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscriber
from penstock.serve.subscription import Cursor

# The time reserved at the end of a request's timeout, so that the response reaches the client in time.
_MARGIN_SECONDS = 0.010

# If there is something to send, wait this long for more events for the same response.
_LINGER_SECONDS = 0.001

_INT32 = 1 << 31


@dataclass
class Figures:
    """The figures about a connection that monitoring shows. Times are in milliseconds."""

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


@dataclass(frozen=True)
class ClientReport:
    """The state of a connection, as the daemon's processes report it to each other. `instance` is None if the
    connection has no session.
    """

    peer: str
    port: int
    figures: Figures
    instance: str | None
    task: str


@dataclass(eq=False)
class Client:
    """One connection, and its session after it has subscribed."""

    connection: Connection
    figures: Figures
    session: "Session | None" = None
    # Lists the session among the followers of the instance.
    shown: ExitStack = field(default_factory=ExitStack)

    def leave(self) -> None:
        """End the session."""
        self.session = None
        self.shown.close()

    def report(self) -> ClientReport:
        """Return the state that monitors see."""
        subscription = None if self.session is None else self.session.subscription
        instance, task = (None, "") if subscription is None else (subscription.instance, subscription.task)
        return ClientReport(self.connection.peer, self.connection.port, self.figures, instance, task)


class Clients:
    """All active connections. Belongs to the event loop, except for `elsewhere`."""

    def __init__(self) -> None:
        self._known: dict[Connection, Client] = {}
        # The connections of the other processes of the daemon, as last reported.
        self.elsewhere: Mapping[int, Sequence[ClientReport]] = {}
        self.started_ms = time.time_ns() // 1_000_000

    def of(self, connection: Connection) -> Client:
        """Return a connection's client. It is removed when the connection ends."""
        known = self._known.get(connection)
        if known is None:
            known = self._known[connection] = Client(connection, Figures(connection.since_us // 1000))
            connection.when_lost(lambda: self._lost(connection))
        return known

    def here(self) -> list[ClientReport]:
        """Return the connections of this process."""
        return [client.report() for client in self._known.values()]

    def all(self) -> list[ClientReport]:
        """Return the connections of all processes of the daemon."""
        return [*self.here(), *chain.from_iterable(self.elsewhere.values())]

    def sessions(self) -> list[tuple[str, ClientReport]]:
        """Return all connections with a session, each with its instance."""
        return [(client.instance, client) for client in self.all() if client.instance is not None]

    def tasks(self, account: Account) -> list[str]:
        """Return the names of the followers that an account may see, sorted and unique."""
        return sorted({client.task for instance, client in self.sessions() if account.may_read(instance)})

    def _lost(self, connection: Connection) -> None:
        client = self._known.pop(connection, None)
        if client is not None:
            client.leave()


_clients: WeakKeyDictionary[Served, Clients] = WeakKeyDictionary()


def clients_of(served: Served) -> Clients:
    """Return the Ptubes clients of the served instances. The listeners for clients and for monitors share
    them.
    """
    return _clients.setdefault(served, Clients())


class Session:
    """An active subscription. It handles one request at a time, in the order in which the connection receives
    them.
    """

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
        # The starts of the latest two responses, oldest first.
        self._answered: deque[Position] = deque([cursor.position], maxlen=2)

    @property
    def consumed(self) -> Position:
        """The position before which the client has consumed everything: the start of the response before
        last.

        The client does not report its checkpoint. However, a request for the next response shows that it has
        received the previous one.
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
        """Return a session at its checkpoint. Propagates errors from `start_of`."""
        started, skip = await start_of(pieces, subscription.checkpoint)
        return cls(subscription, account, Cursor(pieces, view, started, in_parts=True), skip, shown)

    async def fetch(self, request: FetchRequest, hurry: asyncio.Event) -> bytes:
        """Return the next envelope.

        The envelope ends when it is full, when the timeout expires, when `hurry` is set, or when nothing more
        is available. An envelope without events still reports the session's progress. A decoding error is
        raised once everything before it has been returned.
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
        """Add events. If they begin with a commit, drop a commit at the end of the previous events."""
        if parts and taken.begins_with_end:
            before = parts[-1]
            parts[-1] = before.without_last_end(len(self._rules.shards))
            count += parts[-1].count - before.count
            size += parts[-1].size - before.size
        parts.append(taken)
        return count + taken.count, size + taken.size

    async def _more(self, deadline: float, hurry: asyncio.Event, has_some: bool) -> bool:
        """Load the next events; return False if none arrived in time. The position may have advanced even
        then.

        An error that follows events is deferred until these events were sent.
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
        # A part of a large transaction has no end position; only its events have positions.
        self._piece = piece if piece.is_whole else None
        self._time_us = piece.time_us or self._time_us
        for batch in piece.arrow():
            events = Events(batch, self._rules, self._skip)
            if events.left:
                self._ready.append(events)
        if piece.is_whole:
            # The skipped transaction is complete, or lies before this piece.
            self._skip = None
        # Pieces in memory arrive without waiting, so yield to other tasks.
        await asyncio.sleep(0)
        # If no wanted events arrive, the timeout still applies, even far behind the head.
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
            self.last_checkpoint = self._cursor_checkpoint() or self.last_checkpoint
            if self.last_checkpoint is not None:
                latest = self.last_checkpoint.encode()
        content = answer(parts, self._rules, latest)
        rows = sum(part.count for part in parts)
        self._shown.sent(len(content), rows, self._cursor.position, self._time_us)
        return content

    def _cursor_checkpoint(self) -> PtubesCheckpoint | None:
        """Return the checkpoint of the cursor, between two transactions; None before the first piece."""
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
        """Return an empty envelope, for a client that has to wait."""
        return answer([], self._rules, None)


def tables_for(account: Account, subscription: PtubesSubscription) -> TablePatterns:
    """Return the tables of a subscription that an account may read, plus the heartbeat tables.

    Raises AccessDenied.
    """
    account.prove_reads_whole_rows("Ptubes' events")
    beats = [name for name in HEARTBEAT_TABLES if account.may_read_table(name.database, name.table)]
    tables = TablePatterns([name.sql for name in (*subscription.tables, *beats)])
    return account.readable(subscription.instance, subscription.task, tables)


def _int32(epoch: EpochRecord) -> int:
    return (epoch.server_id + _INT32) % (2 * _INT32) - _INT32


def _last_transaction(gtid_set: str) -> tuple[str, int]:
    """Return the last transaction of a GTID set that is a single run of GTIDs of a single source; otherwise
    nothing.
    """
    uuid, colon, numbers = gtid_set.strip().rpartition(":")
    last = numbers.rpartition("-")[2]
    if not colon or not last.isdecimal() or "," in gtid_set or ":" in uuid:
        return "", 0
    return uuid, int(last)
