# SPDX-License-Identifier: Apache-2.0
"""The processes of a daemon, and their connections."""

import os
import re
from contextlib import suppress
from pathlib import Path

from tests.support.daemon.process import DaemonProcess


def processes_of(daemon: DaemonProcess, module: str) -> list[int]:
    """Return the ids of a daemon's processes that run a module."""
    children = Path(f"/proc/{daemon.pid}/task").glob("*/children")
    pids = [int(pid) for path in children for pid in path.read_text().split()]
    return sorted(pid for pid in pids if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())


def descriptors_of(pid: int) -> int:
    """Return the number of TCP connections that a process has."""
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        # It may be closed by now.
        with suppress(FileNotFoundError):
            links.append(os.readlink(path))
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return sum(line.split()[9] in inodes for line in lines)
