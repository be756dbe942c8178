# SPDX-License-Identifier: Apache-2.0
"""A log for readers that may receive only confirmed bytes, which other copies of the log also have.

This log uses the files and the memory of the writer's log. `follow` sets the end of the confirmed log; later
bytes are treated as if they were not stored yet.
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.gtid_sets import LoggedSet
from penstock.logstore.index import SegmentIndex
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import SegmentRecord
from penstock.logstore.schemas import Settler
from penstock.logstore.segment import SegmentReader
from penstock.model import Position
from penstock.settings.daemon import LogSettings


class ConfirmedLog(LogReader):
    """Reads the confirmed part of the log `stored`, which this process writes. Thread-safe.

    `confirmed_end` returns the end of the confirmed part, a transaction boundary in `stored`, or None if
    nothing is confirmed.
    """

    def __init__(self, stored: Log, confirmed_end: Callable[[], Position | None]) -> None:
        super().__init__(stored.disk, stored.folder, stored.settings.block_bytes)
        self.stored = stored
        self.memory = stored.memory
        self.tier = stored.tier
        self._confirmed_end = confirmed_end
        self.follow()

    @property
    def settings(self) -> LogSettings:
        """The settings of the log."""
        return self.stored.settings

    @property
    def settler(self) -> Settler | None:
        """Resolves table definitions that are in doubt; None before the capture's first session."""
        return self.stored.settler

    @property
    def durable(self) -> Position | None:
        """The end of the data that survives a power failure of this host."""
        return self.stored.durable

    @property
    def time_max_us(self) -> int:
        """The latest commit time in the log, including data that is not confirmed yet."""
        return self.stored.time_max_us

    def follow(self) -> None:
        """Make newly confirmed data visible, and update the list of segments."""
        with self._changed:
            # Read the end before the segments: a list of segments that was read earlier might not contain the
            # segment that has the end.
            end = self._confirmed_end()
            self._epochs = self.stored.epochs
            self._index = _index_up_to(self.stored.segments, end)
            self._visible = end
            self.broken_holds = self.stored.broken_holds

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return all GTIDs before a transaction boundary; see `LogReader.gtid_set`."""
        epoch = self._epochs.get(position.epoch)
        if epoch is None or position != epoch.position:
            self._check_visible(position)
        return self.stored.gtid_set(position)

    def _open(self, record: SegmentRecord) -> SegmentReader:
        return self._open_current(record, self.follow)


def _index_up_to(index: SegmentIndex, end: Position | None) -> SegmentIndex:
    """Return the segments that begin before a position. The last segment counts as open."""
    if end is None:
        return SegmentIndex([])
    order_key = (end.epoch, end.file_number, end.offset)
    last = len(index) - 1
    while last >= 0 and (index[last].epoch, index[last].file_number, index[last].base) >= order_key:
        last -= 1
    if last < 0:
        return SegmentIndex([])
    is_in_last = (index[last].epoch, index[last].file_number) == order_key[:2]
    is_cut = is_in_last and index[last].source_end > end.offset
    if last == len(index) - 1 and not is_cut:
        return index
    kept = [index[number] for number in range(last + 1)]
    return SegmentIndex([*kept[:-1], replace(kept[-1], source_end=0)] if is_cut else kept)
