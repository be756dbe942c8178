# SPDX-License-Identifier: Apache-2.0
"""Moves, resizes, changes and deletes subscriptions over HTTP, for their administrators.

    POST /v1/instances/{instance}/subscriptions/{subscription}/move     {"shard": 0, "member": "h1:42"}
    POST /v1/instances/{instance}/subscriptions/{subscription}/resize   {"shards": 4}
    POST /v1/instances/{instance}/subscriptions/{subscription}/set      {"where": "status = 'paid'"}
    POST /v1/instances/{instance}/subscriptions/{subscription}/delete   {}

With `dry_run`, the default, nothing is changed and the response says what would happen.
"""

import functools
import json
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.coordinate.refusals import refuse_move
from penstock.coordinate.subscription_record import (
    AS_MEMBERS_ASK,
    Selection,
    ShardColumns,
    Subscription,
    Subscriptions,
)
from penstock.errors import CapturedElsewhere, OptionInvalid, PenstockError, SourceMissing
from penstock.limits import REQUEST_PATTERNS_MAX, SUBSCRIPTION_SHARDS_MAX
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.holds import consumer_hold_name
from penstock.model import TablePatterns
from penstock.predicate import Predicate
from penstock.serve.access import Account, account_of
from penstock.serve.coordination import CoordinationProbe, find_subscription, needed_store
from penstock.serve.http.audit import record_action
from penstock.serve.http.changes_request import ChangesRequest
from penstock.serve.http.holds import give_up_hold
from penstock.serve.http.json_request import ChangeRequest
from penstock.serve.http.query import log_of
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.settings.values import columns_by_table
from penstock.source.asked_changes import change_types, sent_columns

# The effect of a change, actual or in a dry run, as fields of the response.
Outcome = dict[str, Any]


class MoveRequest(ChangeRequest):
    """A request to move a shard to a member, which keeps the shard as long as it runs."""

    example: ClassVar[str] = '{"shard": 0, "member": "h1:42", "dry_run": true}'
    shard: int = Field(ge=0, description="The shard, counted from 0")
    member: str = Field(description="A member, as in GET /v1/subscriptions")

    def run(self, registry: Subscriptions, before: Subscription) -> Outcome:
        """Move the shard."""
        refuse_move(before, self.shard, self.member, registry.members(before))
        owner = registry.shards(before)[self.shard].holder
        if not self.dry_run:
            registry.move(before.instance, before.name, self.shard, self.member)
        return {
            "shard": self.shard,
            "owner": None if owner is None else owner.name,
            "member": self.member,
        }


class ResizeRequest(ChangeRequest):
    """A request to change the number of shards. The response is sent once the new shards exist, after at most
    15 seconds.
    """

    example: ClassVar[str] = '{"shards": 4, "dry_run": true}'
    shards: int = Field(ge=1, le=SUBSCRIPTION_SHARDS_MAX, description="The new number of shards")

    def run(self, registry: Subscriptions, before: Subscription) -> Outcome:
        """Replace the shards."""
        registry.refuse_resize(before, self.shards)
        outcome = {
            "old": before.shard_count,
            "new": self.shards,
            "owners": _owners(registry, before),
        }
        if not self.dry_run:
            registry.resize(before.instance, before.name, self.shards)
        return outcome


