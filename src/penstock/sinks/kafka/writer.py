# SPDX-License-Identifier: Apache-2.0
"""Messages into Kafka: one transaction for each part of a batch, with the batch's number in it.

The number lies in a position topic, in the partition of the part's number, written by the transaction that
writes the part's messages. Who opens a part again fences whoever had it, ends what that one left open, and
reads the number: a part that is there already is passed over.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, Target
from penstock.errors import ConnectionLost, OptionInvalid, PenstockError
from penstock.sinks.images import refuse_partial, split_moved_updates
from penstock.sinks.kafka import connection
from penstock.sinks.messages import DELETE, Messages, messages_of
from penstock.sinks.sink import BatchMark, Receipt, Writer
from penstock.sinks.template import Template, column_texts

if TYPE_CHECKING:
    from penstock.sinks.kafka.sink import KafkaSink

# Messages handed over to the library at once, and bytes that wait there before their writer does.
_MESSAGES_AT_ONCE = 20_000
_BYTES_WAITING_MAX = 64 << 20
# How long brokers may be away before a batch fails, and comes again.
_MESSAGE_MILLISECONDS_MAX = 120_000
# A commit that the coordinator has no answer to yet is asked for again.
_COMMITS_MAX = 5
_POSITION_PARTITIONS = 16
_TOPIC_LETTERS = re.compile(r"[^a-zA-Z0-9._-]")
_TOPIC_LENGTH_MAX = 249
# Of a row without a key, what decides its partition: the rows of its table stay in order.
_NO_KEY = "{database}.{table}"


class Producing:
    """A producer. With `identity` no other has that transactional id."""

    def __init__(self, sink: "KafkaSink", identity: str | None) -> None:
        kafka = connection.library()
        given = sink.client() | {
            "compression.type": sink.settings.compression,
            "linger.ms": 20,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2 * _BYTES_WAITING_MAX >> 10,
            "delivery.report.only.error": True,
            "enable.idempotence": True,
            # What passes the size of the topic is refused by the broker, which tells it by name.
            "message.max.bytes": 64 << 20,
            "message.timeout.ms": _MESSAGE_MILLISECONDS_MAX,
        }
        if identity is not None:
            bound = round(sink.settings.transaction_timeout * 1000)
            given |= {
                "transactional.id": identity,
                "transaction.timeout.ms": bound,
                "message.timeout.ms": min(bound, _MESSAGE_MILLISECONDS_MAX),
            }
        given |= sink.settings.options
        self._failed: PenstockError | None = None
        self._waiting = 0
        with connection.told("options"):
            self.producer = kafka.Producer(given)
        # The number of the last batch that it committed; None before it has read that.
        self.done: int | None = None
        if identity is not None:
            with connection.told(f"begin {identity}"):
                self.producer.init_transactions(connection.ANSWER_SECONDS_MAX)

    def send(self, topic: str, partition: int, messages: list[dict[str, Any]], size: int) -> None:
        """Hand messages over, in their order. Raises our errors, for those handed over before too."""
        with self.told(f"write to {topic}"):
            self.producer.produce_batch(topic, messages, partition=partition, on_delivery=self._reported)
        for message in messages:
            if "_error" in message:
                raise connection.error_of(message["_error"], f"write to {topic}")
        self._waiting += size
        if self._waiting > _BYTES_WAITING_MAX:
            self.flush()
        else:
            with self.told(f"write to {topic}"):
                self.producer.poll(0)
        self._raise()

    def flush(self) -> None:
        """Wait until brokers have all that was handed over. Raises our errors."""
        with self.told("write"):
            while self.producer.flush(1.0) > 0:
                self._raise()
        self._waiting = 0
        self._raise()

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Raise the cluster's errors inside the block by our names."""
        with connection.told(what):
            try:
                yield
            except SystemError as problem:
                # The library raises a fatal error out of a callback and loses it on the way, as when another
                # producer has taken the transactions over; asked for anything, it tells it again.
                self.producer.abort_transaction(connection.ANSWER_SECONDS_MAX)
                raise ConnectionLost(f"Kafka: {what}: the client failed: {problem}") from problem

    def _reported(self, problem: Any, message: Any) -> None:
        if problem is not None and self._failed is None:
            self._failed = connection.error_of(problem, f"write to {message.topic()}")

    def _raise(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed


class KafkaWriter(Writer):
    """Writes one task's part, in a transaction where the sink asks for it."""

    def __init__(self, sink: "KafkaSink", mark: BatchMark, part: int) -> None:
        self._sink = sink
        self._settings = sink.settings
        self._mark = mark
        self._part = part
        self._tables: Counter[str] = Counter()
        # For the whole batch, and the same in all its parts: a topic may grow at any time.
        self._partitions: dict[str, int] = dict(mark.shared.get("partitions", {}))
        self._bytes = 0
        self._sent = False
        self._done = False
        self._producing = sink.producing(self._identity) or Producing(sink, self._identity)
        if self._identity is not None and self._producing.done is None:
            self._producing.done = self._number_kept()
        if self._identity is not None and (self._producing.done or -1) >= mark.number:
            # It was committed before; only the word of it was lost.
            self._done = True

    @property
    def _identity(self) -> str | None:
        return f"{self._mark.application}/{self._part}" if self._settings.exactly_once else None

    @property
    def _position_topic(self) -> str:
        named = self._settings.positions or f"penstock.positions.{self._mark.pipeline}"
        return _TOPIC_LETTERS.sub("_", named)[:_TOPIC_LENGTH_MAX]

    def write(self, changes: Changes) -> None:
        self._tables[str(changes.target.name)] += len(changes)
        if self._done:
            return
        with self.working_on(changes.target.name):
            changes = self._separated(changes)
            messages = messages_of(changes, self._settings.format, self._sink.key(changes.target))
            by_topic = list(self._by_topic(changes, messages)) if len(messages) else []
        if not by_topic:
            return
        if not self._sent and self._identity is not None:
            with self._producing.told("begin"):
                self._producing.producer.begin_transaction()
        self._sent = True
        # What brokers refuse is told later, among messages of other tables.
        for topic, chosen in by_topic:
            count = self._partition_count(topic)
            self._send(topic, messages, chosen, self._places(changes, messages, chosen, count))

    def finish(self) -> Receipt:
        if self._sent:
            if self._identity is not None:
                self._commit()
            else:
                self._producing.flush()
        self._sink.keep(self._identity, self._producing)
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables)

    def abort(self) -> None:
        # What the producer's end leaves open is ended by whoever opens the part next, or by its timeout.
        self._producing.producer.purge()
        if self._sent and self._identity is not None:
            kafka = connection.library()
            try:
                self._producing.producer.abort_transaction(connection.ANSWER_SECONDS_MAX)
            except (kafka.KafkaException, SystemError):
                return

    def _commit(self) -> None:
        kafka = connection.library()
        self._producing.flush()
        record = json.dumps({"number": self._mark.number}).encode()
        with self._producing.told("commit"):
            self._producing.producer.produce(
                self._position_topic, record, key=self._position_key, partition=self._part
            )
            for left in range(_COMMITS_MAX - 1, -1, -1):
                try:
                    self._producing.producer.commit_transaction(connection.ANSWER_SECONDS_MAX)
                    break
                except kafka.KafkaException as problem:
                    if not problem.args[0].retriable() or left == 0:
                        raise
        self._producing.done = self._mark.number

    @property
    def _position_key(self) -> bytes:
        return f"{self._mark.generation}/{self._part}".encode()

    def _number_kept(self) -> int | None:
        sink, topic = self._sink, self._position_topic
        client = connection.admin(sink.client())
        partitions = max(_POSITION_PARTITIONS, self._part + 1)
        compacted = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20)}
        connection.make_topic(client, topic, partitions, self._settings.replicas, compacted)
        connection.grow_topic(client, topic, self._part + 1)
        return connection.number_kept(sink.client(), topic, self._part, self._position_key)

    def _partition_count(self, topic: str) -> int:
        """Return the partition count of a topic for this batch, after making it where it is missing."""
        if topic not in self._partitions:
            # The producer itself is asked: it refuses partitions that it has not heard of.
            counts = connection.partition_counts(self._producing.producer)
            self._partitions = counts | self._partitions
        if not self._partitions.get(topic):
            self._partitions[topic] = self._sink.make(topic)
        return self._partitions[topic]

    # --- Where messages go --------------------------------------------------------------------

    def _separated(self, changes: Changes) -> Changes:
        """Return changes in which an update that moves a row to another place is a delete and an insert.

        Columns that decide the topic or the partition have to be in every image: raises ServerUnsupported.
        """
        template = Template(self._settings.topic, changes.target)
        if template.constant is not None and not self._settings.partition_by:
            return changes
        refuse_partial(changes)
        if template.constant is not None:
            count = self._partition_count(_checked(template.constant))
            return split_moved_updates(
                changes, self._partitions_of(changes, self._partition_keys(changes), count)
            )
        texts = [pc.fill_null(template.texts(_as_postimages(changes)), "\0"), self._partition_keys(changes)]
        joined = pc.binary_join_element_wise(*(text for text in texts if text is not None), "\0")
        return split_moved_updates(changes, joined.dictionary_encode().indices.to_numpy(zero_copy_only=False))

    def _partition_keys(self, changes: Changes) -> Any:
        """Return what decides the partition of each row, None where that is the key of its message."""
        if not self._settings.partition_by:
            return None
        texts = [pc.fill_null(column_texts(changes, name), "\0") for name in self._settings.partition_by]
        return pc.binary_join_element_wise(*texts, "\0")

    def _by_topic(self, changes: Changes, messages: Messages) -> Iterator[tuple[str, Any]]:
        """Yield each topic with the places of its messages, in their order."""
        template = Template(self._settings.topic, changes.target)
        if template.constant is not None:
            yield _checked(template.constant), numpy.arange(len(messages))
            return
        names = template.texts(changes).take(messages.row)
        if names.null_count:
            raise OptionInvalid(
                f"{changes.target.name} has rows for which the topic {template.text!r} is null",
                hint="Name columns that are never null, or filter those rows",
            )
        encoded = names.dictionary_encode()
        codes = encoded.indices.to_numpy(zero_copy_only=False)
        for code, name in enumerate(encoded.dictionary.to_pylist()):
            yield _checked(name), numpy.flatnonzero(codes == code)

    def _places(self, changes: Changes, messages: Messages, chosen: Any, count: int) -> Any:
        """Return the partition of each chosen message."""
        by_row = self._partition_keys(changes)
        keys = messages.key if by_row is None else by_row.take(messages.row)
        return self._partitions_of(changes, keys.take(pyarrow.array(chosen)), count)

    @staticmethod
    def _partitions_of(changes: Changes, keys: Any, count: int) -> Any:
        no_key = Template(_NO_KEY, changes.target).constant or ""
        keys = keys.cast(pyarrow.large_binary())
        keys = pc.fill_null(keys, pyarrow.scalar(no_key.encode(), pyarrow.large_binary()))
        batch = pyarrow.record_batch([keys], ["key"])
        return pyarrow.array(_native.partitions(batch, count)).to_numpy(zero_copy_only=False)

    def _send(self, topic: str, messages: Messages, chosen: Any, places: Any) -> None:
        # Stable, so that the messages of a partition stay in their order.
        order = numpy.argsort(places, kind="stable")
        cuts = numpy.flatnonzero(numpy.diff(places[order])) + 1
        for run in numpy.split(order, cuts):
            partition = int(places[run[0]])
            for start in range(0, len(run), _MESSAGES_AT_ONCE):
                taken = pyarrow.array(chosen[run[start : start + _MESSAGES_AT_ONCE]])
                values = messages.value.take(taken)
                keys = messages.key.take(taken)
                deleted = pc.equal(messages.kind.take(taken), DELETE).to_pylist()
                made = self._with_tombstones(values.to_pylist(), keys.to_pylist(), deleted)
                size = values.nbytes + keys.nbytes
                self._bytes += size
                self._producing.send(topic, partition, made, size)

    def _with_tombstones(
        self, values: Sequence[bytes], keys: Sequence[bytes | None], deleted: Sequence[bool]
    ) -> list[dict[str, Any]]:
        """Return what the library takes; behind each delete the word that its key has no value any more."""
        if not self._sink.tombstones or not any(deleted):
            return [{"value": value, "key": key} for value, key in zip(values, keys, strict=True)]
        made: list[dict[str, Any]] = []
        for value, key, is_deleted in zip(values, keys, deleted, strict=True):
            made.append({"value": value, "key": key})
            if is_deleted and key is not None:
                made.append({"value": None, "key": key})
        return made


