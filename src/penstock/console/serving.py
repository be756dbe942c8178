# SPDX-License-Identifier: Apache-2.0
"""The console's web server: one process with an event loop, and threads that build the pages."""

import contextlib
import socket
from collections.abc import Generator

import structlog
import uvicorn

from penstock.console.app import Console, ConsoleSettings
from penstock.errors import OptionInvalid

_log = structlog.get_logger(__name__)

_GRACE_SECONDS = 5


class ConsoleServer(uvicorn.Server):
    """Serves the console until `stop`, which any thread may call. The port is bound in the constructor.

    Raises OptionInvalid if the address cannot be used or if users would have no way to authenticate, and
    DependencyMissing if Jinja2 is missing.
    """

    def __init__(self, settings: ConsoleSettings) -> None:
        if not settings.is_private and not settings.daemons:
            raise OptionInvalid(
                f"{settings.host} can be reached from elsewhere, and no daemon proves who logs in",
                hint="Name a daemon with --daemon, or listen on 127.0.0.1",
            )
        self._base_path = settings.base_path
        console = Console(settings)
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        try:
            self._listener = socket.create_server((settings.host, settings.port), family=family)
        except OSError as problem:
            raise OptionInvalid(
                f"the console cannot listen on {settings.host}:{settings.port}: {problem}",
                hint="Choose another address: --listen 127.0.0.1:7081",
            ) from problem
        super().__init__(
            uvicorn.Config(
                console.app,
                log_config=None,
                access_log=False,
                server_header=False,
                # Without a proxy, ignore the header with the client's address: the browser could set any
                # address in it.
                proxy_headers=bool(settings.hosts),
                timeout_graceful_shutdown=_GRACE_SECONDS,
            )
        )

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._listener.getsockname()[1])

    def serve_until_stopped(self) -> None:
        """Serve requests until `stop`."""
        host = self._listener.getsockname()[0]
        address = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        _log.info("serving the console", address=f"http://{address}{self._base_path}/")
        with self._listener:
            self.run(sockets=[self._listener])

    def stop(self) -> None:
        """Stop accepting requests, finish the requests in progress, then end."""
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave signals to the command line: uvicorn would raise them again after it stops."""
        yield
