# SPDX-License-Identifier: Apache-2.0
"""The interface through which retention, compression and tiering change L1 (the segment index).

The running log and a closed log folder both implement it.
"""

from typing import Protocol, Self

from penstock.errors import LogDamaged
from penstock.logstore.disk import Disk
from penstock.logstore.index import SegmentIndex
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.records import COLD, SegmentRecord


class SegmentCatalog(Protocol):
    """A log's L1, as it is changed by retention, compression and tiering."""

    @property
    def segments(self) -> SegmentIndex:
        """The current segments."""

    def replace(self, segment: SegmentRecord) -> None:
        """Replace the record that has the same version, durably."""

    def drop(self, versions: set[int]) -> None:
        """Remove segments from L1, durably. Readers are no longer sent to them."""


class FolderCatalog:
    """The L1 of a folder that no capture is writing. The caller holds the log's lock."""

    def __init__(self, disk: Disk, layout: Layout, segments: SegmentIndex) -> None:
        self._disk = disk
        self._layout = layout
        self.segments = segments

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self:
        """Read the folder's L1. Raises LogDamaged if it is missing or damaged."""
        segment_index = SegmentIndex.load(disk, layout.segments_index)
        if segment_index is None:
            raise LogDamaged(
                f"{layout.segments_index} is missing or damaged",
                position=f"{layout.segments_index.name}:0",
                hint="Run: penstock log verify --heal",
            )
        return cls(disk, layout, segment_index)

    def replace(self, segment: SegmentRecord) -> None:
        """Replace the record that has the same version."""
        self._write(self.segments.put(segment))

    def drop(self, versions: set[int]) -> None:
        """Remove segments from L1."""
        self._write(SegmentIndex([segment for segment in self.segments if segment.version not in versions]))

    def _write(self, segments: SegmentIndex) -> None:
        segments.write(self._disk, self._layout.segments_index)
        self.segments = segments


def stored_segment(layout: Layout, segment: SegmentRecord) -> StoredSegment:
    """Return where a segment is stored in the folder, based on its L1 record."""
    cold = segment.state == COLD
    return StoredSegment(
        segment.version,
        segment.hour,
        layout.segment(segment.hour, segment.version, cold),
        cold,
        segment.epoch,
        segment.file_number,
    )
