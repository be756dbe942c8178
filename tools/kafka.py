# SPDX-License-Identifier: Apache-2.0
"""A real Kafka broker that is also its controller (KRaft), private to the process that starts it.

with Kafka() as broker:
    broker.servers          # "127.0.0.1:40213"
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import ClassVar

from tools.companion import Companion
from tools.maven import artifacts, cached, program
from tools.servers.errors import ServerFailed
from tools.servers.ports import free_port

VERSION = "4.1.0"

# A request during startup is retried after this time.
ANSWER_SECONDS_MAX = 10.0

# A broker loses its session if its controller receives no heartbeat for this time. The broker then leads no
# partition, and no topic can be created. The normal session is long, so that a stall of the machine does not
# end it. After a kill, the broker can rejoin only once its previous session has expired. The session is
# therefore short when a broker is restarted with its data.
SESSION_SECONDS = 600
SESSION_SECONDS_OF_RESTART = 5

_ARTIFACTS = (f"org.apache.kafka:kafka_2.13:{VERSION}",)
_CLUSTER = "cGVuc3RvY2stdGVzdHMtMQ"
# A DescribeCluster request of Kafka's protocol: its length, key 60, version 0, a correlation id, no client
# id, and no operations. The response lists the active brokers. A broker that has just started may be missing
# from it.
_CLUSTER_REQUEST = bytes.fromhex("0000000d003c000000000001ffff000000")
_JVM = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dlog4j2.level=ERROR")


def install() -> Path:
    """Return the folder of Kafka's jars, fetched if missing. Raises PartMissing."""
    return artifacts(f"kafka-{VERSION}", _ARTIFACTS)


class Kafka(Companion):
    """The broker. Topics are created on first write, with `partitions` partitions."""

    NAME = "Kafka"
    # On first use two JVMs start one after the other, and each may take 15 seconds on a busy machine.
    START_SECONDS_MAX: ClassVar[float] = 300.0

    def __init__(self, partitions: int = 3) -> None:
        super().__init__()
        self._partitions = partitions
        self._controller_port = 0

    @property
    def servers(self) -> str:
        """The broker's address, as in `bootstrap.servers`."""
        return f"127.0.0.1:{self.port}"

    def argv(self, folder: Path) -> list[str]:
        jars = install()
        settings, data_folder = folder / "server.properties", folder / "kept"
        java = [program("java"), *_JVM, "-cp", f"{jars}{os.sep}*"]
        if settings.exists():
            settings.write_text(self._properties(data_folder, SESSION_SECONDS_OF_RESTART))
        else:
            self._controller_port = free_port()
            settings.write_text(self._properties(data_folder, SESSION_SECONDS))
            shutil.copytree(self._formatted(java), data_folder)
        return [*java, "kafka.Kafka", str(settings)]

    def _formatted(self, java: list[str]) -> Path:
        """Return a data folder that a JVM formats on first use. Every broker starts with a copy of it."""

        def build(folder: Path) -> None:
            settings = folder / "server.properties"
            settings.write_text(self._properties(folder / "built", SESSION_SECONDS))
            words = ["kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(settings)]
            formatted = subprocess.run(
                [*java, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=self.START_SECONDS_MAX,
            )
            if formatted.returncode != 0:
                raise ServerFailed(f"Kafka's folder cannot be made:\n{formatted.stderr[-2000:]}")

        return cached(f"kafka-{VERSION}-formatted", build)

    def _properties(self, data_folder: Path, session_seconds: int) -> str:
        listeners = f"PLAINTEXT://{self.servers},CONTROLLER://127.0.0.1:{self._controller_port}"
        values = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{self._controller_port}",
            "listeners": listeners,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "broker.session.timeout.ms": session_seconds * 1000,
            "log.dirs": data_folder,
            "num.partitions": self._partitions,
            # The single broker stores the only copy of all topics, including internal topics.
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "group.initial.rebalance.delay.ms": 0,
            "num.network.threads": 1,
            "num.io.threads": 2,
            "log.cleaner.dedupe.buffer.size": 4 << 20,
        }
        return "".join(f"{name}={value}\n" for name, value in values.items())

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), ANSWER_SECONDS_MAX) as connection:
                connection.sendall(_CLUSTER_REQUEST)
                return b"127.0.0.1" in connection.recv(4096)
        except OSError:
            return False
