# SPDX-License-Identifier: Apache-2.0
"""The SQLite sink on a file: types, batches, columns, names, and other programs that have the file open."""

import re
import sqlite3
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionInvalid, ServerBusy, ValueMalformed
from penstock.model import TableName
from penstock.sinks.lake.types import stored_type
from penstock.sinks.sink import BatchMark, Evolution
from penstock.sinks.sqlite import database as sqlite_database
from penstock.sinks.sqlite.sink import Settings, SqliteSink
from penstock.sinks.sqlite.types import arrow_type, bound_values, declared_type, stored_values
from tests.conformance.batches import Pipe
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.pipeline.local_runs import notes_pipeline, run_here

ORDERS = target_of({"id": "int", "name": "varchar(40)"})


@pytest.fixture
def sink(tmp_path: Path) -> SqliteSink:
    return SqliteSink(Settings(path=str(tmp_path / "shop.sqlite")))


def rows(sink: SqliteSink, target: Any = ORDERS) -> list[dict[str, Any]]:
    read = [row for batch in sink.read(target) for row in batch.to_pylist()]
    return sorted(read, key=lambda row: int(row["id"]))


def query(sink: SqliteSink, sql: str) -> list[Any]:
    with sqlite3.connect(sink.settings.path) as connection:
        answer = connection.execute(sql).fetchall()
    connection.close()
    return answer


