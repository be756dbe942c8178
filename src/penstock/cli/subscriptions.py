# SPDX-License-Identifier: Apache-2.0
"""`penstock subscriptions`: show subscriptions and their checkpoints, and change them."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.confirming import check_confirmation
from penstock.cli.shared.options import Ca, Coordination, Json, StoreConfig, SubscriptionName, Url
from penstock.cli.shared.rendering import Field, LineWriter, bytes_text, time_text, write_json
from penstock.cli.shared.selecting import pause, resume, select
from penstock.errors import AccessDenied, AuthenticationFailed, ConnectionLost, OptionInvalid
from penstock.model import Position

if TYPE_CHECKING:
    from penstock.cli.shared.chosen_subscription import Backends, ShownShard
    from penstock.coordinate.checkpoint import Checkpoint
    from penstock.coordinate.member_statistics import MemberStatistics
    from penstock.coordinate.subscription_record import ShardView, Subscription
    from penstock.source.bounds import Bound

HELP = "Show subscriptions and their checkpoints, and change them."

Shard = Annotated[int | None, typer.Option(help="The shard. Default: all shards.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]
Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Also reset while consumers are active. The shards' owners restart from the new checkpoint.",
    ),
]

_COLUMNS = (
    Field("shard", 5, right=True),
    Field("owner", 28),
    Field("behind", 12, right=True),
    Field("lag", 9, right=True),
    Field("checkpoint", 32),
    Field("noted", 20),
    Field("remark", 0),
)
_MEMBER_COLUMNS = (
    Field("member", 34),
    Field("rows", 12, right=True),
    Field("rows/s", 10, right=True),
    Field("errors", 7, right=True),
    Field("retries", 7, right=True),
    Field("skipped", 7, right=True),
    Field("behind", 12, right=True),
    Field("lag", 9, right=True),
    Field("recorded", 0),
)
_LIST_COLUMNS = (
    Field("subscription", 32),
    Field("shards", 6, right=True),
    Field("owned", 5, right=True),
    Field("members", 7, right=True),
    Field("behind", 12, right=True),
    Field("lag", 9, right=True),
    Field("remark", 0),
)


# --- Showing --------------------------------------------------------------------------------


def show_all(
    instance: Annotated[str | None, typer.Option(help="List only this instance's subscriptions.")] = None,
    coordination: Coordination = None,
    config: StoreConfig = None,
    url: Url = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """List subscriptions with their shards, owners and largest lag."""
    from penstock.cli.shared.chosen_subscription import Backends, default_store

    with Backends.of(coordination, url, config, ca) as backends:
        lines = [_list_line(subscription, backends) for subscription in backends.registry.list(instance)]
        if json:
            write_json(sys.stdout, lines)
            return
        writer = LineWriter(sys.stdout, _LIST_COLUMNS)
        for line in lines:
            writer.write(
                [
                    f"{line['instance']}/{line['name']}",
                    line["shards"],
                    line["owned"],
                    len(line["members"]),
                    bytes_text(line["lag_bytes"]),
                    _seconds(line["lag_seconds"]),
                    line["remark"],
                ]
            )
        if not lines:
            typer.echo(f"there are no subscriptions here. {default_store()}", err=True)
        _report_unreachable(backends)


def show(
    subscription: SubscriptionName,
    coordination: Coordination = None,
    config: StoreConfig = None,
    url: Url = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Show lag, owner, checkpoint and fencing token of each shard, and what each member has delivered."""
    from penstock.cli.shared.chosen_subscription import Backends, full_name

    with Backends.of(coordination, url, config, ca) as backends:
        chosen = backends.choose(subscription)
        shards = backends.shards(chosen)
        if json:
            statistics = backends.registry.statistics(chosen)
            write_json(sys.stdout, [_shard_line(chosen, shard, statistics) for shard in shards])
            return
        resizing = "" if chosen.resizing is None else f", becoming {chosen.resizing.shard_count}"
        for label, value in (
            ("subscription", full_name(chosen)),
            ("state", "paused" if chosen.paused else ""),
            ("tables", ", ".join(chosen.selected_tables[0]) or "all"),
            ("exclude", ", ".join(chosen.selected_tables[1])),
            ("changes", ", ".join(chosen.selection.changes or ())),
            ("where", chosen.selection.where or ""),
            ("columns", ", ".join(chosen.selection.columns or ())),
            ("shards", f"{chosen.shard_count}{resizing}"),
            ("shard columns", "; ".join(f"{at}: {', '.join(of)}" for at, of in chosen.shard_columns.items())),
            ("columns since", chosen.keyed_at or ""),
            ("generation", chosen.generation),
            ("members", ", ".join(backends.registry.members(chosen)) or "none"),
            ("labels", ", ".join(f"{label}={value}" for label, value in chosen.labels.items())),
            ("moved", ", ".join(f"{shard} to {to}" for shard, to in sorted(chosen.pins.items()))),
        ):
            if value != "":
                typer.echo(f"{label:<15}{value}")
        writer = LineWriter(sys.stdout, _COLUMNS)
        for shard in shards:
            checkpoint = shard.view.state.checkpoint
            writer.write(
                [
                    shard.view.shard,
                    shard.owner or "-",
                    bytes_text(shard.lag.bytes),
                    _seconds(shard.lag.seconds),
                    checkpoint.position if checkpoint else "-",
                    _time(checkpoint.updated_us) if checkpoint else "-",
                    shard.lag.why if checkpoint else "",
                ]
            )
        _show_members(backends.registry.statistics(chosen))
        _report_unreachable(backends)


