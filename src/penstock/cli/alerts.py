# SPDX-License-Identifier: Apache-2.0
"""`penstock alerts`: list the alerts of a daemon, and test where they are sent."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.options import Ca, DaemonConfig, Json, Url
from penstock.cli.shared.rendering import Field, LineWriter, write_json
from penstock.cli.shared.whole_daemon import WholeDaemon
from penstock.errors import OptionInvalid

HELP = "List the alerts of a daemon, and test where they are sent."

_SECOND_US = 1_000_000
_COLUMNS = (Field("instance", 16), Field("alert", 16), Field("since", 20), Field("summary", 0))


def list_alerts(url: Url = None, config: DaemonConfig = None, ca: Ca = None, json: Json = False) -> None:
    """List the conditions that are true now, the oldest first."""
    answer = WholeDaemon.find(url, config, ca).alerts()
    if json:
        write_json(sys.stdout, answer["alerts"])
        return
    if answer["channel"] is None:
        typer.echo("the daemon sends no alerts: set alerts in penstock.yaml", err=True)
    lines = LineWriter(sys.stdout, _COLUMNS)
    for alert in answer["alerts"]:
        since = datetime.fromtimestamp(alert["since_us"] // _SECOND_US, UTC)
        lines.write([alert["instance"], alert["name"], since, alert["summary"]])


def test(
    config: Annotated[Path, typer.Option(help="The daemon's settings file, whose `alerts` is tested.")],
) -> None:
    """Send a test alert, and the notice of its end, to the webhook or mail address of a settings file."""
    from penstock.settings.daemon import load_settings
    from penstock.telemetry.channel import Channel

    settings = load_settings(config).alerts
    if settings is None:
        raise OptionInvalid(f"{config} has no alerts", hint="Set alerts.webhook or alerts.mail")
    channel = Channel(settings)
    channel.send_test("penstock alerts test")
    typer.echo(f"sent: an alert and its end to {channel.address}")


VERBS = {"list": list_alerts, "test": test}
