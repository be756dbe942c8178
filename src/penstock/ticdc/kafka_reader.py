# SPDX-License-Identifier: Apache-2.0
"""Reads TiCDC's topics as transactions in commit order, up to the lowest watermark of all partitions.

Partitions are assigned, without a consumer group: the offsets are recorded with the log. Memory is bounded:
partitions that are ahead are paused while many changes are buffered.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import (
    EventUnsupported,
    LimitExceeded,
    PenstockError,
    SequenceGap,
    ServerBusy,
    SourceMissing,
)
from penstock.kafka_library import error_of, library, translate_errors
from penstock.limits import MIB
from penstock.settings.ticdc import TicdcSettings, kafka_source
from penstock.ticdc.kafka_messages import KafkaMessages, SinkRow, SinkStatement, Watermark
from penstock.ticdc.row_changes import Change, RowChange
from penstock.ticdc.schema_files import TableSchema
from penstock.ticdc.transactions import SinkTransaction, rows_by_key
from penstock.ticdc.watermarks import WatermarkMerge
from penstock.tidb.messages import LOGICAL_BITS

# A topic and the number of a partition.
Partition = tuple[str, int]

_ANSWER_SECONDS = 30.0
# How long to wait for a watermark. TiCDC sends one to every partition about each second.
_WATERMARK_SECONDS = 60.0
# TiDB's timestamps, the message times, and the order in which several TiCDC servers send differ by less than
# this.
_CLOCKS_DIFFER_MS = 10_000
_PARTITIONS_CHECKED_SECONDS = 10.0
_MESSAGES_AT_ONCE = 1000
_MESSAGES_CHECKED_MAX = 10_000
_SILENCE_SECONDS = 5.0
_POLL_SECONDS = 0.5
# Above the first number of buffered bytes, only the partitions that block the others are read. Above the
# second number, no partition is read.
_HELD_BYTES = 64 * MIB
_HELD_BYTES_MAX = 1024 * MIB
HINT_WATERMARKS = "Check that the changefeed is running, with enable-tidb-extension=true in its sink URI"
_HINT_GAP = "Begin a new log, and read the tables again; let the topic's retention exceed the longest stop"


@dataclass(frozen=True)
class KafkaStart:
    """The commit timestamp after which a log starts, and the offset at which reading of each partition
    begins.
    """

    commit_ts: int
    offsets: Mapping[Partition, int]


class KafkaReader:
    """Reads TiCDC's messages from topics. Used by one thread."""

    def __init__(
        self, options: Mapping[str, Any], topics: Sequence[str], messages: KafkaMessages, *, held_max: int = 0
    ) -> None:
        """`options` are the options of the Kafka client. Raises DependencyMissing, OptionInvalid."""
        self._topics = topics
        self._messages = messages
        self._held_max = held_max or _HELD_BYTES_MAX
        self._merge = WatermarkMerge[Partition, SinkStatement | SinkRow]((), 0)
        self._paused: set[Partition] = set()
        # Partitions that were added while the topic was read, until their first watermark arrives.
        self._added: set[Partition] = set()
        # The commit timestamps that the log already contains. The log must not get further rows with these
        # timestamps.
        self._recorded_ts = range(0)
        self._checked_at = 0.0
        # Whether the last call found messages.
        self.has_read = False
        with translate_errors("options"):
            self._consumer = library().Consumer(
                {"queued.max.messages.kbytes": 16 << 10}
                | dict(options)
                | {
                    "group.id": "penstock",
                    "enable.auto.commit": False,
                    "auto.offset.reset": "error",
                    "isolation.level": "read_committed",
                }
            )

    @property
    def merge(self) -> WatermarkMerge[Partition, SinkStatement | SinkRow]:
        """The buffered changes, and the watermarks."""
        return self._merge

    def partitions(self) -> list[Partition]:
        """Return all partitions. Raises SourceMissing for a missing topic, and Kafka's errors."""
        with translate_errors("list topics"):
            topics = self._consumer.list_topics(timeout=_ANSWER_SECONDS).topics
        missing = [name for name in self._topics if name not in topics or not topics[name].partitions]
        if missing:
            raise SourceMissing(
                f"Kafka has no topic {missing[0]}",
                hint="Check the source, and that the changefeed is running",
            )
        return [(name, number) for name in self._topics for number in sorted(topics[name].partitions)]

    def find_start(self, commit_ts: int | None, *, is_latest: bool) -> KafkaStart:
        """Return where a new log starts: after a commit timestamp, at the end of the topics, or with the
        first messages that the topics have.

        A partition that has lost its first messages, or whose first messages are passed over, may have had
        rows far ahead of its watermarks. All of these rows were committed before the next message was sent.
        So transactions committed after that time, plus the maximum clock difference, are complete. Raises
        SequenceGap if transactions after the commit timestamp are lost, and SourceMissing if a partition gets
        no watermark.
        """
        offsets, incomplete = {}, []
        for partition in self.partitions():
            low, high = self._bounds(partition)
            offsets[partition] = high if is_latest else low
            if offsets[partition]:
                incomplete.append(partition)
        times = self._times_sent({partition: offsets[partition] for partition in incomplete})
        complete_ts = max(times.values()) + _CLOCKS_DIFFER_MS << LOGICAL_BITS if times else 0
        if commit_ts is not None and complete_ts - 1 > commit_ts:
            raise SequenceGap(
                f"messages after the commit timestamp {commit_ts} have expired: all are there from"
                f" {complete_ts} on",
                hint="Start from a later commit timestamp, such as that of a new dump, or at latest",
            )
        start_ts = max(complete_ts - 1, 0) if commit_ts is None else commit_ts
        return KafkaStart(start_ts, offsets)

    def resume(self, start: KafkaStart, end_ts: int) -> None:
        """Continue from recorded offsets; the log's last commit timestamp is `end_ts`, 0 if it has none.

        The transaction of `end_ts` is read again, because the log may not have all of its statements. Raises
        SequenceGap if the messages at the offsets have expired since.
        """
        offsets = dict(start.offsets)
        partitions = self.partitions()
        if gone := sorted(offsets.keys() - set(partitions)):
            raise SequenceGap(f"the partition {_text(gone[0])} is gone", hint=_HINT_GAP)
        self._added = set(partitions) - offsets.keys()
        for partition in partitions:
            low, high = self._bounds(partition)
            offset = offsets.setdefault(partition, 0)
            if not low <= offset <= high:
                raise SequenceGap(
                    f"{_text(partition)} has the offsets {low} to {high}, and not {offset}, the next to read",
                    hint=_HINT_GAP,
                )
        self._recorded_ts = range(start.commit_ts + 1, end_ts + 1)
        self._merge = WatermarkMerge(offsets.items(), max(end_ts - 1, start.commit_ts))
        self._assign(offsets)
        self._checked_at = time.monotonic()

    def read(self) -> Iterator[SinkTransaction]:
        """Wait briefly for messages, and yield the transactions that are complete with them.

        Propagates Kafka's errors, and errors from `KafkaMessages.read` with the message's position. Raises
        SequenceGap, LimitExceeded, and ServerBusy if the partitions of the topics have changed. After an
        error, create a new reader.
        """
        messages = self._consume()
        self.has_read = bool(messages)
        for message in messages:
            self._take(message)
        for commit_ts, entries in self._merge.release():
            yield from _transactions(commit_ts, entries)
        self._pause()
        if time.monotonic() - self._checked_at >= _PARTITIONS_CHECKED_SECONDS:
            self._refuse_other_partitions()

    def offsets(self) -> dict[Partition, int]:
        """Return where to resume, without added partitions whose changes may precede the log's end."""
        offsets = self._merge.offsets()
        return {partition: offset for partition, offset in offsets.items() if partition not in self._added}

    def first_contents(self) -> Iterator[bytes]:
        """Yield the first messages of every partition, a few thousand in total. Propagates Kafka's errors.

        Partitions answer at different times, so reading ends at the last message of each, or after a silence.
        """
        bounds = {partition: self._bounds(partition) for partition in self.partitions()}
        self._assign({partition: low for partition, (low, _) in bounds.items()})
        unread = {partition for partition, (low, high) in bounds.items() if low < high}
        count, read_at = 0, time.monotonic()
        while unread and count < _MESSAGES_CHECKED_MAX:
            messages = self._consume()
            for message in messages:
                partition = message.topic(), message.partition()
                if message.offset() + 1 >= bounds[partition][1]:
                    unread.discard(partition)
                yield message.value() or b""
            if messages:
                count, read_at = count + len(messages), time.monotonic()
            elif time.monotonic() - read_at > _SILENCE_SECONDS:
                # The last offset of a partition may be a transaction's marker, which is not delivered.
                return

    def close(self) -> None:
        """Disconnect."""
        self._consumer.close()

    def _take(self, message: Any) -> None:
        partition, offset = (message.topic(), message.partition()), message.offset()
        content = message.value() or b""
        try:
            match self._messages.read(content):
                case Watermark(commit_ts):
                    self._merge.advance(partition, offset, commit_ts)
                    self._added.discard(partition)
                case SinkStatement(commit_ts) as statement:
                    self._add(partition, offset, commit_ts, statement, len(content))
                case SinkRow() as row:
                    self._add(partition, offset, row.row.commit_ts, row, len(content))
        except PenstockError as problem:
            problem.position = problem.position or f"{_text(partition)}, offset {offset}"
            raise

    def _add(
        self, partition: Partition, offset: int, commit_ts: int, entry: SinkStatement | SinkRow, size: int
    ) -> None:
        if partition in self._added and commit_ts in self._recorded_ts:
            raise SequenceGap(
                f"{_text(partition)} was added to the topic, and has changes before the log's end",
                hint=_HINT_GAP,
            )
        self._merge.add(partition, offset, commit_ts, entry, size)
        if self._merge.bytes > self._held_max:
            raise LimitExceeded(
                f"{self._merge.bytes} bytes wait for a watermark of {_text(self._merge.slowest[0])}",
                hint=HINT_WATERMARKS,
            )

    def _pause(self) -> None:
        """Pause the partitions that are ahead while many changes are buffered."""
        wanted = set(self._merge.ahead) if self._merge.bytes > _HELD_BYTES else set()
        if wanted == self._paused:
            return
        with translate_errors("pause"):
            self._consumer.resume(_assigned(self._paused - wanted))
            self._consumer.pause(_assigned(wanted - self._paused))
        self._paused = wanted

    def _refuse_other_partitions(self) -> None:
        if set(self.partitions()) != self._merge.offsets().keys():
            raise ServerBusy("the partitions of the topic have changed: the next try reads the new ones")
        self._checked_at = time.monotonic()

    def _times_sent(self, offsets: Mapping[Partition, int]) -> dict[Partition, int]:
        """Return, for each partition, the latest time at which a message between an offset and the next
        watermark was sent.

        The watermark's own time is included. Times are in milliseconds since 1970.
        """
        times: dict[Partition, int] = {}
        waiting = set(offsets)
        self._assign(offsets)
        deadline = time.monotonic() + _WATERMARK_SECONDS
        while waiting:
            for message in self._consume():
                partition = message.topic(), message.partition()
                if partition not in waiting:
                    continue
                kind, time_ms = message.timestamp()
                if kind == library().TIMESTAMP_NOT_AVAILABLE:
                    time_ms = time.time_ns() // 1_000_000
                parsed = self._messages.read(message.value() or b"")
                if isinstance(parsed, Watermark):
                    time_ms = max(time_ms, parsed.commit_ts >> LOGICAL_BITS)
                    waiting.discard(partition)
                times[partition] = max(time_ms, times.get(partition, 0))
            if waiting and time.monotonic() > deadline:
                raise SourceMissing(
                    f"{_text(min(waiting))} got no watermark for {_WATERMARK_SECONDS:.0f} seconds",
                    hint=HINT_WATERMARKS,
                )
        return times

    def _consume(self) -> list[Any]:
        """Return the next messages. Raises SequenceGap if messages have expired, and Kafka's errors."""
        with translate_errors("read"):
            # The library waits until it has the full number of messages, so wait only for the first one.
            first = self._consumer.poll(_POLL_SECONDS)
            messages = [first, *self._consumer.consume(_MESSAGES_AT_ONCE, timeout=0)] if first else []
        for message in messages:
            if (problem := message.error()) is None:
                continue
            if problem.code() == library().KafkaError._AUTO_OFFSET_RESET:
                raise SequenceGap(
                    f"messages have expired before they were read: {problem.str()}", hint=_HINT_GAP
                )
            raise error_of(problem, "read")
        return messages

    def _bounds(self, partition: Partition) -> tuple[int, int]:
        """Return the first offset of a partition, and the offset after its last message."""
        with translate_errors(_text(partition)):
            (assigned,) = _assigned([partition])
            low, high = self._consumer.get_watermark_offsets(assigned, timeout=_ANSWER_SECONDS)
        return low, high

    def _assign(self, offsets: Mapping[Partition, int]) -> None:
        kafka = library()
        with translate_errors("assign"):
            self._consumer.assign(
                [kafka.TopicPartition(*partition, offset) for partition, offset in offsets.items()]
            )


