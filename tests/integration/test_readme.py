# SPDX-License-Identifier: Apache-2.0
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.settings.daemon import load_settings
from tests.support.daemon.process import DaemonProcess
from tests.support.spark.session import spark
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.nonempty import each
from tools.servers import REPLICATION_PASSWORD

README = Path(__file__).resolve().parents[2] / "README.md"

# The paths and the server in the page, in the order of their replacement.
BACKUP = "/backup/mysql-bin"
SERVER = "mysql://repl@127.0.0.1:3306"
SECRET = "/run/secrets/repl"
LAKE = "/lake/"

Words = Callable[[str], str]

__all__ = ["spark"]


def examples(language: str) -> list[str]:
    """Return the page's examples in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture
def here(start_server: StartServer, tmp_path: Path) -> Words:
    """Return a function that replaces the page's log, address and password with a real server's."""
    server = start_server("mariadb")
    server.sql("CREATE DATABASE shop")
    server.sql(
        "CREATE TABLE shop.orders (id INT PRIMARY KEY, status ENUM('new', 'paid'), total DECIMAL(10,2))"
    )
    server.sql("INSERT INTO shop.orders VALUES (1, 'new', 9.50)")
    server.sql("UPDATE shop.orders SET status = 'paid' WHERE id = 1")
    server.sql("DELETE FROM shop.orders WHERE id = 1")
    log = server.binlog_files()[0].with_suffix("")
    secret = tmp_path / "secret"
    secret.write_text(REPLICATION_PASSWORD)

    def replace(text: str) -> str:
        real = {BACKUP: str(log), SERVER: server.url(), SECRET: str(secret), LAKE: f"{tmp_path}/"}
        for named, replacement in real.items():
            text = text.replace(named, replacement)
        return text

    return replace


def test_python_example_prints_every_change(here: Words, capsys: pytest.CaptureFixture[str]) -> None:
    first, *_ = examples("python")
    assert "read_binlog" in first
    exec(here(first), {})
    printed = capsys.readouterr().out
    assert "shop.orders" in printed
    assert re.findall(r"'_change_type': '(\w+)'", printed) == [
        "insert",
        "update_preimage",
        "update_postimage",
        "delete",
    ]


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
def test_spark_examples_count_and_stream(
    here: Words, spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, stream = examples("python")[1].split("\n\n", 1)
    exec(here(batch), {"spark": spark})
    assert re.search(r"update_postimage\|\s+1\|", capsys.readouterr().out)
    exec(here(stream), {"spark": spark})
    assert spark.read.parquet(str(tmp_path / "orders_changes")).count() == 4


def test_subscriber_prints_every_change(here: Words, tmp_path: Path) -> None:
    _, text = examples("yaml")
    with DaemonProcess(tmp_path, yaml.safe_load(here(text))) as daemon:
        program = here(examples("python")[2]).replace("127.0.0.1:7070", f"127.0.0.1:{daemon.port}")
        program = program.replace("shards=8", 'shards=8, begin="earliest"')
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONUNBUFFERED": "1"}
        words = [sys.executable, "-c", program]
        with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            kinds: list[str] = []
            for line in running.stdout:
                kinds += re.findall(r"\('(insert|update|delete)', ", line)
                if "delete" in kinds:
                    break
            # The page's program runs until it is stopped.
            running.kill()
    assert kinds == ["insert", "update", "delete"]


def test_commands_run_as_written(here: Words) -> None:
    (commands,) = examples("sh")
    for line in each(here(commands).splitlines()):
        program, *words = shlex.split(line)
        assert program == "penstock"
        done = CliRunner().invoke(make_app(), words)
        assert done.exit_code == 0, f"{line}\n{done.output}"


def test_settings_are_valid_and_name_the_tables_of_the_daemon(here: Words, tmp_path: Path) -> None:
    _, text = examples("yaml")
    file = tmp_path / "penstock.yaml"
    file.write_text(here(text))
    checked = CliRunner().invoke(make_app(), ["serve", str(file), "--check"])
    assert checked.exit_code == 0, checked.output
    assert load_settings(file).log_of("shop").folder == tmp_path / "penstock" / "shop"


def test_pipeline_keeps_a_lake_equal(here: Words, tmp_path: Path) -> None:
    text, _ = examples("yaml")
    file = tmp_path / "pipeline.yaml"
    file.write_text(here(text))
    planned = CliRunner().invoke(make_app(), ["run", str(file), "--dry-run"])
    assert planned.exit_code == 0, planned.output
    assert ": 1 table\n" in planned.output
    assert "shop.orders" in planned.output


def test_every_verb_named_by_the_page_exists() -> None:
    makefile = README.with_name("Makefile").read_text()
    named = set(
        re.findall(r"\bmake (\w+)", README.read_text() + README.with_name("CONTRIBUTING.md").read_text())
    )
    assert {"setup", "demo", "test"} <= named
    assert [verb for verb in named if not re.search(rf"^{verb}:", makefile, re.MULTILINE)] == []
