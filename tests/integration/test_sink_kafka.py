# SPDX-License-Identifier: Apache-2.0
"""Changes are written to a real Kafka broker and read back by the library's own consumer."""

import pickle
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import confluent_kafka
import pytest
from pydantic import ValidationError

from penstock.changes import Changes, Origin
from penstock.errors import (
    ConnectionLost,
    LeaseLost,
    OptionInvalid,
    ServerBusy,
    StateOutdated,
    TransientError,
)
from penstock.model import Column
from penstock.protobuf import Message
from penstock.sinks.kafka import connection as kafka_connection
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Sink, Spread, Writer, make_sink, settings_of
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, target_of, update
from tests.support.pipeline.local_runs import notes_pipeline, run_here
from tests.support.pipeline.logged_changes import logged_corpus, write_batch
from tests.support.pipeline.oracle import assert_same
from tests.support.sinks.kafka_reading import records, rows_held
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.nonempty import each
from tests.support.suite.own_servers import started
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tests.unit.test_restored_state import restore_before_last_batch
from tools.kafka import Kafka
from tools.servers import Server

_numbers = count(1)


@pytest.fixture(scope="module")
def broker(missing_part: MissingPart) -> Iterator[Kafka]:
    with started(Kafka(), "Kafka", missing_part) as kafka:
        yield kafka


@pytest.fixture
def table() -> str:
    """A fresh name for a table and its topic."""
    return f"shop.orders_{next(_numbers)}"


def sink_of(broker: Kafka, **settings: Any) -> Sink:
    return make_sink("kafka", settings_of("kafka")(**{"servers": broker.servers} | settings))


def mark(number: int, pipeline: str) -> BatchMark:
    return BatchMark(pipeline, "1", number)


def write(sink: Sink, at: BatchMark, *changes: Changes, part: int = 0) -> None:
    for change in changes:
        sink.prepare(change.target, Evolution.EVOLVE)
    writer = sink.open(at, part)
    for change in changes:
        writer.write(change)
    sink.commit(at, [writer.finish()])


def write_to_end(writer: Writer, changes: Changes) -> None:
    writer.write(changes)
    writer.finish()


ORDERS = {"id": "int", "status": "varchar(20)", "plan": "json"}


def some(table: str) -> Changes:
    """An insert, an update, a move to another key, and a delete."""
    new: dict[str, Any] = {"id": 1, "status": "new"}
    paid = new | {"status": "paid"}
    return changes_of(
        target_of(ORDERS, name=table),
        insert(1, **new),
        update(2, new, paid),
        update(3, paid, paid | {"id": 2}),
        delete(4, id=2, status="paid"),
    )


# --- Messages ---------------------------------------------------------------------------------


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_moved_row_is_a_delete_of_its_old_key")
def test_changes_become_messages_with_their_keys_and_tombstones(broker: Kafka, table: str) -> None:
    write(sink_of(broker), mark(1, table), some(table))
    by_key: dict[bytes | None, list[Any]] = defaultdict(list)
    for record in records(broker, table):
        by_key[record.key].append(record.message and record.message["op"])
    # The old key of a moved row is deleted, as in Debezium.
    assert by_key == {b'{"id":1}': ["c", "u", "d", None], b'{"id":2}': ["c", "d", None]}


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_rows_become_messages_of_their_kind")
@pytest.mark.parametrize(
    ("form", "kinds"),
    [
        ("json", ["insert", "update", "delete", "insert", "delete"]),
        ("maxwell", ["insert", "update", "update", "delete"]),
        ("canal_flat", ["INSERT", "UPDATE", "UPDATE", "DELETE"]),
    ],
)
def test_other_dialects_omit_the_tombstones(broker: Kafka, table: str, form: str, kinds: list[str]) -> None:
    write(sink_of(broker, format=form, partitions=1), mark(1, table), some(table))
    messages = [record.message for record in records(broker, table)]
    assert [message.get("change", message.get("type")) for message in messages] == kinds


