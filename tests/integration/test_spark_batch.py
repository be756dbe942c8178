# SPDX-License-Identifier: Apache-2.0
"""Batch reads through Spark, of files and of a live server."""

import gzip
from decimal import Decimal
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support.spark.session import head_of, rows_of, spark  # noqa: F401
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server


def write_orders(server: Server, database: str) -> str:
    """Write five images of two orders, and return the name of the table."""
    server.sql(
        f"""CREATE TABLE {database}.orders
            (id INT UNSIGNED PRIMARY KEY, status VARCHAR(20), total DECIMAL(10,2));
        INSERT INTO {database}.orders VALUES (1,'new',1.25),(2,'new',2);
        UPDATE {database}.orders SET status='paid' WHERE id=1;
        DELETE FROM {database}.orders WHERE id=2"""
    )
    return f"{database}.orders"


EXPECTED = [
    (1, "new", Decimal("1.25"), "insert"),
    (2, "new", Decimal("2.00"), "insert"),
    (1, "new", Decimal("1.25"), "update_preimage"),
    (1, "paid", Decimal("1.25"), "update_postimage"),
    (2, "new", Decimal("2.00"), "delete"),
]


def read_files(spark: SparkSession, server: Server, table: str, start: str, **options: object) -> DataFrame:  # noqa: F811
    """Read one table from the server's own files, flushed to be complete."""
    server.sql("FLUSH BINARY LOGS")
    reader = spark.read.format("penstock").options(tables=table, startingOffsets=start, **options)
    return reader.load(f"{server.data_directory}/mysql-bin.0*")


@pytest.mark.deep_flavors("mariadb")
def test_files_and_their_server_return_the_same_typed_rows(
    spark: SparkSession,  # noqa: F811
    server: Server,
    fresh_database: FreshDatabase,
) -> None:
    start, table = head_of(server), write_orders(server, fresh_database(server))
    files = read_files(spark, server, table, start)
    live = (
        spark.read.format("penstock").options(source=server.url(), tables=table, startingOffsets=start).load()
    )
    columns = ("id", "status", "total", "_change_type")
    assert rows_of(files, *columns) == EXPECTED
    assert files.schema == live.schema
    assert rows_of(files, *columns, "_commit_version") == rows_of(live, *columns, "_commit_version")


def test_read_starts_and_ends_at_a_position_a_gtid_set_or_a_time(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
) -> None:
    server = mysql_server
    start, table = head_of(server), write_orders(server, fresh_database(server))
    middle, gtids = head_of(server), server.sql("SELECT @@global.gtid_executed")[0][0].replace("\n", "")
    time = server.sql("DO SLEEP(0.01); SELECT DATE_FORMAT(UTC_TIMESTAMP(6), '%Y-%m-%dT%H:%i:%s.%f')")[0][0]
    server.sql(f"DO SLEEP(0.01); INSERT INTO {table} VALUES (3,'late',3)")
    for starts in ({"startingOffsets": middle}, {"startingOffsets": gtids}, {"startingTimestamp": time}):
        reader = spark.read.format("penstock").options(source=server.url(), tables=table, **starts)
        assert rows_of(reader.load(), "id") == [(3,)], starts
    for ends in ({"endingOffsets": middle}, {"endingOffsets": gtids}, {"endingTimestamp": time}):
        reader = spark.read.format("penstock").options(
            source=server.url(), tables=table, startingOffsets=start, **ends
        )
        assert rows_of(reader.load(), "id", "_change_type")[-1] == (2, "delete"), ends


