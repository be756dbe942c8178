# SPDX-License-Identifier: Apache-2.0
"""RocketMQ: messages with tags. Messages about the same row key stay in order."""

import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Self
from zlib import crc32

from pydantic import Field, field_validator, model_validator

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, ServerBusy
from penstock.model import Secret
from penstock.sinks.claim_check import ClaimCheck
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import split_moved_updates
from penstock.sinks.messages import check_columns, headers_of, messages_of, queues_of_rows
from penstock.sinks.rocketmq.producer import AbortedProducers, Producer, Queue, Servers
from penstock.sinks.rocketmq.remoting import message_of, property_text
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Receipt, Sink, Spread, Writer
from penstock.sinks.template import Template

EXTRA = ""

# The maximum number of messages that exist as Python objects at the same time.
_MESSAGES_AT_ONCE = 5_000
# Name servers know a new topic once all brokers have registered it.
_TOPIC_SECONDS_MAX = 30.0
_TOPIC_LETTERS = re.compile(r"[^%a-zA-Z0-9_-]")
_TOPIC_LENGTH_MAX = 127
# The limit of a message's properties is 32 KiB, including headers and the broker's own properties.
_TAG_BYTES_MAX = 16 << 10
# Consumers separate tags by ||.
_TAG_LETTERS = re.compile(r"[\s|\x01\x02]")
_KINDS = ("insert", "update", "delete")
_KIND = "{kind}"


class Settings(Endpoint):
    """A RocketMQ cluster, and which messages are sent to it."""

    url: str = Field(
        default="rocketmq://127.0.0.1:9876",
        description="rocketmq://host:port of the name servers, separated by commas; rocketmqs:// with TLS",
    )
    topic: str = Field(
        default="{database}_{table}", description="the topic of a table's messages, a template"
    )
    tag: str = Field(
        default="{table}",
        description="the tag of a message, a template that may contain {kind}: insert, update or delete;"
        " empty: none",
    )
    queues: int = Field(default=4, ge=1, le=1024, description="queues of a new topic, on each broker")
    partition_by: tuple[str, ...] = Field(
        default=(), description="columns that determine the queue of a row; default: the primary key"
    )
    format: Literal["debezium", "debezium_schema", "maxwell", "canal_flat", "canal", "json"] = Field(
        default="canal_flat", description="the message format; json is Penstock's own"
    )
    order: Literal["key", "table", "commit"] = Field(
        default="key",
        description="the scope of ordering: key: changes of each key; table: changes of each table;"
        " commit: all changes of a topic",
    )
    headers: bool = Field(
        default=False, description="whether messages have the properties __db, __table, __op and __gtid"
    )
    claim_check: ClaimCheck | None = Field(
        default=None, description="store large messages as files, with a reference in their place"
    )

    @field_validator("partition_by", mode="before")
    @classmethod
    def _list_of_columns(cls, value: Any) -> Any:
        """Accept a single column name in place of a list."""
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.partition_by and self.order != "key":
            raise ValueError(f"partition_by: with order: {self.order}, a table's messages are in one queue")
        return self


