# SPDX-License-Identifier: Apache-2.0
"""Changes as queue messages: their kinds, their keys, and the partitions of the keys."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy
import pyarrow
import pytest
from pydantic import ValidationError

from penstock import _native
from penstock.changes import Changes, Origin
from penstock.errors import EventUnsupported, OptionInvalid
from penstock.model import Column, TableName
from penstock.sinks.kafka.debezium_settings import DebeziumSettings
from penstock.sinks.kafka.sink import KafkaSink
from penstock.sinks.kafka.sink import Settings as KafkaSettings
from penstock.sinks.kafka.writer import topic_of
from penstock.sinks.messages import DebeziumForms, Format, key_of, messages_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update

ORDERS = target_of({"id": "int", "status": "varchar(20)"})


def order_changes() -> Changes:
    """An insert, an update, a move to another key, and a delete."""
    new: dict[str, Any] = {"id": 1, "status": "new"}
    paid = new | {"status": "paid"}
    return changes_of(
        ORDERS,
        insert(1, **new),
        update(2, new, paid),
        update(3, paid, paid | {"id": 2}),
        delete(4, id=2, status="paid"),
    )


@pytest.mark.parametrize(
    ("form", "field", "kinds"),
    [
        ("debezium", "op", ["c", "u", "d", "c", "d"]),
        ("json", "change", ["insert", "update", "delete", "insert", "delete"]),
        ("maxwell", "type", ["insert", "update", "update", "delete"]),
        ("canal_flat", "type", ["INSERT", "UPDATE", "UPDATE", "DELETE"]),
    ],
)
def test_rows_become_messages_of_their_kind(form: Format, field: str, kinds: list[str]) -> None:
    messages = messages_of(order_changes(), form, ("id",))
    assert [json.loads(value)[field] for value in messages.value.to_pylist()] == kinds


def test_moved_row_is_a_delete_of_its_old_key() -> None:
    messages = messages_of(order_changes(), "debezium", ("id",))
    old, new = b'{"id":1}', b'{"id":2}'
    assert messages.key.to_pylist() == [old, old, old, new, new]
    assert messages.kind.to_pylist() == [0, 1, 2, 0, 2]


PARTIAL = changes_of(
    target_of({"id": "int", "status": "varchar(20)", "n": "int"}),
    [
        Made("update_preimage", 1, {"id": 5}, absent=("status", "n")),
        Made("update_postimage", 1, {"n": 2}, absent=("id", "status")),
        Made("update_preimage", 2, {"id": 5}, absent=("status", "n")),
        Made("update_postimage", 2, {"id": 6}, absent=("status", "n")),
    ],
)


@pytest.mark.parametrize(
    ("form", "keys"),
    [
        ("debezium", [b'{"id":5}', b'{"id":5}', b'{"id":6}']),
        ("json", [b'{"id":5}', b'{"id":5}', b'{"id":6}']),
        ("canal_flat", [b'{"id":5}', b'{"id":6}']),
    ],
)
def test_key_of_an_update_is_complete_even_if_its_images_are_not(form: Format, keys: list[bytes]) -> None:
    assert messages_of(PARTIAL, form, ("id",)).key.to_pylist() == keys


def test_key_absent_from_every_image_is_refused() -> None:
    with pytest.raises(EventUnsupported, match="`status`"):
        messages_of(PARTIAL, "debezium", ("status",))


def test_debezium_uses_a_unique_key_without_nulls_if_there_is_no_primary_key() -> None:
    columns = {name: Column(name, "int", None, nullable) for name, nullable in (("a", True), ("b", False))}
    table = target_of(columns, key=(), unique=(("a",), ("b",)))
    moved = changes_of(table, update(1, {"a": 1, "b": 1}, {"a": 1, "b": 2}))
    messages = messages_of(moved, "debezium", key_of(table, "debezium"))
    assert messages.key.to_pylist() == [b'{"b":1}', b'{"b":2}']
    assert [json.loads(value)["op"] for value in messages.value.to_pylist()] == ["d", "c"]
    assert key_of(table, "maxwell") == ()


def test_loaded_row_is_marked_as_a_snapshot() -> None:
    loaded = changes_of(ORDERS, insert(1, id=1), origin=Origin.LOAD)
    (message,) = (json.loads(value) for value in messages_of(loaded, "debezium", ("id",)).value.to_pylist())
    assert (message["op"], message["source"]["snapshot"]) == ("r", "true")


def test_every_member_of_a_set_is_included() -> None:
    members = target_of({"id": "int", "s": "set('x','y z','')", "t": "set('','x')"})
    (message,) = messages_of(
        changes_of(members, insert(1, id=1, s="x,", t=",x")), "json", ("id",)
    ).value.to_pylist()
    assert json.loads(message)["after"] == {"id": 1, "s": "x,", "t": ",x"}


def test_debezium_schema_has_its_own_names_and_types() -> None:
    types = {"id": "int", "e": "enum('d,e','a\\\\b')", "f": "float(7,4)", "g": "float"}
    changes = changes_of(target_of(types), insert(1, id=1, e="d,e", f=999.0001, g=999.0001))
    (message,) = messages_of(changes, "debezium_schema", ("id",)).value.to_pylist()
    schema, payload = (json.loads(message)[part] for part in ("schema", "payload"))
    fields = {field["field"]: field for field in schema["fields"][0]["fields"]}
    assert fields["e"]["parameters"] == {"allowed": r"d\,e,a\\b"}
    assert (fields["f"]["type"], fields["g"]["type"]) == ("double", "float")
    assert (payload["after"]["f"], payload["after"]["g"]) == (999.0001220703125, 999.0001)


def test_invalid_letters_in_topic_names_become_underscores() -> None:
    changes = changes_of(replace(ORDERS, name=TableName("shop", "dot.t-b$é")), insert(1, id=1, status="new"))
    (message,) = messages_of(changes, "debezium_schema", ("id",)).value.to_pylist()
    assert json.loads(message)["schema"]["name"].endswith("shop.dot.t-b__.Envelope")
    assert topic_of("{database}.{table}", changes.target) == "shop.dot.t-b__"


def test_partition_of_a_key_equals_that_of_kafkas_producers() -> None:
    # Hashes from the tests of Kafka's Java client.
    hashes = {b"21": -973_932_308, b"foobar": -790_332_482, b"abc": 479_470_107}
    keys = pyarrow.record_batch([pyarrow.array(list(hashes), pyarrow.large_binary())], ["key"])
    partitions = pyarrow.array(_native.partitions(keys, 7)).to_pylist()
    positive = numpy.array(list(hashes.values())) & 0x7FFF_FFFF
    assert partitions == (positive % 7).tolist()


TYPES = target_of(
    {
        "id": "int",
        "total": "decimal(10,2)",
        "big": "bigint unsigned",
        "token": "varbinary(4)",
        "at": "datetime(6)",
        "span": "time",
    }
)
ROW = {
    "id": 1,
    "total": Decimal("-12.30"),
    "big": (1 << 64) - 1,
    "token": b"\xfb\xff",
    "at": datetime(2024, 2, 29, 1, 2, 3, 456_789),
    "span": timedelta(hours=1),
}


def after_and_schema(forms: DebeziumForms) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row after an insert, and the type and name of each of its fields."""
    [text] = messages_of(
        changes_of(TYPES, insert(1, **ROW)), "debezium_schema", debezium=forms
    ).value.to_pylist()
    message = json.loads(text)
    fields = message["schema"]["fields"]
    row, columns = message["payload"], fields
    if not forms.flat:
        row, columns = row["after"], fields[1]["fields"]
    return row, {field["field"]: (field["type"], field.get("name")) for field in columns}


