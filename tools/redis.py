# SPDX-License-Identifier: Apache-2.0
"""A real Redis server or cluster, private to the process that starts it.

with Redis() as server:
    server.url          # "redis://127.0.0.1:40213/0"
with RedisCluster() as cluster:
    cluster.url         # "redis://127.0.0.1:40213,127.0.0.1:40217,127.0.0.1:40231"
"""

import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis

from tools.companion import Companion
from tools.servers.errors import ServerFailed
from tools.servers.packages import program_on_host
from tools.servers.ports import free_port

_SLOTS = 16_384
_MASTERS = 3
_MIGRATE_MILLISECONDS_MAX = 60_000


class Redis(Companion):
    """The server. It stores nothing on disk."""

    NAME = "Redis"

    def __init__(self, *options: str) -> None:
        super().__init__()
        self._options = options

    @property
    def url(self) -> str:
        """The server's URL, in the form of the sink's setting."""
        return f"redis://127.0.0.1:{self.port}/0"

    def argv(self, folder: Path) -> list[str]:
        program = str(program_on_host("redis-server", "redis-server"))
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [program, *words, "--save", "", "--appendonly", "no", *self._options]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                # A server that requires a password responds with an error.
                return connection.recv(5)[:1] in (b"+", b"-")
        except OSError:
            return False

    def command(self, *words: str | int) -> Any:
        """Run a command, and return its answer as the protocol has it."""
        with redis.Redis("127.0.0.1", self.port, protocol=2, decode_responses=True) as client:
            connection = client.connection_pool.get_connection()
            connection.send_command(*words)
            return connection.read_response()


class ClusterNode(Redis):
    """A node of a cluster."""

    def __init__(self, *options: str) -> None:
        # The default bus port, 10,000 higher, may not exist.
        self.bus_port = free_port()
        super().__init__("--cluster-enabled", "yes", "--cluster-port", str(self.bus_port), *options)

    @property
    def id(self) -> str:
        """The node's id in the cluster."""
        return str(self.command("CLUSTER", "MYID"))


class RedisCluster:
    """The masters of a Redis Cluster, without replicas. They store no keys on disk."""

    def __init__(self, *options: str) -> None:
        self.nodes = [ClusterNode(*options) for _ in range(_MASTERS)]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of all nodes, in the form of the sink's setting."""
        return f"redis://{','.join(f'127.0.0.1:{node.port}' for node in self.nodes)}"

    def start(self) -> Self:
        """Start the nodes that do not run, and return once all slots are served.

        Raises PartMissing, ServerFailed.
        """
        is_new = not self.nodes[0].port
        for node in self.nodes:
            if not node.running:
                node.start()
        if is_new:
            for number, node in enumerate(self.nodes):
                low, high = (_SLOTS * index // _MASTERS for index in (number, number + 1))
                node.command("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
                node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                first = self.nodes[0]
                if node is not first:
                    node.command("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port)
        deadline = time.monotonic() + Redis.START_SECONDS_MAX
        while not all(self._is_complete(node) for node in self.nodes):
            if time.monotonic() > deadline:
                raise ServerFailed(f"the cluster does not start:\n{self.nodes[0].command('CLUSTER', 'INFO')}")
            time.sleep(0.02)
        return self

    def _is_complete(self, node: ClusterNode) -> bool:
        state = node.command("CLUSTER", "INFO")
        return "cluster_state:ok" in state and f"cluster_known_nodes:{_MASTERS}" in state

    def kill(self) -> None:
        """Kill one master as a crash does."""
        self.nodes[1].kill()

    def close(self) -> None:
        """Stop all nodes."""
        for node in self.nodes:
            node.close()

    def owner(self, slot: int) -> ClusterNode:
        """Return the master that serves a slot."""
        ports = [
            master[1]
            for first, last, master, *_ in self.nodes[0].command("CLUSTER", "SLOTS")
            if first <= slot <= last
        ]
        return next(node for node in self.nodes if [node.port] == ports)

    def begin_move(self, slot: int, to: ClusterNode) -> None:
        """Let a slot be moved: its master redirects commands for keys that it does not have."""
        source = self.owner(slot)
        to.command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", to.id)

    def move_keys(self, slot: int, to: ClusterNode, count: int) -> int:
        """Move up to a number of keys of a slot that is being moved; return how many were moved."""
        source = self.owner(slot)
        keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, count)
        if keys:
            target = ("127.0.0.1", to.port, "", 0, _MIGRATE_MILLISECONDS_MAX)
            source.command("MIGRATE", *target, "KEYS", *keys)
        return len(keys)

    def end_move(self, slot: int, to: ClusterNode) -> None:
        """Move a slot that has no keys left."""
        for node in (to, *(node for node in self.nodes if node is not to)):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", to.id)
