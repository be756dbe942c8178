# SPDX-License-Identifier: Apache-2.0
"""A Kafka cluster for the sink: settings, topics, and stored batch numbers."""

import json
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from penstock.errors import ConnectionLost, ServerBusy
from penstock.kafka_library import error_of as error_of
from penstock.kafka_library import library as library
from penstock.kafka_library import translate_errors as translate_errors
from penstock.model import Secret
from penstock.retry import Backoff, Retry
from penstock.settings.kafka import KafkaAccount

ANSWER_SECONDS_MAX = 30.0
# How long to wait for an open transaction of another producer.
OPEN_SECONDS_MAX = 30.0
# How many records are read from the end of a position topic. If they do not suffice, the whole topic is read.
_RECENT_RECORDS = 200
# Pauses before a retry, because a partition that was just created has no leader yet.
_BACKOFF = Backoff(first=0.02, longest=0.5)


class Cluster(KafkaAccount):
    """The cluster's address and the sink's account."""

    servers: str = Field(description="bootstrap brokers: host:port, separated by commas")

    def client(self, password: Secret | None) -> dict[str, Any]:
        """Return the options of all clients. They contain the password, so pass them only to the library."""
        return self.client_options(self.servers, password)


def admin(client: Mapping[str, Any]) -> Any:
    """Return a client for topics, which connects on first use."""
    with translate_errors("options"):
        return library().admin.AdminClient(dict(client))


def partitions_of(client: Any, topic: str) -> int:
    """Return the number of partitions of a topic, 0 if it does not exist. Raises Penstock errors."""
    codes = library().KafkaError
    with translate_errors(f"topic {topic}"):
        # List all topics, because a request for one topic by name would create it.
        metadata = client.list_topics(timeout=ANSWER_SECONDS_MAX).topics.get(topic)
        if metadata is None:
            return 0
        if metadata.error is not None and metadata.error.code() not in (
            codes.UNKNOWN_TOPIC_OR_PART,
            codes._UNKNOWN_TOPIC,
            codes._UNKNOWN_PARTITION,
            codes.LEADER_NOT_AVAILABLE,
        ):
            raise error_of(metadata.error, f"topic {topic}")
    return len(metadata.partitions)


def partition_counts(client: Any) -> dict[str, int]:
    """Return the number of partitions of each topic in the cluster. Raises Penstock errors."""
    with translate_errors("list topics"):
        topics = client.list_topics(timeout=ANSWER_SECONDS_MAX).topics
    return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}


def create_topic(
    client: Any, topic: str, partitions: int | None, replicas: int | None, config: Mapping[str, str]
) -> int:
    """Create a topic if it does not exist, and return its number of partitions.

    If `partitions` is None, the cluster's default applies. Another client may create the topic at the same
    time. Raises Penstock errors.
    """
    kafka = library()
    if (existing := partitions_of(client, topic)) > 0:
        return existing
    new = kafka.admin.NewTopic(
        topic,
        num_partitions=-1 if partitions is None else partitions,
        replication_factor=-1 if replicas is None else replicas,
        config=dict(config),
    )
    _wait(client.create_topics([new]), f"make topic {topic}", ("TOPIC_ALREADY_EXISTS",))
    return _wait_for_partitions(client, topic, 1)


def grow_topic(client: Any, topic: str, partitions: int) -> None:
    """Grow a topic to at least this many partitions. Raises Penstock errors."""
    if partitions_of(client, topic) < partitions:
        new = library().admin.NewPartitions(topic, partitions)
        _wait(client.create_partitions([new]), f"grow topic {topic}", ("INVALID_PARTITIONS",))
        _wait_for_partitions(client, topic, partitions)


def _wait(futures: Mapping[str, Any], what: str, passed: tuple[str, ...]) -> None:
    kafka = library()
    with translate_errors(what):
        for future in futures.values():
            try:
                future.result(ANSWER_SECONDS_MAX)
            except kafka.KafkaException as problem:
                if problem.args[0].code() not in [getattr(kafka.KafkaError, name) for name in passed]:
                    raise


def _wait_for_partitions(client: Any, topic: str, partitions: int) -> int:
    """Wait until the brokers report this many partitions of a topic."""
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while (count := partitions_of(client, topic)) < partitions:
        if time.monotonic() > deadline:
            raise ServerBusy(f"Kafka: topic {topic} has {count} partitions, and not {partitions} yet")
        time.sleep(0.02)
    return count


