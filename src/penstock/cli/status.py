# SPDX-License-Identifier: Apache-2.0
"""`penstock status`: how the instances of a daemon stand."""

import json as json_text
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

import penstock.errors
from penstock.cli.shared.asked_daemon import daemon_address
from penstock.cli.shared.rendering import bytes_text, write_json
from penstock.errors import AuthenticationFailed, ConnectionLost, PenstockError, SourceMissing
from penstock.model import Secret
from penstock.source.daemon_client import lost_hint, tls_context

TOKEN_VARIABLE = "PENSTOCK_TOKEN"

EXIT_FINDINGS = 1

_ANSWER_SECONDS_MAX = 10.0
_WATCH_SECONDS = 1.0
_WIDTH_UNBOUNDED = 240

_STYLES = {"running": "green", "stopped": "bold red", "held": "yellow", "waiting": "yellow", "behind": "red"}


def run(
    instance: Annotated[str | None, typer.Argument(help="The instance. Default: all instances.")] = None,
    url: Annotated[str | None, typer.Option(help="The daemon's URL. Default: http://127.0.0.1:7070.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="The daemon's settings file, which provides its address and token.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second.")] = False,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per instance instead of a table.")
    ] = False,
) -> None:
    """Show the state, position, lag and rates of a daemon's instances.

    Exits with 1 if an instance has stopped. The token comes from --config or PENSTOCK_TOKEN.
    """
    daemon = _Daemon.find(url, config)
    if watch and not json:
        _watch(daemon, instance)
        return
    while True:
        found = daemon.instances(instance)
        if json:
            write_json(sys.stdout, found)
            sys.stdout.flush()
        else:
            _show(_console(), found)
            _show_listeners(_console(), daemon.listeners())
        if not watch:
            break
        time.sleep(_WATCH_SECONDS)
    if any(one["state"] == "stopped" for one in found):
        raise typer.Exit(EXIT_FINDINGS)


class _Daemon:
    """A daemon that is asked over HTTP."""

    def __init__(self, url: str, token: Secret | None, context: ssl.SSLContext | None) -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._context = context

    @classmethod
    def find(cls, url: str | None, config: Path | None) -> "_Daemon":
        """Return the daemon that the options mean. Raises OptionInvalid."""
        address = daemon_address("all", url, config)
        context = None if address.tls is None else tls_context(address.tls)
        return cls(address.base_urls[0], address.token, context)

    def instances(self, name: str | None) -> list[dict[str, Any]]:
        """Return the status of one instance, or of all. Raises ConnectionLost, and what the daemon raised."""
        found: list[dict[str, Any]] = self._ask("/v1/status")["instances"]
        chosen = [one for one in found if name in (None, one["instance"])]
        if not chosen:
            known = ", ".join(one["instance"] for one in found)
            raise SourceMissing(f"there is no instance {name!r}", hint=f"The instances here are: {known}")
        return chosen

    def listeners(self) -> dict[str, str]:
        """Return where the daemon listens: host:port by the name of each listener."""
        found: dict[str, str] = self._ask("/v1/listeners")["listeners"]
        return found

    def _ask(self, path: str) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self._token.reveal()}"} if self._token else {}
        request = urllib.request.Request(self._url + path, headers=headers)
        try:
            with urllib.request.urlopen(
                request, timeout=_ANSWER_SECONDS_MAX, context=self._context
            ) as answer:
                value: dict[str, Any] = json_text.load(answer)
                return value
        except urllib.error.HTTPError as problem:
            raise _problem_of(problem.read(), f"{self._url} answers {problem.code}") from problem
        except (OSError, ValueError) as problem:
            reason = getattr(problem, "reason", problem)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise AuthenticationFailed(
                    f"{self._url} cannot be trusted: {reason.verify_message}",
                    hint="Give its settings with --config, or its authority: https://HOST:PORT?ssl_ca=ca.pem",
                ) from problem
            raise ConnectionLost(
                f"{self._url} does not answer: {reason}",
                hint=lost_hint(self._url, reason, "Is the daemon running? Name it with --url or --config"),
            ) from problem


def _problem_of(body: bytes, otherwise: str) -> PenstockError:
    """Return the error that a daemon told, by its class."""
    try:
        told = json_text.loads(body)
    except ValueError:
        told = {}
    kind = getattr(penstock.errors, str(told.get("type")), ConnectionLost)
    return kind(str(told.get("detail") or otherwise), position=told.get("position"), hint=told.get("hint"))


# --- Showing --------------------------------------------------------------------------------


def _watch(daemon: _Daemon, instance: str | None) -> None:
    with Live(console=_console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(_table(daemon.instances(instance)), refresh=True)
            time.sleep(_WATCH_SECONDS)


def _console() -> Console:
    # A file or a pipe has no edge at which to cut.
    return Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_UNBOUNDED)


def _show(console: Console, found: list[dict[str, Any]]) -> None:
    console.print(_table(found))
    for one in found:
        for label, text, style in _remarks(one):
            console.print(
                Text.assemble((f"{one['instance']}: ", "bold"), (f"{label} ", style), text), soft_wrap=True
            )


def _show_listeners(console: Console, listeners: Mapping[str, str]) -> None:
    told = ", ".join(f"{name} at {address}" for name, address in listeners.items())
    console.print(Text.assemble(("listens: ", "dim"), told), soft_wrap=True)


def _table(found: list[dict[str, Any]]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("instance", "state", "position"):
        table.add_column(name, no_wrap=True)
    for name in ("lag", "behind", "bytes/s", "trx/s", "rows/s", "log"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("server", no_wrap=True)
    for one in found:
        table.add_row(
            one["instance"],
            Text(one["state"], _STYLES.get(one["state"], "")),
            one["position"] or "-",
            _lag_text(one["lag_seconds"]),
            bytes_text(one["lag_bytes"]),
            bytes_text(one["bytes_per_second"]),
            f"{one['transactions_per_second']:,.0f}",
            f"{one['rows_per_second']:,.0f}",
            bytes_text(one["log_bytes"]),
            (one["server"] or "-").rpartition("@")[2],
        )
    return table


def _remarks(one: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return what a table has no room for: why, the note, and the last error while it still matters."""
    remarks = []
    if one["why"] and one["state"] != "running":
        remarks.append((one["state"], one["why"], _STYLES.get(one["state"], "")))
    if one["note"]:
        remarks.append(("note", one["note"], "cyan"))
    # A daemon of an earlier version does not say what is prepared.
    remarks += [("prepared", text, "yellow") for text in one.get("prepared", ())]
    # Nor which holds are broken.
    remarks += [
        ("broken hold", f"{hold['reader']} at {hold['position']} holds nothing: {hold['why']}", "red")
        for hold in one.get("broken_holds", ())
    ]
    if one["error"] and one["state"] in ("stopped", "waiting", "behind"):
        told = one["error"]
        text = told["kind"] + (f" at {told['position']}" if told["position"] else "")
        remarks.append(("error", text, "red"))
        if told["hint"]:
            remarks.append(("hint", told["hint"], "dim"))
    for doubt in one.get("tables_in_doubt", ()):
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