class SetRequest(ChangeRequest):
    """A request to change what a subscription delivers, or its labels. Omitted fields stay unchanged."""

    example: ClassVar[str] = '{"where": "status = \'paid\'", "dry_run": true}'
    tables: list[str] | None = Field(None, min_length=1, description="Patterns: shop.orders, shop.*")
    exclude: list[str] | None = Field(None, description="Patterns of tables to leave out of `tables`")
    changes: list[str] | None = Field(None, min_length=1, description="Some of insert, update, delete")
    where: str | None = Field(None, description="An SQL predicate over a row's columns")
    columns: list[str] | None = Field(None, min_length=1, description="The columns to deliver")
    shard_columns: dict[str, tuple[str, ...]] = Field(
        default_factory=dict,
        max_length=REQUEST_PATTERNS_MAX,
        description="Table pattern to the columns that determine a row's shard",
    )
    labels: dict[str, str] = Field(
        default_factory=dict, max_length=REQUEST_PATTERNS_MAX, description="Labels to add or change"
    )
    as_members_ask: bool = Field(
        default=False, description="Drop what was set before, in place of the others"
    )

    def run(self, registry: Subscriptions, before: Subscription) -> Outcome:
        """Change the shard columns, and then the selection."""
        named = self._selection()
        is_named = named != AS_MEMBERS_ASK or bool(self.shard_columns)
        if is_named == self.as_members_ask and (self.as_members_ask or not self.labels):
            raise OptionInvalid(
                "name what to deliver, or as_members_ask", hint=f"For example: {self.example}"
            )
        selection, columns = self._selected(named, before.selection), self._keyed(before)
        # Members will send the selection in their own requests, so it has to be valid in a request.
        ChangesRequest.parse(json.dumps(selection.fields()).encode())
        outcome: Outcome = {
            "old": before.selection.fields(),
            "new": selection.fields(),
            "old_shard_columns": _listed(before.shard_columns),
            "new_shard_columns": _listed(columns),
            "labels": {**before.labels, **self.labels},
            "owners": _owners(registry, before),
        }
        if not self.dry_run:
            if self.labels:
                registry.label(before.instance, before.name, self.labels)
            if columns != before.shard_columns:
                registry.rekey(before.instance, before.name, self._keyed)
            registry.select(before.instance, before.name, functools.partial(self._selected, named))
        return outcome

    def prove_sees_columns(self, account: Account) -> None:
        """Raise AccessDenied if rows are selected by a masked column, because the outcome reveals the
        column's value.
        """
        if self.where is not None:
            account.prove_sees_columns(Predicate.compile(self.where).columns, TablePatterns(), "where")
        for pattern, names in self.shard_columns.items():
            account.prove_sees_columns(names, TablePatterns([pattern]), "shard_columns")

    def _selection(self) -> Selection:
        """Return the named fields of a selection. Raises OptionInvalid."""
        if self.exclude is not None and self.tables is None:
            raise OptionInvalid("exclude limits tables", hint="Name both")
        patterns = TablePatterns(self.tables, self.exclude)
        if self.where is not None:
            Predicate.compile(self.where)
        return Selection(
            None if self.tables is None else patterns.include,
            None if self.tables is None else patterns.exclude,
            change_types(self.changes),
            self.where,
            sent_columns(self.columns),
        )

    def _selected(self, named: Selection, current: Selection) -> Selection:
        return AS_MEMBERS_ASK if self.as_members_ask else replace(current, **_set_of(named))

    def _keyed(self, current: Subscription) -> ShardColumns:
        if self.as_members_ask:
            return current.members_shard_columns
        try:
            return {**current.shard_columns, **columns_by_table(self.shard_columns)}
        except ValueError as problem:
            raise OptionInvalid(f"shard_columns: {problem}", hint="Name a table and its columns") from problem


class DeleteRequest(ChangeRequest):
    """A request to delete a subscription. With `force`, it is deleted even if members hold its shards."""

    example: ClassVar[str] = '{"dry_run": true}'
    force: bool = Field(default=False, description="Delete it even if members hold its shards: they stop")

    def run(self, registry: Subscriptions, before: Subscription) -> Outcome:
        """Delete the subscription with its checkpoints."""
        views = registry.shards(before)
        owners = _owners(registry, before)
        if owners and not self.force:
            raise OptionInvalid(
                f"{before.name} is consumed by {', '.join(owners)}", hint="Stop them, or set force"
            )
        checkpoints = {
            str(view.shard): None if view.state.checkpoint is None else view.state.checkpoint.position
            for view in views
        }
        if not self.dry_run:
            registry.delete(before.instance, before.name)
        return {"checkpoints": checkpoints, "owners": owners}


