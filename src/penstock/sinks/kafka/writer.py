# SPDX-License-Identifier: Apache-2.0
"""Writes messages to Kafka. Each part of a batch is one transaction, which also stores the batch number.

The batch number is written to a position topic, in the partition that has the same number as the part. This
record also contains the log positions of the tables that the part has loaded. When a producer opens a part
again, it fences the previous producer, aborts that producer's open transaction, and reads the stored batch
number. A part that is already written is skipped.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, DefiningStatement, Origin, Target
from penstock.errors import ConnectionLost, OptionInvalid, PenstockError
from penstock.sinks.drainer_transactions import DrainerTransactions
from penstock.sinks.images import refuse_partial, split_moved_updates
from penstock.sinks.kafka import connection
from penstock.sinks.kafka.connect_schemas import row_schemas
from penstock.sinks.kafka.debezium_records import (
    ConnectRecord,
    Transactions,
    empties_tables,
    statement_records,
    truncate_record,
)
from penstock.sinks.kafka.debezium_settings import DebeziumSettings
from penstock.sinks.messages import DELETE, Messages, headers_of, messages_of
from penstock.sinks.sink import BatchMark, Receipt, Writer, is_repeated
from penstock.sinks.template import Template, column_texts

if TYPE_CHECKING:
    from penstock.sinks.kafka.sink import KafkaSink, Settings

# The number of messages passed to the library at once, and the bytes that the library may buffer before a
# flush.
_MESSAGES_AT_ONCE = 20_000
_BYTES_WAITING_MAX = 64 << 20
# How long brokers may be unavailable before a batch fails and is retried.
_MESSAGE_MILLISECONDS_MAX = 120_000
# A commit is retried if the coordinator has no answer yet.
_COMMITS_MAX = 5
_POSITION_PARTITIONS = 16
_TOPIC_LETTERS = re.compile(r"[^a-zA-Z0-9._-]")
_TOPIC_LENGTH_MAX = 249
Headers = list[list[tuple[str, bytes]]]
# The partition key of a row without a key, so that the rows of its table stay in order.
_NO_KEY = "{database}.{table}"


class TransactionalProducer:
    """A Kafka producer. With `identity`, it owns this transactional id and fences any other producer that
    uses it.
    """

    def __init__(self, sink: "KafkaSink", identity: str | None) -> None:
        kafka = connection.library()
        options = sink.client() | {
            "compression.type": sink.settings.compression,
            "linger.ms": 20,
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2 * _BYTES_WAITING_MAX >> 10,
            "delivery.report.only.error": True,
            "enable.idempotence": True,
            # The broker rejects messages above the topic's size limit with an error that names the limit.
            "message.max.bytes": 64 << 20,
            "message.timeout.ms": _MESSAGE_MILLISECONDS_MAX,
        }
        if identity is not None:
            bound = round(sink.settings.transaction_timeout * 1000)
            options |= {
                "transactional.id": identity,
                "transaction.timeout.ms": bound,
                "message.timeout.ms": min(bound, _MESSAGE_MILLISECONDS_MAX),
            }
        options |= sink.settings.options
        self._failed: PenstockError | None = None
        self._waiting = 0
        with connection.translate_errors("options"):
            self.producer = kafka.Producer(options)
        # The number of the last batch that the producer committed; None before it was read.
        self.last_committed: int | None = None
        if identity is not None:
            with connection.translate_errors(f"begin {identity}"):
                self.producer.init_transactions(connection.ANSWER_SECONDS_MAX)

    def send(self, topic: str, partition: int, messages: list[dict[str, Any]], size: int) -> None:
        """Send messages in order. Raises Penstock errors, including errors of messages sent earlier."""
        with self.translate_errors(f"write to {topic}"):
            if messages and "headers" in messages[0]:
                self._send_each(topic, partition, messages)
            else:
                self.producer.produce_batch(topic, messages, partition=partition, on_delivery=self._reported)
        for message in messages:
            if "_error" in message:
                raise connection.error_of(message["_error"], f"write to {topic}")
        self._waiting += size
        if self._waiting > _BYTES_WAITING_MAX:
            self.flush()
        else:
            with self.translate_errors(f"write to {topic}"):
                self.producer.poll(0)
        self._raise()

    def _send_each(self, topic: str, partition: int, messages: list[dict[str, Any]]) -> None:
        """Send messages with headers, which the library does not accept in batches."""
        for message in messages:
            arguments = message | {"partition": partition, "on_delivery": self._reported}
            try:
                self.producer.produce(topic, **arguments)
            except BufferError:
                # The library's buffer is full of undelivered messages, so flush it first.
                self.flush()
                self.producer.produce(topic, **arguments)

    def flush(self) -> None:
        """Wait until brokers have all messages. Raises Penstock errors."""
        with self.translate_errors("write"):
            while self.producer.flush(1.0) > 0:
                self._raise()
        self._waiting = 0
        self._raise()

    @contextmanager
    def translate_errors(self, what: str) -> Iterator[None]:
        """Translate the library's exceptions into Penstock errors."""
        with connection.translate_errors(what):
            try:
                yield
            except SystemError as problem:
                # If the client failed fatally, for example because another producer has fenced it, the
                # library raises the error in a callback and loses it. Another call reports it.
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
    """Writes one task's part, in a transaction if the sink is configured for it."""

    def __init__(self, sink: "KafkaSink", mark: BatchMark, part: int) -> None:
        self._sink = sink
        self._settings = sink.settings
        self._mark = mark
        self._part = part
        self._tables: Counter[str] = Counter()
        # The highest commit version of the rows of each load, by target.
        self._loads: dict[str, int] = {}
        # One count per topic for all parts of the batch, because a topic may grow at any time.
        self._partitions: dict[str, int] = dict(mark.shared.get("partitions", {}))
        self._bytes = 0
        self._sent = False
        self._transactions = DrainerTransactions("kafka") if sink.settings.format == "drainer" else None
        self._debezium = sink.settings.debezium or DebeziumSettings()
        topic = self._debezium.transaction_topic
        self._counted = None if topic is None else Transactions(topic)
        self._is_committed = False
        self._producer = sink.take_producer(self._identity) or TransactionalProducer(sink, self._identity)
        if self._identity is not None and self._producer.last_committed is None:
            self._producer.last_committed = self._read_stored_number()
        if self._identity is not None and is_repeated(mark, self._producer.last_committed):
            # The batch is already committed; only its confirmation was lost.
            self._is_committed = True

    @property
    def _identity(self) -> str | None:
        return f"{self._mark.application}/{self._part}" if self._settings.exactly_once else None

    def write(self, changes: Changes) -> None:
        name = str(changes.target.name)
        self._tables[name] += len(changes)
        if changes.origin is Origin.LOAD:
            version = pc.max(changes.rows.column("_commit_version")).as_py() or 0
            self._loads[name] = max(version, self._loads.get(name, 0))
        if self._is_committed:
            return
        if self._transactions is not None:
            with self.working_on(changes.target.name):
                transactions = list(self._transactions.add(changes))
            self._send_transactions(transactions)
            return
        with self.working_on(changes.target.name):
            changes, messages = self._messages(changes)
            by_topic = list(self._by_topic(changes, messages)) if len(messages) else []
        if not by_topic:
            return
        self._begin()
        if self._counted is not None:
            self._send_records(self._counted.add(changes, messages))
        headers = self._headers(changes, messages)
        # Brokers report rejections later, among messages of other tables.
        for topic, indexes in by_topic:
            count = self._partition_count(topic)
            partitions = self._partitions_of_messages(changes, messages, indexes, count)
            self._send(topic, messages, indexes, partitions, headers)

    def statement(self, statement: DefiningStatement) -> None:
        if self._is_committed:
            return
        if self._transactions is not None:
            self._send_transactions(list(self._transactions.statement(statement)))
        else:
            self._send_records(self._records_of(statement))

    def finish(self) -> Receipt:
        if self._transactions is not None:
            self._send_transactions(list(self._transactions.finish()))
        if self._counted is not None:
            self._send_records(self._counted.finish())
        if self._sent:
            if self._identity is not None:
                self._commit()
            else:
                self._producer.flush()
        self._sink.keep(self._identity, self._producer)
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables)

    def abort(self) -> None:
        # The next producer of this part, or a timeout, ends an open transaction.
        self._producer.producer.purge()
        if self._sent and self._identity is not None:
            kafka = connection.library()
            try:
                self._producer.producer.abort_transaction(connection.ANSWER_SECONDS_MAX)
            except (kafka.KafkaException, SystemError):
                return

    def _begin(self) -> None:
        """Begin the part's transaction with its first messages."""
        if not self._sent and self._identity is not None:
            with self._producer.translate_errors("begin"):
                self._producer.producer.begin_transaction()
        self._sent = True

    def _send_transactions(self, transactions: list[bytes]) -> None:
        """Send source transactions to the first partition, each as one message."""
        if not transactions:
            return
        self._begin()
        topic = _valid_topic(self._settings.topic)
        # Create the topic if it is missing.
        self._partition_count(topic)
        size = sum(map(len, transactions))
        self._bytes += size
        self._producer.send(topic, 0, [{"value": transaction} for transaction in transactions], size)

    def _records_of(self, statement: DefiningStatement) -> Iterator[ConnectRecord]:
        """Yield the messages about a statement."""
        if self._counted is not None:
            yield from self._counted.finish()
        if self._debezium.schema_topic is not None:
            yield from statement_records(self._debezium.schema_topic, statement)
        if not self._debezium.truncates or not empties_tables(statement):
            return
        for target in statement.emptied:
            topic = topic_of(self._settings.topic, target)
            assert topic is not None, "refused by `KafkaSink.key`"
            value, _ = row_schemas(target, statement.instance, self._sink.key(target), self._debezium)
            # The partition of the table's rows without a key.
            [partition] = self._partitions_of(target, pyarrow.array([None]), self._partition_count(topic))
            yield truncate_record(topic, statement, target.name, value, int(partition))

    def _send_records(self, records: Iterable[ConnectRecord]) -> None:
        """Send messages that are not rows, in their order."""
        for topic, of_topic in groupby(records, attrgetter("topic")):
            self._begin()
            listed = list(of_topic)
            encoded = [self._sink.encode(record) for record in listed]
            keys = pyarrow.array([key for key, _ in encoded], pyarrow.large_binary())
            by_key = _partitions_of(keys, b"", self._partition_count(topic)).tolist()
            by_partition: dict[int, list[dict[str, Any]]] = {}
            for record, (key, value), partition in zip(listed, encoded, by_key, strict=True):
                chosen = partition if record.partition is None else record.partition
                by_partition.setdefault(chosen, []).append({"value": value, "key": key})
            for partition, messages in by_partition.items():
                size = sum(len(message["value"]) for message in messages)
                self._bytes += size
                self._producer.send(topic, partition, messages, size)

    def _commit(self) -> None:
        kafka = connection.library()
        self._producer.flush()
        record = json.dumps({"number": self._mark.number, "loads": self._loads}).encode()
        topic, key = position_topic(self._settings, self._mark.pipeline), position_key(self._mark, self._part)
        with self._producer.translate_errors("commit"):
            self._producer.producer.produce(topic, record, key=key, partition=self._part)
            for retries_left in range(_COMMITS_MAX - 1, -1, -1):
                try:
                    self._producer.producer.commit_transaction(connection.ANSWER_SECONDS_MAX)
                    break
                except kafka.KafkaException as problem:
                    if not problem.args[0].retriable() or retries_left == 0:
                        raise
        self._producer.last_committed = self._mark.number

    def _read_stored_number(self) -> int | None:
        sink, topic = self._sink, position_topic(self._settings, self._mark.pipeline)
        client = connection.admin(sink.client())
        partitions = max(_POSITION_PARTITIONS, self._part + 1)
        compacted = {"cleanup.policy": "compact", "segment.bytes": str(1 << 20)}
        connection.create_topic(client, topic, partitions, self._settings.replicas, compacted)
        connection.grow_topic(client, topic, self._part + 1)
        key = position_key(self._mark, self._part)
        stored = connection.stored_record(sink.client(), topic, self._part, key)
        return None if stored is None else int(stored["number"])

    def _partition_count(self, topic: str) -> int:
        """Return the partition count of a topic for this batch. Creates the topic if it is missing."""
        if topic not in self._partitions:
            # Ask the producer itself, because it rejects partitions that are not in its own metadata.
            counts = connection.partition_counts(self._producer.producer)
            self._partitions = counts | self._partitions
        if not self._partitions.get(topic):
            self._partitions[topic] = self._sink.make(topic)
        return self._partitions[topic]

    # --- Topics and partitions ----------------------------------------------------------------

    def _split_moved_updates(self, changes: Changes) -> Changes:
        """Split each update that moves a row to another partition into a delete and an insert.

        Raises ServerUnsupported if an image is missing a column that determines the topic or the partition.
        """
        template = Template(self._settings.topic, changes.target)
        if template.constant is not None and not self._settings.partition_by:
            return changes
        refuse_partial(changes)
        if template.constant is not None:
            count = self._partition_count(_valid_topic(template.constant))
            return split_moved_updates(
                changes, self._partitions_of(changes.target, self._partition_keys(changes), count)
            )
        texts = [pc.fill_null(template.texts(_as_postimages(changes)), "\0"), self._partition_keys(changes)]
        joined = pc.binary_join_element_wise(*(text for text in texts if text is not None), "\0")
        return split_moved_updates(changes, joined.dictionary_encode().indices.to_numpy(zero_copy_only=False))

    def _partition_keys(self, changes: Changes) -> Any:
        """Return the partition key of each row. Return None if messages are partitioned by their own keys."""
        if not self._settings.partition_by:
            return None
        texts = [pc.fill_null(column_texts(changes, name), "\0") for name in self._settings.partition_by]
        return pc.binary_join_element_wise(*texts, "\0")

    def _by_topic(self, changes: Changes, messages: Messages) -> Iterator[tuple[str, Any]]:
        """Yield each topic with the indexes of its messages, in order."""
        template = Template(self._settings.topic, changes.target)
        if template.constant is not None:
            yield _valid_topic(template.constant), numpy.arange(len(messages))
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
            yield _valid_topic(name), numpy.flatnonzero(codes == code)

    def _partitions_of_messages(self, changes: Changes, messages: Messages, indexes: Any, count: int) -> Any:
        """Return the partition of each selected message."""
        by_row = self._partition_keys(changes)
        keys = messages.key if by_row is None else by_row.take(messages.row)
        return self._partitions_of(changes.target, keys.take(pyarrow.array(indexes)), count)

    @staticmethod
    def _partitions_of(target: Target, keys: Any, count: int) -> Any:
        no_key = Template(_NO_KEY, target).constant or ""
        return _partitions_of(keys.cast(pyarrow.large_binary()), no_key.encode(), count)

    def _messages(self, changes: Changes) -> tuple[Changes, Messages]:
        """Return messages, and the changes that they were made from."""
        if self._settings.outbox is not None:
            changes = self._settings.outbox.events_of(changes)
            return changes, self._settings.outbox.messages_of(changes)
        changes = self._split_moved_updates(changes)
        key = self._sink.key(changes.target)
        assert self._settings.format != "drainer", "its transactions are collected first"
        return changes, messages_of(
            changes,
            self._settings.format,
            key,
            debezium=self._settings.debezium,
            schema_ids=self._sink.schema_ids(changes),
            counts=None if self._counted is None else self._counted.counts_before(changes),
        )

    def _headers(self, changes: Changes, messages: Messages) -> Headers | None:
        """Return the headers of each message, None if messages have none."""
        if self._settings.outbox is not None:
            return self._settings.outbox.headers_of(changes)
        if not self._settings.headers:
            return None
        return [[(name, text.encode()) for name, text in own] for own in headers_of(changes, messages)]

    def _send(
        self, topic: str, messages: Messages, indexes: Any, partitions: Any, headers: Headers | None
    ) -> None:
        # A stable sort keeps the order of messages within a partition.
        order = numpy.argsort(partitions, kind="stable")
        cuts = numpy.flatnonzero(numpy.diff(partitions[order])) + 1
        for run in numpy.split(order, cuts):
            partition = int(partitions[run[0]])
            for start in range(0, len(run), _MESSAGES_AT_ONCE):
                chosen = indexes[run[start : start + _MESSAGES_AT_ONCE]]
                selected = pyarrow.array(chosen)
                values = messages.value.take(selected)
                keys = messages.key.take(selected)
                records = [
                    {"value": value, "key": key}
                    for value, key in zip(values.to_pylist(), keys.to_pylist(), strict=True)
                ]
                if headers is not None:
                    for record, index in zip(records, chosen, strict=True):
                        record["headers"] = headers[index]
                deleted = pc.equal(messages.kind.take(selected), DELETE).to_pylist()
                size = values.nbytes + keys.nbytes
                self._bytes += size
                records = self._with_tombstones(records, deleted)
                # Store large messages only now, because messages that are not sent must not be stored either.
                self._store_large(topic, records)
                self._producer.send(topic, partition, records, size)

    def _store_large(self, topic: str, records: list[dict[str, Any]]) -> None:
        """Replace values above the configured size by references to their files."""
        claim_check = self._settings.claim_check
        if claim_check is None:
            return
        for record in records:
            if record["value"] is not None and len(record["value"]) > claim_check.above:
                record["value"] = claim_check.store(topic, record["value"])

    def _with_tombstones(
        self, records: list[dict[str, Any]], deleted: Sequence[bool]
    ) -> list[dict[str, Any]]:
        """Return records for the library, with a tombstone after each delete, or instead of each delete."""
        if not any(deleted):
            return records
        keeps_deletes = self._settings.deletes not in ("tombstone", "drop")
        sent: list[dict[str, Any]] = []
        for record, is_deleted in zip(records, deleted, strict=True):
            if keeps_deletes or not is_deleted:
                sent.append(record)
            if is_deleted and self._sink.tombstones and record["key"] is not None:
                sent.append(record | {"value": None})
        return sent


