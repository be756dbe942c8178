# SPDX-License-Identifier: Apache-2.0
"""The messages between a daemon and its listener processes, in addition to `channel`.

A listener process has a third socket for passing connections. The daemon passes the connections that it has
accepted, each with its number and its listener. The process passes connections for the requests that it
forwards, each with the number of the connection that the request arrived on.
"""

import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.logstore.followed_log import LogReport
from penstock.serve.connections import TrafficCounts
from penstock.serve.ptubes.session import ClientReport
from penstock.serve.subscribers import Subscriber, SubscriberKey
from penstock.settings.daemon import LISTENERS, Listening, Settings

# The number of a connection, and its listener.
_PASSED = struct.Struct("<qB")


@dataclass(frozen=True)
class ListenerStart:
    """The first message to a listener process.

    The process serves connections to `listeners`. `usages` is the descriptor of the file with the account
    usages that all `processes` share, and `number` is the index of this process in that file.
    """

    settings: Settings
    usages: int
    number: int
    processes: int
    listeners: frozenset[Listening] = frozenset({"http"})


@dataclass(frozen=True)
class Published:
    """A report about the instances whose logs this daemon has, sent at least every PUBLISH_SECONDS.

    `statuses` are JSON values. `logs` is the state of each log that readers may see. `refusals` contains the
    errors of logs that cannot be read. `ptubes` contains the connections of Ptubes clients in each process.
    """

    statuses: Mapping[str, Mapping[str, Any]]
    logs: Mapping[str, LogReport]
    refusals: Mapping[str, PenstockError]
    ptubes: Mapping[int, Sequence[ClientReport]]


@dataclass(frozen=True)
class ListenerReport:
    """A report by a listener process: whom it serves, and what it has counted since its last report."""

    subscribers: Mapping[SubscriberKey, Subscriber]
    traffic: TrafficCounts
    ptubes: Sequence[ClientReport]


@dataclass(frozen=True)
class Serves:
    """The process now accepts connections to a listener. For HTTP, it does so from the beginning."""

    listener: Listening


@dataclass(frozen=True)
class Greeted:
    """The TLS handshake of a connection has completed."""

    number: int


@dataclass(frozen=True)
class Ended:
    """A connection has ended."""

    number: int


def pass_connection(
    channel: socket.socket, connection: socket.socket, number: int, listener: Listening
) -> None:
    """Pass a connection over a non-blocking socket. Raises OSError if the socket is full or closed."""
    content = _PASSED.pack(number, LISTENERS.index(listener))
    socket.send_fds(channel, [content], [connection.fileno()])


def take_connection(channel: socket.socket) -> tuple[int, Listening, socket.socket | None] | None:
    """Receive a connection that another process passed over a non-blocking socket. Return None if no
    connection is waiting.

    In the result, the connection itself is None if this process had no free descriptor for it; it was then
    closed. Raises EOFError once the other end is closed.
    """
    try:
        content, descriptors, _, _ = socket.recv_fds(channel, _PASSED.size, 1)
    except BlockingIOError:
        return None
    except ConnectionError:
        content, descriptors = b"", []
    if not content:
        raise EOFError("the process has ended")
    number, index = _PASSED.unpack(content)
    return number, LISTENERS[index], socket.socket(fileno=descriptors[0]) if descriptors else None
