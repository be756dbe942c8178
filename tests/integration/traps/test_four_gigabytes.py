# SPDX-License-Identifier: Apache-2.0
"""Files longer than 4 GiB: logged end positions are modulo 2^32, Penstock's positions are not."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from penstock._native import follow_events
from tests.support.binlog.decoding import Decoded, decode, run_logged
from tests.support.binlog.events import assemble, events, first_event_end
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.nonempty import each
from tools.servers import Server

LINE = 1 << 32


def shifted_log(server: Server, database: str, start: int) -> tuple[bytes, bytes, str]:
    """Return the head of a real file, and its transactions moved to `start`."""
    path = run_logged(
        server,
        "CREATE TABLE t (id INT PRIMARY KEY, text VARCHAR(100))",
        *(f"INSERT INTO t VALUES ({number}, 'v{number}')" for number in range(1, 30)),
        database=database,
    )
    data = path.read_bytes()
    log_events = list(events(data))
    first = next(index for index, event in enumerate(log_events) if event.code in (33, 162))
    return data[: first_event_end(data)], assemble(log_events[first:], start), path.name


@pytest.mark.parametrize("flavor", ["mysql", "mariadb", "mariadb11"])
@pytest.mark.parametrize("live", [False, True])
def test_positions_continue_past_four_gibibytes(
    flavor: str, live: bool, server_of: Callable[[str], Server], fresh_database: FreshDatabase
) -> None:
    server = server_of(flavor)
    database = fresh_database(server)
    start = LINE - 2000
    head, tail, name = shifted_log(server, database, start)
    options = {"offset": start, "head": head, "live": live}
    decoded = decode(tail, name, **options)
    rows = decoded.rows(f"{database}.t")
    assert [row["id"] for row in rows] == list(range(1, 30))
    offsets = [row["_metadata"]["offset"] for row in rows]
    assert offsets == sorted(offsets)
    assert offsets[0] < LINE < offsets[-1] < LINE + len(tail)
    versions = [row["_commit_version"] for row in rows]
    assert all(earlier < other for earlier, other in pairwise(versions))
    assert decoded.position[1] > LINE


def test_ranges_past_four_gibibytes_are_cut_anywhere(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    start = LINE - 2000
    head, tail, name = shifted_log(mysql_server, database, start)
    number = int(name.rpartition(".")[2])
    whole = [row["id"] for row in decode(tail, name, offset=start, head=head).rows(f"{database}.t")]
    for cut in each(range(start + 1, start + len(tail), 97)):
        parts = Decoded()
        for begin, end in ((start, cut), (cut, start + len(tail))):
            opened, _ = follow_events(tail, start, begin)
            assert opened is not None
            part = decode(
                memoryview(tail)[opened - start :],
                name,
                offset=opened,
                head=head,
                aligned=opened == start,
                start=(number, begin),
                stop=(number, end),
            )
            parts.batches.setdefault("t", []).extend(part.batches.get(f"{database}.t", []))
        assert [row["id"] for row in parts.rows("t")] == whole, f"cut at {cut}"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_real_transaction_of_over_four_gibibytes_is_read(start_server: StartServer) -> None:
    server = start_server(
        "mysql", innodb_redo_log_capacity="2G", max_binlog_cache_size="8G", max_binlog_size="1G"
    )
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (id INT PRIMARY KEY, text LONGTEXT)")
    with server.connect(database="d") as connection, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        for number in range(440):
            cursor.execute("INSERT INTO t VALUES (%s, REPEAT('x', 10000000))", (number,))
        cursor.execute("COMMIT")
        cursor.execute("INSERT INTO t VALUES (1000, 'after')")
    path = max(server.binlog_files(), key=lambda file: file.stat().st_size)
    assert path.stat().st_size > LINE
    check_large_file(path)


def check_large_file(path: Path) -> None:
    import penstock

    numbers: list[int] = []
    offsets: list[int] = []
    for batch in penstock.read_binlog([str(path)], "d.t", columns=["id", "_metadata"]):
        rows = batch.to_arrow()
        numbers += rows.column("id").to_pylist()
        offsets += [row["offset"] for row in rows.column("_metadata").to_pylist()]
    assert numbers == [*range(440), *([1000] if numbers[-1] == 1000 else [])]
    assert offsets == sorted(offsets)
    assert offsets[-1] > LINE - 50_000_000