@pytest.mark.deep(
    guard="tests/unit/test_drainer_transactions.py::test_messages_for_kafka_are_those_of_the_original"
)
def test_transactions_of_the_drainer_format_are_in_one_partition_once(broker: Kafka, table: str) -> None:
    sink = sink_of(broker, format="drainer", topic=table, partitions=3)
    others = changes_of(target_of({"id": "int"}, name="shop.others"), insert(4, id=7))
    for _ in range(2):
        write(pickle.loads(pickle.dumps(sink)), mark(1, table), some(table), others)
    received = records(broker, table)
    assert {(record.partition, record.key) for record in received} == {(0, None)}
    transactions = [Message(record.value or b"") for record in received]
    assert [transaction.signed(2) for transaction in transactions] == [1, 2, 3, 4]
    assert [part.text(2) for part in transactions[-1].message(3).messages(1)] == [table[5:], "others"]


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_loaded_row_is_marked_as_a_snapshot")
def test_loaded_rows_are_marked_as_such(broker: Kafka, table: str) -> None:
    loaded = changes_of(target_of(ORDERS, name=table), insert(1, id=1), origin=Origin.LOAD)
    write(sink_of(broker), mark(1, table), loaded)
    (record,) = records(broker, table)
    assert (record.message["op"], record.message["source"]["snapshot"]) == ("r", "true")


@pytest.mark.deep(
    guard="tests/unit/test_sink_messages.py::test_partition_of_a_key_equals_that_of_kafkas_producers"
)
def test_partition_of_a_key_equals_that_of_another_producer(broker: Kafka, table: str) -> None:
    target = target_of(ORDERS, name=table)
    write(
        sink_of(broker, partitions=7),
        mark(1, table),
        changes_of(target, *(insert(n, id=n) for n in range(1, 60))),
    )
    partitions = {record.key: record.partition for record in records(broker, table)}
    assert len(set(partitions.values())) == 7
    other = confluent_kafka.Producer({"bootstrap.servers": broker.servers, "partitioner": "murmur2_random"})
    placed: dict[bytes | None, int | None] = {}
    for key in partitions:
        other.produce(
            table,
            b"",
            key,
            on_delivery=lambda _, message: placed.update({message.key(): message.partition()}),
        )
    assert other.flush(WAIT_SECONDS_MAX) == 0
    assert placed == partitions


@pytest.mark.deep(
    guard="tests/integration/test_sink_http.py::test_messages_arrive_in_order_and_within_bounds"
)
def test_each_key_keeps_its_order(broker: Kafka, table: str) -> None:
    target = target_of({"id": "int", "n": "int"}, name=table)
    change: list[list[Made]] = [insert(1, row=key, id=key, n=0) for key in range(50)]
    for number in range(1, 40):
        change += [
            update(2, {"id": k, "n": number - 1}, {"id": k, "n": number}, number * 50 + k) for k in range(50)
        ]
    sink = sink_of(broker, partitions=5, format="json")
    write(sink, mark(1, table), changes_of(target, *change[:700]), changes_of(target, *change[700:]))
    by_key = defaultdict(list)
    for record in records(broker, table):
        by_key[record.key].append(record.message["after"]["n"])
    assert len(by_key) == 50
    assert all(versions == list(range(40)) for versions in by_key.values())


