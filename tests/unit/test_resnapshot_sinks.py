# SPDX-License-Identifier: Apache-2.0
"""`penstock resnapshot` of a pipeline whose sinks receive different tables."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.changes import Target
from penstock.cli.app import make_app
from penstock.model import TableName, TablePatterns
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.changes_made import target_of

TABLES = tuple(target_of({"id": "int"}, name=name) for name in ("shop.orders", "shop.products"))


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def listed(address: object, patterns: TablePatterns) -> list[Target]:
        return [table for table in TABLES if patterns.matches(table.name.database, table.name.table)]

    monkeypatch.setattr("penstock.pipeline.load.targets.targets_of", listed)
    lake = {"files": {"path": str(tmp_path / "lake")}, "tables": "shop.orders"}
    cache = {"files": {"path": str(tmp_path / "cache")}, "tables": "shop.products"}
    values = {
        "source": {"url": "mysql://root@127.0.0.1:1", "name": "here", "tables": "shop.*"},
        "sinks": {"lake": lake, "cache": cache},
    }
    file = tmp_path / "shop.yaml"
    file.write_text(json.dumps(values))
    settings = load_pipeline(file)
    for sink in ("lake", "cache"):
        with closing(PipelineState.open(settings.state, settings.name, sink)) as state:
            state.take()
    return file


def requested(file: Path, sink: str) -> list[TableName]:
    settings = load_pipeline(file)
    with closing(PipelineState.open(settings.state, settings.name, sink)) as state:
        return [request.table for request in state.requests()]


def test_table_is_requested_for_the_sinks_that_receive_it(pipeline: Path) -> None:
    outcome = CliRunner().invoke(make_app(), ["resnapshot", str(pipeline), "shop.products"])
    assert outcome.exit_code == 0, outcome.output
    assert requested(pipeline, "lake") == []
    assert requested(pipeline, "cache") == [TableName("shop", "products")]


def test_table_of_no_sink_is_refused(pipeline: Path) -> None:
    outcome = CliRunner().invoke(make_app(), ["resnapshot", str(pipeline), "shop.customers"])
    assert outcome.exit_code != 0
    assert "no table of the pipeline is shop.customers" in outcome.output
