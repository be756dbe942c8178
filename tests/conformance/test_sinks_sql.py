# SPDX-License-Identifier: Apache-2.0
"""SQL targets equal their source despite failures at any point."""

import contextlib
import re
from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import OptionInvalid, TransientError, ValueMalformed
from penstock.model import Column
from penstock.sinks.sink import BatchMark, Evolution, Sink
from tests.conformance.batches import MakeTarget, Pipe, runs_on
from tests.support.pipeline.changes_made import changes_of, delete, insert, update
from tests.support.pipeline.logged_changes import logged_corpus, write_batch, write_in_batches
from tests.support.pipeline.oracle import assert_same
from tests.support.sinks.backends import SinkBackend, SqlBackend
from tests.support.suite.nonempty import each
from tools.servers import Server

SEATS = {"id": "int", "seat": "int", "label": "varchar(20)"}
VISITS = {"page": "varchar(20)"}


def speaks_sql(backend: type[SinkBackend]) -> bool:
    return issubclass(backend, SqlBackend)


@runs_on(speaks_sql)
def test_busy_source_is_mirrored(
    backend: SqlBackend,
    variant: dict[str, Any],
    table: MakeTarget,
    mysql_server: Server,
    pytestconfig: pytest.Config,
) -> None:
    corpus = logged_corpus(mysql_server, pytestconfig).into(table().name.database)
    sink = backend.sink(**variant)
    corpus.prepare(sink)
    write_in_batches(sink, corpus.changes, 6)
    for name, target in each(corpus.targets.items()):
        assert_same(corpus.rows[name], backend.oracle_rows(target), key=target.primary_key)


@runs_on(speaks_sql)
def test_rows_swap_their_unique_values(
    backend: SqlBackend, variant: dict[str, Any], table: MakeTarget
) -> None:
    seats, pipe, count = table(SEATS, unique=[["seat"]]), Pipe(backend.sink(**variant)), 2000
    pipe.changes(seats, *(insert(1, number, id=number, seat=number) for number in range(count)))
    moved = [
        update(2, {"id": number, "seat": number}, {"id": number, "seat": (number + 1) % count}, number)
        for number in range(count)
    ]
    pipe.changes(seats, *moved)
    assert backend.stored(seats) == [(number, (number + 1) % count, None) for number in range(count)]


@runs_on(speaks_sql)
def test_tables_with_and_without_a_key_are_truncated_in_one_part(
    backend: SqlBackend, variant: dict[str, Any], table: MakeTarget
) -> None:
    seats, sold = table(SEATS, unique=[["seat"]]), table({"seat": "int"}, (), table="sold")
    sink = backend.sink(**variant)
    pipe = Pipe(sink)
    pipe.batch([changes_of(sold, insert(1, seat=1)), changes_of(seats, insert(1, 1, id=1, seat=1))])
    writer = sink.open(BatchMark("conformance", "1", 2), 0)
    writer.empty(sold, 2)
    writer.empty(seats, 3)
    writer.write(changes_of(seats, insert(4, id=1, seat=2)))
    writer.finish()
    assert backend.stored(seats) == [(1, 2, None)]
    assert backend.stored(sold) == []


@runs_on(speaks_sql)
@pytest.mark.parametrize("truncate", [True, False])
def test_truncated_table_holds_rows_written_later(
    backend: SqlBackend, table: MakeTarget, truncate: bool
) -> None:
    seats, sink = table(SEATS, unique=[["seat"]]), backend.sink(truncate=truncate)
    Pipe(sink).changes(seats, insert(1, id=1, seat=1))
    writer = sink.open(BatchMark("conformance", "1", 2), 0)
    writer.write(changes_of(seats, insert(2, id=2, seat=2)))
    writer.empty(seats, 3)
    writer.write(changes_of(seats, insert(4, id=3, seat=2)))
    writer.finish()
    assert backend.stored(seats) == [(3, 2, None)]


@runs_on(speaks_sql)
def test_batch_survives_a_lost_connection(backend: SqlBackend, sink: Sink, table: MakeTarget) -> None:
    seats, visits = table(SEATS, unique=[["seat"]]), table(VISITS, (), table="visits")
    pipe = Pipe(sink)
    pipe.batch([changes_of(visits, insert(1, page="gone")), changes_of(seats, insert(1, 1, id=1, seat=1))])
    mark, number = BatchMark("conformance", "1", 2), 0

    def write() -> None:
        nonlocal number
        writer = sink.open(mark, 0)
        try:
            # The TRUNCATE runs at once, in the transaction that is lost.
            writer.empty(visits, 2)
            writer.write(changes_of(visits, insert(3, page="front")))
            writer.write(changes_of(seats, insert(3, 1, id=2, seat=2)))
            if number == 0:
                backend.disconnect_sinks()
            number += 1
            sink.commit(mark, [writer.finish()])
        except TransientError:
            writer.abort()
            raise

    with contextlib.suppress(TransientError):
        write()
    # The batch may be retried whether or not the writer has recovered.
    write()
    assert number == 2
    assert backend.stored(seats) == [(1, 1, None), (2, 2, None)]
    assert backend.stored(visits) == [("front",)]


@runs_on(speaks_sql)
def test_two_writers_of_one_part_write_it_once(backend: SqlBackend, sink: Sink, table: MakeTarget) -> None:
    """A stale process continues in parallel with the process that took over its part."""
    visits = table(VISITS, (), table="visits")
    sink.prepare(visits, Evolution.EVOLVE)
    writers = [sink.open(BatchMark("test", "1", 1), 0) for _ in range(2)]
    for writer in writers:
        writer.write(changes_of(visits, insert(1, page="front")))
    for writer in writers:
        assert writer.finish().rows == 1
    assert backend.stored(visits) == [("front",)]
    write_batch(sink, [changes_of(visits, insert(2, page="back"))], 2)
    assert backend.stored(visits) == [("back",), ("front",)]


