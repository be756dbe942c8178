# SPDX-License-Identifier: Apache-2.0
"""The behaviour of every sink that mirrors tables, in any target."""

import pickle
import struct
from dataclasses import replace
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from penstock.changes import Origin
from penstock.errors import ConnectionLost, OptionInvalid, SchemaChanged, StateOutdated, StreamError
from penstock.model import Column, TableName
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Sink, Spread
from tests.conformance.batches import MakeTarget, Pipe, row, runs_on
from tests.support.pipeline.changes_made import Made, changes_of, delete, insert, update
from tests.support.sinks.backends import SinkBackend


def test_sink_pickles_and_its_check_reports_no_problem(backend: SinkBackend, sink: Sink) -> None:
    assert [finding for finding in sink.check() if finding.fatal] == []
    copied = pickle.loads(pickle.dumps(sink))
    assert [finding for finding in copied.check() if finding.fatal] == []
    copied.close()
    assert sink.delivery in Delivery


def test_table_is_created_once(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target = table()
    sink.prepare(target, Evolution.EVOLVE)
    sink.prepare(target, Evolution.STOP)
    assert backend.rows(sink, target) == []


def test_rows_are_inserted_updated_and_deleted(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    pipe.changes(target, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b"), insert(2, id=3))
    assert backend.rows(sink, target) == [row(1, "a"), row(2, "b"), row(3)]
    pipe.changes(
        target, update(3, row(1, "a"), row(1, "x")), delete(4, id=2, name="b"), insert(5, id=4, name="")
    )
    assert backend.rows(sink, target) == [row(1, "x"), row(3), row(4, "")]


def test_last_of_several_changes_of_a_row_wins(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    pipe.changes(
        target,
        insert(1, id=1, name="a"),
        update(1, row(1, "a"), row(1, "b"), 1),
        insert(1, 2, id=2),
        delete(1, 3, id=2),
        insert(2, id=3),
        delete(2, 1, id=3),
        insert(2, 2, id=3, name="again"),
    )
    assert backend.rows(sink, target) == [row(1, "b"), row(3, "again")]
    pipe.changes(target, delete(3, id=1, name="b"), insert(3, 1, id=1, name="c"))
    assert backend.rows(sink, target) == [row(1, "c"), row(3, "again")]


def test_keys_change_and_swap(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    pipe.changes(
        target, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b"), insert(1, 2, id=3, name="c")
    )
    pipe.changes(
        target,
        update(2, row(3, "c"), row(30, "c")),
        update(3, row(1, "a"), row(-1, "a")),
        update(3, row(2, "b"), row(1, "b"), 1),
        update(3, row(-1, "a"), row(2, "a"), 2),
    )
    assert backend.rows(sink, target) == [row(1, "b"), row(2, "a"), row(30, "c")]


def test_primary_keys_shift_along_a_chain(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    seats, pipe = table({"id": "int", "seat": "int"}, unique=[["seat"]]), Pipe(sink)
    pipe.changes(seats, *(insert(1, number, id=number, seat=number) for number in range(50)))
    moved = [
        update(2, {"id": number, "seat": number}, {"id": number + 1, "seat": number}, number)
        for number in reversed(range(50))
    ]
    pipe.changes(seats, *moved)
    assert backend.rows(sink, seats) == [{"id": number + 1, "seat": number} for number in range(50)]


def test_repeated_batch_changes_nothing(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    pipe.changes(target, insert(1, id=1, name="a"), insert(1, 1, id=2, name="b"))
    batch = [update(2, row(1, "a"), row(5, "a")), delete(3, id=2, name="b"), insert(4, id=6, name="f")]
    for again in (False, True, True):
        pipe.changes(target, *batch, again=again)
        assert backend.rows(sink, target) == [row(5, "a"), row(6, "f")]


@runs_on(lambda backend: backend.MIRRORS and backend.STORES_NUMBERS)
@pytest.mark.parametrize("origin", list(Origin))
def test_batch_before_the_last_one_is_refused(
    backend: SinkBackend, sink: Sink, table: MakeTarget, origin: Origin
) -> None:
    target = table()
    sink.prepare(target, Evolution.EVOLVE)

    def write(number: int, name: str) -> None:
        mark = BatchMark(f"refused/{origin}", "1", number, loads=origin is Origin.LOAD)
        writer = sink.open(mark, 0)
        writer.write(changes_of(target, insert(number, id=number, name=name), origin=origin))
        sink.commit(mark, [writer.finish()])

    for number in (1, 2, 3):
        write(number, "a")
    for number in (1, 2):
        with pytest.raises(StateOutdated, match=f"the target has batch 3 .* only at batch {number}"):
            write(number, "another")
    write(3, "another")
    write(4, "b")
    assert backend.rows(sink, target) == [row(1, "a"), row(2, "a"), row(3, "a"), row(4, "b")]


def test_aborted_writer_leaves_no_trace(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    pipe.changes(target, insert(1, id=1, name="a"))
    changes = changes_of(target, delete(2, id=1, name="a"), insert(3, id=2, name="b"))
    writer = sink.open(BatchMark("conformance", "1", 2), 0)
    writer.write(changes)
    writer.abort()
    assert backend.rows(sink, target) in ([row(1, "a")], [row(2, "b")])
    pipe.batch([changes])
    assert backend.rows(sink, target) == [row(2, "b")]


def test_loaded_rows_yield_to_the_log(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    loaded = changes_of(
        target,
        insert(5, id=1, name="a"),
        insert(5, id=2, name="b"),
        insert(5, id=3, name="c"),
        origin=Origin.LOAD,
    )
    # A change with the load's own version was made after the load.
    logged = changes_of(target, update(5, row(1, "a"), row(1, "x")), delete(6, id=2, name="b"))
    pipe.batch([loaded, logged])
    assert backend.rows(sink, target) == [row(1, "x"), row(3, "c")]


@runs_on(lambda backend: backend.MIRRORS and backend.has_table_errors())
def test_error_of_one_table_names_the_table(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    good, pipe = table(), Pipe(sink)
    bad = replace(good, name=TableName(good.name.database, "bad"))
    pipe.batch([changes_of(table_target, insert(1, id=1, name="a")) for table_target in (good, bad)])
    backend.spoil(sink, bad)
    batch = [
        changes_of(table_target, insert(2, id=2, name="b"), insert(2, 1, id=3, name="b"))
        for table_target in (good, bad)
    ]
    writer = sink.open(BatchMark("conformance", "1", 2), 0)

    def write() -> None:
        for changes in batch:
            writer.write(changes)
        writer.finish()

    with pytest.raises((StreamError, OptionInvalid)):
        write()
    assert writer.at == bad.name
    writer.abort()
    # The same batch is retried without the failed table.
    pipe.batch(batch[:1])
    assert backend.rows(sink, good) == [row(1, "a"), row(2, "b"), row(3, "b")]


def test_truncated_table_keeps_later_rows(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    other = replace(target, name=TableName(target.name.database, "others"))
    pipe.batch(
        [changes_of(target, insert(1, id=1, name="a")), changes_of(other, insert(1, 1, id=1, name="kept"))]
    )
    mark = BatchMark("conformance", "1", 2)
    for _ in range(2):
        writer = sink.open(mark, 0)
        writer.write(changes_of(target, insert(2, id=2, name="b")))
        writer.empty(target, 3)
        writer.write(changes_of(target, insert(4, id=3, name="c")))
        sink.commit(mark, [writer.finish()])
        assert backend.rows(sink, target) == [row(3, "c")]
    assert backend.rows(sink, other) == [row(1, "kept")]


def test_text_keys_distinguish_rows(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target = table({"a": "varchar(9)", "b": "int", "n": "int"}, ("a", "b"))
    keys = [
        ("x", 1),
        ("X", 1),
        ("x ", 1),
        ("ä", 1),
        ("a", 1),
        ("", 1),
        ("\"\\'\n", 1),
        ("á", 1),
        ("ss", 1),
        ("ß", 1),
        ("日本\U0001f600", 1),
        ("x", 2),
    ]
    pipe = Pipe(sink)
    pipe.changes(target, *(insert(1, number, a=a, b=b, n=number) for number, (a, b) in enumerate(keys)))
    actual_rows = {(row["a"], row["b"]): row["n"] for row in backend.rows(sink, target)}
    assert actual_rows == {key: number for number, key in enumerate(keys)}
    pipe.changes(target, *(delete(2, number, a=a, b=b, n=number) for number, (a, b) in enumerate(keys[1:])))
    assert [(row["a"], row["b"]) for row in backend.rows(sink, target)] == [("x", 1)]


@runs_on(lambda backend: backend.MIRRORS and backend.NEEDS_KEY)
def test_table_without_primary_key_is_refused(sink: Sink, table: MakeTarget) -> None:
    with pytest.raises(OptionInvalid, match="no primary key"):
        sink.prepare(table(key=()), Evolution.EVOLVE)


@runs_on(lambda backend: backend.NOWHERE is not None)
def test_unreachable_server_is_reported_without_its_password(
    backend: SinkBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sinks.mongodb.sink._SELECT_MILLISECONDS_MAX", 100)
    sink = backend.sink_to_nowhere()
    # `check` must raise an error that the run retries. If it returned a finding, the run would end.
    with pytest.raises(ConnectionLost) as caught:
        sink.check()
    shown = f"{caught.value} {caught.value.hint}"
    assert "127.0.0.1" in shown
    assert "hunter2" not in shown + repr(sink)


@runs_on(lambda backend: backend.MIRRORS and backend.HAS_COLUMNS)
def test_planning_creates_nothing_and_a_prepared_table_needs_nothing(sink: Sink, table: MakeTarget) -> None:
    target = table()
    planned = sink.plan(target, Evolution.EVOLVE)
    assert planned
    assert sink.plan(target, Evolution.EVOLVE) == planned
    sink.prepare(target, Evolution.EVOLVE)
    assert not sink.plan(target, Evolution.EVOLVE)


def _point(x: float, y: float) -> bytes:
    return struct.pack("<I", 0) + struct.pack("<BIdd", 1, 1, x, y)


# Every type, with the bounds at which targets may differ.
TYPES: dict[str, tuple[str, list[Any]]] = {
    "tinyint": ("tinyint", [-128, 127]),
    "tinyint_unsigned": ("tinyint unsigned", [0, 255]),
    "smallint": ("smallint", [-(2**15), 2**15 - 1]),
    "smallint_unsigned": ("smallint unsigned", [0, 2**16 - 1]),
    "mediumint": ("mediumint", [-(2**23), 2**23 - 1]),
    "mediumint_unsigned": ("mediumint unsigned", [0, 2**24 - 1]),
    "int": ("int", [-(2**31), 2**31 - 1]),
    "int_unsigned": ("int unsigned", [0, 2**32 - 1]),
    "bigint": ("bigint", [-(2**63), 2**63 - 1]),
    "bigint_unsigned": ("bigint unsigned", [Decimal(0), Decimal(2**64 - 1)]),
    "bit_1": ("bit(1)", [0, 1]),
    "bit_64": ("bit(64)", [Decimal(0), Decimal(2**64 - 1)]),
    "decimal": ("decimal(10,2)", [Decimal("-99999999.99"), Decimal("0.01")]),
    "decimal_38": ("decimal(38,10)", [Decimal("-1234567890123456789012345678.0123456789"), Decimal("1.5")]),
    "decimal_65": (
        "decimal(65,30)",
        [
            "-99999999999999999999999999999999999.999999999999999999999999999999",
            "0.000000000000000000000000000001",
        ],
    ),
    "float": ("float", [0.10000000149011612, -3.4028234663852886e38]),
    "double": ("double", [0.1, -1.7976931348623157e308]),
    "year": ("year", [1901, 2155]),
    "date": ("date", [date(1900, 1, 1), date(2299, 12, 31)]),
    "time": ("time", [-3_020_399_000_000, 3_020_399_000_000]),
    "time_6": ("time(6)", [-1, 3_020_399_000_000]),
    "datetime": ("datetime", [datetime(1900, 1, 1), datetime(2299, 12, 31, 23, 59, 59)]),
    "datetime_6": (
        "datetime(6)",
        [datetime(2026, 3, 1, 1, 2, 3, 456_789), datetime(1969, 12, 31, 23, 59, 59, 999_999)],
    ),
    "timestamp": ("timestamp", [datetime(1970, 1, 1, 0, 0, 1), datetime(2038, 1, 19, 3, 14, 7)]),
    "timestamp_6": ("timestamp(6)", [datetime(2026, 3, 1, 1, 2, 3, 456_789), datetime(1970, 1, 1, 0, 0, 1)]),
    "char": ("char(10)", ["", "ä\U0001f600"]),
    "varchar": ("varchar(255)", ["tab\t line\r\n quote\"' back\\slash \\N \x01", " blanks "]),
    "text": ("text", ["x" * 60_000, ""]),
    "enum": ("enum('a','b')", ["a", "b"]),
    "set": ("set('a','b')", ["", "a,b"]),
    "json": ("json", ['{"a": [1, 2.5, null, true, "ä"], "b": {}}', "[]"]),
    "binary": ("binary(4)", [b"\x00\xff\x00\x00", b"abcd"]),
    "blob": ("blob", [bytes(range(256)), b""]),
    "geometry": ("geometry", [_point(1.5, -2.0), _point(0, 0)]),
    "vector": ("vector(3)", [[1.5, -2.0, 0.0], [0.0, 0.0, 3.0]]),
}


def test_every_type_is_read_back_unchanged(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    types = {name: values for name, values in TYPES.items() if name not in backend.LOSES}
    target = table({"id": "int"} | {name: declared for name, (declared, _) in types.items()})
    columns = [
        replace(column, charset="utf8mb4") if column.type_text == "text" else column
        for column in target.columns
    ]
    target = replace(target, columns=tuple(columns))
    values = [
        {"id": number} | {name: values[number] for name, (_, values) in types.items()} for number in range(2)
    ]
    changes = changes_of(target, insert(1, **values[0]), insert(1, 1, **values[1]), insert(1, 2, id=2))
    [receipt] = Pipe(sink).batch([changes])
    assert receipt.rows == 3
    assert not receipt.unrepresentable
    wanted = changes.rows.select(target.column_names).to_pylist()
    for actual, expected in zip(backend.rows(sink, target), wanted, strict=True):
        assert actual == expected


def test_out_of_range_value_is_reported(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target = table({"id": "int", "day": "date"})
    change = Made("insert", 1, {"id": 1}, 0, {"day": "0000-00-00"})
    [receipt] = Pipe(sink).batch([changes_of(target, [change], insert(1, 1, id=2))])
    if backend.KEEPS_UNREPRESENTABLE:
        assert not receipt.unrepresentable
        return
    assert receipt.unrepresentable == {f"{target.name}.day": 1}
    assert backend.rows(sink, target) == [{"id": 1, "day": None}, {"id": 2, "day": None}]


def test_columns_are_added_widened_and_dropped(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    pipe = Pipe(sink)
    pipe.changes(table(), insert(1, id=1, name="a"))
    more = table({"id": "int", "count": "smallint", "name": "varchar(40)"})
    if backend.HAS_COLUMNS:
        assert sink.plan(more, Evolution.EVOLVE)
    pipe.changes(more, insert(2, id=2, name="b", count=7))
    assert backend.rows(sink, more) == [
        {"id": 1, "count": None, "name": "a"},
        {"id": 2, "count": 7, "name": "b"},
    ]
    wider = table({"id": "int", "count": "bigint", "name": Column("name", "varchar(400)", "utf8mb4")})
    pipe.changes(wider, insert(3, id=3, name="c" * 400, count=2**40))
    assert backend.rows(sink, wider)[1:] == [
        {"id": 2, "count": 7, "name": "b"},
        {"id": 3, "count": 2**40, "name": "c" * 400},
    ]
    fewer = table({"id": "int", "name": Column("name", "varchar(400)", "utf8mb4")})
    pipe.changes(fewer, update(4, row(1, "a"), row(1, "x")))
    assert backend.rows(sink, fewer)[:2] == [row(1, "x"), row(2, "b")]


@runs_on(lambda backend: backend.MIRRORS and backend.LEAVES_COLUMNS_OUT)
def test_columns_that_a_table_does_not_have_are_named(sink: Sink, table: MakeTarget) -> None:
    fewer = table()
    more = table({"id": "int", "count": "smallint", "name": "varchar(40)", "place": "point"})
    assert sink.columns_missing([more]) == {}, "the table does not exist"
    sink.prepare(fewer, Evolution.EVOLVE)
    missing = sink.columns_missing([more, table(table="others")])
    assert {name: list(names) for name, names in missing.items()} == {more.name: ["count", "place"]}
    writer = sink.open(BatchMark("conformance", "1", 1), 0)
    writer.write(changes_of(more, insert(1, id=1, name="a", count=7)))
    receipt = writer.finish()
    assert {name: list(names) for name, names in receipt.columns_missing.items()} == {
        str(more.name): ["count", "place"]
    }
    sink.prepare(more, Evolution.EVOLVE)
    assert sink.columns_missing([more, fewer]) == {}
    pipe = Pipe(sink)
    pipe.number = 1
    (receipt,) = pipe.changes(more, insert(2, id=2, name="b"))
    assert not receipt.columns_missing


@runs_on(lambda backend: backend.MIRRORS and backend.HAS_COLUMNS)
def test_columns_are_only_added_if_configured(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    pipe = Pipe(sink, Evolution.ADD_ONLY)
    count, total = Column("count", "int", None, False), Column("total", "int", None, False)
    first = table({"id": "int", "count": count, "total": total, "name": "varchar(40)"})
    pipe.changes(first, insert(1, id=1, count=5, total=50, name="a"))
    more = table({"id": "int", "added": "datetime", "count": count, "total": total, "name": "varchar(40)"})
    added = datetime(2026, 1, 2, 3, 4, 5)
    pipe.changes(more, insert(2, id=2, added=added, count=6, total=60, name="b"))
    # A column that the source dropped stays in the target. It is null from then on, whether or not rows still
    # name it.
    fewer = table({"id": "int", "added": "datetime", "total": replace(total, nullable=True)})
    pipe.changes(fewer, insert(3, id=3))
    pipe.changes(fewer, update(4, {"id": 1, "total": 50}, {"id": 1, "total": 51}))
    everything = table(
        {"id": "int", "added": "datetime", "count": "int", "total": "int", "name": "varchar(40)"}
    )
    actual_rows = backend.rows(sink, everything)
    assert actual_rows[1:] == [
        {"id": 2, "added": added, "count": 6, "total": 60, "name": "b"},
        {"id": 3, "added": None, "count": None, "total": None, "name": None},
    ]
    assert (actual_rows[0]["id"], actual_rows[0]["added"], actual_rows[0]["total"]) == (1, None, 51)


@runs_on(lambda backend: backend.MIRRORS and backend.HAS_COLUMNS)
@pytest.mark.parametrize("declared", ["bigint", "double", "varchar(40)"])
def test_types_stay_if_columns_are_only_added(
    backend: SinkBackend, sink: Sink, table: MakeTarget, declared: str
) -> None:
    pipe = Pipe(sink)
    before = table({"id": "int", "count": "int"})
    pipe.changes(before, insert(1, id=1, count=5))
    after = table({"id": "int", "count": declared, "further": "int"})
    values = {"bigint": 2**40, "double": 0.5, "varchar(40)": "many"}
    try:
        sink.prepare(after, Evolution.ADD_ONLY)
    except SchemaChanged:
        # The plan did not change the target, and rows of the earlier definition are still accepted.
        assert "further" not in str(sink.plan(before, Evolution.STOP))
        pipe.changes(before, insert(2, id=2, count=6))
        assert backend.rows(sink, before) == [{"id": 1, "count": 5}, {"id": 2, "count": 6}]
        return
    # Under the policy ADD_ONLY the column keeps its type, and accepts these values unchanged.
    pipe.evolution = Evolution.ADD_ONLY
    pipe.changes(after, insert(2, id=2, count=values[declared]))
    assert backend.rows(sink, after)[1] == {"id": 2, "count": values[declared], "further": None}


@pytest.mark.parametrize("evolution", [Evolution.ADD_ONLY, Evolution.IGNORE])
def test_key_dropped_by_the_source_loses_no_rows(
    backend: SinkBackend, sink: Sink, table: MakeTarget, evolution: Evolution
) -> None:
    columns = {
        "id": Column("id", "int", None, False),
        "name": Column("name", "varchar(40)", "utf8mb4", False),
    }
    pipe = Pipe(sink)
    pipe.changes(table(columns, unique=[("name",)]), insert(1, id=1, name="a"))
    pipe.evolution = evolution
    pipe.changes(table(columns), insert(2, id=2, name="a"), insert(3, id=3, name="a"))
    assert [row["id"] for row in backend.rows(sink, table(columns))] == [1, 2, 3]


@pytest.mark.parametrize("evolution", [Evolution.ADD_ONLY, Evolution.IGNORE])
def test_rows_distinguished_by_another_key_are_not_merged(
    backend: SinkBackend, sink: Sink, table: MakeTarget, evolution: Evolution
) -> None:
    columns = {
        "id": Column("id", "int", None, False),
        "name": Column("name", "varchar(40)", "utf8mb4", False),
    }
    sink.prepare(table(columns), Evolution.EVOLVE)
    pipe, wider = Pipe(sink, evolution), table(columns, ("id", "name"))
    try:
        pipe.changes(wider, insert(1, id=1, name="a"), insert(2, id=1, name="b"))
    except SchemaChanged:
        return
    assert backend.rows(sink, wider) == [row(1, "a"), row(1, "b")]


def test_parts_of_a_batch_commit_as_one(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    target, pipe = table(), Pipe(sink)
    # A sink may require that one part holds all rows of a table.
    count = 1 if sink.spread in (Spread.TABLES, Spread.WHOLE) else 4
    parts = [
        [changes_of(target, *(insert(1, number, id=number) for number in range(part, 400, count)))]
        for part in range(count)
    ]
    receipts = pipe.batch(*parts)
    assert sum(receipt.rows for receipt in receipts) == 400
    assert [row["id"] for row in backend.rows(sink, target)] == list(range(400))


def test_full_load_in_parts_is_stored_once(backend: SinkBackend, sink: Sink, table: MakeTarget) -> None:
    """Load rows with several writers and retries; then write changes; then load from another pipeline."""
    target, pipe = table(), Pipe(sink)
    sink.prepare(target, Evolution.EVOLVE)

    def load(generation: str, version: int) -> None:
        mark = BatchMark("conformance", generation, 1, loads=True)
        receipts = []
        for part in range(2):
            rows = [insert(version, id=number, name="loaded") for number in range(part, 40, 2)]
            writer = sink.open(mark, part)
            writer.write(changes_of(target, *rows, origin=Origin.LOAD))
            receipts.append(writer.finish())
        sink.commit(mark, receipts)

    wanted = [row(number, "loaded") for number in range(40)]
    for _ in range(2):
        load("1", 5)
        assert backend.rows(sink, target) == wanted
    pipe.number = 1
    pipe.changes(target, update(6, row(0, "loaded"), row(0, "new")), delete(6, id=39, name="loaded"))
    assert backend.rows(sink, target) == [row(0, "new"), *wanted[1:39]]
    # A reset pipeline loads its tables again over the existing rows.
    load("2", 9)
    assert backend.rows(sink, target) == wanted


@runs_on(lambda backend: backend.MIRRORS and backend.kind() != "redis")
def test_target_remembers_the_pipelines_that_wrote_its_rows(sink: Sink, table: MakeTarget) -> None:
    target, other = table(), table(table="other")
    name = sink.pipeline = f"remembered-{target.name.database}"
    assert not sink.remembers(name, [target])
    for prepared in (target, other):
        sink.prepare(prepared, Evolution.EVOLVE)
    assert not sink.remembers(name, [target]), "a table without rows has nothing to lose"
    mark = BatchMark(name, "1", 1)
    writer = sink.open(mark, 0)
    writer.write(changes_of(target, insert(1, id=1, name="a")))
    sink.commit(mark, [writer.finish()])
    assert sink.remembers(name, [other, target])
    assert not sink.remembers(name, [other])
    # Neither a prefix of a pipeline name nor a pattern matches the name.
    for stranger in (name[:-1], f"{name}x", name.replace("-", "_"), "%"):
        assert not sink.remembers(stranger, [target])
