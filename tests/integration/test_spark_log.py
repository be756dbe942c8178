# SPDX-License-Identifier: Apache-2.0
"""Spark reads a kept log from a folder and from daemons, in batches and streams; any daemon may answer."""

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

from tests.support.daemon.process import DaemonProcess
from tests.support.spark.session import Collected, head_of, process_all, rows_of, run_to_head, spark  # noqa: F401
from tests.support.suite.fixture_types import LendServer, StartServer
from tools.servers import Server

ROWS = 40


@dataclass
class Captured:
    """A server whose log contains no column names, its daemon, and another daemon whose log starts later."""

    server: Server
    daemon: DaemonProcess
    later: DaemonProcess

    @property
    def url(self) -> str:
        """The first daemon."""
        return f"penstock://127.0.0.1:{self.daemon.port}/shop"

    def catch_up(self) -> None:
        """Wait until both daemons have captured the server's whole log."""
        for daemon in (self.daemon, self.later):
            catch_up(daemon, self.server)


def catch_up(daemon: DaemonProcess, server: Server) -> None:
    file, _, offset = head_of(server).rpartition(":")
    daemon.wait_for_head(file, int(offset))


def daemon_of(folder: Path, server: Server, start: str) -> DaemonProcess:
    folder.mkdir()
    instance = {"source": server.url(), "start": start}
    return DaemonProcess(folder, {"instances": {"shop": instance}})


@pytest.fixture(scope="module")
def captured(lend_server: LendServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captured]:
    folder = tmp_path_factory.mktemp("captured")
    with lend_server(binlog_row_metadata="MINIMAL") as server:
        server.sql("CREATE DATABASE shop; CREATE TABLE shop.orders (id INT PRIMARY KEY, note VARCHAR(90))")
        for number in range(1, ROWS + 1):
            server.sql(f"INSERT INTO shop.orders VALUES ({number}, 'early {number}')")
        server.sql("FLUSH BINARY LOGS")
        with (
            daemon_of(folder / "one", server, "earliest") as daemon,
            daemon_of(folder / "two", server, "latest") as later,
        ):
            later.wait_for(lambda status: bool(status["state"] == "running"))
            server.sql("ALTER TABLE shop.orders ADD COLUMN total INT FIRST")
            server.sql("INSERT INTO shop.orders VALUES (7, 100, 'middle')")
            server.sql("UPDATE shop.orders SET total = id WHERE id <= 3")
            opened = Captured(server, daemon, later)
            opened.catch_up()
            yield opened


def frame_of(session: SparkSession, source: str, **options: object) -> DataFrame:
    kind = {"source": source} if "://" in source else {"path": source}
    return session.read.format("penstock").options(**kind, tables="shop.orders", **options).load()


def stream_of(session: SparkSession, source: str, table: str, **options: object) -> DataFrame:
    all_options = {"source": source, "tables": table, **options}
    return session.readStream.format("penstock").options(**all_options).load()


def test_batch_reads_old_rows_with_the_definition_of_their_time(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
) -> None:
    rows = rows_of(frame_of(spark, captured.url), "total", "id", "note", "_change_type", "_metadata.absent")
    early = [(None, number, f"early {number}", "insert", ["total"]) for number in range(1, ROWS + 1)]
    assert rows[:ROWS] == early
    assert rows[ROWS] == (7, 100, "middle", "insert", None)
    assert [row[3] for row in rows[ROWS + 1 :]] == ["update_preimage", "update_postimage"] * 3
    # The log's folder gives the same rows. The daemon that has only the end of the log gives the last rows.
    folder = captured.daemon.folder / "log" / "shop"
    assert rows_of(frame_of(spark, str(folder)), "id", "note") == [(row[1], row[2]) for row in rows]
    later = f"penstock://127.0.0.1:{captured.later.port}/shop"
    assert rows_of(frame_of(spark, later), "id") == [(row[1],) for row in rows[ROWS:]]


def test_many_tasks_fetch_disjoint_ranges(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
) -> None:
    frame = frame_of(spark, captured.url, mode="envelope", minPartitions=8)
    assert frame.rdd.getNumPartitions() >= 2
    assert frame.select("_commit_version").distinct().count() == ROWS + 2


def test_batch_starts_at_its_position(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
) -> None:
    whole = rows_of(frame_of(spark, captured.url), "id", "_metadata.gtid")
    uuid, _, number = str(whole[9][1]).partition(":")
    frame = frame_of(spark, captured.url, startingOffsets=f"{uuid}:1-{number}")
    assert rows_of(frame, "id") == [(row[0],) for row in whole[10:]]
    frame = frame_of(spark, captured.url, endingOffsets=f"{uuid}:1-{number}")
    assert rows_of(frame, "id") == [(row[0],) for row in whole[:10]]


