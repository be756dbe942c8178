# SPDX-License-Identifier: Apache-2.0
"""Counting the bytes of calls that have not arrived whole."""

from random import Random

from penstock.tidb.unfinished_calls import PREFACE, UnfinishedCalls

DATA, HEADERS, RESET, WINDOW_UPDATE = 0, 1, 3, 8
END_STREAM, PADDED = 1, 8


def frame(kind: int, stream: int, body: bytes = b"", flags: int = 0) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def counted(*frames: bytes) -> int:
    """Return what is counted after these frames, fed in pieces of any size."""
    content = PREFACE + b"".join(frames)
    counts = set()
    for seed in range(20):
        random, calls, rest = Random(seed), UnfinishedCalls(), content
        while rest:
            size = random.choice((1, 3, 9, 100))
            calls.follow(rest[:size])
            rest = rest[size:]
        counts.add(calls.bytes)
    (count,) = counts
    return count


def test_only_calls_without_their_end_are_counted() -> None:
    begun = [frame(HEADERS, 1), frame(DATA, 1, bytes(70)), frame(WINDOW_UPDATE, 0, bytes(4))]
    assert counted(*begun) == 70
    # The body of a frame may look like any frame.
    assert counted(*begun, frame(HEADERS, 3), frame(DATA, 3, frame(RESET, 1), PADDED)) == 79
    assert counted(*begun, frame(DATA, 1, bytes(30), END_STREAM)) == 0
    assert counted(*begun, frame(DATA, 1, flags=END_STREAM)) == 0
    assert counted(*begun, frame(HEADERS, 1, bytes(5), END_STREAM)) == 0
    assert counted(*begun, frame(RESET, 1, bytes(4))) == 0
    assert counted(*begun, frame(DATA, 5, bytes(30), END_STREAM)) == 70
    assert counted() == 0
