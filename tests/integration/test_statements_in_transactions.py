# SPDX-License-Identifier: Apache-2.0
"""CREATE TABLE ... SELECT: a definition logged inside the transaction of its rows."""

from pathlib import Path

from penstock.source.reading import LoggedStatement, Selection, read_in_order
from penstock.source.source import ByteRange
from tests.support.binlog.cut_source import CutSource
from tests.support.binlog.decoding import run_logged
from tests.support.binlog.events import first_event_end
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

ROWS = 400


def logged(server: Server, database: str) -> Path:
    """Return a log in which CREATE TABLE ... SELECT creates the same table twice."""
    numbers = ",".join(f"({number}, REPEAT('x', 200))" for number in range(ROWS))
    server.sql(
        f"CREATE TABLE origin (id INT, filler VARCHAR(200)); INSERT INTO origin VALUES {numbers}",
        database=database,
    )
    create = "CREATE TABLE t (PRIMARY KEY (id)) AS SELECT * FROM origin"
    return run_logged(server, create, "DROP TABLE t", create, database=database)


def parts_of(source: CutSource, file: Path) -> list[tuple[str, int] | tuple[str, int, int]]:
    """Return statements and batches in order: a statement as its text and version, a batch as its version and
    row count.
    """
    whole = ByteRange(0, file.name, first_event_end(file.read_bytes()), None, True)
    parts: list[tuple[str, int] | tuple[str, int, int]] = []
    for part in read_in_order(source, whole, Selection(), held_bytes_max=1):
        if isinstance(part, LoggedStatement):
            parts.append((part.text[:12], part.emptied_to))
        else:
            versions = set(part.to_arrow()["_commit_version"].to_pylist())
            assert len(versions) == 1
            parts.append(("rows", versions.pop(), part.rows))
    return parts


def test_rows_of_the_statements_own_transaction_are_kept(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    file = logged(server, database)
    parts = parts_of(CutSource(file, ()), file)
    statements = [index for index, part in enumerate(parts) if part[0] == "CREATE TABLE"]
    assert len(statements) == 2
    for statement in statements:
        assert parts[statement + 1][0] == "rows"
        assert parts[statement][1] < parts[statement + 1][1]
    # Rows that were inserted before the table was dropped have lower versions.
    assert parts[statements[0] + 1][1] <= parts[statements[1]][1]
    assert sum(part[2] for part in parts if len(part) == 3) == 2 * ROWS


def test_statement_is_read_once_when_connections_are_lost(
    server: Server, fresh_database: FreshDatabase
) -> None:
    file = logged(server, fresh_database(server))
    length = file.stat().st_size

    def summary(cuts: tuple[int, ...]) -> list[tuple[str, int]]:
        parts = parts_of(CutSource(file, cuts, buffer_bytes=4096), file)
        rows = sum(part[2] for part in parts if len(part) == 3)
        return [*(part[:2] for part in parts if part[0] != "rows"), ("rows", rows)]

    expected = summary(())
    for cuts in ((length // 4, length // 3), (length * 3 // 4, length // 2, length // 4), (length // 2,) * 3):
        assert summary(cuts) == expected, cuts