def test_stream_continues_at_another_daemon_of_the_same_server(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
    tmp_path: Path,
) -> None:
    server, table = captured.server, "shop.followed"
    server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY)")
    captured.catch_up()
    start = head_of(server)
    collected = Collected("id")
    checkpoint = tmp_path / "checkpoint"
    first_port, two = captured.daemon.port, captured.later.port

    def run(*ports: int, **options: object) -> None:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        frame = stream_of(spark, f"penstock://{hosts}/shop", table, startingOffsets=start, **options)
        run_to_head(frame, collected, checkpoint)

    for number, ports in enumerate([(first_port, two), (1, two), (first_port,)]):
        server.sql(
            f"INSERT INTO {table} VALUES ({10 * number}); INSERT INTO {table} VALUES ({10 * number + 1})"
        )
        captured.catch_up()
        run(*ports, **({"maxRowsPerTrigger": 1} if number == 1 else {}))
    assert [row[0] for row in collected.rows] == [0, 1, 10, 11, 20, 21]


def test_running_stream_follows_a_daemon(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
    tmp_path: Path,
) -> None:
    server = captured.server
    server.sql("CREATE TABLE shop.live (id INT PRIMARY KEY); INSERT INTO shop.live VALUES (1)")
    captured.catch_up()
    collected = Collected("id")
    frame = stream_of(spark, captured.url, "shop.live")
    query = frame.writeStream.foreachBatch(collected).option("checkpointLocation", str(tmp_path)).start()
    try:
        process_all(query)
        for number in (2, 3):
            server.sql(f"INSERT INTO shop.live VALUES ({number})")
            captured.catch_up()
            process_all(query)
    finally:
        query.stop()
    assert collected.rows == [(2,), (3,)], "without startingOffsets a stream of a daemon starts at its end"
    offsets = sorted((tmp_path / "offsets").iterdir(), key=lambda path: path.name)[-1].read_text()
    assert '"gtid_set"' in offsets
    assert '"server_key"' in offsets


@pytest.mark.deep(
    guard="tests/integration/test_spark_log.py::test_stream_continues_at_another_daemon_of_the_same_server"
)
def test_stream_continues_at_a_daemon_of_another_server_by_gtid(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = captured.server
    server.sql("CREATE TABLE shop.moved (id INT PRIMARY KEY); INSERT INTO shop.moved VALUES (1), (2)")
    captured.catch_up()
    replica = start_server(binlog_row_metadata="MINIMAL")
    replicate(server, replica)
    with daemon_of(tmp_path / "replica", replica, "earliest") as other:
        catch_up(other, replica)
        collected, versions = Collected("id"), Collected("_commit_version")
        frame = stream_of(spark, captured.url, "shop.moved", startingOffsets="earliest")

        def both(rows: DataFrame, batch: int) -> None:
            collected(rows, batch)
            versions(rows, batch)

        run_to_head(frame, both, tmp_path / "checkpoint")
        assert collected.rows == [(1,), (2,)]
        url = f"penstock://127.0.0.1:{other.port}/shop"
        for number in (3, 4):
            replica.sql(f"INSERT INTO shop.moved VALUES ({number})")
            catch_up(other, replica)
            run_to_head(stream_of(spark, url, "shop.moved"), both, tmp_path / "checkpoint")
        assert collected.rows == [(1,), (2,), (3,), (4,)]
        assert versions.rows == sorted(versions.rows)
        assert {row[0] >> 55 for row in versions.rows} == {0, 1}


def replicate(server: Server, replica: Server) -> None:
    """Copy every transaction of the first server to another under its GTIDs, like a replica."""
    files = [str(path) for path in server.binlog_files()]
    dump = subprocess.run([*server.program("mysqlbinlog"), *files], capture_output=True, check=True)
    replica.client(dump.stdout, "--binary-mode")


def test_stream_with_only_a_purged_log_is_refused_by_name(
    spark: SparkSession,  # noqa: F811
    captured: Captured,
    tmp_path: Path,
) -> None:
    later = f"penstock://127.0.0.1:{captured.later.port}/shop"
    start = str(frame_of(spark, captured.url).select("_metadata.file", "_metadata.offset").first()[0])
    frame = stream_of(spark, later, "shop.orders", startingOffsets=f"{start}:4")
    with pytest.raises(StreamingQueryException, match="PositionPurged"):
        run_to_head(frame, Collected("id"), tmp_path / "stops")
    collected = Collected("id")
    frame = stream_of(spark, later, "shop.orders", startingOffsets=f"{start}:4", failOnDataLoss=False)
    run_to_head(frame, collected, tmp_path / "goes on")
    assert collected.rows[0] == (100,)
