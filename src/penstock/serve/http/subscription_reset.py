# SPDX-License-Identifier: Apache-2.0
"""Resets a subscription's checkpoints over HTTP: `POST
/v1/instances/{instance}/subscriptions/{subscription}/reset`.

The position is checked against the log. With `dry_run`, nothing is changed and the response says what would
happen.
"""

import functools
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.subscription_record import ShardView, Subscriptions
from penstock.errors import OptionInvalid, ServerBusy
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.serve.access import Account, account_of
from penstock.serve.coordination import CoordinationProbe, find_subscription, needed_store
from penstock.serve.http.audit import record_action
from penstock.serve.http.changes_request import StartPart, start_of
from penstock.serve.http.json_request import JsonRequest
from penstock.serve.http.query import log_of
from penstock.serve.own_log import OwnSource
from penstock.serve.served import Served
from penstock.serve.subscription import resolve_start
from penstock.source.transaction import prove_boundary


class ResetRequest(JsonRequest):
    """A request to set where a subscription continues."""

    to: StartPart | Literal["earliest", "latest"] = Field(description="Where the subscription continues")
    shard: int | None = Field(default=None, ge=0, description="One shard; default: all")
    dry_run: bool = Field(default=True, description="Report what would happen, and change nothing")
    force: bool = Field(
        default=False,
        description="Reset even if a member holds a shard: the member stops, and continues there",
    )


def routes(served: Served, coordination: CoordinationProbe | None) -> list[Route]:
    """Return the route of resets."""
    # A name may contain a slash.
    path = "/v1/instances/{instance}/subscriptions/{subscription:path}/reset"
    return [
        Route(path, functools.partial(_reset, served, coordination), methods=["POST"], name="_reset"),
    ]


async def _reset(served: Served, coordination: CoordinationProbe | None, request: Request) -> Response:
    instance, name = (request.path_params[field] for field in ("instance", "subscription"))
    account = account_of(request)
    account.prove_administers(instance, name)
    log = log_of(served, request)
    store = needed_store(coordination)
    example = '{"to": {"position": "mysql-bin.000003:1542"}, "dry_run": true}'
    wanted = await ResetRequest.read(request, example)
    started = await resolve_start(served.pieces(instance), start_of(wanted.to))
    if started.gtid_after:
        raise ServerBusy("the log does not have all transactions of the GTID set yet", hint="Wait for them")
    checkpoint = await served.threads.search(_proved, log, instance, started.position)
    change = _Reset(instance, name, wanted, checkpoint, account)
    return JSONResponse(await served.threads.search(store.change, change.run))


def _proved(log: Log, instance: str, position: Position) -> Checkpoint:
    """Return the checkpoint for a position. Raises PositionInvalid inside a transaction."""
    with closing(OwnSource(instance, log)) as source:
        prove_boundary(log, source, position)
    epoch = log.epochs.get(position.epoch)
    return Checkpoint.now(str(position), log.gtid_set(position), "" if epoch is None else epoch.server_key)


@dataclass(frozen=True)
class _Reset:
    """One request to set checkpoints. `run` applies it to the store."""

    instance: str
    name: str
    wanted: ResetRequest
    checkpoint: Checkpoint
    account: Account

    def run(self, registry: Subscriptions) -> dict[str, Any]:
        """Set the checkpoints unless this is a dry run; return the changes.

        Raises SourceMissing, OptionInvalid.
        """
        subscription = find_subscription(registry, self.instance, self.name)
        shards = [view for view in registry.shards(subscription) if self.wanted.shard in (None, view.shard)]
        if not shards:
            raise OptionInvalid(
                f"{self.name} has no shard {self.wanted.shard}",
                hint=f"It has 0 to {subscription.shard_count - 1}",
            )
        owners = sorted({view.holder.name for view in shards if view.holder is not None})
        old = {str(view.shard): _position_of(view) for view in shards}
        if not self.wanted.dry_run:
            if owners and not self.wanted.force:
                raise OptionInvalid(
                    f"{self.name} is consumed by {', '.join(owners)}",
                    hint="Stop them, or set force: they stop their shards and begin again there",
                )
            # Record the action before the reset: if the store fails between two shards, the first shard has
            # already been reset.
            self._record(old)
            registry.reset(self.instance, self.name, self.checkpoint, self.wanted.shard)
        return {
            "instance": self.instance,
            "subscription": self.name,
            "shards": [view.shard for view in shards],
            "old": old,
            "new": self.checkpoint.position,
            "owners": owners,
            "dry_run": self.wanted.dry_run,
        }

    def _record(self, old: Mapping[str, str | None]) -> None:
        record_action(
            self.account,
            "reset subscription",
            instance=self.instance,
            subscription=self.name,
            shards=[int(shard) for shard in old],
            before=old,
            after=self.checkpoint.position,
        )


def _position_of(view: ShardView) -> str | None:
    return view.state.checkpoint.position if view.state.checkpoint else None
