# SPDX-License-Identifier: Apache-2.0
"""A log that begins in the middle of TiCDC's topic has only whole transactions, and all of them."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from penstock.errors import SequenceGap
from penstock.ticdc.kafka_messages import KafkaMessages
from penstock.ticdc.kafka_reader import KafkaReader, KafkaStart
from penstock.ticdc.row_changes import RowChange
from penstock.tidb.messages import LOGICAL_BITS
from tests.support.ticdc.topics import row, watermark

TOPIC = "shop"
PARTITIONS = 3
RUNS = 60
BEGIN_MS = 1_800_000_000_000
RUN_MS = 40_000


@dataclass(frozen=True)
class SentMessage:
    """A message with the methods of the client library's messages."""

    number: int
    at: int
    sent_ms: int
    text: str

    def topic(self) -> str:
        return TOPIC

    def partition(self) -> int:
        return self.number

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return confluent_kafka.TIMESTAMP_CREATE_TIME, self.sent_ms

    def value(self) -> bytes:
        return self.text.encode()

    def error(self) -> None:
        return None


class TopicConsumer:
    """A consumer of messages in memory. Each poll returns the next messages of a random partition."""

    def __init__(
        self,
        partitions: Sequence[Sequence[SentMessage]],
        bounds: Sequence[tuple[int, int]],
        random: Random,
    ) -> None:
        self._partitions = partitions
        self._bounds = dict(enumerate(bounds))
        self._random = random
        self._offsets: dict[int, int] = {}

    def list_topics(self, *, timeout: float) -> Any:
        partitions = dict.fromkeys(range(len(self._partitions)))
        return SimpleNamespace(topics={TOPIC: SimpleNamespace(partitions=partitions)})

    def get_watermark_offsets(self, partition: Any, *, timeout: float) -> tuple[int, int]:
        return self._bounds[partition.partition]

    def assign(self, partitions: Iterable[Any]) -> None:
        self._offsets = {partition.partition: partition.offset for partition in partitions}

    def poll(self, timeout: float) -> SentMessage | None:
        unread = [number for number, at in self._offsets.items() if at < len(self._partitions[number])]
        if not unread:
            return None
        number = self._random.choice(unread)
        at = self._offsets[number]
        self._offsets[number] = at + 1
        low, high = self._bounds[number]
        # Further messages arrive after the request for the bounds.
        self._bounds[number] = low, max(high, at + 1)
        return self._partitions[number][at]

    def consume(self, count: int, *, timeout: float) -> list[SentMessage]:
        messages = (self.poll(0) for _ in range(self._random.randrange(4)))
        return [message for message in messages if message is not None]

    def pause(self, partitions: Any) -> None: ...

    def resume(self, partitions: Any) -> None: ...

    def close(self) -> None: ...


def sent_partitions(random: Random) -> tuple[list[list[SentMessage]], dict[int, set[int]]]:
    """Return what TiCDC sends to each partition, and the keys of each transaction.

    Every row is sent up to three seconds after its commit, so that some rows are far ahead of the watermark.
    The clocks of TiDB and of Kafka differ.
    """
    clock_ms = BEGIN_MS + random.randint(-4000, 4000)
    rows: list[tuple[int, int, int, int]] = []
    for _ in range(60):
        committed_ms = random.randrange(RUN_MS)
        commit_ts = clock_ms + committed_ms << LOGICAL_BITS | random.randrange(4)
        for number in random.sample(range(PARTITIONS), random.randint(1, PARTITIONS)):
            rows.append((committed_ms + random.randrange(3000), number, commit_ts, len(rows)))
    partitions: list[list[SentMessage]] = []
    for number in range(PARTITIONS):
        sent = [
            (sent_ms, row(commit_ts, "INSERT", key)) for sent_ms, of, commit_ts, key in rows if of == number
        ]
        for sent_ms in range(random.randrange(1000), RUN_MS + 5000, 1000):
            unsent = [commit_ts for row_ms, _, commit_ts, _ in rows if row_ms > sent_ms]
            checkpoint = min([clock_ms + sent_ms - 500 << LOGICAL_BITS, *unsent])
            sent.append((sent_ms, watermark(checkpoint)))
        sent.sort(key=lambda message: (message[0], "WATERMARK" in message[1]))
        partitions.append(
            [SentMessage(number, at, BEGIN_MS + ms, text) for at, (ms, text) in enumerate(sent)]
        )
    keys: dict[int, set[int]] = defaultdict(set)
    for _, _, commit_ts, key in rows:
        keys[commit_ts].add(key)
    return partitions, keys


