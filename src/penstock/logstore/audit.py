# SPDX-License-Identifier: Apache-2.0
"""What people did to a log by hand: `<folder>/audit.log`, a JSON object a line, only ever added to.

A line is durable before what it tells is done, so nothing is done without one.
"""

import json
from dataclasses import dataclass
from typing import Any

from penstock.errors import SourceMissing
from penstock.logstore.disk import Disk
from penstock.logstore.layout import Layout

AUDIT_FILE = "audit.log"


@dataclass(frozen=True)
class AuditLine:
    """One deed. `time` is ISO 8601 in UTC, `user` who did it, `old` and `new` what it changed."""

    time: str
    user: str
    verb: str
    old: str
    new: str
    reason: str

    def write(self, disk: Disk, layout: Layout) -> None:
        """Add it to the file, durably. Raises LogFull, DiskFailed."""
        path = layout.folder / AUDIT_FILE
        file = disk.append_open(path)
        try:
            torn = file.size and disk.read(path, file.size - 1) != b"\n"
            # What a crash left of another line stays, on a line of its own.
            file.write([b"\n" if torn else b"", json.dumps(vars(self), ensure_ascii=False).encode(), b"\n"])
            file.sync()
        finally:
            file.close()
        disk.sync_folder(layout.folder)


def audit_lines(disk: Disk, layout: Layout) -> list[dict[str, Any]]:
    """Return what was done, oldest first; a line that a crash has torn is left out."""
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
