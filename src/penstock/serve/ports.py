# SPDX-License-Identifier: Apache-2.0
"""The daemon's ports. All are bound before anything starts, so that a port in use is reported at once."""

import socket
from collections.abc import Mapping

from penstock.errors import OptionInvalid
from penstock.limits import SEND_SECONDS_MAX
from penstock.serve.connections import Connections
from penstock.settings.daemon import Listening, ListenSettings

_BACKLOG = 256

# TCP_USER_TIMEOUT is available on Linux only.
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


class Ports:
    """A bound socket for each enabled listener, and the connections accepted on these sockets."""

    def __init__(self, bound: Mapping[Listening, socket.socket], *, over_tls: bool = False) -> None:
        self.connections = Connections()
        self.sockets = {
            name: self.connections.listen(name, bound_socket, over_tls=over_tls)
            for name, bound_socket in bound.items()
        }

    @classmethod
    def take(cls, settings: ListenSettings) -> "Ports":
        """Bind every port. Raises OptionInvalid and releases all ports if one cannot be bound."""
        bound: dict[Listening, socket.socket] = {}
        try:
            for name, (host, port) in settings.addresses().items():
                bound[name] = _bind(name, host, port)
        except OptionInvalid:
            for bound_socket in bound.values():
                bound_socket.close()
            raise
        return cls(bound, over_tls=settings.tls is not None)

    def address(self, name: Listening) -> str:
        """Return the address of a listener: host:port, with the port that the system chose."""
        host, port = self.sockets[name].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def addresses(self) -> dict[str, str]:
        """Return the address of each listener by its name."""
        return {name: self.address(name) for name in self.sockets}

    def close(self) -> None:
        """Release every port."""
        for listening in self.sockets.values():
            listening.close()


def _bind(name: Listening, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=False)
    except OSError as problem:
        raise OptionInvalid(
            f"cannot listen on {host}:{port}: {problem.strerror or problem}",
            hint=f"Does another daemon run here? Choose another port: listen.{name}",
        ) from problem
    # Accepted connections inherit these options. A small frame must not wait for the previous
    # acknowledgement.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Keepalive detects a peer whose machine is gone.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if _USER_TIMEOUT is not None:
        # The data that a peer has not read is dropped together with its connection, even while the connection
        # is closing.
        bound.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(SEND_SECONDS_MAX * 1000))
    return bound
