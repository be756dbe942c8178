# SPDX-License-Identifier: Apache-2.0
"""A server that is not a source of changes (a coordinator, a cache, a store), private to its process.

The server has its own folder and port, and is terminated together with its owner, by process id.

    with Redis() as server:
        server.port
"""

import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from tools.servers.child import end, spawn
from tools.servers.errors import ServerFailed
from tools.servers.ports import free_port
from tools.servers.starting import StartTimedOut, start_with_one_retry

STOP_SECONDS_MAX = 10.0


class Companion(ABC):
    """A server on 127.0.0.1, at a free port that does not change. As a context manager, it runs inside the
    block.
    """

    NAME: ClassVar[str]
    START_SECONDS_MAX: ClassVar[float] = 120.0

    def __init__(self) -> None:
        self._data_folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def argv(self, folder: Path) -> list[str]:
        """Return the command that starts the server in a folder, on `port`.

        Also write the files that the server reads. Raises PartMissing.
        """

    @abstractmethod
    def answers(self) -> bool:
        """Return whether the server answers on `port` now."""

    @property
    def running(self) -> bool:
        """Whether the server's process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the server, which must be running."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> Self:
        """Start the server and return once it answers. The data of an earlier start is kept.

        A start that times out is retried once. Raises PartMissing, ServerFailed.
        """
        if self._data_folder is None:
            self._data_folder = tempfile.TemporaryDirectory(prefix=f"penstock-{self.NAME.lower()}-")
            self.port = free_port()
        folder = Path(self._data_folder.name)
        try:
            argv = self.argv(folder)
        except BaseException:
            self.close()
            raise
        return start_with_one_retry(self.NAME, lambda: self._start(argv, folder))

    def _start(self, argv: list[str], folder: Path) -> Self:
        self._process = spawn(argv, folder / "output")
        deadline = time.monotonic() + self.START_SECONDS_MAX
        while not self.answers():
            if time.monotonic() > deadline or not self.running:
                output = (folder / "output").read_text(errors="replace")
                failure = StartTimedOut if self.running else ServerFailed
                self.kill()
                raise failure(f"{self.NAME} does not start:\n{output[-4000:]}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """Kill the server like a crash. Its data stays for the next start."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Shut the server down in order. Its data stays for the next start."""
        if self._process is not None:
            end(self._process, STOP_SECONDS_MAX)
            self._process = None

    def close(self) -> None:
        """Stop the server and remove its data."""
        self.stop()
        if self._data_folder is not None:
            self._data_folder.cleanup()
            self._data_folder = None
