# SPDX-License-Identifier: Apache-2.0
"""Canal's TCP protocol: one session per connection, one request after the other.

    server                      client
    HANDSHAKE seed  ─────────▶
                    ◀─────────  CLIENTAUTHENTICATION      nothing else is answered before it succeeds
    ACK             ─────────▶
                    ◀─────────  SUBSCRIPTION filter
    ACK             ─────────▶
                    ◀─────────  GET size, timeout
    MESSAGES        ─────────▶
                    ◀─────────  CLIENTACK                 answered only with an error

The only messages that the server sends without a request are HANDSHAKE and the errors of CLIENTACK and
CLIENTROLLBACK.
"""

import asyncio
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import ExitStack, suppress
from typing import Any

import structlog

from penstock.coordinate.store import CoordinationStore
from penstock.errors import AuthenticationFailed, LeaseLost, OptionInvalid, PenstockError
from penstock.limits import (
    CANAL_BATCH_BYTES_MAX,
    CANAL_FRAME_BYTES_MAX,
    CANAL_GREETING_BYTES_MAX,
    CANAL_GREETINGS_MAX,
    CANAL_IDLE_SECONDS_DEFAULT,
    CANAL_IDLE_SECONDS_MAX,
    GREETING_SECONDS_MAX,
    REQUEST_SECONDS_MAX,
    SEND_SECONDS_MAX,
)
from penstock.serve.access import Access, Account
from penstock.serve.canal import frames
from penstock.serve.canal.clients import Bring, Client, Clients, parse_client_id
from penstock.serve.canal.cursor import Gathered, news
from penstock.serve.canal.frames import ClientAuth, Packet, PacketType, Request
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscriber
from penstock.settings.daemon import ListenSettings

_log = structlog.get_logger(__name__)

_SEED_BYTES = 8

# Canal's error codes: general failure, missing name, acknowledgement of an unknown batch.
_FAILED, _NAME_MISSING, _BATCH_MISSING = 400, 401, 402

# Canal's default fetch size. A client requests it with a size of 0 or less.
_FETCH_SIZE_DEFAULT = 1000
_FETCH_UNIT_BYTES = 1024

# Java's TimeUnit by ordinal, in seconds. Any other number means milliseconds.
_UNIT_SECONDS = (1e-9, 1e-6, 1e-3, 1.0, 60.0, 3600.0, 86_400.0)
_MILLISECONDS = 2

# TCP_QUICKACK is available on Linux only.
_QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)

# The maximum number of requests that a client may send while it waits for changes.
_UNANSWERED_MAX = 16

# The polling interval for an empty log that has no notifications yet.
_POLL_SECONDS = 1.0