def stored_record(client: Mapping[str, Any], topic: str, partition: int, key: bytes) -> dict[str, Any] | None:
    """Return what a position topic stores under a key, None if there is nothing; see `stored_records`."""
    return stored_records(client, topic, {partition: key}).get(partition)


def stored_records(
    client: Mapping[str, Any], topic: str, keys: Mapping[int, bytes], *, waits_for_open: bool = True
) -> dict[int, dict[str, Any]]:
    """Return what a position topic stores under a key of each partition, omitting partitions without a
    record.

    Only committed records are read, so this waits for open transactions to end. This part's last writer has
    ended its own transaction, but a writer from before a reset may have died a moment ago and left one open.
    Raises ServerBusy if a transaction stays open, and other Penstock errors. Without `waits_for_open`,
    returns what was committed before the open transaction.
    """
    kafka = library()
    options = dict(client) | {
        "group.id": "penstock-positions",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        # A broker answers the requests of a connection one after another, so a fetch that waits for records
        # delays later requests.
        "fetch.wait.max.ms": 10,
    }
    records = {}
    with translate_errors(f"position topic {topic}"):
        consumer = kafka.Consumer(options | {"isolation.level": "read_committed"})
        everything = (
            kafka.Consumer(options | {"isolation.level": "read_uncommitted"}) if waits_for_open else None
        )
        try:
            for partition, key in keys.items():
                record = _stored_record(consumer, everything, topic, partition, key)
                if record is not None:
                    records[partition] = record
        finally:
            consumer.close()
            if everything is not None:
                everything.close()
    return records


def _stored_record(
    consumer: Any, everything: Any, topic: str, partition: int, key: bytes
) -> dict[str, Any] | None:
    """Return the last record under a key. `everything` is a consumer that also reads uncommitted records, or
    None. If it is given, waits until no transaction is open.
    """
    kafka = library()
    topic_partition = kafka.TopicPartition(topic, partition)
    low, high = _ends(consumer, topic_partition)
    deadline = time.monotonic() + OPEN_SECONDS_MAX
    while everything is not None and high < _ends(everything, topic_partition)[1]:
        if time.monotonic() > deadline:
            raise ServerBusy(
                f"Kafka: a transaction stays open in partition {partition} of {topic}",
                hint="It ends by itself, after the transaction_timeout of who began it",
            )
        time.sleep(0.05)
        low, high = _ends(consumer, topic_partition)
    if low == high:
        return None
    recent = max(low, high - _RECENT_RECORDS)
    stored = _last_record(consumer, kafka.TopicPartition(topic, partition, recent), key)
    if stored is None and recent > low:
        stored = _last_record(consumer, kafka.TopicPartition(topic, partition, low), key)
    return stored


def _ends(consumer: Any, topic_partition: Any) -> tuple[int, int]:
    """Return the first and the last offset of a partition, which may be new."""
    kafka = library()
    codes = kafka.KafkaError
    soon = (codes.NOT_LEADER_FOR_PARTITION, codes.LEADER_NOT_AVAILABLE, codes.UNKNOWN_TOPIC_OR_PART)
    retry = Retry("asking for a partition again", backoff=_BACKOFF, seconds=ANSWER_SECONDS_MAX)
    while True:
        try:
            low, high = consumer.get_watermark_offsets(topic_partition, timeout=ANSWER_SECONDS_MAX)
            return low, high
        except kafka.KafkaException as problem:
            if problem.args[0].code() not in soon:
                raise
            retry.wait(problem, topic=topic_partition.topic)


def _last_record(consumer: Any, start: Any, key: bytes) -> dict[str, Any] | None:
    codes = library().KafkaError
    consumer.assign([start])
    stored: dict[str, Any] | None = None
    while True:
        record = consumer.poll(ANSWER_SECONDS_MAX)
        if record is None:
            raise ConnectionLost(f"Kafka: position topic {start.topic} does not answer")
        problem = record.error()
        if problem is not None:
            if problem.code() == codes._PARTITION_EOF:
                return stored
            raise error_of(problem, f"position topic {start.topic}")
        if record.key() == key and record.value() is not None:
            stored = json.loads(record.value())
