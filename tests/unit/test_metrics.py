# SPDX-License-Identifier: Apache-2.0
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from penstock._native import CutCounts
from penstock.errors import CoordinationLost
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.readings import read_readers
from penstock.serve.subscribers import Subscriber
from penstock.telemetry.counters import Counter, Histogram
from penstock.telemetry.definitions import DEFINITIONS, LAG_BOUNDS, SECONDS_BOUNDS
from penstock.telemetry.otlp import OtlpPush
from penstock.telemetry.prometheus import exposition
from penstock.telemetry.readings import Readings
from tests.support.daemon.scraping import otlp_collector, samples
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.logstore.source import feed_whole, server_files

TOKEN = "a-token"
ACCOUNTS: list[dict[str, Any]] = [
    {"name": "prometheus", "token": "prometheus-token", "metrics": True, "instances": []},
    {"name": "orders", "token": "orders-token"},
]
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
LAG = "penstock_capture_lag_seconds"
EVENT_LAG = "penstock_capture_event_lag_seconds"


@pytest.fixture
def daemon() -> Iterator[ServedLog]:
    with captured_log() as log, serving(log, {"token": TOKEN}, ACCOUNTS) as daemon:
        yield daemon


def example() -> Readings:
    """Return a reading of each type."""
    readings, lags, errors = Readings(), Histogram(LAG_BOUNDS), Counter()
    for seconds in (0.01, 0.02, 100_000.0):
        lags.observe(seconds)
    errors.add("ConnectionLost")
    errors.add("ConnectionLost")
    readings.add(LAG, 1.5, penstock_instance="shop")
    readings.add_counter("penstock_capture_errors_total", errors, penstock_instance="shop")
    readings.add_histogram(EVENT_LAG, lags, penstock_instance="shop")
    readings.add_states("penstock_capture_state", "held", ["running", "held"], penstock_instance="shop")
    readings.add("penstock_build_info", 1, version="1", python="3")
    return readings


@pytest.mark.parametrize(
    ("accept", "parse"), [("", text_string_to_metric_families), (OPENMETRICS, openmetrics_families)]
)
def test_every_type_of_metric_is_written_in_both_formats(accept: str, parse: Any) -> None:
    content, media_type = exposition(example(), accept)
    assert media_type.startswith(accept.partition(";")[0] or "text/plain")
    values = samples(content.decode(), parse)
    assert values[LAG, "shop"] == 1.5
    assert values["penstock_capture_errors_total", "shop", "ConnectionLost"] == 2
    assert values["penstock_capture_state", "shop", "held"] == 1
    assert values["penstock_capture_state", "shop", "running"] == 0
    assert values["penstock_build_info", "3", "1"] == 1
    # The buckets of a histogram are inclusive and cumulative.
    buckets = [values[f"{EVENT_LAG}_bucket", "shop", bound] for bound in ("0.01", "0.1", "86400.0", "+Inf")]
    assert buckets == [1, 2, 2, 3]
    assert values[f"{EVENT_LAG}_count", "shop"] == 3
    assert values[f"{EVENT_LAG}_sum", "shop"] == pytest.approx(100_000.03)


def test_openmetrics_names_the_unit() -> None:
    content, _ = exposition(example(), OPENMETRICS)
    assert f"# UNIT {LAG} seconds" in content.decode()


@pytest.mark.parametrize(
    ("name", "labels"),
    [("penstock_unknown", {}), (LAG, {}), (LAG, {"penstock_instance": "shop", "table": "shop.orders"})],
    ids=["metric", "missing-label", "further-label"],
)
def test_undefined_metric_or_label_is_refused(name: str, labels: dict[str, str]) -> None:
    with pytest.raises((KeyError, AssertionError)):
        Readings().add(name, 1, **labels)


def test_canals_names_have_the_values_of_ours() -> None:
    readings = Readings()
    for protocol, name in (("canal", "canal-1"), ("canal", "canal-2"), ("changes", "cache")):
        labels = {"penstock_instance": "shop", "protocol": protocol, "subscription": name, "shard": ""}
        readings.add("penstock_reader_sent_rows_total", 10, **labels)
        readings.add("penstock_reader_lag_bytes", 0, **labels)
    readings.add(LAG, 2, penstock_instance="shop")
    values = samples(exposition(readings, "", "canal")[0].decode())
    assert values["canal_instance_get_rows", "shop"] == 20
    assert values["canal_instance_subscriptions", "shop"] == 2
    assert values["canal_instance_traffic_delay", "shop"] == 2000
    assert not any(name[0].startswith("canal") for name in samples(exposition(readings)[0].decode()))


