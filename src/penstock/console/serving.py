# SPDX-License-Identifier: Apache-2.0
"""The console's web server: one process with an event loop, its pages in threads."""

import socket

import structlog
import uvicorn

from penstock.console.app import Console, ConsoleSettings
from penstock.errors import OptionInvalid

_log = structlog.get_logger(__name__)

_GRACE_SECONDS = 5


def serve_console(settings: ConsoleSettings) -> None:
    """Serve the console until SIGTERM or SIGINT.

    Raises OptionInvalid if the address cannot be used, or if nobody could prove who they are;
    DependencyMissing without Jinja2.
    """
    if not settings.is_private and not settings.daemons:
        raise OptionInvalid(
            f"{settings.host} can be reached from elsewhere, and no daemon proves who logs in",
            hint="Name a daemon with --daemon, or listen on 127.0.0.1",
        )
    console = Console(settings)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family)
    except OSError as problem:
        raise OptionInvalid(
            f"the console cannot listen on {settings.host}:{settings.port}: {problem}",
            hint="Choose another address: --listen 127.0.0.1:7081",
        ) from problem
    config = uvicorn.Config(
        console.app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _log.info("serving the console", address=f"http://{shown}{settings.base_path}/")
    uvicorn.Server(config).run(sockets=[listener])
