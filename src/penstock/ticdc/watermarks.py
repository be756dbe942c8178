# SPDX-License-Identifier: Apache-2.0
"""Merges the partitions of a topic by commit timestamp, up to the lowest of their watermarks.

    partition 0   5 7 9 |10      the watermark 10: all below it was sent to this partition
    partition 1   6 |8           the watermark 8
    released      5 6 7          9 waits for partition 1

Each transaction is released once and whole. Entries at or below the position were released before, so they
are repetitions by TiCDC. The module reads nothing and has no clock.
"""

import heapq
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

PartitionT = TypeVar("PartitionT", bound=Hashable)
EntryT = TypeVar("EntryT")


class WatermarkMerge(Generic[PartitionT, EntryT]):
    """Holds entries until every partition has advanced past them. Used by one thread."""

    def __init__(self, offsets: Iterable[tuple[PartitionT, int]], position: int) -> None:
        """`offsets` has the offset from which each partition is read. Everything up to `position` was
        released before.
        """
        # The commit timestamp up to which everything was released.
        self.position = position
        # The number of buffered bytes.
        self.bytes = 0
        # Entries that arrived again after they had been released.
        self.repeated = 0
        self._next_offsets = dict(offsets)
        self._watermarks = dict.fromkeys(self._next_offsets, 0)
        # Tuples in the order of commit timestamp, partition and offset, followed by the bytes of the entry.
        self._held: list[tuple[int, PartitionT, int, int, EntryT]] = []
        # The entries of each partition that may not be released yet, by offset.
        self._unreleased: dict[PartitionT, list[tuple[int, int]]] = {
            partition: [] for partition in self._next_offsets
        }

    @property
    def lowest(self) -> int:
        """The lowest watermark; 0 while a partition has none."""
        return min(self._watermarks.values(), default=0)

    @property
    def slowest(self) -> list[PartitionT]:
        """The partitions with the lowest watermark, which block the others."""
        lowest = self.lowest
        return [partition for partition, watermark in self._watermarks.items() if watermark == lowest]

    @property
    def ahead(self) -> list[PartitionT]:
        """The partitions that need not be read before the others have caught up."""
        lowest = self.lowest
        return [partition for partition, watermark in self._watermarks.items() if watermark > lowest]

    def add(self, partition: PartitionT, offset: int, commit_ts: int, entry: EntryT, size: int) -> None:
        """Add an entry of a partition, in the order of its offsets."""
        self._next_offsets[partition] = offset + 1
        if commit_ts <= self.position:
            self.repeated += 1
            return
        self.bytes += size
        heapq.heappush(self._held, (commit_ts, partition, offset, size, entry))
        heapq.heappush(self._unreleased[partition], (offset, commit_ts))

    def advance(self, partition: PartitionT, offset: int, watermark: int) -> None:
        """Process a watermark of a partition. A restarted TiCDC repeats lower watermarks, which are
        ignored.
        """
        self._next_offsets[partition] = offset + 1
        self._watermarks[partition] = max(watermark, self._watermarks[partition])

    def release(self) -> Iterator[tuple[int, list[EntryT]]]:
        """Yield the entries of each transaction below the lowest watermark, and move the position.

        The entries are in the order of partitions and offsets, so another run yields them in the same order.
        """
        lowest = self.lowest
        while self._held and (commit_ts := self._held[0][0]) < lowest:
            entries = []
            while self._held and self._held[0][0] == commit_ts:
                _, _, _, size, entry = heapq.heappop(self._held)
                self.bytes -= size
                entries.append(entry)
            yield commit_ts, entries
            self.position = commit_ts
        self.position = max(self.position, lowest - 1)

    def offsets(self) -> dict[PartitionT, int]:
        """Return where to read each partition from so that nothing after the position is missing."""
        resumed = {}
        for partition, next_offset in self._next_offsets.items():
            unreleased = self._unreleased[partition]
            while unreleased and unreleased[0][1] <= self.position:
                heapq.heappop(unreleased)
            resumed[partition] = unreleased[0][0] if unreleased else next_offset
        return resumed
