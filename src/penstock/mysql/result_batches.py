# SPDX-License-Identifier: Apache-2.0
"""Reads the results of queries from a session's socket, in batches that the kernel decodes."""

from collections.abc import Callable, Iterator
from typing import Any

from penstock._native import ResultSet


class AnswerReader:
    """Reads answers from one stream, one after another. Memory is bounded by one batch and one row.

    `receive` fills the beginning of a buffer with at least one byte, and returns how many.
    """

    def __init__(self, buffer_bytes: int, receive: Callable[[memoryview], int]) -> None:
        self._receive = receive
        self._buffer = memoryview(bytearray(buffer_bytes))
        # The received bytes that no result has consumed. After an answer, they belong to the next one.
        self._start = self._filled = 0

    def batches(self, result: ResultSet) -> Iterator[Any]:
        """Yield the batches of the next answer.

        A refusal of the server ends the answer: see `result.server_error`. Raises StreamError for values that
        contradict their declared types, and what `receive` raises.
        """
        while True:
            self._start += result.feed(self._buffer[self._start : self._filled])
            match result.state:
                case "batch":
                    yield result.take_batch()
                    continue
                case "done":
                    return
            self._make_room()
            self._filled += self._receive(self._buffer[self._filled :])

    def _make_room(self) -> None:
        """Make room for more bytes behind those that are not consumed yet."""
        if self._start == self._filled:
            self._start = self._filled = 0
        elif self._filled == len(self._buffer):
            # The start of a packet that has not arrived completely.
            left = bytes(self._buffer[self._start : self._filled])
            if self._start == 0:
                # A packet that does not fit into the buffer. It has at most 16 MiB, so the growth is limited.
                self._buffer = memoryview(bytearray(2 * len(self._buffer)))
            self._buffer[: len(left)] = left
            self._start, self._filled = 0, len(left)


def read_batches(result: ResultSet, buffer_bytes: int, receive: Callable[[memoryview], int]) -> Iterator[Any]:
    """Yield the batches of a single answer, like `AnswerReader.batches`."""
    yield from AnswerReader(buffer_bytes, receive).batches(result)
