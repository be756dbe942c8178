# SPDX-License-Identifier: Apache-2.0
"""Every client of Canal that is known here, by destination and client id: one session has it at a time.

A client is a subscription `canal-<client id>` of its instance, with one shard, so it is listed, reset and
deleted as any other. Its cursor outlives its connection: in memory to the last entry that was acknowledged,
in the store to the last transaction, from where it goes on after a restart, or at another daemon. Whoever
subscribes last has the client: the session before is closed, and can write nothing more. A client belongs to
the account that subscribed it first; no other account takes it over or deletes it, unless it may.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import structlog

from penstock.coordinate.checkpoint import Checkpoint, Checkpoints
from penstock.coordinate.checkpoint_writer import CheckpointWriter, ShardCheckpoint
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, OPERATION_SECONDS, CoordinationStore
from penstock.coordinate.store import Session as StoreSession
from penstock.coordinate.subscription_record import Subscription, Subscriptions
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
from penstock.serve.access import Account
from penstock.serve.canal.cursor import Cursor, Mark
from penstock.serve.canal.tables import CanalTables
from penstock.serve.pieces import Pieces, View
from penstock.serve.served import Served
from penstock.serve.subscription import Start, Started, position_here, resolve_start
from penstock.serve.threads import run_in

_log = structlog.get_logger(__name__)

_SHARD = 0
_CLIENT_ID_MIN, _CLIENT_ID_MAX = -(1 << 15), (1 << 15) - 1

# The last checkpoint of a session is waited for as long as the store is tried. Where nobody knows whether it
# was written, a client that comes again gets what it has acknowledged once more.
_FLUSH_SECONDS = OPERATION_SECONDS
# Another daemon's lease is removed at once, and taken before its owner can have it again.
_TAKE_TRIES = 5

Edge = Literal["earliest", "latest"]


def subscription_name(client_id: int) -> str:
    """Return the name of the subscription that a client id is."""
    return f"canal-{client_id}"


def parse_client_id(text: str) -> int:
    """Return a client id. Raises OptionInvalid for what is no Java short."""
    try:
        number = int(text)
    except ValueError:
        number = _CLIENT_ID_MAX + 1
    if not _CLIENT_ID_MIN <= number <= _CLIENT_ID_MAX or not text.isascii() or text != text.strip():
        raise OptionInvalid(f"clientId:{text[:64]} is no number from {_CLIENT_ID_MIN} to {_CLIENT_ID_MAX}")
    return number


@dataclass(eq=False)
class Client:
    """One client id of a destination. Belongs to the event loop, and to the session that holds it.

    `cursor` is None until the log holds the place where it begins. `filter` is the text that was sent last.
    """

    destination: str
    client_id: int
    pieces: Pieces
    owner: str | None = None
    cursor: Cursor | None = None
    filter: str = ""
    _start: Start = field(default_factory=lambda: Start(edge="earliest"))
    _within: TablePatterns = field(default_factory=TablePatterns)
    _view: View = field(default_factory=lambda: View("canal"))
    _stored: Checkpoint | None = None
    _noted: Mark | None = None
    _lease: Lease | None = None
    _writing: ShardCheckpoint | None = None
    _supersede: Callable[[str], None] | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        """The name of its subscription."""
        return subscription_name(self.client_id)

    @property
    def account_path(self) -> str:
        """The path of the name of the account that it belongs to."""
        return Subscription(self.destination, self.name).path + "/account"

    @property
    def identity(self) -> str:
        """How Canal writes it in its messages."""
        return (
            f"ClientIdentity[destination={self.destination},clientId={self.client_id},filter={self.filter}]"
        )

    @property
    def view(self) -> View:
        """What it sees of the log."""
        return self._view

    @property
    def consumed(self) -> Position | None:
        """Before which place everything was consumed, as the store has it; None where it has none of here.

        Raises what the log raises.
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
        """Return its cursor, None as long as the log does not hold the place where it begins.

        Raises what finding the place raises.
        """
        if self.cursor is None:
            try:
                started = await self._started()
            except ServerBusy:
                return None
            if self.cursor is not None:
                # A session that came meanwhile was quicker.
                return self.cursor
            view = replace(self._view, gtid_after=started.gtid_after)
            time_us = self._stored.time_us if self._stored else 0
            gtid_set = self._stored.gtid_set if self._stored else ""
            self.cursor = Cursor(
                str(self.client_id), self.pieces, view, Mark(started.position, gtid_set, time_us)
            )
            if self._stored is None:
                self.note()
        return self.cursor

    async def _started(self) -> Started:
        """Find where it begins: at its position, or where another server of the cluster has it."""
        try:
            return await resolve_start(self.pieces, self._start)
        except (ServerChanged, PositionPurged, PositionInvalid) as problem:
            if self._stored is None or not self._stored.gtid_set:
                raise
            _log.warning("a client goes on by its GTID set", client=self.name, why=str(problem))
            return await resolve_start(self.pieces, Start(gtid_set=self._stored.gtid_set))

    def show(self, view: View) -> None:
        """Have it see other tables from now on."""
        self._view = view
        if self.cursor is not None:
            self.cursor.look_at(replace(view, gtid_after=self.cursor.view.gtid_after))

    def note(self) -> None:
        """Have it written how far everything was consumed. Raises LeaseLost."""
        assert self.cursor is not None, "only who consumes has consumed"
        assert self._writing is not None, "only who holds it consumes"
        mark = self.cursor.mark
        if mark is self._noted and self._writing.lost is None:
            return
        self._noted = mark
        server_key = self.pieces.source.server_key(mark.position.epoch)
        self._writing.note(Checkpoint.now(str(mark.position), mark.gtid_set, server_key, mark.time_us))


