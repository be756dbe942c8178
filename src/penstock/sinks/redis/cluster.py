# SPDX-License-Identifier: Apache-2.0
"""Pipelined connections to the masters of a Redis Cluster.

A key belongs to one of 16,384 slots, and each slot to a master. A command is sent to the master of its key's
slot. If the slot has moved, or is being moved, the master answers with a redirection. The client then waits
for the answers to all commands sent so far, reads the slot assignment again, and repeats the redirected
commands one by one. No command for a key can therefore overtake an earlier command for the same key.
"""

import re
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.errors import ServerBusy, TransientError
from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.redis.commands import split_commands
from penstock.sinks.redis.connection import (
    BYTES_UNDER_WAY,
    Pending,
    Pipeline,
    client,
    matching_keys,
    open_stream,
    refusal,
    translate_errors,
)

_SLOTS = 16_384
_NOBODY = -1
# The maximum number of consecutive redirections. They occur while the cluster's nodes disagree for a moment.
_REDIRECTIONS_MAX = 16
_REDIRECTION = re.compile(r"-(MOVED|ASK) \d+ (.*):(\d+)")
_ASKING = b"*1\r\n$6\r\nASKING\r\n"
# Fields of a line of CLUSTER NODES: the flags, the epoch of the configuration, and the first of the slots.
_FLAGS, _EPOCH, _SLOTS_FROM = 2, 6, 8


