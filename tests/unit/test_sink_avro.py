# SPDX-License-Identifier: Apache-2.0
"""Debezium's messages in Avro: their schemas, their bytes, and the registry that has the schemas."""

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.changes import Changes, Target
from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionLost,
    EventUnsupported,
    OptionInvalid,
    PenstockError,
    SchemaInvalid,
    ServerBusy,
)
from penstock.model import TableName
from penstock.sinks.kafka.avro_schemas import avro_schema
from penstock.sinks.kafka.connect_schemas import row_schemas
from penstock.sinks.kafka.registry import Registry, RegistryClient
from penstock.sinks.kafka.sink import KafkaSink, Settings
from penstock.sinks.messages import DebeziumForms, messages_of
from tests.support.messages.avro_types import every_type
from tests.support.pipeline.changes_made import Made, changes_of, insert, target_of
from tests.support.sinks.avro_reading import record_of
from tests.support.sinks.http_endpoint import HttpEndpoint

ORDERS = target_of({"id": "int", "status": "varchar(20)"})
# Schemas that Kafka Connect's own Avro converter made; test_sink_avro_consumers.py compares them again.
GOLDEN = Path(__file__).parent.parent / "support" / "messages" / "avro_schemas"
PRECISE = DebeziumForms(bigint_unsigned="precise", time="microseconds")
FLAT = DebeziumForms(
    flat=True,
    decimal="string",
    binary="hex",
    fields=("op", "table", "gtid", "file", "pos", "row", "server_id", "thread", "snapshot", "source.ts_us"),
    deletes="rewrite",
)
FORMS = pytest.mark.parametrize("forms", [None, PRECISE, FLAT], ids=["envelope", "modes", "flat"])


def avro_schemas(target: Target, instance: str, forms: DebeziumForms | None = None) -> tuple[Any, Any]:
    """Return the schemas of a target's messages and keys."""
    value, key = row_schemas(target, instance, ("id",), forms)
    return avro_schema(value), avro_schema(key or {})


def plain(value: Any) -> Any:
    """Return a record as the JSON of the other dialects shows it."""
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case dict():
            return {name: plain(field) for name, field in value.items()}
        case list():
            return [plain(element) for element in value]
        case float():
            return pytest.approx(value, rel=1e-6)
    return value


def in_json(changes: Changes, forms: DebeziumForms | None) -> list[tuple[Any, Any]]:
    messages = messages_of(changes, "debezium", ("id",), debezium=forms)
    return [
        (json.loads(key), json.loads(value))
        for key, value in zip(messages.key.to_pylist(), messages.value.to_pylist(), strict=True)
    ]


@FORMS
def test_records_have_the_values_of_the_messages_in_json(forms: DebeziumForms | None) -> None:
    changes = every_type()
    value_schema, key_schema = avro_schemas(changes.target, "test", forms)
    messages = messages_of(changes, "debezium_avro", ("id",), debezium=forms, schema_ids=(7, 70_000))
    records = []
    for key, value in zip(messages.key.to_pylist(), messages.value.to_pylist(), strict=True):
        (key_id, key_record), (value_id, record) = record_of(key, key_schema), record_of(value, value_schema)
        assert (key_id, value_id) == (70_000, 7)
        records.append((plain(key_record), plain(record)))
    assert len(records) == 5
    assert in_json(changes, forms) == records


@pytest.mark.parametrize(
    ("forms", "name"),
    [(None, "envelope"), (PRECISE, "modes"), (FLAT, "flat")],
    ids=lambda value: str(value)[:8],
)
def test_schemas_equal_those_of_connects_converter(forms: DebeziumForms | None, name: str) -> None:
    value, key = avro_schemas(every_type().target, "test", forms)
    golden = json.loads((GOLDEN / f"{name}.json").read_text())
    assert json.dumps({"value": value, "key": key}) == json.dumps(golden)


def test_letters_that_avro_lacks_become_underscores() -> None:
    target = replace(target_of({"1st": "int", "ü-b": "int"}, key=("1st",)), name=TableName("2-shop", "t$"))
    value, key = map(avro_schema, filter(None, row_schemas(target, "db 1:3306", ("1st",), None)))
    assert (value["namespace"], value["name"]) == ("db_1_3306._2_shop.t_", "Envelope")
    assert (key["namespace"], key["name"]) == ("db_1_3306._2_shop.t_", "Key")
    assert value["connect.name"] == "db_1_3306._2_shop.t_.Envelope"
    row = value["fields"][0]["type"][1]
    assert [field["name"] for field in row["fields"]] == ["_1st", "__b"]


def test_columns_that_get_the_same_name_are_refused() -> None:
    target = target_of({"id": "int", "a-b": "int", "a_b": "int"})
    with pytest.raises(OptionInvalid, match="'a_b'"):
        avro_schemas(target, "test")


def test_record_of_a_partial_image_is_refused() -> None:
    partial = changes_of(ORDERS, [Made("insert", 1, {"id": 1}, absent=("status",))])
    with pytest.raises(EventUnsupported, match="`status`"):
        messages_of(partial, "debezium_avro", ("id",), schema_ids=(1, 2))


def test_message_that_ends_like_a_line_keeps_its_last_byte() -> None:
    forms = DebeziumForms(flat=True, deletes="drop")
    target = target_of({"id": "int", "n": "int"})
    # The number 5 is 10 in zigzag encoding, which is the byte of a newline.
    messages = messages_of(
        changes_of(target, insert(1, id=1, n=5)), "debezium_avro", ("id",), debezium=forms, schema_ids=(1, 2)
    )
    assert messages.value.to_pylist() == [b"\0\0\0\0\1\2\2\n"]


