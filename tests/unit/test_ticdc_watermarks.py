# SPDX-License-Identifier: Apache-2.0
"""The merge of partitions by watermark: whole transactions in commit order, each once, after any crash."""

from random import Random

from penstock.ticdc.watermarks import WatermarkMerge

PARTITIONS = 3
RUNS = 300

# The content of each partition: rows and watermarks with their commit timestamps.
_Sent = list[list[tuple[str, int]]]
# A row's partition and commit timestamp.
_Row = tuple[int, int]


def sent_partitions(random: Random) -> tuple[_Sent, set[_Row]]:
    """Return what TiCDC sends to each partition, with repetitions after restarts, and the distinct rows."""
    partitions: _Sent = [[] for _ in range(PARTITIONS)]
    rows: set[_Row] = set()
    for checkpoint in range(0, 6 * random.randint(1, 5), 6):
        for commit_ts in sorted(
            random.choices(range(checkpoint + 1, checkpoint + 7), k=random.randint(0, 6))
        ):
            partition = random.randrange(PARTITIONS)
            partitions[partition].append(("row", commit_ts))
            rows.add((partition, commit_ts))
        if random.random() < 0.5:
            # A restart: the rows after the checkpoint are sent again.
            for partition, commit_ts in sorted(row for row in rows if row[1] > checkpoint):
                partitions[partition].append(("row", commit_ts))
        for queue in partitions:
            queue.append(("watermark", checkpoint + 7))
    return partitions, rows


def run(
    partitions: _Sent,
    random: Random,
    offsets: dict[int, int],
    released: list[tuple[int, set[_Row]]],
    *,
    to_end: bool,
) -> dict[int, int] | None:
    """Read until the end or a crash; return the offsets that were recorded before a crash."""
    merge = WatermarkMerge[int, _Row](offsets.items(), released[-1][0] if released else 0)
    read, recorded = dict(offsets), offsets
    while unread := [number for number in range(PARTITIONS) if read[number] < len(partitions[number])]:
        number = random.choice(unread)
        kind, commit_ts = partitions[number][read[number]]
        if kind == "row":
            merge.add(number, read[number], commit_ts, (number, commit_ts), 1)
        else:
            merge.advance(number, read[number], commit_ts)
        read[number] += 1
        for transaction_ts, entries in merge.release():
            assert transaction_ts < merge.lowest
            released.append((transaction_ts, set(entries)))
        if random.random() < 0.3:
            recorded = merge.offsets()
        if not to_end and random.random() < 0.1:
            return recorded
    assert merge.bytes == 0
    return None


def test_every_transaction_is_released_once_in_order_after_any_crash() -> None:
    crashes = repetitions = 0
    for seed in range(RUNS):
        random = Random(seed)
        partitions, rows = sent_partitions(random)
        released: list[tuple[int, set[_Row]]] = []
        offsets: dict[int, int] | None = dict.fromkeys(range(PARTITIONS), 0)
        while offsets is not None:
            offsets = run(partitions, random, offsets, released, to_end=crashes % 7 == 6)
            crashes += 1
            # TiCDC continues to send watermarks; those before the recorded offsets are not read again.
            last = max(commit_ts for _, commit_ts in partitions[0]) + 1
            for queue in partitions:
                queue.append(("watermark", last))
        repetitions += sum(kind == "row" for queue in partitions for kind, _ in queue) - len(rows)
        timestamps = sorted({commit_ts for _, commit_ts in rows})
        assert released == [(ts, {row for row in rows if row[1] == ts}) for ts in timestamps], seed
    assert crashes > RUNS, "some runs crashed"
    assert repetitions > 0


def test_partition_without_a_watermark_holds_up_the_others() -> None:
    merge = WatermarkMerge[int, str]([(0, 7), (1, 9)], 0)
    merge.add(0, 7, 5, "a", 3)
    merge.advance(0, 8, 10)
    assert (list(merge.release()), merge.slowest, merge.ahead) == ([], [1], [0])
    assert (merge.bytes, merge.offsets()) == (3, {0: 7, 1: 9})
    merge.advance(1, 9, 6)
    assert list(merge.release()) == [(5, ["a"])]
    assert (merge.bytes, merge.offsets()) == (0, {0: 9, 1: 10})


def test_row_at_the_watermark_waits_because_its_transaction_may_not_be_whole() -> None:
    merge = WatermarkMerge[int, str]([(0, 0)], 0)
    merge.add(0, 0, 5, "a", 1)
    merge.advance(0, 1, 5)
    assert list(merge.release()) == []
    merge.add(0, 2, 5, "b", 1)
    merge.advance(0, 3, 6)
    assert list(merge.release()) == [(5, ["a", "b"])]


def test_lower_watermark_of_a_restarted_changefeed_means_nothing() -> None:
    merge = WatermarkMerge[int, str]([(0, 0)], 0)
    merge.advance(0, 0, 9)
    merge.advance(0, 1, 4)
    merge.add(0, 2, 8, "repeated", 1)
    assert merge.lowest == 9
    list(merge.release())
    merge.add(0, 3, 8, "repeated", 1)
    assert (merge.position, merge.repeated) == (8, 1)


def test_entries_of_a_transaction_are_in_the_order_of_their_partitions_whichever_arrived_first() -> None:
    for arrived in ((0, 1), (1, 0)):
        merge = WatermarkMerge[int, str]([(0, 0), (1, 0)], 0)
        for partition in arrived:
            merge.add(partition, 0, 5, f"first of {partition}", 1)
            merge.add(partition, 1, 5, f"second of {partition}", 1)
            merge.advance(partition, 2, 6)
        entries = ["first of 0", "second of 0", "first of 1", "second of 1"]
        assert list(merge.release()) == [(5, entries)]