def test_batches_are_written_once_and_an_aborted_one_leaves_nothing(sink: SqliteSink) -> None:
    pipe = Pipe(sink)
    pipe.changes(ORDERS, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b"), insert(2, id=3))
    changes = [update(3, {"id": 1, "name": "a"}, {"id": 9, "name": "a"}), delete(4, id=2, name="b")]
    for again in (False, True):
        pipe.changes(ORDERS, *changes, again=again)
        assert rows(sink) == [{"id": 3, "name": None}, {"id": 9, "name": "a"}]
    writer = sink.open(BatchMark("conformance", "1", 3), 0)
    writer.write(changes_of(ORDERS, delete(5, id=3)))
    writer.empty(ORDERS, 6)
    writer.abort()
    assert [row["id"] for row in rows(sink)] == [3, 9]


# The Arrow types of columns, with values that are hard to store.
VALUES: dict[pyarrow.DataType, st.SearchStrategy[Any]] = {
    pyarrow.int64(): st.integers(-(2**63), 2**63 - 1),
    pyarrow.float32(): st.floats(width=32, allow_nan=False, allow_infinity=False),
    pyarrow.float64(): st.floats(allow_nan=False, allow_infinity=False),
    pyarrow.string(): st.text(st.characters(exclude_categories=["Cs"])),
    pyarrow.binary(): st.binary(),
    pyarrow.date32(): st.dates(),
    pyarrow.timestamp("us"): st.datetimes(),
    pyarrow.list_(pyarrow.field("element", pyarrow.float32())): st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=5
    ),
    pyarrow.decimal128(38, 38): st.integers(-(10**38) + 1, 10**38 - 1).map(
        lambda unscaled: Decimal(f"{unscaled}e-38")
    ),
    pyarrow.decimal128(20, 0): st.integers(0, 2**64 - 1).map(Decimal),
    pyarrow.decimal128(10, 2): st.integers(-(10**10) + 1, 10**10 - 1).map(
        lambda unscaled: Decimal(f"{unscaled}e-2")
    ),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_every_value_is_read_back_as_it_was_stored(kind: pyarrow.DataType) -> None:
    declared = declared_type(kind)
    assert arrow_type(declared) == kind
    connection = sqlite3.connect(":memory:")
    connection.execute(f"CREATE TABLE t (number INT, v {declared})")

    @given(st.lists(st.none() | VALUES[kind], max_size=9), st.integers(0, 3))
    def check(values: list[Any], first: int) -> None:
        column = pyarrow.array(values, kind).slice(first)
        connection.execute("DELETE FROM t")
        connection.executemany("INSERT INTO t VALUES (?, ?)", enumerate(bound_values(column)))
        stored = [row[0] for row in connection.execute("SELECT v FROM t ORDER BY number")]
        assert stored_values(stored, kind).equals(column)

    check()


def test_decimals_are_stored_without_an_exponent() -> None:
    column = pyarrow.array([Decimal("1e-10"), Decimal("-0.5"), Decimal(0), None], pyarrow.decimal128(12, 10))
    assert bound_values(column) == ["0.0000000001", "-0.5000000000", "0.0000000000", None]


def test_columns_are_added_and_widened_and_keep_their_indexes_and_views(sink: SqliteSink) -> None:
    pipe = Pipe(sink)
    pipe.changes(ORDERS, insert(1, id=1, name="a"))
    query(sink, 'CREATE VIEW names AS SELECT name FROM "shop.orders"')
    query(sink, 'CREATE INDEX by_name ON "shop.orders" (name)')
    pipe.changes(target_of({"id": "int", "n": "smallint", "name": "varchar(40)"}), insert(2, id=2, n=-7))
    wider = target_of({"id": "bigint", "n": "decimal(10,2)", "name": "varchar(40)"})
    pipe.changes(wider, insert(3, id=2**40))
    widest = target_of({"id": "bigint unsigned", "n": "decimal(20,4)", "name": "varchar(40)"})
    pipe.changes(widest, update(4, {"id": 2, "n": Decimal(-7)}, {"id": 2, "n": Decimal(1)}))
    assert [(row["id"], row["n"]) for row in rows(sink, widest)] == [(1, None), (2, 1), (2**40, None)]
    assert query(sink, "SELECT * FROM names WHERE name IS NOT NULL") == [("a",)]
    names = {name for (name,) in query(sink, "SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert {"by_name", 'shop.orders ("id")'} <= names


def test_rows_are_deleted_by_the_index_of_the_key(sink: SqliteSink) -> None:
    target = target_of({"a": "int", "b": "varchar(40)"}, key=("a", "b"))
    sink.prepare(target, Evolution.EVOLVE)
    plan = query(sink, 'EXPLAIN QUERY PLAN DELETE FROM "shop.orders" AS t WHERE t."a" IS 1 AND t."b" IS NULL')
    assert "USING INDEX" in plan[0][3]
    assert "a=? AND b=?" in plan[0][3]


def test_column_whose_name_changes_its_case_stays_the_column(sink: SqliteSink) -> None:
    renamed = target_of({"ID": "int", "Name": "varchar(40)"}, key=("ID",))
    pipe = Pipe(sink)
    pipe.changes(ORDERS, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b"))
    before, after = (
        changes_of(ORDERS, insert(2, id=3, name="c")),
        changes_of(renamed, insert(3, ID=2, Name="d")),
    )
    pipe.batch([before, after])
    read = [row for batch in sink.read(renamed) for row in batch.to_pylist()]
    assert sorted((row["ID"], row["Name"]) for row in read) == [(1, "a"), (2, "d"), (3, "c")]


def test_changed_key_refuses_no_row(sink: SqliteSink) -> None:
    pipe = Pipe(sink)
    pipe.changes(ORDERS, insert(1, id=1, name="a"))
    pipe.changes(replace(ORDERS, primary_key=("id", "name")), insert(2, id=1, name="b"))
    assert rows(sink) == [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]


def test_conflicting_names_are_refused(sink: SqliteSink) -> None:
    with pytest.raises(OptionInvalid, match="numbers of batches"):
        sink.check_together([replace(ORDERS, name=TableName("Penstock", "positions"))])
    with pytest.raises(OptionInvalid, match="one table in SQLite"):
        sink.check_together([ORDERS, replace(ORDERS, name=TableName("shop", "Orders"))])
    # Names are quoted inside texts, so that these two tables differ.
    sink.check_together(
        [replace(ORDERS, name=TableName("a.b", "c")), replace(ORDERS, name=TableName("a", "b.c"))]
    )
    sink.check_together([ORDERS, ORDERS])


def test_foreign_tables_are_reported(sink: SqliteSink) -> None:
    query(sink, 'CREATE TABLE "penstock.positions" (id INT)')
    query(sink, 'CREATE TABLE "shop.orders" (id INTEGER PRIMARY KEY)')
    with pytest.raises(OptionInvalid, match=r"penstock\.positions"):
        sink.open(BatchMark("conformance", "1", 1), 0)
    with pytest.raises(OptionInvalid, match=r"column id of the table shop\.orders has the type INTEGER"):
        sink.prepare(ORDERS, Evolution.EVOLVE)


def test_path_that_can_never_be_opened_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 1000)
    for path in (tmp_path / "missing" / "shop.sqlite", tmp_path / "text", tmp_path):
        [finding] = SqliteSink(Settings(path=str(path))).check()
        assert finding.fatal
        assert finding.mend == "Check path of the sqlite sink"


def test_values_that_another_program_stored_are_reported(sink: SqliteSink) -> None:
    Pipe(sink).changes(ORDERS, insert(1, id=1, name="a"))
    query(sink, """UPDATE "shop.orders" SET id = 'one'""")
    with pytest.raises(ValueMalformed, match=r"shop\.orders"):
        rows(sink)


def test_constraint_that_someone_added_stops_the_table_by_name(sink: SqliteSink) -> None:
    pipe = Pipe(sink)
    pipe.changes(ORDERS, insert(1, id=1, name="a"))
    query(sink, 'CREATE UNIQUE INDEX one_name ON "shop.orders" (name)')
    with pytest.raises(ValueMalformed, match="UNIQUE constraint failed"):
        pipe.changes(ORDERS, insert(2, id=2, name="a"))
    assert rows(sink) == [{"id": 1, "name": "a"}]


def test_file_that_another_program_locks_is_waited_for(
    sink: SqliteSink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_database, "_LOCK_SECONDS_MAX", 0.0)
    sink.prepare(ORDERS, Evolution.EVOLVE)
    other = sqlite3.connect(sink.settings.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(ServerBusy, match="locked"):
        sink.open(BatchMark("conformance", "1", 1), 0)
    other.execute("ROLLBACK")
    # A reader does not delay a batch, and sees the state at which it began.
    other.execute("BEGIN")
    assert other.execute('SELECT count(*) FROM "shop.orders"').fetchall() == [(0,)]
    Pipe(sink).changes(ORDERS, insert(1, id=1))
    assert other.execute('SELECT count(*) FROM "shop.orders"').fetchall() == [(0,)]
    other.close()
    assert [row["id"] for row in rows(sink)] == [1]


def test_full_disk_is_retried(sink: SqliteSink) -> None:
    small = sqlite3.connect(":memory:")
    small.execute("PRAGMA max_page_count = 2")
    with pytest.raises(ServerBusy, match="disk is full"), sink.translating("shop.sqlite"):
        small.execute("CREATE TABLE t AS SELECT randomblob(100000)")


def test_documented_query_selects_from_its_table(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/sinks/sqlite.md").read_text()
    documented = re.search(r"sqlite3 -readonly (\S+) '(.+)'", page)
    assert documented is not None
    sink = SqliteSink(Settings(path=str(tmp_path / Path(documented[1]).name)))
    columns = target_of({"id": "int", "status": "varchar(40)"})
    Pipe(sink).changes(columns, insert(1, id=1, status="new"))
    assert query(sink, documented[2]) == [("new", 1)]


def test_vectors_of_lakes_are_named_alike() -> None:
    assert declared_type(stored_type(pyarrow.list_(pyarrow.float32()))) == "VECTOR_BLOB"


def test_pipeline_writes_a_log_into_a_file(tmp_path: Path) -> None:
    sink = SqliteSink(Settings(path=str(tmp_path / "shop.sqlite")))
    settings = notes_pipeline(tmp_path, {"sqlite": {"path": sink.settings.path, "mode": "feed"}})
    for _ in range(2):
        run_here(settings)
    counts = 'SELECT count(*), count(DISTINCT _commit_version || "-" || _row) FROM "shop.notes"'
    # The log has 79 inserts.
    assert query(sink, counts) == [(79, 79)]