def test_handling_modes_change_values_and_schema_together() -> None:
    forms = DebeziumForms(decimal="string", time="connect", bigint_unsigned="precise", binary="hex")
    row, schema = after_and_schema(forms)
    assert row == {
        "id": 1,
        "total": "-12.30",
        "big": "AP//////////",
        "token": "fbff",
        "at": 1709168523456,
        "span": 3_600_000,
    }
    assert schema == {
        "id": ("int32", None),
        "total": ("string", None),
        "big": ("bytes", "org.apache.kafka.connect.data.Decimal"),
        "token": ("string", None),
        "at": ("int64", "org.apache.kafka.connect.data.Timestamp"),
        "span": ("int32", "org.apache.kafka.connect.data.Time"),
    }


@pytest.mark.parametrize(
    ("forms", "values"),
    [
        ({}, {"total": "+zI=", "big": -1, "token": "+/8=", "at": 1709168523456789, "span": 3_600_000_000}),
        ({"decimal": "double"}, {"total": -12.3}),
        ({"time": "adaptive"}, {"at": 1709168523456789, "span": 3_600_000}),
        ({"time": "microseconds"}, {"at": 1709168523456789, "span": 3_600_000_000}),
        ({"binary": "base64"}, {"token": "+/8="}),
        ({"binary": "base64-url-safe"}, {"token": "-_8="}),
    ],
    ids=str,
)
def test_each_mode_has_its_form(forms: dict[str, Any], values: dict[str, Any]) -> None:
    row, _ = after_and_schema(DebeziumForms(**forms))
    assert {name: row[name] for name in values} == values


