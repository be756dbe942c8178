# SPDX-License-Identifier: Apache-2.0
"""Receive into a log in memory: readers still find the recent part, however fast the bytes arrive."""

from threading import Event
from typing import Any, cast

from penstock._native import BlockCutter
from penstock.capture.receive import Progress, Receiver
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import CAPTURE_CHUNK_BYTES, MIB
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from tests.support.binlog.events import assemble
from tests.support.binlog.forged_log import insert, log_head
from tests.support.logstore.source import SETTINGS

FILE = "mysql-bin.000001"
# Each transaction is short, and all of them together fill the memory many times.
NOTE = b"n" * 16_000
TRANSACTIONS = 400


def test_fast_capture_into_memory_keeps_most_of_it_for_readers() -> None:
    settings = SETTINGS.model_copy(update={"mode": "memory", "memory_bytes": MIB, "segment_bytes": MIB})
    head = log_head(1)
    start = offset = len(head)
    common: dict[str, Any] = {"epoch": 0, "server_id": 1, "flavor": "mysql"}
    with MemoryLog.open_memory(settings, instance="shop") as log:
        log.begin_epoch(
            **common, server_key="mysql:1", version="9.7.4", file=FILE, offset=start, gtid_set=NO_GTIDS
        )
        log.begin_file(FILE, start, head[4:], NO_GTIDS, **common)
        cutter = BlockCutter(epoch=0, file=FILE, offset=start, flavor="mysql", live=False, head=head)
        receiver = Receiver(
            log,
            Progress(),
            Event(),
            **common,
            chunk_bytes=CAPTURE_CHUNK_BYTES,
            schemas=None,
            hold=lambda why: None,
            arrived=lambda: None,
        )
        shortest = MIB
        for number in range(TRANSACTIONS):
            content = assemble(cast(Any, insert(number + 1, "shop.notes", number, NOTE)), offset=offset)
            assert receiver.feed(content, cutter) == len(content)
            offset += len(content)
            earliest = cast(Position, log.earliest())
            if earliest.offset > start:
                shortest = min(shortest, offset - earliest.offset)
    assert offset - start > 4 * MIB
    assert shortest > MIB // 2, "readers that are not registered lose their place early"
