# SPDX-License-Identifier: Apache-2.0
"""The log of MariaDB's system-versioned tables, which mixes history rows with current rows."""

from pathlib import Path

import pytest

from penstock.errors import OptionInvalid
from penstock.local.driver import LocalDriver
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.settings import PipelineSettings
from tests.support.pipeline.oracle import assert_same, delta_rows, source_rows
from tests.support.pipeline.running import pipeline_of, run_to_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

_PERIOD = """s TIMESTAMP(6) GENERATED ALWAYS AS ROW START, e TIMESTAMP(6) GENERATED ALWAYS AS ROW END,
    PERIOD FOR SYSTEM_TIME (s, e)"""


def lake_of(server: Server, database: str, folder: Path, *excluded: str) -> PipelineSettings:
    """Return a mirror of a database in Delta, without the excluded tables."""
    patterns = [f"{database}.{name}" for name in excluded]
    source = {
        "url": server.url("root"),
        "name": "shop",
        "tables": f"{database}.*",
        "exclude": patterns,
    }
    return pipeline_of(server, database, {"delta": {"path": str(folder / "lake")}}, folder, source=source)


@pytest.mark.parametrize("columns", ["", ", " + _PERIOD])
def test_versioned_table_is_refused_by_name_and_may_be_excluded(
    columns: str, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql(
        f"CREATE TABLE plain (id INT PRIMARY KEY); INSERT INTO plain VALUES (1);"
        f"CREATE TABLE aged (id INT PRIMARY KEY, a INT{columns}) WITH SYSTEM VERSIONING",
        database=database,
    )
    (source,) = lake_of(mariadb_server, database, tmp_path).sources
    assert source.server is not None
    with pytest.raises(OptionInvalid, match=rf"{database}\.aged is system-versioned") as raised:
        targets_of(source.server, source.tables)
    assert f"Add {database}.aged to the source's exclude" in str(raised.value)
    run_to_end(LocalDriver(1), lake_of(mariadb_server, database, tmp_path, "aged"))
    rows = delta_rows(tmp_path / "lake" / database / "plain")
    assert_same(source_rows(mariadb_server, database, "plain"), rows, key=("id",))


def test_table_that_becomes_versioned_stops_the_pipeline_before_its_history_is_written(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql(
        "CREATE TABLE aged (id INT PRIMARY KEY, a INT); INSERT INTO aged VALUES (1, 1), (2, 2)",
        database=database,
    )
    settings = lake_of(mariadb_server, database, tmp_path)
    run_to_end(LocalDriver(1), settings)
    before = source_rows(mariadb_server, database, "aged")
    mariadb_server.sql(
        "ALTER TABLE aged ADD SYSTEM VERSIONING; UPDATE aged SET a = 5 WHERE id = 1;"
        " DELETE FROM aged WHERE id = 2",
        database=database,
    )
    with pytest.raises(OptionInvalid, match="is system-versioned"):
        run_to_end(LocalDriver(1), settings)
    assert_same(before, delta_rows(tmp_path / "lake" / database / "aged"), key=("id",))
