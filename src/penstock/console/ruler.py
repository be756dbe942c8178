# SPDX-License-Identifier: Apache-2.0
"""Charts: how far each reader of a log is behind the server, and how a batch spent its time."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT_OF_MARK = 960, 26
_LEFT, _RIGHT = 12, 12
# The scale has a tick at each of these numbers of bytes: 1 KiB, 1 MiB and so on.
_TICKS = tuple(1 << (10 * power) for power in range(1, 6))


@dataclass(frozen=True)
class Mark:
    """A position on the ruler.

    `kind` is server, received, earliest or reader; `behind` is the number of bytes between the position and
    the end of the server's log.
    """

    kind: str
    name: str
    position: str
    behind: int


@dataclass(frozen=True)
class PlacedMark:
    """A mark, and its coordinates in the chart in pixels."""

    mark: Mark
    x: float
    y: float


@dataclass(frozen=True)
class Ruler:
    """The chart: marks one below another, and the ticks of the scale. Each tick is a number of bytes and an x
    coordinate.
    """

    marks: Sequence[PlacedMark]
    ticks: Sequence[tuple[int, float]]
    height: int
    width: int = WIDTH


def draw_ruler(marks: Sequence[Mark]) -> Ruler:
    """Draw the marks: the end of the server's log is on the right, and a mark is further left the further it
    is behind.
    """
    furthest = max((mark.behind for mark in marks), default=0)
    ordered = sorted(marks, key=lambda mark: mark.behind)
    placed = [
        PlacedMark(mark, _x(mark.behind, furthest), (index + 1) * HEIGHT_OF_MARK)
        for index, mark in enumerate(ordered)
    ]
    ticks = [(size, _x(size, furthest)) for size in _TICKS if size < furthest]
    return Ruler(placed, ticks, (len(placed) + 2) * HEIGHT_OF_MARK)


@dataclass(frozen=True)
class Phase:
    """A phase of a batch: how many seconds it took, and its x coordinate and width in the chart, in
    pixels.
    """

    name: str
    seconds: float
    x: float
    width: float


def draw_phases(seconds: Mapping[str, float]) -> list[Phase]:
    """Place the phases of a batch side by side. Even a short phase is visible."""
    total, x, phases = sum(seconds.values()) or 1.0, 0.0, []
    for name, spent in seconds.items():
        width = max(2.0, round(spent / total * WIDTH, 1))
        phases.append(Phase(name, spent, x, width))
        x += width
    return phases


def _x(behind: int, furthest: int) -> float:
    if not furthest:
        return float(WIDTH - _RIGHT)
    share = math.log1p(max(behind, 0)) / math.log1p(furthest)
    return round(WIDTH - _RIGHT - share * (WIDTH - _LEFT - _RIGHT), 1)
