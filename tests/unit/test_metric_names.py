# SPDX-License-Identifier: Apache-2.0
"""Every metric named in documents, alert rules and dashboards exists, and every metric is documented and
shown in a dashboard.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.telemetry.definitions import DEFINITIONS, Kind
from tests.support.suite.nonempty import each

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "ops/penstock.rules.yml"
DASHBOARDS = sorted((ROOT / "ops/grafana").glob("*.json"))
REFERENCE = ROOT / "docs/reference/metrics.md"
GUIDE = ROOT / "docs/guides/operating.md"

_METRIC = re.compile(r"\b(?:penstock|process|python)_[a-z_]+[a-z]\b")
# Words in the form of metric names that are not metrics: labels, and names of settings and files.
_NO_METRICS = {"penstock_instance", "process_name"}
_SUFFIXES = ("_bucket", "_count", "_sum")


def names(text: str) -> set[str]:
    """Return the metrics that a text names, histograms without the suffixes of their samples."""
    found = set(_METRIC.findall(text)) - _NO_METRICS
    return {_family(name) for name in found}


def _family(name: str) -> str:
    for suffix in _SUFFIXES:
        base = name.removesuffix(suffix)
        if base in DEFINITIONS and DEFINITIONS[base].kind is Kind.HISTOGRAM:
            return base
    return name


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def expressions(dashboard: Path) -> Iterator[str]:
    for panel in json.loads(dashboard.read_text())["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))


@pytest.mark.parametrize("path", [RULES, REFERENCE, GUIDE, *DASHBOARDS], ids=lambda path: path.name)
def test_every_named_metric_is_in_the_registry(path: Path) -> None:
    named = names(path.read_text())
    assert named, "the file names no metric"
    assert named - DEFINITIONS.keys() == set()


def test_every_metric_is_documented() -> None:
    assert DEFINITIONS.keys() - names(REFERENCE.read_text()) == set()


def test_dashboards_show_nearly_every_metric() -> None:
    shown = {
        name
        for dashboard in DASHBOARDS
        for expression in expressions(dashboard)
        for name in names(expression)
    }
    unshown = {name for name in DEFINITIONS.keys() - shown if name.startswith("penstock_")}
    # Metrics that the dashboards leave out: the status shows them, or they are useful only in a manual query.
    assert unshown == {
        "penstock_build_info",
        "penstock_capture_checksum_failures_total",
        "penstock_capture_disconnects_total",
        "penstock_capture_epoch",
        "penstock_capture_events_total",
        "penstock_capture_last_heard_timestamp_seconds",
        "penstock_coordination_errors_total",
        "penstock_load_started_timestamp_seconds",
        "penstock_log_holds",
        "penstock_log_holds_broken",
        "penstock_reader_sent_rows_total",
        "penstock_subscription_shards",
    }


def test_every_label_of_a_rule_belongs_to_one_of_its_metrics() -> None:
    for rule in each(rules()):
        labels = {label for name in names(rule["expr"]) for label in DEFINITIONS[name].labels}
        derived = set(re.findall(r'label_replace\([^"]*"([a-z_]+)"', rule["expr"]))
        known = labels | derived | {"job", "instance", "le"}
        selected = set(re.findall(r"[{,]\s*([a-z_]+)\s*(?:=~|!=|!~|=)", rule["expr"]))
        for grouped in re.findall(r"by \(([^)]*)\)", rule["expr"]):
            selected |= {label.strip() for label in grouped.split(",")}
        shown = set(re.findall(r"\$labels\.([a-z_]+)", json.dumps(rule["annotations"])))
        assert selected | shown <= known, rule["alert"]


def test_every_rule_has_a_name_a_severity_and_a_summary() -> None:
    alerts = [rule["alert"] for rule in rules()]
    assert len(set(alerts)) == len(alerts)
    for rule in rules():
        assert rule["alert"].startswith("Penstock")
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert rule["annotations"]["summary"], rule["alert"]


def test_undefined_name_is_detected() -> None:
    assert names("rate(penstock_unknown_total[5m])") - DEFINITIONS.keys() == {"penstock_unknown_total"}
    assert names("penstock_log_fsync_seconds_bucket") == {"penstock_log_fsync_seconds"}
