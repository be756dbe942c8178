# SPDX-License-Identifier: Apache-2.0
"""The durable position of a log when it was last saved: `position.json`, replaced atomically.

The file is written after a sync, so the log is durable at least up to the saved position. Recovery scans the
log from the saved position, and reports an error if the log ends before that position. Without the file,
recovery scans from the start of the segment.
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

    `gtid_set` contains all transactions before the boundary. `time_us` is when the position was saved, in
    microseconds since 1970, UTC.
    """

    position: Position
    gtid_set: str
    time_us: int

    @classmethod
    def load(cls, disk: Disk, layout: Layout) -> Self | None:
        """Read the file. Returns None if it is missing or damaged."""
        try:
            values = unseal_json(disk.read(layout.position))
        except SourceMissing:
            return None
        match values:
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
        """Replace the file atomically and durably. Raises LogFull, DiskFailed."""
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
