# SPDX-License-Identifier: Apache-2.0
"""Pipelines on Spark into ClickHouse, Redis, MongoDB and Elasticsearch, whose own clients read them back."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import bson
import clickhouse_connect
import elasticsearch
import pymongo
import pytest
import redis
from clickhouse_connect.datatypes.format import clear_all_formats, set_read_format
from pyspark.sql import SparkSession

from penstock.pipeline.verify.verify import verify
from tests.support.pipeline.oracle import (
    Row,
    Source,
    assert_same,
    clickhouse_rows,
    elasticsearch_rows,
    mongodb_rows,
    redis_rows,
    source_rows,
)
from tests.support.pipeline.running import opened, pipeline_of, run_to_end
from tests.support.pipeline.workload import Workload
from tests.support.sinks.backends import SinkBackend, sink_backends
from tests.support.spark.session import spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import PartMissing, Server

Rows = Callable[[Any, str, str], list[Row]]


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


def _clickhouse(server: Any, database: str, table: str) -> list[Row]:
    client = clickhouse_connect.get_client(host="127.0.0.1", port=server.port)
    try:
        # Not every string of bytes is text.
        set_read_format("String", "bytes")
        return [
            row for row in clickhouse_rows(client, f"`{database}`.`{table}`") if not row.pop("_is_deleted")
        ]
    finally:
        clear_all_formats()
        client.close()


def _mongodb(server: Any, database: str, table: str) -> list[Row]:
    with pymongo.MongoClient[Any](server.url) as client:
        rows = mongodb_rows(client[database][table])
    return [
        {
            name: value.to_decimal() if isinstance(value, bson.Decimal128) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _elasticsearch(server: Any, database: str, table: str) -> list[Row]:
    with elasticsearch.Elasticsearch(server.url, request_timeout=WAIT_SECONDS_MAX) as client:
        return elasticsearch_rows(client, f"{database}.{table}")


def _redis(server: Any, database: str, table: str) -> list[Row]:
    with redis.Redis.from_url(server.url, socket_timeout=WAIT_SECONDS_MAX) as client:
        return redis_rows(client, f"{database}:{table}:*", kind="json")


READERS: dict[str, Rows] = {
    "clickhouse": _clickhouse,
    "elasticsearch": _elasticsearch,
    "mongodb": _mongodb,
    "redis": _redis,
}


def as_source(source: Source, rows: list[Row], json: bool) -> list[Row]:
    """Return the columns that the source has; bytes stand in JSON as base64."""
    binary = [name for name, kind in source.types.items() if "binary" in kind or "blob" in kind]
    found = [{name: row.get(name) for name in source.types} for row in rows]
    for row in found if json else ():
        row |= {name: base64.b64decode(row[name]) for name in binary if row[name] is not None}
    return found


@pytest.mark.deep(keep=("redis",))
def test_a_store_has_what_its_source_has(
    spark: SparkSession,  # noqa: F811
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
    assert run_to_end(spark, settings)
    workload.run(200)
    mysql_server.sql(f"TRUNCATE TABLE {database}.tokens")
    mysql_server.sql(f"INSERT INTO {database}.tokens VALUES (REPEAT('x', 16), 1, NULL)")
    assert run_to_end(spark, settings)
    for table in workload.tables:
        wanted = source_rows(mysql_server, database, table)
        found = READERS[store.NAME](store.server, database, table)
        found = as_source(wanted, found, store.NAME in ("elasticsearch", "redis"))
        assert_same(wanted, found, key=workload.keys(table))


@pytest.mark.deep(guard="tests/unit/test_pipeline_state.py::test_a_value_of_any_size_is_kept_whole")
def test_rows_of_another_server_replace_those_of_before_a_reset(
    spark: SparkSession,  # noqa: F811
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
            rows = _clickhouse(backend.server, database, "t")
            return sorted((int(row["id"]), bytes(row["note"]).decode()) for row in rows)

        run_to_end(spark, pipeline_of(mysql_server, database, sink, tmp_path))
        mysql_server.sql("UPDATE t SET note = 'changed'", database=database)
        settings = pipeline_of(mysql_server, database, sink, tmp_path)
        run_to_end(spark, settings)
        assert notes() == [(1, "changed")]
        with opened(settings) as state:
            state.reset()
        settings = pipeline_of(mariadb_server, database, sink, tmp_path)
        run_to_end(spark, settings)
        assert notes() == [(1, "after")]
        mariadb_server.sql("UPDATE t SET note = 'later'; INSERT INTO t VALUES (2, 'new')", database=database)
        run_to_end(spark, settings)
        assert notes() == [(1, "later"), (2, "new")]
        assert verify(settings).equal
    finally:
        mariadb_server.sql(f"DROP DATABASE IF EXISTS {database}")
        backend.close()


def file_number(server: Server) -> int:
    """Return the number of the file that a server logs to."""
    return int(server.sql("SHOW BINARY LOGS")[-1][0].rpartition(".")[2])
