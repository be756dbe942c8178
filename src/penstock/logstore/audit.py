# SPDX-License-Identifier: Apache-2.0
"""The audit trail of manual changes to a log: `<folder>/audit.log`, append-only, one JSON object per line.

A line is made durable before the change that it describes is carried out.
"""

import json
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from penstock.errors import SourceMissing
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout

AUDIT_FILE = "audit.log"


@dataclass(frozen=True)
class AuditLine:
    """One manual change. `time` is ISO 8601 in UTC. `user` made the change. `old` and `new` are the values
    before and after it.
    """

    time: str
    user: str
    verb: str
    old: str
    new: str
    reason: str

    def write(self, disk: Disk, layout: Layout) -> None:
        """Append the line to the file and sync it. Raises LogFull, DiskFailed."""
        path = layout.folder / AUDIT_FILE
        with closing(disk.append_open(path)) as file:
            torn = file.size and disk.read(path, file.size - 1) != b"\n"
            # A crash may have left a partial line. End that line, so that the new line starts on its own.
            file.write([b"\n" if torn else b"", json.dumps(vars(self), ensure_ascii=False).encode(), b"\n"])
            file.sync()
        disk.sync_folder(layout.folder)


def audit_lines(disk: Disk, layout: Layout) -> list[dict[str, Any]]:
    """Return the recorded changes, oldest first. Lines torn by a crash are skipped."""
    try:
        content = disk.read(layout.folder / AUDIT_FILE)
    except SourceMissing:
        return []
    lines = []
    for line in content.decode("utf-8", "replace").splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return [line for line in lines if isinstance(line, dict)]
