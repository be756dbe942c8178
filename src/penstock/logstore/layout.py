# SPDX-License-Identifier: Apache-2.0
"""What stands where in a log's folder.

    <folder>/lock                             held by the process that writes
    <folder>/epochs.json                      which server each epoch belongs to
    <folder>/position.json                    how far the log was durable when that was last noted
    <folder>/log_id                           what tells the log's objects in a store from another log's
    <folder>/tier_proofs.json                 which objects of 0.1.0 were proved to be this log's own
    <folder>/segments.index                   L1: a record for each segment
    <folder>/2026112111/<version>.binlog      a segment, named by the commit version of its first byte
    <folder>/2026112111/<version>.binlog.zst  the same, compressed
    <folder>/2026112111/<version>.index       L2: a record for each block of the segment

A name that ends in `.tmp` was not finished and means nothing.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.logstore.disk import TMP_SUFFIX, Disk

SEGMENT_SUFFIX = ".binlog"
COLD_SUFFIX = ".binlog.zst"
INDEX_SUFFIX = ".index"

# Turns a commit version into an epoch and a file number: `EpochFile.place_of`.
PlaceOf = Callable[[int], tuple[int, int]]

_HOUR = re.compile(r"\d{10}")
_SEGMENT = re.compile(r"(\d{19})(\.binlog(?:\.zst)?)")
# A commit version has the offset in its lowest 32 bits, in units of 16 bytes.
_OFFSET_BITS = 32
_OFFSET_UNIT = 16


@dataclass(frozen=True, order=True)
class StoredSegment:
    """A segment as the folder lists it. `version` is the commit version of its first byte, which the log's
    epochs turn back into `epoch` and `file_number`."""

    version: int
    hour: int
    path: Path
    cold: bool
    epoch: int
    file_number: int

    @property
    def index_path(self) -> Path:
        """Where its L2 index lies."""
        return index_path(self.path)

    def begins_at(self, base: int) -> bool:
        """Tell whether the name fits a first byte at this offset of the source file."""
        return self.version & (1 << _OFFSET_BITS) - 1 == base // _OFFSET_UNIT


@dataclass(frozen=True)
class Layout:
    """The paths of one log."""

    folder: Path

    @property
    def lock(self) -> Path:
        """The file that the writing process holds locked."""
        return self.folder / "lock"

    @property
    def epochs(self) -> Path:
        """The epochs' servers."""
        return self.folder / "epochs.json"

    @property
    def position(self) -> Path:
        """The durable position that was last noted."""
        return self.folder / "position.json"

    @property
    def prepared(self) -> Path:
        """The XA transactions that are prepared and have no outcome yet."""
        return self.folder / "prepared.json"

    @property
    def log_id(self) -> Path:
        """What tells the log's objects in a store from another log's; written with the first object."""
        return self.folder / "log_id"

    @property
    def tier_proofs(self) -> Path:
        """Which objects in a store were proved by their bytes to be this log's own."""
        return self.folder / "tier_proofs.json"

    @property
    def segments_index(self) -> Path:
        """The L1 index."""
        return self.folder / "segments.index"

    def hour_folder(self, hour: int) -> Path:
        """The folder of the segments that were begun in an hour (YYYYMMDDHH, UTC)."""
        return self.folder / f"{hour:010d}"

    def segment(self, hour: int, version: int, cold: bool = False) -> Path:
        """The path of a segment."""
        return self.hour_folder(hour) / f"{version:019d}{COLD_SUFFIX if cold else SEGMENT_SUFFIX}"

    def hours(self, disk: Disk) -> list[int]:
        """Return the hours that have a folder, rising."""
        return [int(name) for name in disk.list(self.folder) if _HOUR.fullmatch(name)]

    def segments(self, disk: Disk, load_places: Callable[[], PlaceOf]) -> list[StoredSegment]:
        """Return every segment in the folder, by commit version; of two twins the plain one.

        `load_places` is called after the names were read: an epoch is known before its first segment is.
        """
        found: dict[int, tuple[int, Path, bool]] = {}
        for hour in self.hours(disk):
            folder = self.hour_folder(hour)
            for name in disk.list(folder):
                match = _SEGMENT.fullmatch(name)
                if match is None:
                    continue
                version, cold = int(match.group(1)), match.group(2) == COLD_SUFFIX
                if version not in found or not cold:
                    found[version] = hour, folder / name, cold
        place_of = load_places()
        return [StoredSegment(version, *found[version], *place_of(version)) for version in sorted(found)]

    def left_overs(self, disk: Disk) -> list[Path]:
        """Return the files that were not finished."""
        folders = [self.folder, *(self.hour_folder(hour) for hour in self.hours(disk))]
        return [
            folder / name for folder in folders for name in disk.list(folder) if name.endswith(TMP_SUFFIX)
        ]


def index_path(segment: Path) -> Path:
    """Return where the L2 index of a segment, plain or compressed, lies."""
    return segment.with_name(segment.name.split(".", 1)[0] + INDEX_SUFFIX)


def hour_of(time_s: float) -> int:
    """Return the UTC hour of a time in seconds since 1970, as YYYYMMDDHH."""
    return int(time.strftime("%Y%m%d%H", time.gmtime(time_s)))


def is_log_folder(folder: Path) -> bool:
    """Tell whether a folder of this host holds a log."""
    return (folder / "epochs.json").is_file()
