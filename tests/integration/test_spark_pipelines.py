# SPDX-License-Identifier: Apache-2.0
"""The example examples/auto_cdc: a declarative pipeline that feeds changes into AUTO CDC, as SCD types 1 and
2.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pyspark
import pytest
import yaml

from examples.auto_cdc import lake
from tests.support.spark.cluster import ROOT, SPARK_HOME, connect_server, environment, run_program, run_to_end
from tests.support.spark.session import session_settings
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tools.servers import Server


def run_pipeline(folder: Path, address: str) -> None:
    """Run the pipeline once, against a Connect server."""
    words = [str(SPARK_HOME / "bin" / "spark-pipelines"), "run", "--spec", "spark-pipeline.yml"]
    done = run_to_end([*words, "--remote", address], folder, environment())
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def example_in(folder: Path, settings: Mapping[str, str]) -> Path:
    """Copy the example and point its specification at the test's server."""
    shutil.copytree(ROOT / "examples" / "auto_cdc", folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "spark-pipeline.yml"
    spec = yaml.safe_load(path.read_text())
    spec["storage"] = f"file://{folder / 'storage'}"
    spec["configuration"] |= settings
    path.write_text(yaml.safe_dump(spec))
    return folder


def query(address: str, *statements: str) -> list[list[list[object]]]:
    """Run SQL on a Connect server; return the rows of each statement."""
    answer: list[list[list[object]]] = json.loads(
        run_program("sql", json.dumps({"remote": address, "sql": statements}))
    )
    return answer


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.slow
def test_auto_cdc_keeps_current_rows_and_their_history_over_two_runs(
    mysql_server: Server, fresh_database: FreshDatabase, missing_part: MissingPart, tmp_path: Path
) -> None:
    if tuple(map(int, pyspark.__version__.split(".")[:2])) < (4, 3):
        pytest.skip("AUTO CDC keeps history (SCD 2) from Spark 4.3 on")
    if missing := lake.missing_tools():
        missing_part(", ".join(missing), "the example compiles a catalog: apt-get install maven default-jdk")
    database = fresh_database(mysql_server)
    mysql_server.sql(
        f"""CREATE TABLE {database}.orders (id INT PRIMARY KEY, status VARCHAR(10));
        INSERT INTO {database}.orders VALUES (1,'new'),(2,'new'),(3,'new');
        BEGIN; UPDATE {database}.orders SET status='paid' WHERE id=1;
        UPDATE {database}.orders SET status='sent' WHERE id=1; COMMIT;
        DELETE FROM {database}.orders WHERE id=2"""
    )
    folder = example_in(
        tmp_path / "auto_cdc",
        {"orders.source": mysql_server.url(), "orders.table": f"{database}.orders"},
    )
    settings = {name: value for name, value in session_settings().items() if ".driver." not in name}
    settings |= lake.catalog_settings(tmp_path / "warehouse")
    with connect_server(tmp_path, settings, lake.jars(tmp_path / "jars")) as address:
        query(address, "CREATE NAMESPACE IF NOT EXISTS lake.shop")
        run_pipeline(folder, address)
        mysql_server.sql(
            f"""UPDATE {database}.orders SET status='back' WHERE id=3;
            INSERT INTO {database}.orders VALUES (4,'new')"""
        )
        run_pipeline(folder, address)
        present, history = query(
            address,
            "SELECT id, status FROM lake.shop.orders ORDER BY id",
            "SELECT id, status, __END_AT IS NULL FROM lake.shop.orders_history ORDER BY id, __START_AT",
        )
    assert present == [list(row) for row in mysql_server.sql(f"SELECT * FROM {database}.orders ORDER BY id")]
    assert history == [
        [1, "new", False],
        [1, "paid", False],
        [1, "sent", True],
        [2, "new", False],
        [3, "new", False],
        [3, "back", True],
        [4, "new", True],
    ]
