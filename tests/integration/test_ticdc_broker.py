# SPDX-License-Identifier: Apache-2.0
"""TiCDC's messages in a real Kafka broker, which is killed while they are read."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.own_servers import started
from tests.support.ticdc.reading import changes, running_topic_capture, wait_for_ts
from tests.support.ticdc.topics import PARTITIONS, Topics, row
from tools.kafka import Kafka

TOPIC, ROWS = "ticdc", 200


@pytest.fixture
def broker(missing_part: MissingPart) -> Iterator[Kafka]:
    with started(Kafka(partitions=PARTITIONS), "Kafka", missing_part) as kafka:
        yield kafka


@pytest.mark.deep(
    guard="tests/unit/test_ticdc_kafka.py::test_restarted_capture_continues_and_drops_what_ticdc_repeats"
)
def test_broker_that_is_killed_loses_and_repeats_nothing(broker: Kafka, tmp_path: Path) -> None:
    topics = Topics(broker.servers)
    for key in range(ROWS):
        topics.send(TOPIC, key % PARTITIONS, row(100 + key // 2, "INSERT", key))
    topics.watermark(TOPIC, 100 + ROWS)
    last_ts = 100 + (ROWS - 1) // 2
    with running_topic_capture(topics.source(TOPIC), tmp_path) as capture:
        wait_for_ts(capture, last_ts)
        broker.kill()
        broker.start()
        topics.send(TOPIC, 0, row(last_ts, "INSERT", ROWS - 1), row(1000, "INSERT", 1000))
        topics.watermark(TOPIC, 1001)
        wait_for_ts(capture, 1000)
    expected = [(100 + key // 2, "insert", "shop.t", key, "n") for key in range(ROWS)]
    assert sorted(changes(tmp_path)) == [*expected, (1000, "insert", "shop.t", 1000, "n")]
