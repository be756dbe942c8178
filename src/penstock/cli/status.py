# SPDX-License-Identifier: Apache-2.0
"""`penstock status`: show the state of a daemon's instances."""

import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock.cli.shared.options import Ca, DaemonConfig, Url
from penstock.cli.shared.rendering import bytes_text, write_json
from penstock.cli.shared.whole_daemon import WholeDaemon

TOKEN_VARIABLE = "PENSTOCK_TOKEN"

EXIT_FINDINGS = 1

_WATCH_SECONDS = 1.0
_WIDTH_UNBOUNDED = 240

_STYLES = {"running": "green", "stopped": "bold red", "held": "yellow", "waiting": "yellow", "behind": "red"}


def run(
    instance: Annotated[str | None, typer.Argument(help="The instance. Default: all instances.")] = None,
    url: Url = None,
    config: DaemonConfig = None,
    ca: Ca = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per instance instead of a table.")
    ] = False,
) -> None:
    """Show the state, position, lag and rates of a daemon's instances.

    Exits with 1 if an instance has stopped. The token comes from --config or PENSTOCK_TOKEN.
    """
    daemon = WholeDaemon.find(url, config, ca)
    if watch and not json:
        _watch(daemon, instance)
        return
    while True:
        instances = daemon.instances(instance)
        if json:
            write_json(sys.stdout, instances)
            sys.stdout.flush()
        else:
            _show(_console(), instances)
            _show_listeners(_console(), daemon.listeners())
        if not watch:
            break
        time.sleep(_WATCH_SECONDS)
    if any(status["state"] == "stopped" for status in instances):
        raise typer.Exit(EXIT_FINDINGS)


# --- Showing --------------------------------------------------------------------------------


def _watch(daemon: WholeDaemon, instance: str | None) -> None:
    with Live(console=_console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(_table(daemon.instances(instance)), refresh=True)
            time.sleep(_WATCH_SECONDS)


def _console() -> Console:
    # Output to a file or a pipe has no width limit.
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_UNBOUNDED)


def _show(console: Console, statuses: list[dict[str, Any]]) -> None:
    console.print(_table(statuses))
    for status in statuses:
        for label, text, style in _remarks(status):
            console.print(
                Text.assemble((f"{status['instance']}: ", "bold"), (f"{label} ", style), text), soft_wrap=True
            )


def _show_listeners(console: Console, listeners: Mapping[str, str]) -> None:
    text = ", ".join(f"{name} at {address}" for name, address in listeners.items())
    console.print(Text.assemble(("listens: ", "dim"), text), soft_wrap=True)


def _table(statuses: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("instance", "state", "position"):
        table.add_column(name, no_wrap=True)
    for name in ("lag", "behind", "bytes/s", "trx/s", "rows/s", "log"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("server", no_wrap=True)
    for status in statuses:
        table.add_row(
            status["instance"],
            Text(status["state"], _STYLES.get(status["state"], "")),
            status["position"] or "-",
            _lag_text(status["lag_seconds"]),
            bytes_text(status["lag_bytes"]),
            bytes_text(status["bytes_per_second"]),
            f"{status['transactions_per_second']:,.0f}",
            f"{status['rows_per_second']:,.0f}",
            bytes_text(status["log_bytes"]),
            (status["server"] or "-").rpartition("@")[2],
        )
    return table


def _remarks(status: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the information that does not fit into the table: reasons, the note, and the last error while it
    is relevant.
    """
    remarks = []
    if status["why"] and status["state"] != "running":
        remarks.append((status["state"], status["why"], _STYLES.get(status["state"], "")))
    if status["note"]:
        remarks.append(("note", status["note"], "cyan"))
    # A daemon of an earlier version does not report prepared transactions.
    remarks += [("prepared", text, "yellow") for text in status.get("prepared", ())]
    # A daemon of an earlier version does not report broken holds.
    remarks += [
        ("broken hold", f"{hold['reader']} at {hold['position']} holds nothing: {hold['why']}", "red")
        for hold in status.get("broken_holds", ())
    ]
    if status["error"] and status["state"] in ("stopped", "waiting", "behind"):
        failure = status["error"]
        text = failure["kind"] + (f" at {failure['position']}" if failure["position"] else "")
        remarks.append(("error", text, "red"))
        if failure["hint"]:
            remarks.append(("hint", failure["hint"], "dim"))
    for doubt in status.get("tables_in_doubt", ()):
        since = f" since {doubt['since']}" if doubt["since"] else ""
        why = f" ({doubt['why']})" if doubt["why"] else ""
        text = f"{doubt['table']} is {doubt['state']}{since}: {doubt['reason']}{why}"
        remarks.append(("definition", text, "red" if doubt["state"] == "stopped" else "yellow"))
        remarks.append(("hint", doubt["command"], "dim"))
    return remarks


def _lag_text(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds else "0 s"
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
