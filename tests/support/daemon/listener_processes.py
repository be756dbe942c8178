# SPDX-License-Identifier: Apache-2.0
"""The processes of a daemon, and their connections."""

import os
import re
import socket
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import wait_until


def processes_of(daemon: DaemonProcess, module: str) -> list[int]:
    """Return the ids of a daemon's processes that run a module."""
    children = Path(f"/proc/{daemon.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return sorted(pid for pid in pids if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())


def descriptors_of(pid: int) -> int:
    """Return the number of TCP connections that a process has."""
    return len(_remote_ports(pid))


def process_serving(daemon: DaemonProcess, client: socket.socket) -> int:
    """Return the id of the listener process that has the connection of a client."""
    port = client.getsockname()[1]
    (pid,) = (pid for pid in processes_of(daemon, "listener_process") if port in _remote_ports(pid))
    return pid


def _remote_ports(pid: int) -> list[int]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # The connection may already be closed.
        with suppress(FileNotFoundError):
            links.append(os.readlink(path))
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(line[2].partition(":")[2], 16) for line in lines if line[9] in inodes]


def wait_for_listener_processes(daemon: DaemonProcess, count: int) -> None:
    """Wait until a daemon hands connections to each of its `count` listener processes."""

    def each_has_a_connection() -> bool:
        with ExitStack() as connections:
            # The process with the fewest connections receives the next one.
            for _ in range(count):
                connection = HTTPConnection("127.0.0.1", daemon.port)
                connections.callback(connection.close)
                # A process that is ending may have received the connection.
                with suppress(HTTPException, ConnectionError):
                    connection.request("GET", "/livez")
                    connection.getresponse().read()
            processes = processes_of(daemon, "listener_process")
            return len(processes) == count and all(map(descriptors_of, processes))

    wait_until(each_has_a_connection)
