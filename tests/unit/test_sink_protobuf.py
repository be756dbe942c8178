# SPDX-License-Identifier: Apache-2.0
"""Debezium's messages in protobuf: their schemas, and their bytes read by Google's library."""

import base64
import json
from typing import Any

import pytest

from penstock.changes import Changes
from penstock.errors import EventUnsupported, OptionInvalid
from penstock.sinks.kafka import connect_schemas
from penstock.sinks.kafka.connect_values import in_protobuf
from penstock.sinks.kafka.debezium_records import truncate_record
from penstock.sinks.kafka.protobuf_schemas import protobuf_schema
from penstock.sinks.kafka.sink import KafkaSink, Settings
from penstock.sinks.messages import DebeziumForms, messages_of
from tests.support.messages.avro_types import every_type
from tests.support.pipeline.changes_made import Made, changes_of, insert, target_of, update
from tests.support.sinks.http_endpoint import HttpEndpoint
from tests.support.sinks.protobuf_reading import record_of
from tests.unit.test_sink_avro import FORMS
from tests.unit.test_sink_debezium_topics import ITEMS, TOPICS, statement
from tests.unit.test_sink_kafka_writer import writer_of

ORDERS = target_of({"id": "int", "status": "varchar(20)"})


def schemas(changes: Changes, forms: DebeziumForms | None) -> tuple[str, str]:
    value, key = connect_schemas.row_schemas(changes.target, "test", ("id",), forms)
    assert key is not None
    return protobuf_schema(value, "optional"), protobuf_schema(key, "optional")


def plain(value: Any) -> Any:
    """Return a message as the JSON of the other dialects shows it."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case {"value": bytes(unscaled), "precision": int(), "scale": int()}:
            return plain(unscaled)
        case dict():
            return {name: plain(field) for name, field in value.items()}
        case list():
            return [plain(element) for element in value]
        case float():
            return pytest.approx(value, rel=1e-6)
    return value


def without_nulls(value: Any) -> Any:
    """Return a JSON message without nulls, because protobuf omits them."""
    if isinstance(value, dict):
        return {name: without_nulls(field) for name, field in value.items() if field is not None}
    return value


def without_empty(value: Any) -> Any:
    """Return a message without its empty arrays."""
    if isinstance(value, dict):
        return {name: without_empty(field) for name, field in value.items() if field != []}
    return value


@FORMS
def test_messages_have_the_values_of_those_in_json(forms: DebeziumForms | None) -> None:
    changes = every_type()
    value_schema, key_schema = schemas(changes, forms)
    messages = messages_of(changes, "debezium_protobuf", ("id",), debezium=forms, schema_ids=(7, 70_000))
    in_json = messages_of(changes, "debezium", ("id",), debezium=forms)
    assert len(messages) == 5
    for name, schema, schema_id in (("value", value_schema, 7), ("key", key_schema, 70_000)):
        expected = [without_nulls(json.loads(text)) for text in getattr(in_json, name).to_pylist()]
        read = [record_of(message, schema) for message in getattr(messages, name).to_pylist()]
        assert [number for number, _ in read] == [schema_id] * 5
        # An empty array and a null are equal: both are omitted.
        assert expected == [without_empty(plain(record)) for _, record in read]


def test_schema_has_the_messages_of_connects_converter() -> None:
    target = target_of(
        {"id": "int", "small": "smallint", "total": "decimal(10,2)", "source": "point"}, name="2-shop.t$"
    )
    value, _ = connect_schemas.row_schemas(target, "db 1", ("id",), None)
    text = protobuf_schema(value, "plain")
    assert text.startswith(
        """syntax = "proto3";
package db_1._2_shop.t_;

import "confluent/meta.proto";
import "confluent/type/decimal.proto";

