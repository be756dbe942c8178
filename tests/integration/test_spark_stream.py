# SPDX-License-Identifier: Apache-2.0
"""Streams through Spark, straight from a live server and from a folder of files."""

import os
import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from penstock.model import TableName
from penstock.source.source import SourceOptions
from penstock.spark import decode_table
from penstock.spark.schema import newest_on_server
from tests.support.spark.patience import WORKERS
from tests.support.spark.session import Collected, head_of, process_all, run_to_head, spark, stream_of  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import wait_until
from tools.servers import Server


def test_stream_worker_timeout_comes_from_the_test_configuration(
    spark: SparkSession,  # noqa: F811
) -> None:
    resource = spark._jvm.java.lang.ClassLoader.getSystemResource(WORKERS).toString()
    assert resource == f"file:{os.environ['SPARK_CONF_DIR']}/{WORKERS}"


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
def test_stream_continues_exactly_where_its_checkpoint_ends(
    spark: SparkSession,  # noqa: F811
    server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    start, table = head_of(server), f"{fresh_database(server)}.t"
    server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY)")
    collected = Collected("id", "_change_type")
    for first in (1, 3, 5):
        server.sql(f"INSERT INTO {table} VALUES ({first}); INSERT INTO {table} VALUES ({first + 1})")
        run_to_head(stream_of(spark, server, table, startingOffsets=start), collected, tmp_path)
        server.sql("FLUSH BINARY LOGS")
    assert collected.rows == [(number, "insert") for number in range(1, 7)]


def test_running_stream_sees_commits_after_its_start(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    table = f"{fresh_database(mysql_server)}.t"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY); INSERT INTO {table} VALUES (1)")
    collected = Collected("id")
    frame = stream_of(spark, mysql_server, table)
    query = frame.writeStream.foreachBatch(collected).option("checkpointLocation", str(tmp_path)).start()
    try:
        process_all(query)
        for number in (2, 3):
            mysql_server.sql(f"INSERT INTO {table} VALUES ({number})")
            process_all(query)
    finally:
        query.stop()
    assert collected.rows == [(2,), (3,)], "without startingOffsets a stream of a server starts at its end"


@pytest.mark.parametrize(
    ("limit", "transactions_max"), [({"maxRowsPerTrigger": 10}, 5), ({"maxBytesPerTrigger": "1k"}, 4)]
)
def test_trigger_reads_whole_transactions_within_its_limit(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    limit: dict[str, object],
    transactions_max: int,
) -> None:
    start, database = head_of(mysql_server), fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY AUTO_INCREMENT, n INT)")
    for number in range(12):
        mysql_server.sql(f"INSERT INTO {database}.t (n) VALUES ({number}), ({number})")
    collected = Collected("_commit_version")
    frame = stream_of(spark, mysql_server, f"{database}.t", startingOffsets=start, **limit)
    run_to_head(frame, collected, tmp_path)
    batches = [batch for batch in collected.batches.values() if batch]
    assert len(batches) > 2
    assert len(collected.rows) == 24
    for batch in batches:
        assert len(set(batch)) <= transactions_max
        assert all(batch.count(version) == 2 for version in batch), "a transaction is cut between batches"


