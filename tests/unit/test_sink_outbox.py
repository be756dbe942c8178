# SPDX-License-Identifier: Apache-2.0
"""Rows of an outbox table as events."""

from typing import Any

import pytest
from pydantic import ValidationError

from penstock.errors import EventUnsupported, OptionInvalid, ServerUnsupported
from penstock.sinks.kafka.outbox import Outbox
from penstock.sinks.kafka.sink import KafkaSink, Settings
from penstock.sinks.sink import Spread
from penstock.sinks.template import Template
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

OUTBOX = target_of(
    {
        "id": "char(36)",
        "aggregatetype": "varchar(20)",
        "aggregateid": "bigint",
        "type": "varchar(20)",
        "payload": "varchar(200)",
    },
    name="shop.outbox",
)
ROW: dict[str, Any] = {
    "id": "a-1",
    "aggregatetype": "order",
    "aggregateid": 7,
    "type": "OrderPaid",
    "payload": '{"total": 12}',
}


def test_insert_becomes_its_payload_with_key_and_headers() -> None:
    outbox = Outbox(headers={"eventType": "type"})
    changes = outbox.events_of(
        changes_of(OUTBOX, insert(1, **ROW), delete(2, **ROW), insert(3, **ROW | {"id": "a-2", "type": None}))
    )
    messages = outbox.messages_of(changes)
    assert messages.value.to_pylist() == [b'{"total": 12}'] * 2
    assert messages.key.to_pylist() == [b"7"] * 2
    assert outbox.headers_of(changes) == [
        [("id", b"a-1"), ("eventType", b"OrderPaid")],
        [("id", b"a-2")],
    ]
    assert (
        Template("outbox.event.{aggregatetype}", OUTBOX).texts(changes).to_pylist()
        == ["outbox.event.order"] * 2
    )


def test_null_payload_is_a_tombstone() -> None:
    outbox = Outbox()
    changes = outbox.events_of(changes_of(OUTBOX, insert(1, **ROW | {"payload": None})))
    assert outbox.messages_of(changes).value.to_pylist() == [None]


def test_binary_payload_stays_as_it_is() -> None:
    columns = {column.name: column for column in OUTBOX.columns}
    target = target_of({**columns, "payload": "blob"}, name="shop.outbox")
    changes = changes_of(target, insert(1, **ROW | {"payload": b"\x00\xff"}))
    assert Outbox().messages_of(changes).value.to_pylist() == [b"\x00\xff"]


def test_update_stops_the_pipeline_unless_it_is_ignored() -> None:
    changes = changes_of(OUTBOX, update(1, ROW, ROW | {"payload": "{}"}))
    with pytest.raises(EventUnsupported, match="has an update"):
        Outbox().events_of(changes)
    assert len(Outbox(updates="skip").events_of(changes)) == 0


def test_insert_that_lacks_columns_is_refused_and_a_delete_is_not() -> None:
    partial = {name: value for name, value in ROW.items() if name not in ("id", "payload")}
    absent = ("id", "payload")
    events = changes_of(OUTBOX, insert(1, **ROW), [Made("delete", 2, partial, absent=absent)])
    assert len(Outbox().events_of(events)) == 1
    with pytest.raises(ServerUnsupported, match="lack columns"):
        Outbox().events_of(changes_of(OUTBOX, [Made("insert", 1, partial, absent=absent)]))


def test_table_without_the_columns_is_refused() -> None:
    sink = KafkaSink(Settings(servers="b:9092", topic="t", outbox=Outbox()))
    with pytest.raises(OptionInvalid, match="no column 'aggregateid'"):
        sink.key(target_of({"id": "int", "payload": "json"}))
    assert sink.key(OUTBOX) == ("id", "aggregateid", "payload")
    with pytest.raises(OptionInvalid, match="no column 'body'"):
        Outbox(payload="body").messages_of(changes_of(OUTBOX, insert(1, **ROW)))


def test_events_of_a_table_are_written_in_its_order() -> None:
    # Events of one aggregate have different primary keys.
    assert KafkaSink(Settings(servers="b:9092", outbox=Outbox())).spread is Spread.TABLES


def test_settings_of_other_messages_are_refused() -> None:
    with pytest.raises(ValidationError, match="format, headers"):
        Settings(servers="b:9092", outbox=Outbox(), format="json", headers=True)


def test_settings_name_other_columns() -> None:
    outbox = Outbox(id="type", key="id", payload="aggregatetype")
    messages = outbox.messages_of(changes_of(OUTBOX, insert(1, **ROW)))
    assert (messages.key.to_pylist(), messages.value.to_pylist()) == ([b"a-1"], [b"order"])