@pytest.mark.deep(guard="tests/integration/test_sink_http.py::test_urls_are_rendered_from_names_and_columns")
def test_topics_and_partitions_follow_columns(broker: Kafka, table: str) -> None:
    topic = table.replace("shop.", "rows.")
    target = target_of({"id": "int", "status": "varchar(20)", "shop": "int"}, name=table)
    rows = [insert(n, id=n, status="new" if n % 2 else "paid", shop=n % 3) for n in range(1, 40)]
    sink = sink_of(
        broker, topic=f"{topic}.{{status}}", partition_by=("shop",), key="none", partitions=9, format="json"
    )
    assert sink.spread is Spread.TABLES
    write(sink, mark(1, table), changes_of(target, *rows))
    received = records(broker, f"{topic}.new", f"{topic}.paid")
    assert sorted(record.message["after"]["id"] for record in received) == list(range(1, 40))
    assert all(record.topic.endswith(record.message["after"]["status"]) for record in received)
    places = {(record.message["after"]["shop"], record.partition) for record in received}
    assert len(places) == 3
    assert {record.key for record in received} == {None}


@pytest.mark.deep(
    guard="tests/unit/test_sink_images.py::test_update_across_targets_is_a_delete_and_an_insert"
)
def test_update_between_two_topics_or_partitions_is_a_delete_and_an_insert(broker: Kafka, table: str) -> None:
    target = target_of({"id": "int", "shop": "int", "status": "varchar(20)"}, name=table)
    new, paid = {"id": 1, "shop": 1, "status": "new"}, {"id": 1, "shop": 1, "status": "paid"}
    rows = changes_of(target, insert(1, **new), update(2, new, paid), update(3, paid, paid | {"shop": 2}))
    write(sink_of(broker, topic=f"{table}.{{status}}", partitions=1), mark(1, f"{table}.topics"), rows)
    operations = {
        status: [record.message and record.message["op"] for record in records(broker, f"{table}.{status}")]
        for status in ("new", "paid")
    }
    assert operations == {"new": ["c", "d", None], "paid": ["c", "u"]}
    topic = f"{table}.partitions"
    write(sink_of(broker, topic=topic, partition_by="shop", partitions=4), mark(1, topic), rows)
    by_partition: dict[int, list[Any]] = defaultdict(list)
    for this_record in records(broker, topic):
        by_partition[this_record.partition].append(this_record.message and this_record.message["op"])
    assert sorted(by_partition.values(), key=len) == [["c"], ["c", "u", "d", None]]
    kinds = f"{table}.{{_change_type}}"
    write(sink_of(broker, topic=kinds, partitions=1), mark(1, f"{table}.kinds"), rows)
    assert [record.message["op"] for record in records(broker, f"{table}.update_postimage")] == ["u", "u"]


@pytest.mark.deep(
    guard="tests/integration/test_sink_http.py::test_messages_arrive_in_order_and_within_bounds"
)
def test_keyless_rows_stay_in_one_partition_in_order(broker: Kafka, table: str) -> None:
    target = target_of({"n": "int"}, (), name=table)
    write(
        sink_of(broker, format="json"),
        mark(1, table),
        changes_of(target, *(insert(n, n=n) for n in range(1, 30))),
    )
    received = records(broker, table)
    assert [record.message["after"]["n"] for record in received] == list(range(1, 30))
    assert len({record.partition for record in received}) == 1


def grow(broker: Kafka, topic: str, partitions: int) -> None:
    client = kafka_connection.admin({"bootstrap.servers": broker.servers})
    kafka_connection.grow_topic(client, topic, partitions)


def partitions_of_keys(broker: Kafka, topic: str, skipped: int = 0) -> dict[bytes | None, int]:
    return {record.key: record.partition for record in records(broker, topic)[skipped:]}


@pytest.mark.deep(
    guard="tests/unit/test_sink_messages.py::test_partition_of_a_key_equals_that_of_kafkas_producers"
)
@pytest.mark.parametrize("exactly_once", [True, False])
def test_grown_topic_is_detected_with_the_next_batch(broker: Kafka, table: str, exactly_once: bool) -> None:
    target = target_of(ORDERS, name=table)
    rows = changes_of(target, *(insert(n, id=n) for n in range(1, 60)))
    sink = sink_of(broker, partitions=2, exactly_once=exactly_once)
    write(sink, mark(1, table), rows)
    assert set(partitions_of_keys(broker, table).values()) == {0, 1}
    grow(broker, table, 7)
    # The same process continues with the producer of the previous batch.
    write(sink, mark(2, table), rows)
    placed = [(record.key, record.partition) for record in records(broker, table)]
    assert {partition for _, partition in placed} == set(range(7))
    fresh = sink_of(broker, topic=f"{table}.fresh", partitions=7)
    write(fresh, mark(1, f"{table}.fresh"), rows)
    assert set(partitions_of_keys(broker, f"{table}.fresh").items()) <= set(placed)