@runs_on(speaks_sql)
@pytest.mark.parametrize("ending", ["finish", "abort"])
def test_part_written_as_one_transaction_is_invisible_before_its_end(
    backend: SqlBackend, table: MakeTarget, ending: str
) -> None:
    seats, sink = table(SEATS, unique=[["seat"]]), backend.sink(**backend.WHOLE_PARTS)
    sink.prepare(seats, Evolution.EVOLVE)
    writer = sink.open(BatchMark("test", "1", 1), 0)
    for first in range(0, 200, 50):
        rows = range(first, first + 50)
        writer.write(changes_of(seats, *(insert(1, number, id=number, seat=number) for number in rows)))
        assert backend.stored(seats) == []
    getattr(writer, ending)()
    assert len(backend.stored(seats)) == (200 if ending == "finish" else 0)


@runs_on(speaks_sql)
def test_existing_table_keeps_its_own_columns(backend: SqlBackend, sink: Sink, table: MakeTarget) -> None:
    seats = table(SEATS, unique=[["seat"]])
    backend.create_table(seats, "id BIGINT PRIMARY KEY, seat INT, theirs INT NOT NULL DEFAULT 7")
    (statement,) = sink.plan(seats, Evolution.EVOLVE)
    assert re.findall(r"(ADD|DROP|MODIFY|ALTER) COLUMN [`\"](\w+)", statement) == [("ADD", "label")]
    pipe = Pipe(sink)
    pipe.changes(seats, insert(1, id=1, seat=1, label="a"))
    backend.sql(f"UPDATE {seats.name} SET theirs = 8")
    pipe.changes(seats, update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 2}))
    assert backend.stored(seats, "id", "seat", "label", "theirs") == [(1, 2, None, 8)]


@runs_on(speaks_sql)
def test_existing_table_needs_no_key(backend: SqlBackend, sink: Sink, table: MakeTarget) -> None:
    seats, pipe = table(SEATS, unique=[["seat"]]), Pipe(sink)
    backend.create_table(seats, "id INT, seat INT, label VARCHAR(20)")
    for _ in range(2):
        pipe.changes(seats, insert(1, id=1, seat=1), insert(1, 1, id=2, seat=2))
    pipe.changes(seats, update(2, {"id": 1, "seat": 1}, {"id": 1, "seat": 5}))
    assert backend.stored(seats) == [(1, 5, None), (2, 2, None)]


@runs_on(speaks_sql)
def test_value_out_of_the_range_of_its_column_stops_the_batch(
    backend: SqlBackend, sink: Sink, table: MakeTarget
) -> None:
    seats = table(SEATS)
    backend.create_table(seats, "id INT PRIMARY KEY, seat SMALLINT, label VARCHAR(20)")
    sink.prepare(seats, Evolution.IGNORE)
    with pytest.raises(ValueMalformed):
        write_batch(sink, [changes_of(seats, insert(1, id=1, seat=100_000))])
    assert backend.stored(seats) == []


@runs_on(speaks_sql)
def test_columns_and_unique_keys_follow_the_source(
    backend: SqlBackend, sink: Sink, table: MakeTarget
) -> None:
    pipe = Pipe(sink)
    first = table({"id": "int", "kept": "varchar(5)", "gone": "int"}, unique=[["gone"]])
    pipe.changes(first, insert(1, id=1, kept="a", gone=5))
    second = table({"new": "datetime(3)", "id": "bigint", "kept": "varchar(50)"}, unique=[["kept"]])
    sink.prepare(second, Evolution.EVOLVE)
    assert not sink.plan(second, Evolution.EVOLVE)
    pipe.changes(second, insert(2, id=1 << 40, kept="b" * 50))
    columns = ["new", "id", "kept"] if backend.PLACES_COLUMNS else ["id", "kept", "new"]
    assert backend.stored_columns(second) == columns
    assert backend.stored(second, "id", "kept", "new") == [(1, "a", None), (1 << 40, "b" * 50, None)]


@runs_on(speaks_sql)
def test_deleted_row_frees_its_unique_value(backend: SqlBackend, sink: Sink, table: MakeTarget) -> None:
    seats, pipe = table(SEATS, unique=[["seat"]]), Pipe(sink)
    pipe.changes(seats, insert(1, id=1, seat=1))
    pipe.changes(seats, delete(2, id=1, seat=1), insert(3, id=2, seat=1))
    assert backend.stored(seats) == [(2, 1, None)]


@runs_on(speaks_sql)
def test_table_created_by_another_pipeline_is_altered_only_if_permitted(
    backend: SqlBackend, table: MakeTarget
) -> None:
    narrow = table({"id": "int", "seat": "int"})
    wide = replace(narrow, columns=(*narrow.columns, Column("label", "varchar(20)", "utf8mb4")))
    first, second, taking = backend.sink(), backend.sink(), backend.sink(take_over=True)
    first.pipeline, second.pipeline, taking.pipeline = "it's first", "second", "second"
    first.prepare(wide, Evolution.EVOLVE)
    # A column that already fits needs no change.
    assert not second.plan(wide, Evolution.EVOLVE)
    for attempt in (second.plan, second.prepare):
        with pytest.raises(OptionInvalid, match="made by the pipeline it's first, and second would alter it"):
            attempt(narrow, Evolution.EVOLVE)
    first.prepare(narrow, Evolution.EVOLVE)
    taking.prepare(wide, Evolution.EVOLVE)
    second.prepare(narrow, Evolution.EVOLVE)
    with pytest.raises(OptionInvalid, match="made by the pipeline second"):
        first.prepare(wide, Evolution.EVOLVE)
