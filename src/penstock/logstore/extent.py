# SPDX-License-Identifier: Apache-2.0
"""The extents of a log: the files of a server's log, or the unbroken parts of each file that a kept log
contains.
"""

from dataclasses import dataclass, replace
from typing import Any

from penstock.commit_versions import shifted_epoch
from penstock.model import Position


@dataclass(frozen=True)
class Extent:
    """Contiguous bytes [start, end) of one log file, in one epoch.

    In a kept log, `end` follows a whole transaction. For a compressed file, `end` is the file's compressed
    size. Only a `splittable` file can be opened at any byte.
    """

    epoch: int
    file: str
    start: int
    end: int
    splittable: bool = True

    @property
    def first(self) -> Position:
        """The position of the extent's first event."""
        return Position(self.epoch, self.file, self.start)

    @property
    def last(self) -> Position:
        """The position of the extent's end."""
        return Position(self.epoch, self.file, self.end)

    def holds(self, position: Position | None) -> bool:
        """Return whether a position lies in this file."""
        return position is not None and (position.epoch, position.file) == (self.epoch, self.file)

    def bytes_after(self, position: Position) -> int:
        """Return how many of the extent's bytes follow a position."""
        if self.last <= position:
            return 0
        in_file = (self.epoch, self.file) == (position.epoch, position.file)
        return self.end - (max(position.offset, self.start) if in_file else self.start)

    def to_json(self) -> dict[str, Any]:
        """Return an extent of a kept log as daemons send it to each other, in every version alike."""
        return {"epoch": self.epoch, "file": self.file, "start": self.start, "end": self.end}

    def shifted(self, shift: int) -> "Extent":
        """Return the same bytes in a log whose epoch bases are `shift` higher."""
        return replace(self, epoch=shifted_epoch(self.epoch, shift))
