# SPDX-License-Identifier: Apache-2.0
"""Ranges of the logs kept beside the kernel: any cut gives the rows of the whole, and gives each once."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.binlog_bytes import FORMAT_DESCRIPTION, MAGIC, Event, assemble, events
from tests.block_cutting import SMALL_LOGS
from tests.decoding import Row, decode, decode_range
from tests.nonempty import each

FILE = "binlog.000001"
# A prime, so that cuts fall on every part of an event.
CUT_STEP_BYTES = 97
# Less than an event's header has: searching needs more bytes again and again.
SHORT_BUFFER_BYTES = 13


def without_checksum(event: Event) -> Event:
    if event.code == FORMAT_DESCRIPTION:
        # Its last byte names the algorithm; it keeps a checksum in any case.
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
def test_cut_anywhere_gives_every_row_once(log: Path, buffer_bytes: int) -> None:
    content = log.read_bytes()
    whole = decode(content, file=FILE).rows()
    for cut in each(cuts(content), least=10):
        assert rows_of_ranges(content, cut, buffer_bytes) == whole


@pytest.mark.parametrize("log", SMALL_LOGS, ids=lambda path: path.stem)
def test_cut_of_a_log_without_checksums_gives_every_row_once(log: Path) -> None:
    content = assemble(map(without_checksum, events(log.read_bytes())))
    whole = decode(content, file=FILE).rows()
    for cut in each(cuts(content), least=10):
        assert rows_of_ranges(content, cut, 1 << 20) == whole