def test_time_that_is_no_time_of_day_is_refused_by_its_mode() -> None:
    changes = changes_of(TYPES, insert(1, **ROW | {"span": timedelta(hours=-30)}))
    with pytest.raises(EventUnsupported, match="no time of day"):
        messages_of(changes, "debezium", debezium=DebeziumForms(time="connect"))


def test_flat_rows_have_columns_and_fields() -> None:
    forms = DebeziumForms(flat=True, fields=("op", "source.table", "ts_ms"), deletes="rewrite")
    messages = messages_of(order_changes(), "debezium", ("id",), debezium=forms)
    rows = [json.loads(value) for value in messages.value.to_pylist()]
    assert [(row["id"], row["status"], row["__op"], row["__deleted"]) for row in rows] == [
        (1, "new", "c", "false"),
        (1, "paid", "u", "false"),
        (1, "paid", "d", "true"),
        (2, "paid", "c", "false"),
        (2, "paid", "d", "true"),
    ]
    assert {row["__source_table"] for row in rows} == {ORDERS.name.table}
    assert list(rows[0]) == ["id", "status", "__op", "__source_table", "__ts_ms", "__deleted"]
    _, schema = after_and_schema(forms)
    assert list(schema)[-4:] == ["__op", "__source_table", "__ts_ms", "__deleted"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "json", "debezium": {"decimal": "string"}}, "not json"),
        ({"debezium": {"flat": True}, "tombstones": True}, "deletes says"),
        ({"debezium": {"fields": ["op"]}}, "flat: true"),
        ({"debezium": {"flat": True, "fields": ["lsn"]}}, "lsn|Input"),
    ],
)
def test_forms_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        KafkaSettings(servers="b:9092", **settings)


def test_table_without_a_key_has_no_tombstones_for_flat_deletes() -> None:
    keyless = replace(ORDERS, primary_key=())
    settings = KafkaSettings(servers="b:9092", debezium=DebeziumSettings(flat=True))
    with pytest.raises(OptionInvalid, match="no tombstone"):
        KafkaSink(settings).key(keyless)
    for deletes in ("rewrite", "drop"):
        forms = DebeziumSettings(flat=True, deletes=deletes)  # type: ignore[arg-type]
        assert KafkaSink(KafkaSettings(servers="b:9092", debezium=forms)).key(keyless) == ()


def test_column_with_the_name_of_a_flat_field_is_refused() -> None:
    target = target_of({"id": "int", "__op": "varchar(9)"})
    for fields, is_refused in (("op",), True), (("ts_ms",), False):
        sink = KafkaSink(KafkaSettings(servers="b:9092", debezium=DebeziumSettings(flat=True, fields=fields)))  # type: ignore[arg-type]
        if is_refused:
            with pytest.raises(OptionInvalid, match="__op"):
                sink.key(target)
        else:
            assert sink.key(target) == ("id",)
