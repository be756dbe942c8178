# SPDX-License-Identifier: Apache-2.0
"""A real RabbitMQ broker, private to the process that starts it.

    with RabbitMQ() as broker:
        broker.url          # "amqp://guest:guest@127.0.0.1:40213"

The broker and Erlang are packages of the machine's Linux distribution, which are unpacked in the cache
instead of installed.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import ClassVar

from tools.companion import STOP_SECONDS_MAX, Companion
from tools.maven import cached, run
from tools.servers.child import end, spawn
from tools.servers.errors import PartMissing
from tools.servers.ports import free_port

# The parts of Erlang that the broker needs, as package names without their common prefix.
_ERLANG = "asn1 base crypto eldap inets mnesia os-mon parsetools public-key runtime-tools ssl syntax-tools"
_PACKAGES = ("rabbitmq-server", *(f"erlang-{name}" for name in f"{_ERLANG} tools xmerl".split()))
_ERLANG_HOME = "/usr/lib/erlang"
_SETTINGS = """
loopback_users = none
log.console.level = warning
# The limits of memory and disk stop all writers. Other programs of the machine must not cause that.
vm_memory_high_watermark.absolute = 2GB
disk_free_limit.absolute = 1MB
"""
# A protocol header of AMQP 0-9-1. A broker answers it with the method Connection.Start in a frame.
_HEADER, _FRAME = b"AMQP\x00\x00\x09\x01", b"\x01"


def install() -> Path:
    """Return the folder of the unpacked packages, fetched if missing. Raises PartMissing."""
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise PartMissing(f"RabbitMQ is unpacked from Debian packages, and this machine has no {program}")

    def build(folder: Path) -> None:
        run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", *_PACKAGES], folder)
        for package in folder.glob("*.deb"):
            run(["dpkg-deb", "-x", str(package), str(folder / "built")], folder)

    return cached("rabbitmq", build)


class RabbitMQ(Companion):
    """The RabbitMQ broker, with its own port mapper (epmd).

    `options` are lines of the broker's settings. With a folder of `tools.servers.certificate`, the broker
    also accepts TLS connections.
    """

    NAME = "RabbitMQ"
    START_SECONDS_MAX: ClassVar[float] = 300.0

    def __init__(self, *options: str, tls: Path | None = None) -> None:
        super().__init__()
        self._options = options
        self._tls = tls
        self.tls_port = 0
        self._mapper: subprocess.Popen[bytes] | None = None
        self._mapper_port = 0
        self._node_port = 0

    @property
    def url(self) -> str:
        """The broker's URL, in the form of the sink's setting."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}"

    def argv(self, folder: Path) -> list[str]:
        root = install()
        programs = folder / "programs"
        if not programs.exists():
            self._mapper_port, self._node_port = free_port(), free_port()
            programs.mkdir()
            # The program contains the name of its usual installation folder.
            text = (root / _ERLANG_HOME[1:] / "bin" / "erl").read_text()
            (programs / "erl").write_text(text.replace(_ERLANG_HOME, f"{root}{_ERLANG_HOME}"))
            (programs / "erl").chmod(0o755)
            (folder / "rabbitmq.conf").write_text(
                "\n".join([_SETTINGS, *self._options, *self._tls_settings()]) + "\n"
            )
            (folder / "plugins").write_text("[].\n")
            (folder / "environment").touch()
        if self._mapper is None:
            mapper = str(root / _ERLANG_HOME[1:] / "bin" / "epmd")
            words = [mapper, "-port", str(self._mapper_port), "-address", "127.0.0.1"]
            self._mapper = spawn(words, folder / "mapper-output")
        variables = {
            "PATH": os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)]),
            "HOME": folder,
            # Start the broker without an intermediate process, which would outlive it.
            "RUNNING_UNDER_SYSTEMD": 1,
            "ERL_EPMD_PORT": self._mapper_port,
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"rabbit{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": self._node_port,
            "RABBITMQ_MNESIA_BASE": folder / "data",
            "RABBITMQ_LOG_BASE": folder / "log",
            "RABBITMQ_LOGS": "-",
            # Idle threads must not spin.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+sbwt none +sbwtdcpu none +sbwtdio none",
            "RABBITMQ_CONFIG_FILE": folder / "rabbitmq",
            "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "plugins",
            "RABBITMQ_CONF_ENV_FILE": folder / "environment",
        }
        [server] = root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server")
        return ["env", *(f"{name}={value}" for name, value in variables.items()), str(server)]

    def _tls_settings(self) -> list[str]:
        if self._tls is None:
            return []
        self.tls_port = free_port()
        files = {"cacertfile": "authority.pem", "certfile": "server.pem", "keyfile": "server-key.pem"}
        return [
            f"listeners.ssl.default = 127.0.0.1:{self.tls_port}",
            "ssl_options.verify = verify_none",
            *(f"ssl_options.{name} = {self._tls / file}" for name, file in files.items()),
        ]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(_HEADER)
                return connection.recv(1) == _FRAME
        except OSError:
            return False

    def close(self) -> None:
        """Stop the broker and its port mapper, and remove its data."""
        if self._mapper is not None:
            mapper, self._mapper = self._mapper, None
            super().close()
            end(mapper, STOP_SECONDS_MAX)
        else:
            super().close()
