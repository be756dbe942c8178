# SPDX-License-Identifier: Apache-2.0
"""Ports that count a connection from the moment it is accepted until its descriptor is closed.

An event loop tells a protocol of a connection once its TLS handshake is over. What connects and says nothing
costs a descriptor from the first moment, so it is counted here, below the loop.
"""

import socket
from collections import Counter
from collections.abc import Callable

from penstock.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_PER_PEER_MAX,
    HANDSHAKES_MAX,
    HANDSHAKES_PER_PEER_MAX,
)

# How many connections are accepted before the event loop looks after those that there are.
_ACCEPTED_AT_ONCE = 64

# Where a peer is: the address, and its port on that host.
_Address = tuple[str, int]


class Admission:
    """How many connections there are, and whose. Belongs to the event loop.

    A connection over TLS is in its handshake until `greeted` is called for it.
    """

    def __init__(self) -> None:
        self.open = 0
        self._by_peer: Counter[str] = Counter()
        self._handshakes_by_peer: Counter[str] = Counter()
        self._handshakes: dict[int, str] = {}

    @property
    def in_handshake(self) -> int:
        """How many are in their TLS handshake."""
        return len(self._handshakes)

    def refusal(self, peer: str) -> str | None:
        """Return why one more connection of a peer is refused, None where it is not."""
        if self.open >= CONNECTIONS_MAX or self._by_peer[peer] >= CONNECTIONS_PER_PEER_MAX:
            return "too many connections"
        if self.in_handshake >= HANDSHAKES_MAX or self._handshakes_by_peer[peer] >= HANDSHAKES_PER_PEER_MAX:
            return "too many connections in their handshake"
        return None

    def accepted(self, descriptor: int, peer: str, *, with_handshake: bool) -> None:
        """Count a connection that was accepted."""
        self.open += 1
        self._by_peer[peer] += 1
        if with_handshake:
            self._handshakes[descriptor] = peer
            self._handshakes_by_peer[peer] += 1

    def greeted(self, descriptor: int) -> None:
        """Note that a connection's handshake is over."""
        peer = self._handshakes.pop(descriptor, None)
        if peer is not None:
            _take_one(self._handshakes_by_peer, peer)

    def closed(self, descriptor: int, peer: str) -> None:
        """Count a connection as gone, before its descriptor is."""
        self.greeted(descriptor)
        self.open -= 1
        _take_one(self._by_peer, peer)


class AcceptedSocket(socket.socket):
    """One connection, counted until it is closed."""

    admission: Admission | None = None
    peer = ""

    def close(self) -> None:
        """Close it, and count it as gone."""
        admission, self.admission = self.admission, None
        if admission is not None:
            admission.closed(self.fileno(), self.peer)
        super().close()


class ListeningSocket(socket.socket):
    """A port whose connections are counted. `refused` is told of each that is one too many, and why."""

    def __init__(self, bound: socket.socket, admission: Admission, *, with_handshake: bool) -> None:
        super().__init__(fileno=bound.detach())
        self._admission = admission
        self._with_handshake = with_handshake
        self._accepted = 0
        self.refused: Callable[[str, str], None] = lambda why, peer: None

    def accept(self) -> tuple[socket.socket, _Address]:
        """Accept the next connection.

        Raises ConnectionAbortedError for one too many, and BlockingIOError after each few: an event loop then
        looks after everybody else first, so that connections that have ended meanwhile do not count.
        """
        self._accepted = (self._accepted + 1) % (_ACCEPTED_AT_ONCE + 1)
        if not self._accepted:
            raise BlockingIOError("others come first")
        raw, address = super().accept()
        peer = str(address[0])
        why = self._admission.refusal(peer)
        if why is not None:
            raw.close()
            self.refused(why, peer)
            raise ConnectionAbortedError(why)
        accepted = AcceptedSocket(fileno=raw.detach())
        accepted.admission, accepted.peer = self._admission, peer
        self._admission.accepted(accepted.fileno(), peer, with_handshake=self._with_handshake)
        return accepted, address


def _take_one(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if counter[name] <= 0:
        del counter[name]
