# SPDX-License-Identifier: Apache-2.0
"""How a log stands at one moment, in numbers and places."""

from dataclasses import dataclass

from penstock.model import Position


@dataclass(frozen=True)
class LogStatus:
    """How a log stands. `bytes` is what its segments take, `epoch` the number of the latest, None before
    one."""

    epoch: int | None
    segments: int
    bytes: int
    earliest: Position | None
    visible: Position | None
    durable: Position | None
    transactions: int
    changes: int
