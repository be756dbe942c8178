# SPDX-License-Identifier: Apache-2.0
"""Subscriptions over HTTP: `GET /v1/subscriptions`, each with its members and shards.

An account sees the subscriptions that it may read. Without a coordination store in the settings, the daemon
knows no subscriptions and reports `coordination: false`.
"""

import functools
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.coordinate.checkpoint import Checkpoint
from penstock.errors import PenstockError
from penstock.logstore.followed_log import ServedLog
from penstock.model import Position
from penstock.serve.access import account_of
from penstock.serve.coordination import CoordinationProbe, SubscriptionView
from penstock.serve.served import Served
from penstock.source.kept import epoch_shift


def routes(served: Served, coordination: CoordinationProbe | None) -> list[Route]:
    """Return the route of subscriptions."""
    answer = functools.partial(_subscriptions, served, coordination)
    return [Route("/v1/subscriptions", answer, methods=["GET"], name="_subscriptions")]


async def _subscriptions(
    served: Served, coordination: CoordinationProbe | None, request: Request
) -> Response:
    if coordination is None:
        return JSONResponse({"coordination": False, "subscriptions": []})
    account = account_of(request)
    views = await served.threads.search(coordination.subscriptions)
    visible = [view for view in views if account.may_read(view.subscription.instance, view.subscription.name)]
    shown = await served.threads.search(_shown, served, visible)
    return JSONResponse({"coordination": True, "subscriptions": shown})


def _shown(served: Served, views: list[SubscriptionView]) -> list[dict[str, Any]]:
    return [
        {
            "instance": view.subscription.instance,
            "subscription": view.subscription.name,
            "tables": list(view.subscription.selected_tables[0]),
            "paused": view.subscription.paused,
            "members": list(view.members),
            "shards": _shards(served, view),
        }
        for view in views
    ]


def _shards(served: Served, view: SubscriptionView) -> list[dict[str, Any]]:
    checkpoints = {shard.shard: shard.state.checkpoint for shard in view.shards}
    try:
        behind = _bytes_behind(served.instance(view.subscription.instance).log(), checkpoints)
    except PenstockError:
        # The log is not open, and the status of the instance says why.
        behind = {}
    return [
        {
            "shard": shard.shard,
            "owner": None if shard.holder is None else shard.holder.name,
            "owned_since_us": None if shard.holder is None else shard.holder.since_us,
            "checkpoint": None if checkpoint is None else checkpoint.position,
            "time_us": None if checkpoint is None else checkpoint.time_us,
            "behind_bytes": behind.get(shard.shard),
        }
        for shard in view.shards
        for checkpoint in (checkpoints[shard.shard],)
    ]


def _bytes_behind(log: ServedLog, checkpoints: Mapping[int, Checkpoint | None]) -> dict[int, int]:
    """Return the bytes of the log after each checkpoint, leaving out the checkpoints that belong to another
    log.
    """
    epochs = [(epoch.epoch, epoch.server_key) for epoch in log.epochs.epochs]
    positions: dict[int, Position] = {}
    for shard, checkpoint in checkpoints.items():
        if checkpoint is None:
            continue
        position = Position.parse(checkpoint.position)
        if checkpoint.server_key:
            try:
                shift = epoch_shift([(position.epoch, checkpoint.server_key)], epochs, "this log")
            except PenstockError:
                continue
            position = position.shifted(-shift)
        positions[shard] = position
    return dict(zip(positions, log.bytes_behind_all(list(positions.values())), strict=True))
