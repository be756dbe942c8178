# SPDX-License-Identifier: Apache-2.0
"""The seam by which L1 is changed: retention, compression and tiering ask for it, the log and a folder have
it."""

from typing import Protocol, Self

from penstock.errors import LogDamaged
from penstock.logstore.disk import Disk
from penstock.logstore.index import SegmentIndex
from penstock.logstore.layout import Layout, StoredSegment
from penstock.logstore.records import COLD, SegmentRecord


class SegmentCatalog(Protocol):
    """The log's L1, as retention, compression and tiering change it."""

    @property
    def segments(self) -> SegmentIndex:
        """What there is now."""

    def replace(self, segment: SegmentRecord) -> None:
        """Put another record in place of the one of its version, durably."""

    def drop(self, versions: set[int]) -> None:
        """Leave segments out of L1, durably; no reader is sent to them from here on."""


class FolderCatalog:
    """The L1 of a folder that no capture writes now; the caller holds the log's lock."""

    def __init__(self, disk: Disk, layout: Layout, segments: SegmentIndex) -> None:
        self._disk = disk
        self._layout = layout
        self.segments = segments

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self:
        """Read the folder's L1. Raises LogDamaged where it has none that holds."""
        found = SegmentIndex.load(disk, layout.segments_index)
        if found is None:
            raise LogDamaged(
                f"{layout.segments_index} is missing or damaged",
                position=f"{layout.segments_index.name}:0",
                hint="Run: penstock log verify --heal",
            )
        return cls(disk, layout, found)

    def replace(self, segment: SegmentRecord) -> None:
        """Put another record in place of the one of its version."""
        self._write(self.segments.put(segment))

    def drop(self, versions: set[int]) -> None:
        """Leave segments out."""
        self._write(SegmentIndex([one for one in self.segments if one.version not in versions]))

    def _write(self, segments: SegmentIndex) -> None:
        segments.write(self._disk, self._layout.segments_index)
        self.segments = segments


def stored_segment(layout: Layout, segment: SegmentRecord) -> StoredSegment:
    """Return where a segment of the folder lies, by what its L1 record says."""
    cold = segment.state == COLD
    return StoredSegment(
        segment.version,
        segment.hour,
        layout.segment(segment.hour, segment.version, cold),
        cold,
        segment.epoch,
        segment.file_number,
    )
