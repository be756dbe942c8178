# SPDX-License-Identifier: Apache-2.0
"""The spark sink on Spark 4.0, with the runtimes of Delta and Iceberg from Maven."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from deltalake import DeltaTable

from tests.support.pipeline.oracle import assert_same, delta_rows, source_rows
from tests.support.sinks.spark_scenarios import SCENARIOS, session_settings_of
from tests.support.spark.cluster import ROOT, environment_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tools.servers import PartMissing, Server
from tools.spark_versions import folder_of, runtime_of

pytestmark = [
    pytest.mark.timeout(1_200),
    pytest.mark.slow,
    pytest.mark.deep(
        guard="tests/unit/test_sink_spark_statements.py::test_mirror_stages_the_last_image_of_each_key"
    ),
]

Prepared = Callable[[str], tuple[dict[str, str], list[str]]]


@pytest.fixture
def spark_with(missing_part: MissingPart, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """The environment of a process on Spark 4.0, and the jars of a table format."""

    def prepare(table_format: str) -> tuple[dict[str, str], list[str]]:
        try:
            jars = [str(jar) for jar in runtime_of(table_format)]
            return environment_of(folder_of("4.0"), tmp_path_factory.mktemp("configuration")), jars
        except PartMissing as problem:
            missing_part(f"Spark 4.0 with {table_format}", str(problem))

    return prepare


@pytest.mark.parametrize("table_format", ["delta", "iceberg"])
def test_sink_keeps_its_delivery_in_each_format(
    table_format: str, spark_with: Prepared, tmp_path: Path
) -> None:
    env, jars = spark_with(table_format)
    words = [sys.executable, "-m", "tests.support.sinks.spark_scenarios", table_format, str(tmp_path), *jars]
    done = run_to_end(words, ROOT, env)
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stdout.split() == [word for name in SCENARIOS for word in ("ok", name)]


def test_pipeline_keeps_delta_tables_of_a_hive_catalog_equal(
    spark_with: Prepared, mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    env, jars = spark_with("delta")
    database = fresh_database(mysql_server)
    mysql_server.sql(
        f"""CREATE TABLE {database}.orders (id INT PRIMARY KEY, at DATETIME(6), price DECIMAL(9,2));
        INSERT INTO {database}.orders VALUES (1, '2026-03-01 01:02:03.4', 1.5), (2, NULL, -2)"""
    )
    metastore = f"jdbc:derby:;databaseName={tmp_path / 'metastore'};create=true"
    file = tmp_path / "pipeline.yaml"
    values = {
        "name": "lake",
        "source": {"name": "shop", "url": mysql_server.url("root"), "tables": f"{database}.*"},
        "sink": {
            "spark": {
                "using": "delta",
                "staging": str(tmp_path / "staging"),
                # The reader in this test does not support deletion vectors.
                "properties": {"delta.enableDeletionVectors": "false"},
            }
        },
        "state": f"sqlite://{tmp_path / 'state.db'}",
        "spark": session_settings_of("delta", tmp_path, jars)
        | {
            "spark.sql.catalogImplementation": "hive",
            "spark.hadoop.javax.jdo.option.ConnectionURL": metastore,
        },
    }
    file.write_text(yaml.safe_dump(values))

    def penstock(verb: str, *words: str) -> subprocess.CompletedProcess[str]:
        return run_to_end(["penstock", verb, str(file), "--master", "local[1]", *words], ROOT, env)

    table = tmp_path / "warehouse" / f"{database}.db" / "orders"
    for statement in (
        "SELECT 1",
        f"""UPDATE {database}.orders SET price = 3 WHERE id = 1; DELETE FROM {database}.orders WHERE id = 2;
        ALTER TABLE {database}.orders ADD note VARCHAR(9);
        INSERT INTO {database}.orders VALUES (3, NULL, 0, 'x')""",
    ):
        mysql_server.sql(statement)
        done = penstock("run", "--until", "caught-up")
        assert done.returncode == 0, done.stderr[-6000:]
        assert_same(source_rows(mysql_server, database, "orders"), delta_rows(str(table)), key=("id",))
    done = penstock("verify")
    assert done.returncode == 0, (done.stdout, done.stderr[-6000:])
    DeltaTable(table).delete("id = 3")
    done = penstock("verify")
    assert done.returncode == 1, (done.stdout, done.stderr[-6000:])
    assert "id=3" in done.stdout, done.stdout