@pytest.mark.deep(
    guard="tests/unit/test_sink_messages.py::test_partition_of_a_key_equals_that_of_kafkas_producers"
)
def test_parts_of_a_batch_share_the_partition_count_that_the_driver_read(broker: Kafka, table: str) -> None:
    target = target_of(ORDERS, name=table)
    rows = changes_of(target, *(insert(n, id=n) for n in range(1, 60)))
    sink = sink_of(broker, partitions=2)
    sink.prepare(target, Evolution.EVOLVE)
    at = BatchMark(table, "1", 1, shared=sink.begin([target]))
    for part in range(2):
        writer = pickle.loads(pickle.dumps(sink)).open(at, part)
        writer.write(rows)
        writer.finish()
        # Another process opens the second part after the topic has grown.
        grow(broker, table, 7)
    received = records(broker, table)
    assert len(received) == 2 * 59
    assert len({(record.key, record.partition) for record in received}) == 59
    assert sink.begin([target]) == {"partitions": {table: 7}}


# --- Exactly once -----------------------------------------------------------------------------


@pytest.mark.deep(
    guard="tests/conformance/test_sink_feeds.py::test_repeated_batch_of_several_parts_is_stored_once"
)
def test_repeated_batch_is_stored_once(broker: Kafka, table: str) -> None:
    sink = sink_of(broker)
    assert sink.delivery is Delivery.EXACTLY_ONCE
    for _ in range(2):
        # The second attempt runs in another process without the memory of the first process.
        write(pickle.loads(pickle.dumps(sink)), mark(1, table), some(table))
    write(sink, mark(1, table), some(table))
    assert len(records(broker, table)) == 7
    write(sink, mark(2, table), some(table))
    assert len(records(broker, table)) == 14
    # After a reset, batch numbers start again.
    write(sink, BatchMark(table, "2", 1), some(table))
    assert len(records(broker, table)) == 21


@pytest.mark.deep(
    guard="tests/conformance/test_sinks_sql.py::test_part_written_as_one_transaction_is_invisible_before_its_end"
)
def test_unfinished_transaction_is_never_visible(broker: Kafka, table: str) -> None:
    sink = sink_of(broker)
    sink.prepare(some(table).target, Evolution.EVOLVE)
    aborted = sink.open(mark(1, table), 0)
    aborted.write(some(table))
    aborted.abort()
    # This writer disappears like a process after kill -9.
    lost = sink.open(mark(1, table), 0)
    lost.write(some(table))
    lost._producer.flush()  # type: ignore[attr-defined]
    assert records(broker, table, settled=False) == []
    write(sink, mark(1, table), some(table))
    assert len(records(broker, table)) == 7
    assert len(records(broker, table, committed=False)) > 7


@pytest.mark.deep(guard="tests/conformance/test_sinks_sql.py::test_two_writers_of_one_part_write_it_once")
def test_fenced_producer_commits_nothing(broker: Kafka, table: str) -> None:
    sink = sink_of(broker)
    sink.prepare(some(table).target, Evolution.EVOLVE)
    first = sink.open(mark(1, table), 0)
    first.write(some(table))
    second = sink.open(mark(1, table), 0)
    second.write(some(table))
    with pytest.raises(LeaseLost):
        first.finish()
    second.finish()
    assert len(records(broker, table)) == 7
    # The fenced writer cannot start another batch; a newly opened writer can.
    write(sink, mark(2, table), some(table))
    assert len(records(broker, table)) == 14


