# SPDX-License-Identifier: Apache-2.0
"""The state of a log at one moment."""

from dataclasses import dataclass

from penstock.model import Position


@dataclass(frozen=True)
class LogStatus:
    """The state of a log.

    `bytes` is the total size of its segments. `epoch` is the latest epoch, None before the first.
    `time_first_us` is the first commit time in microseconds since 1970, UTC, and 0 before the first commit.
    """

    epoch: int | None
    segments: int
    bytes: int
    earliest: Position | None
    visible: Position | None
    durable: Position | None
    time_first_us: int
    transactions: int
    changes: int
