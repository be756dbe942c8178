# SPDX-License-Identifier: Apache-2.0
"""A server's log becomes the topics that Debezium's connector writes in addition to the topics of tables."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.changes import Target
from penstock.local.driver import LocalDriver
from penstock.sinks.kafka.sink import KafkaSink
from tests.integration.test_sink_kafka import broker  # noqa: F401
from tests.originals.running import Original
from tests.support.capture.captured_log import head_of
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.sinks.kafka_reading import records
from tests.support.suite.fixture_types import FreshDatabase, MissingPart, StartServer
from tests.unit.test_sink_kafka_writer import KeptProducer
from tools.kafka import Kafka
from tools.servers import PartMissing, Server

STATEMENTS = (
    "CREATE TABLE a (id INT PRIMARY KEY, n INT)",
    "CREATE TABLE b (id INT PRIMARY KEY)",
    "BEGIN",
    "INSERT INTO a VALUES (1, 1), (2, 2)",
    "INSERT INTO b VALUES (1)",
    "INSERT INTO a VALUES (3, 3)",
    "COMMIT",
    "UPDATE a SET id = 4 WHERE id = 1",
    "TRUNCATE TABLE b",
    "ALTER TABLE a ADD m INT",
    "INSERT INTO a VALUES (5, 5, 5)",
    "DROP TABLE b",
)


def settings_of(prefix: str, **further: Any) -> dict[str, Any]:
    """Return the settings of the sink for a connector with a topic.prefix."""
    forms = {"truncates": True, "schema_topic": prefix, "transaction_topic": f"{prefix}.transaction"}
    return {"topic": f"{prefix}.{{table}}", "debezium": forms, **further}


def run_statements(server: Server, database: str) -> None:
    with server.connect(database=database) as connection, connection.cursor() as cursor:
        for statement in STATEMENTS:
            cursor.execute(statement)


@pytest.fixture
def producer(monkeypatch: pytest.MonkeyPatch) -> KeptProducer:
    """The messages that sinks send, instead of sending them to a broker."""
    kept = KeptProducer()

    def nothing(*_: Any) -> Mapping[str, Any]:
        return {}

    def one_partition(*_: Any) -> int:
        return 1

    for name in ("check", "plan", "begin"):
        monkeypatch.setattr(KafkaSink, name, nothing)
    monkeypatch.setattr(KafkaSink, "prepare", lambda sink, target, evolution: _checked(sink, target))
    monkeypatch.setattr(KafkaSink, "make", one_partition)
    monkeypatch.setattr(KafkaSink, "take_producer", lambda *_: kept)
    monkeypatch.setattr(
        "penstock.sinks.kafka.connection.partition_counts", lambda *_: defaultdict[str, int](int)
    )
    kept.producer = None  # type: ignore[attr-defined]
    return kept


def _checked(sink: KafkaSink, target: Target) -> None:
    sink.key(target)


def test_transactions_statements_and_truncates_are_in_their_topics(
    mysql_server: Server, fresh_database: FreshDatabase, producer: KeptProducer, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    start = str(head_of(mysql_server))
    run_statements(mysql_server, database)
    sink = {"kafka": {"servers": "127.0.0.1:1", "exactly_once": False, **settings_of("p")}}
    source = {"url": mysql_server.url("root"), "name": "shop", "tables": f"{database}.*", "start": start}
    run_to_end(
        LocalDriver(2), pipeline_of(mysql_server, database, sink, tmp_path, source=source, load="none")
    )
    ends = [message for message in producer.of_topic("p.transaction") if message["status"] == "END"]
    counts = [
        {
            table["data_collection"].partition(".")[2]: table["event_count"]
            for table in end["data_collections"]
        }
        for end in ends
    ]
    assert counts == [{"a": 3, "b": 1}, {"a": 2}, {"a": 1}]
    rows = [json.loads(message["value"]) for to, message in producer.sent if to == "p.a" and message["value"]]
    orders = [row["transaction"]["total_order"] for row in rows]
    assert orders == [1, 2, 4, 1, 2, 1]
    assert {row["transaction"]["id"] for row in rows} == {end["id"] for end in ends}
    assert [row["op"] for row in producer.of_topic("p.b")] == ["c", "t"]
    statements = producer.of_topic("p")
    assert [" ".join(message["ddl"].split()[:3]) for message in statements] == [
        "CREATE TABLE a",
        "CREATE TABLE b",
        "ALTER TABLE a",
        f"DROP TABLE `{database}`.`b`",
    ]
    [truncate] = [row["source"] for row in producer.of_topic("p.b") if row["op"] == "t"]
    server_id = int(mysql_server.sql("SELECT @@server_id")[0][0])
    assert (truncate["table"], truncate["server_id"]) == ("b", server_id)
    positions = [message["source"]["pos"] for message in statements]
    assert positions == sorted(positions)
    assert {message["source"]["file"] for message in statements} == {
        start.rpartition(":")[0].rpartition("/")[2]
    }


# --- Debezium's own engine ----------------------------------------------------------------------


def topics_of(messages: Sequence[tuple[str, Any, Any]], prefix: str) -> dict[str, list[Any]]:
    """Return, by topic, the parts that both systems must agree on: keys, and values without times and
    writers.
    """
    topics: dict[str, list[Any]] = defaultdict(list)
    for topic, key, value in messages:
        if topic.startswith(prefix) and value is not None:
            topics[topic.removeprefix(prefix)].append((key, _shared(value)))
    return dict(topics)


def _shared(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = {"version", "ts_ms", "ts_us", "ts_ns", "tableChanges", "row", "thread"}
        return {name: _shared(field) for name, field in value.items() if name not in left_out}
    return [_shared(item) for item in value] if isinstance(value, list) else value


def engine_messages(
    server: Server, folder: Path, database: str, start: Any
) -> Iterator[tuple[str, Any, Any]]:
    """Yield topic, key and value of the messages that Debezium's engine writes for the statements."""
    further = (
        "provide.transaction.metadata=true",
        "skipped.operations=none",
        "heartbeat.interval.ms=100",
    )
    words = (str(server.port), start.file, ".", f"{database},marks", *further)
    engine = Original("debezium", "DebeziumEvents", folder / "debezium", "events", *words)
    try:
        server.sql("INSERT INTO marks.marks VALUES ('begin.')")
        engine.wait_for("begin.")
        with server.connect(database=database) as connection, connection.cursor() as cursor:
            for statement in STATEMENTS:
                cursor.execute(statement)
        server.sql("INSERT INTO marks.marks VALUES ('end.')")
        engine.wait_for("end.")
        engine.wait_for("__debezium-heartbeat")
        lines = engine.lines("events")
    finally:
        engine.close()
    for topic, key, value in zip(lines[0::3], lines[1::3], lines[2::3], strict=True):
        plain = [json.loads(text) for text in (key, value)]
        yield topic, *(part and part["payload"] for part in plain)


