# SPDX-License-Identifier: Apache-2.0
"""Canal's own Java cluster client, unmodified, as a subscriber of a fleet."""

import json
import os
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.traffic import NEWEST
from tests.support.canal.peers import Peer

_RESTART_SECONDS = 1.0


class CanalFollower:
    """The changes that the client has received from the writers' tables. As a context manager, it runs inside
    the block.

    The client ends with an error after three attempts. It is then started again, as operators would do.
    """

    def __init__(self, folder: Path, peer: Peer, hosts: str, destination: str, table_filter: str) -> None:
        """`hosts` lists the ensemble's hosts, including the path of the node with Canal's layout."""
        # For each table: the numbers of the transactions in order of arrival.
        self.steps: dict[str, list[int]] = {}
        self.starts = 0
        self._command = [*peer.words, hosts, destination, "", "", table_filter]
        # Suppress the client's log messages, which would appear in the middle of its output lines.
        silence = folder / "logback.xml"
        silence.write_text("<configuration/>")
        self._environment = os.environ | {"JAVA_TOOL_OPTIONS": f"-Dlogback.configurationFile={silence}"}
        self._client: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="canal-follower")
        self.failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self.kill()
        self._thread.join()

    def kill(self) -> None:
        """Kill the client. The reader thread starts it again."""
        with self._lock:
            if self._client is not None:
                self._client.kill()

    def newest(self, table: str) -> int:
        """Return the number of the last transaction that arrived."""
        if self.failure is not None:
            raise self.failure
        return max(self.steps.get(table, ()), default=0)

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._follow()
                self._stopping.wait(_RESTART_SECONDS)
        except BaseException as problem:  # noqa: BLE001 - it is raised where the run waits.
            self.failure = problem

    def _follow(self) -> None:
        """Read the output of one run of the client."""
        with self._lock:
            if self._stopping.is_set():
                return
            self._client = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            self.starts += 1
        output = self._client.stdout
        assert output is not None
        with self._client:
            try:
                for line in output:
                    # The last line of a killed client may be incomplete.
                    if line.startswith("{") and line.endswith("\n"):
                        self._keep(line)
            finally:
                # The client continues even if nobody reads its output.
                self._client.kill()

    def _keep(self, line: str) -> None:
        entry = json.loads(line)
        steps = self.steps.setdefault(f"{entry['schema']}.{entry['table']}", [])
        for row in entry["rows"]:
            image = row["after"]
            if image and int(image["id"]["value"]) == NEWEST:
                steps.append(int(image["step"]["value"]))