class CanalServer:
    """Holds all sessions with Canal clients, and the clients that they use. Belongs to the event loop."""

    def __init__(
        self,
        served: Served,
        access: Access,
        store: CoordinationStore,
        settings: ListenSettings,
        bring: Bring | None = None,
    ) -> None:
        """`bring` takes clients from other processes of the daemon: see `Clients`."""
        self.served = served
        self.access = access
        holder = f"{socket.gethostname()}/{os.getpid()}"
        self.clients = Clients(
            served, store, holder, settings.canal_start, settings.canal_zone_seconds, bring
        )

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends; unacknowledged batches are sent again later.

        Raises the error that ended the connection, unless the client closed it.
        """
        await CanalSession(self, reader, writer).run()


class CanalSession:
    """One connection from a Canal client, with its account and the client ids that it holds."""

    def __init__(
        self, server: CanalServer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._served, self._access, self._clients = server.served, server.access, server.clients
        self._reader, self._writer = reader, writer
        self._socket = writer.get_extra_info("socket")
        host, port = (writer.get_extra_info("peername") or ("?", 0))[:2]
        self.peer = f"{host}:{port}"
        self._account: Account | None = None
        self._held: dict[tuple[str, int], tuple[Client, Subscriber]] = {}
        self._shown: dict[tuple[str, int], ExitStack] = {}
        self._read_seconds = self._write_seconds = CANAL_IDLE_SECONDS_DEFAULT
        # The read of a frame that began while the session waited for changes, and the frames that arrived
        # during such waits.
        self._early: asyncio.Task[bytes | None] | None = None
        self._unanswered: deque[bytes] = deque()
        self._superseded = False

    async def run(self) -> None:
        """Serve the connection until it ends. Raises the error that ended it, unless the client closed it."""
        try:
            await self._authenticate()
            while self._account is not None and not self._superseded:
                frame = await self._next_frame()
                if frame is None or self._superseded:
                    return
                await self._answer(frames.read_packet(frame), self._account)
        finally:
            if self._early is not None:
                self._early.cancel()
                # The outcome of the read no longer matters once the session has ended.
                self._early.add_done_callback(lambda done: done.cancelled() or done.exception())
            for client, _ in self._held.values():
                await self._clients.release(client, self.peer)
            for shown in self._shown.values():
                shown.close()

    def supersede(self, why: str) -> None:
        """End the session at once: another session has taken over its clients."""
        self._superseded = True
        self._writer.transport.abort()

    # --- Frames -----------------------------------------------------------------------------

    async def _next_frame(self) -> bytes | None:
        """Return the next frame, None if the client disconnected. Raises TimeoutError."""
        if self._unanswered:
            return self._unanswered.popleft()
        early, self._early = self._early, None
        return await (self._read_frame(self._read_seconds, CANAL_FRAME_BYTES_MAX) if early is None else early)

    async def _read_frame(self, idle_seconds: float, bytes_max: int) -> bytes | None:
        reader = self._reader
        self._acknowledge_at_once()
        async with asyncio.timeout(idle_seconds):
            first = await reader.read(1)
        if not first:
            return None
        self._acknowledge_at_once()
        # A frame that has started must arrive in time, so that nobody holds a connection with a trickle of
        # bytes.
        async with asyncio.timeout(REQUEST_SECONDS_MAX):
            header = first + await reader.readexactly(frames.LENGTH_BYTES - 1)
            return await reader.readexactly(frames.frame_length(header, bytes_max))

    def _acknowledge_at_once(self) -> None:
        """Make the kernel acknowledge the received data immediately.

        Clients write a frame's length, the rest, and possibly the next frame separately. Many clients delay a
        small write until the previous one is acknowledged, and a delayed acknowledgement would take 40 ms.
        """
        # Ignore errors: the next read reports a lost connection.
        with suppress(OSError):
            if _QUICK_ACK is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, _QUICK_ACK, 1)

    async def _send(self, *parts: bytes | memoryview) -> None:
        if len(parts) == 1:
            self._writer.write(parts[0])
        else:
            self._writer.writelines(parts)
        async with asyncio.timeout(min(self._write_seconds, SEND_SECONDS_MAX)):
            await self._writer.drain()

    # --- Authentication ---------------------------------------------------------------------

    async def _authenticate(self) -> None:
        """Ask for authentication, a few times; no other request is processed before it succeeds."""
        seed = secrets.token_bytes(_SEED_BYTES)
        await self._send(frames.handshake(seed))
        for _ in range(CANAL_GREETINGS_MAX):
            frame = await self._read_frame(GREETING_SECONDS_MAX, CANAL_GREETING_BYTES_MAX)
            if frame is None:
                return
            packet = frames.read_packet(frame)
            if packet.type != PacketType.CLIENTAUTHENTICATION:
                await self._send(
                    frames.ack_error(_FAILED, f"packet type: {packet.type_name} is NOT supported!")
                )
                continue
            credentials = frames.read_client_auth(packet.body)
            account = self._access.of_canal(credentials.username, credentials.password, seed)
            if account is not None:
                await self._admit(account, credentials)
                return
            _log.warning("a client of Canal is not let in", peer=self.peer, user=credentials.username[:64])
            await self._send(frames.ack_error(_FAILED, f"auth failed for user:{credentials.username}"))
        raise AuthenticationFailed(f"{CANAL_GREETINGS_MAX} tries were none that is let in")

    async def _admit(self, account: Account, credentials: ClientAuth) -> None:
        self._account = account
        self._read_seconds = _idle_seconds(credentials.read_timeout_ms)
        self._write_seconds = _idle_seconds(credentials.write_timeout_ms)
        if credentials.destination and credentials.client_id:
            request = Request(
                credentials.destination, credentials.client_id, filter=credentials.filter.strip()
            )
            if not await self._try_or_report(self._subscribe(request, account)):
                return
        await self._send(frames.ack())

    # --- Requests ---------------------------------------------------------------------------

    async def _answer(self, packet: Packet, account: Account) -> None:
        """Answer one request. Raises OptionInvalid for an invalid request."""
        if packet.compression > 1:
            await self._send(frames.ack_error(_FAILED, "compression is not supported"))
        elif packet.type == PacketType.GET:
            await self._get(frames.read_get(packet.body), account)
        elif packet.type == PacketType.CLIENTACK:
            await self._acknowledge(frames.read_batch_request(packet.body), account)
        elif packet.type == PacketType.CLIENTROLLBACK:
            await self._roll_back(frames.read_batch_request(packet.body))
        elif packet.type == PacketType.SUBSCRIPTION:
            request = frames.read_subscription(packet.body)
            if await self._is_named(request) and await self._try_or_report(self._subscribe(request, account)):
                await self._send(frames.ack())
        elif packet.type == PacketType.UNSUBSCRIPTION:
            request = frames.read_subscription(packet.body)
            if await self._is_named(request) and await self._try_or_report(
                self._unsubscribe(request, account)
            ):
                await self._send(frames.ack())
        else:
            await self._send(frames.ack_error(_FAILED, f"packet type: {packet.type_name} is NOT supported!"))

    async def _is_named(self, request: Request) -> bool:
        """Return whether a request names its client; otherwise report an error."""
        if request.destination and request.client_id:
            return True
        await self._send(frames.ack_error(_NAME_MISSING, "destination or clientId is null"))
        return False

    async def _try_or_report(self, operation: Coroutine[Any, Any, None]) -> bool:
        """Run an operation; if it fails, report the error to the client and return False.

        The connection stays open.
        """
        try:
            await operation
        except LeaseLost:
            # Another session owns the client now, so there is nothing left to answer.
            raise
        except PenstockError as problem:
            _log.warning("a request failed", peer=self.peer, error=type(problem).__name__, why=str(problem))
            await self._send(frames.ack_error(_FAILED, str(problem)))
            return False
        return True

    async def _subscribe(self, request: Request, account: Account) -> None:
        client_id = parse_client_id(request.client_id)
        client = self._clients.get(request.destination, client_id)
        key = client.destination, client_id
        try:
            await self._clients.hold(client, self.peer, self.supersede, account, request.filter)
        except BaseException:
            # If the session held the client before this request, it keeps the client. Otherwise, the client
            # is released.
            if key not in self._held:
                await self._clients.release(client, self.peer)
            raise
        if key not in self._held:
            following = self._served.subscribers.following(
                "canal", client.destination, client.name, account=account.name
            )
            listing = self._shown[key] = ExitStack()
            self._held[key] = client, listing.enter_context(following)
            _log.info(
                "a client of Canal follows",
                destination=client.destination,
                client=client.name,
                peer=self.peer,
                filter=client.filter,
            )

    async def _unsubscribe(self, request: Request, account: Account) -> None:
        client_id = parse_client_id(request.client_id)
        client = self._clients.get(request.destination, client_id)
        key = client.destination, client_id
        try:
            await self._clients.forget(client, self.peer, account)
        finally:
            if client.owner != self.peer:
                self._held.pop(key, None)
                if (shown := self._shown.pop(key, None)) is not None:
                    shown.close()

    async def _client(self, request: Request, account: Account) -> tuple[Client, Subscriber]:
        """Return the client of a request; it may have subscribed over an earlier connection."""
        client_id = parse_client_id(request.client_id)
        key = request.destination, client_id
        if key not in self._held:
            client = self._clients.get(*key)
            account.prove_reads(request.destination, client.name)
            if not await self._clients.is_subscribed(client):
                raise OptionInvalid(f"ClientIdentity:{client.identity} should subscribe first")
            await self._subscribe(Request(request.destination, request.client_id), account)
        return self._held[key]

    async def _acknowledge(self, request: Request, account: Account) -> None:
        if not await self._is_named(request) or request.batch_id == frames.NO_BATCH:
            return
        if request.batch_id == 0:
            await self._send(frames.ack_error(_BATCH_MISSING, "batchId should assign value"))
            return

        async def acknowledge() -> None:
            client, _ = await self._client(request, account)
            cursor = await client.at()
            if cursor is None:
                raise OptionInvalid(
                    f"ack error , clientId:{client.client_id} batchId:{request.batch_id} is not exist ,"
                    " please check"
                )
            cursor.acknowledge(request.batch_id)
            client.note()

        await self._try_or_report(acknowledge())

    async def _roll_back(self, request: Request) -> None:
        if not await self._is_named(request):
            return

        async def roll_back() -> None:
            held = self._held.get((request.destination, parse_client_id(request.client_id)))
            # Clients send a rollback even before they subscribe, and expect no response. Batches sent over an
            # earlier connection are sent again anyway.
            if held is not None and held[0].cursor is not None:
                held[0].cursor.roll_back(request.batch_id)

        await self._try_or_report(roll_back())

    # --- Fetching ---------------------------------------------------------------------------

    async def _get(self, request: Request, account: Account) -> None:
        if not await self._is_named(request):
            return

        async def get() -> None:
            with account.request():
                client, subscriber = await self._client(request, account)
                limit = request.fetch_size if request.fetch_size > 0 else _FETCH_SIZE_DEFAULT
                gathered = await self._gather(
                    client, min(limit * _FETCH_UNIT_BYTES, CANAL_BATCH_BYTES_MAX), _seconds_of(request)
                )
                if self._superseded:
                    return
                await self._send_batch(client, subscriber, gathered, account)

        await self._try_or_report(get())

    async def _send_batch(
        self, client: Client, subscriber: Subscriber, gathered: Gathered | None, account: Account
    ) -> None:
        consumed = client.consumed if client.cursor is not None else None
        if consumed is not None:
            self._served.consumers.note(client.destination, client.name, consumed, account)
        if gathered is None:
            if client.cursor is not None:
                client.note()
            await self._send(frames.no_messages())
            return
        assert client.cursor is not None, "it was gathered with it"
        batch = client.cursor.give(gathered)
        mark = gathered.mark
        subscriber.sent(
            gathered.bytes, gathered.rows, mark.position if mark else None, mark.time_us if mark else 0
        )
        await self._send(frames.messages_head(batch.id, gathered.bytes), *gathered.parts)
        wait = account.spend(gathered.bytes, time.monotonic())
        if wait > 0:
            await asyncio.sleep(wait)

    async def _gather(self, client: Client, limit: int, seconds: float | None) -> Gathered | None:
        """Gather entries; during the wait, detect a client that disconnects."""
        if seconds is not None and seconds <= 0:
            cursor = await client.at()
            return None if cursor is None else await cursor.gather(limit, 0)
        gathering = asyncio.create_task(_wait_for_entries(client, limit, seconds))
        try:
            while not gathering.done() and len(self._unanswered) < _UNANSWERED_MAX:
                if self._early is None:
                    self._early = asyncio.create_task(
                        self._read_frame(self._read_seconds, CANAL_FRAME_BYTES_MAX)
                    )
                await asyncio.wait({gathering, self._early}, return_when=asyncio.FIRST_COMPLETED)
                if not gathering.done():
                    early, self._early = self._early, None
                    frame = early.result()
                    if frame is None:
                        raise ConnectionResetError("the client left while it waited for changes")
                    self._unanswered.append(frame)
            return await gathering
        finally:
            gathering.cancel()


async def _wait_for_entries(client: Client, limit: int, seconds: float | None) -> Gathered | None:
    loop = asyncio.get_running_loop()
    deadline = None if seconds is None else loop.time() + seconds
    while True:
        seen = client.pieces.arrivals.number(client.destination)
        cursor = await client.at()
        remaining = None if deadline is None else max(deadline - loop.time(), 0.0)
        if cursor is not None:
            return await cursor.gather(limit, remaining)
        if client.pieces.arrivals.closing or remaining == 0:
            return None
        # No notification is sent when a log has been opened, so do not rely on notifications while it is
        # being opened.
        await news(client.pieces, seen, _POLL_SECONDS if remaining is None else min(remaining, _POLL_SECONDS))


def _seconds_of(request: Request) -> float | None:
    """Return how long a GET waits. None means forever, which is Canal's meaning of no timeout or 0."""
    if not request.timeout:
        return None
    if request.timeout < 0:
        return 0.0
    unit = request.unit if request.unit is not None else _MILLISECONDS
    return request.timeout * _UNIT_SECONDS[unit if 0 <= unit < len(_UNIT_SECONDS) else _MILLISECONDS]


def _idle_seconds(timeout_ms: int) -> float:
    """Return how long a client may be silent, or may leave data unread."""
    return min(timeout_ms / 1000, CANAL_IDLE_SECONDS_MAX) if timeout_ms > 0 else CANAL_IDLE_SECONDS_DEFAULT
