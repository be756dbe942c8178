# SPDX-License-Identifier: Apache-2.0
"""`penstock subscriptions`: show subscriptions and their checkpoints, and change them."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.shared.asked_daemon import EARLIEST, LATEST, AskedDaemon, Lag, line_of, shown_lag
from penstock.cli.shared.log_folder import Json, moment, parse_time
from penstock.cli.shared.rendering import Field, LineWriter, bytes_text, time_text, write_json
from penstock.client.options import default_coordination
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.coordinate.subscription_record import ShardView, Subscription, Subscriptions
from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    SourceMissing,
)
from penstock.logstore.holds import consumer_hold_name
from penstock.model import Position
from penstock.settings.daemon import load_settings
from penstock.source.bounds import Bound

HELP = "Show subscriptions and their checkpoints, and change them."

Chosen = Annotated[
    str, typer.Argument(metavar="SUBSCRIPTION", help="The subscription: NAME or INSTANCE/NAME.")
]
Coordination = Annotated[
    str | None,
    typer.Option(help="The coordination store: sqlite:///path or zookeeper://host:2181/root."),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="The daemon's settings file, which provides the coordination store and the daemon's address."
    ),
]
Url = Annotated[str | None, typer.Option(help="The daemon's URL. Default: http://127.0.0.1:7070.")]
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
_LIST_COLUMNS = (
    Field("subscription", 32),
    Field("shards", 6, right=True),
    Field("owned", 5, right=True),
    Field("members", 7, right=True),
    Field("behind", 12, right=True),
    Field("lag", 9, right=True),
    Field("remark", 0),
)


@dataclass(frozen=True)
class _ShownShard:
    """A shard with its lag."""

    view: ShardView
    lag: Lag

    @property
    def owner(self) -> str | None:
        return self.view.holder.name if self.view.holder else None


class _Backends:
    """The coordination store and the daemons that a command line selects."""

    def __init__(self, store: CoordinationStore, url: str | None, config: Path | None) -> None:
        self.registry = Subscriptions(store)
        self._url = url
        self._config = config
        self._daemons: dict[str, AskedDaemon | None] = {}
        self.unreachable: PenstockError | None = None

    @classmethod
    @contextmanager
    def of(cls, coordination: str | None, url: str | None, config: Path | None) -> Iterator["_Backends"]:
        """Open the store. Raises OptionInvalid if no option names it."""
        if coordination is None:
            if config is None:
                raise OptionInvalid(
                    "nothing tells where subscriptions are kept",
                    hint=f"Name the store with --coordination, or --config penstock.yaml. {_default_store()}",
                )
            coordination = load_settings(config, with_secrets=False).coordination_url()
        store = open_store(coordination)
        backends = cls(store, url, config)
        try:
            yield backends
        finally:
            for daemon in backends._daemons.values():
                if daemon is not None:
                    daemon.close()
            store.close()

    def choose(self, text: str) -> Subscription:
        """Return the subscription with this name. Raises SourceMissing, OptionInvalid."""
        subscriptions = self.registry.list()
        matching = [
            candidate
            for candidate in subscriptions
            if text in (candidate.name, f"{candidate.instance}/{candidate.name}")
        ]
        if not matching:
            names = ", ".join(_name(candidate) for candidate in subscriptions) or "none yet"
            hint = f"There are: {names}. {_default_store()}"
            raise SourceMissing(f"there is no subscription {text!r}", hint=hint)
        if len(matching) > 1:
            raise OptionInvalid(
                f"{text!r} is a subscription of several instances",
                hint=f"Write one of: {', '.join(_name(candidate) for candidate in matching)}",
            )
        return matching[0]

    def daemon(self, instance: str) -> AskedDaemon | None:
        """Return the daemon of an instance, None if it does not answer; `unreachable` is then the reason."""
        if self.unreachable is not None:
            return None
        if instance not in self._daemons:
            self._daemons[instance] = AskedDaemon.find(instance, self._url, self._config)
        return self._daemons[instance]

    def shards(self, subscription: Subscription) -> list[_ShownShard]:
        """Return every shard with its lag, as far as the lag is known."""
        return [
            _ShownShard(view, self._lag(subscription, view.state.checkpoint))
            for view in self.registry.shards(subscription)
        ]

    def _lag(self, subscription: Subscription, checkpoint: Checkpoint | None) -> Lag:
        try:
            return shown_lag(self.daemon(subscription.instance), checkpoint)
        except ConnectionLost as problem:
            self.unreachable = problem
            return shown_lag(None, checkpoint)


def _default_store() -> str:
    """Return where subscriptions without a configured store are kept; a daemon's settings do not name it."""
    return f"A Subscriber without `coordination` keeps them in --coordination {default_coordination()}"


# --- Showing --------------------------------------------------------------------------------


