# SPDX-License-Identifier: Apache-2.0
"""TiCDC's messages in Kafka become whole transactions in commit order, despite repetitions and restarts."""

import json
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.capture.status import State
from penstock.errors import (
    EventMalformed,
    EventUnsupported,
    LimitExceeded,
    PenstockError,
    SequenceGap,
    ValueMalformed,
)
from penstock.logstore.epochs import unseal_json
from penstock.mysql.start import StartAt
from penstock.settings.daemon import InstanceSettings
from penstock.settings.ticdc import TicdcSettings, kafka_source
from penstock.ticdc.kafka_capture import START_FILE
from penstock.ticdc.kafka_messages import KafkaMessages, SinkRow
from penstock.ticdc.kafka_precheck import precheck_topics
from penstock.ticdc.kafka_reader import KafkaReader, KafkaStart, open_reader
from penstock.ticdc.transactions import SinkTransaction
from penstock.tidb.messages import LOGICAL_BITS
from tests.support.suite.patience import wait_until
from tests.support.ticdc.reading import changes, running_topic_capture, statements, wait_for_ts
from tests.support.ticdc.topics import TYPES, Topics, row, statement, watermark

CREATE = "CREATE TABLE t (...)"


@pytest.fixture(scope="module")
def topics() -> Topics:
    return Topics()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic for this test only."""
    return str(request.node.name).replace("[", "-").replace("]", "")[-80:]


def test_partitions_become_a_log_in_commit_order(topics: Topics, topic: str, tmp_path: Path) -> None:
    topics.send(topic, 0, statement(100, CREATE), row(110, "INSERT", 1), row(130, "DELETE", 2, "m"))
    topics.send(topic, 1, row(110, "INSERT", 2, "m"), row(120, "UPDATE", 1, "é", "n"))
    topics.watermark(topic, 125)
    with running_topic_capture(topics.source(topic), tmp_path) as capture:
        wait_for_ts(capture, 120)
        # The transaction 130 is incomplete, so it is not in the log.
        topics.send(topic, 2, row(130, "INSERT", 3, "x"))
        topics.watermark(topic, 131)
        wait_for_ts(capture, 130)
        assert capture.snapshot().server == topics.source(topic)
    assert statements(tmp_path) == [CREATE]
    assert changes(tmp_path) == [
        (110, "insert", "shop.t", 1, "n"),
        (110, "insert", "shop.t", 2, "m"),
        (120, "update_preimage", "shop.t", 1, "n"),
        (120, "update_postimage", "shop.t", 1, "é"),
        (130, "delete", "shop.t", 2, "m"),
        (130, "insert", "shop.t", 3, "x"),
    ]


def test_restarted_capture_continues_and_drops_what_ticdc_repeats(
    topics: Topics, topic: str, tmp_path: Path
) -> None:
    first = statement(100, CREATE), row(110, "INSERT", 1), row(120, "UPDATE", 1, "b", "n")
    topics.send(topic, 0, *first)
    topics.watermark(topic, 121)
    with running_topic_capture(topics.source(topic), tmp_path) as capture:
        wait_for_ts(capture, 120)
        recorded = tmp_path / START_FILE
        at_start = recorded.read_bytes()
        topics.send(topic, 0, row(130, "INSERT", 2))
        topics.watermark(topic, 131)
        wait_for_ts(capture, 130)
    # Simulate a crash before the offsets were recorded again. TiCDC repeats an update as a delete and an
    # insert.
    assert recorded.read_bytes() != at_start
    recorded.write_bytes(at_start)
    topics.send(topic, 0, *first, row(130, "INSERT", 2), row(140, "UPDATE", 2, "c", "n"))
    topics.send(topic, 0, row(140, "DELETE", 2), row(140, "INSERT", 2, "c"))
    topics.watermark(topic, 141)
    with running_topic_capture(topics.source(topic), tmp_path) as capture:
        wait_for_ts(capture, 140)
    assert statements(tmp_path) == [CREATE]
    assert [change[:2] for change in changes(tmp_path)] == [
        (110, "insert"),
        (120, "update_preimage"),
        (120, "update_postimage"),
        (130, "insert"),
        (140, "update_preimage"),
        (140, "update_postimage"),
    ]


def test_latest_starts_with_the_first_whole_transaction(topics: Topics, topic: str, tmp_path: Path) -> None:
    for partition in range(4):
        topics.send(topic, partition, row(110, "INSERT", partition))
    topics.watermark(topic, 111)
    with running_topic_capture(topics.source(topic), tmp_path, StartAt()) as capture:
        wait_until(lambda: capture.snapshot().state is State.CONNECTING)

        def has_begun() -> bool:
            topics.send(topic, 0, row(118, "INSERT", 8)).watermark(topic, 119)
            return capture.snapshot().state is State.RUNNING

        wait_until(has_begun)
        later = int(time.time() * 1000) + 3_600_000 << LOGICAL_BITS
        topics.send(topic, 0, row(later, "INSERT", 9))
        topics.watermark(topic, later + 1)
        wait_for_ts(capture, later)
    # TiCDC may have sent some rows of the first transaction earlier, so the log does not contain this
    # transaction.
    assert changes(tmp_path) == [(later, "insert", "shop.t", 9, "n")]


def test_offset_that_is_no_longer_there_is_a_gap(topics: Topics, topic: str, tmp_path: Path) -> None:
    topics.send(topic, 0, row(110, "INSERT", 1)).watermark(topic, 111)
    with running_topic_capture(topics.source(topic), tmp_path) as capture:
        wait_for_ts(capture, 110)
    other = Topics()
    other.send(topic, 0, row(110, "INSERT", 1))
    with closing(open_reader(other.source(topic), TicdcSettings())) as reader:
        recorded = unseal_json((tmp_path / START_FILE).read_bytes())["offsets"]
        offsets = {(name, number): offset for name, number, offset in recorded}
        with pytest.raises(SequenceGap, match=r"partition 0 of .* has the offsets 0 to 1, and not 2"):
            reader.resume(KafkaStart(0, offsets), 110)


def test_backlog_above_the_bound_is_refused_with_the_partition_that_waits(topics: Topics, topic: str) -> None:
    topics.send(topic, 0, *(row(110 + key, "INSERT", key) for key in range(9)))
    topics.watermark(topic, 200, 0, 1, 2)
    options = {"bootstrap.servers": topics.servers, "log_level": 0}
    with closing(KafkaReader(options, (topic,), KafkaMessages(None), held_max=1000)) as reader:
        reader.resume(reader.find_start(None, is_latest=False), 0)
        with pytest.raises(LimitExceeded, match="bytes wait for a watermark of partition"):
            list(_all_of(reader))


def _all_of(reader: KafkaReader) -> Iterator[SinkTransaction]:
    while True:
        yield from reader.read()


def test_precheck_names_what_stops_the_instance(topics: Topics, topic: str) -> None:
    topics.send(topic, 0, row(110, "INSERT", 1, mysqlType={"id": "int", "name": "varchar"}))
    topics.send(topic, 1, row(111, "INSERT", 1, pkNames=None), row(112, "INSERT", 1))
    with closing(open_reader(topics.source(topic), TicdcSettings())) as reader:
        findings = {finding.name: finding for finding in precheck_topics(reader, KafkaMessages(None))}
    assert {subject: finding.severity for subject, finding in findings.items()} == {
        "topics": "ok",
        "messages": "error",
        "key": "warning",
        "watermarks": "warning",
    }
    assert "content-compatible" in (findings["messages"].statement or "")


def test_precheck_waits_for_the_first_messages_of_every_partition(
    topics: Topics, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics.send(topic, 0, row(110, "INSERT", 1))
    topics.send(topic, 1, row(111, "INSERT", 2))
    with closing(open_reader(topics.source(topic), TicdcSettings())) as reader:
        consume, answers = reader._consume, count()
        # Simulates a broker that responds late for one partition: every second read returns nothing.
        monkeypatch.setattr(reader, "_consume", lambda: consume() if next(answers) % 2 else [])
        assert len(list(reader.first_contents())) == 2


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (
            row(1, "INSERT", 1, mysqlType={"id": "int", "name": "bit"}),
            EventUnsupported,
            "without its length",
        ),
        (row(1, "INSERT", 1, mysqlType={"id": "int", "name": "vector"}), EventUnsupported, "VECTOR"),
        (row(1, "INSERT", 1, mysqlType=None), EventMalformed, "no mysqlType"),
        (row(1, "INSERT", 1, mysqlType={"name": "varchar(9)"}), EventMalformed, "'id' has no type"),
        (row(1, "INSERT", 1, mysqlType={"id": "int"}, pkNames=["id"]), EventUnsupported, "lacks columns"),
        (row(1, "INSERT", 1, _tidb=None, mysqlType=TYPES), EventUnsupported, "no commit timestamp"),
        (watermark(0), EventMalformed, "watermark"),
        (statement(5, ""), EventMalformed, "statement"),
        ("", EventMalformed, "not JSON"),
    ],
)
def test_message_of_another_form_is_refused(content: str, error: type[PenstockError], text: str) -> None:
    with pytest.raises(error, match=text):
        KafkaMessages(None).read(content.encode())


def test_fraction_that_does_not_fit_its_type_is_refused() -> None:
    text = "2026-11-23 10:00:00.120"
    for declared in ("datetime(2)", "datetime(3)"):
        KafkaMessages(None).read(row(1, "INSERT", 1, text, mysqlType=TYPES | {"name": declared}).encode())
    cut = row(1, "INSERT", 1, text, mysqlType=TYPES | {"name": "datetime"})
    with pytest.raises(ValueMalformed, match=r"more digits than datetime"):
        KafkaMessages(None).read(cut.encode())


def test_deleted_row_with_its_key_only_is_refused() -> None:
    messages = KafkaMessages(None)
    messages.read(row(1, "INSERT", 1).encode())
    key_only = json.loads(row(2, "DELETE", 1)) | {"data": [{"id": "1"}], "mysqlType": {"id": "int"}}
    with pytest.raises(EventUnsupported, match="its key only"):
        messages.read(json.dumps(key_only).encode())


def test_columns_in_another_order_are_of_the_same_table() -> None:
    messages = KafkaMessages(None)
    turned = row(1, "INSERT", 1, mysqlType=dict(reversed(TYPES.items())))
    first, second = messages.read(row(1, "INSERT", 1).encode()), messages.read(turned.encode())
    assert isinstance(first, SinkRow)
    assert first == second


@pytest.mark.parametrize(
    "text",
    ["ticdc+kafka://broker:9092", "ticdc+kafka:///topic", "ticdc+kafka://u:p@b/t", "ticdc+kafka://b/t,,u"],
)
def test_source_without_brokers_and_topic_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="ticdc"):
        InstanceSettings.model_validate({"source": text})


def test_source_names_brokers_and_topics() -> None:
    assert kafka_source("ticdc+kafka://a:9092,b:9092/t,u") == ("a:9092,b:9092", ("t", "u"))
