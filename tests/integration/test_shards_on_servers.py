# SPDX-License-Identifier: Apache-2.0
"""A pipeline with shards between two servers: loads, DDL, verification, and changes of the number of
shards.
"""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.app import make_app
from penstock.pipeline.settings import load_pipeline
from tests.support.pipeline.sharded import ShardsInProcess
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

TABLES = [f"t{number}" for number in range(6)]


def write_pipeline(file: Path, source: Server, target: Server, database: str, shards: int) -> None:
    route = {"tables": f"{database}.m_*", "to": f"{database}.merged", "shard_column": "origin"}
    values = {
        "source": {"url": source.url("root"), "name": "shop", "tables": f"{database}.*"},
        "steps": [{"route": route}],
        "sink": {"mysql": {"url": target.url("root")}},
        "batch": {"interval": 0},
        "shards": shards,
    }
    file.write_text(json.dumps(values), encoding="utf-8")


def verify(file: Path, *options: str) -> tuple[int, str]:
    """Return the exit code and the output."""
    done = CliRunner().invoke(make_app(), ["verify", str(file), *options])
    return done.exit_code, done.output


@pytest.mark.deep(
    guard="tests/unit/test_pipeline_shards.py::test_changed_number_of_shards_continues_at_one_position"
)
def test_sharded_pipeline_keeps_its_target_equal_through_every_number_of_shards(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mysql_server)
    for table in (*TABLES, "m_1", "m_2"):
        mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, v INT)", database=database)
        mysql_server.sql(f"INSERT INTO {table} VALUES (1, 1), (2, 2), (3, 3)", database=database)
    file = tmp_path / "shop.yaml"
    changes = [
        "RENAME TABLE t1 TO t9",
        "ALTER TABLE t2 ADD COLUMN w INT",
        "CREATE TABLE t8 (id INT PRIMARY KEY, v INT)",
    ]
    for number, shards in enumerate((1, 3, 2, 1)):
        write_pipeline(file, mysql_server, mariadb_server, database, shards)
        runs = ShardsInProcess(load_pipeline(file))
        runs.run()
        code, output = verify(file)
        assert code == 0, output
        if number < len(changes):
            mysql_server.sql(changes[number], database=database)
        for table in ("t0", "t3", "t4", "m_1", "m_2"):
            mysql_server.sql(
                f"UPDATE {table} SET v = v + 10 WHERE id = 1; DELETE FROM {table} WHERE id = {number + 2};"
                f" INSERT INTO {table} VALUES ({number + 10}, 7)",
                database=database,
            )
    write_pipeline(file, mysql_server, mariadb_server, database, 3)
    ShardsInProcess(load_pipeline(file)).run()
    mariadb_server.sql("DELETE FROM t0; UPDATE merged SET v = -1", database=database)
    assert verify(file)[0] == 1
    assert verify(file, f"{database}.t3")[0] == 0, "the table of one shard alone"
    assert "repaired" in verify(file, "--repair")[1]
    code, output = verify(file)
    assert code == 0, output
