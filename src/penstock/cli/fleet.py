# SPDX-License-Identifier: Apache-2.0
"""`penstock fleet`: show which member captures what, and drain members."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.shared.fleet_store import opened_store
from penstock.cli.shared.options import Ca, Coordination, MemberConfig
from penstock.cli.shared.rendering import bytes_text, write_json
from penstock.cli.shared.whole_daemon import WholeDaemon

if TYPE_CHECKING:
    from penstock.coordinate.store import CoordinationStore

HELP = "Show which member of a fleet captures what, and drain members."

EXIT_FINDINGS = 1

_POLL_SECONDS = 0.2
_PLACING_SECONDS_MAX = 5.0

_WIDTH_UNBOUNDED = 240
_STYLES = {"running": "green", "away": "bold red", "draining": "yellow", "drained": "yellow"}


def status(
    url: Annotated[str | None, typer.Option(help="Ask this member instead of the store.")] = None,
    config: MemberConfig = None,
    ca: Ca = None,
    coordination: Coordination = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the members, their load, who captures each instance, and who has copies of its log.

    Exits with 1 if an instance is not captured by any member. A member's token comes from PENSTOCK_TOKEN.
    """
    from penstock.fleet.status import fleet_status

    if url is not None:
        shown = WholeDaemon.find(url, config, ca).fleet()
    else:
        with opened_store(config, coordination) as store:
            shown = fleet_status(store)
    if json:
        write_json(sys.stdout, iter([shown]))
    else:
        _show(shown)
    if any(row["captured_by"] is None for row in shown["instances"]):
        raise typer.Exit(EXIT_FINDINGS)


def drain(
    member: Annotated[str, typer.Argument(help="The member, as penstock fleet status names it.")],
    config: MemberConfig = None,
    coordination: Coordination = None,
    wait: Annotated[
        bool, typer.Option(help="Return only once the member captures nothing and runs no job.")
    ] = True,
    timeout: Annotated[
        float,
        typer.Option(help="Wait at most this many seconds. The member continues to hand over afterwards."),
    ] = 600.0,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Hand over at once. A copy that is behind reads what it lacks from the server."
        ),
    ] = False,
) -> None:
    """Move a member's instances and jobs to others, and place none on it until penstock fleet undrain.

    The member keeps running and sends clients to the others. Drain a host before you stop or upgrade it. With
    log.copies the member keeps capturing an instance until a copy of its log is up to date. Exits with 1 if
    that takes longer than the timeout, or if no other member can capture an instance.
    """
    from penstock.fleet import draining

    nowhere: list[str] = []
    with opened_store(config, coordination) as store:
        draining.drain(store, member, at_once=now)
        deadline = time.monotonic() + timeout
        while wait and (held := draining.held_by(store, member)):
            if time.monotonic() >= deadline:
                typer.echo(f"{member} still has {', '.join(held)}")
                _report_awaited(store, member)
                raise typer.Exit(EXIT_FINDINGS)
            time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + _PLACING_SECONDS_MAX
        while wait and (nowhere := _unplaced(store)) and time.monotonic() < deadline:
            # Wait again: the leader writes the placements of one member after another.
            time.sleep(_POLL_SECONDS)
    typer.echo(f"{member} {'captures nothing and runs no job' if wait else 'is being drained'}")
    if nowhere:
        typer.echo(f"nobody captures {', '.join(nowhere)}: no other member has it in its settings")
        raise typer.Exit(EXIT_FINDINGS)


def undrain(
    member: Annotated[str, typer.Argument(help="The drained member.")],
    config: MemberConfig = None,
    coordination: Coordination = None,
) -> None:
    """Let a drained member capture and run jobs again."""
    from penstock.fleet import draining

    with opened_store(config, coordination) as store:
        draining.undrain(store, member)
    typer.echo(f"{member} does its share again")


VERBS = {"status": status, "drain": drain, "undrain": undrain}


def _unplaced(store: "CoordinationStore") -> list[str]:
    from penstock.fleet.status import fleet_status

    return [row["instance"] for row in fleet_status(store)["instances"] if row["placed_on"] is None]


def _report_awaited(store: "CoordinationStore", member: str) -> None:
    """Print which copies of logs a drained member waits for."""
    from penstock.fleet.status import fleet_status

    waiting = [row for row in fleet_status(store)["instances"] if row["captured_by"] == member]
    for row in waiting:
        copies = ", ".join(map(_copy_text, row["copies"])) or "no copy yet"
        typer.echo(f"{row['instance']} waits for a copy in step: {copies}")
    if waiting:
        typer.echo(f"Hand over to copies that are behind: penstock fleet drain {member} --now")


# --- Showing --------------------------------------------------------------------------------


def _show(shown: dict[str, Any]) -> None:
    # Output to a file or a pipe has no width limit.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_UNBOUNDED)
    console.print(_members_table(shown))
    console.print()
    console.print(_instances_table(shown))


def _members_table(shown: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("member", "state", "zone", "address", "version", "has", "bytes/s", "running for"):
        table.add_column(name, no_wrap=True, justify="right" if name in ("has", "bytes/s") else "left")
    for member in [*shown["members"], *shown["workers"]]:
        role = " (worker)" if "address" not in member and member["state"] != "away" else ""
        role = " (leader)" if not role and member["member"] == shown["leader"] else role
        table.add_row(
            member["member"] + role,
            Text(member["state"], _STYLES.get(member["state"], "")),
            member.get("zone") or "-",
            member.get("address") or "-",
            member.get("version") or "-",
            str(member["placed"]),
            bytes_text(member.get("bytes_per_second")),
            _age_text(member.get("since_us")),
        )
    return table


def _instances_table(shown: dict[str, Any]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("instance", "captured by", "state", "position", "recorded", "copies", "why"):
        table.add_column(name, no_wrap=name not in ("copies", "why"))
    for row in shown["instances"]:
        nobody = Text(
            "nobody" if row["placed_on"] is None else f"nobody yet ({row['placed_on']})", "bold red"
        )
        table.add_row(
            row["instance"],
            nobody if row["captured_by"] is None else row["captured_by"],
            row["state"] or "-",
            row["position"] or "-",
            _age_text(row["recorded_us"]),
            ", ".join(map(_copy_text, row["copies"])) or "-",
            "; ".join(_reasons(row)),
        )
    return table


def _reasons(row: dict[str, Any]) -> list[str]:
    """Return why an instance is in its state, and which members have a damaged copy of its log."""
    # A daemon of an earlier version does not report damaged logs.
    damages = [
        f"the log of {damage['member']} is damaged: {damage['why']}" for damage in row.get("damaged", ())
    ]
    return [*([row["why"]] if row["why"] else []), *damages]


def _copy_text(copy: dict[str, Any]) -> str:
    """Return where a copy is and how far behind it was when it was last recorded."""
    if copy["state"] == "away" or copy["behind_bytes"] is None:
        return f"{copy['member']} ({'away' if copy['state'] == 'away' else 'nothing yet'})"
    return f"{copy['member']} ({bytes_text(copy['behind_bytes'])} behind)"


def _age_text(time_us: int | None) -> str:
    if not time_us:
        return "-"
    seconds = max(int(time.time() - time_us / 1e6), 0)
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
