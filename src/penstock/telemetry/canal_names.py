# SPDX-License-Identifier: Apache-2.0
"""Metrics under the names that Canal's server uses, so that dashboards and alert rules for Canal keep
working.

The names, types and labels are those of Canal's `prometheus` module. Metrics of Canal's internal buffers have
no counterpart in Penstock.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from penstock.telemetry.readings import Readings

_CANAL = "canal"


@dataclass(frozen=True)
class Alias:
    """A metric of Canal, and the metric of Penstock from which its value is computed.

    The value is multiplied by `scale`. Samples of one instance are summed; with a scale of 0, the samples are
    counted instead. `protocol` selects the samples of one protocol.
    """

    name: str
    source: str
    scale: float = 1.0
    fixed: tuple[tuple[str, str], ...] = ()
    protocol: str | None = None


ALIASES = (
    Alias("canal_instance", "penstock_capture_connects_total", 0.0, (("mode", "penstock"),)),
    Alias("canal_instance_subscriptions", "penstock_reader_lag_bytes", 0.0, protocol=_CANAL),
    Alias("canal_instance_traffic_delay", "penstock_capture_lag_seconds", 1000.0),
    Alias("canal_instance_transactions", "penstock_capture_transactions_total"),
    Alias(
        "canal_instance_received_binlog_bytes",
        "penstock_capture_received_bytes_total",
        fixed=(("parser", "0"),),
    ),
    Alias("canal_instance_put_rows", "penstock_capture_rows_total"),
    Alias("canal_instance_get_rows", "penstock_reader_sent_rows_total", protocol=_CANAL),
    Alias("canal_instance_client_bytes", "penstock_reader_sent_bytes_total", protocol=_CANAL),
)


def canal_metrics(readings: Readings) -> Iterator[Metric]:
    """Yield, under Canal's names, the metrics that have a value."""
    for alias in ALIASES:
        sums: dict[str, float] = {}
        for labels, value in readings.values(alias.source).items():
            sample = dict(labels)
            if alias.protocol in (None, sample.get("protocol")):
                by = value * alias.scale if alias.scale else 1.0
                sums[sample["penstock_instance"]] = sums.get(sample["penstock_instance"], 0.0) + by
        # Use the type unknown, because OpenMetrics requires a suffix of a counter, and Canal's counters have
        # none.
        metric = Metric(alias.name, f"As in Canal: {alias.source}", "unknown")
        for instance, value in sums.items():
            metric.add_sample(alias.name, {"destination": instance, **dict(alias.fixed)}, value)
        yield metric
