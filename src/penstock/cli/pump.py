# SPDX-License-Identifier: Apache-2.0
"""`penstock pump`: show the TiDB Pumps that a daemon runs."""

import http.client
import json as json_module
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.options import Json
from penstock.errors import ConnectionLost, OptionInvalid, SourceMissing

if TYPE_CHECKING:
    from penstock.settings.daemon import InstanceSettings

HELP = "Show the Pumps of a daemon, and decide transactions that they cannot decide."

_ANSWER_SECONDS = 10.0


def status(
    file: Annotated[Path, typer.Argument(metavar="penstock.yaml", help="The daemon's settings file.")],
    json: Json = False,
) -> None:
    """Show each Pump of a daemon: its state, what it stored and refused, and what holds it back."""
    from penstock.settings.daemon import load_settings

    settings = load_settings(file)
    pumps = {name: instance for name, instance in settings.instances.items() if instance.has_role("pump")}
    if not pumps:
        raise OptionInvalid(f"{file} has no Pump", hint="Set source: tidb://pd1:2379 and tidb.roles: [pump]")
    for name, instance in pumps.items():
        values = {"instance": name, **_ask(instance)}
        if json:
            json_module.dump(values, sys.stdout)
            sys.stdout.write("\n")
            continue
        for key, value in values.items():
            typer.echo(f"{key:<18}{'' if value is None else value}")


def decide(
    folder: Annotated[Path, typer.Argument(help="The Pump's folder, which ends in .pump and has its log.")],
    start_ts: Annotated[int, typer.Argument(help="The transaction's start timestamp, as reported.")],
    commit: Annotated[
        int | None, typer.Option(help="The commit timestamp, if the transaction was committed.")
    ] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="The transaction was rolled back.")] = False,
) -> None:
    """Decide a transaction whose outcome did not arrive and cannot be queried.

    A wrong decision loses the transaction's changes, or adds changes that the cluster does not have. The
    running Pump applies the decision within seconds.
    """
    from penstock.logstore.disk import LocalDisk
    from penstock.logstore.layout import is_log_folder

    # This import needs no gRPC, which is an optional extra.
    from penstock.tidb.decisions import Decisions, check_decision

    if (commit is None) == (not rollback):
        raise OptionInvalid("the decision is not clear", hint="Write --commit TIMESTAMP, or --rollback")
    check_decision(start_ts, commit or 0)
    if not is_log_folder(folder):
        raise SourceMissing(f"{folder} is not the folder of a Pump", hint=f"Check: ls {folder}")
    path = Decisions(LocalDisk(), folder).put(start_ts, commit or 0)
    typer.echo(f"decided: {start_ts} {'was rolled back' if rollback else f'committed at {commit}'} ({path})")


def _ask(instance: "InstanceSettings") -> dict[str, Any]:
    from penstock.settings.listen import split_host_port

    address = instance.tidb.pump.advertised
    host, port = split_host_port(address)
    tls = instance.tidb.tls
    connection: http.client.HTTPConnection
    if tls is None:
        connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
    else:
        context = ssl.create_default_context(cafile=tls.ca)
        context.load_cert_chain(tls.cert, tls.key)
        connection = http.client.HTTPSConnection(host, port, timeout=_ANSWER_SECONDS, context=context)
    try:
        connection.request("GET", "/status")
        answer = json_module.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as problem:
        raise ConnectionLost(
            f"{address}: the Pump does not answer: {problem}", hint="Check the daemon"
        ) from problem
    finally:
        connection.close()
    values: dict[str, Any] = answer["penstock"]
    return values


VERBS = {"status": status, "decide": decide}
