# SPDX-License-Identifier: Apache-2.0
"""Ranges of the sample logs: any cut returns every row of the whole log exactly once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import EventUnsupported
from tests.support.binlog.block_cutting import SMALL_LOGS
from tests.support.binlog.decoding import Row, decode, decode_range
from tests.support.binlog.events import (
    FORMAT_DESCRIPTION,
    GTID,
    MAGIC,
    QUERY,
    TRANSACTION_PAYLOAD,
    XID,
    Event,
    assemble,
    events,
    query_body,
)
from tests.support.suite.nonempty import each

FILE = "binlog.000001"
LOGS = {log.stem: log for log in SMALL_LOGS}
# The distance between cuts is a prime, so that cuts fall on every part of an event.
CUT_STEP_BYTES = 97
# The buffer is smaller than an event's header, so that the search repeatedly needs more bytes.
SHORT_BUFFER_BYTES = 13


def without_checksum(event: Event) -> Event:
    if event.code == FORMAT_DESCRIPTION:
        # The last byte of the format description names the algorithm. The format description itself always
        # has a checksum.
        return replace(event, body=event.body[:-1] + b"\0")
    return replace(event, checksum=False)


def rows_of_ranges(content: bytes, cut: int, buffer_bytes: int) -> list[Row]:
    parts = (
        decode_range(content, start, stop, file=FILE, buffer_bytes=buffer_bytes)
        for start, stop in ((0, cut), (cut, len(content)))
    )
    return [row for part in parts for row in part.rows()]


def cuts(content: bytes) -> Iterator[int]:
    yield from range(len(MAGIC), len(content), CUT_STEP_BYTES)


@pytest.mark.parametrize("buffer_bytes", [SHORT_BUFFER_BYTES, 1 << 20])
@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_any_cut_returns_every_row_once(log: Path, buffer_bytes: int) -> None:
    content = log.read_bytes()
    whole = decode(content, file=FILE).rows()
    for cut in each(cuts(content), least=10):
        assert rows_of_ranges(content, cut, buffer_bytes) == whole


@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_any_cut_of_a_log_without_checksums_returns_every_row_once(log: Path) -> None:
    content = assemble(map(without_checksum, events(log.read_bytes())))
    whole = decode(content, file=FILE).rows()
    for cut in each(cuts(content), least=10):
        assert rows_of_ranges(content, cut, 1 << 20) == whole


def transactions(log: Path, code: int) -> tuple[list[Event], list[list[Event]]]:
    """Return the events before a log's first transaction, and the transactions whose last event has this
    type.
    """
    head: list[Event] = []
    groups = [head]
    for event in events(log.read_bytes()):
        if event.code == GTID:
            groups.append([])
        groups[-1].append(event)
    return head, [group for group in groups[1:] if group[-1].code == code]


def test_commit_number_of_a_skipped_commit_is_not_reused() -> None:
    head, (first, second, *_) = transactions(LOGS["mysql-9.7-2"], XID)
    commit = replace(second[-1], code=QUERY, body=query_body("COMMIT"))
    content = assemble([*head, *first, *second[:-1], commit])
    start = next(event.offset for event in events(content) if event.body == second[0].body)
    options = {"emit": "messages", "dialect": "maxwell"}
    for passed in (0, start):
        decoded = decode(content, FILE, start=(1, passed), **options)
        messages = [
            row for batches in decoded.batches.values() for batch in batches for row in batch.to_pylist()
        ]
        assert messages
        assert ('"xid"' in str(messages)) == (passed == 0)


def test_damaged_payload_outside_the_range_stops_nothing() -> None:
    head, (first, second, *_) = transactions(LOGS["mysql-9.7-4"], TRANSACTION_PAYLOAD)
    damaged = [*first[:-1], replace(first[-1], body=first[-1].body[:-40] + bytes(40))]
    for broken in (damaged, [*first[:-1], replace(first[-1], body=b"\1\xfe")]):
        content = assemble([*head, *broken, *second])
        start = next(event.offset for event in events(content) if event.body == second[0].body)
        expected = decode(assemble([*head, *second]), FILE)
        assert len(decode(content, FILE, start=(1, start)).rows()) == len(expected.rows())


def test_cut_between_a_gtid_and_its_begin_is_refused_without_reliable_gtids() -> None:
    """The previous range also returns the transaction, even if no other transaction follows."""
    (version, *head), (first, second, *_) = transactions(LOGS["mysql-9.7-2"], XID)
    old = replace(version, body=version.body[:2] + b"5.6.51".ljust(50, b"\0") + version.body[52:])
    content = assemble([old, *head, *first, *second])
    begin = next(event.offset for event in events(content) if event.body == first[1].body)
    stop = next(event.offset for event in events(content) if event.body == second[0].body)
    assert decode_range(content, 0, begin, file=FILE).rows()
    with pytest.raises(EventUnsupported, match="between a GTID event and its BEGIN"):
        decode_range(content, begin, stop, file=FILE)