def test_folder_of_compressed_files_reads_the_same(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    mysql_server.sql("FLUSH BINARY LOGS")
    table = write_orders(mysql_server, fresh_database(mysql_server))
    mysql_server.sql("FLUSH BINARY LOGS")
    full = mysql_server.binlog_files()[-2]
    (tmp_path / f"{full.name}.gz").write_bytes(gzip.compress(full.read_bytes()))
    frame = spark.read.format("penstock").option("tables", table).load(str(tmp_path))
    assert rows_of(frame, "id", "status", "total", "_change_type") == EXPECTED


def test_one_file_is_cut_into_partitions_that_hold_each_change_once(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
) -> None:
    server, database = mysql_server, fresh_database(mysql_server)
    server.sql("FLUSH BINARY LOGS")
    start = head_of(server)
    server.sql(f"CREATE TABLE {database}.wide (id INT PRIMARY KEY AUTO_INCREMENT, body MEDIUMBLOB)")
    with server.connect(database=database) as connection, connection.cursor() as cursor:
        for _ in range(60):
            cursor.execute("INSERT INTO wide (body) VALUES (REPEAT('x', 300000)),(REPEAT('y', 300000))")
    frame = read_files(spark, server, f"{database}.wide", start, minPartitions=4, rangeBytes="8m")
    assert frame.rdd.getNumPartitions() > 2
    assert sorted(rows_of(frame, "id")) == [(number,) for number in range(1, 121)]


def test_columns_are_pruned_before_they_are_decoded(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
) -> None:
    start, table = head_of(mysql_server), write_orders(mysql_server, fresh_database(mysql_server))
    frame = read_files(spark, mysql_server, table, start, columns="total, id,_change_type")
    assert frame.columns == ["id", "total", "_change_type"]
    assert sorted(map(tuple, frame.collect()))[0] == (1, Decimal("1.25"), "insert")


def test_column_missing_from_the_table_is_refused_by_name(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
) -> None:
    start, table = head_of(mysql_server), write_orders(mysql_server, fresh_database(mysql_server))
    with pytest.raises(PySparkException, match="has no column 'totl'"):
        read_files(spark, mysql_server, table, start, columns="totl")


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        ("_change_type = 'insert'", 2),
        ("_change_type IN ('delete', 'insert')", 3),
        ("_commit_version > 0 AND _change_type = 'delete'", 1),
        ("_commit_version < 5", 0),
        ("_commit_timestamp > timestamp'2020-01-01'", 5),
        ("_commit_timestamp < timestamp'2020-01-01'", 0),
        ("_metadata.table = 'orders' AND id = 2", 2),
        ("_metadata.table = 'nothing'", 0),
        ("total >= 1.25 AND status IS NOT NULL AND NOT id IN (2, 3)", 3),
        ("_change_type LIKE 'update%' OR id = 2", 4),
    ],
)
def test_pushed_down_filters_return_the_same_rows(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    condition: str,
    count: int,
) -> None:
    start, table = head_of(mysql_server), write_orders(mysql_server, fresh_database(mysql_server))
    frame = read_files(spark, mysql_server, table, start)
    assert frame.where(condition).count() == count


def test_filter_on_the_change_type_is_pushed_down_completely(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
) -> None:
    start, table = head_of(mysql_server), write_orders(mysql_server, fresh_database(mysql_server))
    frame = read_files(spark, mysql_server, table, start).where("_change_type = 'insert'")
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "Filter" not in plan.replace("RuntimeFilters", "").replace("PushedFilters", "")


def test_table_altered_in_the_files_has_its_newest_columns(
    spark: SparkSession,  # noqa: F811
    server: Server,
    fresh_database: FreshDatabase,
) -> None:
    start, table = head_of(server), write_orders(server, fresh_database(server))
    server.sql(f"ALTER TABLE {table} ADD COLUMN note TEXT; INSERT INTO {table} VALUES (9,'n',1,'hello')")
    frame = read_files(spark, server, table, start)
    assert frame.columns[:4] == ["id", "status", "total", "note"]
    rows = rows_of(frame, "id", "note", "_metadata.absent")
    assert rows[0] == (1, None, ["note"])
    assert rows[-1] == (9, "hello", None)


