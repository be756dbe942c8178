# SPDX-License-Identifier: Apache-2.0
"""TCP ports of 127.0.0.1 for servers, each given to one process for as long as that process lives.

A port that the kernel picks (bind to 0) lies in its ephemeral range. While a server that keeps its port is
down, an outgoing connection may get that port: one of another process, or that of the very client that waits
for the server and is then connected with itself. So ports come from outside that range, and a process that
was given one holds a lock on it, one byte of one file for each port (fcntl(2) F_SETLK), of which the kernel
lets go when the process ends, however it ends. A forked child holds none of its parent's.
"""

import fcntl
import random
import socket
import threading
from pathlib import Path
from typing import IO

from tools.servers.errors import ServerFailed
from tools.servers.packages import cache_directory

# ip(7): where the kernel picks ports from. The others are Linux's own values, for where it does not tell.
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_PORT_MIN = 32_768

# Below the first are most ports that programs have of their own; the second is for a wide ephemeral range. A
# Redis node takes the port 10,000 above its own besides, which all of these leave room for.
PORT_MIN = 20_000
PORT_MIN_OF_WIDE_RANGE = 10_000
PORTS_MIN = 1000
# A program whose port is taken may try the ones behind it.
MARGIN_PORTS = 64

_lock = threading.Lock()
_reserved: set[int] = set()
_file: IO[bytes] | None = None
# Users do not see each other's locks, so each process begins somewhere else.
_given = random.SystemRandom().randrange(1 << 16)


def free_port() -> int:
    """Return a TCP port that nobody is bound to, and that no other process is given while this one lives.

    Raises `ServerFailed` when none is left.
    """
    global _given
    ports = candidates()
    for _ in ports:
        with _lock:
            _given += 1
            port = ports[_given % len(ports)]
        if reserve(port):
            return port
    raise ServerFailed(
        f"no port from {ports.start} to {ports.stop - 1} is free: end the servers that hold them, or raise "
        f"the first number in {EPHEMERAL_RANGE}"
    )


def reserve(port: int) -> bool:
    """Take a port for this process, unless somebody has it; return whether it was to be had."""
    global _file
    with _lock:
        if port in _reserved:
            return False
        if _file is None:
            # It stays open: a process loses all its locks on a file with the first descriptor that it closes.
            _file = (cache_directory() / "ports.lock").open("wb")
        try:
            fcntl.lockf(_file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except (BlockingIOError, PermissionError):
            return False
        if not _is_unbound(port):
            fcntl.lockf(_file, fcntl.LOCK_UN, 1, port)
            return False
        _reserved.add(port)
        return True


def is_free(port: int) -> bool:
    """Whether a server could listen on a TCP port of 127.0.0.1 at this moment."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def candidates() -> range:
    """Return the ports that servers are given."""
    stop = _ephemeral_port_min() - MARGIN_PORTS
    for start in (PORT_MIN, PORT_MIN_OF_WIDE_RANGE):
        if stop - start >= PORTS_MIN:
            return range(start, stop)
    # The kernel leaves no room below; a port of its range has to do, reserved and proved unbound as others.
    return range(PORT_MIN, EPHEMERAL_PORT_MIN - MARGIN_PORTS)


def _ephemeral_port_min() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except FileNotFoundError:
        return EPHEMERAL_PORT_MIN


def _is_unbound(port: int) -> bool:
    """Whether no socket of any address has the port, be it one that waits after its end."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
