# SPDX-License-Identifier: Apache-2.0
"""The page that resets a subscription: where it would continue, and which members would restart shards."""

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from penstock.console.visit import Visit
from penstock.errors import PenstockError

# Where a subscription may continue: the kinds that need a value, and those that need none.
_WITH_VALUE = ("time", "position", "gtid_set")
_EDGES = ("earliest", "latest")


def reset_checkpoints(visit: Visit) -> Response:
    """What happens if this subscription continues elsewhere?"""
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
            # The form stays, so that the place can be corrected.
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


PAGES: dict[str, Callable[[Visit], Response]] = {"/subscriptions/reset": reset_checkpoints}