@pytest.mark.deep(guard="tests/conformance/test_sinks_sql.py::test_two_writers_of_one_part_write_it_once")
def test_fenced_producer_gets_the_same_error_from_any_call(broker: Kafka, table: str) -> None:
    sink = sink_of(broker)
    sink.prepare(some(table).target, Evolution.EVOLVE)
    for number in range(1, 4):
        first = sink.open(mark(number, table), 0)
        first.write(some(table))
        second = sink.open(mark(number, table), 0)
        # The broker's response arrives before or during the client's wait.
        time.sleep(0.03 * (number - 1))
        with pytest.raises(LeaseLost):
            first.finish()
        second.write(some(table))
        second.finish()
    assert len(records(broker, table)) == 21


@pytest.mark.deep(
    guard="tests/conformance/test_sink_feeds.py::test_repeated_batch_of_several_parts_is_stored_once"
)
def test_parts_know_their_own_numbers(broker: Kafka, table: str) -> None:
    sink = sink_of(broker)
    target = target_of(ORDERS, name=table)
    for part in (0, 17):
        write(sink, mark(1, table), changes_of(target, insert(1, id=part)), part=part)
    again = pickle.loads(pickle.dumps(sink))
    write(again, mark(1, table), changes_of(target, insert(1, id=17)), part=17)
    write(again, mark(1, table), changes_of(target, insert(1, id=3)), part=3)
    assert sorted(record.message["after"]["id"] for record in records(broker, table)) == [0, 3, 17]
    write(again, mark(2, table), changes_of(target, insert(2, id=4)), part=3)
    assert again.last_number(mark(1, table), []) == 2
    assert again.last_number(BatchMark(table, "2", 1), []) is None, "the pipeline was reset"


@pytest.mark.deep(guard="tests/integration/test_sink_redis.py::test_list_has_every_change_in_order")
def test_at_least_once_needs_no_transaction(broker: Kafka, table: str) -> None:
    sink = sink_of(broker, exactly_once=False)
    assert sink.delivery is Delivery.AT_LEAST_ONCE
    for _ in range(2):
        write(sink, mark(1, table), some(table))
    assert len(records(broker, table)) == 14


