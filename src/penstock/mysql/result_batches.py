# SPDX-License-Identifier: Apache-2.0
"""Reads the result of a query from a session's socket, in batches that the kernel decodes."""

from collections.abc import Callable, Iterator
from typing import Any

from penstock._native import ResultSet


def read_batches(result: ResultSet, buffer_bytes: int, receive: Callable[[memoryview], int]) -> Iterator[Any]:
    """Yield the batches of an answer; memory is bounded by one batch and one row.

    `receive` fills the beginning of a buffer with at least one byte, and returns how many. If the server
    rejects the query, the answer ends: see `result.server_error`. Raises StreamError for values that
    contradict their declared types, and propagates errors from `receive`.
    """
    buffer = memoryview(bytearray(buffer_bytes))
    start = filled = 0
    while True:
        start += result.feed(buffer[start:filled])
        match result.state:
            case "batch":
                yield result.take_batch()
                continue
            case "done":
                return
        if start == filled:
            start = filled = 0
        elif filled == len(buffer):
            # The start of a packet that has not arrived completely.
            left = bytes(buffer[start:filled])
            if start == 0:
                # A packet that does not fit into the buffer. It has at most 16 MiB, so the growth is limited.
                buffer = memoryview(bytearray(2 * len(buffer)))
            buffer[: len(left)] = left
            start, filled = 0, len(left)
        filled += receive(buffer[filled:])
