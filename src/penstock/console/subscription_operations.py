# SPDX-License-Identifier: Apache-2.0
"""The operations for subscriptions: their shards, what they deliver, and their deletion."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from penstock.console.operation import Fields, Input, Operation, Sentence, say
from penstock.console.visit import Visit
from penstock.errors import OptionInvalid

_SUBJECT = ("daemon", "instance", "subscription")
_LISTS = ("tables", "exclude", "changes", "columns")


def _send(visit: Visit, fields: Fields, word: str, body: dict[str, Any], dry_run: bool) -> dict[str, Any]:
    instance, subscription = (quote(fields[name], safe="") for name in ("instance", "subscription"))
    call = f"instances/{instance}/subscriptions/{subscription}/{word}"
    return visit.fleet.change(fields["daemon"], call, {**body, "dry_run": dry_run})


def _members(visit: Visit, fields: Fields) -> Mapping[str, Sequence[str]]:
    answer = visit.fleet.ask_daemon(fields["daemon"], "subscriptions")
    key = fields["instance"], fields["subscription"]
    for subscription in answer["subscriptions"]:
        if (subscription["instance"], subscription["subscription"]) == key:
            return {"member": subscription["members"]}
    return {}


def _move(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    body = {"shard": _number(fields, "shard"), "member": fields["member"]}
    answer = _send(visit, fields, "move", body, dry_run)
    names = {"shard": answer["shard"], "member": answer["member"]}
    if answer["owner"] is None:
        return [
            say("Nobody has shard {shard}. {member} gets the shard, and keeps it while it runs.", **names)
        ]
    return [
        say(
            "{owner} finishes its current batch of shard {shard}. Then {member} continues, and keeps the"
            " shard while it runs.",
            owner=answer["owner"],
            **names,
        )
    ]


def _resize(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    answer = _send(visit, fields, "resize", {"shards": _number(fields, "shards")}, dry_run)
    if answer["old"] == answer["new"]:
        return []
    sentences = [
        say(
            "From {old} to {new} shards, which begin where the old ones end.",
            old=answer["old"],
            new=answer["new"],
        )
    ]
    if answer["owners"]:
        sentences.append(
            say(
                "These members finish their current batches, within 15 seconds, and then share the new"
                " shards: {owners}",
                owners=", ".join(answer["owners"]),
            )
        )
    sentences.append(say("Subscribers that set shards need the new number when they restart."))
    return sentences


def _select(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    answer = _send(visit, fields, "set", _selection(fields), dry_run)
    sentences = [
        say("Delivered now: {selection}", selection=_text(answer["old"]) or say("what its members ask for")),
        say("Delivered then: {selection}", selection=_text(answer["new"]) or say("what its members ask for")),
    ]
    if answer["old_shard_columns"] != answer["new_shard_columns"]:
        sentences.append(
            say(
                "Shard columns: {columns}. All shards restart at the lowest checkpoint. What was confirmed"
                " after it is delivered again.",
                columns=_text(answer["new_shard_columns"]) or say("the primary key"),
            )
        )
    if fields["labels"]:
        sentences.append(say("Labels then: {labels}", labels=_text(answer["labels"])))
    if answer["owners"]:
        sentences.append(
            say(
                "These members follow after their current batch: {owners}",
                owners=", ".join(answer["owners"]),
            )
        )
    return sentences


def _delete(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    # Delete the subscription even if shards have owners, because the page has already shown the owners.
    answer = _send(visit, fields, "delete", {"force": True}, dry_run)
    sentences = [
        say("The checkpoint of shard {shard} is forgotten: {position}", shard=shard, position=position or "–")
        for shard, position in answer["checkpoints"].items()
    ]
    if answer["owners"]:
        owners = ", ".join(answer["owners"])
        sentences.append(say("These members stop with an error: {owners}", owners=owners))
    sentences.append(
        say("The log is no longer kept for it. A new subscriber with this name starts without a checkpoint.")
    )
    return sentences


def _selection(fields: Fields) -> dict[str, Any]:
    """Return the filled-in fields, as the body of the call. Raises OptionInvalid."""
    body: dict[str, Any] = {
        name: [part.strip() for part in fields[name].split(",") if part.strip()]
        for name in _LISTS
        if fields[name]
    }
    if fields["where"]:
        body["where"] = fields["where"]
    if fields["shard_columns"]:
        body["shard_columns"] = _shard_columns(fields["shard_columns"])
    if fields["labels"]:
        body["labels"] = _pairs(fields["labels"], ",", "team=orders")
    if fields["as_members_ask"]:
        body["as_members_ask"] = True
    return body


def _shard_columns(text: str) -> dict[str, list[str]]:
    pairs = _pairs(text, ";", "shop.orders=customer")
    return {
        table: [name.strip() for name in names.split(",") if name.strip()] for table, names in pairs.items()
    }


def _pairs(text: str, separator: str, example: str) -> dict[str, str]:
    """Parse name=value pairs. Raises OptionInvalid."""
    pairs = {}
    for part in text.split(separator):
        name, equals, value = part.partition("=")
        if not equals:
            raise OptionInvalid(f"{part.strip()!r} has no value", hint=f"Write {example}")
        pairs[name.strip()] = value.strip()
    return pairs


def _text(values: Mapping[str, Any]) -> str:
    """Return the fields of a selection as one text."""
    return "; ".join(
        f"{name}: {', '.join(value) if isinstance(value, list) else value}" for name, value in values.items()
    )


def _number(fields: Fields, name: str) -> int:
    if not fields[name].isdecimal():
        raise OptionInvalid(f"{fields[name]!r} is no number", hint="Write a whole number")
    return int(fields[name])


OPERATIONS = (
    Operation(
        "/subscriptions/move",
        "Move the shard",
        "What happens if a member gets this shard?",
        "move shard",
        _SUBJECT,
        _move,
        "/subscriptions",
        (
            Input("shard", "Shard", is_needed=True, example="0"),
            Input("member", "Member", is_needed=True, example="h1:42"),
        ),
        suggest=_members,
    ),
    Operation(
        "/subscriptions/resize",
        "Change the shards",
        "What happens if this subscription has another number of shards?",
        "resize subscription",
        _SUBJECT,
        _resize,
        "/subscriptions",
        (Input("shards", "New number of shards", is_needed=True, example="4"),),
    ),
    Operation(
        "/subscriptions/set",
        "Change what is delivered",
        "What happens if this subscription delivers something else?",
        "set subscription",
        _SUBJECT,
        _select,
        "/subscriptions",
        (
            Input("tables", "Tables", example="shop.orders, shop.item*"),
            Input("exclude", "Tables to leave out", example="shop.log"),
            Input("changes", "Kinds of changes", example="insert, update, delete"),
            Input("where", "Condition", example="status = 'paid'"),
            Input("columns", "Columns", example="id, status"),
            Input("shard_columns", "Shard columns", example="shop.orders=customer; shop.items=order_id"),
            Input("labels", "Labels", example="team=orders, unit=x"),
            Input("as_members_ask", "Drop what was set before", kind="check"),
        ),
    ),
    Operation(
        "/subscriptions/delete",
        "Delete the subscription",
        "What is lost if this subscription is deleted?",
        "delete subscription",
        _SUBJECT,
        _delete,
        "/subscriptions",
    ),
)
