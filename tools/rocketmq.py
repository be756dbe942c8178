# SPDX-License-Identifier: Apache-2.0
"""A real RocketMQ broker with its name server, private to the process that starts them.

    with RocketMQ() as broker:
        broker.url          # "rocketmq://127.0.0.1:40213"

Both are Java programs from Maven's central repository.
"""

import json
import os
import socket
import struct
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from tools.companion import Companion
from tools.maven import artifacts, program
from tools.servers.ports import free_port, reserve

VERSIONS = ("4.9.4", "5.5.0")

_JVM = ("-Xms256m", "-Xmx256m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# Version 4 reads private fields of Java's buffers.
_OPENED = ("java.base/java.nio", "java.base/sun.nio.ch", "java.base/java.lang", "java.base/jdk.internal.ref")
# The code of a request for the brokers that a name server knows.
_BROKERS = 106
_LOG_CONFIGURATION = """<configuration><appender name="out"
class="ch.qos.logback.core.ConsoleAppender"><encoder><pattern>%m%n</pattern></encoder></appender>
<root level="WARN"><appender-ref ref="out"/></root></configuration>
"""


def install(version: str) -> Path:
    """Return the folder of RocketMQ's jars, fetched if missing. Raises PartMissing."""
    parts = ("broker", "namesrv")
    return artifacts(
        f"rocketmq-{version}", [f"org.apache.rocketmq:rocketmq-{part}:{version}" for part in parts]
    )


class _Java(Companion):
    """One of the two programs."""

    START_SECONDS_MAX: ClassVar[float] = 300.0
    MAIN: ClassVar[str]

    def __init__(self, version: str, tls: Path | None) -> None:
        super().__init__()
        self._version = version
        self._tls = tls

    @abstractmethod
    def properties(self, folder: Path) -> Mapping[str, object]:
        """Return the settings of the program."""

    def argv(self, folder: Path) -> list[str]:
        jars = install(self._version)
        (folder / "conf").mkdir(exist_ok=True)
        settings = folder / "settings.properties"
        settings.write_text("".join(f"{name}={value}\n" for name, value in self.properties(folder).items()))
        options = [*_JVM, *(f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED)]
        options += [f"-Duser.home={folder}", f"-Drocketmq.home.dir={folder}"]
        if self._tls is not None:
            files = {"certPath": "server.pem", "keyPath": "server-key.pem"}
            options += [f"-Dtls.server.{name}={self._tls / file}" for name, file in files.items()]
            options += ["-Dtls.test.mode.enable=false"]
        environment = ["env", f"ROCKETMQ_HOME={folder}", f"HOME={folder}"]
        words = ["-cp", f"{jars}{os.sep}*", self.MAIN, "-c", str(settings)]
        return [*environment, program("java"), *options, *words]

    def close(self) -> None:
        """Kill the broker and remove its data; an orderly shutdown would take a while."""
        self.kill()
        super().close()

    def answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1.0).close()
        except OSError:
            return False
        return True


class NameServer(_Java):
    """RocketMQ's name server."""

    NAME = "RocketMQ's name server"
    MAIN = "org.apache.rocketmq.namesrv.NamesrvStartup"

    def properties(self, folder: Path) -> Mapping[str, object]:
        (folder / "conf" / "logback_namesrv.xml").write_text(_LOG_CONFIGURATION)
        return {"listenPort": self.port, "bindAddress": "127.0.0.1"}


class RocketMQ(_Java):
    """A RocketMQ broker with its own name server. `options` are properties of the broker."""

    NAME = "RocketMQ"
    MAIN = "org.apache.rocketmq.broker.BrokerStartup"

    def __init__(
        self, version: str = VERSIONS[0], *, tls: Path | None = None, accounts: str = "", **options: object
    ) -> None:
        """`accounts` is the content of plain_acl.yml, which version 4 reads."""
        super().__init__(version, tls)
        self._accounts = accounts
        self._options = options
        self._scheme = "rocketmq" if tls is None else "rocketmqs"
        self.name_server = NameServer(version, tls)

    @property
    def url(self) -> str:
        """The URL of the name server, in the form of the sink's setting."""
        return f"{self._scheme}://127.0.0.1:{self.name_server.port}"

    def properties(self, folder: Path) -> Mapping[str, object]:
        (folder / "conf" / "logback_broker.xml").write_text(_LOG_CONFIGURATION)
        if self._accounts:
            (folder / "conf" / "plain_acl.yml").write_text(self._accounts)
        return {
            "brokerClusterName": "tests",
            "brokerName": "first",
            "brokerId": 0,
            "brokerIP1": "127.0.0.1",
            "listenPort": self.port,
            "namesrvAddr": f"127.0.0.1:{self.name_server.port}",
            "storePathRootDir": folder / "store",
            "storePathCommitLog": folder / "store" / "commitlog",
            # RocketMQ reserves the full size of its files.
            "mappedFileSizeCommitLog": 64 << 20,
            "mappedFileSizeConsumeQueue": 300_000,
            "maxIndexNum": 10_000,
            "maxHashSlotNum": 2_500,
            "haListenPort": free_port(),
            "registerNameServerPeriod": 10_000,
            "autoCreateTopicEnable": "false",
            "diskMaxUsedSpaceRatio": 99,
            "flushDiskType": "SYNC_FLUSH",
            "enableControllerMode": "false",
            "timerWheelEnable": "false",
            "aclEnable": str(bool(self._accounts)).lower(),
            **self._options,
        }

    def answers(self) -> bool:
        # A broker accepts connections before the name server knows it.
        header = json.dumps({"code": _BROKERS, "language": "PYTHON", "version": 0, "opaque": 1, "flag": 0})
        request = struct.pack(">ii", 4 + len(header), len(header)) + header.encode()
        try:
            with socket.create_connection(("127.0.0.1", self.name_server.port), 1.0) as connection:
                connection.sendall(request)
                is_known = f":{self.port}".encode() in connection.recv(65536)
        except OSError:
            return False
        return is_known and super().answers()

    def argv(self, folder: Path) -> list[str]:
        if not (folder / "conf").exists():
            # The broker also listens on the port two below its own, for older clients. Ports are reserved in
            # ascending order, so this process has not reserved any higher port yet.
            while not reserve(self.port + 2):
                self.port = free_port()
            self.port += 2
        return super().argv(folder)

    def stored(self, topic: str, queue: int) -> int:
        """Return the number of messages that consumers of a queue see, according to the broker's files."""
        assert self._data_folder is not None
        folder = Path(self._data_folder.name) / "store" / "consumequeue" / topic / str(queue)
        files = [file.read_bytes() for file in folder.glob("*")]
        # Entries have 20 bytes, and the unused rest of a file is zeros.
        return sum(any(file[start : start + 20]) for file in files for start in range(0, len(file), 20))

    def start(self) -> "RocketMQ":
        """Start the programs that do not run."""
        if not self.name_server.running:
            self.name_server.start()
        super().start()
        return self

    def close(self) -> None:
        """Stop the broker and the name server, and remove their data."""
        super().close()
        self.name_server.close()
