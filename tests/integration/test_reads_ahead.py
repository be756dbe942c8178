# SPDX-License-Identifier: Apache-2.0
"""Small tables whose queries are sent ahead have the same rows as tables that are read one by one."""

import random
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.changes import Changes, Target
from penstock.errors import ConnectionLost, SchemaChanged
from penstock.model import ServerAddress, TableName, TablePatterns
from penstock.pipeline.load import reader
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.reads_ahead import ReadsAhead, TableRead
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.targets import targets_of
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.nonempty import each
from tools.servers import Proxy, Server

# Other flavors differ only in lower layers.
pytestmark = pytest.mark.deep_flavors("mariadb")

TABLES = 70
BATCH_ROWS = 20
Row = tuple[object, ...]


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use many batches of few rows, and no backoff between attempts."""
    monkeypatch.setattr(reader, "LOAD_BATCH_ROWS_MAX", BATCH_ROWS)
    monkeypatch.setattr(random, "uniform", lambda low, high: 0.001)


def create_tables(server: Server, database: str, chance: random.Random) -> None:
    """Create tables of several definitions with 0 to 60 rows."""
    columns = ["n DECIMAL(9, 3)", "s VARCHAR(900)", "b VARBINARY(40)", "f FLOAT", "d DATETIME(3)"]
    values = {
        "n": lambda: f"{chance.randrange(-999, 999)}.125",
        "s": lambda: f"'{'käse' * chance.randrange(200)}'",
        "b": lambda: f"x'{chance.randbytes(chance.randrange(20)).hex()}'",
        "f": lambda: chance.choice(["0.1", "NULL", "-3e10"]),
        "d": lambda: f"'2026-01-{chance.randrange(1, 28):02} 10:00:00.123'",
    }
    for number in range(TABLES):
        chosen = chance.sample(columns, chance.randrange(len(columns) + 1))
        definition = ", ".join(["id INT", *chosen])
        server.sql(f"CREATE TABLE {database}.t{number:02} ({definition}) CHARACTER SET utf8mb4")
        rows = [
            f"({', '.join([str(row), *(values[column[0]]() for column in chosen)])})"
            for row in range(chance.choice([0, 1, 5, 60]))
        ]
        if rows:
            server.sql(f"INSERT INTO {database}.t{number:02} VALUES {', '.join(rows)}")


def table_reads(url: str, database: str) -> dict[int, TableRead]:
    address = ServerAddress.parse(url)
    targets = targets_of(address, TablePatterns(f"{database}.*"))
    return {number: table_read(address, target) for number, target in enumerate(targets)}


def table_read(address: ServerAddress, target: Target, where: str | None = None) -> TableRead:
    return TableRead(address, target, Chunk(target.name), "test", where=where)


def rows_of(parts: Iterator[Changes]) -> list[Row]:
    """Return rows with their place in the chunk, without what the read's position decides."""
    rows: list[Row] = []
    for changes in parts:
        values = changes.rows.select(list(changes.target.column_names)).to_pylist()
        metadata = changes.rows.column("_metadata").to_pylist()
        rows += [
            (*row.values(), place["table"], place["row"]) for row, place in zip(values, metadata, strict=True)
        ]
    return rows


def rows_alone(read: TableRead) -> list[Row]:
    """Return a table's rows by a session of its own."""
    return rows_of(
        read_chunk(read.address, read.target, read.chunk, instance="test", where=read.where, tries_max=1)
    )


def ignore(_: object) -> None:
    """Receive the log position of a read."""


def test_tables_have_the_same_rows_as_when_read_alone(server: Server, fresh_database: FreshDatabase) -> None:
    chance = random.Random(21)
    database = fresh_database(server)
    create_tables(server, database, chance)
    reads = table_reads(server.url("repl"), database)
    reads |= {
        number: table_read(read.address, read.target, "id % 3 = 1")
        for number, read in reads.items()
        if number % 5 == 0
    }
    expected = {number: rows_alone(read) for number, read in reads.items()}
    assert sum(map(len, expected.values())) > BATCH_ROWS * TABLES / 4
    with closing(SessionPool()) as pool, ReadsAhead(reads, pool) as ahead:
        # Some tables are skipped, as those that a pipeline continues without.
        chosen = sorted(chance.sample(sorted(reads), TABLES - 6))
        actual = {number: rows_of(ahead.changes(number, ignore)) for number in chosen}
    assert actual == {number: expected[number] for number in chosen}


def test_connection_lost_anywhere_loses_and_duplicates_no_row(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    """A table that has yielded rows reports the loss, because it has no key to continue by; every other table
    is complete.
    """
    chance = random.Random(5)
    database = fresh_database(mysql_server)
    create_tables(mysql_server, database, chance)
    with Proxy(mysql_server.port) as proxy:
        reads = table_reads(proxy.through(mysql_server.url()) + "?ssl_mode=disabled", database)
        expected = {number: rows_alone(read) for number, read in reads.items()}
        lost = 0
        for _ in range(8):
            proxy.cut_after(chance.randrange(1_000, 400_000), chance.choice(["reset", "close"]), times=2)
            with closing(SessionPool()) as pool, ReadsAhead(reads, pool) as ahead:
                for number in reads:
                    yielded: list[Changes] = []
                    try:
                        for changes in ahead.changes(number, ignore):
                            yielded.append(changes)
                    except ConnectionLost:
                        assert yielded, "a table without rows yet is read again"
                        lost += 1
                        continue
                    assert rows_of(iter(yielded)) == expected[number]
            proxy.disarm()
        assert lost < 16, "each loss concerns one table"


def test_failed_or_abandoned_table_leaves_the_others_intact(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    create_tables(server, database, random.Random(3))
    reads = table_reads(server.url("repl"), database)
    expected = {number: rows_alone(read) for number, read in reads.items()}
    first = reads[0]
    gone = {
        number: table_read(first.address, Target(TableName(database, f"gone{number}"), first.target.columns))
        for number in (3, 4, 40)
    }
    abandoned = next(number for number, rows in expected.items() if len(rows) > BATCH_ROWS and number > 4)
    with closing(SessionPool()) as pool, ReadsAhead(reads | gone, pool) as ahead:
        for number in each(reads):
            if number in gone:
                with pytest.raises(SchemaChanged):
                    list(ahead.changes(number, ignore))
            elif number == abandoned:
                parts = ahead.changes(number, ignore)
                assert len(next(parts)) == BATCH_ROWS
                parts.close()  # type: ignore[attr-defined]
            else:
                assert rows_of(ahead.changes(number, ignore)) == expected[number]
