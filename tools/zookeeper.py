# SPDX-License-Identifier: Apache-2.0
"""A real ZooKeeper server, an ensemble of one, private to the process that starts it.

with ZooKeeper() as ensemble:
    ensemble.hosts          # "127.0.0.1:40213"
"""

import os
import socket
from pathlib import Path

from tools.companion import Companion
from tools.maven import artifacts, program

VERSION = "3.9.3"

# The shortest session is two ticks.
TICK_MILLISECONDS = 250
SESSION_MILLISECONDS_MAX = 600_000

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
            "admin.enableServer=false\n4lw.commands.whitelist=isro\n"
        )
        # Without syncs its data survives a kill of the process but not a power failure, which tests do not
        # simulate.
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dzookeeper.forceSync=no"]
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        return [program("java"), *options, "-cp", f"{jars}{os.sep}*", main, str(folder / "zoo.cfg")]

    def answers(self) -> bool:
        # A server that is still reading its data answers "ok" too, and closes every client or, before it has
        # a database, leaves it waiting. The response to "isro" shows whether it serves clients.
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"isro")
                return connection.recv(4) == b"rw"
        except OSError:
            return False