def _show_members(members: "Mapping[str, MemberStatistics]") -> None:
    if not members:
        return
    typer.echo()
    writer = LineWriter(sys.stdout, _MEMBER_COLUMNS)
    for member, statistics in sorted(members.items()):
        writer.write(
            [
                member,
                statistics.rows,
                f"{statistics.rows_per_second:.1f}",
                statistics.errors,
                statistics.retries,
                statistics.skipped,
                bytes_text(statistics.behind_bytes),
                _seconds(statistics.lag_seconds),
                _time(statistics.updated_us),
            ]
        )


def _list_line(subscription: "Subscription", backends: "Backends") -> dict[str, Any]:
    shards = backends.shards(subscription)
    lags = [shard.lag for shard in shards if shard.view.state.checkpoint is not None]
    waiting = len(shards) - len(lags)
    unknown = next((lag.why for lag in lags if lag.why is not None), None)
    known_lags = [lag for lag in lags if lag.why is None]
    remarks = [f"{waiting} not begun" if waiting else "", unknown or ""]
    if subscription.resizing is not None:
        remarks.append(f"becoming {subscription.resizing.shard_count} shards")
    if subscription.paused:
        remarks.append("paused")
    return {
        "instance": subscription.instance,
        "name": subscription.name,
        "tables": list(subscription.selected_tables[0]),
        "paused": subscription.paused,
        "labels": dict(subscription.labels),
        "shards": subscription.shard_count,
        "generation": subscription.generation,
        "owned": sum(shard.owner is not None for shard in shards),
        "members": list(backends.registry.members(subscription)),
        # The lag of the slowest shard, None if any shard's lag is unknown.
        "lag_bytes": None if unknown else max((lag.bytes or 0 for lag in known_lags), default=None),
        "lag_seconds": _worst([lag.seconds for lag in lags]),
        "remark": "; ".join(remark for remark in remarks if remark),
    }


def _worst(seconds: Sequence[float | None]) -> float | None:
    known_seconds = [value for value in seconds if value is not None]
    return max(known_seconds) if known_seconds and len(known_seconds) == len(seconds) else None


def _shard_line(
    subscription: "Subscription", shown: "ShownShard", members: "Mapping[str, MemberStatistics]"
) -> dict[str, Any]:
    from penstock.cli.shared.asked_daemon import line_of
    from penstock.cli.shared.log_folder import moment

    state, holder = shown.view.state, shown.view.holder
    statistics = members.get(shown.owner or "")
    return {
        "instance": subscription.instance,
        "name": subscription.name,
        "generation": subscription.generation,
        "shard": shown.view.shard,
        "owner": shown.owner,
        "owned_since": moment(holder.since_us) if holder else None,
        "token": state.token or None,
        "selects_since": state.revised_at,
        "checkpoint": asdict(state.checkpoint) if state.checkpoint else None,
        **line_of(shown.lag),
        # The total over all shards of the owner.
        "owner_statistics": None if statistics is None else asdict(statistics),
    }


# --- Changing -------------------------------------------------------------------------------


