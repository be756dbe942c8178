# SPDX-License-Identifier: Apache-2.0
"""RabbitMQ: messages with one routing key per table. Messages about the same row key stay in order."""

import re
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Secret
from penstock.sinks.claim_check import ClaimCheck
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.images import split_moved_updates
from penstock.sinks.messages import check_columns, messages_of, queues_of_rows
from penstock.sinks.rabbitmq.connection import ConfirmedChannel, declaring, library
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Receipt, Sink, Spread, Writer
from penstock.sinks.template import Template

EXTRA = "rabbitmq"

# The maximum number of messages that exist as Python objects at the same time.
_MESSAGES_AT_ONCE = 5_000
# AMQP's limit on the length of a name.
_NAME_BYTES_MAX = 255
_NOT_FOUND = 404
_PERSISTENT = 2
# Words of a binding key that contain these letters are patterns.
_PATTERNS = str.maketrans("*#", "__")
_FOLDER_LETTERS = re.compile(r"[^a-zA-Z0-9_-]")


class Settings(Endpoint):
    """A broker, and which messages are sent to it."""

    url: str = Field(
        default="amqp://127.0.0.1:5672",
        description="amqp://host:port/vhost, amqps:// with TLS; several hosts separated by commas",
    )
    exchange: str = Field(
        default="penstock", min_length=1, description="the topic exchange, which is declared if it is missing"
    )
    routing_key: str = Field(
        default="{database}.{table}", description="the routing key of a table's messages, a template"
    )
    queue: str | None = Field(
        default="{database}.{table}",
        description="the durable queue that is declared and bound for a table, a template; null: none",
    )
    queues: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="over how many queues a table is spread by key; above 1, .0, .1, … follow the names of"
        " queues and routing keys",
    )
    queue_type: Literal["classic", "quorum"] | None = Field(
        default=None,
        description="declare queues of this type, and refuse a queue that exists with another type or other"
        " arguments; null: new queues have the virtual host's default type, and any queue is used as it is",
    )
    partition_by: tuple[str, ...] = Field(
        default=(), description="columns that determine the queue of a row; default: the primary key"
    )
    format: Literal["debezium", "debezium_schema", "maxwell", "canal_flat", "canal", "json"] = Field(
        default="canal_flat", description="the message format; json is Penstock's own"
    )
    order: Literal["key", "table", "commit"] = Field(
        default="key",
        description="the scope of ordering: key: changes of each key; table: changes of each table;"
        " commit: all changes",
    )
    unroutable: Literal["stop", "drop"] = Field(
        default="stop", description="what to do if no queue is bound for a message: stop, or lose it"
    )
    claim_check: ClaimCheck | None = Field(
        default=None, description="store large messages as files, with a reference in their place"
    )
    dead_letter: str | None = Field(
        default=None,
        description="the queue and routing key of references to large messages; default: those of the table",
    )

    @field_validator("partition_by", mode="before")
    @classmethod
    def _list_of_columns(cls, value: Any) -> Any:
        """Accept a single column name in place of a list."""
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.queues > 1 and self.order != "key":
            raise ValueError(f"order: {self.order} needs one queue, and queues is {self.queues}")
        if self.dead_letter is not None and self.claim_check is None:
            raise ValueError("dead_letter: only references to large messages go there: set claim_check")
        return self


class RabbitmqSink(Sink):
    """Sends messages and waits until the broker has confirmed them."""

    kind = "rabbitmq"
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
        by_others = settings.order == "key" and settings.partition_by
        self.spread = Spread.TABLES if by_others else spreads[settings.order]
        # Idle connections, reused for the many small batches at the head of a log.
        self._idle: deque[ConfirmedChannel] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": deque()}

    def check(self) -> Sequence[Finding]:
        if self.settings.claim_check is not None:
            self.settings.claim_check.check()
        with declaring(self.settings, self.password):
            return ()

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        queues = self._queues(target)
        with declaring(self.settings, self.password) as connection:
            missing = [name for name in queues if not _exists(connection, "queue", name)]
        return [f"declare queue {name} for {queues[name]}" for name in missing]

    def prepare(self, target: Target, evolution: Evolution) -> None:
        queues, exchange, queue_type = self._queues(target), self.settings.exchange, self.settings.queue_type
        arguments = None if queue_type is None else {"x-queue-type": queue_type}
        with declaring(self.settings, self.password) as connection:
            # Existing queues may have been declared with other arguments, which is not an error.
            if not _exists(connection, "exchange", exchange):
                connection.channel().exchange_declare(exchange, "topic", durable=True)
            for name, routing_key in queues.items():
                channel = connection.channel()
                if arguments or not _exists(connection, "queue", name):
                    channel.queue_declare(name, durable=True, arguments=arguments)
                channel.queue_bind(name, exchange, routing_key)
                channel.close()

    def routing_keys(self, target: Target) -> list[str]:
        """Return the routing keys of a target's messages, by the number of their queue.

        Raises OptionInvalid.
        """
        check_columns(self.kind, target, self.settings.partition_by)
        return self._numbered(_name(self.settings.routing_key, target).translate(_PATTERNS))

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _Writer(self)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def take_channel(self) -> ConfirmedChannel:
        """Return a channel without unconfirmed messages. Propagates errors from `ConfirmedChannel`."""
        while self._idle:
            channel = self._idle.pop()
            if channel.is_open:
                return channel
            channel.close()
        return ConfirmedChannel(self.settings, self.password, self.settings.unroutable == "drop")

    def give_back(self, channel: ConfirmedChannel) -> None:
        """Keep a channel for the next batch. All of its messages must have been confirmed."""
        self._idle.append(channel)

    def _queues(self, target: Target) -> dict[str, str]:
        """Return the queues to declare for a target, with their routing keys. Raises OptionInvalid."""
        keys, queue, dead_letter = self.routing_keys(target), self.settings.queue, self.settings.dead_letter
        queues = {} if queue is None else dict(zip(self._numbered(_name(queue, target)), keys, strict=True))
        return queues | ({} if dead_letter is None else {dead_letter: dead_letter})

    def _numbered(self, name: str) -> list[str]:
        count = self.settings.queues
        return [name] if count == 1 else [f"{name}.{number}" for number in range(count)]