@pytest.mark.deep(
    guard="tests/integration/test_sink_mysql.py::test_stale_writer_overwrites_nothing_of_a_later_batch"
)
def test_transaction_before_a_reset_hides_no_number(
    broker: Kafka, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(broker)
    write(sink, mark(1, table), some(table))
    position = f"penstock.positions.{table}"
    stale = confluent_kafka.Producer(
        {
            "bootstrap.servers": broker.servers,
            "transactional.id": f"stale/{table}",
            # The broker's own timeout is longer than the test.
            "transaction.timeout.ms": 900_000,
        }
    )
    stale.init_transactions(WAIT_SECONDS_MAX)
    stale.begin_transaction()
    stale.produce(position, b'{"number": 9}', b"0/0", partition=0)
    stale.flush(WAIT_SECONDS_MAX)
    write(sink, mark(2, table), some(table))
    again: Sink = pickle.loads(pickle.dumps(sink))
    monkeypatch.setattr(kafka_connection, "OPEN_SECONDS_MAX", 1.0)
    with pytest.raises(ServerBusy, match="stays open"):
        again.open(mark(2, table), 0)
    assert again.last_number(mark(2, table), []) == 1, "the start of a run does not wait for a killed writer"
    stale.abort_transaction(WAIT_SECONDS_MAX)
    monkeypatch.undo()
    write(again, mark(2, table), some(table))
    assert len(records(broker, table)) == 14


def test_load_that_was_interrupted_after_its_commit_is_settled(broker: Kafka, table: str) -> None:
    visits, sink = target_of({"page": "int"}, (), name=table), sink_of(broker)
    assert sink.settle_load(mark(1, table), [visits]) is None
    loaded = [changes_of(visits, insert(version, page=version), origin=Origin.LOAD) for version in (7, 5)]
    write(sink, mark(1, table), *loaded, part=3)
    again: Sink = pickle.loads(pickle.dumps(sink))
    assert again.settle_load(mark(1, table), [visits]) == 7
    assert again.settle_load(mark(2, table), [visits]) is None
    assert again.settle_load(BatchMark(table, "2", 1), [visits]) is None, "the pipeline was reset"
    assert sink_of(broker, exactly_once=False).settle_load(mark(1, table), [visits]) is None
    other = target_of({"page": "int"}, (), name="shop.others")
    with pytest.raises(OptionInvalid, match=r"shop\.others does not have it"):
        again.settle_load(mark(1, table), [visits, other])


@pytest.mark.deep(guard="tests/unit/test_restored_state.py::test_state_older_than_its_target_is_refused")
def test_state_older_than_its_topics_is_refused(broker: Kafka, tmp_path: Path) -> None:
    settings = notes_pipeline(tmp_path, {"kafka": {"servers": broker.servers, "format": "json"}})
    run_here(settings)
    before = len(records(broker, "shop.notes"))
    assert before == 79
    restore_before_last_batch(settings, is_begun=True)
    assert run_here(settings).number == 2, "a commit that was not recorded is repeated"
    restore_before_last_batch(settings, is_begun=False)
    with pytest.raises(StateOutdated, match="the target has batch 2 of the pipeline notes"):
        run_here(settings)
    assert len(records(broker, "shop.notes")) == before


# --- What goes wrong --------------------------------------------------------------------------


@pytest.mark.deep(guard="tests/integration/test_sink_http.py::test_refusal_is_reported_by_its_kind")
def test_oversized_message_is_reported(broker: Kafka, table: str) -> None:
    target = target_of({"id": "int", "body": Column("body", "longtext", "utf8mb4")}, name=table)
    for exactly_once in (True, False):
        sink = sink_of(broker, exactly_once=exactly_once, compression="none")
        sink.prepare(target, Evolution.EVOLVE)
        writer = sink.open(mark(1, table), 0)
        with pytest.raises(OptionInvalid, match="large") as refused:
            # The broker may refuse the message before everything is sent.
            write_to_end(writer, changes_of(target, insert(1, id=1, body="x" * 2_000_000)))
        assert "max.message.bytes" in str(refused.value.hint)
        writer.abort()


@pytest.mark.deep(guard="tests/integration/test_sink_http.py::test_refusal_is_reported_by_its_kind")
def test_too_few_brokers_for_the_replicas_is_retryable(broker: Kafka, table: str) -> None:
    with pytest.raises(ServerBusy) as refused:
        write(sink_of(broker, replicas=2), mark(1, table), some(table))
    assert "replicas" in (refused.value.hint or "")


def test_missing_broker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_connection, "ANSWER_SECONDS_MAX", 0.5)
    sink = make_sink("kafka", settings_of("kafka")(**{"servers": "127.0.0.1:1"}))
    with pytest.raises(ConnectionLost, match="list topics"):
        sink.check()


NO_BROKER = "127.0.0.1:1"


@pytest.mark.parametrize(
    "settings", [{"key": ("nothing",)}, {"partition_by": ("nothing",)}, {"topic": "a b"}, {"topic": "{no}"}]
)
def test_settings_that_do_not_fit_a_table_are_refused(settings: dict[str, Any], table: str) -> None:
    sink = make_sink("kafka", settings_of("kafka")(**{"servers": NO_BROKER} | settings))
    with pytest.raises(OptionInvalid):
        sink.plan(target_of(ORDERS, name=table), Evolution.EVOLVE)


