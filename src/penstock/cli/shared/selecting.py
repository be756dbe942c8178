# SPDX-License-Identifier: Apache-2.0
"""Changes what a running subscription delivers: `penstock subscriptions set`, `pause` and `resume`."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.options import Coordination, Json, StoreConfig, SubscriptionName, parse_pairs
from penstock.cli.shared.rendering import write_json
from penstock.errors import OptionInvalid
from penstock.model import TablePatterns

if TYPE_CHECKING:
    from penstock.cli.shared.chosen_subscription import Backends
    from penstock.coordinate.subscription_record import (
        Selection,
        ShardColumns,
        ShardView,
        Subscription,
    )

EXIT_FINDINGS = 1

# How long to wait for members, which finish their current batches within their grace period.
_MEMBERS_SECONDS_MAX = 60.0
_POLL_SECONDS = 0.05


def select(
    subscription: SubscriptionName,
    tables: Annotated[
        str | None, typer.Option(help="The tables, as patterns separated by commas: shop.orders,shop.item*.")
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(help="Tables to leave out of --tables, separated by commas.")
    ] = None,
    changes: Annotated[
        str | None, typer.Option(help="Some of insert, update, delete, separated by commas.")
    ] = None,
    where: Annotated[str | None, typer.Option(help="An SQL predicate over a row's columns.")] = None,
    columns: Annotated[str | None, typer.Option(help="The columns, separated by commas.")] = None,
    shard_columns: Annotated[
        list[str] | None,
        typer.Option(help="The columns that determine a row's shard, TABLE=column,column. May be repeated."),
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="A label, name=value; changes nothing else. May be repeated.")
    ] = None,
    as_members_ask: Annotated[
        bool, typer.Option("--as-members-ask", help="Drop what was set before: deliver what members ask for.")
    ] = False,
    coordination: Coordination = None,
    config: StoreConfig = None,
    json: Json = False,
) -> None:
    """Change what a subscription delivers, without restarting its members.

    Omitted options change nothing. Each shard delivers the new selection from the printed position on, and
    the old selection before it. Exits with 1 if a member does not follow within a minute. With other shard
    columns, all shards begin again at the lowest checkpoint, which is printed too.
    """
    from penstock.cli.shared.chosen_subscription import Backends
    from penstock.coordinate.subscription_record import AS_MEMBERS_ASK

    wanted = _parse_selection(tables, exclude, changes, where, columns)
    labels = parse_pairs("--label", label)
    keyed = _parse_shard_columns(shard_columns)
    is_named = wanted != AS_MEMBERS_ASK or bool(keyed)
    if is_named == as_members_ask and (as_members_ask or not labels):
        raise OptionInvalid(
            "name what to deliver, or --as-members-ask", hint="For example: --where \"status = 'paid'\""
        )
    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        if labels:
            chosen = backends.registry.label(chosen.instance, chosen.name, labels)
            if not (is_named or as_members_ask or json):
                pairs = (f"{name}={value}" for name, value in sorted(chosen.labels.items()))
                typer.echo(f"labels: {' '.join(pairs)}")
                return
        keyed_at = None
        if keyed or (as_members_ask and chosen.asked_shard_columns is not None):

            def keying(current: "Subscription") -> "ShardColumns":
                return current.members_shard_columns if as_members_ask else {**current.shard_columns, **keyed}

            keyed_at = backends.registry.rekey(chosen.instance, chosen.name, keying).keyed_at

        def selecting(current: "Selection") -> "Selection":
            return AS_MEMBERS_ASK if as_members_ask else replace(current, **_named(wanted))

        changed = backends.registry.select(chosen.instance, chosen.name, selecting)
        views = _wait_for_shards(
            backends, changed, lambda view: view.holder is None or view.state.revision == changed.revision
        )
        is_selecting = as_members_ask or wanted != AS_MEMBERS_ASK
        _print_shards(
            chosen, views, changed.revision if is_selecting else None, as_json=json, keyed_at=keyed_at
        )


def pause(
    subscription: SubscriptionName,
    coordination: Coordination = None,
    config: StoreConfig = None,
    json: Json = False,
) -> None:
    """Stop delivering to a subscription. Its members keep running, and its checkpoints stay.

    Returns once no member works on a shard. The log is kept for log.retention.hold_age.
    """
    from penstock.cli.shared.chosen_subscription import Backends

    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        paused = backends.registry.pause(chosen.instance, chosen.name, paused=True)
        views = _wait_for_shards(backends, paused, lambda view: view.holder is None)
        _print_shards(chosen, views, None, as_json=json)


def resume(
    subscription: SubscriptionName,
    coordination: Coordination = None,
    config: StoreConfig = None,
    json: Json = False,
) -> None:
    """Resume a paused subscription at its checkpoints."""
    from penstock.cli.shared.chosen_subscription import Backends, print_outcome

    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        backends.registry.pause(chosen.instance, chosen.name, paused=False)
        line = {"instance": chosen.instance, "name": chosen.name}
        print_outcome(json, line, False, "delivery continues at the checkpoints")


def _parse_selection(
    tables: str | None, exclude: str | None, changes: str | None, where: str | None, columns: str | None
) -> "Selection":
    """Return the named fields of a selection. Raises OptionInvalid."""
    from penstock.coordinate.subscription_record import Selection
    from penstock.predicate import Predicate
    from penstock.source.asked_changes import change_types, sent_columns

    if exclude is not None and tables is None:
        raise OptionInvalid(
            "--exclude limits --tables", hint="Name both: --tables 'shop.*' --exclude shop.log"
        )
    patterns = TablePatterns(_listed("--tables", tables), _listed("--exclude", exclude))
    if where is not None:
        Predicate.compile(where)
    return Selection(
        None if tables is None else patterns.include,
        None if tables is None else patterns.exclude,
        change_types(_listed("--changes", changes)),
        where,
        sent_columns(_listed("--columns", columns)),
    )


def _parse_shard_columns(texts: list[str] | None) -> "ShardColumns":
    """Return the columns of each table pattern. Raises OptionInvalid."""
    from penstock.settings.values import columns_by_table

    pairs = parse_pairs("--shard-columns", texts)
    columns = {
        table: tuple(name.strip() for name in names.split(",") if name.strip())
        for table, names in pairs.items()
    }
    try:
        return columns_by_table(columns)
    except ValueError as problem:
        raise OptionInvalid(
            f"--shard-columns: {problem}", hint="Write --shard-columns shop.orders=customer"
        ) from problem


def _listed(option: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        # Refuse an empty value: it is often an unset shell variable.
        raise OptionInvalid(
            f"{option} names nothing", hint="Leave it out, or drop all that was set: --as-members-ask"
        )
    return parts


def _named(selection: "Selection") -> dict[str, Any]:
    return {name: value for name, value in vars(selection).items() if value is not None}


def _wait_for_shards(
    backends: "Backends", subscription: "Subscription", settled: "Callable[[ShardView], bool]"
) -> "Sequence[tuple[ShardView, bool]]":
    """Wait for up to a minute until every shard has settled; return whether all have."""
    deadline = time.monotonic() + _MEMBERS_SECONDS_MAX
    while True:
        views = [(view, settled(view)) for view in backends.registry.shards(subscription)]
        if all(is_settled for _, is_settled in views) or time.monotonic() > deadline:
            return views
        time.sleep(_POLL_SECONDS)


def _print_shards(
    chosen: "Subscription",
    views: "Sequence[tuple[ShardView, bool]]",
    revision: int | None,
    *,
    as_json: bool,
    keyed_at: str | None = None,
) -> None:
    """Print where each shard continues. Exits with 1 if a shard has not settled yet."""
    from penstock.cli.shared.chosen_subscription import position_of

    lines = []
    for view, is_settled in views:
        position = position_of(view)
        if revision is not None and view.state.revision == revision:
            position = view.state.revised_at
        holder = None if view.holder is None else view.holder.name
        lines.append({"shard": view.shard, "position": position, "owner": holder, "done": is_settled})
    if as_json:
        keyed = {} if keyed_at is None else {"shard_columns_from": keyed_at}
        write_json(sys.stdout, [{"instance": chosen.instance, "name": chosen.name, "shards": lines, **keyed}])
    else:
        if keyed_at is not None:
            typer.echo(f"shard columns: from {keyed_at} on")
        for line in lines:
            late = "" if line["done"] else f"; {line['owner']} does not follow: is it of this version?"
            typer.echo(f"shard {line['shard']}: from {line['position'] or 'its start'} on{late}")
    if not all(is_settled for _, is_settled in views):
        raise typer.Exit(EXIT_FINDINGS)
