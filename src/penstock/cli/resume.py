# SPDX-License-Identifier: Apache-2.0
"""`penstock resume`: resume the capture of an instance that its daemon has set aside."""

from contextlib import closing

import typer

from penstock.cli.shared.options import Ca, DaemonConfig, Instance, Url


def run(instance: Instance, url: Url = None, config: DaemonConfig = None, ca: Ca = None) -> None:
    """Resume capture of an instance that the daemon has set aside, because its capture process kept failing.

    The capture continues where the log ends. The token comes from --config or PENSTOCK_TOKEN, and needs
    `admin`.
    """
    from penstock.cli.shared.asked_daemon import AskedDaemon

    with closing(AskedDaemon.find(instance, url, config, ca)) as daemon:
        daemon.resume()
    typer.echo(f"{instance}: started")
