# SPDX-License-Identifier: Apache-2.0
"""The findings of `penstock check` about a TiDB cluster."""

import json
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.tidb.precheck import tidb_version
from penstock.tidb.registry import Node, NodeKind, NodeState
from tests.support.tidb.drainer_capture import sample_jobs
from tools.tidb.cluster import FakeCluster

_MINUTES_AGO = 5 * 60_000 << 18


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        cluster.store_jobs(sample_jobs())
        yield cluster


def _register(cluster: FakeCluster, kind: NodeKind, name: str, state: NodeState, ago: int = 0) -> None:
    node = Node(name, f"{name}:8250", state, update_ts=cluster.next_timestamp() - ago)
    cluster.keys[f"/tidb-binlog/v1/{kind}/{name}"] = json.dumps(node.to_values()).encode()


def _findings(address: str, *arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(make_app(), ["check", f"tidb://{address}", "--json", *arguments])
    findings = [json.loads(line) for line in result.stdout.splitlines()]
    return result.exit_code, {finding["check"]: finding for finding in findings}


def test_cluster_with_a_pump_has_no_problem(cluster: FakeCluster) -> None:
    _register(cluster, NodeKind.PUMP, "first", NodeState.ONLINE)
    _register(cluster, NodeKind.PUMP, "gone", NodeState.OFFLINE)
    code, findings = _findings(cluster.address)
    assert code == 0
    assert set(findings) == {"pd", "pump first", "definitions"}
    assert "schema version is 55" in findings["definitions"]["what"]


def test_everything_that_is_missing_is_named(cluster: FakeCluster) -> None:
    _register(cluster, NodeKind.PUMP, "away", NodeState.PAUSED)
    _register(cluster, NodeKind.DRAINER, "dead", NodeState.ONLINE, _MINUTES_AGO)
    cluster.values.clear()
    code, findings = _findings(cluster.address)
    assert code == 1
    severities = {name: finding["severity"] for name, finding in findings.items()}
    assert severities == {
        "pd": "ok",
        "pumps": "error",
        "pump away": "error",
        "drainer dead": "warning",
        "definitions": "ok",
    }
    assert "binlogctl" in findings["drainer dead"]["statement"]


def test_silent_pump_is_an_error(cluster: FakeCluster) -> None:
    _register(cluster, NodeKind.PUMP, "first", NodeState.ONLINE, _MINUTES_AGO)
    code, findings = _findings(cluster.address)
    assert code == 1
    assert "silent for 300 s" in findings["pump first"]["what"]


def test_cluster_that_does_not_answer_is_an_error(cluster: FakeCluster) -> None:
    cluster.stop()
    code, findings = _findings(cluster.address)
    assert code == 1
    assert set(findings) == {"pd"}


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("5.7.25-TiDB-v7.1.2", (7, 1, 2)),
        ("8.0.11-TiDB-v8.4.0-alpha", (8, 4, 0)),
        ("5.7.25-TiDB-None", ()),
        ("8.0.36", None),
    ],
)
def test_release_is_read_from_the_version(text: str, numbers: tuple[int, ...] | None) -> None:
    assert tidb_version(text) == numbers
