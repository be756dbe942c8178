# SPDX-License-Identifier: Apache-2.0
"""How far the log was durable when that was last noted: `position.json`, replaced whole.

It is written after a sync, never before one, so the log reaches at least as far. Recovery reads the tail from
there, and says so by name when the tail ends before it. Without the file the tail is read from the segment's
start.
"""

from dataclasses import dataclass
from typing import Self

import structlog

from penstock.errors import SourceMissing
from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.logstore.layout import Layout
from penstock.model import Position

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class CapturePosition:
    """A transaction boundary up to which the log is durable.

    `gtid_set` has every transaction before it; `time_us` is when it was noted, microseconds UTC since 1970.
    """

    position: Position
    gtid_set: str
    time_us: int

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self | None:
        """Read the file; None where there is none, or where it is not as it was written."""
        try:
            found = unseal_json(disk.read(layout.position))
        except SourceMissing:
            return None
        match found:
            case {
                "epoch": int(epoch),
                "file": str(file),
                "offset": int(offset),
                "gtid_set": str(gtid_set),
                "time_us": int(time_us),
            }:
                return cls(Position(epoch, file, offset), gtid_set, time_us)
        _log.warning("the noted position is not as it was written and is not used", path=str(layout.position))
        return None

    def write(self, disk: Disk, layout: Layout) -> None:
        """Put the file in place whole, and durable. Raises LogFull, DiskFailed."""
        disk.write_atomic(
            layout.position,
            seal_json(
                {
                    "epoch": self.position.epoch,
                    "file": self.position.file,
                    "offset": self.position.offset,
                    "gtid_set": self.gtid_set,
                    "time_us": self.time_us,
                }
            ),
        )
