# SPDX-License-Identifier: Apache-2.0
"""The values of the metrics at one moment, as gathered for a scrape or a push."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.telemetry.counters import Counter, Histogram
from penstock.telemetry.definitions import DEFINITIONS, Definition

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Buckets:
    """A histogram at one moment. `counts` are not cumulative, and have one element more than `bounds`."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Readings:
    """Values by metric and labels. A value is accepted only if its metric is defined and it has exactly the
    metric's labels.
    """

    def __init__(self) -> None:
        self._values: dict[str, dict[Labels, float]] = {}
        self._buckets: dict[str, dict[Labels, Buckets]] = {}

    def add(self, name: str, value: float | None, **labels: str) -> None:
        """Add a value; None is unknown and adds nothing."""
        if value is not None:
            self._values.setdefault(name, {})[_labels_of(DEFINITIONS[name], labels)] = value

    def add_states(self, name: str, current: str, states: Iterable[str], **labels: str) -> None:
        """Add 1 for the current state and 0 for the others."""
        for state in states:
            self.add(name, float(state == current), state=state, **labels)

    def add_counter(self, name: str, counter: Counter, **labels: str) -> None:
        """Add the counts of a counter, whose label values follow those in `labels`."""
        counted = [label for label in DEFINITIONS[name].labels if label not in labels]
        for values, count in counter.counts().items():
            self.add(name, count, **labels, **dict(zip(counted, values, strict=True)))

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add the distribution of a measured value."""
        assert histogram.bounds == DEFINITIONS[name].bounds, f"the buckets of {name} are defined"
        buckets = Buckets(histogram.bounds, histogram.counts(), histogram.sum)
        self._buckets.setdefault(name, {})[_labels_of(DEFINITIONS[name], labels)] = buckets

    def merge(self, other: "Readings") -> None:
        """Add the values of another process."""
        for name, values in other._values.items():
            self._values.setdefault(name, {}).update(values)
        for name, buckets in other._buckets.items():
            self._buckets.setdefault(name, {}).update(buckets)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "values": [
                [name, dict(labels), value]
                for name, values in self._values.items()
                for labels, value in values.items()
            ],
            "buckets": [
                [name, dict(labels), list(buckets.counts), buckets.sum]
                for name, known in self._buckets.items()
                for labels, buckets in known.items()
            ],
        }

    def add_json(self, value: Mapping[str, Any], names: Collection[str]) -> None:
        """Add the metrics with these names from what `to_json` returned in another process.

        Raises ValueError, LookupError or TypeError for other values.
        """
        for name, labels, number in value["values"]:
            if name in names:
                self.add(name, float(number), **labels)
        for name, labels, counts, total in value["buckets"]:
            if name in names:
                definition = DEFINITIONS[name]
                buckets = Buckets(definition.bounds, tuple(map(int, counts)), float(total))
                self._buckets.setdefault(name, {})[_labels_of(definition, labels)] = buckets

    def values(self, name: str) -> Mapping[Labels, float]:
        """Return the values of a metric that is not a histogram."""
        return self._values.get(name, {})

    def buckets(self, name: str) -> Mapping[Labels, Buckets]:
        """Return the values of a histogram."""
        return self._buckets.get(name, {})

    def present(self) -> list[Definition]:
        """Return the metrics that have a value, in the order of their definitions."""
        return [
            definition
            for name, definition in DEFINITIONS.items()
            if name in self._values or name in self._buckets
        ]


# Adds metrics to the readings.
Report = Callable[[Readings], None]


def _labels_of(definition: Definition, labels: Mapping[str, str]) -> Labels:
    missing = set(definition.labels) - labels.keys()
    assert missing <= definition.optional, f"{definition.name} lacks {missing}"
    assert labels.keys() <= set(definition.labels), f"{definition.name} has no {labels.keys()}"
    return tuple((name, labels[name]) for name in definition.labels if name in labels)
