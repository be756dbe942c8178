# SPDX-License-Identifier: Apache-2.0
"""Writes changes as messages to Kafka topics: exactly once, and in order for each key."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import pyarrow.compute as pc
import structlog
from pydantic import Field, field_validator, model_validator

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, PenstockError
from penstock.model import Secret
from penstock.settings.values import Seconds
from penstock.sinks.claim_check import ClaimCheck
from penstock.sinks.kafka import connection
from penstock.sinks.kafka.connect_values import in_avro, in_json, in_protobuf
from penstock.sinks.kafka.connection import Cluster
from penstock.sinks.kafka.debezium_records import ConnectRecord, heartbeat_record
from penstock.sinks.kafka.debezium_settings import DebeziumSettings
from penstock.sinks.kafka.outbox import Outbox
from penstock.sinks.kafka.registered_schemas import RegisteredSchemas
from penstock.sinks.kafka.registry import Registry, SchemaKind
from penstock.sinks.kafka.writer import (
    KafkaWriter,
    TransactionalProducer,
    position_key,
    position_topic,
    topic_of,
)
from penstock.sinks.messages import Format, key_of
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Sink, Spread, Writer, is_repeated

EXTRA = "kafka"

_log = structlog.get_logger(__name__)


class Settings(Cluster):
    """Which topics, and the form of their messages."""

    topic: str = Field(
        default="{database}.{table}", description="the topic, a template with names and columns in braces"
    )
    format: Format | Literal["drainer"] = Field(
        default="debezium",
        description="the message format; debezium_avro and debezium_protobuf need a registry; json is"
        " Penstock's own; drainer: a transaction for each message, as TiDB-Binlog's Drainer writes them, all"
        " in partition 0",
    )
    registry: Registry | None = Field(
        default=None, description="the schema registry, for debezium_avro and debezium_protobuf"
    )
    debezium: DebeziumSettings | None = Field(
        default=None,
        description="the forms of Debezium's messages, and its topics of statements, transactions and"
        " heartbeats",
    )
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
    outbox: Outbox | None = Field(
        default=None,
        description="treat the tables as outboxes: each inserted row is an event, whose topic `topic` names",
    )
    claim_check: ClaimCheck | None = Field(
        default=None, description="store large messages as files, with a reference in the topic"
    )
    headers: bool = Field(
        default=False,
        description="whether messages have the headers __db, __table, __op and __gtid; slower, because the"
        " library takes such messages one by one",
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
    statements: bool = Field(
        default=True,
        description="for drainer: whether statements (DDL) are written; never with steps that change names or"
        " columns",
    )
    partitions: int | None = Field(default=None, ge=1, description="partitions of new topics")
    replicas: int | None = Field(default=None, ge=1, description="replicas of new topics")
    compression: Literal["none", "gzip", "snappy", "lz4", "zstd"] = "lz4"

    @field_validator("key", "partition_by", mode="before")
    @classmethod
    def _list_of_columns(cls, value: Any) -> Any:
        """Accept a single column name in place of a list."""
        return (value,) if isinstance(value, str) and value not in ("primary_key", "none") else value

    @model_validator(mode="after")
    def _forms_of_debezium(self) -> Self:
        if self.debezium is None:
            return self
        if not self.format.startswith("debezium"):
            raise ValueError(f"debezium is for the formats that begin with debezium, not {self.format}")
        if self.debezium.flat and self.tombstones is not None:
            raise ValueError("tombstones: debezium.deletes says what flat rows have")
        return self

    @model_validator(mode="after")
    def _registry_of_binary_formats(self) -> Self:
        if (self.format in ("debezium_avro", "debezium_protobuf")) != (self.registry is not None):
            raise ValueError(
                "the formats debezium_avro and debezium_protobuf, and the section registry, need each other"
            )
        if self.registry is not None and self.claim_check is not None:
            raise ValueError(f"claim_check: consumers of {self.format} cannot read a reference in JSON")
        is_connect = self.debezium is not None and self.debezium.time == "connect"
        if self.format == "debezium_protobuf" and is_connect:
            raise ValueError("debezium.time: connect has no form in protobuf")
        return self

    @model_validator(mode="after")
    def _outbox_alone(self) -> Self:
        others = {"format", "debezium", "key", "tombstones", "headers"} & self.model_fields_set
        if self.outbox is not None and others:
            raise ValueError(f"{', '.join(sorted(others))}: the outbox says what its messages are")
        return self

    @model_validator(mode="after")
    def _whole_transactions(self) -> Self:
        if self.format != "drainer":
            return self
        unused = {"key", "partition_by", "tombstones", "headers", "claim_check"} & self.model_fields_set
        if unused:
            raise ValueError(f"{', '.join(sorted(unused))}: the format drainer has none")
        if self.order != "commit" and "order" in self.model_fields_set:
            raise ValueError("order: the format drainer has the order of commits")
        if "{" in self.topic:
            raise ValueError("topic: transactions of the format drainer are in a single topic: name it")
        return self

    @property
    def deletes(self) -> str:
        """What a delete becomes: `message`, or one of the choices for flat rows."""
        flat = self.debezium is not None and self.debezium.flat
        return (self.debezium.deletes or "tombstone") if flat and self.debezium is not None else "message"


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
        self.spread, self.load_spread = _spread(settings), None
        self.takes_statements = settings.format == "drainer" and settings.statements
        if settings.debezium is not None and settings.debezium.needs_one_writer:
            # A full load has neither transactions nor statements.
            self.spread, self.load_spread = Spread.WHOLE, self.spread
            self.takes_statements = settings.debezium.writes_statements
        # Producers without a current batch, by transactional id.
        self._idle: dict[str | None, TransactionalProducer] = {}
        # The admin client that `begin` uses for each batch.
        self._topics: Any = None
        registry = settings.registry
        self._registry_password = None if registry is None else registry.secret()
        self._schemas: RegisteredSchemas | None = None
        # When the next heartbeat is due, as `time.monotonic`.
        self._next_heartbeat = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": {}, "_topics": None, "_schemas": None, "_next_heartbeat": 0.0}

    @property
    def tombstones(self) -> bool:
        """Whether a delete is followed by a tombstone."""
        setting = self.settings.tombstones
        if self.settings.deletes != "message":
            return self.settings.deletes.endswith("tombstone")
        return self.settings.format.startswith("debezium") if setting is None else setting

    def client(self) -> dict[str, Any]:
        """Return the options of all clients. They contain the password, so pass them only to the library."""
        return self.settings.client(self._password)

    def key(self, target: Target) -> tuple[str, ...]:
        """Return the columns that are needed for the keys of a target's messages.

        Raises OptionInvalid for an unknown column, and for a table without a key if deletes are tombstones.
        """
        columns: Sequence[str] = ()
        if self.settings.format == "drainer":
            return ()
        if (outbox := self.settings.outbox) is not None:
            columns = (outbox.id, outbox.key, outbox.payload, *outbox.headers.values())
        elif self.settings.key == "primary_key":
            columns = key_of(target, self.settings.format)
        elif self.settings.key != "none":
            columns = self.settings.key
        if not columns and self.settings.deletes == "tombstone":
            raise OptionInvalid(
                f"the messages of {target.name} have no key, so that its deletes would leave no tombstone",
                hint="Set key of the kafka sink, or debezium.deletes to rewrite or drop",
            )
        self._refuse_names_of_fields(target)
        self._refuse_truncates_by_rows(target)
        if self.settings.key == "none" and self.settings.outbox is None:
            return ()
        for name in (*columns, *self.settings.partition_by):
            if name not in target.column_names:
                raise OptionInvalid(
                    f"{target.name} has no column {name!r} for the key of its messages",
                    hint=f"It has {', '.join(target.column_names)}",
                )
        return tuple(columns)

    def schema_ids(self, changes: Changes) -> tuple[int, int] | None:
        """Return the schema ids for the messages and for the keys of some changes; None for a format without
        a registry.

        Asks the registry once per process for the columns of a table. Propagates errors from
        `RegistryClient`.
        """
        if self.settings.registry is None:
            return None
        target = changes.target
        instance = pc.struct_field(changes.rows.column("_metadata"), "instance")[0].as_py()
        topic = topic_of(self.settings.topic, target)
        return self._registered(self.settings.registry).of_rows(target, instance, self.key(target), topic)

    def encode(self, record: ConnectRecord) -> tuple[bytes | None, bytes]:
        """Return the key and the value of a message that is not a row, in the same format as rows.

        Propagates errors from `RegistryClient`.
        """
        key = None
        if record.key is not None and record.key_schema is not None:
            key = self._encoded(record.topic, "key", record.key, record.key_schema)
        return key, self._encoded(record.topic, "value", record.value, record.value_schema)

    def _encoded(
        self, topic: str, part: Literal["key", "value"], value: Any, schema: Mapping[str, Any]
    ) -> bytes:
        if self.settings.registry is not None:
            schema_id = self._registered(self.settings.registry).of_record(topic, part, schema)
            in_binary = in_protobuf if self.settings.format == "debezium_protobuf" else in_avro
            return in_binary(value, schema, schema_id)
        return in_json(value, schema if self.settings.format == "debezium_schema" else None)

    def _registered(self, registry: Registry) -> RegisteredSchemas:
        if self._schemas is None:
            kind: SchemaKind = "PROTOBUF" if self.settings.format == "debezium_protobuf" else "AVRO"
            forms = self.settings.debezium
            self._schemas = RegisteredSchemas(registry, self._registry_password, forms, kind)
        return self._schemas

    def keep_alive(self) -> None:
        heartbeat = None if self.settings.debezium is None else self.settings.debezium.heartbeat
        now = time.monotonic()
        if heartbeat is None or now < self._next_heartbeat:
            return
        self._next_heartbeat = now + heartbeat.interval
        milliseconds = time.time_ns() // 1_000_000
        try:
            key, value = self.encode(heartbeat_record(heartbeat.topic, heartbeat.server, milliseconds))
            if (producer := self.take_producer(None)) is None:
                self.make(heartbeat.topic)
                producer = TransactionalProducer(self, None)
            producer.send(heartbeat.topic, 0, [{"key": key, "value": value}], len(value))
            self.keep(None, producer)
        except PenstockError as problem:
            # A batch that cannot be written stops the pipeline, but a heartbeat that cannot be written does
            # not.
            _log.warning("a heartbeat was not sent", topic=heartbeat.topic, why=str(problem))

    def _refuse_names_of_fields(self, target: Target) -> None:
        """Refuse a table with a column whose name flat rows use for an added field."""
        forms = self.settings.debezium
        added = set() if forms is None else {f"__{name.replace('.', '_')}" for name in forms.fields}
        if forms is not None and forms.rewrites_deletes:
            added.add("__deleted")
        if twice := sorted(added & set(target.column_names)):
            raise OptionInvalid(
                f"{target.name} has the column {twice[0]}, which is also a field of its flat rows",
                hint="Leave it out of debezium.fields, or rename the column with a `map` step",
            )

    def _refuse_truncates_by_rows(self, target: Target) -> None:
        """Refuse to write messages about TRUNCATE statements if the topic depends on rows, because a TRUNCATE
        has no rows.
        """
        forms = self.settings.debezium
        if forms is not None and forms.truncates and topic_of(self.settings.topic, target) is None:
            raise OptionInvalid(
                f"the topic {self.settings.topic!r} depends on rows, and a TRUNCATE has none",
                hint="Set debezium.truncates of the kafka sink to false, or name the topic after the table",
            )

    def check(self) -> Sequence[Finding]:
        if self.settings.claim_check is not None:
            self.settings.claim_check.check()
        if self.settings.registry is not None:
            self._registered(self.settings.registry).check()
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

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        """Raise OptionInvalid if only some of several targets have the batch, because each part has its own
        transaction.
        """
        if not self.settings.exactly_once:
            return None
        versions: dict[str, int] = {}
        is_committed = False
        for stored in self._stored_records(mark):
            if is_repeated(mark, stored["number"]):
                is_committed = True
                versions |= stored.get("loads", {})
        missing = [target.name for target in targets if str(target.name) not in versions]
        if is_committed and missing:
            raise OptionInvalid(
                f"a load was interrupted between the commits of its parts: {missing[0]} does not have it",
                hint="Empty the topics, then start over: penstock pipelines reset FILE --yes",
            )
        return max((versions[str(target.name)] for target in targets), default=None) if is_committed else None

    def last_number(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        if not self.settings.exactly_once:
            return None
        # The transaction of a writer that was killed stays open until the next writer of its part ends it.
        records = self._stored_records(mark, waits_for_open=False)
        return max((int(stored["number"]) for stored in records), default=None)

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
        self._topics = self._schemas = None

    def _stored_records(self, mark: BatchMark, *, waits_for_open: bool = True) -> list[dict[str, Any]]:
        """Return the records of all parts in the position topic; see `connection.stored_records`."""
        topic = position_topic(self.settings, mark.pipeline)
        parts = range(connection.partitions_of(self._topics_client(), topic))
        keys = {part: position_key(mark, part) for part in parts}
        if not keys:
            return []
        stored = connection.stored_records(self.client(), topic, keys, waits_for_open=waits_for_open)
        return list(stored.values())

    def _topics_client(self) -> Any:
        if self._topics is None:
            self._topics = connection.admin(self.client())
        return self._topics


make = KafkaSink


def _spread(settings: Settings) -> Spread:
    if settings.order == "commit" or settings.format == "drainer":
        return Spread.WHOLE
    # Rows with the same message key are in one part only if the message key is the table's own key.
    by_row = settings.key == "primary_key" and not settings.partition_by and settings.outbox is None
    return Spread.KEYS if settings.order == "key" and by_row else Spread.TABLES
