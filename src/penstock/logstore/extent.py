# SPDX-License-Identifier: Apache-2.0
"""The unbroken parts of a kept log."""

from dataclasses import dataclass, replace

from penstock.commit_versions import shifted_epoch
from penstock.model import Position


@dataclass(frozen=True)
class LogExtent:
    """Unbroken bytes [start, end) of one source file in the log; `end` follows a whole transaction."""

    epoch: int
    file: str
    start: int
    end: int

    @property
    def first(self) -> Position:
        """The position of its first event."""
        return Position(self.epoch, self.file, self.start)

    @property
    def last(self) -> Position:
        """The position of its end."""
        return Position(self.epoch, self.file, self.end)

    def bytes_after(self, position: Position) -> int:
        """Return how many of its bytes follow a position."""
        if self.last <= position:
            return 0
        in_file = (self.epoch, self.file) == (position.epoch, position.file)
        return self.end - (max(position.offset, self.start) if in_file else self.start)

    def shifted(self, shift: int) -> "LogExtent":
        """Return the same bytes in a log whose epoch bases are `shift` higher."""
        return replace(self, epoch=shifted_epoch(self.epoch, shift))
