# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms of events that cannot be counted later from other state.

All other metrics are read at scrape time. Only one thread at a time may add to a counter or histogram, and
any thread may read it.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence


class Counter:
    """Counts events by the values of their labels, in the order of the metric's definition.

    The values must come from a bounded set, such as the classes of errors. Values in `known` are reported as
    0 before their first event, so that a rate over the counter includes the first event.
    """

    def __init__(self, *known: str) -> None:
        self._counts: dict[tuple[str, ...], float] = {(value,): 0 for value in known}

    def add(self, *labels: str, by: float = 1) -> None:
        """Count an event, or several."""
        self._counts[labels] = self._counts.get(labels, 0) + by

    def take(self) -> dict[tuple[str, ...], float]:
        """Return the counts and start again from 0. Used by a process whose counts are added to those of
        another.
        """
        taken, self._counts = self._counts, {}
        return taken

    def merge(self, counts: Mapping[tuple[str, ...], float]) -> None:
        """Add the counts of another process."""
        for labels, count in counts.items():
            self.add(*labels, by=count)

    def counts(self) -> dict[tuple[str, ...], float]:
        """Return a copy of the counts by label values."""
        return dict(self._counts)

    def total(self) -> float:
        """Return the sum of all counts."""
        return sum(self._counts.copy().values())


class Histogram:
    """The distribution of a measured value.

    `bounds` are the inclusive upper bounds of the buckets, ascending. A last bucket counts all higher values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one measurement."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def take(self) -> tuple[tuple[int, ...], float]:
        """Return the counts and the sum, and start again from 0."""
        taken = self.counts(), self.sum
        self._counts, self.sum = [0] * len(self._counts), 0.0
        return taken

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add the measurements of another process, which has the same buckets."""
        self._counts = [own + other for own, other in zip(self._counts, counts, strict=True)]
        self.sum += total

    def counts(self) -> tuple[int, ...]:
        """Return the number of measurements in each bucket; not cumulative."""
        return tuple(self._counts)