SubscriptionRequest = MoveRequest | ResizeRequest | SetRequest | DeleteRequest

# Each call by the last segment of its path: the body, the function, and the action of its audit record.
CALLS: dict[str, tuple[type[SubscriptionRequest], str, str]] = {
    "move": (MoveRequest, "Give a shard to a member", "move shard"),
    "resize": (ResizeRequest, "Change the number of shards of a subscription", "resize subscription"),
    "set": (SetRequest, "Change what a subscription delivers", "set subscription"),
    "delete": (DeleteRequest, "Delete a subscription with its checkpoints", "delete subscription"),
}


def routes(served: Served, coordination: CoordinationProbe | None) -> list[Route]:
    """Return the routes of changes of subscriptions."""
    # A name may contain a slash.
    path = "/v1/instances/{instance}/subscriptions/{subscription:path}"
    return [
        Route(
            f"{path}/{word}",
            functools.partial(_change, served, coordination, request_type, action),
            methods=["POST"],
            name=f"_{word}_subscription",
        )
        for word, (request_type, _, action) in CALLS.items()
    ]


async def _change(
    served: Served,
    coordination: CoordinationProbe | None,
    request_type: type[SubscriptionRequest],
    action: str,
    request: Request,
) -> Response:
    instance, name = (request.path_params[field] for field in ("instance", "subscription"))
    account = account_of(request)
    account.prove_administers(instance, name)
    served.instance(instance)
    log = _held_log(served, request) if request_type is DeleteRequest else None
    store = needed_store(coordination)
    wanted = await request_type.read(request, request_type.example)
    if isinstance(wanted, SetRequest):
        wanted.prove_sees_columns(account)
    change = _Change(instance, name, wanted, action, account)
    outcome = await run_in(served.threads.reading, store.change_slowly, change.run)
    if log is not None and not wanted.dry_run:
        reader = consumer_hold_name(name)
        outcome["released"] = await run_in(served.threads.reading, _release, log, reader, account)
        served.consumers.release(instance, reader)
    return JSONResponse({"instance": instance, "subscription": name, **outcome, "dry_run": wanted.dry_run})


def _held_log(served: Served, request: Request) -> ServedLog | None:
    """Return the log that has a subscription's holds, None if the log is not open.

    Raises CapturedElsewhere if another fleet member has the log, because that member also has its holds.
    """
    try:
        return log_of(served, request)
    except CapturedElsewhere:
        raise
    except PenstockError:
        return None


@dataclass(frozen=True)
class _Change:
    """A request to change a subscription. `run` applies it to the store."""

    instance: str
    name: str
    wanted: SubscriptionRequest
    action: str
    account: Account

    def run(self, registry: Subscriptions) -> Outcome:
        """Change the subscription unless this is a dry run; return the changes.

        Raises SourceMissing, OptionInvalid.
        """
        before = find_subscription(registry, self.instance, self.name)
        planned = self.wanted.model_copy(update={"dry_run": True}).run(registry, before)
        if self.wanted.dry_run:
            return planned
        # Record the action before the change, because the store may fail between two steps of the change.
        record_action(self.account, self.action, instance=self.instance, subscription=self.name, **planned)
        return self.wanted.run(registry, before)


def _release(log: ServedLog, reader: str, account: Account) -> bool:
    """Remove the hold of a deleted subscription; return whether it had one."""
    with suppress(SourceMissing):
        give_up_hold(log, reader, account)
        return True
    return False


def _owners(registry: Subscriptions, subscription: Subscription) -> list[str]:
    return sorted({view.holder.name for view in registry.shards(subscription) if view.holder is not None})


def _set_of(selection: Selection) -> dict[str, Any]:
    return {name: value for name, value in vars(selection).items() if value is not None}


def _listed(columns: ShardColumns) -> dict[str, list[str]]:
    return {table: list(names) for table, names in columns.items()}