def test_transaction_over_the_limit_is_read_alone_and_whole(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    start, database = head_of(mysql_server), fresh_database(mysql_server)
    values = ",".join(f"({number})" for number in range(50))
    mysql_server.sql(
        f"CREATE TABLE {database}.t (id INT PRIMARY KEY); INSERT INTO {database}.t VALUES {values}"
    )
    collected = Collected("id")
    frame = stream_of(spark, mysql_server, f"{database}.t", startingOffsets=start, maxRowsPerTrigger=5)
    run_to_head(frame, collected, tmp_path)
    assert [len(batch) for batch in collected.batches.values() if batch] == [50]


def test_added_column_stops_the_stream_and_a_restart_accepts_it(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    start, table = head_of(mysql_server), f"{fresh_database(mysql_server)}.t"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY); INSERT INTO {table} VALUES (1)")
    frame = stream_of(spark, mysql_server, table, startingOffsets=start)
    run_to_head(frame, Collected("id"), tmp_path)
    mysql_server.sql(f"INSERT INTO {table} VALUES (2); ALTER TABLE {table} ADD COLUMN note VARCHAR(9)")
    mysql_server.sql(f"INSERT INTO {table} VALUES (3, 'new')")
    with pytest.raises(StreamingQueryException, match=r"SchemaChanged.*start the query again"):
        run_to_head(frame, Collected("id"), tmp_path)
    collected = Collected("id", "note", "_metadata.absent")
    run_to_head(stream_of(spark, mysql_server, table, startingOffsets=start), collected, tmp_path)
    assert collected.rows == [(2, None, ["note"]), (3, "new", None)]


def purged_to_the_last(server: Server) -> bool:
    """Make a server purge all its log files except the last; return whether it did."""
    server.sql(f"PURGE BINARY LOGS TO '{server.binlog_files()[-1].name}'")
    return len(server.binlog_files()) == 1


def test_purged_position_stops_the_stream_unless_loss_is_allowed(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY); INSERT INTO d.t VALUES (1)")
    options = {"startingOffsets": "earliest"}
    run_to_head(stream_of(spark, server, "d.t", **options), Collected("id"), tmp_path)
    server.sql("INSERT INTO d.t VALUES (2); FLUSH BINARY LOGS; INSERT INTO d.t VALUES (3)")
    # The server keeps a file that it is sending until it detects that the reader is gone.
    wait_until(lambda: purged_to_the_last(server))
    with pytest.raises(StreamingQueryException, match="PositionPurged"):
        run_to_head(stream_of(spark, server, "d.t", **options), Collected("id"), tmp_path)
    collected = Collected("id")
    run_to_head(stream_of(spark, server, "d.t", failOnDataLoss=False, **options), collected, tmp_path)
    assert collected.rows == [(3,)]


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_purged_position_stops_the_stream_unless_loss_is_allowed"
)
def test_restarted_log_stops_the_stream_or_starts_an_epoch(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY); INSERT INTO d.t VALUES (1)")
    options = {"startingOffsets": "earliest"}
    run_to_head(stream_of(spark, server, "d.t", **options), Collected("id"), tmp_path)
    server.sql("RESET BINARY LOGS AND GTIDS; INSERT INTO d.t VALUES (2)")
    with pytest.raises(StreamingQueryException, match="PositionInvalid"):
        run_to_head(stream_of(spark, server, "d.t", **options), Collected("id"), tmp_path)
    collected = Collected("id", "_commit_version")
    for number in (3, 4):
        run_to_head(stream_of(spark, server, "d.t", failOnDataLoss=False, **options), collected, tmp_path)
        server.sql(f"INSERT INTO d.t VALUES ({number})")
    assert [(key, version >> 55) for key, version in collected.rows] == [(2, 1), (3, 1)]


def replaced_by_a_copy(server: Server, directory: Path) -> Server:
    """Stop a server and start a copy of it with another identity on the same port."""
    server.stop()
    shutil.copytree(server.data_directory, directory / "data")
    (directory / "data" / "auto.cnf").unlink(missing_ok=True)
    return Server(server.flavor, server.options, port=server.port, directory=directory).start()


@pytest.mark.deep(
    guard="tests/integration/test_spark_log.py::test_stream_continues_at_another_daemon_of_the_same_server"
)
def test_another_server_is_followed_by_gtid_in_a_new_epoch(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY); INSERT INTO d.t VALUES (1)")
    collected = Collected("id", "_commit_version")
    checkpoint = tmp_path / "checkpoint"
    run_to_head(stream_of(spark, server, "d.t", startingOffsets="earliest"), collected, checkpoint)
    server.sql("INSERT INTO d.t VALUES (2)")
    (tmp_path / "copy").mkdir()
    other = replaced_by_a_copy(server, tmp_path / "copy")
    try:
        other.sql("INSERT INTO d.t VALUES (3)")
        run_to_head(stream_of(spark, other, "d.t", startingOffsets="earliest"), collected, checkpoint)
        other.sql("INSERT INTO d.t VALUES (4)")
        run_to_head(stream_of(spark, other, "d.t", startingOffsets="earliest"), collected, checkpoint)
    finally:
        other.close()
    assert [number for number, _ in collected.rows] == [1, 2, 3, 4]
    assert [version >> 55 for _, version in collected.rows] == [0, 1, 1, 1]


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_purged_position_stops_the_stream_unless_loss_is_allowed"
)
def test_another_server_without_gtids_stops_the_stream_by_name(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql", gtid_mode="OFF", enforce_gtid_consistency="OFF")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY); INSERT INTO d.t VALUES (1)")
    checkpoint = tmp_path / "checkpoint"
    run_to_head(stream_of(spark, server, "d.t", startingOffsets="earliest"), Collected("id"), checkpoint)
    (tmp_path / "copy").mkdir()
    other = replaced_by_a_copy(server, tmp_path / "copy")
    try:
        with pytest.raises(StreamingQueryException, match="ServerChanged"):
            run_to_head(
                stream_of(spark, other, "d.t", startingOffsets="earliest"), Collected("id"), checkpoint
            )
    finally:
        other.close()


