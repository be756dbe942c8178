# SPDX-License-Identifier: Apache-2.0
"""Changing what a running subscription delivers: `penstock subscriptions set`, `pause` and `resume`."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.options import Coordination, Json, StoreConfig, SubscriptionName
from penstock.cli.shared.rendering import write_json
from penstock.errors import OptionInvalid
from penstock.model import TablePatterns

if TYPE_CHECKING:
    from penstock.cli.shared.chosen_subscription import Backends
    from penstock.coordinate.subscription_record import Selection, ShardView, Subscription

EXIT_FINDINGS = 1

# Members finish what they are at within their grace period.
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
    as_members_ask: Annotated[
        bool, typer.Option("--as-members-ask", help="Drop what was set before: deliver what members ask for.")
    ] = False,
    coordination: Coordination = None,
    config: StoreConfig = None,
    json: Json = False,
) -> None:
    """Change what a subscription delivers, without restarting its members.

    What is not named stays as it is. Each shard delivers the new selection from the printed position on, and
    the old selection before it. Exits with 1 if a member does not follow within a minute.
    """
    from penstock.cli.shared.chosen_subscription import Backends
    from penstock.coordinate.subscription_record import AS_MEMBERS_ASK

    wanted = _parse_selection(tables, exclude, changes, where, columns)
    if as_members_ask == (wanted != AS_MEMBERS_ASK):
        raise OptionInvalid(
            "name what to deliver, or --as-members-ask", hint="For example: --where \"status = 'paid'\""
        )
    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)

        def selecting(current: "Selection") -> "Selection":
            return AS_MEMBERS_ASK if as_members_ask else replace(current, **_named(wanted))

        changed = backends.registry.select(chosen.instance, chosen.name, selecting)
        views = _wait_for_shards(
            backends, changed, lambda view: view.holder is None or view.state.revision == changed.revision
        )
        _print_shards(chosen, views, changed.revision, as_json=json)


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
    """Let a paused subscription go on at its checkpoints."""
    from penstock.cli.shared.chosen_subscription import Backends, print_outcome

    with Backends.of(coordination, None, config) as backends:
        chosen = backends.choose(subscription)
        backends.registry.pause(chosen.instance, chosen.name, paused=False)
        line = {"instance": chosen.instance, "name": chosen.name}
        print_outcome(json, line, False, "it goes on")


def _parse_selection(
    tables: str | None, exclude: str | None, changes: str | None, where: str | None, columns: str | None
) -> "Selection":
    """Return the named fields of a selection. Raises OptionInvalid."""
    from penstock.client.options import change_types, sent_columns
    from penstock.coordinate.subscription_record import Selection
    from penstock.predicate import Predicate

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


def _listed(option: str, text: str | None) -> list[str] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        # Often an unset variable of a shell.
        raise OptionInvalid(
            f"{option} names nothing", hint="Leave it out, or drop all that was set: --as-members-ask"
        )
    return parts


def _named(selection: "Selection") -> dict[str, Any]:
    return {name: value for name, value in vars(selection).items() if value is not None}


def _wait_for_shards(
    backends: "Backends", subscription: "Subscription", settled: "Callable[[ShardView], bool]"
) -> "Sequence[tuple[ShardView, bool]]":
    """Wait until every shard has settled, for a minute; return whether each has."""
    deadline = time.monotonic() + _MEMBERS_SECONDS_MAX
    while True:
        views = [(view, settled(view)) for view in backends.registry.shards(subscription)]
        if all(is_settled for _, is_settled in views) or time.monotonic() > deadline:
            return views
        time.sleep(_POLL_SECONDS)


def _print_shards(
    chosen: "Subscription", views: "Sequence[tuple[ShardView, bool]]", revision: int | None, *, as_json: bool
) -> None:
    """Print from where each shard goes on. Exits with 1 if a member did not follow."""
    from penstock.cli.shared.chosen_subscription import position_of

    lines = []
    for view, is_settled in views:
        position = position_of(view)
        if revision is not None and view.state.revision == revision:
            position = view.state.revised_at
        holder = None if view.holder is None else view.holder.name
        lines.append({"shard": view.shard, "position": position, "owner": holder, "done": is_settled})
    if as_json:
        write_json(sys.stdout, [{"instance": chosen.instance, "name": chosen.name, "shards": lines}])
    else:
        for line in lines:
            late = "" if line["done"] else f"; {line['owner']} does not follow: is it of this version?"
            typer.echo(f"shard {line['shard']}: from {line['position'] or 'its start'} on{late}")
    if not all(is_settled for _, is_settled in views):
        raise typer.Exit(EXIT_FINDINGS)
