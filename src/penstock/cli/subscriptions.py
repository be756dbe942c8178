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
    """A shard with how far it is behind."""

    view: ShardView
    lag: Lag

    @property
    def owner(self) -> str | None:
        return self.view.holder.name if self.view.holder else None


class _Place:
    """The coordination store and the daemons that a command line means."""

    def __init__(self, store: CoordinationStore, url: str | None, config: Path | None) -> None:
        self.registry = Subscriptions(store)
        self._url = url
        self._config = config
        self._daemons: dict[str, AskedDaemon | None] = {}
        self.silent: PenstockError | None = None

    @classmethod
    @contextmanager
    def of(cls, coordination: str | None, url: str | None, config: Path | None) -> Iterator["_Place"]:
        """Give the place. Raises OptionInvalid where nothing names it."""
        if coordination is None:
            if config is None:
                raise OptionInvalid(
                    "nothing tells where subscriptions are kept",
                    hint=f"Name the store with --coordination, or --config penstock.yaml. {_default_store()}",
                )
            coordination = load_settings(config).coordination_url()
        store = open_store(coordination)
        place = cls(store, url, config)
        try:
            yield place
        finally:
            for daemon in place._daemons.values():
                if daemon is not None:
                    daemon.close()
            store.close()

    def choose(self, text: str) -> Subscription:
        """Return the subscription that a text names. Raises SourceMissing, OptionInvalid."""
        every = self.registry.list()
        found = [one for one in every if text in (one.name, f"{one.instance}/{one.name}")]
        if not found:
            known = ", ".join(_name(one) for one in every) or "none yet"
            hint = f"There are: {known}. {_default_store()}"
            raise SourceMissing(f"there is no subscription {text!r}", hint=hint)
        if len(found) > 1:
            raise OptionInvalid(
                f"{text!r} is a subscription of several instances",
                hint=f"Write one of: {', '.join(_name(one) for one in found)}",
            )
        return found[0]

    def daemon(self, instance: str) -> AskedDaemon | None:
        """Return the daemon of an instance, None where it does not answer; `silent` is then the reason."""
        if self.silent is not None:
            return None
        if instance not in self._daemons:
            self._daemons[instance] = AskedDaemon.find(instance, self._url, self._config)
        return self._daemons[instance]

    def shards(self, subscription: Subscription) -> list[_ShownShard]:
        """Return every shard with its lag, as far as that can be known."""
        return [
            _ShownShard(view, self._lag(subscription, view.state.checkpoint))
            for view in self.registry.shards(subscription)
        ]

    def _lag(self, subscription: Subscription, checkpoint: Checkpoint | None) -> Lag:
        try:
            return shown_lag(self.daemon(subscription.instance), checkpoint)
        except ConnectionLost as problem:
            self.silent = problem
            return shown_lag(None, checkpoint)


def _default_store() -> str:
    """Return where subscriptions are that name no store: a daemon's settings do not tell."""
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
    with _Place.of(coordination, url, config) as place:
        lines = [_list_line(one, place) for one in place.registry.list(instance)]
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
        _tell_silence(place)


