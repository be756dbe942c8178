# SPDX-License-Identifier: Apache-2.0
"""Changes as messages in Kafka topics: exactly once, and in order for each key."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, field_validator

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import Secret
from penstock.settings.values import Seconds
from penstock.sinks.kafka import connection
from penstock.sinks.kafka.connection import Cluster
from penstock.sinks.kafka.writer import KafkaWriter, TransactionalProducer, topic_of
from penstock.sinks.messages import Format, key_of
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Sink, Spread, Writer

EXTRA = "kafka"


class Settings(Cluster):
    """Which topics, and the form of their messages."""

    topic: str = Field(
        default="{database}.{table}", description="the topic, a template with names and columns in braces"
    )
    format: Format = Field(default="debezium", description="the message format; json is Penstock's own")
    key: Literal["primary_key", "none"] | tuple[str, ...] = Field(
        default="primary_key", description="the message key: primary_key, none, or a list of columns"
    )
    partition_by: tuple[str, ...] = Field(
        default=(), description="columns that determine the partition; default: the key"
    )
    order: Literal["key", "table", "commit"] = Field(
        default="key",
        description="the scope of ordering: key: changes of each key; table: changes of each table;"
        " commit: all changes",
    )
    tombstones: bool | None = Field(
        default=None, description="whether a delete is followed by a tombstone; default: true for debezium"
    )
    exactly_once: bool = Field(
        default=True,
        description="whether each batch is one transaction; consumers need isolation.level=read_committed",
    )
    transaction_timeout: Seconds = Field(
        default=900.0, gt=0, description="the longest a batch may take; brokers allow 15m by default"
    )
    positions: str | None = Field(
        default=None, description="the topic for batch numbers; default: penstock.positions.<pipeline>"
    )
    partitions: int | None = Field(default=None, ge=1, description="partitions of new topics")
    replicas: int | None = Field(default=None, ge=1, description="replicas of new topics")
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "lz4"

    @field_validator("key", "partition_by", mode="before")
    @classmethod
    def _list_of_columns(cls, value: Any) -> Any:
        """Accept a single column without a list."""
        return (value,) if isinstance(value, str) and value not in ("primary_key", "none") else value


def make(settings: Settings) -> "KafkaSink":
    """Create the sink."""
    return KafkaSink(settings)


class KafkaSink(Sink):
    """Writes messages."""

    kind = "kafka"
    keeps_connections = True
    keeps_state = False
    shares_columns = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._password: Secret | None = settings.secret()
        self.delivery = Delivery.EXACTLY_ONCE if settings.exactly_once else Delivery.AT_LEAST_ONCE
        self.spread = _spread(settings)
        # Producers without a current batch, by transactional id.
        self._idle: dict[str | None, TransactionalProducer] = {}
        # The admin client that `begin` uses for each batch.
        self._topics: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": {}, "_topics": None}

    @property
    def tombstones(self) -> bool:
        """Whether a delete is followed by a tombstone."""
        setting = self.settings.tombstones
        return self.settings.format.startswith("debezium") if setting is None else setting

    def client(self) -> dict[str, Any]:
        """Return the options of all clients. They contain the password, so pass them only to the library."""
        return self.settings.client(self._password)

    def key(self, target: Target) -> tuple[str, ...]:
        """Return the columns of a target's keys. Raises OptionInvalid for an unknown column."""
        if self.settings.key == "none":
            return ()
        columns = (
            key_of(target, self.settings.format) if self.settings.key == "primary_key" else self.settings.key
        )
        for name in (*columns, *self.settings.partition_by):
            if name not in target.column_names:
                raise OptionInvalid(
                    f"{target.name} has no column {name!r} for the key of its messages",
                    hint=f"It has {', '.join(target.column_names)}",
                )
        return tuple(columns)

    def check(self) -> Sequence[Finding]:
        with connection.translate_errors("list topics"):
            connection.admin(self.client()).list_topics(timeout=connection.ANSWER_SECONDS_MAX)
        return ()

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        self.key(target)
        topic = topic_of(self.settings.topic, target)
        if topic is None or connection.partitions_of(connection.admin(self.client()), topic):
            return ()
        return (f"make topic {topic}",)

    def prepare(self, target: Target, evolution: Evolution) -> None:
        self.key(target)
        topic = topic_of(self.settings.topic, target)
        if topic is not None:
            self.make(topic)

    def make(self, topic: str) -> int:
        """Create a topic if it does not exist, and return its number of partitions."""
        client = connection.admin(self.client())
        return connection.create_topic(client, topic, self.settings.partitions, self.settings.replicas, {})

    def begin(self, targets: Iterable[Target]) -> Mapping[str, Any]:
        """Read the topics' partition counts, so that a batch partitions every key by the same count."""
        counts = connection.partition_counts(self._topics_client())
        topics = {topic_of(self.settings.topic, target) for target in targets}
        return {"partitions": {topic: counts[topic] for topic in topics if topic and counts.get(topic)}}

    def open(self, mark: BatchMark, part: int) -> Writer:
        return KafkaWriter(self, mark, part)

    def take_producer(self, identity: str | None) -> TransactionalProducer | None:
        """Return a producer without a current batch, None if there is none."""
        return self._idle.pop(identity, None)

    def keep(self, identity: str | None, producer: TransactionalProducer) -> None:
        """Keep a producer for the next batch in this process."""
        self._idle[identity] = producer

    def close(self) -> None:
        self._idle.clear()
        self._topics = None

    def _topics_client(self) -> Any:
        if self._topics is None:
            self._topics = connection.admin(self.client())
        return self._topics


def _spread(settings: Settings) -> Spread:
    if settings.order == "commit":
        return Spread.WHOLE
    # Rows with the same message key are in one part only if it is the table's own key.
    by_row = settings.key == "primary_key" and not settings.partition_by
    return Spread.KEYS if settings.order == "key" and by_row else Spread.TABLES