class RocketmqSink(Sink):
    """Sends messages. A batch is complete only after the brokers have stored all of its messages."""

    kind = "rocketmq"
    delivery = Delivery.AT_LEAST_ONCE
    keeps_connections = True
    keeps_state = False
    shares_columns = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.password: Secret | None = settings.secret()
        spreads = {"key": Spread.KEYS, "table": Spread.TABLES, "commit": Spread.WHOLE}
        # Rows that agree in the `partition_by` columns may have different keys, and so be in several parts of
        # a table.
        self.spread = Spread.TABLES if settings.partition_by else spreads[settings.order]
        # The queues of each topic, as the last batch used them.
        self._queues: dict[str, list[Queue]] = {}
        # Producers of completed batches, reused for the many small batches at the head of a log.
        self._idle: deque[Producer] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": deque(), "_queues": {}}

    def check(self) -> Sequence[Finding]:
        if self.settings.claim_check is not None:
            self.settings.claim_check.check()
        servers = self.servers()
        for address in servers.masters().values():
            servers.connect(address).close()
        return ()

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        topic = self.topic(target)
        return [] if self.servers().queues(topic) else [f"create topic {topic}"]

    def prepare(self, target: Target, evolution: Evolution) -> None:
        self.tags(target)
        topic, servers = self.topic(target), self.servers()
        if servers.queues(topic):
            return
        servers.create(topic, self.settings.queues)
        wanted = self.settings.queues * len(servers.masters())
        deadline = time.monotonic() + _TOPIC_SECONDS_MAX
        while len(servers.queues(topic)) < wanted:
            if time.monotonic() > deadline:
                raise ServerBusy(
                    f"the name servers of RocketMQ do not know all queues of the new topic {topic}"
                )
            time.sleep(0.05)

    def begin(self, targets: Iterable[Target]) -> Mapping[str, Any]:
        """Read the queues of the topics, so that a batch uses the same queues for every key."""
        servers = self.servers()
        topics = sorted({self.topic(target) for target in targets})
        return {"queues": {topic: self._check_queues(topic, servers.queues(topic)) for topic in topics}}

    def topic(self, target: Target) -> str:
        """Return the topic of a target. Raises OptionInvalid."""
        check_columns(self.kind, target, self.settings.partition_by)
        name = Template(self.settings.topic, target).constant
        if name is None:
            raise OptionInvalid(
                f"the topic {self.settings.topic!r} of the rocketmq sink depends on rows",
                hint="Name topics by {database} and {table}",
            )
        topic = _TOPIC_LETTERS.sub("_", name)
        if not topic or len(topic) > _TOPIC_LENGTH_MAX:
            raise OptionInvalid(
                f"{name!r} cannot be the name of a topic",
                hint=f"It may have 1 to {_TOPIC_LENGTH_MAX} letters: set topic of the rocketmq sink",
            )
        return topic

    def tags(self, target: Target) -> list[str]:
        """Return the tags of a target's inserts, updates and deletes. Raises OptionInvalid."""
        tags = [Template(self.settings.tag.replace(_KIND, kind), target).constant for kind in _KINDS]
        if None in tags:
            raise OptionInvalid(
                f"the tag {self.settings.tag!r} of the rocketmq sink depends on rows",
                hint="Name tags by {database}, {table} and {kind}",
            )
        if any(len((tag or "").encode()) > _TAG_BYTES_MAX for tag in tags):
            raise OptionInvalid(
                f"the tag of {target.name} in RocketMQ has more than {_TAG_BYTES_MAX} bytes",
                hint="Set a shorter tag of the rocketmq sink",
            )
        return [_TAG_LETTERS.sub("_", tag or "") for tag in tags]

    def open(self, mark: BatchMark, part: int) -> Writer:
        queues = mark.shared.get("queues", {})
        shared = {topic: [Queue(*queue) for queue in listed] for topic, listed in queues.items()}
        return _Writer(self, shared)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def servers(self) -> Servers:
        """Return the name servers. Raises OptionInvalid."""
        return Servers(self.settings, self.password)

    @property
    def aborted(self) -> AbortedProducers:
        """The producers of aborted batches, which outlive the sink."""
        return AbortedProducers.of_topics(self.settings.url, self.settings.topic)

    def take_producer(self) -> Producer:
        """Return a producer once no messages of aborted batches are in flight.

        Raises AnswerTimedOut, and propagates errors from `Servers.masters`.
        """
        self.aborted.settle()
        while self._idle:
            producer = self._idle.pop()
            if producer.is_open:
                return producer
            producer.close()
        return Producer(self.servers())

    def give_back(self, producer: Producer) -> None:
        """Keep a producer for the next batch. It must have no messages in flight."""
        self._idle.append(producer)

    def queues_of(self, topic: str) -> list[Queue]:
        """Return the queues of a topic, for a writer that was opened without `begin`. Raises ServerBusy."""
        return self._check_queues(topic, self.servers().queues(topic))

    def _check_queues(self, topic: str, queues: list[Queue]) -> list[Queue]:
        """Return the queues of a topic. Raises ServerBusy if a queue is missing, because its keys would move
        to other queues.
        """
        missing = sorted({queue.broker for queue in set(self._queues.get(topic, ())) - set(queues)})
        if missing or not queues:
            raise ServerBusy(
                f"the topic {topic} of RocketMQ has no queues on {', '.join(missing) or 'any broker'} now",
                hint="Bring the broker back; if its queues were removed for good, restart the pipeline",
            )
        self._queues[topic] = queues
        return queues


make = RocketmqSink


class _Writer(Writer):
    """Sends one task's part."""

    def __init__(self, sink: RocketmqSink, queues: dict[str, list[Queue]]) -> None:
        self._sink = sink
        self._settings = sink.settings
        self._queues = queues
        self._producer: Producer | None = None
        self._tables: Counter[str] = Counter()
        self._bytes = 0

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            topic, tags = self._sink.topic(changes.target), self._sink.tags(changes.target)
        if topic not in self._queues:
            self._queues[topic] = self._sink.queues_of(topic)
        queues = self._queues[topic]
        with self.working_on(changes.target.name):
            rows_queues = None
            if self._settings.order == "key":
                rows_queues = queues_of_rows(changes, self._settings.partition_by, len(queues))
                changes = split_moved_updates(changes, rows_queues.to_numpy())
            messages = messages_of(changes, self._settings.format)
        headers = headers_of(changes, messages) if self._settings.headers else None
        numbers = None if rows_queues is None else rows_queues.take(messages.row)
        # All messages of a table, or of a topic, have the same queue.
        same = (
            0 if self._settings.order == "commit" else crc32(str(changes.target.name).encode()) % len(queues)
        )
        for start in range(0, len(messages), _MESSAGES_AT_ONCE):
            bodies = messages.value.slice(start, _MESSAGES_AT_ONCE).to_pylist()
            kinds = messages.kind.slice(start, _MESSAGES_AT_ONCE).to_pylist()
            chosen = (
                [same] * len(bodies)
                if numbers is None
                else numbers.slice(start, _MESSAGES_AT_ONCE).to_pylist()
            )
            for index, (body, kind, number) in enumerate(zip(bodies, kinds, chosen, strict=True), start):
                properties = dict(headers[index]) if headers is not None else {}
                self._send(topic, queues[number], tags[kind], properties, body)
        self._tables[str(changes.target.name)] += len(changes)

    def finish(self) -> Receipt:
        if self._producer is not None:
            self._producer.finish()
            self._sink.give_back(self._producer)
            self._producer = None
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables)

    def abort(self) -> None:
        if self._producer is not None:
            self._sink.aborted.add(self._producer)
            self._producer = None

    def _send(self, topic: str, queue: Queue, tag: str, properties: dict[str, str], body: bytes) -> None:
        claim_check = self._settings.claim_check
        if claim_check is not None and len(body) > claim_check.above:
            body = claim_check.store(topic, body)
        if self._producer is None:
            self._producer = self._sink.take_producer()
        properties = {name: property_text(value) for name, value in properties.items()}
        if tag:
            properties["TAGS"] = tag
        message = message_of(body, properties)
        self._bytes += len(message)
        self._producer.send(topic, queue, message)
