# SPDX-License-Identifier: Apache-2.0
"""Read the content of a Kafka broker with the consumer of the client library."""

import json
from base64 import b64decode
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, NamedTuple

import confluent_kafka

from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.kafka import Kafka

CONNECTION_LOST = (
    confluent_kafka.KafkaError._TRANSPORT,
    confluent_kafka.KafkaError._ALL_BROKERS_DOWN,
    confluent_kafka.KafkaError._TIMED_OUT,
)


class Record(NamedTuple):
    """A message as a consumer receives it."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None

    @property
    def message(self) -> Any:
        return None if self.value is None else json.loads(self.value)


def consumer(broker: Kafka, isolation: str) -> confluent_kafka.Consumer:
    options = {
        "bootstrap.servers": broker.servers,
        "group.id": "tests",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        "isolation.level": isolation,
    }
    return confluent_kafka.Consumer(options)


def records(broker: Kafka, *topics: str, committed: bool = True, settled: bool = True) -> list[Record]:
    """Return all messages of topics, in the order of each partition.

    Committed messages become visible after a short delay. With `settled`, which means that no transaction is
    open, wait until they are visible.
    """
    everything = consumer(broker, "read_uncommitted")
    chosen = consumer(broker, "read_committed" if committed else "read_uncommitted")
    received: list[Record] = []
    try:
        places = []
        for topic in topics:
            there = chosen.list_topics(topic, timeout=WAIT_SECONDS_MAX).topics[topic].partitions
            assert there, f"{topic} has no partitions"
            places += [confluent_kafka.TopicPartition(topic, partition, 0) for partition in there]
        if settled:
            wait_until(
                lambda: all(ends(everything, position) == ends(chosen, position) for position in places)
            )
        chosen.assign(places)
        left = {(position.topic, position.partition) for position in places}
        while left:
            message = chosen.poll(WAIT_SECONDS_MAX)
            assert message is not None, "the broker does not answer"
            problem = message.error()
            if problem is None:
                received.append(Record(*read_from(message)))
            elif problem.code() == confluent_kafka.KafkaError._PARTITION_EOF:
                left.discard((message.topic(), message.partition()))
            else:
                # The error reports a slow or lost connection; the library reconnects.
                assert problem.retriable() or problem.code() in CONNECTION_LOST, problem
    finally:
        chosen.close()
        everything.close()
    return received


def ends(reader: confluent_kafka.Consumer, partition: confluent_kafka.TopicPartition) -> Any:
    return reader.get_watermark_offsets(partition, timeout=WAIT_SECONDS_MAX)


def read_from(message: Any) -> tuple[str, int, bytes | None, bytes | None]:
    return message.topic(), message.partition(), message.key(), message.value()


def rows_held(broker: Kafka, topic: str, binary: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of a topic in Penstock's JSON format, keeping the last message of each key.

    The messages of a key must be in the order of the key's changes. `binary` lists the columns that are
    encoded as base64.
    """
    held: dict[bytes | None, Any] = {}
    for record in records(broker, topic):
        if record.value is None:
            held.pop(record.key, None)
        else:
            held[record.key] = json.loads(record.value, parse_float=Decimal)["after"]
    for row in held.values():
        row.update({column: row[column] and b64decode(row[column]) for column in binary})
    return list(held.values())
