# SPDX-License-Identifier: Apache-2.0
"""Read Spark's source `penstock` through a Spark Connect server in another process."""

import json
from pathlib import Path

import pytest

from tests.support.spark.cluster import connect_server, run_program
from tests.support.spark.session import head_of, session_settings
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.nonempty import each
from tools.servers import Server

EXPECTED = [[1, "insert"], [2, "insert"], [1, "update_preimage"], [1, "update_postimage"], [2, "delete"]]


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.slow
def test_connect_session_reads_batches_envelopes_and_streams(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    start, database = head_of(mysql_server), fresh_database(mysql_server)
    mysql_server.sql(
        f"""CREATE TABLE {database}.t (id INT PRIMARY KEY, n INT);
        INSERT INTO {database}.t VALUES (1,1),(2,2);
        UPDATE {database}.t SET n=3 WHERE id=1; DELETE FROM {database}.t WHERE id=2"""
    )
    settings = {name: value for name, value in session_settings().items() if ".driver." not in name}
    with connect_server(tmp_path, settings) as address:
        order = {
            "remote": address,
            "source": mysql_server.url(),
            "database": database,
            "start": start,
            "checkpoint": str(tmp_path / "checkpoint"),
            "out": str(tmp_path / "out"),
        }
        seen = json.loads(run_program("reads", json.dumps(order)))
    for way, rows in each(seen.items(), least=3):
        assert sorted(rows) == sorted(EXPECTED), way
        assert rows[:2] == EXPECTED[:2], way
        assert rows[-1] == EXPECTED[-1], way