def _as_postimages(changes: Changes) -> Changes:
    """Return changes with one kind for both images of updates, so that the kind does not affect the
    partition.
    """
    rows = changes.rows
    index = rows.schema.get_field_index("_change_type")
    kinds = rows.column(index)
    kinds = pc.if_else(pc.equal(kinds, "update_preimage"), "update_postimage", kinds)
    return changes.with_rows(rows.set_column(index, rows.schema.field(index), kinds))


def _partitions_of(keys: Any, no_key: bytes, count: int) -> Any:
    """Return the partition of each key. A null key has the partition of `no_key`."""
    keys = pc.fill_null(keys, pyarrow.scalar(no_key, pyarrow.large_binary()))
    batch = pyarrow.record_batch([keys], ["key"])
    return pyarrow.array(_native.partitions(batch, count)).to_numpy(zero_copy_only=False)


def position_topic(settings: "Settings", pipeline: str) -> str:
    """Return the topic with the batch numbers of a pipeline."""
    named = settings.positions or f"penstock.positions.{pipeline}"
    return _TOPIC_LETTERS.sub("_", named)[:_TOPIC_LENGTH_MAX]


def position_key(mark: BatchMark, part: int) -> bytes:
    """Return the key of the records of a part in the position topic."""
    return f"{mark.generation}/{part}".encode()


def topic_of(template: str, target: Target) -> str | None:
    """Return the topic of a target, None if it depends on rows. Raises OptionInvalid."""
    own_text = re.sub(r"\{[^{}]*\}", "", template)
    if _TOPIC_LETTERS.search(own_text):
        raise OptionInvalid(
            f"{template!r} cannot name topics",
            hint="Outside braces, use letters, digits, dots, dashes and underscores",
        )
    constant = Template(template, target).constant
    return None if constant is None else _valid_topic(constant)


def _valid_topic(name: str) -> str:
    """Return a valid topic name. Invalid characters become underscores, as in Debezium's topics."""
    topic = _TOPIC_LETTERS.sub("_", name)
    if not topic or len(topic) > _TOPIC_LENGTH_MAX or topic in (".", ".."):
        raise OptionInvalid(
            f"{name!r} cannot be the name of a topic",
            hint="It may have 1 to 249 letters and cannot be . or ..: change topic of the sink",
        )
    return topic
