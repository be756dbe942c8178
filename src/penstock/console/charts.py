# SPDX-License-Identifier: Apache-2.0
"""Charts of values over time, drawn by the server: a line, its scale, and the exact value of each point."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 460, 110
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 8, 8, 18
SPARK_WIDTH, SPARK_HEIGHT = 96, 20
_VISIBLE = 1e-9
_KIB = 1024.0


@dataclass(frozen=True)
class Point:
    """A value in a chart, with its coordinates in pixels, and its time in microseconds since 1970, UTC."""

    x: float
    width: float
    value: float
    time_us: int


@dataclass(frozen=True)
class Chart:
    """A chart.

    `lines` contains the vertices of each unbroken line. `top` is the value at the upper edge. `newest` is the
    most recent value, None if there is none.
    """

    lines: Sequence[str]
    points: Sequence[Point]
    top: float
    newest: float | None
    begin_us: int
    end_us: int


def draw_chart(
    values: Sequence[float | None],
    seconds: int,
    until_us: int,
    *,
    is_small: bool = False,
    is_bytes: bool = False,
) -> Chart:
    """Return a chart of values over the last `seconds`, from 0 to a round number above the highest value.

    A missing value breaks the line. The lines of a small chart fill the whole picture, and it has no
    `points`. Byte values are rounded in their unit, such as MiB.
    """
    left, right = (0.0, float(SPARK_WIDTH)) if is_small else (float(_LEFT), float(WIDTH - _RIGHT))
    upper, lower = (1.0, SPARK_HEIGHT - 1.0) if is_small else (float(_TOP), float(HEIGHT - _BOTTOM))
    known = [value for value in values if value is not None]
    top = round_up(max(known, default=0.0), is_bytes=is_bytes)
    begin_us = until_us - seconds * 1_000_000
    step = (right - left) / max(len(values), 1)
    points = [
        Point(
            round(left + index * step, 1),
            round(step, 2),
            value,
            begin_us + round((index + 0.5) * seconds / len(values) * 1_000_000),
        )
        for index, value in enumerate(values)
        if value is not None and not is_small
    ]
    lines: list[str] = []
    part: list[str] = []
    for index, value in enumerate([*values, None]):
        if value is not None:
            y = lower - (lower - upper) * min(value / top, 1.0)
            part.append(f"{left + (index + 0.5) * step:.1f},{y:.1f}")
        elif part:
            # Draw a single value as a short line, so that it is visible.
            x, _, y_text = part[-1].partition(",")
            lines.append(" ".join([*part, f"{float(x) + min(step, 2.0):.1f},{y_text}"]))
            part = []
    return Chart(
        lines, points, top, known[-1] if known and values[-1] is not None else None, begin_us, until_us
    )


def round_up(value: float, *, is_bytes: bool = False) -> float:
    """Return 1, 2 or 5 times a power of ten, at or above a value; 1 for values close to zero.

    With `is_bytes`, the result is such a number of bytes, KiB, MiB, GiB or a larger unit.
    """
    if value < _VISIBLE:
        return 1.0
    if is_bytes and value >= _KIB:
        unit = _KIB ** math.floor(math.log(value, _KIB))
        return round_up(value / unit) * unit
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= value * (1 - 1e-9))
