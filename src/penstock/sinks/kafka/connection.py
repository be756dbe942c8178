# SPDX-License-Identifier: Apache-2.0
"""A Kafka cluster as a sink has it: settings, errors by our names, topics, and the numbers that one keeps."""

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
# A transaction that another has left open is waited for so long.
OPEN_SECONDS_MAX = 30.0
# Records that are looked at from the end of a position topic before the whole of it is.
_RECENT_RECORDS = 200
# A partition that was made just now has no leader yet.
_BACKOFF = Backoff(first=0.02, longest=0.5)


class Cluster(Section):
    """Where the cluster listens, and who we are there."""

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
    def _one_password(cls, variable: str | None, others: ValidationInfo) -> str | None:
        one_secret(others.data.get("password"), others.data.get("password_file"), variable, "password")
        return variable

    @field_validator("options")
    @classmethod
    def _no_secrets(cls, options: dict[str, str]) -> dict[str, str]:
        for name in options:
            if "password" in name or name.endswith((".pem", "secret")):
                raise ValueError(f"{name} would show in logs: name a file, or use password_file")
        return options

    def secret(self) -> Secret | None:
        """Return the password, read now, None where there is none. Raises ValueError."""
        return one_secret(self.password, self.password_file, self.password_env, "password")

    def client(self, password: Secret | None) -> dict[str, Any]:
        """Return the options of any client. The password is among them: they are for the library only."""
        security = f"{'SASL_' if self.user else ''}{'SSL' if self.tls or self.ca else 'PLAINTEXT'}"
        made: dict[str, Any] = {
            "bootstrap.servers": self.servers,
            "client.id": "penstock",
            "security.protocol": security,
            "log_level": 0,
        }
        if self.ca is not None:
            made["ssl.ca.location"] = str(self.ca)
        if self.user is not None:
            made |= {
                "sasl.mechanism": self.mechanism,
                "sasl.username": self.user,
                "sasl.password": password.reveal() if password else "",
            }
        return made | self.options


def library() -> Any:
    """Return the outside part. Raises DependencyMissing."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as missing:
        raise extra_missing("confluent-kafka", "kafka") from missing
    return confluent_kafka


@contextmanager
def told(what: str) -> Iterator[None]:
    """Raise the cluster's errors inside the block by our names. `what` says what was tried."""
    kafka = library()
    try:
        yield
    except kafka.KafkaException as problem:
        raise error_of(problem.args[0], what) from None
    except kafka.KafkaError as problem:
        raise error_of(problem, what) from None