def show(
    subscription: Chosen,
    coordination: Coordination = None,
    config: Config = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Show lag, owner, checkpoint and fencing token of each shard."""
    with _Place.of(coordination, url, config) as place:
        chosen = place.choose(subscription)
        shards = place.shards(chosen)
        if json:
            write_json(sys.stdout, [_shard_line(chosen, one) for one in shards])
            return
        resizing = "" if chosen.resizing is None else f", becoming {chosen.resizing.shard_count}"
        for label, value in (
            ("subscription", _name(chosen)),
            ("tables", ", ".join(chosen.tables) or "all"),
            ("exclude", ", ".join(chosen.exclude)),
            ("shards", f"{chosen.shard_count}{resizing}"),
            ("shard columns", "; ".join(f"{at}: {', '.join(of)}" for at, of in chosen.shard_columns.items())),
            ("generation", chosen.generation),
            ("members", ", ".join(place.registry.members(chosen)) or "none"),
            ("moved", ", ".join(f"{shard} to {to}" for shard, to in sorted(chosen.pins.items()))),
        ):
            if value != "":
                typer.echo(f"{label:<15}{value}")
        writer = LineWriter(sys.stdout, _COLUMNS)
        for one in shards:
            checkpoint = one.view.state.checkpoint
            writer.write(
                [
                    one.view.shard,
                    one.owner or "-",
                    bytes_text(one.lag.bytes),
                    _seconds(one.lag.seconds),
                    checkpoint.position if checkpoint else "-",
                    _time(checkpoint.updated_us) if checkpoint else "-",
                    one.lag.why if checkpoint else "",
                ]
            )
        _tell_silence(place)


def _list_line(subscription: Subscription, place: _Place) -> dict[str, Any]:
    shards = place.shards(subscription)
    begun = [one.lag for one in shards if one.view.state.checkpoint is not None]
    waiting = len(shards) - len(begun)
    unknown = next((lag.why for lag in begun if lag.why is not None), None)
    known = [lag for lag in begun if lag.why is None]
    remarks = [f"{waiting} not begun" if waiting else "", unknown or ""]
    if subscription.resizing is not None:
        remarks.append(f"becoming {subscription.resizing.shard_count} shards")
    return {
        "instance": subscription.instance,
        "name": subscription.name,
        "tables": list(subscription.tables),
        "shards": subscription.shard_count,
        "generation": subscription.generation,
        "owned": sum(one.owner is not None for one in shards),
        "members": list(place.registry.members(subscription)),
        # Of the slowest shard; None where one of them is not known.
        "lag_bytes": None if unknown else max((lag.bytes or 0 for lag in known), default=None),
        "lag_seconds": _worst([lag.seconds for lag in begun]),
        "remark": "; ".join(one for one in remarks if one),
    }


def _worst(seconds: Sequence[float | None]) -> float | None:
    known = [one for one in seconds if one is not None]
    return max(known) if known and len(known) == len(seconds) else None


def _shard_line(subscription: Subscription, one: _ShownShard) -> dict[str, Any]:
    state, holder = one.view.state, one.view.holder
    return {
        "instance": subscription.instance,
        "name": subscription.name,
        "generation": subscription.generation,
        "shard": one.view.shard,
        "owner": one.owner,
        "owned_since": moment(holder.since_us) if holder else None,
        "token": state.token or None,
        "checkpoint": asdict(state.checkpoint) if state.checkpoint else None,
        **line_of(one.lag),
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
    wanted = _wanted(at, gtid_set, position, earliest=earliest, latest=latest)
    with _Place.of(coordination, url, config) as place:
        chosen = place.choose(subscription)
        shards = [one for one in place.shards(chosen) if shard in (None, one.view.shard)]
        if not shards:
            raise OptionInvalid(
                f"{_name(chosen)} has no shard {shard}", hint=f"It has 0 to {chosen.shard_count - 1}"
            )
        checkpoint, note = _proved(place, chosen, wanted, [one.view for one in shards])
        owners = _refuse_owned(chosen, shards, "reset", force=force)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "shards": [one.view.shard for one in shards],
            "old": {one.view.shard: _position_of(one.view) for one in shards},
            "new": asdict(checkpoint),
            "owners": owners,
            "note": note,
            "dry_run": dry_run,
        }
        if not json:
            for one in shards:
                typer.echo(
                    f"shard {one.view.shard}: {_position_of(one.view) or '-'} to {checkpoint.position}"
                )
            if note:
                typer.echo(f"note: {note}")
            for owner in owners:
                typer.echo(f"owner: {owner} stops what it is at and begins again there")
        if not dry_run:
            _confirm(yes, f"Let {_name(chosen)} go on at {checkpoint.position}?")
            place.registry.reset(chosen.instance, chosen.name, checkpoint, shard)
        _done(json, line, dry_run, "reset")


def move(
    subscription: Chosen,
    shard: Annotated[int, typer.Argument(help="The shard, from 0.")],
    member: Annotated[str, typer.Argument(help="The member that gets the shard, as shown by `show`.")],
    coordination: Coordination = None,
    config: Config = None,
    json: Json = False,
) -> None:
    """Assign a shard to a member. It stays there while that member runs."""
    with _Place.of(coordination, None, config) as place:
        chosen = place.choose(subscription)
        place.registry.move(chosen.instance, chosen.name, shard, member)
        line = {"instance": chosen.instance, "name": chosen.name, "shard": shard, "member": member}
        _done(json, line, False, f"shard {shard} goes to {member}")


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
    with _Place.of(coordination, None, config) as place:
        chosen = place.choose(subscription)
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
            begun = time.monotonic()
            changed = place.registry.resize(chosen.instance, chosen.name, shards)
            line["generation"] = changed.generation
            line["seconds"] = round(time.monotonic() - begun, 3)
        _done(json, line, dry_run, "resized")


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
    with _Place.of(coordination, url, config) as place:
        chosen = place.choose(subscription)
        shards = [_ShownShard(view, Lag()) for view in place.registry.shards(chosen)]
        owners = _refuse_owned(chosen, shards, "delete", force=force)
        line = {
            "instance": chosen.instance,
            "name": chosen.name,
            "old": {one.view.shard: _position_of(one.view) for one in shards},
            "owners": owners,
            "dry_run": dry_run,
        }
        if not json:
            for one in shards:
                typer.echo(f"shard {one.view.shard}: {_position_of(one.view) or '-'} is forgotten")
        if not dry_run:
            _confirm(yes, f"Forget {_name(chosen)} and its checkpoints?")
            place.registry.delete(chosen.instance, chosen.name)
            line["released"] = _release(place, chosen)
        _done(json, line, dry_run, "deleted")


def _release(place: _Place, chosen: Subscription) -> bool | None:
    """Have the daemon keep nothing for a subscription any longer; None where it could not be asked."""
    try:
        daemon = place.daemon(chosen.instance)
        return None if daemon is None else daemon.release_consumer(chosen.name)
    except (AccessDenied, AuthenticationFailed, ConnectionLost) as problem:
        reader = consumer_hold_name(chosen.name)
        typer.echo(
            f"the log is kept for it until log.retention.hold_age: {problem}. To end that:"
            f" penstock holds remove {chosen.instance} {reader}",
            err=True,
        )
        return None


def _wanted(
    at: str | None, gtid_set: str | None, position: str | None, *, earliest: bool, latest: bool
) -> Bound | str:
    given: list[Bound | str] = []
    if at is not None:
        given.append(Bound(time_us=parse_time(at)))
    if gtid_set is not None:
        given.append(Bound(gtid_set=gtid_set))
    if position is not None:
        given.append(Bound(position=Position.parse(position)))
    given += [word for word, chosen in ((EARLIEST, earliest), (LATEST, latest)) if chosen]
    if len(given) != 1:
        raise OptionInvalid(
            "one place at a time", hint="Give one of --time, --gtid-set, --position, --earliest, --latest"
        )
    return given[0]


def _proved(
    place: _Place, chosen: Subscription, wanted: Bound | str, shards: Sequence[ShardView]
) -> tuple[Checkpoint, str | None]:
    """Return the checkpoint that is wanted, and what a reader must know of it."""
    daemon = place.daemon(chosen.instance)
    try:
        if daemon is not None:
            return daemon.place(wanted), None
    except ConnectionLost as problem:
        place.silent = problem
    position = wanted.position if isinstance(wanted, Bound) else None
    if position is None:
        assert place.silent is not None, "a daemon that is not asked was asked before, and is silent"
        raise place.silent
    keys = {one.state.checkpoint.server_key for one in shards if one.state.checkpoint is not None}
    key = keys.pop() if len(keys) == 1 else ""
    return Checkpoint.now(str(position), server_key=key), "no daemon answers: nobody has proved this place"


def _refuse_owned(
    chosen: Subscription, shards: Sequence[_ShownShard], verb: str, *, force: bool
) -> list[str]:
    """Return who owns one of the shards. Raises OptionInvalid where somebody does and nobody forces it."""
    owners = sorted({one.owner for one in shards if one.owner is not None})
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


def _done(as_json: bool, line: dict[str, Any], dry_run: bool, what: str) -> None:
    if as_json:
        write_json(sys.stdout, [line])
    else:
        typer.echo("nothing was changed" if dry_run else what)


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


def _tell_silence(place: _Place) -> None:
    if place.silent is not None:
        typer.echo(f"lag is not known: {place.silent}", err=True)


VERBS = {
    "list": show_all,
    "show": show,
    "reset": reset,
    "move": move,
    "resize": resize,
    "delete": delete,
}
