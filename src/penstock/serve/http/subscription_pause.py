# SPDX-License-Identifier: Apache-2.0
"""Pauses and resumes a subscription over HTTP, for its administrators.

    POST /v1/instances/{instance}/subscriptions/{subscription}/pause
    POST /v1/instances/{instance}/subscriptions/{subscription}/resume

Both may be repeated. A pause takes effect when the members have finished their current batches; `owners` in
the response are the members that still hold a shard.
"""

import functools
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.coordinate.subscription_record import Subscriptions
from penstock.serve.access import Account, account_of
from penstock.serve.coordination import CoordinationProbe, find_subscription, needed_store
from penstock.serve.http.audit import record_action
from penstock.serve.served import Served
from penstock.serve.threads import run_in


def routes(served: Served, coordination: CoordinationProbe | None) -> list[Route]:
    """Return the routes of pauses."""
    # A name may contain a slash.
    path = "/v1/instances/{instance}/subscriptions/{subscription:path}"
    return [
        Route(
            f"{path}/{verb}",
            functools.partial(_pause, served, coordination, paused),
            methods=["POST"],
            name=f"_{verb}_subscription",
        )
        for verb, paused in (("pause", True), ("resume", False))
    ]


async def _pause(
    served: Served, coordination: CoordinationProbe | None, paused: bool, request: Request
) -> Response:
    instance, name = (request.path_params[field] for field in ("instance", "subscription"))
    account = account_of(request)
    account.prove_administers(instance, name)
    served.instance(instance)
    store = needed_store(coordination)
    change = functools.partial(_set_paused, instance, name, paused, account)
    return JSONResponse(await run_in(served.threads.searching, store.change, change))


def _set_paused(
    instance: str, name: str, paused: bool, account: Account, registry: Subscriptions
) -> dict[str, Any]:
    """Pause or resume a subscription, and record the action. Raises SourceMissing, OptionInvalid."""
    before = find_subscription(registry, instance, name)
    changed = registry.pause(instance, name, paused=paused)
    if before.paused != paused:
        action = "pause subscription" if paused else "resume subscription"
        record_action(account, action, instance=instance, subscription=name)
    owners = sorted({view.holder.name for view in registry.shards(changed) if view.holder is not None})
    return {"instance": instance, "subscription": name, "paused": changed.paused, "owners": owners}
