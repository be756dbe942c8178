# SPDX-License-Identifier: Apache-2.0
"""`penstock resume`: capture an instance again that its daemon has set aside."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.asked_daemon import AskedDaemon, Ca


def run(
    instance: Annotated[str, typer.Argument(help="The daemon's instance.")],
    url: Annotated[str | None, typer.Option(help="The daemon's URL. Default: http://127.0.0.1:7070.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="The daemon's settings file, which provides its address and token."),
    ] = None,
    ca: Ca = None,
) -> None:
    """Start the capture process of an instance that was set aside, because it ended again and again.

    It begins where its log ends. The token comes from --config or PENSTOCK_TOKEN, and needs `admin`.
    """
    daemon = AskedDaemon.find(instance, url, config, ca)
    try:
        daemon.resume()
    finally:
        daemon.close()
    typer.echo(f"{instance}: started")
