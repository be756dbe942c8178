# SPDX-License-Identifier: Apache-2.0
"""Metrics as a scrape returns them."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

_INSTANCE = "penstock_instance"


def samples(
    text: str, parse: Callable[[str], Iterable[Any]] = text_string_to_metric_families
) -> dict[tuple[str, ...], float]:
    """Return the samples by name and label values: the instance first, then in the order of their names."""
    return {
        (sample.name, *(sample.labels[label] for label in _ordered(sample.labels))): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def _ordered(labels: Iterable[str]) -> list[str]:
    return sorted(labels, key=lambda label: (label != _INSTANCE, label))
