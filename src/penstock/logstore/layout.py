# SPDX-License-Identifier: Apache-2.0
"""The files in a log's folder.

    <folder>/lock                             locked by the process that writes the log
    <folder>/epochs.json                      the server of each epoch
    <folder>/position.json                    the durable position when it was last saved
    <folder>/log_id                           identifies the log's objects in a shared store
    <folder>/tier_proofs.json                 objects of version 0.1.0 that were proved to belong to this log
    <folder>/segments.index                   L1: a record for each segment
    <folder>/2026112111/<version>.binlog      a segment, named by the commit version of its first byte
    <folder>/2026112111/<version>.binlog.zst  the same, compressed
    <folder>/2026112111/<version>.index       L2: a record for each block of the segment

A name that ends in `.tmp` is an unfinished file and is ignored.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from penstock.logstore.disk import TMP_SUFFIX, Disk

SEGMENT_SUFFIX = ".binlog"
COLD_SUFFIX = ".binlog.zst"
INDEX_SUFFIX = ".index"

# A function that decodes a commit version into an epoch and a file number, such as
# `EpochFile.decode_version`.
DecodeVersion = Callable[[int], tuple[int, int]]

_HOUR = re.compile(r"\d{10}")
_SEGMENT = re.compile(r"(\d{19})(\.binlog(?:\.zst)?)")
# The lowest 32 bits of a commit version are the offset in units of 16 bytes.
_OFFSET_BITS = 32
_OFFSET_UNIT = 16
_HOUR_SECONDS = 3600
# Every append compares the current hour with that of its segment.
_HOURS_MAX = 16


@dataclass(frozen=True, order=True)
class StoredSegment:
    """A segment file in the folder.

    `version` is the commit version of its first byte. `epoch` and `file_number` are decoded from it using the
    log's epochs.
    """

    version: int
    hour: int
    path: Path
    cold: bool
    epoch: int
    file_number: int

    @property
    def index_path(self) -> Path:
        """The path of the L2 index."""
        return index_path(self.path)

    def begins_at(self, base: int) -> bool:
        """Return whether the file name denotes a segment that begins at this offset of the source file."""
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
        """The servers of the epochs."""
        return self.folder / "epochs.json"

    @property
    def position(self) -> Path:
        """The last saved durable position."""
        return self.folder / "position.json"

    @property
    def prepared(self) -> Path:
        """The file of the prepared XA transactions without an outcome."""
        return self.folder / "prepared.json"

    @property
    def log_id(self) -> Path:
        """The identity of the log's objects in a shared store; written with the first object."""
        return self.folder / "log_id"

    @property
    def tier_proofs(self) -> Path:
        """The record of the objects in a store whose bytes were proved to belong to this log."""
        return self.folder / "tier_proofs.json"

    @property
    def segments_index(self) -> Path:
        """The L1 index."""
        return self.folder / "segments.index"

    def hour_folder(self, hour: int) -> Path:
        """The folder of the segments that were started in an hour (YYYYMMDDHH, UTC)."""
        return self.folder / f"{hour:010d}"

    def segment(self, hour: int, version: int, cold: bool = False) -> Path:
        """The path of a segment."""
        return self.hour_folder(hour) / f"{version:019d}{COLD_SUFFIX if cold else SEGMENT_SUFFIX}"

    def hours(self, disk: Disk) -> list[int]:
        """Return the hours that have a folder, in ascending order."""
        return [int(name) for name in disk.list(self.folder) if _HOUR.fullmatch(name)]

    def segments(self, disk: Disk, load_decoder: Callable[[], DecodeVersion]) -> list[StoredSegment]:
        """Return all segments in the folder by commit version. A plain file takes precedence over a
        compressed one.

        `load_decoder` is called after the files are listed, so that it knows the epoch of every listed
        segment: an epoch is recorded before its first segment.
        """
        files: dict[int, tuple[int, Path, bool]] = {}
        for hour in self.hours(disk):
            folder = self.hour_folder(hour)
            for name in disk.list(folder):
                match = _SEGMENT.fullmatch(name)
                if match is None:
                    continue
                version, cold = int(match.group(1)), match.group(2) == COLD_SUFFIX
                if version not in files or not cold:
                    files[version] = hour, folder / name, cold
        decode_version = load_decoder()
        return [
            StoredSegment(version, *files[version], *decode_version(version)) for version in sorted(files)
        ]

    def left_overs(self, disk: Disk) -> list[Path]:
        """Return the unfinished files."""
        folders = [self.folder, *(self.hour_folder(hour) for hour in self.hours(disk))]
        return [
            folder / name for folder in folders for name in disk.list(folder) if name.endswith(TMP_SUFFIX)
        ]


def index_path(segment: Path) -> Path:
    """Return the path of the L2 index of a plain or compressed segment."""
    return segment.with_name(segment.name.split(".", 1)[0] + INDEX_SUFFIX)


def hour_of(time_s: float) -> int:
    """Return the UTC hour of a time in seconds since 1970, as YYYYMMDDHH."""
    return _hour_named(int(time_s // _HOUR_SECONDS))


@lru_cache(_HOURS_MAX)
def _hour_named(hours: int) -> int:
    return int(time.strftime("%Y%m%d%H", time.gmtime(hours * _HOUR_SECONDS)))


def is_log_folder(folder: Path) -> bool:
    """Return whether a local folder holds a log."""
    return (folder / "epochs.json").is_file()