def test_cutter_counts_events_rows_and_transactions_by_table() -> None:
    counts = {tables_max: CutCounts(tables_max, 500) for tables_max in (0, 1, 100)}
    for each in counts.values():
        for file in server_files():
            feed_whole(file.cutter(counts=each), file.content)
    rows = {tables_max: dict(each.rows()) for tables_max, each in counts.items()}
    assert set(rows[0]) == {""}
    assert len(rows[1]) == 2
    assert len(rows[100]) > 2
    assert rows[100][""] == [0, 0, 0]
    totals = [[sum(numbers) for numbers in zip(*each.values(), strict=True)] for each in rows.values()]
    assert totals[0] == totals[1] == totals[2]
    assert min(totals[0]) > 0
    assert dict(counts[0].events())["Query"] > 0
    assert 0 < counts[0].large_transactions < counts[0].transactions


def test_metrics_require_the_right_of_an_account(daemon: ServedLog) -> None:
    assert daemon.ask("GET", "/metrics", token="prometheus-token").status == 200
    assert daemon.ask("GET", "/metrics", token=TOKEN).status == 200
    refused = daemon.ask("GET", "/metrics", token="orders-token")
    assert (refused.status, refused.json["type"]) == (403, "AccessDenied")
    assert "metrics: true" in refused.json["hint"]
    assert daemon.ask("GET", "/metrics", token="wrong").status == 401


def test_metrics_without_credentials_are_served_to_this_machine_only() -> None:
    with captured_log() as log, serving(log) as daemon:
        assert daemon.ask("GET", "/metrics").status == 200
        assert daemon.ask("GET", "/metrics", Host="elsewhere.example").status == 401


def test_requests_refusals_and_readers_are_counted(daemon: ServedLog) -> None:
    daemon.ask("GET", "/v1/status", token="wrong")
    path = f"/v1/instances/{INSTANCE}/changes"
    body = {"subscriber": "cache", "start": "earliest", "wait_seconds": 0}
    changes = daemon.ask("POST", path, body)
    assert changes.status == 200, changes.body
    values = samples(daemon.ask("GET", "/metrics").body.decode())
    assert values["penstock_listener_requests_total", "401", "http"] == 1
    assert values["penstock_listener_requests_total", "200", "http"] == 1
    assert values["penstock_listener_rejected_total", "http", "AuthenticationFailed"] == 1
    reader = (INSTANCE, "changes", "", "cache")
    assert values["penstock_reader_sent_bytes_total", *reader] > 0
    assert values["penstock_reader_sent_rows_total", *reader] > 0
    assert values["penstock_reader_lag_bytes", *reader] == 0
    assert values["penstock_reader_lag_seconds", *reader] == 0


def test_readers_with_the_same_labels_are_added_up() -> None:
    with captured_log() as log:
        start, end = log.earliest(), log.visible
        shards = "300 shards/4096"
        readers = [
            Subscriber("changes", INSTANCE, "cache", shards, "u", 0, position, 1, rows=2, bytes=size)
            for position, size in ((start, 10), (end, 5))
        ]
        readings = Readings()
        read_readers(readings, readers, lambda name: log)
        values = samples(exposition(readings)[0].decode())
    labels = (INSTANCE, "changes", shards, "cache")
    assert values["penstock_reader_sent_bytes_total", *labels] == 15
    assert values["penstock_reader_sent_rows_total", *labels] == 4
    assert values["penstock_reader_lag_bytes", *labels] > 0
    assert values["penstock_reader_lag_seconds", *labels] > 0


def test_lost_coordination_is_reported_and_does_not_fail_the_scrape() -> None:
    def lost() -> Any:
        raise CoordinationLost("the store does not answer")

    probe = CoordinationProbe("zookeeper://u:secret@h1:2181/root", lost, [INSTANCE])
    assert isinstance(probe.failure(), CoordinationLost)
    readings = Readings()
    probe.read(readings)
    text = exposition(readings)[0].decode()
    values = {name: value for (name, _, *_), value in samples(text).items()}
    assert values["penstock_coordination_up"] == 0
    assert values["penstock_coordination_errors_total"] == 1
    assert "secret" not in text


def test_metrics_are_pushed_over_otlp() -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with otlp_collector() as (url, bodies):
        push = OtlpPush(url)
        assert push.push(example()) is None
        push.close()
    (resource,) = ExportMetricsServiceRequest.FromString(bodies[0]).resource_metrics
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    lag = metrics["penstock.capture.lag"]
    assert (lag.unit, lag.gauge.data_points[0].as_double) == ("s", 1.5)
    errors = metrics["penstock.capture.errors"].sum
    assert errors.is_monotonic
    assert errors.data_points[0].as_int == 2
    (histogram,) = metrics["penstock.capture.event_lag"].histogram.data_points
    assert (histogram.count, list(histogram.explicit_bounds)) == (3, list(LAG_BOUNDS))
    assert not histogram.HasField("min")


def test_every_definition_follows_the_conventions_of_prometheus() -> None:
    for name, definition in DEFINITIONS.items():
        assert (definition.kind == "counter") == name.endswith("_total"), name
        assert (definition.kind == "histogram") == bool(definition.bounds), name
        assert definition.optional <= set(definition.labels), name
        assert definition.help[-1] != ".", name
    assert sorted(SECONDS_BOUNDS) == list(SECONDS_BOUNDS)
