# SPDX-License-Identifier: Apache-2.0
"""The source and pipelines on older versions of Spark, and a checkpoint that moves between versions."""

import gzip
import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.dataset
import pytest
from deltalake import DeltaTable

from tests.support.spark.cluster import (
    ROOT,
    connect_server,
    environment,
    environment_of,
    run_program,
    run_to_end,
)
from tests.support.spark.session import head_of, session_settings
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.nonempty import each
from tools.servers import PartMissing, Server
from tools.spark_versions import RELEASES, folder_of

pytestmark = pytest.mark.timeout(1_200)

SAMPLE = ROOT / "src/penstock/sample"
EXPECTED = [[1, "insert"], [2, "insert"], [1, "update_preimage"], [1, "update_postimage"], [2, "delete"]]
WAYS = ("connect", "classic")
# Each version runs in one way. The long tier has the other combinations of a version and a way.
CASES = list(zip(RELEASES, itertools.cycle(WAYS), strict=False))
LONG_CASES = [case for case in itertools.product(RELEASES, WAYS) if case not in CASES]

Environment = Callable[[str], dict[str, str]]


@pytest.fixture
def environment_on(missing_part: MissingPart, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The environment of a process on a version of Spark, fetched if missing."""

    def environment_of_version(minor: str) -> dict[str, str]:
        try:
            return environment_of(folder_of(minor), tmp_path_factory.mktemp("configuration"))
        except PartMissing as problem:
            missing_part(f"PySpark {minor}", str(problem))

    return environment_of_version


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("minor", "way"), [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in LONG_CASES)]
)
def test_older_spark_reads_batches_envelopes_and_streams(
    minor: str,
    way: str,
    environment_on: Environment,
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    env = environment_on(minor)
    start, database = head_of(mysql_server), fresh_database(mysql_server)
    mysql_server.sql(
        f"""CREATE TABLE {database}.t (id INT PRIMARY KEY, n INT);
        INSERT INTO {database}.t VALUES (1,1),(2,2);
        UPDATE {database}.t SET n=3 WHERE id=1; DELETE FROM {database}.t WHERE id=2"""
    )
    order = {
        "source": mysql_server.url(),
        "database": database,
        "start": start,
        "checkpoint": str(tmp_path / "checkpoint"),
        "out": str(tmp_path / "out"),
    }
    if way == "connect":
        settings = {name: value for name, value in session_settings().items() if ".driver." not in name}
        with connect_server(tmp_path, settings, env=env) as address:
            seen = json.loads(run_program("reads", json.dumps(order | {"remote": address}), env))
    else:
        classic = {"master": "local[2]", "settings": session_settings()}
        seen = json.loads(run_program("reads", json.dumps(order | classic), env))
    for kind, rows in each(seen.items(), least=3):
        assert sorted(rows) == sorted(EXPECTED), kind


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.slow
def test_checkpoint_moves_between_versions_without_loss_or_duplicates(
    environment_on: Environment, tmp_path: Path
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    (log / "mysql-bin.000001").write_bytes((SAMPLE / "mysql-bin.000001").read_bytes())
    order = {
        "master": "local[2]",
        "settings": session_settings(),
        "options": {"path": str(log), "tables": "shop.orders", "maxBytesPerTrigger": "64k"},
        "checkpoint": str(tmp_path / "checkpoint"),
        "out": str(out),
    }

    def run(env: dict[str, str]) -> tuple[list[int], str]:
        words = [sys.executable, "-m", "tests.support.spark.programs.follow", json.dumps(order)]
        done = run_to_end(words, ROOT, env)
        assert done.returncode == 0, done.stderr[-6000:]
        return sorted(int(folder.name.removeprefix("batch=")) for folder in out.glob("batch=*")), done.stderr

    # In older versions, a run that was stopped or reached a limit leaves changes unread, and logs that it
    # does.
    for minor, batches in (("4.0", [0]), ("4.1", [0, 1]), ("4.0", [0, 1, 2])):
        written, logged = run(environment_on(minor))
        assert written == batches
        assert "a limit ends this batch before the log does" in logged
    written, logged = run(environment())
    assert len(written) > 4, "newer versions run as many batches as the limit needs"
    assert "a limit ends this batch" not in logged
    for minor in ("4.2", "4.0"):
        after, _ = run(environment_on(minor))
        assert after == written, "an older version goes on at the end of the newer one"
    rows = pyarrow.dataset.dataset(out, partitioning="hive").to_table(columns=["_metadata", "_change_type"])
    changes = [
        (row["_metadata"]["offset"], row["_metadata"]["row"], row["_change_type"]) for row in rows.to_pylist()
    ]
    assert len(changes) == len(set(changes)) == changes_of_orders()


def changes_of_orders() -> int:
    """Return the number of changes of shop.orders in the sample."""
    words = ["penstock", "inspect", str(SAMPLE / "mysql-bin.000001"), "--rows", "--json"]
    done = subprocess.run([*words, "--tables", "shop.orders"], capture_output=True, text=True, check=True)
    return len(done.stdout.splitlines())


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.slow
def test_pipeline_on_older_spark_writes_every_row_once(environment_on: Environment, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"""
name: versions
source: {{name: shop, path: {SAMPLE / "mysql-bin.000001"}, tables: [shop.*]}}
load: {{mode: none}}
batch: {{parts: 3, bytes: 100KiB, range_bytes: 30KiB}}
sink: {{delta: {{path: {tmp_path / "lake"}}}}}
state: sqlite://{tmp_path / "state.db"}
spark: {{spark.driver.host: 127.0.0.1, spark.driver.bindAddress: 127.0.0.1}}
"""
    )
    words = ["penstock", "run", str(file), "--until", "caught-up", "--master", "local[2]"]
    done = run_to_end(words, ROOT, environment_on("4.0"))
    assert done.returncode == 0, done.stderr[-6000:]
    expected = json.loads(gzip.decompress((SAMPLE / "rows.json.gz").read_bytes()))["tables"]
    for name, rows in each(expected.items(), least=3):
        key = "order_id" if name == "shop.order_items" else "id"
        table = DeltaTable(tmp_path / "lake" / Path(*name.split("."))).to_pyarrow_table(columns=[key])
        assert sorted(map(str, table[key].to_pylist())) == sorted(row[key] for row in rows), name
