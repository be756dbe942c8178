# SPDX-License-Identifier: Apache-2.0
"""`penstock run --dry-run` and `penstock pipelines`: their output and their effects."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.errors import OptionInvalid
from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import load_pipeline
from penstock.pipeline.state import PipelineState
from tests.support.pipeline.running import run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server


def penstock(*words: str) -> str:
    done = CliRunner().invoke(make_app(), list(words))
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def pipeline(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> Path:
    database = fresh_database(mysql_server)
    mysql_server.sql("CREATE TABLE t (id INT PRIMARY KEY); INSERT INTO t VALUES (1), (2)", database=database)
    file = tmp_path / "shop.yaml"
    text = {
        "source": {"url": mysql_server.url("root"), "name": "shop", "tables": f"{database}.*"},
        "sink": {"mysql": {"url": mariadb_server.url("root")}},
    }
    file.write_text(json.dumps(text), encoding="utf-8")
    return file


def test_dry_run_reports_its_plan_and_changes_nothing(pipeline: Path, mariadb_server: Server) -> None:
    found = json.loads(penstock("run", str(pipeline), "--dry-run", "--json"))
    (target,) = found["targets"]
    assert (target["chunks"], target["statements"] != []) == (1, True)
    database = target["target"].split(".")[0]
    assert not mariadb_server.sql(f"SHOW DATABASES LIKE '{database}'")
    assert not (pipeline.parent / "penstock-pipelines.db").exists()
    assert "CREATE TABLE" in penstock("run", str(pipeline), "--dry-run")


def test_pipeline_administration_needs_no_secrets(tmp_path: Path) -> None:
    file = tmp_path / "far.yaml"
    source = {"url": "mysql://repl@db1", "password_env": "NOBODY_HAS_THIS", "tables": ["shop.*"]}
    text = {"source": source, "sink": {"stdout": {}}, "state": f"sqlite://{tmp_path}/state.db"}
    file.write_text(json.dumps(text), encoding="utf-8")
    penstock("pipelines", "pause", str(file))
    assert json.loads(penstock("pipelines", "show", str(file), "--json"))["pipeline"] == "far"
    assert (tmp_path / "state.db").exists()
    penstock("pipelines", "resume", str(file))
    for wrong in ({"state": 7}, {"name": ["far"]}, {"state": "${NOBODY_HAS_THIS}"}):
        file.write_text(json.dumps(text | wrong), encoding="utf-8")
        refused = CliRunner().invoke(make_app(), ["pipelines", "show", str(file)])
        assert refused.exit_code == 2, refused.output


def test_resnapshot_by_a_missing_column_is_refused_at_once(pipeline: Path) -> None:
    settings = load_pipeline(pipeline)
    table = settings.sources[0].tables.include[0].replace("*", "t")
    told = CliRunner().invoke(make_app(), ["resnapshot", str(pipeline), table, "--where", "idd < 50"])
    assert told.exit_code == 2, told.output
    assert "idd" in told.output
    shown = json.loads(penstock("pipelines", "show", str(pipeline), "--json"))
    assert not shown.get("resnapshots"), "nothing is asked for"


def test_pipeline_is_shown_paused_resumed_and_reset(
    pipeline: Path,
) -> None:
    def shown() -> dict[str, object]:
        told: dict[str, object] = json.loads(penstock("pipelines", "show", str(pipeline), "--json"))
        return told

    assert shown()["state"] == "never ran"
    settings = load_pipeline(pipeline)
    penstock("pipelines", "pause", str(pipeline), "--why", "the target is moved")
    with pytest.raises(OptionInvalid, match="paused: the target is moved, so it has not caught up"):
        run_to_end(LocalDriver(2), settings)
    assert "pipelines resume" in penstock("run", str(pipeline)), "without --until it ends as it was asked to"
    unfinished = CliRunner().invoke(make_app(), ["run", str(pipeline), "--until", "caught-up"])
    assert unfinished.exit_code == 2
    assert f"penstock pipelines resume {pipeline}" in " ".join(unfinished.output.split())
    assert shown()["state"] == "paused"
    penstock("pipelines", "resume", str(pipeline))
    run_to_end(LocalDriver(2), settings)
    told = shown()
    assert (told["state"], told["batches"], told["tables_loaded"]) == ("finished", 1, 1)
    assert settings.name in penstock("pipelines", "list", str(pipeline))
    table = settings.sources[0].tables.include[0].replace("*", "t")
    state = PipelineState.open(settings.state, settings.name)
    for end, why in (("failed", "the table is gone"), ("done", "")):
        penstock("resnapshot", str(pipeline), table)
        assert shown()["resnapshots"] == {f"shop/{table}": "asked"}
        (wish,) = [one for one in state.requests() if one.state == "asked"]
        state.note_request(wish, end, why)
        left = {f"shop/{table}": "failed: the table is gone"} if why else {}
        assert shown()["resnapshots"] == left
    state.close()
    refused = CliRunner().invoke(make_app(), ["pipelines", "reset", str(pipeline)])
    assert refused.exit_code == 2, "without --yes nothing is forgotten"
    penstock("pipelines", "reset", str(pipeline), "--yes")
    assert shown()["state"] == "never ran"


@pytest.mark.parametrize("load", ["none", {"mode": "none"}])
def test_reset_without_a_load_announces_none(tmp_path: Path, load: Any) -> None:
    file = tmp_path / "shop.yaml"
    values = {"source": {"path": str(tmp_path / "*.binlog"), "name": "shop"}, "sink": "stdout", "load": load}
    file.write_text(json.dumps(values), encoding="utf-8")
    for words in ((), ("--yes",)):
        result = CliRunner().invoke(make_app(), ["pipelines", "reset", str(file), *words])
        assert "without a load" in result.output
        assert "full load" not in result.output
    file.write_text(json.dumps({**values, "load": "full"}), encoding="utf-8")
    assert "with a full load" in CliRunner().invoke(make_app(), ["pipelines", "reset", str(file)]).output


def test_dry_run_does_not_count_the_tables_of_files(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    values = {
        "source": {"path": str(tmp_path / "*.binlog"), "name": "shop"},
        "sink": "stdout",
        "load": "none",
    }
    file.write_text(json.dumps(values), encoding="utf-8")
    assert "shop: its tables are known once it is read" in penstock("run", str(file), "--dry-run")
    (source,) = json.loads(penstock("run", str(file), "--dry-run", "--json"))["sources"]
    assert source["tables"] is None
