# SPDX-License-Identifier: Apache-2.0
"""`penstock holds`: list and remove holds, which protect a daemon's log from trimming."""

import sys
from contextlib import closing
from datetime import UTC, datetime
from typing import Annotated

import typer

from penstock.cli.shared.options import Ca, DaemonConfig, Instance, Json, Url
from penstock.cli.shared.rendering import Field, LineWriter, bytes_text, write_json

HELP = "List and remove holds, which protect a daemon's log from trimming."

_SECOND_US = 1_000_000
_COLUMNS = (
    Field("reader", 40),
    Field("account", 16),
    Field("keeps", 10, right=True),
    Field("expires", 20),
    Field("position", 32),
    Field("remark", 0),
)


def list_holds(
    instance: Instance, url: Url = None, config: DaemonConfig = None, ca: Ca = None, json: Json = False
) -> None:
    """List the holds on an instance's log, the largest first.

    An account sees its own holds; an admin sees all. The token comes from --config or PENSTOCK_TOKEN.
    """
    from penstock.cli.shared.asked_daemon import AskedDaemon

    with closing(AskedDaemon.find(instance, url, config, ca)) as daemon:
        holds = daemon.holds()
    if json:
        write_json(sys.stdout, ({"instance": instance, **hold} for hold in holds))
        return
    lines = LineWriter(sys.stdout, _COLUMNS)
    for hold in holds:
        expires_us = hold["expires_us"]
        expires = None if expires_us is None else datetime.fromtimestamp(expires_us // _SECOND_US, UTC)
        keeps = bytes_text(hold["behind_bytes"])
        remark = f"broken: {hold['broken']}" if hold["broken"] else None
        lines.write([hold["reader"], hold["account"], keeps, expires, hold["position"], remark])


def remove(
    instance: Instance,
    reader: Annotated[str, typer.Argument(help="The hold's reader, as shown by `penstock holds list`.")],
    url: Url = None,
    config: DaemonConfig = None,
    ca: Ca = None,
) -> None:
    """Remove a hold. The log it protected may be trimmed, and its reader may lose its position."""
    from penstock.cli.shared.asked_daemon import AskedDaemon

    with closing(AskedDaemon.find(instance, url, config, ca)) as daemon:
        daemon.remove_hold(reader)
    typer.echo(f"removed: {reader} of {instance} holds nothing any longer")


VERBS = {"list": list_holds, "remove": remove}