def show_all(
    instance: Annotated[str | None, typer.Option(help="List only this instance's subscriptions.")] = None,
    coordination: Coordination = None,
    config: Config = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List subscriptions with their shards, owners and largest lag."""
    with _Backends.of(coordination, url, config) as backends:
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
            typer.echo(f"there are no subscriptions here. {_default_store()}", err=True)
        _report_unreachable(backends)


def show(
    subscription: Chosen,
    coordination: Coordination = None,
    config: Config = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show lag, owner, checkpoint and fencing token of each shard."""
    with _Backends.of(coordination, url, config) as backends:
        chosen = backends.choose(subscription)
        shards = backends.shards(chosen)
        if json:
            write_json(sys.stdout, [_shard_line(chosen, shard) for shard in shards])
            return
        resizing = "" if chosen.resizing is None else f", becoming {chosen.resizing.shard_count}"
        for label, value in (
            ("subscription", _name(chosen)),
            ("tables", ", ".join(chosen.tables) or "all"),
            ("exclude", ", ".join(chosen.exclude)),
            ("shards", f"{chosen.shard_count}{resizing}"),
            ("shard columns", "; ".join(f"{at}: {', '.join(of)}" for at, of in chosen.shard_columns.items())),
            ("generation", chosen.generation),
            ("members", ", ".join(backends.registry.members(chosen)) or "none"),
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
        _report_unreachable(backends)


def _list_line(subscription: Subscription, backends: _Backends) -> dict[str, Any]:
    shards = backends.shards(subscription)
    lags = [shard.lag for shard in shards if shard.view.state.checkpoint is not None]
    waiting = len(shards) - len(lags)
    unknown = next((lag.why for lag in lags if lag.why is not None), None)
    known_lags = [lag for lag in lags if lag.why is None]
    remarks = [f"{waiting} not begun" if waiting else "", unknown or ""]
    if subscription.resizing is not None:
        remarks.append(f"becoming {subscription.resizing.shard_count} shards")
    return {
        "instance": subscription.instance,
        "name": subscription.name,
        "tables": list(subscription.tables),
        "shards": subscription.shard_count,
        "generation": subscription.generation,
        "owned": sum(shard.owner is not None for shard in shards),
        "members": list(backends.registry.members(subscription)),
        # The lag of the slowest shard, None if the lag of a shard is unknown.
        "lag_bytes": None if unknown else max((lag.bytes or 0 for lag in known_lags), default=None),
        "lag_seconds": _worst([lag.seconds for lag in lags]),
        "remark": "; ".join(remark for remark in remarks if remark),
    }


def _worst(seconds: Sequence[float | None]) -> float | None:
    known_seconds = [value for value in seconds if value is not None]
    return max(known_seconds) if known_seconds and len(known_seconds) == len(seconds) else None


def _shard_line(subscription: Subscription, shown: _ShownShard) -> dict[str, Any]:
    state, holder = shown.view.state, shown.view.holder
    return {
        "instance": subscription.instance,
        "name": subscription.name,
        "generation": subscription.generation,
        "shard": shown.view.shard,
        "owner": shown.owner,
        "owned_since": moment(holder.since_us) if holder else None,
        "token": state.token or None,
        "checkpoint": asdict(state.checkpoint) if state.checkpoint else None,
        **line_of(shown.lag),
    }


# --- Changing -------------------------------------------------------------------------------


def reset(
    subscription: Chosen,
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
    config: Config = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Move a subscription's checkpoint, earlier or later, in all shards or in one.

    The daemon verifies the new checkpoint. If no daemon answers, only --position works, without verification.
    """
    target = _parse_target(at, gtid_set, position, earliest=earliest, latest=latest)
    with _Backends.of(coordination, url, config) as backends:
        chosen = backends.choose(subscription)
        shards = [
            shown_shard for shown_shard in backends.shards(chosen) if shard in (None, shown_shard.view.shard)
        ]
        if not shards:
            raise OptionInvalid(
                f"{_name(chosen)} has no shard {shard}", hint=f"It has 0 to {chosen.shard_count - 1}"
            )
        checkpoint, note = _verify_checkpoint(
            backends, chosen, target, [shown_shard.view for shown_shard in shards]
        )
        owners = _refuse_owned(chosen, shards, "reset", force=force)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "shards": [shown_shard.view.shard for shown_shard in shards],
            "old": {shown_shard.view.shard: _position_of(shown_shard.view) for shown_shard in shards},
            "new": asdict(checkpoint),
            "owners": owners,
            "note": note,
            "dry_run": dry_run,
        }
        if not json:
            for shown_shard in shards:
                typer.echo(
                    f"shard {shown_shard.view.shard}: {_position_of(shown_shard.view) or '-'}"
                    f" to {checkpoint.position}"
                )
            if note:
                typer.echo(f"note: {note}")
            for owner in owners:
                typer.echo(f"owner: {owner} stops what it is at and begins again there")
        if not dry_run:
            _confirm(yes, f"Let {_name(chosen)} go on at {checkpoint.position}?")
            backends.registry.reset(chosen.instance, chosen.name, checkpoint, shard)
        _print_outcome(json, line, dry_run, "reset")


def move(
    subscription: Chosen,
    shard: Annotated[int, typer.Argument(help="The shard, from 0.")],
    member: Annotated[str, typer.Argument(help="The member that gets the shard, as shown by `show`.")],
    coordination: Coordination = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Assign a shard to a member. It stays there while that member runs."""
    with _Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        backends.registry.move(chosen.instance, chosen.name, shard, member)
        line = {"instance": chosen.instance, "name": chosen.name, "shard": shard, "member": member}
        _print_outcome(json, line, False, f"shard {shard} goes to {member}")


def resize(
    subscription: Chosen,
    shards: Annotated[int, typer.Argument(help="The new number of shards.")],
    dry_run: DryRun = False,
    yes: Yes = False,
    coordination: Coordination = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Change the number of shards, even while consumers are active, without loss or duplicates.

    Subscribers that set `shards` need the new number when they restart.
    """
    with _Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "old": chosen.shard_count,
            "new": shards,
            "dry_run": dry_run,
        }
        if not json:
            typer.echo(f"{_name(chosen)} has {chosen.shard_count} shards and would have {shards}")
        if not dry_run:
            _confirm(yes, f"Change {_name(chosen)} from {chosen.shard_count} to {shards} shards?")
            started_at = time.monotonic()
            changed = backends.registry.resize(chosen.instance, chosen.name, shards)
            line["generation"] = changed.generation
            line["seconds"] = round(time.monotonic() - started_at, 3)
        _print_outcome(json, line, dry_run, "resized")


def delete(
    subscription: Chosen,
    force: Annotated[bool, typer.Option("--force", help="Also delete while consumers are active.")] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    coordination: Coordination = None,
    config: Config = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Delete a subscription with its checkpoints, and release the log that it held."""
    with _Backends.of(coordination, url, config) as backends:
        chosen = backends.choose(subscription)
        shards = [_ShownShard(view, Lag()) for view in backends.registry.shards(chosen)]
        owners = _refuse_owned(chosen, shards, "delete", force=force)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "old": {shown_shard.view.shard: _position_of(shown_shard.view) for shown_shard in shards},
            "owners": owners,
            "dry_run": dry_run,
        }
        if not json:
            for shown_shard in shards:
                typer.echo(
                    f"shard {shown_shard.view.shard}: {_position_of(shown_shard.view) or '-'} is forgotten"
                )
        if not dry_run:
            _confirm(yes, f"Forget {_name(chosen)} and its checkpoints?")
            backends.registry.delete(chosen.instance, chosen.name)
            line["released"] = _release(backends, chosen)
        _print_outcome(json, line, dry_run, "deleted")


def _release(backends: _Backends, chosen: Subscription) -> bool | None:
    """Ask the daemon to release the log held for a subscription; None if the daemon could not be asked."""
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
) -> Bound | str:
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
    backends: _Backends, chosen: Subscription, target: Bound | str, shards: Sequence[ShardView]
) -> tuple[Checkpoint, str | None]:
    """Return the requested checkpoint and a warning for the user."""
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
    chosen: Subscription, shards: Sequence[_ShownShard], verb: str, *, force: bool
) -> list[str]:
    """Return the owners of the shards. Raises OptionInvalid if there are any, unless forced."""
    owners = sorted({shard.owner for shard in shards if shard.owner is not None})
    if owners and not force:
        raise OptionInvalid(
            f"{_name(chosen)} is consumed by {', '.join(owners)}",
            hint=f"Stop them, or add --force: penstock subscriptions {verb} {chosen.name} --force",
        )
    return owners


def _confirm(yes: bool, question: str) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise OptionInvalid(
            "confirmation is required, but there is no terminal to ask",
            hint="Check with --dry-run first, then add --yes",
        )
    typer.confirm(question, abort=True)


def _print_outcome(as_json: bool, line: dict[str, Any], dry_run: bool, message: str) -> None:
    if as_json:
        write_json(sys.stdout, [line])
    else:
        typer.echo("nothing was changed" if dry_run else message)


# --- Words ----------------------------------------------------------------------------------


def _name(subscription: Subscription) -> str:
    return f"{subscription.instance}/{subscription.name}"


def _position_of(view: ShardView) -> str | None:
    return view.state.checkpoint.position if view.state.checkpoint else None


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _time(time_us: int) -> str:
    at = moment(time_us)
    return "-" if at is None else time_text(at.replace(microsecond=0))


def _report_unreachable(backends: _Backends) -> None:
    if backends.unreachable is not None:
        typer.echo(f"lag is not known: {backends.unreachable}", err=True)


VERBS = {
    "list": show_all,
    "show": show,
    "reset": reset,
    "move": move,
    "resize": resize,
    "delete": delete,
}