def test_schema_file_provides_definitions_missing_from_the_log(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    server = start_server(binlog_row_metadata="MINIMAL")
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, name VARCHAR(10))")
    schemas = tmp_path / "tables.sql"
    schemas.write_text(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, name VARCHAR(10)) CHARSET utf8mb4;")
    start = head_of(server)
    with server.connect(database=database) as connection, connection.cursor() as cursor:
        cursor.execute("INSERT INTO t VALUES (1, 'ä')")
        cursor.execute("ALTER TABLE t ADD COLUMN more BIGINT UNSIGNED")
        cursor.execute("INSERT INTO t VALUES (2, 'b', 18446744073709551615)")
    frame = read_files(spark, server, f"{database}.t", start, schemas=str(schemas))
    assert rows_of(frame) == [(1, "ä", None), (2, "b", Decimal("18446744073709551615"))]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tabels": "a.b"}, "Did you mean tables"),
        ({"tables": "a.b", "startingOffset": "earliest"}, "Did you mean startingOffsets"),
        ({"tables": "a.*", "mode": "typed"}, "exactly one table"),
        ({"mode": "rows"}, "mode 'rows' is unknown"),
        ({"tables": "a.b", "minPartitions": "few"}, "minPartitions 'few'"),
        ({"tables": "a.b", "startingOffsets": "yesterday"}, "'yesterday' is no position"),
        ({"tables": "a.b", "failOnDataLoss": "maybe"}, "neither true nor false"),
        ({"source": "mysql://h", "tables": "a.b"}, "source and a path are both given"),
    ],
)
def test_invalid_option_is_refused_by_name(
    spark: SparkSession,  # noqa: F811
    options: dict[str, str],
    message: str,
    tmp_path: Path,
) -> None:
    with pytest.raises(PySparkException, match=message):
        spark.read.format("penstock").options(**options).load(str(tmp_path))


def test_plans_and_errors_show_no_password(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    capfd: pytest.CaptureFixture[str],
) -> None:
    table = write_orders(mysql_server, fresh_database(mysql_server))
    secret = "replica-secret-not-to-be-seen"
    mysql_server.sql(f"CREATE USER watcher@'127.0.0.1' IDENTIFIED BY '{secret}'")
    try:
        mysql_server.sql("GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO watcher@'127.0.0.1'")
        url = f"mysql://watcher:{secret}@127.0.0.1:{mysql_server.port}"
        frame = spark.read.format("penstock").options(source=url, tables=table).load()
        frame.explain("formatted")
        frame.count()
        assert secret not in frame._jdf.queryExecution().toString()
        with pytest.raises(PySparkException) as caught:
            spark.read.format("penstock").options(source=url, tables=table, passwrd=secret).load()
        assert secret not in str(caught.value)
        wrong = url.replace("watcher", "nobody")
        with pytest.raises(PySparkException, match="AuthenticationFailed") as caught:
            spark.read.format("penstock").options(source=wrong, tables=table).load()
        assert secret not in str(caught.value)
    finally:
        mysql_server.sql("DROP USER watcher@'127.0.0.1'")
    printed = capfd.readouterr()
    assert secret not in printed.out + printed.err


def test_damaged_file_is_refused_by_name_and_position(
    spark: SparkSession,  # noqa: F811
    mysql_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
) -> None:
    mysql_server.sql("FLUSH BINARY LOGS")
    table = write_orders(mysql_server, fresh_database(mysql_server))
    mysql_server.sql("FLUSH BINARY LOGS")
    full = mysql_server.binlog_files()[-2]
    damaged = bytearray(full.read_bytes())
    damaged[damaged.rindex(b"paid") + 1] ^= 0x10
    (tmp_path / full.name).write_bytes(damaged)
    frame = spark.read.format("penstock").option("tables", table).load(str(tmp_path))
    with pytest.raises(PySparkException, match=rf"ChecksumMismatch.*\(at {full.name}:\d+\)"):
        frame.count()
