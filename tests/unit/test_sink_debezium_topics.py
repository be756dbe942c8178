# SPDX-License-Identifier: Apache-2.0
"""Debezium messages that do not carry rows: transactions, statements, truncated tables, heartbeats."""

import json
from typing import Any

import pyarrow
import pytest
from pydantic import ValidationError

from penstock.changes import Changes, DefiningStatement, Origin, StatementOrigin
from penstock.errors import ConnectionLost, OptionInvalid
from penstock.model import TableName
from penstock.sinks.kafka import connect_schemas
from penstock.sinks.kafka.avro_schemas import avro_schema
from penstock.sinks.kafka.connect_values import in_avro, in_json
from penstock.sinks.kafka.sink import KafkaSink, Settings
from penstock.sinks.messages import Format, messages_of
from penstock.sinks.sink import Evolution, Spread
from tests.support.pipeline.changes_made import changes_of, insert, target_of, update
from tests.support.sinks.avro_reading import record_of
from tests.unit.test_sink_kafka_writer import KeptProducer, writer_of

ORDERS = target_of({"id": "int", "status": "varchar(20)"})
ITEMS = target_of({"id": "int"}, name="shop.items")
TOPICS = {"shop.orders": 1, "shop.items": 1, "shop": 1, "shop.transaction": 1}
COUNTED = {"debezium": {"transaction_topic": "shop.transaction"}}
# A transaction that writes three rows into two tables, and one that writes a single row.
TWO_TRANSACTIONS = (
    changes_of(ORDERS, insert(16, 0, id=1), insert(16, 1, id=2)),
    changes_of(ITEMS, insert(16, 2, id=1)),
    changes_of(ORDERS, insert(16, 3, id=3), insert(32, 0, id=4)),
)
FIRST, SECOND = "file=mysql-bin.000001,pos=256", "file=mysql-bin.000001,pos=512"


def written(*changes: Changes, **settings: Any) -> KeptProducer:
    writer, producer = writer_of(TOPICS, **settings)
    for change in changes:
        writer.write(change)
    writer.finish()
    return producer


def statement(kind: str, text: str, *tables: str, emptied: tuple[Any, ...] = ()) -> DefiningStatement:
    names = tuple(map(TableName.parse, tables))
    definitions = tuple((kind, name.database, name.table, text) for name in names)
    origin = StatementOrigin("mysql-bin.000002", 400, "uuid:7", 11, 1_772_323_200_123_456)
    return DefiningStatement(text, "shop", names, 64, "test", origin, definitions, emptied)


# --- Transactions -------------------------------------------------------------------------------


def test_each_transaction_has_a_begin_and_an_end_with_its_counts() -> None:
    producer = written(*TWO_TRANSACTIONS, **COUNTED)
    begun = {"event_count": None, "data_collections": None}
    tables = [
        {"data_collection": "shop.orders", "event_count": 3},
        {"data_collection": "shop.items", "event_count": 1},
    ]
    assert producer.of_topic("shop.transaction") == [
        {"status": "BEGIN", "id": FIRST, **begun, "ts_ms": 1_772_323_216_000},
        {
            "status": "END",
            "id": FIRST,
            "event_count": 4,
            "data_collections": tables,
            "ts_ms": 1_772_323_216_000,
        },
        {"status": "BEGIN", "id": SECOND, **begun, "ts_ms": 1_772_323_232_000},
        {
            "status": "END",
            "id": SECOND,
            "event_count": 1,
            "data_collections": [{"data_collection": "shop.orders", "event_count": 1}],
            "ts_ms": 1_772_323_232_000,
        },
    ]
    keys = [json.loads(message["key"]) for topic, message in producer.sent if topic == "shop.transaction"]
    assert keys == [{"id": FIRST}] * 2 + [{"id": SECOND}] * 2


def test_messages_say_their_place_in_their_transaction() -> None:
    producer = written(*TWO_TRANSACTIONS, **COUNTED)
    blocks = [
        (
            message["transaction"]["id"],
            message["transaction"]["total_order"],
            message["transaction"]["data_collection_order"],
        )
        for topic in ("shop.orders", "shop.items")
        for message in producer.of_topic(topic)
    ]
    assert blocks == [(FIRST, 1, 1), (FIRST, 2, 2), (FIRST, 4, 3), (SECOND, 1, 1), (FIRST, 3, 1)]


def test_change_of_a_key_counts_as_two_messages() -> None:
    producer = written(changes_of(ORDERS, update(16, {"id": 1}, {"id": 2})), **COUNTED)
    orders = [message["transaction"]["total_order"] for message in producer.of_topic("shop.orders")[:2]]
    assert orders == [1, 2]
    assert producer.of_topic("shop.transaction")[1]["event_count"] == 2


