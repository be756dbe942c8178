# SPDX-License-Identifier: Apache-2.0
"""Debezium's messages in Avro and protobuf, through a real broker and registry, read by other libraries."""

import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock import _native
from penstock.errors import SchemaInvalid
from penstock.sinks.messages import DebeziumForms, messages_of
from tests.integration.test_sink_kafka import broker, mark, sink_of, write  # noqa: F401
from tests.support.messages.avro_types import every_type
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.sinks import protobuf_reading
from tests.support.sinks.kafka_reading import records
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.own_servers import started
from tests.unit.test_sink_avro import FORMS
from tools.apicurio import Apicurio, install
from tools.kafka import Kafka
from tools.maven import program

ORACLE = Path(__file__).parent.parent / "support" / "sinks" / "AvroOracle.java"
ORACLE_SECONDS_MAX = 300.0


@pytest.fixture(scope="module")
def registry(missing_part: MissingPart) -> Iterator[Apicurio]:
    with started(Apicurio(), "Apicurio Registry", missing_part) as apicurio:
        yield apicurio


def asked(registry: Apicurio, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{registry.url}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/vnd.schemaregistry.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def read_in_java(requests: Sequence[dict[str, Any]]) -> list[Any]:
    """Return the oracle's output for each request."""
    words = [program("java"), "-cp", f"{install() / 'lib'}/*", str(ORACLE)]
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(words, input=lines, capture_output=True, text=True, timeout=ORACLE_SECONDS_MAX)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def rounded(value: Any) -> Any:
    """Return a message with its floats rounded: Java and the kernel write different digits of a float."""
    match value:
        case dict():
            return {name: rounded(field) for name, field in value.items()}
        case list():
            return [rounded(element) for element in value]
        case float():
            return float(f"{value:.6g}")
    return value


@pytest.mark.deep(guard="tests/unit/test_sink_avro.py::test_records_have_the_values_of_the_messages_in_json")
@FORMS
def test_consumer_in_java_reads_what_connects_converter_would_write(
    broker: Kafka,  # noqa: F811
    registry: Apicurio,
    forms: DebeziumForms | None,
    request: pytest.FixtureRequest,
) -> None:
    topic = f"avro_{request.node.callspec.id}"
    changes = every_type()
    target = changes.target
    debezium = None if forms is None else forms.model_dump()
    settings = {"format": "debezium_avro", "registry": {"url": registry.url}, "debezium": debezium}
    write(sink_of(broker, topic=topic, partitions=1, tombstones=None, **settings), mark(1, topic), changes)
    connect = _native.debezium_schemas(
        target.declared,
        instance="test",
        database=target.name.database,
        table=target.name.table.replace("-", "_"),
        key=["id"],
        debezium=[] if forms is None else forms.options(),
    )
    received = [record for record in records(broker, topic) if record.value is not None]
    requests = []
    for record in received:
        for schema, message in zip(connect, (record.value, record.key), strict=True):
            assert schema is not None
            assert message is not None
            schema_id = int.from_bytes(message[1:5])
            registered = asked(registry, "GET", f"/schemas/ids/{schema_id}")["schema"]
            body = base64.b64encode(message[5:]).decode()
            requests.append({"connect": json.loads(schema), "avro": registered, "record": body})
    answers = read_in_java(requests)
    for asked_for, answer in zip(requests, answers, strict=True):
        assert json.loads(asked_for["avro"]) == json.loads(answer["avro"])
    expected = messages_of(changes, "debezium", ("id",), debezium=forms)
    in_json = [
        json.loads(text)
        for pair in zip(expected.value.to_pylist(), expected.key.to_pylist(), strict=True)
        for text in pair
    ]
    assert [rounded(answer["value"]) for answer in answers] == rounded(in_json)
    assert {f"{topic}-key", f"{topic}-value"} <= set(asked(registry, "GET", "/subjects"))


@pytest.mark.deep(guard="tests/unit/test_sink_avro.py::test_refusal_of_the_registry_is_an_error")
def test_registry_refuses_a_schema_that_its_consumers_cannot_read(
    broker: Kafka,  # noqa: F811
    registry: Apicurio,
) -> None:
    settings = {"format": "debezium_avro", "registry": {"url": registry.url}, "topic": "evolving"}
    sink = sink_of(broker, **settings)
    narrow = target_of({"id": "int", "status": "varchar(20)"}, name="shop.evolving")
    wide = target_of({"id": "int", "status": "varchar(20)", "n": "int"}, name="shop.evolving")
    other = target_of({"id": "int", "status": "int"}, name="shop.evolving")
    write(sink, mark(1, "evolving"), changes_of(narrow, insert(1, id=1, status="new")))
    asked(registry, "PUT", "/config/evolving-value", {"compatibility": "BACKWARD"})
    write(sink, mark(2, "evolving"), changes_of(wide, insert(2, id=2, status="new", n=1)))
    with pytest.raises(SchemaInvalid, match="not compatible"):
        write(sink, mark(3, "evolving"), changes_of(other, insert(3, id=3, status=1)))
    ids = {record.value[1:5] for record in records(broker, "evolving") if record.value}
    assert len(ids) == 2


@pytest.mark.deep(
    guard="tests/unit/test_sink_avro.py::test_registry_is_asked_once_for_the_columns_of_a_table"
)
def test_schema_that_is_not_registered_stops_the_writer(
    broker: Kafka,  # noqa: F811
    registry: Apicurio,
) -> None:
    settings = {"url": registry.url, "auto_register": False}
    changes = changes_of(target_of({"id": "int"}, name="shop.unknown"), insert(1, id=1))
    with pytest.raises(SchemaInvalid, match="not registered"):
        write(
            sink_of(broker, format="debezium_avro", registry=settings, topic="unknown"),
            mark(1, "unknown"),
            changes,
        )
    assert records(broker, "unknown") == []


@pytest.mark.deep(guard="tests/unit/test_sink_protobuf.py::test_messages_have_the_values_of_those_in_json")
def test_messages_in_protobuf_are_read_by_their_registered_schemas(
    broker: Kafka,  # noqa: F811
    registry: Apicurio,
) -> None:
    topic = "protobuf"
    changes = every_type()
    settings = {"format": "debezium_protobuf", "registry": {"url": registry.url}, "topic": topic}
    sink = sink_of(broker, partitions=1, **settings)
    assert list(sink.check()) == []
    write(sink, mark(1, topic), changes)
    expected = messages_of(changes, "debezium", ("id",)).value.to_pylist()
    received = [record.value for record in records(broker, topic) if record.value is not None]
    assert len(received) == len(expected)
    for value, text in zip(received, expected, strict=True):
        registered = asked(registry, "GET", f"/schemas/ids/{int.from_bytes(value[1:5])}")
        assert registered["schemaType"] == "PROTOBUF"
        _, message = protobuf_reading.record_of(value, registered["schema"])
        assert message["op"] == json.loads(text)["op"]
        assert message["source"]["table"] == "every-type"
    assert {f"{topic}-key", f"{topic}-value"} <= set(asked(registry, "GET", "/subjects"))


@pytest.mark.deep(
    guard="tests/unit/test_sink_protobuf.py::test_names_of_confluent_are_absolute_in_a_package_of_that_name"
)
def test_registry_compiles_the_schema_of_a_database_named_confluent(
    broker: Kafka,  # noqa: F811
    registry: Apicurio,
) -> None:
    settings = {"format": "debezium_protobuf", "registry": {"url": registry.url}, "topic": "confluent"}
    target = target_of({"id": "smallint", "total": "decimal(10,2)"}, name="confluent.orders")
    sink = sink_of(broker, partitions=1, **settings)
    write(sink, mark(1, "confluent"), changes_of(target, insert(1, id=1, total=Decimal("1.50"))))
    [record] = records(broker, "confluent")
    assert record.value is not None
    registered = asked(registry, "GET", f"/schemas/ids/{int.from_bytes(record.value[1:5])}")["schema"]
    _, message = protobuf_reading.record_of(record.value, registered)
    assert message["after"] == {"id": 1, "total": {"value": b"\x00\x96", "precision": 10, "scale": 2}}
