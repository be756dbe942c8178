# SPDX-License-Identifier: Apache-2.0
"""`penstock position`: show and set the position where capture resumes."""

import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.confirming import check_confirmation
from penstock.cli.shared.options import Json, LogConfig, LogName
from penstock.cli.shared.rendering import field_lines, time_text, write_json
from penstock.errors import OptionInvalid
from penstock.model import Position

if TYPE_CHECKING:
    from penstock.cli.shared.accepted_server import Acceptance
    from penstock.cli.shared.log_folder import LogFolder
    from penstock.cli.shared.position_target import AskedServer, Target
    from penstock.logstore.position_set import PositionChange, Stretch
    from penstock.logstore.reader import LogReader
    from penstock.source.bounds import Bound

HELP = "Show and set the position where capture resumes."

_VERB = "position set"
_ACCEPT_VERB = "position accept"


# --- show -----------------------------------------------------------------------------------


def show(log: LogName = None, config: LogConfig = None, json: Json = False) -> None:
    """Show where capture will resume, where the log ends, and which holds protect it."""
    from penstock.cli.shared.log_folder import LogFolder, moment
    from penstock.logstore.audit import audit_lines
    from penstock.logstore.holds import Holds
    from penstock.logstore.position_file import CapturePosition
    from penstock.logstore.position_set import resume_point

    reader = LogFolder.find(log, config).open()
    now = resume_point(reader)
    noted = CapturePosition.load(reader.disk, reader.layout)
    changes = [line for line in audit_lines(reader.disk, reader.layout) if line.get("verb") == _VERB]
    line: dict[str, Any] = {
        "position": str(now.position),
        "was_set": now.was_set,
        "gtid_set": now.gtid_set,
        "epoch": now.epoch.epoch,
        "server": now.epoch.server_key,
        "version": now.epoch.version,
        "earliest": _text(reader.earliest()),
        "visible": _text(reader.visible),
        "durable": _text(noted.position if noted is not None else None),
        "durable_noted": moment(noted.time_us) if noted is not None else None,
        "holds": {hold.name: str(hold.position) for hold in Holds(reader.disk, reader.layout).all()},
        "last_set": changes[-1] if changes else None,
    }
    if json:
        write_json(sys.stdout, [line])
        return
    for text in field_lines({name: line[name] for name in line if name not in ("holds", "last_set")}):
        typer.echo(text)
    for name, position in line["holds"].items():
        typer.echo(f"{'hold':<14}{name} keeps what follows {position}")
    if line["last_set"]:
        last_change = line["last_set"]
        typer.echo(
            f"{'last set':<14}{last_change['time']} by {last_change['user']}:"
            f" {last_change['old']} to {last_change['new']}"
        )


# --- set ------------------------------------------------------------------------------------


