# SPDX-License-Identifier: Apache-2.0
"""A real Redis server, private to the process that starts it.

with Redis() as server:
    server.url          # "redis://127.0.0.1:40213/0"
"""

import socket
from pathlib import Path

from tools.companion import Companion
from tools.servers.packages import program_on_host


class Redis(Companion):
    """The server; it keeps nothing on the disk."""

    NAME = "Redis"

    def __init__(self, *options: str) -> None:
        super().__init__()
        self._options = options

    @property
    def url(self) -> str:
        """Where it listens, as the sink is told."""
        return f"redis://127.0.0.1:{self.port}/0"

    def argv(self, folder: Path) -> list[str]:
        program = str(program_on_host("redis-server", "redis-server"))
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        return [program, *words, "--save", "", "--appendonly", "no", *self._options]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as asked:
                asked.sendall(b"PING\r\n")
                # One that asks for a password answers too.
                return asked.recv(5)[:1] in (b"+", b"-")
        except OSError:
            return False
