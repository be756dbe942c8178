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