# Codes of errors by the library's names, what they are called here, and what helps.
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
        # Brokers learn one after the other that a topic has grown, or was made again with fewer partitions.
        ("_UNKNOWN_PARTITION",),
        ServerBusy,
        "The partitions of the topic are changing: the next try takes their new number",
    ),
    (
        # Brokers that start, or are thought dead, count for nobody's replicas until they are back.
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
    """Return our error for one of the library's."""
    codes = library().KafkaError
    message = f"Kafka: {what}: {problem.str()}"
    for names, error, hint in _BY_CODE:
        if problem.code() in [getattr(codes, name) for name in names]:
            return error(message, hint=hint)
    return ServerBusy(message, hint="Look at the brokers' log if it stays")


def admin(client: Mapping[str, Any]) -> Any:
    """Return a client for topics. Connects when it is used."""
    with told("options"):
        return library().admin.AdminClient(dict(client))


def partitions_of(client: Any, topic: str) -> int:
    """Return how many partitions a topic has, 0 where there is none. Raises our errors."""
    codes = library().KafkaError
    with told(f"topic {topic}"):
        # Asking for one topic by its name would make it.
        found = client.list_topics(timeout=ANSWER_SECONDS_MAX).topics.get(topic)
        if found is None:
            return 0
        if found.error is not None and found.error.code() not in (
            codes.UNKNOWN_TOPIC_OR_PART,
            codes._UNKNOWN_TOPIC,
            codes._UNKNOWN_PARTITION,
            codes.LEADER_NOT_AVAILABLE,
        ):
            raise error_of(found.error, f"topic {topic}")
    return len(found.partitions)


def partition_counts(client: Any) -> dict[str, int]:
    """Return how many partitions each topic of the cluster has. Raises our errors."""
    with told("list topics"):
        topics = client.list_topics(timeout=ANSWER_SECONDS_MAX).topics
    return {name: len(topic.partitions) for name, topic in topics.items() if topic.error is None}


def make_topic(
    client: Any, topic: str, partitions: int | None, replicas: int | None, config: Mapping[str, str]
) -> int:
    """Make a topic where there is none, and return how many partitions it has. None is the cluster's default.

    Somebody else may make it at the same time. Raises our errors.
    """
    kafka = library()
    if (there := partitions_of(client, topic)) > 0:
        return there
    new = kafka.admin.NewTopic(
        topic,
        num_partitions=-1 if partitions is None else partitions,
        replication_factor=-1 if replicas is None else replicas,
        config=dict(config),
    )
    _wait(client.create_topics([new]), f"make topic {topic}", ("TOPIC_ALREADY_EXISTS",))
    return _until(client, topic, 1)


def grow_topic(client: Any, topic: str, partitions: int) -> None:
    """Give a topic at least so many partitions. Raises our errors."""
    if partitions_of(client, topic) < partitions:
        new = library().admin.NewPartitions(topic, partitions)
        _wait(client.create_partitions([new]), f"grow topic {topic}", ("INVALID_PARTITIONS",))
        _until(client, topic, partitions)


def _wait(futures: Mapping[str, Any], what: str, passed: tuple[str, ...]) -> None:
    kafka = library()
    with told(what):
        for future in futures.values():
            try:
                future.result(ANSWER_SECONDS_MAX)
            except kafka.KafkaException as problem:
                if problem.args[0].code() not in [getattr(kafka.KafkaError, name) for name in passed]:
                    raise


def _until(client: Any, topic: str, partitions: int) -> int:
    """Wait until brokers tell of so many partitions of a topic."""
    deadline = time.monotonic() + ANSWER_SECONDS_MAX
    while (there := partitions_of(client, topic)) < partitions:
        if time.monotonic() > deadline:
            raise ServerBusy(f"Kafka: topic {topic} has {there} partitions, and not {partitions} yet")
        time.sleep(0.02)
    return there


def number_kept(client: Mapping[str, Any], topic: str, partition: int, key: bytes) -> int | None:
    """Return the batch number that a position topic keeps under a key, None where there is none.

    Committed records only. Behind a transaction that is open nobody sees them, so its end is waited for: of
    this part's last writer it is over, but one from before a reset may have died just now. Raises our errors,
    ServerBusy where it stays open.
    """
    kafka = library()
    given = dict(client) | {
        "group.id": "penstock-positions",
        "enable.auto.commit": False,
        "enable.partition.eof": True,
    }
    with told(f"position topic {topic}"):
        consumer = kafka.Consumer(given | {"isolation.level": "read_committed"})
        everything = kafka.Consumer(given | {"isolation.level": "read_uncommitted"})
        try:
            place = kafka.TopicPartition(topic, partition)
            low, high = _ends(consumer, place)
            deadline = time.monotonic() + OPEN_SECONDS_MAX
            while high < _ends(everything, place)[1]:
                if time.monotonic() > deadline:
                    raise ServerBusy(
                        f"Kafka: a transaction stays open in partition {partition} of {topic}",
                        hint="It ends by itself, after the transaction_timeout of who began it",
                    )
                time.sleep(0.05)
                low, high = _ends(consumer, place)
            recent = max(low, high - _RECENT_RECORDS)
            found = _last_number(consumer, kafka.TopicPartition(topic, partition, recent), key)
            if found is None and recent > low:
                found = _last_number(consumer, kafka.TopicPartition(topic, partition, low), key)
            return found
        finally:
            consumer.close()
            everything.close()


def _ends(consumer: Any, place: Any) -> tuple[int, int]:
    """Return the first and the last offset of a partition, which may have been made just now."""
    kafka = library()
    codes = kafka.KafkaError
    soon = (codes.NOT_LEADER_FOR_PARTITION, codes.LEADER_NOT_AVAILABLE, codes.UNKNOWN_TOPIC_OR_PART)
    retry = Retry("asking for a partition again", backoff=_BACKOFF, seconds=ANSWER_SECONDS_MAX)
    while True:
        try:
            low, high = consumer.get_watermark_offsets(place, timeout=ANSWER_SECONDS_MAX)
            return low, high
        except kafka.KafkaException as problem:
            if problem.args[0].code() not in soon:
                raise
            retry.wait(problem, topic=place.topic)


def _last_number(consumer: Any, start: Any, key: bytes) -> int | None:
    codes = library().KafkaError
    consumer.assign([start])
    found: int | None = None
    while True:
        record = consumer.poll(ANSWER_SECONDS_MAX)
        if record is None:
            raise ConnectionLost(f"Kafka: position topic {start.topic} does not answer")
        problem = record.error()
        if problem is not None:
            if problem.code() == codes._PARTITION_EOF:
                return found
            raise error_of(problem, f"position topic {start.topic}")
        if record.key() == key and record.value() is not None:
            found = int(json.loads(record.value())["number"])
