# SPDX-License-Identifier: Apache-2.0
"""Each alert rule fires in a scenario that meets its condition, and resolves afterwards."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.telemetry.definitions import DEFINITIONS
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import PartMissing
from tools.servers.packages import program_on_host

RULES = Path(__file__).resolve().parents[2] / "ops/penstock.rules.yml"

SHOP = 'penstock_instance="shop"'
SINK = 'pipeline="shop", sink="", shard=""'
COMPARED = 'pipeline="shop", sink=""'
LEASE = 'store="zookeeper://h", kind="pipeline", work="shop"'
# A pipeline in two processes.
SHARDS = [f'pipeline="shop", sink="", shard="{number}-of-2"' for number in range(2)]
MEMBER = 'subscription="cache", member="h1"'
REPORTED = "penstock_pipeline_last_report_timestamp_seconds"
READER = f'{SHOP}, protocol="changes", subscription="cache", shard="3"'
# The minutes at which an alert must be firing or resolved. They are late enough for the longest `for` of a
# rule and for the range of its expression.
FIRING, RESOLVED = 150, 480


@dataclass(frozen=True)
class Series:
    """A series that has the value `due` while the alert is due (minutes 60 to 180), and `usual` otherwise.

    With `step` or `usual_step`, the value starts at `usual` and grows every minute: by `step` while the alert
    is due, and by `usual_step` otherwise.
    """

    text: str
    usual: float = 0
    due: float = 0
    step: float = 0
    usual_step: float = 0

    def values(self) -> str:
        value, values = self.usual, []
        for minute in range(RESOLVED + 1):
            is_due = 60 <= minute < 180
            if self.step or self.usual_step:
                value += self.step if is_due else self.usual_step
            else:
                value = self.due if is_due else self.usual
            values.append(f"{value:g}")
        return " ".join(values)


SCENARIOS: dict[str, list[Series]] = {
    "PenstockCaptureStopped": [Series(f'penstock_capture_state{{{SHOP}, state="stopped"}}', 0, 1)],
    "PenstockCaptureDown": [
        Series(f'penstock_capture_state{{{SHOP}, state="running"}}', 1, 0),
        Series(f'penstock_capture_state{{{SHOP}, state="stopped"}}', 0, 0),
    ],
    "PenstockCaptureLagHigh": [Series(f"penstock_capture_lag_seconds{{{SHOP}}}", 1, 61)],
    "PenstockCaptureLagCritical": [Series(f"penstock_capture_lag_seconds{{{SHOP}}}", 1, 601)],
    "PenstockCaptureLagGrowing": [
        Series(f"penstock_capture_lag_bytes{{{SHOP}}}", 2e8, step=1e6, usual_step=-1e3)
    ],
    "PenstockSourceSilent": [
        Series(f"penstock_server_binlog_position{{{SHOP}}}", 4, step=100, usual_step=100),
        Series(f"penstock_capture_received_bytes_total{{{SHOP}}}", 4, step=0, usual_step=100),
    ],
    "PenstockPurgeNear": [
        Series(f"penstock_server_kept_bytes_before_capture{{{SHOP}}}", 9e9, 1e9),
        Series(f"penstock_server_binlog_bytes{{{SHOP}}}", 1e10, 1e10),
        Series(f"penstock_capture_lag_bytes{{{SHOP}}}", 0, 9e9),
    ],
    "PenstockReconnectFlapping": [Series(f"penstock_capture_connects_total{{{SHOP}}}", 1, step=1)],
    "PenstockSettingsNotApplied": [Series('penstock_settings_state{state="failed"}', 0, 1)],
    "PenstockCaptureProcessEnded": [
        Series(f'penstock_capture_process_exits_total{{{SHOP}, reason="SIGKILL"}}', 0, step=1)
    ],
    "PenstockFailedOver": [Series(f"penstock_capture_failovers_total{{{SHOP}}}", 1, step=1)],
    "PenstockChecksumFailure": [Series(f"penstock_capture_checksum_failures_total{{{SHOP}}}", 0, step=1)],
    "PenstockTablesInDoubt": [Series(f"penstock_capture_tables_in_doubt{{{SHOP}}}", 0, 2)],
    "PenstockLogDiskFull": [
        Series(f"penstock_log_disk_free_bytes{{{SHOP}}}", 1e12, 5e8),
        Series(f"penstock_log_disk_reserved_bytes{{{SHOP}}}", 3e8, 3e8),
    ],
    "PenstockLogDiskFullSoon": [
        Series(f"penstock_log_disk_free_bytes{{{SHOP}}}", 1e12, step=-5e9, usual_step=1e9),
        Series(f"penstock_log_disk_reserved_bytes{{{SHOP}}}", 3e8, 3e8),
    ],
    "PenstockHoldBroken": [Series(f"penstock_log_holds_broken{{{SHOP}}}", 0, 1)],
    "PenstockHoldLarge": [Series(f'penstock_log_hold_bytes{{{SHOP}, reader="cache"}}', 1, 2e11)],
    "PenstockTierUploadFailing": [
        Series(f'penstock_log_tier_uploads_total{{{SHOP}, outcome="failed"}}', 0, step=1)
    ],
    "PenstockLogSyncSlow": [
        Series(f'penstock_log_fsync_seconds_bucket{{{SHOP}, le="1.0"}}', 0, step=0, usual_step=60),
        Series(f'penstock_log_fsync_seconds_bucket{{{SHOP}, le="5.0"}}', 0, step=60, usual_step=60),
        Series(f'penstock_log_fsync_seconds_bucket{{{SHOP}, le="+Inf"}}', 0, step=60, usual_step=60),
    ],
    "PenstockReaderStuck": [
        Series(f"penstock_reader_lag_bytes{{{READER}}}", 0, 2e6),
        Series(f"penstock_reader_sent_bytes_total{{{READER}}}", 1, step=0, usual_step=100),
    ],
    "PenstockReaderLagHigh": [Series(f"penstock_reader_lag_seconds{{{READER}}}", 0, 700)],
    "PenstockShardUnowned": [
        Series(f'penstock_subscription_shards_unowned{{{SHOP}, subscription="cache"}}', 0, 1),
        Series(f'penstock_subscription_members{{{SHOP}, subscription="cache"}}', 2, 2),
    ],
    "PenstockCoordinationLost": [Series('penstock_coordination_up{store="zookeeper://h"}', 1, 0)],
    "PenstockRequestsRefused": [
        Series('penstock_listener_rejected_total{protocol="http", reason="QuotaReached"}', 0, step=50)
    ],
    # Scenarios begin at time 0.
    "PenstockCertificateExpires": [
        Series("penstock_listener_certificate_expires_timestamp_seconds{}", 9e6, 1e6)
    ],
    "PenstockVerifyDifferences": [Series(f"penstock_verify_differences{{{COMPARED}}}", 0, 3)],
    "PenstockVerifyStale": [Series(f"penstock_verify_last_success_timestamp_seconds{{{COMPARED}}}", 0, -1e6)],
    "PenstockLeaseLost": [
        # A process on standby has no lease.
        Series(f'penstock_lease_held{{{LEASE}, instance="a"}}', 1, 0),
        Series(f'penstock_lease_held{{{LEASE}, instance="b"}}', 0, 0),
    ],
    "PenstockTwoHolders": [
        Series(f'penstock_lease_held{{{LEASE}, instance="a"}}', 1, 1),
        Series(f'penstock_lease_held{{{LEASE}, instance="b"}}', 0, 1),
    ],
    "PenstockPipelineFailed": [Series(f'penstock_pipeline_state{{{SINK}, state="failed"}}', 0, 1)],
    "PenstockPipelineRetrying": [Series(f'penstock_pipeline_state{{{SINK}, state="retrying"}}', 0, 1)],
    "PenstockPipelineLagHigh": [Series(f"penstock_pipeline_lag_seconds{{{SINK}}}", 1, 700)],
    "PenstockPipelineBatchLong": [Series(f"penstock_pipeline_batch_running_seconds{{{SINK}}}", 0, 1801)],
    "PenstockPipelineSourceAside": [Series(f'penstock_pipeline_source_aside{{{SINK}, source="east"}}', 0, 1)],
    "PenstockPipelineTablesStopped": [Series(f'penstock_pipeline_tables{{{SINK}, state="stopped"}}', 0, 2)],
    "PenstockDeadLetters": [Series(f"penstock_pipeline_dead_letters_total{{{SINK}}}", 0, step=1)],
    "PenstockLoadStalled": [
        # One shard has loaded its tables, so it makes no further progress.
        Series(f'penstock_load_chunks{{{SHARDS[0]}, state="done"}}', 50, 50),
        Series(f'penstock_load_chunks{{{SHARDS[0]}, state="remaining"}}', 0, 0),
        Series(f'penstock_load_chunks{{{SHARDS[1]}, state="done"}}', 0, step=0, usual_step=1),
        Series(f'penstock_load_chunks{{{SHARDS[1]}, state="remaining"}}', 900, 900),
    ],
    "PenstockSubscriberLagHigh": [Series(f"penstock_subscriber_lag_seconds{{{MEMBER}}}", 0, 700)],
    "PenstockSubscriberSkips": [Series(f"penstock_subscriber_skipped_batches_total{{{MEMBER}}}", 0, step=1)],
}
# Rules about a missing series, which is absent while the alert is due.
GONE = {
    "PenstockDaemonAbsent": 'penstock_build_info{version="1", revision="a1", python="3"}',
    "PenstockPipelineGone": f"{REPORTED}{{{SINK}}}",
}
_PRESENT, _LOST = f"1x{RESOLVED}", f"1x59 _x120 1x{RESOLVED - 180}"
# One of two processes is lost. In addition, a pipeline is resized from two shards to four, none of which is
# lost.
SHARD_LOST = [
    (f"{REPORTED}{{{SHARDS[0]}}}", _PRESENT),
    (f"{REPORTED}{{{SHARDS[1]}}}", _LOST),
]
RESHARDED = [(f"{REPORTED}{{{shard}}}", "1x59") for shard in SHARDS] + [
    (f'{REPORTED}{{pipeline="shop", sink="", shard="{number}-of-4"}}', f"_x59 1x{RESOLVED}")
    for number in range(4)
]


@pytest.fixture(scope="module")
def promtool(missing_part: MissingPart) -> Path:
    try:
        return program_on_host("promtool", "prometheus")
    except PartMissing as problem:
        missing_part("promtool", str(problem))


def run(*words: str | Path) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def groups() -> list[dict[str, Any]]:
    return list(yaml.safe_load(RULES.read_text())["groups"])


def test_every_rule_has_a_scenario() -> None:
    assert {rule["alert"] for group in groups() for rule in group["rules"]} == {*SCENARIOS, *GONE}


def test_series_of_the_scenarios_have_the_labels_of_their_metrics() -> None:
    """Expressions join metrics by their labels, so a scenario without one of the labels proves nothing."""
    texts = [series.text for every in SCENARIOS.values() for series in every] + [*GONE.values()]
    for text in each(texts):
        name, _, selector = text.partition("{")
        definition = DEFINITIONS.get(name) or DEFINITIONS[name.removesuffix("_bucket")]
        assert set(re.findall(r'(\w+)="', selector)) - {"le", "instance"} == set(definition.labels), text


@pytest.mark.deep(guard="tests/unit/test_metric_names.py::test_every_named_metric_is_in_the_registry")
def test_every_rule_fires_and_resolves(promtool: Path, tmp_path: Path) -> None:
    assert "SUCCESS" in run(promtool, "check", "rules", RULES)
    scenarios = {
        alert: [_scenario(alert, [(series.text, series.values()) for series in every])]
        for alert, every in SCENARIOS.items()
    } | {alert: [_scenario(alert, [(text, _LOST)])] for alert, text in GONE.items()}
    gone = "PenstockPipelineGone"
    scenarios[gone] += [_scenario(gone, SHARD_LOST), _scenario(gone, RESHARDED, fires=False)]
    rules = {rule["alert"]: rule for group in groups() for rule in group["rules"]}
    tests = []
    for alert, of_rule in scenarios.items():
        # Each file has one rule, because every scenario evaluates all rules of its file, minute by minute.
        file = tmp_path / f"{alert}.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "rules", "rules": [rules[alert]]}]}))
        content = {"rule_files": [str(file)], "evaluation_interval": "1m", "tests": of_rule}
        tests.append(tmp_path / f"{alert}.test.yml")
        tests[-1].write_text(yaml.safe_dump(content))
    run(promtool, "test", "rules", *tests)


def _scenario(alert: str, series: list[tuple[str, str]], *, fires: bool = True) -> dict[str, Any]:
    firing = f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})'

    def expect(minute: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return {"expr": firing, "eval_time": f"{minute}m", "exp_samples": samples}

    return {
        "name": alert,
        "interval": "1m",
        "input_series": [{"series": text, "values": values} for text, values in series],
        "promql_expr_test": [
            expect(59, []),
            expect(FIRING, [{"labels": "{}", "value": 1}] if fires else []),
            expect(RESOLVED, []),
        ],
    }