class ClusterPipeline:
    """Connections to the masters of a cluster, opened when a master receives its first command, with the
    commands pending on each. Used by one thread.
    """

    def __init__(self, endpoint: Endpoint, password: Secret | None) -> None:
        self._endpoint = endpoint
        self._password = password
        # For each slot, the index of its master in `_masters`, which lists addresses as "host:port".
        self._owners = numpy.full(_SLOTS, _NOBODY, numpy.int32)
        self._masters: list[str] = []
        self._pipelines: dict[str, _MasterPipeline] = {}
        self.bytes = 0
        self._read_slots()

    def connect_all(self) -> None:
        """Connect to every master. Raises the same errors as `connection.connect`."""
        for address in self._masters:
            self._pipeline(address)

    def send(self, encoded: pyarrow.Array, keys: pyarrow.Array, answers: int = 1) -> None:
        """Send an array of commands, each answered by `answers` lines, to the masters of their keys.

        Raises ConnectionLost, ServerBusy, and the error of an earlier command that failed.
        """
        step = max(1, len(encoded) * BYTES_UNDER_WAY // max(1, encoded.nbytes))
        for start in range(0, len(encoded), step):
            self._send(encoded.slice(start, step), keys.slice(start, step), answers)

    def finish(self) -> None:
        """Wait until everything is answered. Raises the same errors as `send`."""
        for pipeline in self._pipelines.values():
            pipeline.finish()
        self._repeat_redirected()

    def close(self) -> None:
        """Close the connections."""
        for pipeline in self._pipelines.values():
            pipeline.close()

    @property
    def is_open(self) -> bool:
        """Whether the connections are still open. Requires that no command is pending."""
        return all(pipeline.is_open for pipeline in self._pipelines.values())

    def matching_keys(self, pattern: str) -> Iterator[pyarrow.Array]:
        """Yield all keys that match a pattern, in pages.

        Raises ServerBusy if slots are being moved, because a key might then move from a master that is
        scanned later to one that was scanned before.
        """
        before = self._states_of_slots()
        for address in self._masters:
            yield from matching_keys(self._node(address), self._password, pattern)
        if self._states_of_slots() != before:
            raise ServerBusy("slots of the Redis Cluster were moved while its keys were listed")

    def _send(self, encoded: pyarrow.Array, keys: pyarrow.Array, answers: int) -> None:
        slots = _slots_of(keys)
        owners = self._owners[slots]
        for owner in numpy.unique(owners):
            indexes = numpy.flatnonzero(owners == owner)
            rows = pyarrow.array(indexes)
            pipeline = self._pipeline(self._master_of(slots[indexes[0]]))
            before = pipeline.bytes
            pipeline.send(encoded.take(rows), keys.take(rows), answers)
            self.bytes += pipeline.bytes - before
        if any(pipeline.redirected for pipeline in self._pipelines.values()):
            self.finish()

    def _repeat_redirected(self) -> None:
        """Repeat redirected commands in order. Requires that no command is pending.

        The slot assignment is refreshed only now. If it were refreshed earlier, a command could reach a key's
        new master while the old master still has to redirect an earlier command for the same key.
        """
        redirected = [command for pipeline in self._pipelines.values() for command in pipeline.take()]
        if redirected:
            self._read_slots()
        for key, command in redirected:
            self._repeat(key, command)

    def _repeat(self, key: bytes, command: bytes) -> None:
        [slot] = _slots_of(pyarrow.array([key], pyarrow.binary()))
        address, asks = self._master_of(slot), False
        for _ in range(_REDIRECTIONS_MAX):
            pipeline = self._pipeline(address)
            if asks:
                pipeline.call(_ASKING)
            answer = pipeline.call(command)
            redirection = _REDIRECTION.match(answer)
            if redirection is None:
                if answer.startswith("-"):
                    raise refusal(answer[1:], f"key {key.decode(errors='replace')!r}")
                return
            address = _address(redirection[2] or _host(address), redirection[3])
            asks = redirection[1] == "ASK"
            if not asks:
                self._owners[slot] = self._number(address)
        raise ServerBusy(f"the masters of the Redis Cluster disagree which of them serves slot {slot}")

    def _master_of(self, slot: int) -> str:
        owner = int(self._owners[slot])
        if owner == _NOBODY:
            raise ServerBusy(f"no master of the Redis Cluster serves slot {slot}")
        return self._masters[owner]

    def _number(self, address: str) -> int:
        if address not in self._masters:
            self._masters.append(address)
        return self._masters.index(address)

    def _pipeline(self, address: str) -> "_MasterPipeline":
        if address not in self._pipelines:
            stream = open_stream(self._node(address), self._password)
            self._pipelines[address] = _MasterPipeline(stream)
        return self._pipelines[address]

    def _node(self, address: str) -> Endpoint:
        """Return the settings for connecting to a node."""
        parts = urlsplit(self._endpoint.url)
        url = urlunsplit((parts.scheme, address, parts.path, parts.query, ""))
        return self._endpoint.model_copy(update={"url": url})

    def _read_slots(self) -> None:
        """Read which master serves each slot, from the first node that answers."""
        seeds = urlsplit(self._endpoint.url).netloc.split(",")
        problem: TransientError | None = None
        for address in dict.fromkeys([*self._pipelines, *seeds]):
            try:
                ranges = self._ask(address, "SLOTS")
            except TransientError as error:
                problem = error
                continue
            self._masters = []
            self._owners[:] = _NOBODY
            for first, last, master, *_ in ranges:
                host = master[0].decode() if master[0] not in (None, b"", b"?") else _host(address)
                self._owners[first : last + 1] = self._number(_address(host, master[1]))
            for gone in set(self._pipelines) - set(self._masters):
                self._pipelines.pop(gone).close()
            return
        assert problem is not None
        raise problem

    def _states_of_slots(self) -> list[list[str]]:
        """Return each master's slots, with the epoch of its configuration."""
        self._read_slots()
        states = []
        for address in self._masters:
            lines = [line.split() for line in self._ask(address, "NODES").decode().splitlines()]
            [own] = [line for line in lines if "myself" in line[_FLAGS].split(",")]
            if any(slot.startswith("[") for slot in own[_SLOTS_FROM:]):
                raise ServerBusy(f"slots of the Redis Cluster are being moved: {' '.join(own[_SLOTS_FROM:])}")
            states.append([own[_EPOCH], *own[_SLOTS_FROM:]])
        return states

    def _ask(self, address: str, what: str) -> Any:
        """Return the answer to a CLUSTER command, in its protocol form."""
        with closing(client(self._node(address), self._password)) as redis_client, translate_errors():
            connection: Any = redis_client.connection_pool.get_connection()
            connection.send_command("CLUSTER", what)
            return connection.read_response()


class _MasterPipeline(Pipeline):
    """A connection that collects redirected commands, and all later commands of their keys."""

    def __init__(self, stream: socket.socket) -> None:
        super().__init__(stream)
        self.redirected: list[tuple[bytes, bytes]] = []
        self._redirected_keys: set[bytes] = set()

    def take(self) -> list[tuple[bytes, bytes]]:
        """Remove and return the keys and commands to repeat, in order."""
        taken, self.redirected = self.redirected, []
        self._redirected_keys.clear()
        return taken

    def _check(self, lines: bytes, answered: int, sent: Pending) -> None:
        if not self._redirected_keys and not lines.startswith(b"-") and b"\n-" not in lines:
            return
        keys, commands = sent.keys.cast(pyarrow.binary()), sent.commands.cast(pyarrow.binary())
        answers_each = sent.answers // len(keys)
        for number, line in enumerate(lines.splitlines(), answered):
            row = sent.row_of(number)
            key = keys[row].as_py()
            is_redirected = line.startswith((b"-MOVED ", b"-ASK "))
            if line.startswith(b"-") and not is_redirected:
                raise refusal(line[1:].decode(errors="replace"), f"key {key.decode(errors='replace')!r}")
            if is_redirected or key in self._redirected_keys:
                command = split_commands(commands[row].as_py())[number % answers_each]
                self._redirected_keys.add(key)
                self.redirected.append((key, command))


def _slots_of(keys: pyarrow.Array) -> Any:
    """Return the slot of each key."""
    slots = pyarrow.array(_native.cluster_slots(pyarrow.record_batch([keys], ["key"])))
    return pc.fill_null(slots, 0).to_numpy(zero_copy_only=False)


def _address(host: str, port: int | str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _host(address: str) -> str:
    """Return the host of an address, without the brackets of IPv6."""
    return urlsplit(f"//{address}").hostname or "127.0.0.1"
