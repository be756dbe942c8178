# SPDX-License-Identifier: Apache-2.0
"""`penstock console`: the web console of daemons and pipelines."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.asked_daemon import daemon_address
from penstock.cli.shared.signals import stopped_by_signals
from penstock.errors import OptionInvalid
from penstock.pipeline.settings import place_of_state
from penstock.settings.listen import split_host_port

_NO_DAEMON = "none"


def run(
    daemon: Annotated[
        list[str] | None,
        typer.Option(
            help="A daemon's URL; repeat it for others. Default: http://127.0.0.1:7070; none for no daemon."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="A daemon's settings file, which provides its address.")
    ] = None,
    pipelines: Annotated[
        list[str] | None,
        typer.Option(help="A state store of pipelines, or a pipeline.yaml; repeat it for others."),
    ] = None,
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen.")] = "127.0.0.1:7080",
    base_path: Annotated[str, typer.Option(help="The path behind a reverse proxy, such as /penstock.")] = "",
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name under which browsers reach the console through a reverse proxy."),
    ] = None,
) -> None:
    """Serve the web console until SIGTERM or SIGINT: instances, positions, pipelines, history of rows.

    Users log in with the token of an account of the daemons, and see and do what that account may. Without
    credentials at the daemons the console serves this machine only.
    """
    # Imported here, because the other verbs need no web server.
    from penstock.console.app import ConsoleSettings
    from penstock.console.serving import ConsoleServer

    if base_path and (not base_path.startswith("/") or base_path.endswith("/")):
        raise OptionInvalid(f"--base-path {base_path} is not usable", hint="Write it as /penstock")
    urls: list[str | None] = [*daemon] if daemon else [] if config is not None else [None]
    addresses = [daemon_address("all", url, None) for url in urls if url != _NO_DAEMON]
    if config is not None:
        addresses.insert(0, daemon_address("all", None, config))
    stores = [
        place_of_state(Path(text)).state if text.endswith((".yaml", ".yml")) else text
        for text in pipelines or ()
    ]
    try:
        bind_host, port = split_host_port(listen)
    except ValueError as problem:
        raise OptionInvalid(f"--listen {listen}: {problem}", hint="Write host:port") from problem
    settings = ConsoleSettings(
        tuple(addresses), tuple(dict.fromkeys(stores)), bind_host, port, base_path, tuple(host or ())
    )
    server = ConsoleServer(settings)
    with stopped_by_signals(server.stop):
        server.serve_until_stopped()
