# SPDX-License-Identifier: Apache-2.0
"""TCP ports of 127.0.0.1 for servers, each reserved for one process for its lifetime.

A port chosen by the kernel (bind to 0) is in its ephemeral range. While a server with a fixed port is down,
an outgoing connection may get that port: the connection may belong to another process, or to the very client
that waits for the server and then connects to itself. Ports are therefore chosen outside that range. A
process holds a lock on each of its ports. Each lock covers one byte of a shared file (fcntl(2) F_SETLK), and
the kernel releases it when the process ends for any reason. A forked child holds none of its parent's locks.
"""

import fcntl
import random
import socket
import threading
from pathlib import Path
from typing import IO

from tools.servers.errors import ServerFailed
from tools.servers.packages import cache_directory

# ip(7): the range from which the kernel chooses ports. The number is Linux's default, for systems without
# this file.
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
EPHEMERAL_PORT_MIN = 32_768

# The lowest ports to use. Most registered ports are below the first number. The second number applies if the
# ephemeral range is wide. A Redis node also uses the port 10,000 above its own, so both limits leave space
# for that port.
PORT_MIN = 20_000
PORT_MIN_OF_WIDE_RANGE = 10_000
PORTS_MIN = 1000
# A program whose port is in use may try the next ports.
MARGIN_PORTS = 64

_lock = threading.Lock()
_reserved: set[int] = set()
_file: IO[bytes] | None = None
# Users cannot see each other's locks, so each process starts at a random port.
_next_index = random.SystemRandom().randrange(1 << 16)


def free_port() -> int:
    """Return a TCP port to which no process is bound, and reserve it for the lifetime of this process.

    Raises `ServerFailed` if no port is left.
    """
    global _next_index
    ports = candidates()
    for _ in ports:
        with _lock:
            _next_index += 1
            port = ports[_next_index % len(ports)]
        if reserve(port):
            return port
    raise ServerFailed(
        f"no port from {ports.start} to {ports.stop - 1} is free: end the servers that hold them, or raise "
        f"the first number in {EPHEMERAL_RANGE}"
    )


def reserve(port: int) -> bool:
    """Reserve a port for this process; return False if it is in use."""
    global _file
    with _lock:
        if port in _reserved:
            return False
        if _file is None:
            # The file stays open: a process loses all locks on a file when it closes any descriptor of it.
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
    """Return whether a server could listen on a TCP port of 127.0.0.1 now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def candidates() -> range:
    """Return the range of ports for servers."""
    stop = _ephemeral_port_min() - MARGIN_PORTS
    for start in (PORT_MIN, PORT_MIN_OF_WIDE_RANGE):
        if stop - start >= PORTS_MIN:
            return range(start, stop)
    # There is no space below the ephemeral range, so use ports of that range, reserved and checked like
    # others.
    return range(PORT_MIN, EPHEMERAL_PORT_MIN - MARGIN_PORTS)


def _ephemeral_port_min() -> int:
    try:
        return int(EPHEMERAL_RANGE.read_text().split()[0])
    except FileNotFoundError:
        return EPHEMERAL_PORT_MIN


def _is_unbound(port: int) -> bool:
    """Return whether no socket has the port at any address, including sockets in TIME_WAIT."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
