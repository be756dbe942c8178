# SPDX-License-Identifier: Apache-2.0
"""A Kafka cluster for the sink: settings, translated errors, topics, and stored batch numbers."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionLost,
    LeaseLost,
    OptionInvalid,
    PenstockError,
    ServerBusy,
    TlsFailed,
)
from penstock.model import Secret
from penstock.retry import Backoff, Retry
from penstock.settings.values import SecretText, Section, one_secret
from penstock.sinks.sink import extra_missing

ANSWER_SECONDS_MAX = 30.0
# How long to wait for an open transaction of another producer.
OPEN_SECONDS_MAX = 30.0
# Records read from the end of a position topic before the whole topic is read.
_RECENT_RECORDS = 200
# A partition that was made just now has no leader yet.
_BACKOFF = Backoff(first=0.02, longest=0.5)


class Cluster(Section):
    """The cluster's address and the sink's account."""

    servers: str = Field(description="bootstrap brokers: host:port, separated by commas")
    user: str | None = Field(default=None, description="the account (SASL)")
    password: SecretText | None = None
    password_file: Path | None = Field(default=None, description="a file with the password")
    password_env: str | None = Field(default=None, description="an environment variable with the password")
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = Field(
        default="SCRAM-SHA-512", description="the SASL mechanism"
    )
    tls: bool = Field(default=False, description="whether to connect over TLS")
    ca: Path | None = Field(default=None, description="a PEM file with the certificate authorities to trust")
    options: dict[str, str] = Field(
        default_factory=dict, description="other librdkafka options, such as linger.ms: '50'"
    )

    @field_validator("password_env")
    @classmethod
    def _check_single_password(cls, variable: str | None, validation: ValidationInfo) -> str | None:
        one_secret(
            validation.data.get("password"), validation.data.get("password_file"), variable, "password"
        )
        return variable

    @field_validator("options")
    @classmethod
    def _no_secrets(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if "password" in name or name.endswith((".pem", "secret")):
                raise ValueError(f"{name} would show in logs: name a file, or use password_file")
        return options

    def secret(self) -> Secret | None:
        """Read and return the password, None if none is set. Raises ValueError."""
        return one_secret(self.password, self.password_file, self.password_env, "password")

    def client(self, password: Secret | None) -> dict[str, Any]:
        """Return the options of all clients. They contain the password, so pass them only to the library."""
        security = f"{'SASL_' if self.user else ''}{'SSL' if self.tls or self.ca else 'PLAINTEXT'}"
        client_options: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "client.id": "penstock",
            "security.protocol": security,
            "log_level": 0,
        }
        if self.ca is not None:
            client_options["ssl.ca.location"] = str(self.ca)
        if self.user is not None:
            client_options |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.user,
                "sasl.password": password.reveal() if password else "",
            }
        return client_options | self.options


def library() -> Any:
    """Return the library. Raises DependencyMissing."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as missing:
        raise extra_missing("confluent-kafka", "kafka") from missing
    return confluent_kafka


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Translate the library's exceptions into Penstock errors. `what` describes the operation."""
    kafka = library()
    try:
        yield
    except kafka.KafkaException as problem:
        raise error_of(problem.args[0], what) from None
    except kafka.KafkaError as problem:
        raise error_of(problem, what) from None


# The library's error codes, the Penstock error for each, and its hint.
_BY_CODE: tuple[tuple[tuple[str, ...], type[PenstockError], str], ...] = (
    (
        ("_FENCED", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED"),
        LeaseLost,
        "Another process writes this part of the pipeline now",
    ),
    (
        ("_AUTHENTICATION", "SASL_AUTHENTICATION_FAILED"),
        AuthenticationFailed,
        "Check user, password and mechanism of the kafka sink",
    ),
    (("_SSL",), TlsFailed, "Check tls and ca of the kafka sink"),
    (
        (
            "TOPIC_AUTHORIZATION_FAILED",
            "CLUSTER_AUTHORIZATION_FAILED",
            "GROUP_AUTHORIZATION_FAILED",
            "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        ),
        AccessDenied,
        "Run kafka-acls --add for Write and Describe, on topics and on transactional ids penstock/*",
    ),
    (
        ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"),
        OptionInvalid,
        "Raise max.message.bytes of the topic, and message.max.bytes under options of the kafka sink",
    ),
    (
        (
            "TOPIC_EXCEPTION",
            "_INVALID_ARG",
            "INVALID_CONFIG",
            "INVALID_TRANSACTION_TIMEOUT",
            "POLICY_VIOLATION",
        ),
        OptionInvalid,
        "Check the settings of the kafka sink",
    ),
    (
        # The topic is growing or was recreated, and brokers learn of it one after the other.
        ("_UNKNOWN_PARTITION",),
        ServerBusy,
        "The partitions of the topic are changing: the next try takes their new number",
    ),
    (
        # Brokers that are starting or considered dead do not count as replicas.
        ("INVALID_REPLICATION_FACTOR",),
        ServerBusy,
        "Check that all brokers take part, and that replicas of the kafka sink is not more than there are",
    ),
    (
        ("_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE", "_TIMED_OUT", "_MSG_TIMED_OUT"),
        ConnectionLost,
        "Check that the brokers run, and servers of the kafka sink",
    ),
)


def error_of(problem: Any, what: str) -> PenstockError:
    """Return the Penstock error for an error of the library."""
    codes = library().KafkaError
    message = f"Kafka: {what}: {problem.str()}"
    for names, error, hint in _BY_CODE:
        if problem.code() in [getattr(codes, name) for name in names]:
            return error(message, hint=hint)
    return ServerBusy(message, hint="Look at the brokers' log if it stays")


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

    None means the cluster's default. Another client may create it at the same time. Raises Penstock errors.
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
    client: Mapping[str, Any], topic: str, keys: Mapping[int, bytes]
) -> dict[int, dict[str, Any]]:
    """Return what a position topic stores under a key of each partition, without those that have nothing.

    Reads only committed records, so an open transaction has to end first. The transaction of this part's last
    writer has ended, but a writer from before a reset may have died just now. Raises Penstock errors,
    ServerBusy if a transaction stays open.
    """
    kafka = library()
    options = dict(client) | {
        "group.id": "penstock-positions",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
        # A broker answers the requests of a connection in turn, and a fetch waits for records.
        "fetch.wait.max.ms": 10,
    }
    records = {}
    with translate_errors(f"position topic {topic}"):
        consumer = kafka.Consumer(options | {"isolation.level": "read_committed"})
        everything = kafka.Consumer(options | {"isolation.level": "read_uncommitted"})
        try:
            for partition, key in keys.items():
                record = _stored_record(consumer, everything, topic, partition, key)
                if record is not None:
                    records[partition] = record
        finally:
            consumer.close()
            everything.close()
    return records


def _stored_record(
    consumer: Any, everything: Any, topic: str, partition: int, key: bytes
) -> dict[str, Any] | None:
    kafka = library()
    topic_partition = kafka.TopicPartition(topic, partition)
    low, high = _ends(consumer, topic_partition)
    deadline = time.monotonic() + OPEN_SECONDS_MAX
    while high < _ends(everything, topic_partition)[1]:
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
