# SPDX-License-Identifier: Apache-2.0
"""After a stream's driver, executor, connection or server dies, the copy contains every change of the source
exactly once.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from tests.support.spark.cluster import ROOT, environment, standalone_cluster
from tests.support.spark.session import (  # noqa: F401
    Collected,
    head_of,
    process_all,
    run_to_head,
    session_settings,
    spark,
    stream_of,
)
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server
from tools.servers.proxy import Proxy

# A test starts up to four drivers in sequence.
pytestmark = pytest.mark.timeout(1800)

FOLLOW_SECONDS_MAX = 300


def write_history(server: Server, table: str, transactions: int) -> None:
    """Write transactions of several changes each: inserts, updates that overlap, deletes."""
    server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, n INT)")
    with server.connect() as connection, connection.cursor() as cursor:
        for number in range(transactions):
            cursor.execute("BEGIN")
            cursor.execute(f"INSERT INTO {table} VALUES ({3 * number}, 0), ({3 * number + 1}, 0)")
            cursor.execute(f"UPDATE {table} SET n = n + 1 WHERE id % 3 = 0")
            cursor.execute(f"DELETE FROM {table} WHERE id = {3 * number - 5}")
            cursor.execute("COMMIT")


def assert_equal(server: Server, table: str, changes: list[tuple[Any, ...]]) -> None:
    """Assert that the changes (version, row, kind, id, n) have no duplicates and add up to the source's
    rows.
    """
    assert len(set(changes)) == len(changes), "a change came twice"
    copy: dict[int, int] = {}
    for _, _, kind, key, value in sorted(changes, key=lambda change: (change[0], change[1])):
        if kind in ("delete", "update_preimage"):
            assert key in copy, f"{kind} of a row that never came: {key}"
        if kind == "delete":
            del copy[key]
        elif kind != "update_preimage":
            copy[key] = value
    assert copy == dict(server.sql(f"SELECT id, n FROM {table}"))


def changes_in(out: Path) -> list[tuple[Any, ...]]:
    """Return the changes that `follow` wrote into a folder, in the form that `assert_equal` takes."""
    folders = [str(path) for path in out.glob("batch=*") if any(path.glob("*.parquet"))]
    files = [str(file) for folder in folders for file in Path(folder).glob("*.parquet")]
    rows = pyarrow.dataset.dataset(files).to_table().to_pylist()
    return [
        (row["_commit_version"], row["_metadata"]["row"], row["_change_type"], row["id"], row["n"])
        for row in rows
    ]


def order_for(tmp_path: Path, url: str, table: str, start: str, **options: object) -> dict[str, Any]:
    """Return the arguments of `follow`; see tests/support/spark/programs/follow.py."""
    return {
        "master": "local[2,4]",
        "settings": session_settings(),
        "options": {"source": url, "tables": table, "startingOffsets": start, **options},
        "checkpoint": str(tmp_path / "checkpoint"),
        "out": str(tmp_path / "out"),
    }


@contextmanager
def following(order: dict[str, Any], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `follow` in a separate process, which ends with the block."""
    words = [sys.executable, "-m", "tests.support.spark.programs.follow", json.dumps(order)]
    with log.open("ab") as output:
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def follow_to_end(order: dict[str, Any], log: Path) -> int:
    """Run `follow` until it ends by itself; return its exit status."""
    with following(order, log) as process:
        return process.wait(FOLLOW_SECONDS_MAX)


def descendants(pid: int, words: str) -> list[int]:
    """Return the descendants of a process whose command line contains the words."""
    parents: dict[int, int] = {}
    matching = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                # The process ended while the list was read.
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
            if words in command:
                matching.append(int(entry.name))
    return [process for process in matching if _is_below(process, pid, parents)]