# --- The registry -------------------------------------------------------------------------------


def sink(endpoint: HttpEndpoint, topic: str = "{database}.{table}", **settings: Any) -> KafkaSink:
    registry = {"url": endpoint.url} | settings
    return KafkaSink(Settings(servers="b:9092", format="debezium_avro", topic=topic, registry=registry))


def answer_ids(endpoint: HttpEndpoint, *ids: int) -> None:
    endpoint.bodies.extend(json.dumps({"id": number}).encode() for number in ids)


@pytest.mark.parametrize(
    ("settings", "paths"),
    [
        ({}, ["/subjects/shop.orders-value/versions", "/subjects/shop.orders-key/versions"]),
        ({"auto_register": False}, ["/subjects/shop.orders-value", "/subjects/shop.orders-key"]),
        (
            {"subjects": "record"},
            ["/subjects/test.shop.orders.Envelope/versions", "/subjects/test.shop.orders.Key/versions"],
        ),
        (
            {"subjects": "topic_record"},
            [
                "/subjects/shop.orders-test.shop.orders.Envelope/versions",
                "/subjects/shop.orders-test.shop.orders.Key/versions",
            ],
        ),
    ],
    ids=str,
)
def test_registry_is_asked_once_for_the_columns_of_a_table(
    settings: dict[str, Any], paths: list[str]
) -> None:
    changes = changes_of(ORDERS, insert(1, id=1, status="new"))
    with HttpEndpoint() as endpoint:
        answer_ids(endpoint, 3, 4)
        kafka = sink(endpoint, **settings)
        assert [kafka.schema_ids(changes), kafka.schema_ids(changes)] == [(3, 4), (3, 4)]
    assert [request.path for request in endpoint.received] == paths
    bodies = [json.loads(json.loads(request.body)["schema"]) for request in endpoint.received]
    assert bodies == list(avro_schemas(ORDERS, "test"))


def test_added_column_gets_another_schema() -> None:
    wider = target_of({"id": "int", "status": "varchar(20)", "total": "int"})
    with HttpEndpoint() as endpoint:
        answer_ids(endpoint, 3, 4, 5, 4)
        kafka = sink(endpoint)
        ids = [kafka.schema_ids(changes_of(target, insert(1, id=1))) for target in (ORDERS, wider, ORDERS)]
    assert ids == [(3, 4), (5, 4), (3, 4)]


def test_message_without_a_key_needs_no_schema_of_keys() -> None:
    keyless = replace(ORDERS, primary_key=())
    with HttpEndpoint() as endpoint:
        answer_ids(endpoint, 3)
        assert sink(endpoint).schema_ids(changes_of(keyless, insert(1, id=1))) == (3, 0)


def test_subject_that_depends_on_rows_is_refused() -> None:
    with HttpEndpoint() as endpoint, pytest.raises(OptionInvalid, match="depends on rows"):
        sink(endpoint, topic="shop.{status}").schema_ids(changes_of(ORDERS, insert(1, id=1, status="new")))


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, AuthenticationFailed),
        (403, AccessDenied),
        (404, SchemaInvalid),
        (409, SchemaInvalid),
        (422, SchemaInvalid),
        (429, ServerBusy),
        (500, ServerBusy),
        (302, OptionInvalid),
        (0, ConnectionLost),
    ],
)
def test_refusal_of_the_registry_is_an_error(status: int, error: type[PenstockError]) -> None:
    with HttpEndpoint() as endpoint:
        endpoint.answer(status)
        with pytest.raises(error):
            RegistryClient(Registry(url=endpoint.url), None).schema_id("s", "string")


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"id": "1"}', b'{"id": -1}', b"[1]"])
def test_answer_without_an_id_is_refused(body: bytes) -> None:
    with HttpEndpoint() as endpoint:
        endpoint.bodies.append(body)
        with pytest.raises(OptionInvalid, match="as no schema registry does"):
            RegistryClient(Registry(url=endpoint.url), None).schema_id("s", "string")


def test_account_of_the_registry_is_sent_and_never_shown() -> None:
    with HttpEndpoint() as endpoint:
        answer_ids(endpoint, 1)
        url = endpoint.url.replace("http://", "http://app:top-secret@")
        registry = Registry(url=url)
        RegistryClient(registry, registry.secret()).schema_id("a/b", "string")
    (request,) = endpoint.received
    assert request.path == "/subjects/a%2Fb/versions"
    assert request.headers["Authorization"] == "Basic " + base64.b64encode(b"app:top-secret").decode()
    assert "top-secret" not in repr(registry)


def test_check_refuses_a_registry_without_avro() -> None:
    with HttpEndpoint() as endpoint:
        endpoint.bodies.append(b'["JSON"]')
        with pytest.raises(OptionInvalid, match="no AVRO"):
            RegistryClient(Registry(url=endpoint.url), None).check("AVRO")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "debezium_avro"}, "need each other"),
        ({"registry": {"url": "http://r:8081"}}, "need each other"),
        ({"format": "debezium_avro", "registry": {"url": "r:8081"}}, "http://host"),
        (
            {
                "format": "debezium_avro",
                "registry": {"url": "http://r:8081"},
                "claim_check": {"above": 4096, "path": "claims"},
            },
            "claim_check",
        ),
        (
            {
                "format": "debezium_protobuf",
                "registry": {"url": "http://r:8081"},
                "debezium": {"time": "connect"},
            },
            "no form in protobuf",
        ),
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings(servers="b:9092", **settings)
