# SPDX-License-Identifier: Apache-2.0
"""`penstock demo`: it decodes its sample, mirrors it and finds a difference, without a server."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli import demo
from penstock.cli.app import make_app


def test_demo_ends_with_equal_tables_and_runs_again_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    for _ in range(2):
        done = CliRunner().invoke(make_app(), ["demo", str(folder)])
        assert done.exit_code == 0, done.output
        for table in ("orders", "order_items", "payments"):
            assert f"shop.{table}: equal, " in done.stdout
        assert done.stdout.count("\ninsert ") + done.stdout.count("\ndelete ") == 6
    assert max(map(len, done.stdout.splitlines())) <= 120 + len(str(tmp_path))


def test_demo_reports_a_table_that_differs_from_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = demo._SAMPLE
    sample = tmp_path / "sample"
    shutil.copytree(original, sample)
    document = json.loads(gzip.decompress((sample / "rows.json.gz").read_bytes()))
    document["tables"]["shop.payments"][0]["amount"] = "0.00"
    (sample / "rows.json.gz").write_bytes(gzip.compress(json.dumps(document).encode()))
    monkeypatch.setattr(demo, "_SAMPLE", sample)
    done = CliRunner().invoke(make_app(), ["demo", str(tmp_path / "demo")])
    assert done.exit_code == demo.EXIT_DIFFERENCES
    assert "shop.payments: 1 row of " in done.stdout
    assert "shop.orders: equal, " in done.stdout


def test_demo_keeps_a_folder_that_is_not_its_own(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    done = CliRunner().invoke(make_app(), ["demo", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty" in done.output
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_demo_in_the_current_folder_runs_again_and_keeps_the_files_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(make_app(), ["demo", "."]).exit_code == 0
    written = {path.name for path in tmp_path.iterdir()}
    assert written <= {
        "mysql-bin.000001",
        "pipeline.yaml",
        "feed",
        "state.db",
        "state.db-wal",
        "state.db-shm",
    }
    (tmp_path / "notes.txt").write_text("keep")
    again = CliRunner().invoke(make_app(), ["demo", "."])
    assert again.exit_code == 0, again.output
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_demo_keeps_a_pipeline_file_that_was_edited(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    demo._prepare(folder)
    edited = (folder / "pipeline.yaml").read_text() + "batch: {interval: 5s}\n"
    (folder / "pipeline.yaml").write_text(edited)
    refused = CliRunner().invoke(make_app(), ["demo", str(folder)])
    assert refused.exit_code == 2
    assert "would be lost" in refused.output
    assert (folder / "pipeline.yaml").read_text() == edited
