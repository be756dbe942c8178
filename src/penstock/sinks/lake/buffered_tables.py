# SPDX-License-Identifier: Apache-2.0
"""Bounds the rows that the writers of many tables buffer together."""

from typing import Protocol

# What is written out at once, as a fraction of the bound: much, so that few buffers are written often.
_KEPT_FRACTION = 0.5


class Buffer(Protocol):
    """The rows of one table that are not written yet."""

    @property
    def bytes(self) -> int:
        """The memory used by the rows."""

    def spill(self) -> None:
        """Write the rows out."""


class BufferedTables:
    """Writes out the largest buffers of a task when their total size exceeds a bound. Not thread-safe."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes: dict[int, int] = {}
        self._buffers: dict[int, Buffer] = {}
        self.bytes = 0

    def note(self, buffer: Buffer) -> None:
        """Account for a buffer to which rows were added, and keep the bound."""
        self._account(buffer)
        if self.bytes <= self._bytes_max:
            return
        for largest in sorted(self._buffers.values(), key=lambda other: other.bytes, reverse=True):
            largest.spill()
            self._account(largest)
            if self.bytes <= self._bytes_max * _KEPT_FRACTION:
                return

    def _account(self, buffer: Buffer) -> None:
        number = id(buffer)
        self._buffers[number] = buffer
        self.bytes += buffer.bytes - self._bytes.get(number, 0)
        self._bytes[number] = buffer.bytes
