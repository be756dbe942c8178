# SPDX-License-Identifier: Apache-2.0
"""The state of a log at one moment."""

from dataclasses import dataclass

from penstock.model import Position


@dataclass(frozen=True)
class LogStatus:
    """The state of a log. `bytes` is the size of its segments, `epoch` the latest epoch, None before the
    first."""

    epoch: int | None
    segments: int
    bytes: int
    earliest: Position | None
    visible: Position | None
    durable: Position | None
    transactions: int
    changes: int