def _as_postimages(changes: Changes) -> Changes:
    """Return changes whose updates have one kind of change: a topic that names the kind is no other place."""
    rows = changes.rows
    at = rows.schema.get_field_index("_change_type")
    kinds = rows.column(at)
    kinds = pc.if_else(pc.equal(kinds, "update_preimage"), "update_postimage", kinds)
    return changes.with_rows(rows.set_column(at, rows.schema.field(at), kinds))


def topic_of(template: str, target: Target) -> str | None:
    """Return the topic of a target, None where its rows decide. Raises OptionInvalid."""
    own_text = re.sub(r"\{[^{}]*\}", "", template)
    if _TOPIC_LETTERS.search(own_text):
        raise OptionInvalid(
            f"{template!r} cannot name topics",
            hint="Outside braces, use letters, digits, dots, dashes and underscores",
        )
    constant = Template(template, target).constant
    return None if constant is None else _checked(constant)


def _checked(name: str) -> str:
    """Return the topic of a name: letters that Kafka refuses become underscores, as in Debezium's topics."""
    topic = _TOPIC_LETTERS.sub("_", name)
    if not topic or len(topic) > _TOPIC_LENGTH_MAX or topic in (".", ".."):
        raise OptionInvalid(
            f"{name!r} cannot be the name of a topic",
            hint="It may have 1 to 249 letters and cannot be . or ..: change topic of the sink",
        )
    return topic
