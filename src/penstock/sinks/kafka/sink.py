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
from penstock.sinks.kafka.writer import KafkaWriter, Producing, topic_of
from penstock.sinks.messages import Format, key_of
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Sink, Spread, Writer

EXTRA = "kafka"


class Settings(Cluster):
    """Which topics, and what their messages are."""

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
    def _one_column(cls, given: Any) -> Any:
        """One column may stand without a list around it."""
        return (given,) if isinstance(given, str) and given not in ("primary_key", "none") else given


def make(settings: Settings) -> "KafkaSink":
    """Make the sink."""
    return KafkaSink(settings)


class KafkaSink(Sink):
    """Writes messages."""

    kind = "kafka"
    keeps_state = False
    shares_columns = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._password: Secret | None = settings.secret()
        self.delivery = Delivery.EXACTLY_ONCE if settings.exactly_once else Delivery.AT_LEAST_ONCE
        self.spread = _spread(settings)
        # Producers that are between two batches, by their transactional ids.
        self._idle: dict[str | None, Producing] = {}
        # The client for topics that `begin` asks with each batch.
        self._topics: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": {}, "_topics": None}

    @property
    def tombstones(self) -> bool:
        """Whether a delete is followed by an empty message."""
        chosen = self.settings.tombstones
        return self.settings.format.startswith("debezium") if chosen is None else chosen

    def client(self) -> dict[str, Any]:
        """Return the options of any client. The password is among them: they are for the library only."""
        return self.settings.client(self._password)

    def key(self, target: Target) -> tuple[str, ...]:
        """Return the columns of a target's keys. Raises OptionInvalid for one that it lacks."""
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
        with connection.told("list topics"):
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
        """Make a topic where there is none, and return how many partitions it has."""
        client = connection.admin(self.client())
        return connection.make_topic(client, topic, self.settings.partitions, self.settings.replicas, {})

    def begin(self, targets: Iterable[Target]) -> Mapping[str, Any]:
        """Read the partition counts of the topics: all changes of a key in a batch go by the same count."""
        counts = connection.partition_counts(self._topics_client())
        topics = {topic_of(self.settings.topic, target) for target in targets}
        return {"partitions": {topic: counts[topic] for topic in topics if topic and counts.get(topic)}}

    def open(self, mark: BatchMark, part: int) -> Writer:
        return KafkaWriter(self, mark, part)

    def producing(self, identity: str | None) -> Producing | None:
        """Return a producer that is between two batches, None where there is none."""
        return self._idle.pop(identity, None)

    def keep(self, identity: str | None, producing: Producing) -> None:
        """Keep a producer for the next batch in this process."""
        self._idle[identity] = producing

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
    # Rows that share a key of messages are together only where it is the table's own.
    by_row = settings.key == "primary_key" and not settings.partition_by
    return Spread.KEYS if settings.order == "key" and by_row else Spread.TABLES