def reset(
    subscription: SubscriptionName,
    at: Annotated[
        str | None,
        typer.Option("--time", help="Go to the first transaction committed at or after this time (UTC)."),
    ] = None,
    gtid_set: Annotated[
        str | None, typer.Option(help="Go to the first transaction outside this GTID set.")
    ] = None,
    position: Annotated[str | None, typer.Option(help="Go to this position, EPOCH/file:offset.")] = None,
    earliest: Annotated[bool, typer.Option("--earliest", help="Go to the start of the log.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Go to the end of the log.")] = False,
    shard: Shard = None,
    force: Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    coordination: Coordination = None,
    config: StoreConfig = None,
    url: Url = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Move a subscription's checkpoint, earlier or later, in all shards or in one.

    The daemon verifies the new checkpoint. If no daemon answers, only --position works, without verification.
    """
    from penstock.cli.shared.chosen_subscription import Backends, full_name, position_of, print_outcome

    target = _parse_target(at, gtid_set, position, earliest=earliest, latest=latest)
    with Backends.of(coordination, url, config, ca) as backends:
        chosen = backends.choose(subscription)
        shards = [
            shown_shard for shown_shard in backends.shards(chosen) if shard in (None, shown_shard.view.shard)
        ]
        if not shards:
            raise OptionInvalid(
                f"{full_name(chosen)} has no shard {shard}", hint=f"It has 0 to {chosen.shard_count - 1}"
            )
        checkpoint, note = _verify_checkpoint(
            backends, chosen, target, [shown_shard.view for shown_shard in shards]
        )
        owners = _refuse_owned(chosen, shards, "reset", force=force)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "shards": [shown_shard.view.shard for shown_shard in shards],
            "old": {shown_shard.view.shard: position_of(shown_shard.view) for shown_shard in shards},
            "new": asdict(checkpoint),
            "owners": owners,
            "note": note,
            "dry_run": dry_run,
        }
        if not json:
            for shown_shard in shards:
                typer.echo(
                    f"shard {shown_shard.view.shard}: {position_of(shown_shard.view) or '-'}"
                    f" to {checkpoint.position}"
                )
            if note:
                typer.echo(f"note: {note}")
            for owner in owners:
                typer.echo(f"owner: {owner} stops what it is at and begins again there")
        if not dry_run:
            _confirm(yes, f"Let {full_name(chosen)} go on at {checkpoint.position}?")
            backends.registry.reset(chosen.instance, chosen.name, checkpoint, shard)
        print_outcome(json, line, dry_run, "reset")


def move(
    subscription: SubscriptionName,
    shard: Annotated[int, typer.Argument(help="The shard, from 0.")],
    member: Annotated[str, typer.Argument(help="The member that gets the shard, as shown by `show`.")],
    coordination: Coordination = None,
    config: StoreConfig = None,
    json: Json = False,
) -> None:
    """Assign a shard to a member. It stays there while that member runs."""
    from penstock.cli.shared.chosen_subscription import Backends, print_outcome

    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        backends.registry.move(chosen.instance, chosen.name, shard, member)
        line = {"instance": chosen.instance, "name": chosen.name, "shard": shard, "member": member}
        print_outcome(json, line, False, f"shard {shard} goes to {member}")


def resize(
    subscription: SubscriptionName,
    shards: Annotated[int, typer.Argument(help="The new number of shards.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    coordination: Coordination = None,
    config: StoreConfig = None,
    json: Json = False,
) -> None:
    """Change the number of shards, even while consumers are active, without loss or duplicates.

    Subscribers that set `shards` need the new number when they restart.
    """
    from penstock.cli.shared.chosen_subscription import Backends, full_name, print_outcome

    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "old": chosen.shard_count,
            "new": shards,
            "dry_run": dry_run,
        }
        if not json:
            typer.echo(f"{full_name(chosen)} has {chosen.shard_count} shards and would have {shards}")
        if not dry_run:
            _confirm(yes, f"Change {full_name(chosen)} from {chosen.shard_count} to {shards} shards?")
            started_at = time.monotonic()
            changed = backends.registry.resize(chosen.instance, chosen.name, shards)
            line["generation"] = changed.generation
            line["seconds"] = round(time.monotonic() - started_at, 3)
        print_outcome(json, line, dry_run, "resized")


def delete(
    subscription: SubscriptionName,
    force: Annotated[bool, typer.Option("--force", help="Also delete while consumers are active.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    coordination: Coordination = None,
    config: StoreConfig = None,
    url: Url = None,
    ca: Ca = None,
    json: Json = False,
) -> None:
    """Delete a subscription with its checkpoints, and release the log that it held."""
    from penstock.cli.shared.asked_daemon import Lag
    from penstock.cli.shared.chosen_subscription import (
        Backends,
        ShownShard,
        full_name,
        position_of,
        print_outcome,
    )

    with Backends.of(coordination, url, config, ca) as backends:
        chosen = backends.choose(subscription)
        shards = [ShownShard(view, Lag()) for view in backends.registry.shards(chosen)]
        owners = _refuse_owned(chosen, shards, "delete", force=force)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "old": {shown_shard.view.shard: position_of(shown_shard.view) for shown_shard in shards},
            "owners": owners,
            "dry_run": dry_run,
        }
        if not json:
            for shown_shard in shards:
                typer.echo(
                    f"shard {shown_shard.view.shard}: {position_of(shown_shard.view) or '-'} is forgotten"
                )
        if not dry_run:
            _confirm(yes, f"Forget {full_name(chosen)} and its checkpoints?")
            backends.registry.delete(chosen.instance, chosen.name)
            line["released"] = _release(backends, chosen)
        print_outcome(json, line, dry_run, "deleted")


def _release(backends: "Backends", chosen: "Subscription") -> bool | None:
    """Ask the daemon to release the log held for a subscription; None if the daemon could not be asked."""
    from penstock.logstore.holds import consumer_hold_name

    try:
        daemon = backends.daemon(chosen.instance)
        return None if daemon is None else daemon.release_consumer(chosen.name)
    except (AccessDenied, AuthenticationFailed, ConnectionLost) as problem:
        reader = consumer_hold_name(chosen.name)
        typer.echo(
            f"the log is kept for it until log.retention.hold_age: {problem}. To end that:"
            f" penstock holds remove {chosen.instance} {reader}",
            err=True,
        )
        return None


def _parse_target(
    at: str | None, gtid_set: str | None, position: str | None, *, earliest: bool, latest: bool
) -> "Bound | str":
    from penstock.cli.shared.asked_daemon import EARLIEST, LATEST
    from penstock.cli.shared.log_folder import parse_time
    from penstock.source.bounds import Bound

    targets: list[Bound | str] = []
    if at is not None:
        targets.append(Bound(time_us=parse_time(at)))
    if gtid_set is not None:
        targets.append(Bound(gtid_set=gtid_set))
    if position is not None:
        targets.append(Bound(position=Position.parse(position)))
    targets += [word for word, chosen in ((EARLIEST, earliest), (LATEST, latest)) if chosen]
    if len(targets) != 1:
        raise OptionInvalid(
            "one place at a time", hint="Give one of --time, --gtid-set, --position, --earliest, --latest"
        )
    return targets[0]


def _verify_checkpoint(
    backends: "Backends", chosen: "Subscription", target: "Bound | str", shards: "Sequence[ShardView]"
) -> "tuple[Checkpoint, str | None]":
    """Return the requested checkpoint, and a warning for the user."""
    from penstock.coordinate.checkpoint import Checkpoint
    from penstock.source.bounds import Bound

    daemon = backends.daemon(chosen.instance)
    try:
        if daemon is not None:
            return daemon.find_checkpoint(target), None
    except ConnectionLost as problem:
        backends.unreachable = problem
    position = target.position if isinstance(target, Bound) else None
    if position is None:
        assert backends.unreachable is not None, "a daemon that is not asked was asked before, and is silent"
        raise backends.unreachable
    keys = {view.state.checkpoint.server_key for view in shards if view.state.checkpoint is not None}
    key = keys.pop() if len(keys) == 1 else ""
    return Checkpoint.now(str(position), server_key=key), "no daemon answers: nobody has proved this place"


def _refuse_owned(
    chosen: "Subscription", shards: "Sequence[ShownShard]", verb: str, *, force: bool
) -> list[str]:
    """Return the owners of the shards. Raises OptionInvalid if a shard has an owner, unless forced."""
    from penstock.cli.shared.chosen_subscription import full_name

    owners = sorted({shard.owner for shard in shards if shard.owner is not None})
    if owners and not force:
        raise OptionInvalid(
            f"{full_name(chosen)} is consumed by {', '.join(owners)}",
            hint=f"Stop them, or add --force: penstock subscriptions {verb} {chosen.name} --force",
        )
    return owners


def _confirm(yes: bool, question: str) -> None:
    check_confirmation(yes=yes)
    if not yes:
        typer.confirm(question, abort=True)


# --- Output ---------------------------------------------------------------------------------


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _time(time_us: int) -> str:
    from penstock.cli.shared.log_folder import moment

    at = moment(time_us)
    return "-" if at is None else time_text(at.replace(microsecond=0))


def _report_unreachable(backends: "Backends") -> None:
    if backends.unreachable is not None:
        typer.echo(f"lag is not known: {backends.unreachable}", err=True)


VERBS = {
    "list": show_all,
    "show": show,
    "reset": reset,
    "set": select,
    "pause": pause,
    "resume": resume,
    "move": move,
    "resize": resize,
    "delete": delete,
}
