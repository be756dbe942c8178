# SPDX-License-Identifier: Apache-2.0
"""`penstock init`: its files are valid as they are, and with every example in them turned on."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.pipeline.settings import load_pipeline
from penstock.settings.daemon import load_settings

ENVIRONMENT = {"PENSTOCK_TOKEN": "t", "PENSTOCK_PASSWORD": "p"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that `penstock init` writes."""
    words = ["init", str(tmp_path), "--source", "mysql://cdc@db1:3307", "--tables", "shop.o*"]
    done = CliRunner().invoke(make_app(), words)
    assert done.exit_code == 0, done.output
    return tmp_path


@pytest.mark.parametrize("examples", [False, True], ids=["as written", "with every example"])
def test_written_files_are_valid(folder: Path, examples: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    if examples:
        for path in folder.glob("*.yaml"):
            text, count = re.subn(r"(?m)^(\s*)#(?=\S|  -)", r"\1", path.read_text())
            assert count >= 5, f"{path.name} has examples"
            # The files named in these settings do not exist on this machine.
            path.write_text(re.sub(r"(?m)^\s*(password_file|tls): .*\n", "", text))
    pipeline = load_pipeline(folder / "pipeline.yaml")
    assert [source.name for source in pipeline.sources] == ["db1" if examples else "db1:3307"]
    settings = load_settings(folder / "penstock.yaml", ENVIRONMENT)
    assert list(settings.instances) == ["shop"]


def test_existing_files_are_kept(folder: Path) -> None:
    before = (folder / "pipeline.yaml").read_text()
    again = CliRunner().invoke(make_app(), ["init", str(folder)])
    assert again.exit_code == 2
    assert "exists" in again.output
    assert (folder / "pipeline.yaml").read_text() == before


def test_source_that_is_no_server_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(make_app(), ["init", str(tmp_path), "--source", "db1"])
    assert done.exit_code == 2
    assert not list(tmp_path.iterdir())