def test_single_column_needs_no_list_and_secrets_are_hidden() -> None:
    kafka = settings_of("kafka")
    this_sink = kafka(**{"servers": NO_BROKER, "key": "status", "partition_by": "id"})
    assert (this_sink.key, this_sink.partition_by) == (("status",), ("id",))  # type: ignore[attr-defined]
    with pytest.raises(ValidationError, match="show in logs"):
        kafka(**{"servers": NO_BROKER, "options": {"sasl.password": "hidden"}})
    sink = make_sink("kafka", kafka(**{"servers": NO_BROKER, "user": "penstock", "password": "hidden"}))
    assert "hidden" not in repr(sink) + repr(sink.__dict__)


@pytest.mark.deep(
    guard="tests/conformance/test_sinks.py::test_planning_creates_nothing_and_a_prepared_table_needs_nothing"
)
def test_plan_names_the_missing_topic(broker: Kafka, table: str) -> None:
    target = target_of(ORDERS, name=table)
    sink = sink_of(broker)
    assert sink.check() == ()
    assert sink.plan(target, Evolution.EVOLVE) == (f"make topic {table}",)
    sink.prepare(target, Evolution.EVOLVE)
    assert sink.plan(target, Evolution.EVOLVE) == ()


def test_null_topic_of_a_row_stops_the_batch(table: str) -> None:
    settings = settings_of("kafka")(servers=NO_BROKER, topic="{status}", exactly_once=False)
    writer = make_sink("kafka", settings).open(mark(1, table), 0)
    with pytest.raises(OptionInvalid, match="null"):
        writer.write(changes_of(target_of(ORDERS, name=table), insert(1, id=1)))
    writer.abort()


# --- A real source ----------------------------------------------------------------------------


@pytest.mark.deep(guard="tests/conformance/test_sinks_sql.py::test_busy_source_is_mirrored")
def test_topics_hold_the_source_rows_under_their_keys(
    broker: Kafka, table: str, mysql_server: Server, pytestconfig: pytest.Config
) -> None:
    corpus = logged_corpus(mysql_server, pytestconfig).into(table.replace(".", "_"), keyless=False)
    sink = sink_of(broker, format="json", tombstones=True, partitions=4)
    corpus.prepare(sink)
    size = -(-len(corpus.changes) // 3)
    for number, start in enumerate(range(0, len(corpus.changes), size), 1):
        for _ in range(2):
            # Each batch is written twice, as if the process had died before recording the batch.
            again = pickle.loads(pickle.dumps(sink))
            write_batch(again, corpus.changes[start : start + size], number)
    for name, target in each(corpus.targets.items()):
        versions: dict[bytes | None, list[Any]] = defaultdict(list)
        for record in records(broker, str(target.name)):
            if record.value is not None:
                versions[record.key].append((record.message["commit_version"], record.message["row"]))
        assert all(places == sorted(places) for places in each(versions.values()))
        binary = [column.name for column in target.columns if "binary" in column.type_text]
        held = rows_held(broker, str(target.name), binary)
        assert_same(corpus.rows[name], held, key=target.primary_key)


# --- Broker failures --------------------------------------------------------------------------


@pytest.mark.deep(guard="tests/conformance/test_sinks_sql.py::test_batch_survives_a_lost_connection")
def test_killed_broker_loses_and_duplicates_nothing(broker: Kafka, table: str) -> None:
    sink = sink_of(broker)
    write(sink, mark(1, table), some(table))
    writer = sink.open(mark(2, table), 0)
    writer.write(some(table))
    broker.kill()
    coming = Thread(target=broker.start)
    coming.start()
    try:
        writer.finish()
    except TransientError:
        writer.abort()
    coming.join()

    def is_written() -> bool:
        try:
            write(pickle.loads(pickle.dumps(sink)), mark(2, table), some(table))
        except TransientError:
            return False
        return True

    # The batch is retried whether it was committed or not.
    wait_until(is_written)
    assert len(records(broker, table)) == 14
