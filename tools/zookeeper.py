# SPDX-License-Identifier: Apache-2.0
"""A real ZooKeeper ensemble of one or several servers, private to the process that starts it.

with ZooKeeper() as ensemble:
    ensemble.hosts          # "127.0.0.1:40213"
"""

import os
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

from tools.companion import Companion
from tools.maven import artifacts, program
from tools.servers.ports import free_port

VERSION = "3.9.3"

# The shortest session is two ticks.
TICK_MILLISECONDS = 250
SESSION_MILLISECONDS_MAX = 600_000
# How long a server of an ensemble waits for the other servers.
PEER_TICKS_MAX = 40

_ARTIFACTS = (
    f"org.apache.zookeeper:zookeeper:{VERSION}",
    "io.dropwizard.metrics:metrics-core:4.1.12.1",
    "org.xerial.snappy:snappy-java:1.1.10.5",
)


def install() -> Path:
    """Return the folder of ZooKeeper's jars, fetched if missing. Raises PartMissing."""
    return artifacts(f"zookeeper-{VERSION}", _ARTIFACTS)


class ZooKeeper(Companion):
    """The server."""

    NAME = "ZooKeeper"

    @property
    def hosts(self) -> str:
        """The server's address, as in a URL."""
        return f"127.0.0.1:{self.port}"

    def argv(self, folder: Path) -> list[str]:
        jars = install()
        (folder / "zoo.cfg").write_text(
            f"dataDir={folder / 'kept'}\nclientPort={self.port}\nclientPortAddress=127.0.0.1\n"
            f"tickTime={TICK_MILLISECONDS}\nmaxSessionTimeout={SESSION_MILLISECONDS_MAX}\nmaxClientCnxns=0\n"
            "admin.enableServer=false\n4lw.commands.whitelist=isro\n" + self._peer_settings(folder)
        )
        # Without syncs, the server's data survives a kill of the process but not a power failure, which tests
        # do not simulate.
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no"]
        main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return [program("java"), *options, "-cp", f"{jars}{os.sep}*", main, str(folder / "zoo.cfg")]

    def _peer_settings(self, folder: Path) -> str:
        """Return the settings that name the other servers of the ensemble."""
        return ""

    def answers(self) -> bool:
        # A server that is still reading its data also answers "ok". It then closes every client connection
        # or, if it has no database yet, leaves the client waiting. The response to "isro" shows whether it
        # really serves clients.
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"isro")
                return connection.recv(4) == b"rw"
        except OSError:
            return False


class EnsembleNode(ZooKeeper):
    """A server of an ensemble. `peers` lists the host:port:port of every server, in the order of the servers'
    numbers from 1.
    """

    def __init__(self, number: int, peers: Sequence[str]) -> None:
        super().__init__()
        self._number = number
        self._peers = peers

    def _peer_settings(self, folder: Path) -> str:
        (folder / "kept").mkdir(exist_ok=True)
        (folder / "kept" / "myid").write_text(f"{self._number}\n")
        servers = "".join(f"server.{number}={peer}\n" for number, peer in enumerate(self._peers, 1))
        return f"initLimit={PEER_TICKS_MAX}\nsyncLimit={PEER_TICKS_MAX}\n{servers}"


class Ensemble:
    """Several servers that form a quorum: the ensemble answers as long as a majority is running. As a context
    manager, it runs them inside the block.
    """

    def __init__(self, count: int = 3) -> None:
        peers = [f"127.0.0.1:{free_port()}:{free_port()}" for _ in range(count)]
        self.nodes = [EnsembleNode(number, peers) for number in range(1, count + 1)]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes:
            node.close()

    def start(self) -> Self:
        """Start the servers that do not run, and return once they answer."""
        # A server answers once it has joined a quorum, so all start at the same time.
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(lambda node: node.start(), [node for node in self.nodes if not node.running]))
        return self

    @property
    def hosts(self) -> str:
        """The addresses of all servers, as in a URL."""
        return ",".join(node.hosts for node in self.nodes)
