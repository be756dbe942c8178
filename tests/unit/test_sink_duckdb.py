# SPDX-License-Identifier: Apache-2.0
"""The DuckDB sink on a file: batches, columns, names, and other programs that have the file open."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pydantic import ValidationError

from penstock.changes import Target
from penstock.errors import OptionInvalid, ServerBusy
from penstock.model import TableName
from penstock.sinks.duckdb.sink import DuckdbSink, Settings
from penstock.sinks.sink import BatchMark, Evolution
from tests.conformance.batches import Pipe
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.pipeline.local_runs import notes_pipeline, run_here

ORDERS = target_of({"id": "int", "name": "varchar(40)"})
# A program that keeps a file open for writing until its standard input ends.
HOLDER = (
    "import sys, duckdb\n"
    "with duckdb.connect(sys.argv[1]):\n"
    "    print('open', flush=True)\n"
    "    sys.stdin.read()"
)


@pytest.fixture
def sink(tmp_path: Path) -> DuckdbSink:
    # The DuckDB database has the same name as the schema.
    return DuckdbSink(Settings(path=str(tmp_path / "shop.duckdb")))


def rows(sink: DuckdbSink, target: Target = ORDERS) -> list[dict[str, Any]]:
    read = [row for batch in sink.read(target) for row in batch.to_pylist()]
    return sorted(read, key=lambda row: int(row["id"]))


def test_batches_are_written_once_and_an_aborted_one_leaves_nothing(sink: DuckdbSink) -> None:
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


def test_columns_are_added_and_widened(sink: DuckdbSink) -> None:
    pipe = Pipe(sink)
    pipe.changes(ORDERS, insert(1, id=1, name="a"))
    pipe.changes(target_of({"id": "int", "n": "smallint", "name": "varchar(40)"}), insert(2, id=2, n=7))
    wider = target_of({"id": "bigint", "n": "decimal(10,2)", "name": "varchar(40)"})
    pipe.changes(wider, insert(3, id=2**40))
    assert [(row["id"], row["n"]) for row in rows(sink, wider)] == [(1, None), (2, 7), (2**40, None)]


def test_column_whose_name_changes_its_case_stays_the_column(sink: DuckdbSink) -> None:
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


def test_table_of_the_batch_numbers_is_refused_as_a_target(sink: DuckdbSink) -> None:
    with pytest.raises(OptionInvalid, match="numbers of batches"):
        sink.check_together([replace(ORDERS, name=TableName("Penstock", "positions"))])


def test_foreign_table_of_batch_numbers_is_reported(sink: DuckdbSink) -> None:
    with duckdb.connect(sink.settings.path) as database:
        database.execute("CREATE SCHEMA penstock; CREATE TABLE penstock.positions (id INT)")
    with pytest.raises(OptionInvalid, match=r"penstock\.positions"):
        sink.open(BatchMark("conformance", "1", 1), 0)


def test_path_that_can_never_be_opened_is_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no database" * 1000)
    for path in (tmp_path / "missing" / "shop.duckdb", tmp_path / "text", tmp_path):
        findings = DuckdbSink(Settings(path=str(path))).check()
        assert [finding.mend for finding in findings] == ["Check path of the duckdb sink"]


def test_database_in_memory_is_refused() -> None:
    with pytest.raises(ValidationError, match="name a file"):
        Settings(path=":memory:")


def test_documented_query_finds_its_table(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/sinks/duckdb.md").read_text()
    found = re.search(r"duckdb -readonly (\S+) '(.+)'", page)
    assert found is not None
    path = str(tmp_path / Path(found[1]).name)
    pipe = Pipe(DuckdbSink(Settings(path=path)))
    pipe.changes(target_of({"id": "int", "status": "varchar(40)"}), insert(1, id=1, status="new"))
    with duckdb.connect(path, read_only=True) as database:
        assert database.execute(found[2]).fetchall() == [("new", 1)]


def test_names_that_differ_only_in_case_are_refused(sink: DuckdbSink) -> None:
    other = replace(ORDERS, name=TableName("shop", "Orders"))
    with pytest.raises(OptionInvalid, match="one table in DuckDB"):
        sink.check_together([ORDERS, other])
    sink.check_together([ORDERS, ORDERS])


def test_file_that_another_program_writes_is_waited_for(sink: DuckdbSink) -> None:
    sink.prepare(ORDERS, Evolution.EVOLVE)
    words = [sys.executable, "-c", HOLDER, sink.settings.path]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "open\n"
        with pytest.raises(ServerBusy, match="lock"):
            sink.open(BatchMark("conformance", "1", 1), 0)
        with pytest.raises(ServerBusy, match="lock"):
            sink.check()
        holder.communicate()
    Pipe(sink).changes(ORDERS, insert(1, id=1))
    assert [row["id"] for row in rows(sink)] == [1]


@pytest.mark.parametrize("path", ["missing/shop.duckdb", "no.duckdb"])
def test_file_that_cannot_be_opened_ends_a_run(path: str, tmp_path: Path) -> None:
    (tmp_path / "no.duckdb").write_text("no database" * 1000)
    [finding] = DuckdbSink(Settings(path=str(tmp_path / path))).check()
    assert finding.fatal
    assert path in finding.what


def test_pipeline_writes_a_log_into_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "shop.duckdb")
    settings = notes_pipeline(tmp_path, {"duckdb": {"path": path, "mode": "feed"}})
    for _ in range(2):
        run_here(settings)
    with duckdb.connect(path, read_only=True) as database:
        versions = database.execute(
            "SELECT count(*), count(DISTINCT (_commit_version, _metadata.row)) FROM shop.shop.notes"
        ).fetchall()
    # The log has 79 inserts.
    assert versions == [(79, 79)]
