# SPDX-License-Identifier: Apache-2.0
"""The summary that `penstock run` and `relay` print at the end."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.cli.app import make_app
from penstock.cli.run import _Summary

SAMPLE = Path(penstock.__file__).with_name("sample") / "mysql-bin.000001"


@pytest.mark.parametrize("command", [("run", "--local"), ("relay",)])
def test_run_ends_with_what_it_wrote_and_where_it_is(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"""
name: shop
source: {{name: db1, path: {SAMPLE}, tables: [shop.orders]}}
load: {{mode: none}}
batch: {{bytes: 128KiB}}
sink: {{files: {{path: {tmp_path / "feed"}}}}}
state: sqlite://{tmp_path / "state.db"}
"""
    )
    done = CliRunner().invoke(make_app(), [*command, str(file), "--until", "caught-up"])
    assert done.exit_code == 0, done.output
    last_lines = done.stderr.splitlines()[-2:]
    assert re.fullmatch(r"shop caught up after [\d.]+ s: 3 batches, \d+ rows written", last_lines[0])
    assert last_lines[1] == f"  db1 at mysql-bin.000001:{SAMPLE.stat().st_size}"


def test_summary_counts_batches_of_each_sink_once_and_names_rejected_rows() -> None:
    summary = _Summary(Path("p.yaml"))
    batch = {"state": "loading", "written": 10, "rejected": 1, "rows_loaded": 10, "sink": "lake"}
    summary.add(batch)
    summary.add(batch | {"state": "waiting for changes"})
    summary.add(batch | {"state": "retrying", "error": "ConnectionLost"})
    summary.add(
        batch | {"state": "running", "written": 5, "rejected": 2, "positions": {"db1": "b.000001:9 x"}}
    )
    summary.add({"state": "running", "written": 7, "rejected": 0, "sink": "search"})
    text = re.sub(r"after [\d.]+ s", "after 1 s", summary.text("shop", "stopped"))
    assert text == (
        "shop stopped after 1 s: 3 batches, 22 rows written; 10 rows read by the full load\n"
        "  db1 at b.000001:9\n"
        "  2 rows skipped or put aside: penstock pipelines dead-letters p.yaml"
    )


def test_dry_run_refuses_shards_of_a_pipeline_that_cannot_be_divided(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(f"{{name: shop, source: {{path: {SAMPLE}}}, load: none, sink: stdout, shards: 2}}")
    refused = CliRunner().invoke(make_app(), ["run", str(file), "--local", "--dry-run"])
    assert refused.exit_code == 2
    assert "cannot have shards: a stdout sink writes all rows to one output" in refused.stderr
