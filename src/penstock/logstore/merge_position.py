# SPDX-License-Identifier: Apache-2.0
"""The cluster time up to which the log of a TiDB cluster is complete: `tidb-position.json`.

This time cannot be derived from the log's last transaction, because it also advances while the cluster is
idle.
"""

from dataclasses import dataclass
from pathlib import Path

from penstock.logstore.disk import Disk
from penstock.logstore.epochs import seal_json, unseal_json
from penstock.model import Position

POSITION_FILE = "tidb-position.json"


@dataclass(frozen=True)
class MergePosition:
    """A commit timestamp up to which the log is durably complete, and the end of the log at that time."""

    commit_ts: int
    log_end: Position | None

    @classmethod
    def load(cls, disk: Disk, folder: Path) -> "MergePosition | None":
        """Read the position of a log; None if the file is missing or damaged."""
        path = folder / POSITION_FILE
        values = unseal_json(disk.read(path)) if disk.exists(path) else {}
        if not values:
            return None
        end = values["log_end"]
        return cls(values["commit_ts"], None if end is None else Position.parse(end))

    def write(self, disk: Disk, folder: Path) -> None:
        """Replace the position of a log durably. Raises LogFull, DiskFailed."""
        end = None if self.log_end is None else str(self.log_end)
        disk.write_atomic(folder / POSITION_FILE, seal_json({"commit_ts": self.commit_ts, "log_end": end}))
