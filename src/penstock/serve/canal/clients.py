# SPDX-License-Identifier: Apache-2.0
"""All known Canal clients, by destination and client id. One session at a time holds a client.

A client is the subscription `canal-<client id>` of its instance, with one shard, so it is listed, reset and
deleted like any other. The cursor of a client outlives its connection. In memory, the cursor is exact up to
the last acknowledged entry. In the store, it is at the end of the last acknowledged transaction, from where
the client continues after a restart or at another daemon. When a second connection subscribes as the same
client, it takes the client over: the previous session is closed and its writes are fenced. A client belongs
to the account that subscribed it first; another account can take it over or delete it only with permission.

With listener processes, one process at a time owns a client: see the parameter `bring` of `Clients`. A
client's connection may reach any process; the client's state is then moved to that process.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog

from penstock.coordinate.checkpoint import Checkpoint, Checkpoints
from penstock.coordinate.checkpoint_writer import CheckpointWriter, ShardCheckpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, OPERATION_SECONDS, CoordinationStore
from penstock.coordinate.store import Session as StoreSession
from penstock.coordinate.subscription_record import AS_MEMBERS_ASK, Subscription, Subscriptions
from penstock.errors import (
    CoordinationLost,
    LeaseLost,
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    ServerBusy,
    ServerChanged,
    VersionConflict,
)
from penstock.model import Position, TablePatterns
from penstock.narrowed_patterns import NarrowedPatterns
from penstock.serve.access import Account
from penstock.serve.canal.cursor import Cursor, CursorState, Mark, news
from penstock.serve.canal.tables import CanalTables
from penstock.serve.limited import NO_LIMITS
from penstock.serve.pieces import Pieces, View
from penstock.serve.served import Served
from penstock.serve.subscription import Start, Started, position_here, resolve_start
from penstock.serve.threads import run_in

_log = structlog.get_logger(__name__)

_SHARD = 0
_CLIENT_ID_MIN, _CLIENT_ID_MAX = -(1 << 15), (1 << 15) - 1

# The last checkpoint of a session is awaited for as long as the store retries. If its outcome is unknown, a
# returning client receives again the entries that it has already acknowledged.
FLUSH_SECONDS = OPERATION_SECONDS
# Another daemon's lease is deleted and acquired before its owner can renew it. This may take several tries.
_TAKE_TRIES = 5

# After another process has handed over a client, this process waits for up to this long until it sees the log
# up to the client's position.
_REACH_SECONDS = 5.0

Edge = Literal["earliest", "latest"]


@dataclass(frozen=True)
class ClientState:
    """The state of a client that a process keeps in addition to the coordination store. `cursor` is None as
    long as the log does not contain the client's start position.
    """

    filter: str
    stored: Checkpoint | None
    cursor: CursorState | None


# Takes a client, by its destination and id, from the daemon's process that has it; returns None if no process
# has it.
Bring = Callable[[str, int], Awaitable[ClientState | None]]


def subscription_name(client_id: int) -> str:
    """Return the subscription name of a client id."""
    return f"canal-{client_id}"


def parse_client_id(text: str) -> int:
    """Parse a client id. Raises OptionInvalid if it is not a Java short."""
    try:
        number = int(text)
    except ValueError:
        number = _CLIENT_ID_MAX + 1
    if not _CLIENT_ID_MIN <= number <= _CLIENT_ID_MAX or not text.isascii() or text != text.strip():
        raise OptionInvalid(f"clientId:{text[:64]} is no number from {_CLIENT_ID_MIN} to {_CLIENT_ID_MAX}")
    return number


def _refuse_changed(subscription: Subscription) -> None:
    """Raise OptionInvalid for settings that an operator has changed before the client connected for the first
    time.
    """
    name = f"{subscription.instance}/{subscription.name}"
    if subscription.paused:
        raise OptionInvalid(
            f"subscription {name} is paused", hint=f"Run: penstock subscriptions resume {name}"
        )
    if subscription.selection != AS_MEMBERS_ASK:
        raise OptionInvalid(
            f"subscription {name} has a selection, and Canal clients follow only their filters",
            hint=f"Run: penstock subscriptions set {name} --as-members-ask",
        )


@dataclass(eq=False)
class Client:
    """One client id of a destination. Belongs to the event loop, and to the session that holds it.

    `cursor` is None until the log contains the client's start position. `filter` is the last filter that the
    client sent. `is_here` is false if another process of the daemon may have a newer state of the client.
    """

    destination: str
    client_id: int
    pieces: Pieces
    owner: str | None = None
    cursor: Cursor | None = None
    filter: str = ""
    is_here: bool = True
    _start: Start = field(default_factory=lambda: Start(edge="earliest"))
    _view: View = field(default_factory=lambda: View("canal"))
    _stored: Checkpoint | None = None
    _noted: Mark | None = None
    _lease: Lease | None = None
    _writing: ShardCheckpoint | None = None
    _supersede: Callable[[str], None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """The name of the client's subscription."""
        return subscription_name(self.client_id)

    @property
    def account_path(self) -> str:
        """The path of the record with the name of the client's account."""
        return Subscription(self.destination, self.name).account_path

    @property
    def filter_path(self) -> str:
        """The path of the record with the client's last filter."""
        return Subscription(self.destination, self.name).path + "/filter"

    @property
    def identity(self) -> str:
        """The client's identity as Canal writes it in messages."""
        return (
            f"ClientIdentity[destination={self.destination},clientId={self.client_id},filter={self.filter}]"
        )

    @property
    def view(self) -> View:
        """The client's view of the log."""
        return self._view

    @property
    def consumed(self) -> Position | None:
        """The stored position before which everything was consumed; None if this log does not contain it.

        Propagates errors from the log.
        """
        stored = (self._writing.written if self._writing is not None else None) or self._stored
        if stored is None:
            return None
        try:
            return position_here(
                self.pieces.source, Position.parse(stored.position), stored.server_key or None
            )
        except ServerChanged:
            return None

    async def at(self) -> Cursor | None:
        """Return the cursor, None while the log does not contain the client's start.

        Propagates errors from finding the start.
        """
        if self.cursor is None:
            try:
                started = await self._resolve_start()
            except ServerBusy:
                return None
            if self.cursor is not None:
                # Another session has created the cursor concurrently.
                return self.cursor
            view = replace(self._view, gtid_after=started.gtid_after)
            time_us = self._stored.time_us if self._stored else 0
            gtid_set = self._stored.gtid_set if self._stored else ""
            self.cursor = Cursor(
                str(self.client_id), self.pieces, view, Mark(started.position, gtid_set, time_us)
            )
            # A session that has lost the client in the meantime writes nothing.
            if self._stored is None and self._writing is not None:
                self.note()
        return self.cursor

    async def _resolve_start(self) -> Started:
        """Find the client's start: at its position, or by its GTID set at another server of the cluster."""
        try:
            return await resolve_start(self.pieces, self._start)
        except (ServerChanged, PositionPurged, PositionInvalid) as problem:
            if self._stored is None or not self._stored.gtid_set:
                raise
            _log.warning("a client goes on by its GTID set", client=self.name, why=str(problem))
            return await resolve_start(self.pieces, Start(gtid_set=self._stored.gtid_set))

    def show(self, view: View) -> None:
        """Switch to a view with other tables."""
        self._view = view
        if self.cursor is not None:
            self.cursor.look_at(replace(view, gtid_after=self.cursor.view.gtid_after))

    def give_away(self) -> ClientState:
        """Return the state for another process, which owns the client from now on."""
        cursor, self.cursor, self.is_here = self.cursor, None, False
        return ClientState(self.filter, self._stored, None if cursor is None else cursor.state)

    def adopt(self, state: ClientState) -> None:
        """Continue with the state of another process. The caller acquires the client in the store."""
        self.filter, self._stored, self.cursor = state.filter, state.stored, None
        if state.cursor is not None:
            self.cursor = Cursor.of_state(str(self.client_id), self.pieces, state.cursor)

    def note(self) -> None:
        """Schedule a write of the consumed position. Raises LeaseLost."""
        assert self.cursor is not None, "only who consumes has consumed"
        assert self._writing is not None, "only who holds it consumes"
        mark = self.cursor.mark
        if mark is self._noted and self._writing.lost is None:
            return
        self._noted = mark
        server_key = self.pieces.source.server_key(mark.position.epoch)
        self._writing.note(Checkpoint.now(str(mark.position), mark.gtid_set, server_key, mark.time_us))