message Envelope {
  Value before = 1;
  Value after = 2;
  Source source = 3;
  block transaction = 4;
  string op = 5;
  int64 ts_ms = 6;
  int64 ts_us = 7;
  int64 ts_ns = 8;
  message Value {
    int32 id = 1;
    int32 small = 2 [(confluent.field_meta) = {params: [{key: "connect.type", value: "int16"}]}];
    confluent.type.Decimal total = 3 [(confluent.field_meta) = {params: [{key: "precision", value: "10"}, """
        """{key: "scale", value: "2"}]}];
    Point source = 4;
    message Point {
"""
    )
    assert "optional" not in text
    assert "  optional Value before = 1;" in protobuf_schema(value, "optional")


def test_field_beyond_the_127th_is_read() -> None:
    target = target_of({"id": "int"} | {f"c{number}": "int" for number in range(400)})
    changes = changes_of(target, insert(1, id=1, c399=7))
    value_schema, _ = schemas(changes, None)
    [message] = messages_of(changes, "debezium_protobuf", ("id",), schema_ids=(1, 2)).value.to_pylist()
    assert record_of(message, value_schema)[1]["after"] == {"id": 1, "c399": 7}


def test_block_of_a_transaction_equals_that_in_json() -> None:
    changes = changes_of(ORDERS, update(16, {"id": 1}, {"id": 2}))
    value_schema, _ = schemas(changes, None)
    options: Any = {"key": ("id",), "counts": (16, 3, 2)}
    values = messages_of(changes, "debezium_protobuf", schema_ids=(1, 2), **options).value.to_pylist()
    expected = messages_of(changes, "debezium", **options).value.to_pylist()
    assert [record_of(value, value_schema)[1]["transaction"] for value in values] == [
        json.loads(value)["transaction"] for value in expected
    ]


def test_statement_and_its_key_are_read() -> None:
    writer, producer = writer_of(TOPICS, debezium={"schema_topic": "shop"})
    writer.statement(statement("CREATE", "CREATE TABLE items (id INT)", "shop.items"))
    [value] = producer.of_topic("shop")
    schema = connect_schemas.statement_value()
    expected = without_nulls(value)
    assert record_of(in_protobuf(value, schema, 9), protobuf_schema(schema, "optional")) == (9, expected)


def test_end_of_a_transaction_is_read() -> None:
    tables = [{"data_collection": "s.t", "event_count": 300}, {"data_collection": "s.u", "event_count": 1}]
    value = {"status": "END", "id": "a", "event_count": 301, "data_collections": tables, "ts_ms": 5}
    schema = connect_schemas.TRANSACTION_VALUE
    assert record_of(in_protobuf(value, schema, 9), protobuf_schema(schema, "optional")) == (9, value)


def test_partial_image_is_refused() -> None:
    partial = changes_of(ORDERS, [Made("insert", 1, {"id": 1}, absent=("status",))])
    with pytest.raises(EventUnsupported, match="`status`"):
        messages_of(partial, "debezium_protobuf", ("id",), schema_ids=(1, 2))


def test_columns_that_get_the_same_name_are_refused() -> None:
    target = target_of({"id": "int", "a-b": "int", "a_b": "int"})
    value, _ = connect_schemas.row_schemas(target, "test", ("id",), None)
    with pytest.raises(OptionInvalid, match="'a_b'"):
        protobuf_schema(value, "plain")


@pytest.mark.parametrize("name", ["confluent.t", "shop.confluent"])
def test_names_of_confluent_are_absolute_in_a_package_of_that_name(name: str) -> None:
    # protoc refuses `confluent.type.Decimal` in the package `test.confluent.t`.
    columns = {"id": "int", "small": "smallint", "total": "decimal(10,2)", "confluent": "decimal(3,1)"}
    target = target_of(columns, name=name)
    value, _ = connect_schemas.row_schemas(target, "test", ("id",), None)
    text = protobuf_schema(value, "plain")
    assert "    int32 small = 2 [(.confluent.field_meta) = {params: [" in text
    assert "    .confluent.type.Decimal confluent = 4 [(.confluent.field_meta) = " in text
    assert 'import "confluent/meta.proto";' in text
    value, _ = connect_schemas.row_schemas(target_of(columns, name="shop.t"), "confluent", ("id",), None)
    assert ".confluent" not in protobuf_schema(value, "plain")


@pytest.mark.parametrize("name", ["Meta.t", "field_meta.t", "type.Decimal"])
def test_package_with_the_name_of_a_message_of_confluents_is_refused(name: str) -> None:
    value, _ = connect_schemas.row_schemas(
        target_of({"id": "smallint"}, name=name), "confluent", ("id",), None
    )
    with pytest.raises(OptionInvalid, match=f"confluent.{name.split('.t')[0]}"):
        protobuf_schema(value, "plain")


def test_registry_gets_the_schema_with_its_kind() -> None:
    with HttpEndpoint() as endpoint:
        endpoint.bodies.extend((b'{"id": 3}', b'{"id": 4}'))
        registry = {"url": endpoint.url, "nullables": "plain"}
        sink = KafkaSink(Settings(servers="b:1", format="debezium_protobuf", registry=registry))
        assert sink.schema_ids(changes_of(ITEMS, insert(1, id=1))) == (3, 4)
    bodies = [json.loads(request.body) for request in endpoint.received]
    value, key = connect_schemas.row_schemas(ITEMS, "test", ("id",), None)
    assert key is not None
    assert bodies == [
        {"schema": protobuf_schema(schema, "plain"), "schemaType": "PROTOBUF"} for schema in (value, key)
    ]
    assert [request.path for request in endpoint.received] == [
        "/subjects/shop.items-value/versions",
        "/subjects/shop.items-key/versions",
    ]


def test_registry_is_asked_once_for_equal_schemas_of_truncates() -> None:
    with HttpEndpoint() as endpoint:
        endpoint.bodies.append(b'{"id": 3}')
        registry = {"url": endpoint.url}
        sink = KafkaSink(Settings(servers="b:1", format="debezium_protobuf", registry=registry))
        cause = statement("TRUNCATE", "TRUNCATE items", "shop.items", emptied=(ITEMS,))
        for _ in range(3):
            # The schemas of many tables do not stay in memory; a later TRUNCATE builds them again.
            connect_schemas.row_schemas.cache_clear()
            schema, _ = connect_schemas.row_schemas(ITEMS, "test", ("id",), None)
            sink.encode(truncate_record("shop.items", cause, ITEMS.name, schema, 0))
    assert len(endpoint.received) == 1


def test_check_refuses_a_registry_without_protobuf() -> None:
    with HttpEndpoint() as endpoint:
        endpoint.bodies.append(b'["AVRO"]')
        settings = Settings(servers="b:1", format="debezium_protobuf", registry={"url": endpoint.url})
        with pytest.raises(OptionInvalid, match="no PROTOBUF"):
            KafkaSink(settings).check()
