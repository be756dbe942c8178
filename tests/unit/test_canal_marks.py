# SPDX-License-Identifier: Apache-2.0
"""The stored marks of a Canal client's cursor: after a restart the client continues at a mark, so each mark
is the end of a transaction.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from penstock.logstore.log import Log
from penstock.model import Position, TablePatterns
from penstock.serve.arrivals import Arrivals
from penstock.serve.canal.cursor import Cursor, Mark
from penstock.serve.pieces import PieceMemory, Pieces, View
from penstock.serve.threads import Threads
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, boundaries, open_log

VIEW = View("canal", TablePatterns("*.*"))


class Instance:
    """An instance whose log does not grow any more."""

    name = "shop"

    def __init__(self, log: Log) -> None:
        self._log = log

    def log(self) -> Log:
        """Return it."""
        return self._log


async def marks_of(log: Log, pool: ThreadPoolExecutor, limit: int) -> list[Position]:
    """Return the marks of a client that takes batches of this many bytes."""
    pieces = Pieces(Instance(log), Arrivals(), PieceMemory(), Threads(decoding=pool, searching=pool))
    (first, *_) = log.extents()
    start = Position(first.epoch, first.file, first.start)
    cursor, marks = Cursor("1", pieces, VIEW, Mark(start, "", 0)), [start]
    while (gathered := await cursor.gather(limit, 0.0)) is not None:
        cursor.acknowledge(cursor.give(gathered).id)
        marks.append(cursor.mark.position)
    return marks


@pytest.mark.parametrize("limit", [1, 1000])
def test_every_mark_is_the_end_of_a_transaction_in_every_file(limit: int) -> None:
    with open_log(SimulatedDisk()) as log, ThreadPoolExecutor(2) as pool:
        Captured(log).run()
        marks = asyncio.run(marks_of(log, pool, limit))
        assert marks == sorted(marks)
        assert marks[-1] == log.visible
        assert len({(mark.epoch, mark.file) for mark in marks}) == len(
            {(extent.epoch, extent.file) for extent in log.extents()}
        )
        ends = boundaries().keys() | {replace(mark, offset=4) for mark in marks}
        assert [mark for mark in marks[1:] if mark not in ends] == []
