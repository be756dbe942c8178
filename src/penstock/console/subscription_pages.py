# SPDX-License-Identifier: Apache-2.0
"""The pages of subscriptions: their shards, and the effect of a reset or a pause."""

from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response

from penstock.console.fleet import Answers
from penstock.console.visit import Visit
from penstock.errors import PenstockError

# For each shade, the lightest first: the lag in bytes from which a shard is drawn in this shade.
_SHADE_BYTES = (0, 1 << 20, 64 << 20, 1 << 30)
# Where a subscription can continue: the choices that need a value, and the choices that do not.
_WITH_VALUE = ("time", "position", "gtid_set")
_EDGES = ("earliest", "latest")


def list_subscriptions(visit: Visit) -> Response:
    """Show which member has which shard, and how far each shard is behind."""
    answers = visit.fleet.ask_all("subscriptions")
    shown = _subscriptions_of(answers)
    known = any(answer["coordination"] for answer in answers.values.values())
    return visit.render(
        "subscriptions.html",
        subscriptions=[shown[key] for key in sorted(shown)],
        problems=answers.problems,
        has_coordination=known,
    )


def _subscriptions_of(answers: Answers) -> dict[tuple[str, str], dict[str, Any]]:
    """Return each subscription once, by instance and name, from one of the daemons that list it."""
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for url, answer in answers.values.items():
        for subscription in answer["subscriptions"]:
            # All daemons that share a coordination store return the same subscription, so count it once.
            key = subscription["instance"], subscription["subscription"]
            shown.setdefault(key, {"daemon": url, **subscription, "grid": _grid_of(subscription)})
    return shown


def _grid_of(subscription: Mapping[str, Any]) -> list[tuple[str | None, list[tuple[Mapping[str, Any], int]]]]:
    """Return a row for each member, with its shards and their shades. The row of None has the shards without
    an owner.
    """
    rows: dict[str | None, list[tuple[Mapping[str, Any], int]]] = {
        member: [] for member in sorted(subscription["members"])
    }
    for shard in subscription["shards"]:
        behind = shard["behind_bytes"] or 0
        shade = sum(behind > bound for bound in _SHADE_BYTES)
        rows.setdefault(shard["owner"], []).append((shard, shade))
    return list(rows.items())


def pause(visit: Visit) -> Response:
    """Show what happens if this subscription is paused or resumed."""
    visit.prove_admin()
    name, subscription = visit.query("instance"), visit.query("subscription")
    chosen = _subscriptions_of(visit.fleet.ask_all("subscriptions")).get((name, subscription))
    return visit.render("subscription_pause.html", instance=name, subscription=subscription, chosen=chosen)


def reset_checkpoints(visit: Visit) -> Response:
    """Show what happens if this subscription continues at another position."""
    visit.prove_admin()
    url, name, subscription = (visit.query(field) for field in ("daemon", "instance", "subscription"))
    kind, value, shard = visit.query("kind"), visit.query("value"), visit.query("shard")
    answer, problem = None, None
    if kind in _EDGES or (kind in _WITH_VALUE and value):
        to: Any = kind if kind in _EDGES else {kind: value}
        body = {"to": to, "shard": int(shard) if shard.isdecimal() else None, "dry_run": True}
        try:
            answer = visit.fleet.reset_subscription(url, name, subscription, body)
        except PenstockError as refusal:
            # Keep the form, so that the user can correct the position.
            problem = refusal
    return visit.render(
        "reset.html",
        daemon=url,
        instance=name,
        subscription=subscription,
        kinds=(*_WITH_VALUE, *_EDGES),
        kind=kind,
        value=value,
        shard=shard,
        answer=answer,
        problem=problem,
    )


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/subscriptions": list_subscriptions,
    "/subscriptions/reset": reset_checkpoints,
    "/subscriptions/pause": pause,
}
