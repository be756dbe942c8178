# SPDX-License-Identifier: Apache-2.0
"""The message formats that users can choose, on a real broker: flat rows, headers, claim checks, outboxes."""

import json
from collections import defaultdict
from itertools import count
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from tests.integration.test_sink_kafka import (
    ORDERS,
    broker,  # noqa: F401
    mark,
    sink_of,
    some,
    write,
)
from tests.support.pipeline.changes_made import changes_of, insert, target_of
from tests.support.sinks.kafka_reading import consumer, records
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.kafka import Kafka

_numbers = count(1)


@pytest.fixture
def table() -> str:
    """A fresh name for a table and its topic."""
    return f"forms.t{next(_numbers)}"


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_flat_rows_have_columns_and_fields")
@pytest.mark.parametrize(
    ("deletes", "operations"),
    [
        ("tombstone", {b'{"id":1}': ["c", "u", None], b'{"id":2}': ["c", None]}),
        ("rewrite", {b'{"id":1}': ["c", "u", "d"], b'{"id":2}': ["c", "d"]}),
        ("rewrite-with-tombstone", {b'{"id":1}': ["c", "u", "d", None], b'{"id":2}': ["c", "d", None]}),
        ("drop", {b'{"id":1}': ["c", "u"], b'{"id":2}': ["c"]}),
    ],
)
def test_each_choice_of_flat_deletes(
    broker: Kafka,  # noqa: F811
    table: str,
    deletes: str,
    operations: dict[bytes, list[str | None]],
) -> None:
    forms = {"flat": True, "fields": ["op"], "deletes": deletes}
    write(sink_of(broker, debezium=forms), mark(1, table), some(table))
    by_key: dict[bytes | None, list[Any]] = defaultdict(list)
    for record in records(broker, table):
        by_key[record.key].append(record.message and record.message["__op"])
    assert by_key == operations


@pytest.mark.deep(guard="tests/unit/test_sink_messages.py::test_rows_become_messages_of_their_kind")
def test_headers_name_table_and_operation(
    broker: Kafka,  # noqa: F811
    table: str,
) -> None:
    write(sink_of(broker, headers=True, partitions=1), mark(1, table), some(table))
    database, _, name = table.partition(".")
    reader = consumer(broker, "read_committed")
    try:
        reader.assign([confluent_kafka.TopicPartition(table, 0, 0)])
        received = [reader.poll(WAIT_SECONDS_MAX) for _ in records(broker, table)]
    finally:
        reader.close()
    headers = [dict(message.headers()) for message in received]
    assert {(header["__db"], header["__table"]) for header in headers} == {(database.encode(), name.encode())}
    # Tombstones have the headers of their delete.
    assert [header["__op"] for header in headers] == [b"c", b"u", b"d", b"d", b"c", b"d", b"d"]


@pytest.mark.deep(guard="tests/unit/test_sink_claim_check.py::test_reference_names_the_file_of_the_message")
def test_message_above_the_brokers_limit_becomes_a_reference(
    broker: Kafka,  # noqa: F811
    table: str,
    tmp_path: Path,
) -> None:
    target = target_of(ORDERS, name=table)
    large = changes_of(target, insert(1, id=1, status="small"), insert(2, id=2, status="x" * 5_000_000))
    write(
        sink_of(broker, format="json", partitions=1, claim_check={"above": 500_000, "path": str(tmp_path)}),
        mark(1, table),
        large,
    )
    small, reference = [record.message for record in records(broker, table)]
    assert small["after"]["status"] == "small"
    stored = json.loads(Path(reference["claim_check"]["path"]).read_bytes())
    assert stored["after"] == {**stored["after"], "id": 2, "status": "x" * 5_000_000}


@pytest.mark.deep(
    guard="tests/unit/test_sink_outbox.py::test_insert_becomes_its_payload_with_key_and_headers"
)
def test_outbox_routes_each_event_to_the_topic_of_its_aggregate(
    broker: Kafka,  # noqa: F811
    table: str,
) -> None:
    columns = {"id": "int", "aggregatetype": "varchar(9)", "aggregateid": "int", "payload": "varchar(9)"}
    rows = [
        {"id": number, "aggregatetype": kind, "aggregateid": number % 2, "payload": f'"{number}"'}
        for number, kind in enumerate(("order", "customer", "order", "order"))
    ]
    changes = changes_of(
        target_of(columns, name=table), *(insert(number, **row) for number, row in enumerate(rows, 1))
    )
    sink = sink_of(broker, topic=f"{table}.{{aggregatetype}}", outbox={}, partitions=2)
    write(sink, mark(1, table), changes)
    by_key: dict[tuple[str, bytes | None], list[Any]] = defaultdict(list)
    for record in records(broker, f"{table}.order", f"{table}.customer"):
        by_key[record.topic.removeprefix(f"{table}."), record.key].append(record.message)
    assert by_key == {("order", b"0"): ["0", "2"], ("order", b"1"): ["3"], ("customer", b"1"): ["1"]}