def kill(processes: list[int]) -> None:
    """Kill processes as a crash would. Some of them may end because others did."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _is_below(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    while process in parents:
        process = parents[process]
        if process == ancestor:
            return True
    return False


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.slow
def test_driver_killed_around_its_batches_loses_and_repeats_nothing(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    start, table = head_of(mysql_server), f"{fresh_database(mysql_server)}.t"
    write_history(mysql_server, table, 30)
    order = order_for(tmp_path, mysql_server.url(), table, start, maxRowsPerTrigger=100)
    log = tmp_path / "log"
    deaths = ({"die_before": 0}, {"die_after": 1}, {"die_before": 2})
    for death in deaths if os.environ.get("PENSTOCK_LONG") else deaths[:2]:
        assert follow_to_end(order | death, log) == -signal.SIGKILL, log.read_text()[-4000:]
    assert follow_to_end(order, log) == 0, log.read_text()[-4000:]
    assert len(list((tmp_path / "out").glob("batch=*"))) > 3
    assert_equal(mysql_server, table, changes_in(tmp_path / "out"))


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.timing
@pytest.mark.slow
def test_python_worker_killed_within_a_transaction_is_replaced(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    start, table = head_of(mysql_server), f"{fresh_database(mysql_server)}.t"
    write_history(mysql_server, table, 200)
    log = tmp_path / "log"
    with Proxy(mysql_server.port) as proxy:
        # The dump exceeds this many bytes, but no query does: only the dump goes silent, inside a
        # transaction.
        proxy.cut_after(20_000, "silence", in_packet=True)
        order = order_for(tmp_path, proxy.through(mysql_server.url()) + "?ssl_mode=disabled", table, start)
        with following(order, log) as process:
            proxy.wait_for(lambda counters: counters.cut_count == 1, FOLLOW_SECONDS_MAX)
            workers = descendants(process.pid, "pyspark.daemon")
            # The first process is the daemon of the workers, which Spark restarts as well.
            assert len(workers) > 1
            kill(workers)
            assert process.wait(FOLLOW_SECONDS_MAX) == 0, log.read_text()[-4000:]
    assert_equal(mysql_server, table, changes_in(tmp_path / "out"))


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.timing
@pytest.mark.slow
def test_executor_killed_within_a_transaction_is_replaced(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    start, table = head_of(mysql_server), f"{fresh_database(mysql_server)}.t"
    write_history(mysql_server, table, 200)
    log = tmp_path / "log"
    with (
        Proxy(mysql_server.port) as proxy,
        standalone_cluster(tmp_path, 2, sys.executable) as master,
    ):
        proxy.cut_after(20_000, "silence", in_packet=True)
        order = order_for(tmp_path, proxy.through(mysql_server.url()) + "?ssl_mode=disabled", table, start)
        order["master"] = master
        order["settings"] |= {"spark.executor.memory": "600m", "spark.executorEnv.PYTHONPATH": str(ROOT)}
        with following(order, log) as process:
            proxy.wait_for(lambda counters: counters.cut_count == 1, FOLLOW_SECONDS_MAX)
            executors = descendants(os.getpid(), "CoarseGrainedExecutorBackend")
            assert executors
            kill(executors)
            assert process.wait(FOLLOW_SECONDS_MAX) == 0, log.read_text()[-4000:]
    assert_equal(mysql_server, table, changes_in(tmp_path / "out"))


CHANGE = ("_commit_version", "_metadata.row", "_change_type", "id", "n")


@pytest.mark.deep(
    guard="tests/integration/test_read_binlog.py::test_connection_lost_anywhere_loses_and_duplicates_no_row"
)
@pytest.mark.parametrize("how", ["reset", "close"])
def test_connection_cut_within_a_transaction_resumes(
    spark: SparkSession,  # noqa: F811
    server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    how: Any,
) -> None:
    start, table = head_of(server), f"{fresh_database(server)}.t"
    write_history(server, table, 200)
    collected = Collected(*CHANGE)
    with Proxy(server.port) as proxy:
        url = proxy.through(server.url()) + "?ssl_mode=disabled"
        frame = stream_of(spark, server, table, source=url, startingOffsets=start)
        for bytes_down in (15_000, 40_000):
            proxy.cut_after(bytes_down, how, in_packet=True)
        run_to_head(frame, collected, tmp_path)
        assert proxy.cut_count == 2
    assert_equal(server, table, collected.rows)


@pytest.mark.deep(
    guard="tests/integration/test_spark_stream.py::test_tracked_schemas_decode_a_log_without_names_over_an_alter_and_a_restart"
)
@pytest.mark.timing
def test_server_restarted_under_a_running_stream_is_waited_for(
    spark: SparkSession,  # noqa: F811
    start_server: StartServer,
    tmp_path: Path,
) -> None:
    server = start_server("mysql")
    server.sql("CREATE DATABASE d")
    write_history(server, "d.t", 20)
    collected = Collected(*CHANGE)
    frame = stream_of(spark, server, "d.t", startingOffsets="earliest", maxRowsPerTrigger=50)
    query = frame.writeStream.foreachBatch(collected).option("checkpointLocation", str(tmp_path)).start()
    try:
        for restart in range(3):
            server.sql(f"INSERT INTO d.t VALUES ({10_000 + restart}, 7)")
            server.kill() if restart == 1 else server.stop()
            server.start()
            server.sql(f"INSERT INTO d.t VALUES ({20_000 + restart}, 7)")
            process_all(query)
    finally:
        query.stop()
    assert_equal(server, "d.t", collected.rows)
