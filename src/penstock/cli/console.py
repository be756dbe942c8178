# SPDX-License-Identifier: Apache-2.0
"""`penstock console`: serve the web console of daemons and pipelines."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.shared.chosen_daemon import daemon_address
from penstock.cli.shared.signals import stopped_by_signals
from penstock.errors import OptionInvalid

if TYPE_CHECKING:
    from penstock.console.app import ConsoleSettings
    from penstock.settings.console import ConsoleSection

_NO_DAEMON = "none"


def run(
    daemon: Annotated[
        list[str] | None,
        typer.Option(
            help="A daemon's URL; repeat it for others. Default: http://127.0.0.1:7070; none for no daemon."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A daemon's settings file, which provides its address, and the section console."),
    ] = None,
    pipelines: Annotated[
        list[str] | None,
        typer.Option(help="A state store of pipelines, or a pipeline.yaml; repeat it for others."),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where to listen. Default: 127.0.0.1:7080.")
    ] = None,
    base_path: Annotated[
        str | None, typer.Option(help="The path behind a reverse proxy, such as /penstock.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name under which browsers reach the console through a reverse proxy."),
    ] = None,
) -> None:
    """Serve the web console until SIGTERM or SIGINT: instances, positions, pipelines, history of rows.

    Users log in with the token of a daemon account, and have the rights of that account. If the daemons have
    no credentials, the console serves only this machine.
    """
    # Imported here because no other verb needs a web server.
    from penstock.console.serving import ConsoleServer
    from penstock.settings.console import ConsoleSection
    from penstock.settings.daemon import load_settings

    section = None if config is None else load_settings(config).console
    given = {
        "daemons": tuple(daemon or ()),
        "pipelines": tuple(pipelines or ()),
        "listen": listen,
        "base_path": base_path,
        "hosts": tuple(host or ()),
    }
    chosen = (section or ConsoleSection()).model_copy(
        update={name: value for name, value in given.items() if value not in ((), None)}
    )
    server = ConsoleServer(_settings(chosen, config))
    with stopped_by_signals(server.stop):
        server.serve_until_stopped()


def _settings(section: "ConsoleSection", config: Path | None) -> "ConsoleSettings":
    """Return a console's settings: its section, or defaults for the daemon of `config`. Raises
    OptionInvalid.
    """
    from penstock.console.app import ConsoleSettings
    from penstock.pipeline.watch import stores_of
    from penstock.settings.listen import split_host_port

    if section.base_path and (not section.base_path.startswith("/") or section.base_path.endswith("/")):
        raise OptionInvalid(f"--base-path {section.base_path} is not usable", hint="Write it as /penstock")
    try:
        bind_host, port = split_host_port(section.listen)
    except ValueError as problem:
        raise OptionInvalid(f"--listen {section.listen}: {problem}", hint="Write host:port") from problem
    urls: list[str | None] = [*section.daemons] or ([] if config is not None else [None])
    addresses = [daemon_address("all", url, None) for url in urls if url != _NO_DAEMON]
    if config is not None:
        addresses.insert(0, daemon_address("all", None, config))
    files = tuple(Path(text) for text in section.pipelines if text.endswith((".yaml", ".yml")))
    return ConsoleSettings(
        daemons=tuple(addresses),
        stores=tuple(stores_of(section.pipelines)),
        host=bind_host,
        port=port,
        base_path=section.base_path,
        hosts=section.hosts,
        pipeline_files=files,
        idle_seconds=section.idle,
        command=(sys.executable, "-m", "penstock.cli.shared.child", str(os.getpid())),
    )