class Clients:
    """The clients of all destinations. Belongs to the event loop; store operations run in threads."""

    def __init__(
        self,
        served: Served,
        store: CoordinationStore,
        holder: str,
        edge: Edge = "earliest",
        zone_seconds: int = 0,
        bring: Bring | None = None,
    ) -> None:
        """`bring` takes a client from another process of the daemon; None if this is the only process."""
        self._served = served
        self._bring = bring
        self._store = store
        self._holder = holder
        self._edge = edge
        self._zone_seconds = zone_seconds
        self._subscriptions = Subscriptions(store)
        self._writer: CheckpointWriter | None = None
        self._session: StoreSession | None = None
        self._session_lock = threading.Lock()
        self._known: dict[tuple[str, int], Client] = {}

    def get(self, destination: str, client_id: int) -> Client:
        """Return a client. A new client has no owner. Raises OptionInvalid with Canal's wording."""
        if destination not in self._served.instances:
            raise OptionInvalid(f"destination:{destination} should start first")
        key = destination, client_id
        client = self._known.get(key)
        is_stale = (
            client is not None
            and client.owner is None
            and client.pieces is not self._served.pieces(destination)
        )
        if client is None or is_stale:
            pieces = self._served.pieces(destination)
            is_here = self._bring is None if client is None else client.is_here
            client = self._known[key] = Client(destination, client_id, pieces, is_here=is_here)
        return client

    async def is_subscribed(self, client: Client) -> bool:
        """Return whether the client has subscribed, now or before a restart. Raises CoordinationLost."""
        if client.cursor is not None or client.owner is not None:
            return True
        return await asyncio.to_thread(self._subscriptions.get, client.destination, client.name) is not None

    async def hold(
        self,
        client: Client,
        owner: str,
        supersede: Callable[[str], None],
        account: Account,
        asked: str = "",
    ) -> None:
        """Give a client to the session `owner`; the current session is notified through its `supersede`.

        A new filter replaces the previous one. Raises AccessDenied for another account's client,
        OptionInvalid for an invalid filter, and propagates errors from the store.
        """
        account.prove_reads_whole_rows("Canal's entries")
        readable_tables = account.readable(client.destination, client.name)
        if asked:
            # Check the filter first: an invalid filter changes nothing.
            await run_in(self._served.threads.compiling, CanalTables, asked, readable_tables)
        async with client._lock:
            await asyncio.to_thread(self._prove_takes, client, account)
            await self._bring_here(client)
            was_owner = client.owner == owner
            if client.owner not in (None, owner):
                self._take_over(client, owner)
            client.owner, client._supersede = owner, supersede
            try:
                if client._writing is None or client._writing.lost is not None:
                    await self._acquire(client, account)
                await self._set_filter(client, readable_tables, asked)
            except BaseException:
                # A session that already held the client keeps it, and is notified if another session takes
                # over.
                if not was_owner:
                    client.owner = client._supersede = None
                raise
        # If the log is empty or being opened, the client gets its cursor later.
        await client.at()

    async def release(self, client: Client, owner: str) -> None:
        """Release a client from a session that ends, after making its acknowledgements durable."""
        async with client._lock:
            if client.owner == owner:
                await self._let_go(client)

    async def hand_over(self, destination: str, client_id: int) -> ClientState | None:
        """Release a client for another process of the daemon, which continues from the returned state.

        Return None if this process does not have the client.
        """
        client = self._known.get((destination, client_id))
        if client is None:
            return None
        async with client._lock:
            if not client.is_here:
                return None
            if client.owner is not None:
                self._take_over(client, "another process")
            await self._let_go(client)
            return client.give_away()

    async def _let_go(self, client: Client) -> None:
        """End the session of a client, after making its acknowledgements durable."""
        writing, lease = client._writing, client._lease
        client.owner = client._supersede = client._writing = client._lease = None
        if client.cursor is not None:
            # Batches belong to the connection over which they were sent.
            client.cursor = client.cursor.handed_over()
        if writing is None:
            return
        try:
            if not await asyncio.to_thread(writing.flush, FLUSH_SECONDS):
                _log.warning("a checkpoint could not be written", client=client.name)
        except LeaseLost as problem:
            _log.info("a client belongs to another account", client=client.name, why=str(problem))
        writing.close()
        client._stored = writing.written or client._stored
        await asyncio.to_thread(self._give_back, lease)

    async def forget(self, client: Client, owner: str, account: Account) -> None:
        """Delete a client's subscription and its cursor.

        Raises AccessDenied for another account's client, and CoordinationLost.
        """
        account.prove_reads(client.destination, client.name)
        async with client._lock:
            await asyncio.to_thread(self._prove_takes, client, account)
            await self._bring_here(client)
            if client.owner not in (None, owner):
                self._take_over(client, owner)
            # If the deletion fails, nobody holds the client, and the next session acquires it again.
            writing, lease = client._writing, client._lease
            client.owner = client._supersede = client._writing = client._lease = None
            if writing is not None:
                writing.close()
                client._stored = writing.written or client._stored
            if client.cursor is not None:
                client.cursor = client.cursor.handed_over()
            await asyncio.to_thread(self._give_back, lease)
            await asyncio.to_thread(self._subscriptions.delete, client.destination, client.name)
            self._known.pop((client.destination, client.client_id), None)
            client.cursor = None
        self._served.consumers.forget(client.destination, client.name)
        _log.info("a client has unsubscribed", destination=client.destination, client=client.name)

    # --- Ownership --------------------------------------------------------------------------

    async def _bring_here(self, client: Client) -> None:
        """Take a client from the process of the daemon that has it. Propagates errors from the log."""
        if client.is_here or self._bring is None:
            return
        state = await self._bring(client.destination, client.client_id)
        client.is_here = True
        if state is None:
            return
        client.adopt(state)
        if state.cursor is not None:
            await _reach(client.pieces, state.cursor.acked.position)

    def _take_over(self, client: Client, owner: str) -> None:
        _log.warning(
            "a client is taken over",
            destination=client.destination,
            client=client.name,
            before=client.owner,
            now=owner,
        )
        if client.cursor is not None:
            client.cursor = client.cursor.handed_over()
        assert client._supersede is not None, "who owns it has said how it is told"
        client._supersede(owner)

    def _prove_takes(self, client: Client, account: Account) -> None:
        """Raise AccessDenied unless an account may take over a client's cursor. Runs in a thread."""
        record = self._store.get(client.account_path)
        account.prove_may_take_over(client.name, "" if record is None else record.value.decode())

    def _give_to(self, client: Client, account: Account) -> None:
        """Store the owner of a client unless it has one. Runs in a thread."""
        try:
            self._store.put(client.account_path, account.name.encode(), ABSENT)
        except VersionConflict:
            # Another daemon was faster, or the client already had an owner.
            self._prove_takes(client, account)

    async def _acquire(self, client: Client, account: Account) -> None:
        """Acquire a client in the store, and continue from its stored checkpoint."""
        if client._writing is not None:
            client._stored = client._writing.written or client._stored
            client._writing.close()
        new_subscription = Subscription(client.destination, client.name)
        subscription = await asyncio.to_thread(self._subscriptions.create, new_subscription)
        _refuse_changed(subscription)
        await asyncio.to_thread(self._give_to, client, account)
        checkpoints = subscription.checkpoints(self._store)
        lease = await asyncio.to_thread(self._acquire_lease, subscription)
        state = await asyncio.to_thread(checkpoints.take, _SHARD, lease.token)
        # An operator may have moved the checkpoint, or deleted it with the subscription.
        record = await asyncio.to_thread(self._store.get, client.filter_path)
        client.filter = record.value.decode() if record is not None else ""
        if client.cursor is None or state.checkpoint != client._stored:
            if client.cursor is not None:
                _log.warning("a client's checkpoint was set elsewhere", client=client.name)
            self._begin(client, state.checkpoint)
        client._lease = lease
        client._writing = self._writing(client, checkpoints, lease.token)
        client._noted = None

    def _begin(self, client: Client, checkpoint: Checkpoint | None) -> None:
        """Start a client at its checkpoint, or for the first time."""
        if client.cursor is not None:
            client.cursor.close()
        client.cursor = None
        client._stored = checkpoint
        if checkpoint is not None:
            client._start = Start(
                position=Position.parse(checkpoint.position), server_key=checkpoint.server_key or None
            )
        else:
            # All data of an empty log is still to arrive, so the client starts at the earliest position,
            # whatever the settings say.
            empty = client.pieces.log.visible is None
            client._start = Start(edge="earliest" if empty else self._edge)

    def _writing(self, client: Client, checkpoints: Checkpoints, token: int) -> ShardCheckpoint:
        loop = asyncio.get_running_loop()

        def lost(problem: PenstockError) -> None:
            loop.call_soon_threadsafe(self._lost, client, problem)

        if self._writer is None:
            self._writer = CheckpointWriter()
        return self._writer.open(checkpoints, _SHARD, token, lost)

    def _lost(self, client: Client, problem: PenstockError) -> None:
        """Close the session of a client that another daemon or an operator has taken over."""
        if client._writing is None or client._writing.lost is None:
            return
        _log.warning("a client is lost", destination=client.destination, client=client.name, why=str(problem))
        if client._supersede is not None:
            client._supersede(problem.message)

    def _acquire_lease(self, subscription: Subscription) -> Lease:
        """Acquire the lease of a client, evicting its holder. Runs in a thread."""
        path = subscription.lease_path(_SHARD)
        for _ in range(_TAKE_TRIES):
            with self._session_lock:
                if self._session is None or not self._session.alive:
                    self._session = self._store.session()
                session = self._session
            lease = Lease.acquire(self._store, session, path, self._holder)
            if lease is not None:
                return lease
            _log.warning("a client is taken over from another daemon", client=subscription.name)
            self._store.delete(path)
        raise CoordinationLost("others take the client all the time", position=subscription.path)

    def _give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            try:
                lease.release()
            except PenstockError as problem:
                _log.warning("a lease is left to expire", path=lease.path, why=str(problem))

    def _limited(self, client: Client, within: TablePatterns) -> TablePatterns:
        """Return the readable tables, narrowed by the instance's own Canal filter. If the client has a
        filter, only the exclusions of the instance's filter apply.
        """
        own = self._served.canal_filters.get(client.destination)
        if own is None:
            return within
        return NarrowedPatterns(
            TablePatterns([] if client.filter else list(own.include), list(own.exclude)), within
        )

    async def _set_filter(self, client: Client, within: TablePatterns, asked: str) -> None:
        """Set the tables of a client's filter. Without a new filter, the last filter applies."""
        if asked and asked != client.filter:
            await asyncio.to_thread(self._store.put, client.filter_path, asked.encode())
        client.filter = asked or client.filter
        within = self._limited(client, within)
        tables = await run_in(self._served.threads.compiling, CanalTables, client.filter, within)
        client.show(
            View(
                "canal",
                tables,
                server_zone_seconds=self._zone_seconds,
                with_gtid_set=client.destination in self._served.canal_gtid,
                limits=self._served.canal_limits.get(client.destination, NO_LIMITS),
            )
        )


async def _reach(pieces: Pieces, position: Position) -> None:
    """Wait until this process sees a position that another process has seen, which takes milliseconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _REACH_SECONDS
    while (remaining := deadline - loop.time()) > 0:
        seen, visible = pieces.arrivals.number(pieces.name), pieces.log.visible
        if visible is not None and visible >= position:
            return
        await news(pieces, seen, remaining)