class Clients:
    """The clients of every destination. Belongs to the event loop; the store is asked in threads."""

    def __init__(
        self,
        served: Served,
        store: CoordinationStore,
        holder: str,
        edge: Edge = "earliest",
        zone_seconds: int = 0,
    ) -> None:
        self._served = served
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
        """Return a client, held by nobody yet where it is new. Raises OptionInvalid, in Canal's own words."""
        if destination not in self._served.instances:
            raise OptionInvalid(f"destination:{destination} should start first")
        key = destination, client_id
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Client(destination, client_id, self._served.pieces(destination))
        return found

    async def is_subscribed(self, client: Client) -> bool:
        """Tell whether it has subscribed, now or before a restart. Raises CoordinationLost."""
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
        """Give a client to a session, `owner`; the one that has it is told by its `supersede`.

        A filter that is asked for takes the place of the one before. Raises AccessDenied for a client that
        is not the account's, OptionInvalid for a filter, and what the store raises.
        """
        within = account.readable(client.destination, client.name)
        if asked:
            # A filter that cannot be used changes nothing.
            await run_in(self._served.threads.compiling, CanalTables, asked, within)
        async with client._lock:
            await asyncio.to_thread(self._prove_takes, client, account)
            had_it = client.owner == owner
            if client.owner not in (None, owner):
                self._take_over(client, owner)
            client.owner, client._supersede = owner, supersede
            try:
                if client._writing is None or client._writing.lost is not None:
                    await self._take(client, account)
                await self._set_filter(client, within, asked)
            except BaseException:
                # A session that has it goes on with it, and is told if another one comes.
                if not had_it:
                    client.owner = client._supersede = None
                raise
        # Where the log is empty or being opened it begins later.
        await client.at()

    async def release(self, client: Client, owner: str) -> None:
        """Take a client from a session that ends: what it has acknowledged is made durable first."""
        async with client._lock:
            if client.owner != owner:
                return
            writing, lease = client._writing, client._lease
            client.owner = client._supersede = client._writing = client._lease = None
            if client.cursor is not None:
                # Batches belong to the connection over which they were given.
                client.cursor = client.cursor.handed_over()
            if writing is None:
                return
            try:
                if not await asyncio.to_thread(writing.flush, _FLUSH_SECONDS):
                    _log.warning("a checkpoint could not be written", client=client.name)
            except LeaseLost as problem:
                _log.info("a client is somebody else's", client=client.name, why=str(problem))
            writing.close()
            client._stored = writing.written or client._stored
            await asyncio.to_thread(self._give_back, lease)

    async def forget(self, client: Client, owner: str, account: Account) -> None:
        """Delete a client's subscription and its cursor.

        Raises AccessDenied for a client that is not the account's, and CoordinationLost.
        """
        account.prove_reads(client.destination, client.name)
        async with client._lock:
            await asyncio.to_thread(self._prove_takes, client, account)
            if client.owner not in (None, owner):
                self._take_over(client, owner)
            # Where it cannot be deleted nobody has it, and whoever comes next takes it anew.
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

    # --- Holding ----------------------------------------------------------------------------

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
        """Raise AccessDenied unless an account may have a client's cursor. Runs in a thread."""
        record = self._store.get(client.account_path)
        account.prove_may_take_over(client.name, "" if record is None else record.value.decode())

    def _give_to(self, client: Client, account: Account) -> None:
        """Note whose a client is, where that is not noted yet. Runs in a thread."""
        try:
            self._store.put(client.account_path, account.name.encode(), ABSENT)
        except VersionConflict:
            # Another daemon was faster, or it had an owner before.
            self._prove_takes(client, account)

    async def _take(self, client: Client, account: Account) -> None:
        """Mark a client as ours in the store, and go on where it stands there."""
        if client._writing is not None:
            client._stored = client._writing.written or client._stored
            client._writing.close()
        wanted = Subscription(client.destination, client.name)
        subscription = await asyncio.to_thread(self._subscriptions.create, wanted)
        await asyncio.to_thread(self._give_to, client, account)
        checkpoints = subscription.checkpoints(self._store)
        lease = await asyncio.to_thread(self._lease_of, subscription)
        state = await asyncio.to_thread(checkpoints.take, _SHARD, lease.token)
        if client.cursor is None or state.checkpoint != client._stored:
            if client.cursor is not None:
                _log.warning("a client's checkpoint was set elsewhere", client=client.name)
            self._begin(client, state.checkpoint)
        client._lease = lease
        client._writing = self._writing(client, checkpoints, lease.token)
        client._noted = None

    def _begin(self, client: Client, checkpoint: Checkpoint | None) -> None:
        """Have a client begin at its checkpoint, or for the first time."""
        if client.cursor is not None:
            client.cursor.close()
        client.cursor = None
        client._stored = checkpoint
        if checkpoint is not None:
            client._start = Start(
                position=Position.parse(checkpoint.position), server_key=checkpoint.server_key or None
            )
        else:
            # What comes into a log that is empty now is after this, whatever the edge.
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
        """Close the session of a client that another daemon, or a person, has taken."""
        if client._writing is None or client._writing.lost is None:
            return
        _log.warning("a client is lost", destination=client.destination, client=client.name, why=str(problem))
        if client._supersede is not None:
            client._supersede(problem.message)

    def _lease_of(self, subscription: Subscription) -> Lease:
        """Take the lease of a client, from whoever has it. Runs in a thread."""
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

    async def _set_filter(self, client: Client, within: TablePatterns, asked: str) -> None:
        """Have a client see what it asks for; without a word it sees what it asked for last."""
        path = Subscription(client.destination, client.name).path + "/filter"
        if asked and asked != client.filter:
            await asyncio.to_thread(self._store.put, path, asked.encode())
        elif not asked and not client.filter:
            record = await asyncio.to_thread(self._store.get, path)
            asked = record.value.decode() if record is not None else ""
        client.filter = asked or client.filter
        tables = await run_in(self._served.threads.compiling, CanalTables, client.filter, within)
        client.show(
            View(
                "canal",
                tables,
                server_zone_seconds=self._zone_seconds,
                with_gtid_set=client.destination in self._served.canal_gtid,
            )
        )
