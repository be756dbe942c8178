# SPDX-License-Identifier: Apache-2.0
"""Ranges cut anywhere return the rows of the whole log: no row is lost or duplicated.

This lets several executors decode one log concurrently without knowing the transaction boundaries.
"""

import random
from itertools import groupby, pairwise
from pathlib import Path

import pyarrow
import pytest

from tests.support.binlog.decoding import Decoded, decode, decode_range, run_logged
from tests.support.binlog.events import MAGIC, TRANSACTION_PAYLOAD, codes, events
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tools.servers import Server

EVERY_BYTE_MAX = 3000
RANDOM_CUTS = 60
SEED = 20260101


def write_mixed_log(server: Server, database: str) -> Path:
    """Write one file with every structure that a range may start inside; return it."""
    return run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, name VARCHAR(200), note TEXT)",
        "CREATE TABLE u (id INT PRIMARY KEY, number BIGINT)",
        "INSERT INTO t VALUES (1, 'one', REPEAT('x', 500)), (2, 'two', NULL)",
        "BEGIN",
        "INSERT INTO u VALUES (1, 1), (2, 2), (3, 3)",
        "SAVEPOINT a",
        "UPDATE u SET number = number * 10",
        "ROLLBACK TO a",
        "DELETE FROM t WHERE id = 2",
        "COMMIT",
        "ALTER TABLE u ADD COLUMN more INT",
        "UPDATE u SET more = id WHERE id > 1",
        "XA START 'x'",
        "INSERT INTO t VALUES (3, 'three', 'prepared')",
        "XA END 'x'",
        "XA PREPARE 'x'",
        "XA COMMIT 'x'",
        "UPDATE t SET note = 'after' WHERE id = 3",
        "DROP TABLE u",
        "INSERT INTO t VALUES (4, 'four', 'last')",
        database=database,
    )


def joined(data: bytes, cuts: list[int], **options: object) -> Decoded:
    """Decode each range between cuts separately, and concatenate the rows in order."""
    out = Decoded()
    for start, stop in pairwise(cuts):
        part = decode_range(data, start, stop, **options)
        for table, batches in part.batches.items():
            out.batches.setdefault(table, []).extend(batches)
        out.statements.extend(part.statements)
    return out


def texts(decoded: Decoded) -> list[tuple[str, str]]:
    own = [statement for statement in decoded.statements if not statement.is_skipped]
    return [(statement.position, statement.text) for statement in own]


def in_order(decoded: Decoded) -> dict[str, list[pyarrow.Table]]:
    """Return the rows of each table in order of arrival, one Arrow table per definition."""
    merged_tables: dict[str, list[pyarrow.Table]] = {}
    for table, batches in decoded.batches.items():
        for schema, group in groupby(batches, key=lambda batch: batch.schema):
            merged = pyarrow.Table.from_batches(list(group), schema).combine_chunks()
            merged_tables.setdefault(table, []).append(merged)
    return merged_tables


def check_every_cut(data: bytes, cuts: list[list[int]], **options: object) -> None:
    whole = decode(data, **options)
    rows, statements = in_order(whole), texts(whole)
    assert rows
    for between in cuts:
        parts = joined(data, [0, *between, len(data)], **options)
        assert in_order(parts) == rows, f"cut at {between}"
        assert texts(parts) == statements, f"cut at {between}"