def set_by_hand(
    log: LogName = None,
    at: Annotated[
        str | None,
        typer.Option("--time", help="Resume at the first transaction committed at or after this time (UTC)."),
    ] = None,
    gtid_set: Annotated[
        str | None, typer.Option(help="Resume at the first transaction outside this GTID set.")
    ] = None,
    position: Annotated[
        str | None, typer.Option(help="Resume at this position of the server, file:offset.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be read twice or lost; change nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    reason: Annotated[str, typer.Option(help="The reason to record in audit.log.")] = "",
    config: LogConfig = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Set where capture resumes at its next start, earlier or later, as a new epoch of the log.

    With --config, the server verifies the position and reports what would be lost. Without it, the position
    must be in the log. Stop the daemon first.
    """
    from penstock.cli.shared.log_folder import LogFolder, user_name
    from penstock.cli.shared.position_target import asked_server
    from penstock.logstore.audit import AuditLine
    from penstock.logstore.position_set import set_position

    bound = _bound(at, gtid_set, position)
    chosen = LogFolder.find(log, config)
    if dry_run:
        reader = chosen.open()
        with asked_server(chosen, reader) as server:
            _show_plan(
                *_plan(chosen, reader, server, bound), server_was_asked=server is not None, as_json=json
            )
        return
    check_confirmation(yes=yes)
    with chosen.open_for_writing() as writer, asked_server(chosen, writer) as server:
        change, target, lost = _plan(chosen, writer, server, bound)
        if not json or not yes:
            _show_plan(change, target, lost, server_was_asked=server is not None, as_json=False)
        if not yes:
            typer.confirm(f"Let the capture of {chosen.name} go on at {change.new}?", abort=True)
        audit = AuditLine(
            time=datetime.now(UTC).isoformat(),
            user=user_name(),
            verb=_VERB,
            old=str(change.old),
            new=str(change.new),
            reason=reason,
        )
        set_position(writer, change, audit)
    if json:
        write_json(sys.stdout, [{**_line(change, target, lost, server is not None), "dry_run": False}])
    else:
        typer.echo(f"set: capture resumes at {change.new} when it starts")


def _bound(at: str | None, gtid_set: str | None, position: str | None) -> "Bound":
    from penstock.cli.shared.log_folder import parse_time
    from penstock.source.bounds import Bound

    options = [option for option in (at, gtid_set, position) if option is not None]
    if len(options) != 1:
        raise OptionInvalid("one place at a time", hint="Give one of --time, --gtid-set, --position")
    if at is not None:
        return Bound(time_us=parse_time(at))
    if gtid_set is not None:
        return Bound(gtid_set=gtid_set)
    assert position is not None, "one of three is given"
    return Bound(position=Position.parse(position))


def _plan(
    chosen: "LogFolder", reader: "LogReader", server: "AskedServer | None", bound: "Bound"
) -> "tuple[PositionChange, Target, Stretch]":
    from penstock.cli.shared.position_target import find_in_log
    from penstock.logstore.position_set import Stretch, plan_position

    if server is None:
        target = find_in_log(chosen, reader, bound)
        change = plan_position(reader, target.position, target.gtid_set)
        return change, target, Stretch(change.bytes_lost, *((0, 0) if not change.gaps else (None, None)))
    target = server.find(reader, bound)
    change = plan_position(reader, target.position, target.gtid_set, server.files)
    return change, target, server.count(change.gaps)


def _line(
    change: "PositionChange", target: "Target", lost: "Stretch", server_was_asked: bool
) -> dict[str, Any]:
    return {
        "old": str(change.old),
        "new": str(change.new),
        "epoch": change.new.epoch,
        "gtid_set": change.gtid_set,
        "again": _stretch_line(change.again),
        "lost": {
            **_stretch_line(lost),
            "gaps": [{"file": gap.file, "from": gap.start, "to": gap.end} for gap in change.gaps],
        },
        "note": target.note,
        "server_asked": server_was_asked,
    }


def _stretch_line(stretch: "Stretch") -> dict[str, Any]:
    from penstock.cli.shared.log_folder import moment

    return {
        "bytes": stretch.bytes,
        "transactions": stretch.transactions,
        "changes": stretch.changes,
        "first": moment(stretch.time_first_us),
        "last": moment(stretch.time_last_us),
    }


def _show_plan(
    change: "PositionChange", target: "Target", lost: "Stretch", *, server_was_asked: bool, as_json: bool
) -> None:
    if as_json:
        write_json(sys.stdout, [{**_line(change, target, lost, server_was_asked), "dry_run": True}])
        return
    typer.echo(f"capture resumes at   {change.old}")
    typer.echo(f"it would resume at   {change.new}, as epoch {change.new.epoch} of the log")
    typer.echo(f"would be read twice  {_stretch_text(change.again)}")
    typer.echo(f"would be lost        {_stretch_text(lost)}")
    for gap in change.gaps:
        typer.echo(f"                     {gap.file}:{gap.start} to {'?' if gap.end is None else gap.end}")
    if target.note is not None:
        typer.echo(f"note                 {target.note}")
    if not server_was_asked:
        typer.echo("The server was not asked whether it still has this: --config penstock.yaml INSTANCE")


def _stretch_text(stretch: "Stretch") -> str:
    from penstock.cli.shared.log_folder import moment

    if not stretch:
        return "nothing"
    counts = [
        f"{'an unknown number of' if count is None else f'{count:,}'} {noun}"
        for count, noun in (
            (stretch.bytes, "bytes"),
            (stretch.transactions, "transactions"),
            (stretch.changes, "changes"),
        )
    ]
    first_time, last_time = moment(stretch.time_first_us), moment(stretch.time_last_us)
    span = (
        f", committed {time_text(first_time)} to {time_text(last_time)}" if first_time and last_time else ""
    )
    return ", ".join(counts) + span


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)


# --- accept ---------------------------------------------------------------------------------


def accept(
    log: LogName = None,
    server: Annotated[str | None, typer.Option(help="The server's host:port, if there are several.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="List the lost transactions and the tables they changed; change nothing."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    reason: Annotated[str, typer.Option(help="The reason to record in audit.log.")] = "",
    config: LogConfig = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Resume capture on a server that has lost transactions which the log still has.

    The log and the targets keep these transactions. The command lists their tables: compare them with
    `penstock verify`. Stop the daemon first.
    """
    from penstock.cli.shared.accepted_server import accept_server, chosen_server, plan_acceptance
    from penstock.cli.shared.log_folder import LogFolder, user_name
    from penstock.logstore.audit import AuditLine

    chosen = LogFolder.find(log, config)
    if dry_run:
        with chosen_server(chosen, server) as connection:
            _show_acceptance(
                plan_acceptance(chosen, chosen.open(), connection), as_json=json, is_dry_run=True
            )
        return
    check_confirmation(yes=yes)
    with chosen.open_for_writing() as writer, chosen_server(chosen, server) as connection:
        plan = plan_acceptance(chosen, writer, connection)
        if not json or not yes:
            _show_acceptance(plan, as_json=False, is_dry_run=False)
        if not yes:
            typer.confirm(f"Let the capture of {chosen.name} go on without them?", abort=True)
        audit = AuditLine(
            time=datetime.now(UTC).isoformat(),
            user=user_name(),
            verb=_ACCEPT_VERB,
            old=str(plan.old),
            new=str(plan.beginning.position),
            reason=f"{reason}{'; ' if reason else ''}without {plan.lost}",
        )
        accept_server(writer, plan, audit)
    if json:
        _show_acceptance(plan, as_json=True, is_dry_run=False)
    else:
        typer.echo(f"accepted: capture resumes at {plan.beginning.position} of {plan.address} when it starts")


def _show_acceptance(plan: "Acceptance", *, as_json: bool, is_dry_run: bool) -> None:
    if as_json:
        write_json(sys.stdout, [_acceptance_line(plan) | {"dry_run": is_dry_run}])
        return
    typer.echo(f"server               {plan.address}")
    typer.echo(f"lacks                {plan.lost}")
    typer.echo(f"capture resumes at   {plan.beginning.position}")
    typer.echo(f"tables to compare    {' '.join(plan.tables) or 'none'}")
    for statement in plan.statements:
        typer.echo(f"statement            {statement[:200]}")
    typer.echo(f"Compare them in every target: penstock verify pipeline.yaml {' '.join(plan.tables)}")


def _acceptance_line(plan: "Acceptance") -> dict[str, Any]:
    return {
        "server": str(plan.address),
        "lost": plan.lost,
        "old": str(plan.old),
        "new": str(plan.beginning.position),
        "gtid_set": plan.beginning.gtid_set,
        "tables": list(plan.tables),
        "statements": list(plan.statements),
        "note": plan.beginning.note,
    }


VERBS = {"show": show, "set": set_by_hand, "accept": accept}
