# SPDX-License-Identifier: Apache-2.0
"""A real Redis server or cluster, private to the process that starts it.

with Redis() as server:
    server.url          # "redis://127.0.0.1:40213/0"
with RedisCluster() as cluster:
    cluster.url         # "redis://127.0.0.1:40213,127.0.0.1:40217,127.0.0.1:40231"
"""

import socket
import time
from collections.abc import Callable
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
    """The Redis server. It stores nothing on disk.

    With a folder of `tools.servers.certificate`, it also accepts TLS connections.
    """

    NAME = "Redis"

    def __init__(self, *options: str, tls: Path | None = None) -> None:
        super().__init__()
        self.tls_port = 0 if tls is None else free_port()
        self._options = [*options, *self._tls_words(tls)]

    @property
    def url(self) -> str:
        """The server's URL, in the form of the sink's setting."""
        return f"redis://127.0.0.1:{self.port}/0"

    def argv(self, folder: Path) -> list[str]:
        program = str(program_on_host("redis-server", "redis-server"))
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [program, *words, "--save", "", "--appendonly", "no", *self._options]

    def _tls_words(self, folder: Path | None) -> list[str]:
        if folder is None:
            return []
        files = {"ca-cert": "authority.pem", "cert": "server.pem", "key": "server-key.pem"}
        words = [word for name, file in files.items() for word in (f"--tls-{name}-file", str(folder / file))]
        return ["--tls-port", str(self.tls_port), "--tls-auth-clients", "no", *words]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"PING\r\n")
                # A server that requires a password responds with an error.
                return connection.recv(5)[:1] in (b"+", b"-")
        except OSError:
            return False

    def command(self, *words: str | int) -> Any:
        """Run a command, and return its answer in the form of the protocol."""
        with redis.Redis("127.0.0.1", self.port, protocol=2, decode_responses=True) as client:
            connection = client.connection_pool.get_connection()
            connection.send_command(*words)
            return connection.read_response()


class ClusterNode(Redis):
    """A node of a Redis Cluster."""

    def __init__(self, *options: str, tls: Path | None = None) -> None:
        # The default bus port, 10,000 higher, may not exist.
        self.bus_port = free_port()
        words = ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port)]
        if tls is not None:
            # Nodes announce their TLS ports to clients that use TLS.
            words += ["--tls-cluster", "yes", "--tls-replication", "yes"]
        super().__init__(*words, *options, tls=tls)

    @property
    def id(self) -> str:
        """The node's id in the cluster."""
        return str(self.command("CLUSTER", "MYID"))


class RedisCluster:
    """A Redis Cluster: its masters, each with a number of replicas. They store no keys on disk."""

    def __init__(self, *options: str, replicas: int = 0, tls: Path | None = None) -> None:
        # The masters, then the first replica of each, then the second replica of each.
        self.nodes = [ClusterNode(*options, tls=tls) for _ in range(_MASTERS * (1 + replicas))]
        self._tls = tls is not None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of the first masters, in the form of the sink's setting."""
        ports = [node.tls_port if self._tls else node.port for node in self.nodes[:_MASTERS]]
        return f"{'rediss' if self._tls else 'redis'}://{','.join(f'127.0.0.1:{port}' for port in ports)}"

    def start(self) -> Self:
        """Start the nodes that do not run, and return once all slots are served and replicated.

        Raises PartMissing, ServerFailed.
        """
        is_new = not self.nodes[0].port
        for node in self.nodes:
            if not node.running:
                node.start()
        if is_new:
            for number, node in enumerate(self.nodes):
                if number < _MASTERS:
                    low, high = (_SLOTS * index // _MASTERS for index in (number, number + 1))
                    node.command("CLUSTER", "ADDSLOTSRANGE", low, high - 1)
                node.command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
                first = self.nodes[0]
                if node is not first:
                    node.command("CLUSTER", "MEET", "127.0.0.1", first.port, first.bus_port)
        self._wait(lambda: all(self._is_complete(node) for node in self.nodes))
        if is_new:
            for number, replica in enumerate(self.nodes[_MASTERS:]):
                replica.command("CLUSTER", "REPLICATE", self.nodes[number % _MASTERS].id)
        replicas = self.nodes[_MASTERS:] if is_new else []
        self._wait(lambda: all("master_link_status:up" in node.command("INFO") for node in replicas))
        return self

    def fail_over(self, number: int) -> None:
        """Make the first replica of a master replace it, without losing acknowledged writes."""
        replica = self.nodes[_MASTERS + number]
        replica.command("CLUSTER", "FAILOVER")
        self._wait(lambda: all(self._knows_master(node, replica) for node in self.nodes if node.running))

    def _knows_master(self, node: ClusterNode, master: ClusterNode) -> bool:
        return any(served[0][1] == master.port for _, _, *served in node.command("CLUSTER", "SLOTS"))

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + Redis.START_SECONDS_MAX
        while not condition():
            if time.monotonic() > deadline:
                raise ServerFailed(f"the cluster is not ready:\n{self.nodes[0].command('CLUSTER', 'INFO')}")
            time.sleep(0.02)

    def _is_complete(self, node: ClusterNode) -> bool:
        state = node.command("CLUSTER", "INFO")
        return "cluster_state:ok" in state and f"cluster_known_nodes:{len(self.nodes)}" in state

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
        """Begin to move a slot. From then on, its master redirects commands for keys that it does not
        have.
        """
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
