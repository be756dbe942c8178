# SPDX-License-Identifier: Apache-2.0
"""Readings as Prometheus text or OpenMetrics. Imported only when metrics are requested."""

from collections.abc import Iterable, Iterator
from typing import Literal

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from penstock.telemetry.canal_names import canal_metrics
from penstock.telemetry.definitions import Definition, Kind
from penstock.telemetry.readings import Readings


def exposition(
    readings: Readings, accept: str = "", alias: Literal["canal"] | None = None
) -> tuple[bytes, str]:
    """Return the readings in the format that an Accept header prefers, and its media type.

    With `alias`, the readings are also returned under the metric names of another system.
    """
    encode, media_type = choose_encoder(accept)
    aliases = canal_metrics(readings) if alias == "canal" else ()
    return encode(_Collected([*_families(readings), *aliases])), media_type


class _Collected(Collector):
    """Metrics that have been gathered."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _families(readings: Readings) -> Iterator[Metric]:
    for definition in readings.present():
        metric = Metric(_family_name(definition), definition.help, definition.kind.value)
        metric.unit = definition.unit
        for labels, value in readings.values(definition.name).items():
            metric.add_sample(definition.name, dict(labels), value)
        for labels, buckets in readings.buckets(definition.name).items():
            count = 0
            for bound, number in zip((*map(str, buckets.bounds), "+Inf"), buckets.counts, strict=True):
                count += number
                metric.add_sample(f"{definition.name}_bucket", {**dict(labels), "le": bound}, count)
            metric.add_sample(f"{definition.name}_count", dict(labels), count)
            metric.add_sample(f"{definition.name}_sum", dict(labels), buckets.sum)
        yield metric


def _family_name(definition: Definition) -> str:
    """Return the name of the family: without the suffix that its type adds to the samples."""
    suffix = {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(definition.kind, "")
    return definition.name.removesuffix(suffix)
