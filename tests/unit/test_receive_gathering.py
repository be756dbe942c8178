# SPDX-License-Identifier: Apache-2.0
"""How many bytes the receiver collects before it appends them to the log."""

import itertools
from collections.abc import Sequence
from threading import Event
from typing import Any, cast

import pytest

from penstock._native import BlockCutter
from penstock.capture.receive import Progress, Receiver, gather_seconds
from penstock.errors import ConnectionLost
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import CAPTURE_CHUNK_BYTES, MIB
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from penstock.mysql.replica import ReplicaStream
from tests.support.binlog.block_cutting import framed
from tests.support.binlog.events import assemble, events
from tests.support.binlog.forged_log import insert, log_head
from tests.support.logstore.source import SETTINGS

FILE = "mysql-bin.000001"


class ScriptedStream:
    """A dump whose packets arrive in bursts. The first check after a burst finds no further bytes."""

    can_drain = has_read_all = False

    def __init__(self, bursts: Sequence[bytes], *, semi_sync: bool) -> None:
        self._bursts = list(bursts)
        self._looks = 0
        self.semi_sync = semi_sync
        self.delivered = False

    def receive_into(self, buffer: memoryview) -> int:
        """Receive the rest of a burst."""
        self._looks = 0
        if not self._bursts:
            raise ConnectionLost("the script is over")
        size = min(len(buffer), len(self._bursts[0]))
        buffer[:size] = self._bursts[0][:size]
        self._bursts[0] = self._bursts[0][size:]
        if not self._bursts[0]:
            del self._bursts[0]
        return size

    def more_waiting(self) -> bool:
        """Return whether another burst remains; the first call after a burst returns False."""
        self._looks += 1
        return self._looks != 1 and bool(self._bursts)


def stored_sizes(note_bytes: int, *, semi_sync: bool = False) -> list[int]:
    """Return the size of each append for a dump with three commits of a note, each in its own burst."""
    head = log_head(1)
    start = offset = len(head)
    bursts: list[bytes] = []
    sequence = 1
    for number in (1, 2, 3):
        content = assemble(insert(number, "shop.notes", number, b"n" * note_bytes), offset=offset)
        offset += len(content)
        parts = [content[event.offset : event.offset + event.size] for event in events(content, offset=0)]
        mark = b"\xef\x00" if semi_sync else b""
        bursts.append(b"".join(framed(parts, mark, sequence)))
        sequence += len(parts)
    common: dict[str, Any] = {"epoch": 0, "server_id": 1, "flavor": "mysql"}
    ends = [start]
    settings = SETTINGS.model_copy(update={"mode": "memory", "memory_bytes": 8 * MIB})
    with MemoryLog.open_memory(settings, instance="shop") as log:
        log.begin_epoch(
            **common, server_key="mysql:1", version="9.7.4", file=FILE, offset=start, gtid_set=NO_GTIDS
        )
        log.begin_file(FILE, start, head[4:], NO_GTIDS, **common)
        options: dict[str, Any] = {"live": True, "head": head, "semi_sync": semi_sync}
        cutter = BlockCutter(epoch=0, file=FILE, offset=start, flavor="mysql", **options)
        receiver = Receiver(
            log,
            Progress(),
            Event(),
            **common,
            chunk_bytes=CAPTURE_CHUNK_BYTES,
            schemas=None,
            hold=lambda why: None,
            arrived=lambda: ends.append(cast(Position, log.visible).offset),
        )
        with pytest.raises(ConnectionLost):
            receiver.receive(cast(ReplicaStream, ScriptedStream(bursts, semi_sync=semi_sync)), cutter)
    assert ends[-1] == offset, "every commit is stored"
    return [end - begin for begin, end in itertools.pairwise(ends)]


def test_bursts_of_a_fast_server_are_appended_together() -> None:
    assert len(stored_sizes(MIB // 2)) < 3


def test_bursts_are_appended_at_once_if_they_are_small_or_await_acknowledgement() -> None:
    assert len(stored_sizes(1_000)) == 3
    assert len(stored_sizes(MIB // 2, semi_sync=True)) == 3


def test_only_a_fast_server_is_given_time_to_send_more() -> None:
    # A megabyte after half a second of silence is a large commit, and 50 commits in 25 ms are a busy server.
    assert gather_seconds(MIB, 0.5) == 0
    assert gather_seconds(50 * 500, 0.025) == 0
    assert gather_seconds(5_000, 0.00001) == 0
    # 400 MB/s: the rest of two megabytes would take longer than the longest wait.
    assert gather_seconds(40_000, 0.0001) == gather_seconds(400_000, 0.001) == 0.002
    assert 0 < gather_seconds(2 * MIB - 100_000, 0.004) < 0.001
    assert gather_seconds(3 * MIB, 0.006) == 0