@pytest.mark.deep(keep=("mysql",))
def test_envelope_stream_holds_all_tables_and_is_decoded_on_executors(
    spark: SparkSession,  # noqa: F811
    server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    start, database = head_of(server), fresh_database(server)
    server.sql(
        f"""CREATE TABLE {database}.a (id INT PRIMARY KEY, name VARCHAR(9));
        CREATE TABLE {database}.b (x BIGINT);
        INSERT INTO {database}.a VALUES (1,'one'); INSERT INTO {database}.b VALUES (7);
        UPDATE {database}.a SET name=NULL; ALTER TABLE {database}.a ADD COLUMN more INT;
        INSERT INTO {database}.a VALUES (2,'two',2); DELETE FROM {database}.b"""
    )
    reader = spark.readStream.format("penstock").options(source=server.url(), startingOffsets=start)
    frame = reader.option("tables", f"{database}.*").load()
    seen = Collected("_metadata.table", "_change_type")
    run_to_head(frame, seen, tmp_path / "all")
    assert seen.rows == [
        ("a", "insert"),
        ("b", "insert"),
        ("a", "update"),
        ("a", "insert"),
        ("b", "delete"),
    ]
    address = SourceOptions.parse(server.url()).address
    assert address is not None
    shape = newest_on_server(address, TableName(database, "a"))
    typed = Collected("id", "name", "more", "_change_type", "_metadata.absent")
    run_to_head(decode_table(frame, f"{database}.a", shape), typed, tmp_path / "a")
    assert typed.rows == [
        (1, "one", None, "insert", ["more"]),
        (1, "one", None, "update_preimage", ["more"]),
        (1, None, None, "update_postimage", ["more"]),
        (2, "two", 2, "insert", None),
    ]


def test_stream_over_a_folder_reads_new_files(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    mysql_server.sql("FLUSH BINARY LOGS")
    table = f"{fresh_database(mysql_server)}.t"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY)")
    folder = tmp_path / "logs"
    folder.mkdir()
    collected = Collected("id")
    for number in (1, 2):
        mysql_server.sql(f"INSERT INTO {table} VALUES ({number}); FLUSH BINARY LOGS")
        shutil.copy(mysql_server.binlog_files()[-2], folder)
        frame = spark.readStream.format("penstock").option("tables", table).load(str(folder))
        run_to_head(frame, collected, tmp_path / "checkpoint")
    assert collected.rows == [(1,), (2,)]


def test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql", binlog_row_metadata="MINIMAL")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY, a VARCHAR(9), b VARCHAR(9))")
    options = {"startingOffsets": head_of(server), "schemaTrackingLocation": str(tmp_path / "schemas")}
    server.sql("INSERT INTO d.t VALUES (1,'a','b')")
    run_to_head(stream_of(spark, server, "d.t", **options), Collected("id"), tmp_path / "checkpoint")
    server.sql("INSERT INTO d.t VALUES (2,'a','b')")
    # The new definition also fits the old rows' table map, so only the history distinguishes the two
    # definitions.
    server.sql("ALTER TABLE d.t MODIFY COLUMN b VARCHAR(9) AFTER id; INSERT INTO d.t VALUES (3,'b','a')")
    collected = Collected("id", "a", "b")
    run_to_head(stream_of(spark, server, "d.t", **options), collected, tmp_path / "checkpoint")
    assert collected.rows == [(2, "a", "b"), (3, "a", "b")]