def open_reader(source: str, settings: TicdcSettings) -> KafkaReader:
    """Return a reader of a `ticdc+kafka://` URL. Raises OptionInvalid, DependencyMissing."""
    servers, topics = kafka_source(source)
    account = settings.kafka
    options = account.client_options(servers, account.secret())
    return KafkaReader(options, topics, KafkaMessages(settings.zone))


def _assigned(partitions: Any) -> list[Any]:
    return [library().TopicPartition(*partition) for partition in partitions]


def _text(partition: Partition) -> str:
    return f"partition {partition[1]} of {partition[0]}"


def _transactions(commit_ts: int, entries: Sequence[SinkStatement | SinkRow]) -> Iterator[SinkTransaction]:
    """Yield the statements and the rows of a commit timestamp, each once."""
    statements = list(dict.fromkeys(entry.schema for entry in entries if isinstance(entry, SinkStatement)))
    if statements:
        yield SinkTransaction(commit_ts, statements, ())
    tables: dict[TableSchema, list[RowChange]] = {}
    for entry in entries:
        if isinstance(entry, SinkRow):
            tables.setdefault(entry.schema, []).append(entry.row)
    if tables:
        merged = [(schema, _rows(schema, rows)) for schema, rows in tables.items()]
        yield SinkTransaction(commit_ts, (), merged)


def _rows(schema: TableSchema, rows: Sequence[RowChange]) -> list[RowChange]:
    if any(column.is_key for column in schema.columns):
        return rows_by_key(schema, rows)
    if len(set(rows)) < len(rows):
        raise EventUnsupported(
            f"{schema.database}.{schema.table} has no primary key, and equal rows in one transaction: they"
            " may be repetitions",
            hint="Leave the table out of the changefeed, or give it a primary key",
        )
    return sorted(rows, key=lambda row: row.change is not Change.DELETE)
