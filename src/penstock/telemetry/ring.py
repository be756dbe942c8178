# SPDX-License-Identifier: Apache-2.0
"""Keeps a few values for the last 24 hours in a fixed amount of memory, so that charts need no other
system.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy
import numpy.typing as npt

STEP_SECONDS = 10
KEPT_SECONDS = 24 * 3600
_SLOTS = KEPT_SECONDS // STEP_SECONDS

Values = npt.NDArray[numpy.float32]


class Ring:
    """Stores one value of each series for every ten seconds of the last day. A missing value is NaN. Used by
    one thread.

    `clock` is in monotonic seconds, so that changing the system clock does not shift past values.
    """

    def __init__(self, series: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rows = {name: row for row, name in enumerate(series)}
        self._values: Values = numpy.full((len(series), _SLOTS), numpy.nan, numpy.float32)
        # The number of the newest step; slots of steps without a sample are NaN.
        self._newest = self._step()

    @property
    def bytes(self) -> int:
        """The memory of the values, which never grows."""
        return self._values.nbytes

    def add(self, sample: Mapping[str, float | None]) -> None:
        """Add the values of this moment. A later sample of the same ten seconds replaces them."""
        self._advance()
        slot = self._newest % _SLOTS
        for name, row in self._rows.items():
            value = sample.get(name)
            self._values[row, slot] = numpy.nan if value is None else value

    def read(self, seconds: int, points: int) -> dict[str, list[float | None]]:
        """Return each series over the last `seconds`, oldest first, as `points` values or a few fewer.

        Each value is the maximum over its interval, so that no peak is lost; None if the interval has no
        sample.
        """
        self._advance()
        steps = min(max(seconds // STEP_SECONDS, 1), _SLOTS)
        size = -(-steps // points)
        # Use whole parts. The last part ends with the newest step.
        steps = min(-(-steps // size) * size, _SLOTS // size * size)
        slots = numpy.arange(self._newest - steps + 1, self._newest + 1) % _SLOTS
        series: dict[str, list[float | None]] = {}
        for name, row in self._rows.items():
            parts = self._values[row, slots].reshape(-1, size)
            highest = numpy.where(numpy.isnan(parts), -numpy.inf, parts).max(axis=1)
            series[name] = [None if value == -numpy.inf else value for value in highest.tolist()]
        return series

    def _step(self) -> int:
        return int(self._clock() // STEP_SECONDS)

    def _advance(self) -> None:
        """Begin the step of this moment, and empty the slots of the steps that had no sample."""
        step = self._step()
        skipped = min(step - self._newest, _SLOTS)
        if skipped > 0:
            slots = numpy.arange(step - skipped + 1, step + 1) % _SLOTS
            self._values[:, slots] = numpy.nan
            self._newest = step
