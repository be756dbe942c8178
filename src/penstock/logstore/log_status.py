# SPDX-License-Identifier: Apache-2.0
"""The state of a log at one moment."""

from dataclasses import dataclass

from penstock.model import Position


@dataclass(frozen=True)
class LogStatus:
    """The state of a log. `bytes` is the size of its segments, `epoch` the latest epoch, None before the
    first, and `time_first_us` the first commit time, in microseconds UTC since 1970, 0 before the first."""

    epoch: int | None
    segments: int
    bytes: int
    earliest: Position | None
    visible: Position | None
    durable: Position | None
    time_first_us: int
    transactions: int
    changes: int
