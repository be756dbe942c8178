# SPDX-License-Identifier: Apache-2.0
"""The messages that a writer of the Kafka sink passes to its producer, without a broker."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import StateOutdated
from penstock.sinks.kafka import connection
from penstock.sinks.kafka.outbox import Outbox
from penstock.sinks.kafka.sink import KafkaSink, Settings
from penstock.sinks.kafka.writer import KafkaWriter
from penstock.sinks.sink import BatchMark
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of

EVENTS = target_of({"id": "int", "tenant": "varchar(20)", "body": "varchar(5000)"}, name="shop.events")
LARGE = "x" * 4000


class KeptProducer:
    """A producer that collects its messages instead of sending them."""

    def __init__(self, last_committed: int | None = None) -> None:
        self.last_committed = last_committed
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self.partitions: list[int] = []

    def send(self, topic: str, partition: int, messages: list[dict[str, Any]], size: int) -> None:
        """Keep the messages instead of sending them."""
        self.sent += [(topic, message) for message in messages]
        self.partitions += [partition] * len(messages)

    def flush(self) -> None:
        """Do nothing: messages are kept immediately."""

    def of_topic(self, topic: str) -> list[Any]:
        """Return the JSON values of the messages of a topic, without tombstones."""
        return [json.loads(message["value"]) for to, message in self.sent if to == topic and message["value"]]


def writer_of(topics: Mapping[str, int], **settings: Any) -> tuple[KafkaWriter, KeptProducer]:
    sink = KafkaSink(Settings.model_validate({"servers": "127.0.0.1:1", "exactly_once": False, **settings}))
    producer: Any = KeptProducer()
    sink.keep(None, producer)
    mark = BatchMark("events", "1", 1, False, shared={"partitions": dict(topics)})
    return KafkaWriter(sink, mark, 0), producer


def test_headers_of_rows_in_many_topics_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    headers_of = Outbox.headers_of

    def count(outbox: Outbox, changes: Any) -> Any:
        computed.append(len(changes))
        return headers_of(outbox, changes)

    monkeypatch.setattr(Outbox, "headers_of", count)
    tenants = [f"t{number}" for number in range(5)]
    columns = {"id": "id", "key": "tenant", "payload": "body"}
    writer, producer = writer_of(dict.fromkeys(tenants, 1), topic="{tenant}", outbox=columns)
    rows = [insert(number, id=number, tenant=tenants[number % 5], body="b") for number in range(10)]
    writer.write(changes_of(EVENTS, *rows))
    assert computed == [10]
    headers = [(topic, dict(message["headers"])["id"]) for topic, message in producer.sent]
    assert sorted(headers) == sorted((tenants[n % 5], str(n).encode()) for n in range(10))


def test_batch_before_the_last_committed_one_is_refused() -> None:
    sink = KafkaSink(Settings.model_validate({"servers": "127.0.0.1:1"}))
    producer: Any = KeptProducer(last_committed=3)
    outdated, repeated = (BatchMark("events", "1", number) for number in (2, 3))
    sink.keep(f"{outdated.application}/0", producer)
    with pytest.raises(StateOutdated, match="the target has batch 3"):
        sink.open(outdated, 0)
    sink.keep(f"{repeated.application}/0", producer)
    sink.open(repeated, 0).write(changes_of(EVENTS, insert(1, id=1)))
    assert producer.sent == []


@pytest.mark.parametrize(
    ("stored", "exactly_once", "last"),
    [({0: 4, 2: 6}, True, 6), ({}, True, None), (None, True, None), ({0: 4}, False, None)],
)
def test_last_number_is_the_highest_of_all_parts(
    stored: dict[int, int] | None, exactly_once: bool, last: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def records(_client: Any, topic: str, keys: Mapping[int, bytes], **waits: bool) -> dict[int, Any]:
        assert stored is not None, "there is no topic to read"
        assert (topic, keys) == ("penstock.positions.events", {0: b"1/0", 1: b"1/1", 2: b"1/2"})
        assert waits == {"waits_for_open": False}, "the transaction of a killed writer stays open for minutes"
        return {part: {"number": number} for part, number in stored.items()}

    monkeypatch.setattr(connection, "partitions_of", lambda _client, _topic: 0 if stored is None else 3)
    monkeypatch.setattr(connection, "stored_records", records)
    sink = KafkaSink(Settings.model_validate({"servers": "127.0.0.1:1", "exactly_once": exactly_once}))
    assert sink.last_number(BatchMark("events", "1", 3), []) == last


@pytest.mark.parametrize("deletes", ["tombstone", "drop"])
def test_large_delete_that_is_not_sent_is_not_stored(tmp_path: Path, deletes: str) -> None:
    claim_check = {"above": 1024, "path": str(tmp_path / "claims")}
    writer, producer = writer_of(
        {"shop.events": 1},
        topic="{database}.{table}",
        format="debezium",
        debezium={"flat": True, "deletes": deletes},
        claim_check=claim_check,
    )
    writer.write(changes_of(EVENTS, delete(1, id=1, tenant="t", body=LARGE)))
    assert [message["value"] for _, message in producer.sent] == [None] * (deletes == "tombstone")
    assert list(tmp_path.iterdir()) == []
    writer.write(changes_of(EVENTS, insert(2, id=2, tenant="t", body=LARGE)))
    assert b"claim_check" in producer.sent[-1][1]["value"]
    assert len(list((tmp_path / "claims/shop.events").iterdir())) == 1
