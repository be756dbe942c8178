# SPDX-License-Identifier: Apache-2.0
"""Pushes readings to an OpenTelemetry collector over OTLP/HTTP.

Metric names are the Prometheus names with the first underscores replaced by dots and without suffixes. A
collector that exports to Prometheus restores the original names: `penstock.capture.lag` with unit `s` becomes
`penstock_capture_lag_seconds`.
"""

import platform
import time
from importlib.metadata import version
from typing import Any

from penstock.errors import DependencyMissing
from penstock.telemetry.definitions import Definition, Kind
from penstock.telemetry.readings import Readings

_UNITS = {"seconds": "s", "bytes": "By"}


class OtlpPush:
    """Pushes readings to the collector at a URL. Raises DependencyMissing if the extra `otlp` is not
    installed.

    Headers, timeouts and certificates are read from the standard variables `OTEL_EXPORTER_OTLP_...`.
    """

    def __init__(self, url: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics import export
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as problem:
            raise DependencyMissing(
                f"telemetry.otlp needs a package: {problem}", hint="pip install 'penstock[otlp]'"
            ) from problem
        self._export = export
        self._exporter = OTLPMetricExporter(endpoint=url)
        self._scope = InstrumentationScope("penstock", version("penstock"))
        self._resource = Resource.create(
            {
                "service.name": "penstock",
                "service.version": version("penstock"),
                "service.instance.id": platform.node(),
            }
        )
        self._started_ns = time.time_ns()

    def push(self, readings: Readings) -> str | None:
        """Send the readings; return why the collector did not accept them, None if it did."""
        export = self._export
        metrics = [self._metric(definition, readings) for definition in readings.present()]
        scope = export.ScopeMetrics(self._scope, metrics, "")
        pushed = export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])
        result = self._exporter.export(pushed)
        if result is export.MetricExportResult.SUCCESS:
            return None
        return "the collector did not accept them; the log of opentelemetry has the reason"

    def close(self) -> None:
        """Close the connection to the collector."""
        self._exporter.shutdown()

    def _metric(self, definition: Definition, readings: Readings) -> Any:
        export, now_ns = self._export, time.time_ns()
        cumulative = export.AggregationTemporality.CUMULATIVE
        points: list[Any] = [
            export.NumberDataPoint(dict(labels), self._started_ns, now_ns, value)
            for labels, value in readings.values(definition.name).items()
        ]
        data: Any
        if definition.kind is Kind.COUNTER:
            data = export.Sum(points, cumulative, is_monotonic=True)
        elif definition.kind is Kind.HISTOGRAM:
            histograms = [
                export.HistogramDataPoint(
                    dict(labels),
                    self._started_ns,
                    now_ns,
                    count=sum(buckets.counts),
                    sum=buckets.sum,
                    bucket_counts=buckets.counts,
                    explicit_bounds=buckets.bounds,
                    # Send no minimum and maximum: a histogram keeps no extremes, and they are optional in the
                    # protocol.
                    min=None,
                    max=None,
                )
                for labels, buckets in readings.buckets(definition.name).items()
            ]
            data = export.Histogram(histograms, cumulative)
        else:
            data = export.Gauge(points)
        unit = _UNITS.get(definition.unit, "1")
        return export.Metric(name=otlp_name(definition), description=definition.help, unit=unit, data=data)


def otlp_name(definition: Definition) -> str:
    """Return the OpenTelemetry name of a metric."""
    name = definition.name.removesuffix("_total").removesuffix("_info")
    if definition.unit:
        name = name.removesuffix(f"_{definition.unit}")
    first, second, *words = name.split("_")
    return ".".join([first, second, *(["_".join(words)] if words else [])])