@pytest.mark.deep(
    guard="tests/integration/test_debezium_topics.py"
    "::test_transactions_statements_and_truncates_are_in_their_topics"
)
def test_topics_equal_those_of_debeziums_engine(
    start_server: StartServer,
    broker: Kafka,  # noqa: F811
    missing_part: MissingPart,
    tmp_path: Path,
) -> None:
    server = start_server(default_time_zone="+00:00", gtid_mode="ON", enforce_gtid_consistency="ON")
    server.sql("CREATE USER original@'%' IDENTIFIED BY 'original'; GRANT ALL ON *.* TO original@'%'")
    server.sql("FLUSH BINARY LOGS")
    start = head_of(server)
    server.sql(
        "CREATE DATABASE topics; CREATE DATABASE marks; CREATE TABLE marks.marks (m CHAR(9) PRIMARY KEY)"
    )
    try:
        theirs = list(engine_messages(server, tmp_path, "topics", start))
    except PartMissing as problem:
        missing_part("Debezium", str(problem))
    sink = settings_of("shop", topic="shop.{database}.{table}")
    sink = {"kafka": {"servers": broker.servers, "partitions": 1, "tombstones": False, **sink}}
    source = {"url": server.url("root"), "name": "shop", "tables": "topics.*", "start": str(start)}
    settings = pipeline_of(server, "topics", sink, tmp_path, source=source, load="none")
    run_to_end(LocalDriver(2), settings)
    topics = ("shop", "shop.transaction", "shop.topics.a", "shop.topics.b")
    ours = [
        (record.topic, record.key and json.loads(record.key), record.message)
        for record in records(broker, *topics)
    ]
    expected = topics_of([message for message in theirs if "marks" not in json.dumps(message)], "shop")
    # Ignore the BEGIN and END of other tables' transactions, and statements about databases.
    ids = {json.dumps(key) for key, _ in topics_of(ours, "shop")[".transaction"]}
    expected[".transaction"] = [
        (key, value) for key, value in expected[".transaction"] if json.dumps(key) in ids
    ]
    expected[""] = [(key, value) for key, value in expected[""] if value["source"]["table"]]
    actual = topics_of(ours, "shop")
    assert set(actual) == {"", ".transaction", ".topics.a", ".topics.b"}
    for topic, messages in actual.items():
        assert messages == expected[topic], topic
    heartbeats = [(key, value) for topic, key, value in theirs if topic == "__debezium-heartbeat.shop"]
    assert all(key == {"serverName": "shop"} and list(value) == ["ts_ms"] for key, value in heartbeats)
    assert heartbeats
