# SPDX-License-Identifier: Apache-2.0
"""Moves the state of a Canal client between listener processes, following its connections.

    process that the client connected to     daemon                      process that has the client
    ClientWanted  ─────────────────────────▶ ClientRecalled  ──────────▶ ends its session, makes its
    ClientGranted ◀───────────────────────── ClientReturned  ◀────────── position durable

The daemon only knows which process owns which client. A process that has ended owns no clients. Its clients
continue at their checkpoints in the store. The leases on these checkpoints fence late writes by the ended
process.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from penstock.serve.canal.clients import FLUSH_SECONDS, Clients, ClientState

# The timeout of a recall. Before it answers, the process that has the client makes the client's position
# durable.
_RETURN_SECONDS_MAX = FLUSH_SECONDS + 2.0

_log = structlog.get_logger(__name__)

_Key = tuple[str, int]


@dataclass(frozen=True)
class ClientWanted:
    """A connection of a Canal client, by destination and id, has arrived at the process that sends this
    message.
    """

    key: _Key


@dataclass(frozen=True)
class ClientGranted:
    """The process that receives this message now owns the client, with the state from the client's previous
    process.
    """

    key: _Key
    state: ClientState | None


@dataclass(frozen=True)
class ClientRecalled:
    """Another process wants a client. `number` identifies the answer."""

    number: int
    key: _Key


@dataclass(frozen=True)
class ClientReturned:
    """The answer to `ClientRecalled`: the state of the client, None if the process does not own the
    client.
    """

    number: int
    state: ClientState | None


@dataclass
class _Holder:
    """The process that owns a client, None if none does. The lock is held while the client moves."""

    process: int | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ClientMoves:
    """Tracks, in the daemon, which listener process owns which Canal client. Belongs to the event loop.

    `send` sends a message to the process with a number. It does not wait, and keeps the order of messages.
    """

    def __init__(
        self, send: Callable[[int, object], None], return_seconds_max: float = _RETURN_SECONDS_MAX
    ) -> None:
        self._send = send
        self._return_seconds_max = return_seconds_max
        self._holders: dict[_Key, _Holder] = {}
        # How many times each process has ended.
        self._ends: Counter[int] = Counter()
        self._numbers = itertools.count(1)
        # The recalls that wait for an answer, each with the process that was asked.
        self._recalls: dict[int, tuple[int, asyncio.Future[ClientState | None]]] = {}

    async def move(self, process: int, message: ClientWanted) -> None:
        """Give a client to a process that wants it."""
        holder, ends = self._holders.setdefault(message.key, _Holder()), self._ends[process]
        async with holder.lock:
            if ends != self._ends[process]:
                # The process that wants the client has ended in the meantime.
                return
            state = None
            if holder.process not in (None, process):
                state = await self._recall(holder.process, message.key)
            holder.process = process if ends == self._ends[process] else None
            self._send(process, ClientGranted(message.key, state))

    def returned(self, message: ClientReturned) -> None:
        """Pass on the answer to a recall, unless it came too late."""
        _, answer = self._recalls.get(message.number, (0, None))
        if answer is not None and not answer.done():
            answer.set_result(message.state)

    def lost(self, process: int) -> None:
        """Forget the clients of a process that has ended."""
        self._ends[process] += 1
        for holder in self._holders.values():
            if holder.process == process:
                holder.process = None
        for asked, answer in self._recalls.values():
            if asked == process and not answer.done():
                answer.set_result(None)

    async def _recall(self, process: int, key: _Key) -> ClientState | None:
        number = next(self._numbers)
        answer: asyncio.Future[ClientState | None] = asyncio.get_running_loop().create_future()
        self._recalls[number] = process, answer
        self._send(process, ClientRecalled(number, key))
        try:
            return await asyncio.wait_for(answer, self._return_seconds_max)
        except TimeoutError:
            # The lease is taken over in the store, which fences late writes of the process.
            _log.warning("a listener process does not release a client", listener=process, client=key[1])
            return None
        finally:
            del self._recalls[number]


class WantedClients:
    """Requests clients for a listener process from the daemon. Belongs to the event loop."""

    def __init__(self, send: Callable[[object], None]) -> None:
        self._send = send
        self._waiting: dict[_Key, asyncio.Future[ClientState | None]] = {}

    async def bring(self, destination: str, client_id: int) -> ClientState | None:
        """Take a client from the process that owns it; see `penstock.serve.canal.clients.Bring`."""
        key = destination, client_id
        granted: asyncio.Future[ClientState | None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = granted
        self._send(ClientWanted(key))
        return await granted

    def granted(self, message: ClientGranted) -> None:
        """Continue the session that wants a client, unless the process is ending."""
        granted = self._waiting.pop(message.key, None)
        if granted is not None and not granted.done():
            granted.set_result(message.state)

    async def recalled(self, message: ClientRecalled, clients: Clients | None) -> None:
        """Release a client for another process."""
        state = None
        try:
            if clients is not None:
                state = await clients.hand_over(*message.key)
        finally:
            self._send(ClientReturned(message.number, state))