def all_single_cuts(data: bytes) -> list[list[int]]:
    """Return each cut position in a small file; otherwise cuts around event starts, and random cuts."""
    places = range(1, len(data))
    if len(data) > EVERY_BYTE_MAX:
        near = {
            event.offset + step
            for event in events(data)
            for step in (-20, -1, 0, 1, 18, 19, 20, event.size // 2)
        }
        sample = random.Random(SEED).sample(places, EVERY_BYTE_MAX // 8)
        places = sorted(cut for cut in near.union(sample) if 0 < cut < len(data))  # type: ignore[assignment]
    return [[position] for position in places]


def random_cuts(data: bytes, count: int = RANDOM_CUTS) -> list[list[int]]:
    """Return several simultaneous cuts, for two to thirty ranges."""
    chance = random.Random(SEED)
    return [
        sorted(chance.sample(range(1, len(data)), chance.randint(1, min(29, len(data) - 1))))
        for _ in range(count)
    ]


def test_range_may_be_cut_at_every_byte(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    data = write_mixed_log(server, database).read_bytes()
    check_every_cut(data, all_single_cuts(data) + random_cuts(data), tables=database)


def test_envelope_rows_are_cut_as_typed_rows_are(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    data = write_mixed_log(mysql_server, database).read_bytes()
    for emit in ("envelope", "transactions"):
        check_every_cut(data, random_cuts(data, 30), tables=database, emit=emit)


@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
def test_log_without_checksums_is_cut_at_every_byte(
    flavor: str, start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server(flavor)
    database = fresh_database(server)
    server.sql("SET GLOBAL binlog_checksum = NONE")
    data = write_mixed_log(server, database).read_bytes()
    places = random.Random(SEED).sample(range(1, len(data)), 700)
    check_every_cut(data, [[position] for position in places] + random_cuts(data), tables=database)


def test_compressed_transactions_belong_to_the_range_of_their_start(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    rows = ", ".join(f"({number}, REPEAT('{number}', 50))" for number in range(100))
    path = run_logged(
        mysql_server,
        "SET SESSION binlog_transaction_compression = ON",
        "CREATE TABLE t (id INT PRIMARY KEY, text TEXT)",
        f"INSERT INTO t VALUES {rows}",
        *(f"UPDATE t SET text = 'changed {number}' WHERE id < {number}" for number in range(1, 20)),
        database=database,
    )
    data = path.read_bytes()
    assert codes(data).count(TRANSACTION_PAYLOAD) == 20
    check_every_cut(data, all_single_cuts(data) + random_cuts(data), tables=database)


def test_compressed_mariadb_events_are_cut_anywhere(
    start_server: StartServer, fresh_database: FreshDatabase
) -> None:
    server = start_server("mariadb")
    database = fresh_database(server)
    server.sql("SET GLOBAL log_bin_compress = ON, GLOBAL log_bin_compress_min_len = 10")
    data = write_mixed_log(server, database).read_bytes()
    assert {165, 166} <= set(codes(data))
    check_every_cut(data, all_single_cuts(data) + random_cuts(data), tables=database)


def test_transaction_far_longer_than_a_range_is_returned_once(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    values = ", ".join(f"({number}, REPEAT('v', 900))" for number in range(500))
    path = run_logged(
        server,
        "CREATE TABLE t (id INT AUTO_INCREMENT PRIMARY KEY, number INT, text TEXT)",
        "INSERT INTO t (number, text) VALUES (-1, 'before')",
        "BEGIN",
        *(f"INSERT INTO t (number, text) VALUES {values}" for _ in range(6)),
        "COMMIT",
        "INSERT INTO t (number, text) VALUES (-2, 'after')",
        database=database,
    )
    data = path.read_bytes()
    assert len(data) > 2 << 20
    ten = [len(data) * part // 10 for part in range(1, 10)]
    for between in ([len(data) // 2], ten, *random_cuts(data, 3)):
        whole = decode(data, tables=database, batch_bytes_max=1 << 18, held_bytes_max=1 << 19)
        parts = joined(data, [0, *between, len(data)], tables=database, batch_bytes_max=1 << 18)
        numbers = [row["id"] for row in parts.rows()]
        assert numbers == list(range(1, 3003)) == [row["id"] for row in whole.rows()]
        assert [row["_metadata"] for row in parts.rows()] == [row["_metadata"] for row in whole.rows()]


def test_event_like_bytes_inside_a_value_start_no_range(
    mysql_server: Server, fresh_database: FreshDatabase, start_server: StartServer
) -> None:
    """A table that backs up binlogs may contain a whole binlog file in a value."""
    database = fresh_database(mysql_server)
    inner = write_mixed_log(mysql_server, database).read_bytes()
    path = run_logged(
        mysql_server,
        "CREATE TABLE logs (id INT PRIMARY KEY, log LONGBLOB)",
        f"INSERT INTO logs VALUES (1, x'{inner.hex()}')",
        f"INSERT INTO logs VALUES (2, x'{inner.hex()}')",
        database=database,
    )
    data = path.read_bytes()
    at = data.index(inner[len(MAGIC) : 200])
    cuts = [[cut] for cut in range(at, at + len(inner), 37)]
    check_every_cut(data, cuts, tables=database)
