# SPDX-License-Identifier: Apache-2.0
"""A chunk is read completely and only once despite lost connections, at the configured rate, in little
memory.
"""

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from penstock.changes import Target
from penstock.errors import ConnectionLost, OptionInvalid, PrivilegeMissing, ServerChanged, ServerUnsupported
from penstock.model import ServerAddress, TablePatterns
from penstock.pipeline.load import reader
from penstock.pipeline.load.chunks import Chunk, plan_chunks
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import take_watermark
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Proxy, Server

ROWS = 3_000
BATCH_ROWS = 100
KEYS = {
    "number": ("id BIGINT", "id", "n"),
    "text": ("id VARCHAR(20)", "id", "CONCAT('Käse_', n)"),
    "two": ("a TINYINT, b VARBINARY(8)", "a, b", "n MOD 3, CHAR(n MOD 256, n DIV 256)"),
    "moment": ("id DATETIME(3)", "id", "'2020-01-01' + INTERVAL n SECOND"),
    "real": ("id FLOAT", "id", "n / 3"),
    "bits": ("id BIT(12)", "id", "n"),
}


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use many batches of few rows, and no backoff between attempts."""
    monkeypatch.setattr(reader, "LOAD_BATCH_ROWS_MAX", BATCH_ROWS)
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.001)


def create_table(server: Server, database: str, key: str | None, columns: str = "", values: str = "") -> None:
    """Create a table of ROWS rows numbered from 1, without a key if none is named."""
    keyed, names, expressions = KEYS[key] if key else ("id INT", "", "n")
    primary = f", PRIMARY KEY ({names})" if names else ""
    server.sql(f"CREATE TABLE {database}.t ({keyed}{columns}, number INT{primary}) CHARACTER SET utf8mb4")
    ones = " UNION ALL ".join(["SELECT 0 AS d"] + [f"SELECT {digit}" for digit in range(1, 10)])
    places = ", ".join(f"({ones}) AS d{digit}" for digit in range(4))
    number = "1 + d0.d + d1.d * 10 + d2.d * 100 + d3.d * 1000"
    numbers = f"(SELECT {number} AS n FROM {places}) AS numbers WHERE n <= {ROWS}"
    server.sql(f"INSERT INTO {database}.t SELECT {expressions}{values}, n FROM {numbers}")


def planned(url: str, database: str) -> tuple[ServerAddress, Target, Chunk]:
    address = ServerAddress.parse(url)
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    (chunk,) = plan_chunks(address, target)
    return address, target, chunk


def numbers(url: str, database: str, **options: object) -> Iterator[list[int]]:
    """Yield the row numbers of each batch."""
    address, target, chunk = planned(url, database)
    for changes in read_chunk(address, target, chunk, instance="test", **options):  # type: ignore[arg-type]
        yield changes.rows.column("number").to_pylist()


@pytest.mark.parametrize("key", KEYS)
def test_connection_lost_anywhere_loses_and_duplicates_no_row(
    mysql_server: Server, mariadb_server: Server, fresh_database: FreshDatabase, key: str
) -> None:
    server = mariadb_server if key in ("text", "moment") else mysql_server
    database = fresh_database(server)
    create_table(server, database, key)
    with Proxy(server.port) as proxy:
        url = proxy.through(server.url()) + "?ssl_mode=disabled"
        address, target, chunk = planned(url, database)
        whole = [changes.rows for changes in read_chunk(address, target, chunk, instance="test")]
        size = sum(rows.nbytes for rows in whole)
        for cut, in_packet in itertools.product((3_000, size // 12, size // 8), (False, True)):
            proxy.cut_after(cut, "reset" if in_packet else "close", in_packet=in_packet, times=2)
            actual = list(read_chunk(address, target, chunk, instance="test"))
            proxy.disarm()
            read = [number for changes in actual for number in changes.rows.column("number").to_pylist()]
            assert sorted(read) == list(range(1, ROWS + 1))
            assert read == [number for rows in whole for number in rows.column("number").to_pylist()]
            places = [
                row["row"] for changes in actual for row in changes.rows.column("_metadata").to_pylist()
            ]
            assert places == list(range(ROWS))


@pytest.mark.parametrize("key", [None, "enum"])
def test_read_that_cannot_continue_is_returned(
    mysql_server: Server, fresh_database: FreshDatabase, key: str | None
) -> None:
    database = fresh_database(mysql_server)
    create_table(mysql_server, database, None, ", e ENUM('b', 'a')", ", 1 + n MOD 2")
    if key == "enum":
        mysql_server.sql(f"ALTER TABLE {database}.t ADD PRIMARY KEY (e, id)")
    with Proxy(mysql_server.port) as proxy:
        url = proxy.through(mysql_server.url()) + "?ssl_mode=disabled"
        address, target, chunk = planned(url, database)
        proxy.cut_after(40_000)
        with pytest.raises(ConnectionLost):
            list(read_chunk(address, target, chunk, instance="test"))
        proxy.disarm()
        proxy.cut_after(1_000)
        changes = list(read_chunk(address, target, chunk, instance="test"))
        assert sum(map(len, changes)) == ROWS


def test_server_that_stays_away_is_reported(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    create_table(mysql_server, database, "number")
    with Proxy(mysql_server.port) as proxy:
        url = proxy.through(mysql_server.url())
        address, target, chunk = planned(url, database)
        proxy.refuse()
        with pytest.raises(ConnectionLost):
            list(read_chunk(address, target, chunk, instance="test"))


def test_killed_query_continues(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    create_table(server, database, "number", ", filler TEXT", ", REPEAT('x', 4000)")
    address, target, chunk = planned(server.url(), database)
    read = []
    for changes in read_chunk(address, target, chunk, instance="test"):
        read += changes.rows.column("number").to_pylist()
        if len(read) == 5 * BATCH_ROWS:
            reading = server.sql(
                "SELECT id FROM information_schema.processlist WHERE info LIKE %s AND id <> CONNECTION_ID()",
                f"SELECT %{database}%FORCE%",
            )
            assert len(reading) == 1
            server.sql(f"KILL QUERY {reading[0][0]}")
    assert read == list(range(1, ROWS + 1))


def test_rate_limit_is_kept(
    mariadb_server: Server, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = fresh_database(mariadb_server)
    create_table(mariadb_server, database, "number")
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    # On this simulated clock, only the rate limit takes time.
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    came = [
        (number, now)
        for batch in numbers(mariadb_server.url(), database, rate=4_000, where="number <= 2000")
        for number in batch
    ]
    assert [number for number, _ in came] == list(range(1, 2_001))
    assert all(at == pytest.approx((number - 1) // BATCH_ROWS * BATCH_ROWS / 4_000) for number, at in came)
    assert now == pytest.approx(2_000 / 4_000)


def test_condition_is_evaluated_by_the_server(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    create_table(server, database, "number")
    actual = numbers(server.url(), database, where="number < 3 OR `id` = 7")
    assert list(itertools.chain(*actual)) == [1, 2, 7]
    with pytest.raises(ServerUnsupported):
        list(numbers(server.url(), database, where="number <"))
    with pytest.raises(OptionInvalid):
        list(numbers(server.url(), database, columns=["nothing"]))


def test_rows_longer_than_a_packet_are_read_whole(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a LONGBLOB, b LONGBLOB, number INT)")
    half = 9_000_000
    server.sql(
        f"INSERT INTO {database}.t VALUES (1, REPEAT('a', {half}), REPEAT('b', {half}), 1), (2, '', '', 2)"
    )
    address, target, chunk = planned(server.url(), database)
    actual_rows = [
        row
        for changes in read_chunk(address, target, chunk, instance="test")
        for row in changes.rows.to_pylist()
    ]
    assert [(row["a"], row["b"]) for row in actual_rows] == [(b"a" * half, b"b" * half), (b"", b"")]


def test_rows_of_another_server_do_not_pass_for_those_of_the_watermark(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    create_table(mysql_server, database, "number")
    address, target, chunk = planned(mysql_server.url(), database)
    mark = take_watermark(address)
    other = replace(mark, server_id=mark.server_id + 1)
    assert sum(map(len, read_chunk(address, target, chunk, instance="test", watermark=mark))) == ROWS
    with pytest.raises(ServerChanged):
        list(read_chunk(address, target, chunk, instance="test", watermark=other))


def test_account_without_select_is_reported(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    create_table(mysql_server, database, "number")
    _, target, chunk = planned(mysql_server.url(), database)
    mysql_server.sql("DROP USER IF EXISTS nobody; CREATE USER nobody IDENTIFIED BY ''")
    mysql_server.sql("GRANT REPLICATION CLIENT ON *.* TO nobody@'%'")
    with pytest.raises(PrivilegeMissing):
        list(read_chunk(ServerAddress.parse(mysql_server.url("nobody")), target, chunk, instance="test"))


MEMORY = """
import json, resource, sys, threading
from penstock.model import ServerAddress, TablePatterns
from penstock.pipeline.load.chunks import plan_chunks
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.targets import targets_of
address = ServerAddress.parse(sys.argv[1])
(target,) = targets_of(address, TablePatterns(sys.argv[2]))
(chunk,) = plan_chunks(address, target, rows=10**9)
def read(counts):
    counts.append(sum(len(one) for one in read_chunk(address, target, chunk, instance="test")))
read([])
def resident(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
start, counts = resident(), []
threads = [threading.Thread(target=read, args=(counts,)) for _ in range(64)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"rows": sum(counts), "growth": resident() - start}))
"""


def test_64_concurrent_reads_use_little_memory(mariadb_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mariadb_server)
    create_table(mariadb_server, database, "number", ", filler TEXT", ", REPEAT('x', 5000)")
    command = [sys.executable, "-c", MEMORY, mariadb_server.url(), f"{database}.t"]
    usage = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert usage["rows"] == 64 * ROWS
    # If each reader held the whole table, memory use would be far more than twice as high.
    assert usage["growth"] < 64 * (10 << 20), usage
