# SPDX-License-Identifier: Apache-2.0
"""Listening sockets that count each connection from accept until its descriptor is closed.

An event loop reports a connection only after its TLS handshake. A silent client costs a descriptor from the
start, so connections are counted below the loop.
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

# The number of connections accepted before the event loop serves the existing ones.
_ACCEPTED_AT_ONCE = 64

# A peer is an address and a port.
Address = tuple[str, int]


class Admission:
    """Counts connections in total and per peer. Belongs to the event loop.

    A TLS connection counts as being in its handshake until `greeted` is called for it.
    """

    def __init__(self) -> None:
        self.open = 0
        self._by_peer: Counter[str] = Counter()
        self._handshakes_by_peer: Counter[str] = Counter()
        self._handshakes: dict[int, str] = {}

    @property
    def in_handshake(self) -> int:
        """The number of connections in their TLS handshake."""
        return len(self._handshakes)

    def refusal(self, peer: str) -> str | None:
        """Return why another connection of a peer is refused, None if it is allowed."""
        if self.open >= CONNECTIONS_MAX or self._by_peer[peer] >= CONNECTIONS_PER_PEER_MAX:
            return "too many connections"
        if self.in_handshake >= HANDSHAKES_MAX or self._handshakes_by_peer[peer] >= HANDSHAKES_PER_PEER_MAX:
            return "too many connections in their handshake"
        return None

    def accepted(self, descriptor: int, peer: str, *, with_handshake: bool) -> None:
        """Count an accepted connection."""
        self.open += 1
        self._by_peer[peer] += 1
        if with_handshake:
            self._handshakes[descriptor] = peer
            self._handshakes_by_peer[peer] += 1

    def renumber(self, descriptor: int, number: int) -> None:
        """Count a connection that another process serves. Its number is not a descriptor of this process."""
        peer = self._handshakes.pop(descriptor, None)
        if peer is not None:
            self._handshakes[number] = peer

    def number_of(self, descriptor: int) -> int:
        """Return the number under which a connection is counted. In this process, it is the connection's
        descriptor.
        """
        return descriptor

    def greeted(self, descriptor: int) -> None:
        """Record the end of a connection's handshake."""
        peer = self._handshakes.pop(descriptor, None)
        if peer is not None:
            _decrement(self._handshakes_by_peer, peer)

    def closed(self, descriptor: int, peer: str) -> None:
        """Count a connection as closed, before its descriptor is closed."""
        self.greeted(descriptor)
        self.open -= 1
        _decrement(self._by_peer, peer)


class AcceptedSocket(socket.socket):
    """One accepted connection, which is counted until it is closed."""

    admission: Admission | None = None
    peer = ""

    def close(self) -> None:
        """Close the connection and stop counting it."""
        admission, self.admission = self.admission, None
        if admission is not None:
            admission.closed(self.fileno(), self.peer)
        super().close()

    def leave(self, number: int) -> None:
        """Close the connection in this process but keep counting it as `number`, because another process has
        it too.
        """
        admission, self.admission = self.admission, None
        if admission is not None:
            admission.renumber(self.fileno(), number)
        super().close()


class ListeningSocket(socket.socket):
    """A listening socket that counts connections.

    `refused` is called for each rejected connection, with the reason.
    """

    def __init__(self, bound: socket.socket, admission: Admission, *, with_handshake: bool) -> None:
        super().__init__(fileno=bound.detach())
        self._admission = admission
        self._with_handshake = with_handshake
        self._accepted = 0
        self.refused: Callable[[str, str], None] = lambda why, peer: None

    def accept(self) -> tuple[socket.socket, Address]:
        """Accept the next connection.

        Raises ConnectionAbortedError if the connection is rejected. Raises BlockingIOError after a batch of
        connections, so that the event loop first serves the accepted connections and processes connections
        that have ended.
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


def _decrement(counter: Counter[str], name: str) -> None:
    counter[name] -= 1
    if counter[name] <= 0:
        del counter[name]
