# SPDX-License-Identifier: Apache-2.0
"""Pipelines into ClickHouse, Redis, MongoDB and Elasticsearch; the results are read with each store's own
client.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.local.driver import LocalDriver
from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.oracle import assert_same, source_rows
from tests.support.pipeline.running import opened, pipeline_of, run_to_end
from tests.support.pipeline.workload import Workload
from tests.support.sinks.backends import SinkBackend, sink_backends
from tests.support.sinks.store_reading import READERS, as_source
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tools.servers import PartMissing, Server


@pytest.fixture(params=["clickhouse", "elasticsearch", "mongodb", "redis"])
def store(request: pytest.FixtureRequest, missing_part: MissingPart) -> Iterator[SinkBackend]:
    """Each store in turn."""
    backend = sink_backends()[request.param]()
    try:
        backend.start()
    except PartMissing as error:
        missing_part(request.param, str(error))
    yield backend
    backend.close()


@pytest.mark.deep(keep=("redis",))
def test_store_equals_its_source(
    mysql_server: Server,
    fresh_database: FreshDatabase,
    store: Any,
    tmp_path: Path,
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=23)
    workload.create()
    sink = {store.NAME: {"url": store.server.url}}
    settings = pipeline_of(mysql_server, database, sink, tmp_path, load={"chunk_rows": 60})
    workload.run(60)
    assert run_to_end(LocalDriver(2), settings)
    workload.run(200)
    mysql_server.sql(f"TRUNCATE TABLE {database}.tokens")
    mysql_server.sql(f"INSERT INTO {database}.tokens VALUES (REPEAT('x', 16), 1, NULL)")
    assert run_to_end(LocalDriver(2), settings)
    for table in workload.tables:
        wanted = source_rows(mysql_server, database, table)
        found = READERS[store.NAME](store.server, database, table)
        found = as_source(wanted, found, store.NAME in ("elasticsearch", "redis"))
        assert_same(wanted, found, key=workload.keys(table))


@pytest.mark.deep(guard="tests/unit/test_pipeline_state.py::test_value_of_any_size_is_stored_whole")
def test_rows_of_another_server_replace_those_before_a_reset(
    mysql_server: Server,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    missing_part: MissingPart,
    tmp_path: Path,
) -> None:
    """The target keeps the row of the highest version, and the other server's files have lower numbers."""
    backend = sink_backends()["clickhouse"]()
    try:
        backend.start()
    except PartMissing as error:
        missing_part("clickhouse", str(error))
    database = fresh_database(mysql_server)
    try:
        mariadb_server.sql(f"CREATE DATABASE {database}")
        for server, note in ((mysql_server, "before"), (mariadb_server, "after")):
            server.sql(
                f"CREATE TABLE t (id INT PRIMARY KEY, note VARCHAR(9)); INSERT INTO t VALUES (1, '{note}')",
                database=database,
            )
        while file_number(mysql_server) <= file_number(mariadb_server):
            mysql_server.sql("FLUSH BINARY LOGS")
        sink = {"clickhouse": {"url": backend.server.url}}

        def notes() -> list[tuple[int, str]]:
            rows = READERS["clickhouse"](backend.server, database, "t")
            return sorted((int(row["id"]), bytes(row["note"]).decode()) for row in rows)

        run_to_end(LocalDriver(2), pipeline_of(mysql_server, database, sink, tmp_path))
        mysql_server.sql("UPDATE t SET note = 'changed'", database=database)
        settings = pipeline_of(mysql_server, database, sink, tmp_path)
        run_to_end(LocalDriver(2), settings)
        assert notes() == [(1, "changed")]
        with opened(settings) as state:
            state.reset()
        settings = pipeline_of(mariadb_server, database, sink, tmp_path)
        run_to_end(LocalDriver(2), settings)
        assert notes() == [(1, "after")]
        mariadb_server.sql("UPDATE t SET note = 'later'; INSERT INTO t VALUES (2, 'new')", database=database)
        run_to_end(LocalDriver(2), settings)
        assert notes() == [(1, "later"), (2, "new")]
        assert verify(settings).equal
    finally:
        mariadb_server.sql(f"DROP DATABASE IF EXISTS {database}")
        backend.close()


def file_number(server: Server) -> int:
    """Return the number of the file that a server logs to."""
    return int(server.sql("SHOW BINARY LOGS")[-1][0].rpartition(".")[2])
