# SPDX-License-Identifier: Apache-2.0
"""`penstock serve`: run the daemon."""

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.shared.rendering import counted
from penstock.cli.shared.signals import stopped_by_signals
from penstock.errors import OptionInvalid


def run(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="penstock.yaml", help="The settings file; see docs/guides/serve.md."),
    ] = None,
    only_check: Annotated[
        bool,
        typer.Option(
            "--check", help="Validate the settings, connect to the servers, check the disk, then exit."
        ),
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the settings' JSON Schema, for editors, then exit.")
    ] = False,
) -> None:
    """Capture the configured instances, keep their logs and serve them until SIGTERM or SIGINT."""
    from penstock.coordinate.store import without_password
    from penstock.settings.daemon import json_schema, load_settings

    if schema:
        json.dump(json_schema(), sys.stdout, indent=2)
        sys.stdout.write("\n")
        return
    if file is None:
        raise OptionInvalid("no settings file is named", hint="Run: penstock serve penstock.yaml")
    # Imported here because no other verb needs both a web server and a log.
    from penstock.cli.shared.checked_settings import check_surroundings
    from penstock.cli.shared.console_process import console_command, running_beside
    from penstock.console.rendering import import_templates
    from penstock.daemon import Daemon, check_instances
    from penstock.desired import DesiredSettings

    desired = DesiredSettings(file)
    settings = load_settings(file) if only_check else desired.first(check_instances)
    if settings.console is not None:
        # Import the templates now, so that a missing package is reported immediately. Otherwise the console
        # would never start.
        import_templates()
    if only_check:
        check_instances(settings)
        for remark in check_surroundings(settings):
            typer.echo(remark)
        typer.echo(f"{file}: {counted(len(settings.instances), 'instance')}, nothing is wrong")
        for name, (host, port) in settings.listen.addresses().items():
            shown_host = f"[{host}]" if ":" in host else host
            typer.echo(f"listen.{name:<15}{shown_host}:{port or 'a port that the system chooses'}")
        if settings.console is not None:
            typer.echo(f"{'console':<22}{settings.console.listen}")
        typer.echo(f"{'coordination':<22}{without_password(settings.coordination_url())}")
        return
    daemon = Daemon(settings, desired)
    beside = nullcontext() if settings.console is None else running_beside(console_command(file))
    with stopped_by_signals(daemon.stop, partial(daemon.reload, reads_file=True)), beside:
        daemon.run()