def topic_reader(consumer: TopicConsumer, monkeypatch: pytest.MonkeyPatch) -> KafkaReader:
    """Return a reader whose client library returns the consumer's messages."""
    monkeypatch.setattr(confluent_kafka, "Consumer", lambda options: consumer)
    return KafkaReader({}, (TOPIC,), KafkaMessages(None))


def _key_of(change: RowChange) -> int:
    assert change.after is not None
    key = change.after[0]
    assert isinstance(key, bytes)
    return int(key)


@pytest.mark.parametrize("is_latest", [False, True], ids=["expired", "latest"])
def test_log_that_begins_in_the_middle_has_every_later_transaction_whole(
    monkeypatch: pytest.MonkeyPatch, *, is_latest: bool
) -> None:
    transactions = 0
    for seed in range(RUNS):
        random = Random(seed)
        partitions, keys = sent_partitions(random)
        middles = [random.randrange(len(messages) // 2) for messages in partitions]
        ends = [len(messages) for messages in partitions]
        bounds = [(0, middle) for middle in middles] if is_latest else list(zip(middles, ends, strict=True))
        reader = topic_reader(TopicConsumer(partitions, bounds, random), monkeypatch)
        start = reader.find_start(None, is_latest=is_latest)
        if not is_latest:
            assert reader.find_start(start.commit_ts, is_latest=False) == start
            with pytest.raises(SequenceGap, match="have expired"):
                reader.find_start(start.commit_ts - 1, is_latest=False)
        reader.resume(start, 0)
        read: dict[int, set[int]] = {}
        reader.has_read = True
        while reader.has_read:
            for transaction in reader.read():
                ((_, rows),) = transaction.rows
                read[transaction.commit_ts] = {_key_of(change) for change in rows}
        expected = {commit_ts: keys[commit_ts] for commit_ts in sorted(keys) if commit_ts > start.commit_ts}
        assert read == expected, seed
        assert list(read) == sorted(read), seed
        transactions += len(read)
    assert transactions > 5 * RUNS


def sent(number: int, *texts: str) -> list[SentMessage]:
    """Return the messages of a partition."""
    return [SentMessage(number, at, BEGIN_MS, text) for at, text in enumerate(texts)]


def test_offsets_of_an_added_partition_are_recorded_after_its_first_watermark(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    added = sent(1, row(120, "INSERT", 1), watermark(121))
    consumer = TopicConsumer([[], added], [(0, 0), (0, 2)], Random(0))
    monkeypatch.setattr(consumer, "consume", lambda count, *, timeout: [])
    reader = topic_reader(consumer, monkeypatch)
    reader.resume(KafkaStart(0, {(TOPIC, 0): 0}), 110)
    assert reader.offsets() == {(TOPIC, 0): 0}
    list(reader.read())
    assert reader.offsets() == {(TOPIC, 0): 0}, "rows may follow that are missing in the log"
    list(reader.read())
    assert reader.offsets() == {(TOPIC, 0): 0, (TOPIC, 1): 0}


@pytest.mark.parametrize("commit_ts", [105, 110])
def test_added_partition_with_rows_up_to_the_end_of_the_log_is_a_gap(
    commit_ts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = sent(1, row(commit_ts, "INSERT", 1))
    reader = topic_reader(TopicConsumer([[], added], [(0, 0), (0, 1)], Random(0)), monkeypatch)
    reader.resume(KafkaStart(0, {(TOPIC, 0): 0}), 110)
    with pytest.raises(SequenceGap, match="partition 1 of shop was added"):
        list(reader.read())