make = RabbitmqSink


class _Writer(Writer):
    """Sends one task's part."""

    def __init__(self, sink: RabbitmqSink) -> None:
        self._sink = sink
        self._settings = sink.settings
        self._channel: ConfirmedChannel | None = None
        self._tables: Counter[str] = Counter()
        self._bytes = 0
        self._is_binary = sink.settings.format == "canal"
        self._binary, self._json = (
            library().BasicProperties(content_type=content_type, delivery_mode=_PERSISTENT)
            for content_type in ("application/octet-stream", "application/json")
        )

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            routing_keys = self._sink.routing_keys(changes.target)
            rows_queues = None
            if len(routing_keys) > 1:
                rows_queues = queues_of_rows(changes, self._settings.partition_by, len(routing_keys))
                changes = split_moved_updates(changes, rows_queues.to_numpy())
            messages = messages_of(changes, self._settings.format)
        numbers = None if rows_queues is None else rows_queues.take(messages.row)
        for start in range(0, len(messages), _MESSAGES_AT_ONCE):
            bodies = messages.value.slice(start, _MESSAGES_AT_ONCE).to_pylist()
            if numbers is None:
                chosen = routing_keys * len(bodies)
            else:
                queues = numbers.slice(start, _MESSAGES_AT_ONCE).to_pylist()
                chosen = [routing_keys[number] for number in queues]
            for routing_key, body in zip(chosen, bodies, strict=True):
                self._publish(routing_key, body)
        self._tables[str(changes.target.name)] += len(changes)

    def finish(self) -> Receipt:
        if self._channel is not None:
            self._channel.flush()
            self._sink.give_back(self._channel)
            self._channel = None
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables)

    def abort(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _publish(self, routing_key: str, body: bytes) -> None:
        claim_check = self._settings.claim_check
        properties = self._binary if self._is_binary else self._json
        if claim_check is not None and len(body) > claim_check.above:
            body = claim_check.store(_FOLDER_LETTERS.sub("_", routing_key), body)
            routing_key, properties = self._settings.dead_letter or routing_key, self._json
        if self._channel is None:
            self._channel = self._sink.take_channel()
        self._bytes += len(body)
        self._channel.publish(self._settings.exchange, routing_key, body, properties)


def _name(template: str, target: Target) -> str:
    """Return the name that a template gives to a target's messages. Raises OptionInvalid."""
    name = Template(template, target).constant
    if name is None:
        raise OptionInvalid(
            f"the template {template!r} of the rabbitmq sink depends on rows",
            hint="Name routing keys and queues by {database} and {table}",
        )
    if not name or len(name.encode()) > _NAME_BYTES_MAX - len(".1023") or name.startswith("amq."):
        raise OptionInvalid(
            f"{name!r} cannot be the name of a queue or a routing key",
            hint="It may have 1 to 250 bytes, and may not begin with amq.: set queue and routing_key",
        )
    return name


def _exists(connection: Any, kind: Literal["queue", "exchange"], name: str) -> bool:
    """Return whether the broker has a queue or an exchange."""
    # If the queue or exchange does not exist, the broker closes the channel.
    channel = connection.channel()
    declare = channel.queue_declare if kind == "queue" else channel.exchange_declare
    try:
        declare(name, passive=True)
    except library().exceptions.ChannelClosedByBroker as problem:
        if problem.reply_code != _NOT_FOUND:
            raise
        return False
    channel.close()
    return True