def test_loaded_rows_belong_to_no_transaction() -> None:
    producer = written(changes_of(ORDERS, insert(16, id=1), origin=Origin.LOAD), **COUNTED)
    assert producer.of_topic("shop.transaction") == []
    assert producer.of_topic("shop.orders")[0]["transaction"] is None


def test_transactions_of_two_sources_with_one_version_are_two() -> None:
    other = changes_of(ORDERS, insert(16, id=9))
    metadata = other.rows.column("_metadata").to_pylist()
    column = other.rows.schema.get_field_index("_metadata")
    field = other.rows.schema.field(column)
    renamed = [row | {"instance": "other"} for row in metadata]
    rows = other.rows.set_column(column, field, pyarrow.array(renamed, field.type))
    producer = written(TWO_TRANSACTIONS[0], other.with_rows(rows), **COUNTED)
    counts = [message["event_count"] for message in producer.of_topic("shop.transaction")]
    assert counts == [None, 2, None, 1]


def test_block_in_avro_equals_that_in_json() -> None:
    changes = TWO_TRANSACTIONS[2]
    schema, _ = connect_schemas.row_schemas(ORDERS, "test", ("id",), None)

    def values(form: Format, ids: tuple[int, int] | None) -> list[bytes]:
        messages = messages_of(changes, form, ("id",), schema_ids=ids, counts=(16, 3, 2))
        read: list[bytes] = messages.value.to_pylist()
        return read

    in_text = [json.loads(value)["transaction"] for value in values("debezium", None)]
    records = [record_of(value, avro_schema(schema))[1] for value in values("debezium_avro", (1, 2))]
    assert [record["transaction"] for record in records] == in_text
    assert in_text[0] == {"id": FIRST, "total_order": 4, "data_collection_order": 3}


# --- Statements ---------------------------------------------------------------------------------


def test_statement_becomes_a_message_for_each_table() -> None:
    writer, producer = writer_of(TOPICS, debezium={"schema_topic": "shop"})
    writer.statement(statement("CREATE", "CREATE TABLE items (id INT)", "shop.items"))
    writer.finish()
    [(topic, message)] = producer.sent
    value = json.loads(message["value"])
    assert (topic, json.loads(message["key"]), producer.partitions) == ("shop", {"databaseName": "shop"}, [0])
    assert list(value) == ["source", "ts_ms", "databaseName", "schemaName", "ddl", "tableChanges"]
    assert (value["ddl"], value["ts_ms"]) == ("CREATE TABLE items (id INT)", 1_772_323_200_123)
    source = value["source"]
    shown = ("name", "db", "table", "file", "pos", "gtid", "server_id", "ts_us")
    assert {name: source[name] for name in shown} == {
        "name": "test",
        "db": "shop",
        "table": "items",
        "file": "mysql-bin.000002",
        "pos": 400,
        "gtid": "uuid:7",
        "server_id": 11,
        "ts_us": 1_772_323_200_123_456,
    }


def test_source_of_a_statement_has_the_fields_of_rows() -> None:
    [record] = [json.loads(value) for value in messages_of(TWO_TRANSACTIONS[1], "debezium").value.to_pylist()]
    writer, producer = writer_of(TOPICS, debezium={"schema_topic": "shop"})
    writer.statement(statement("CREATE", "CREATE TABLE items (id INT)", "shop.items"))
    [value] = producer.of_topic("shop")
    assert list(value["source"]) == list(record["source"])
    assert value["source"]["version"] == record["source"]["version"]


def test_truncate_becomes_a_message_without_a_key_in_the_topic_of_its_table() -> None:
    forms = {"truncates": True, "schema_topic": "shop", "transaction_topic": "shop.transaction"}
    writer, producer = writer_of(TOPICS, debezium=forms)
    writer.write(TWO_TRANSACTIONS[1])
    writer.statement(statement("TRUNCATE", "TRUNCATE items", "shop.items", emptied=(ITEMS,)))
    writer.finish()
    # The previous transaction ends before the message.
    topics = [topic for topic, _ in producer.sent]
    assert topics == ["shop.transaction", "shop.items", "shop.transaction", "shop.items"]
    message = producer.sent[-1][1]
    value = json.loads(message["value"])
    assert message["key"] is None
    assert (value["op"], value["before"], value["after"], value["transaction"]) == ("t", None, None, None)
    assert (value["source"]["table"], value["ts_us"]) == ("items", 1_772_323_200_123_456)


def test_truncate_is_left_out_by_default() -> None:
    writer, producer = writer_of(TOPICS, debezium={"schema_topic": "shop"})
    writer.statement(statement("TRUNCATE", "TRUNCATE items", "shop.items", emptied=(ITEMS,)))
    assert producer.sent == []


