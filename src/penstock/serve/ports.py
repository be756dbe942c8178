# SPDX-License-Identifier: Apache-2.0
"""The ports of the daemon, all of them taken before anything starts, so that a taken one is told at once."""

import socket
from collections.abc import Mapping

from penstock.errors import OptionInvalid
from penstock.limits import SEND_SECONDS_MAX
from penstock.serve.connections import Connections
from penstock.settings import Listening, ListenSettings

_BACKLOG = 256

# Linux alone has it.
_USER_TIMEOUT: int | None = getattr(socket, "TCP_USER_TIMEOUT", None)


class Ports:
    """A bound socket for each listener that is on, and the connections to all of them."""

    def __init__(self, bound: Mapping[Listening, socket.socket], *, over_tls: bool = False) -> None:
        self.connections = Connections()
        self.sockets = {
            name: self.connections.listen(name, one, over_tls=over_tls) for name, one in bound.items()
        }

    @classmethod
    def take(cls, settings: ListenSettings) -> "Ports":
        """Bind every port. Raises OptionInvalid where one cannot be had; then none is kept."""
        taken: dict[Listening, socket.socket] = {}
        try:
            for name, (host, port) in settings.places().items():
                taken[name] = _bind(name, host, port)
        except OptionInvalid:
            for one in taken.values():
                one.close()
            raise
        return cls(taken, over_tls=settings.tls is not None)

    def address(self, name: Listening) -> str:
        """Return where a listener listens: host:port, with the port that the system chose."""
        host, port = self.sockets[name].getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def addresses(self) -> dict[str, str]:
        """Return where each listener listens, by its name."""
        return {name: self.address(name) for name in self.sockets}

    def close(self) -> None:
        """Give every port back."""
        for one in self.sockets.values():
            one.close()


def _bind(name: Listening, host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=False)
    except OSError as problem:
        raise OptionInvalid(
            f"cannot listen on {host}:{port}: {problem.strerror or problem}",
            hint=f"Does another daemon run here? Choose another port: listen.{name}",
        ) from problem
    # Accepted connections inherit these. A small frame must not wait until the one before it is acknowledged.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A peer whose machine is gone is found out without a word between us.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if _USER_TIMEOUT is not None:
        # What a peer does not read is dropped with its connection, also where that is being closed.
        bound.setsockopt(socket.IPPROTO_TCP, _USER_TIMEOUT, int(SEND_SECONDS_MAX * 1000))
    return bound
