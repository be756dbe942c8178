# SPDX-License-Identifier: Apache-2.0
"""The messages of each system as events that can be compared."""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

from tests.originals.comparing import Event
from tests.originals.running import MARKS
from tests.support.canal.client import EVENTS, PROTO, ROWDATA, TRANSACTIONBEGIN, TRANSACTIONEND

_STORES = {
    TRANSACTIONBEGIN: "TransactionBegin",
    ROWDATA: "RowChange",
    TRANSACTIONEND: "TransactionEnd",
}
_KINDS = {TRANSACTIONBEGIN: "BEGIN", ROWDATA: "ROWS", TRANSACTIONEND: "END"}


def debezium_events(messages: Sequence[Any], databases: Sequence[str]) -> list[Event]:
    """Return Debezium's messages with a schema, of some databases."""
    events = [_debezium_event(message) for message in messages if message is not None]
    return [event for event in events if event.fields["payload"]["source"]["db"] in databases]


def _debezium_event(message: Any) -> Event:
    payload = message["payload"]
    source = payload["source"]
    table = f"{source['db']}.{source['table'] or ''}"
    if "ddl" in payload:
        identity = ("ddl", *payload["ddl"].split()[:2])
    else:
        row = payload["after"] or payload["before"]
        identity = (payload["op"], table, json.dumps(next(iter(row.values()), None)))
    schema = _by_name(message["schema"])
    for side in ("before", "after"):
        if payload.get(side):
            payload = payload | {side: _with_documents(payload[side], schema["fields"][side]["fields"])}
    return Event(identity, table, {"schema": schema, "payload": payload})


def _with_documents(image: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return an image with the parsed value of each JSON text beside the text, because both are compared."""
    return {
        name: {"text": value, "document": json.loads(value)}
        if value is not None and fields[name].get("name") == "io.debezium.data.Json"
        else value
        for name, value in image.items()
    }


def keyed_events(messages: Sequence[tuple[str, Any, Any]]) -> list[Event]:
    """Return the rows and keys of Debezium's messages, table by table; each as (table, key, value)."""
    events = []
    for table, key, value in sorted(messages, key=itemgetter(0)):
        payload = value["payload"]
        row = payload["after"] or payload["before"]
        identity = (payload["op"], table, json.dumps(next(iter(row.values()), None)))
        shown = key and {"schema": _by_name(key["schema"]), "payload": key["payload"]}
        events.append(Event(identity, table, {"key": shown}))
    return events


def steady_tables(messages: Sequence[tuple[str, Any, Any]]) -> set[str]:
    """Return the tables whose rows and keys have the same columns in every Debezium message."""
    columns: dict[str, set[tuple[str, ...]]] = defaultdict(set)
    for table, key, value in messages:
        row = value["payload"]["after"] or value["payload"]["before"]
        columns[table].add((*row, "key", *(key["payload"] if key else ())))
    return {table for table, names in columns.items() if len(names) == 1}


def rows_by_table(events: Sequence[tuple[Any, Any]]) -> list[tuple[str, Any, Any]]:
    """Select the row events from Debezium's keys and values, and return each as (table, key, value)."""
    rows = [(key, value) for key, value in events if value is not None and "op" in value["payload"]]
    sources = [value["payload"]["source"] for _, value in rows]
    return [
        (f"{source['db']}.{source['table']}", key, value)
        for source, (key, value) in zip(sources, rows, strict=True)
    ]


def _by_name(schema: Any) -> Any:
    """Return a schema of Kafka Connect with its fields under their names."""
    if isinstance(schema, list):
        return [_by_name(field) for field in schema]
    if not isinstance(schema, dict):
        return schema
    attributes = {
        name: _by_name(value) for name, value in sorted(schema.items()) if name not in ("fields", "field")
    }
    return (
        attributes | {"fields": {field["field"]: _by_name(field) for field in schema["fields"]}}
        if "fields" in schema
        else attributes
    )


def entry_events(contents: Sequence[bytes]) -> list[Event]:
    """Return Canal's entries. An omitted field has the default value that its getter returns."""
    return list(_entries(contents))


def _entries(contents: Sequence[bytes]) -> Iterator[Event]:
    # The entries of the open transaction.
    held: list[Event] | None = None
    marked = False
    for content in contents:
        entry = PROTO["Entry"].FromString(content)
        store = PROTO[_STORES[entry.entryType]].FromString(entry.storeValue)
        header = entry.header
        table = f"{header.schemaName}.{header.tableName}"
        marked |= header.schemaName == MARKS
        fields = {"entryType": entry.entryType, "header": _plain(header), "store": _plain(store)}
        words: list[str] = []
        if entry.entryType == ROWDATA:
            kind = EVENTS[header.eventType - 1]
            rows = [row.afterColumns or row.beforeColumns for row in store.rowDatas]
            keys = [columns[0].value for columns in rows if columns]
            words = [kind, table, *keys] if keys else [kind, *store.sql.split()[:3]]
        event = Event((_KINDS[entry.entryType], *words), table, fields)
        if entry.entryType == TRANSACTIONBEGIN:
            held, marked = [event], False
        elif held is None:
            if header.schemaName != MARKS:
                yield event
        else:
            held.append(event)
            if entry.entryType == TRANSACTIONEND:
                yield from () if marked else _of_its_tables(held)
                held = None
    assert not held, "a transaction has no end"


def _of_its_tables(transaction: Sequence[Event]) -> Iterator[Event]:
    """Yield the entries of a transaction; its begin and end appear once for each table that it changes."""
    tables = " ".join(sorted({event.table for event in transaction[1:-1]}))
    for event in transaction:
        yield event if event.identity[0] == "ROWS" else replace(event, table=tables)


def _plain(message: Any) -> Any:
    """Return a message as plain JSON, every field with the value of its getter."""
    plain_value: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.name == "props":
            plain_value[field.name] = {pair.key: pair.value for pair in value}
        elif field.is_repeated:
            plain_value[field.name] = [_plain(element) for element in value]
        else:
            plain_value[field.name] = value
    return plain_value


def flat_events(messages: Sequence[Any]) -> list[Event]:
    """Return Canal's flat messages."""
    return [_flat_event(message) for message in messages if message["database"] != MARKS]


def _flat_event(message: Any) -> Event:
    table = f"{message['database']}.{message['table']}"
    keys = [str(next(iter(row.values()), None)) for row in message["data"] or ()]
    words = [table, *keys] if keys else (message["sql"] or "").split()[:3]
    return Event((message["type"], *words), table, message)