def test_truncates_are_refused_if_the_topic_depends_on_rows() -> None:
    sink = KafkaSink(
        Settings.model_validate({"servers": "b:1", "topic": "{status}", "debezium": {"truncates": True}})
    )
    with pytest.raises(OptionInvalid, match="depends on rows"):
        sink.prepare(ORDERS, Evolution.EVOLVE)


# --- Schemas, settings, heartbeats --------------------------------------------------------------

_VALUES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (connect_schemas.HEARTBEAT_VALUE, {"ts_ms": -1}),
    (
        connect_schemas.TRANSACTION_VALUE,
        {"status": "BEGIN", "id": "ü:1", "event_count": None, "data_collections": None, "ts_ms": 2**40},
    ),
    (
        connect_schemas.TRANSACTION_VALUE,
        {
            "status": "END",
            "id": "a",
            "event_count": 200,
            "data_collections": [{"data_collection": "s.t", "event_count": 200}],
            "ts_ms": 0,
        },
    ),
]


@pytest.mark.parametrize(("schema", "value"), _VALUES, ids=["heartbeat", "begin", "end"])
def test_messages_in_avro_have_the_values_of_those_in_json(
    schema: dict[str, Any], value: dict[str, Any]
) -> None:
    assert record_of(in_avro(value, schema, 70_000), avro_schema(schema)) == (70_000, value)
    assert json.loads(in_json(value, schema)) == {"schema": schema, "payload": value}


def test_statement_in_avro_has_the_values_of_its_message_in_json() -> None:
    writer, producer = writer_of(TOPICS, debezium={"schema_topic": "shop"})
    writer.statement(statement("CREATE", "CREATE TABLE items (id INT)", "shop.items"))
    [value] = producer.of_topic("shop")
    schema = connect_schemas.statement_value()
    assert record_of(in_avro(value, schema, 1), avro_schema(schema)) == (1, value)


@pytest.mark.parametrize(
    ("debezium", "message"),
    [
        ({"flat": True, "truncates": True}, "flat rows"),
        ({"heartbeat": {"topic": "h", "server": "shop", "interval": "1ms"}}, "interval"),
        ({"schema_topics": "shop"}, "schema_topics"),
        ({"schema_topic": "a b"}, "schema_topic"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(debezium: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"servers": "b:1", "debezium": debezium})


@pytest.mark.parametrize(
    ("debezium", "spread", "load_spread", "takes_statements"),
    [
        ({"decimal": "string"}, Spread.KEYS, None, False),
        ({"transaction_topic": "t"}, Spread.WHOLE, Spread.KEYS, False),
        ({"schema_topic": "s"}, Spread.WHOLE, Spread.KEYS, True),
        ({"truncates": True}, Spread.WHOLE, Spread.KEYS, True),
    ],
)
def test_one_writer_gets_all_changes_where_their_order_counts(
    debezium: dict[str, Any], spread: Spread, load_spread: Spread | None, takes_statements: bool
) -> None:
    sink = KafkaSink(Settings.model_validate({"servers": "b:1", "debezium": debezium}))
    assert (sink.spread, sink.load_spread, sink.takes_statements) == (spread, load_spread, takes_statements)


def heartbeats(interval: str, monkeypatch: pytest.MonkeyPatch) -> tuple[KafkaSink, KeptProducer]:
    heartbeat = {"topic": "__debezium-heartbeat.shop", "server": "shop", "interval": interval}
    sink = KafkaSink(Settings.model_validate({"servers": "b:1", "debezium": {"heartbeat": heartbeat}}))
    monkeypatch.setattr(sink, "make", lambda topic: 1)
    producer: Any = KeptProducer()
    sink.keep(None, producer)
    return sink, producer


def test_heartbeat_is_sent_once_in_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, producer = heartbeats("1h", monkeypatch)
    for _ in range(3):
        sink.keep_alive()
    [(topic, message)] = producer.sent
    assert (topic, json.loads(message["key"])) == ("__debezium-heartbeat.shop", {"serverName": "shop"})
    assert list(json.loads(message["value"])) == ["ts_ms"]


def test_heartbeat_that_fails_does_not_stop_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, producer = heartbeats("1h", monkeypatch)
    # The first heartbeat creates the topic.
    sink.take_producer(None)

    def refuse(topic: str) -> int:
        raise ConnectionLost(f"no broker for {topic}")

    monkeypatch.setattr(sink, "make", refuse)
    sink.keep_alive()
    assert producer.sent == []


def test_sink_without_heartbeats_connects_to_nothing() -> None:
    KafkaSink(Settings.model_validate({"servers": "b:1"})).keep_alive()
