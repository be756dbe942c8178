# SPDX-License-Identifier: Apache-2.0
"""The ports of the daemon, all of them taken before anything starts, so that a taken one is told at once."""

import socket
from collections.abc import Mapping

from penstock.errors import OptionInvalid
from penstock.settings import Listening, ListenSettings

_BACKLOG = 256


class Ports:
    """A bound socket for each listener that is on."""

    def __init__(self, sockets: Mapping[Listening, socket.socket]) -> None:
        self.sockets = dict(sockets)

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
        return cls(taken)

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
    # Accepted connections inherit it: a small frame must not wait until the one before it is acknowledged.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound
