# SPDX-License-Identifier: Apache-2.0
"""Debezium's and Maxwell's messages of every column type, compared with the server's own client."""

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pytest

import penstock
from penstock._native import shard_slots
from penstock.binlog import load_schemas
from penstock.errors import OptionInvalid
from penstock.model import TablePatterns
from penstock.source.reading import Selection, read_range
from penstock.source.source import ByteRange, SourceOptions, open_source
from tests.support.binlog.decoding import run_logged
from tests.support.binlog.type_corpus import (
    CASES,
    DOCUMENTS,
    OF_MARIADB,
    Case,
    CorpusOf,
    TypeTable,
    on_each,
)
from tests.support.messages import json_expectations as expected
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

INSERT, UPDATE, DELETE, STATEMENT, END = 0, 1, 2, 3, 5
DIFFERENCES_SHOWN_MAX = 8
# Arrow does not know how many fractional digits a column declares, so values of these types may get a
# different slot.
SLOTS_DIFFER = ("time", "datetime", "timestamp")


class Message(NamedTuple):
    """One message and its metadata."""

    kind: int
    table: str
    slot: int
    rows: int
    value: bytes
    end_offset: int | None

    @property
    def content(self) -> dict[str, Any]:
        assert self.value.endswith(b"}\n")
        assert self.value.count(b"\n") == 1
        told: dict[str, Any] = json.loads(self.value)
        return told


def read(
    file: Path,
    dialect: str,
    tables: str | None = None,
    schemas: Any = None,
    shard_columns: Sequence[str] | None = None,
    **options: Any,
) -> list[Message]:
    """Return every message of a file."""
    patterns = TablePatterns(tables, None)
    pairs = () if shard_columns is None else (("*.*", tuple(shard_columns)),)
    selection = Selection(patterns, shard_columns=pairs)
    source = open_source(SourceOptions.parse(str(file), instance="shop"))
    whole = ByteRange(0, file.name, 4, None, aligned=True)
    batches = read_range(
        source, whole, selection, load_schemas(schemas), emit="messages", dialect=dialect, **options
    )
    return [message for batch in batches for message in messages_of(batch.to_arrow())]


def read_table(table: TypeTable, dialect: str, **options: Any) -> list[Message]:
    """Return the messages of the rows of a type corpus."""
    return read(table.file, dialect, table.name, table.schemas, **options)


def messages_of(batch: pyarrow.RecordBatch) -> Iterator[Message]:
    names = ("kind", "table", "slot", "rows", "value", "end_offset")
    for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
        yield Message(*row)


def rows_of(messages: Sequence[Message]) -> list[Message]:
    return [message for message in messages if message.kind in (INSERT, UPDATE, DELETE)]


# --- Every type ------------------------------------------------------------------------------

MATRIX = {**CASES, "documents": DOCUMENTS["documents"]}
# All versions of MariaDB produce the same messages.
MESSAGE_FLAVORS = ("mysql", "mariadb11")


def is_same(actual: Any, wanted: Any, type_text: str) -> bool:
    name = expected.name_of(type_text)
    if actual is None or wanted is None:
        return actual is wanted
    if name == "float":
        return struct.pack("<f", actual) == struct.pack("<f", wanted)
    if name == "double":
        return struct.pack("<d", actual) == struct.pack("<d", wanted)
    if name == "vector":
        return struct.pack(f"<{len(actual)}f", *actual) == struct.pack(f"<{len(wanted)}f", *wanted)
    return type(actual) is type(wanted) and bool(actual == wanted)


def differences(
    case: Case,
    rows: Sequence[dict[str, Any]],
    texts: Sequence[Sequence[str | None]],
    tell: Callable[..., Any],
) -> Iterator[str]:
    assert len(rows) == len(texts)
    for row, shown in zip(rows, texts, strict=True):
        for number, (type_text, text) in enumerate(zip(case.types, shown, strict=True)):
            wanted = tell(text, type_text)
            if not is_same(row[f"c{number}"], wanted, type_text):
                yield f"{type_text}: {row[f'c{number}']!r}, expected {wanted!r} of {text!r}"


def check(differ: Iterator[str]) -> None:
    lines = list(differ)
    assert not lines, "\n".join([f"{len(lines)} differ", *lines[:DIFFERENCES_SHOWN_MAX]])


@on_each(MATRIX, MESSAGE_FLAVORS)
def test_every_value_equals_its_dialects_form_of_the_clients_text(
    type_corpus: CorpusOf, flavor: str, name: str
) -> None:
    table = type_corpus(flavor).table(name)
    case, texts = table.case, [list(row) for row in table.texts]

    debezium = [message.content for message in rows_of(read_table(table, "debezium"))]
    check(differences(case, [message["after"] for message in debezium], texts, expected.debezium))

    spatial = [number for number, kind in enumerate(case.types) if kind in expected.GEOMETRIES]
    # MySQL prints latitudes first if it knows the reference system; the log holds the stored order.
    axes = ", 'axis-order=long-lat'" if flavor == "mysql" else ""
    for number in spatial:
        shown = table.server.sql(f"SELECT st_astext(c{number}{axes}) FROM {table.name} ORDER BY id")
        for row, (text,) in zip(texts, shown, strict=True):
            row[number] = None if text is None else expected.plain_wkt(text)
    rows = [
        json.loads(message.value, parse_float=number_of(case))
        for message in rows_of(read_table(table, "maxwell"))
    ]
    for whole_row in rows:
        for number in spatial:
            if whole_row["data"][f"c{number}"] is not None:
                whole_row["data"][f"c{number}"] = expected.plain_wkt(whole_row["data"][f"c{number}"])
    check(differences(case, [row["data"] for row in rows], texts, expected.maxwell))

    with_schema = rows_of(read_table(table, "debezium_schema"))
    if name not in OF_MARIADB:
        # With full metadata, the log alone is enough, even to tell the type of a geometry column.
        assert rows_of(read(table.file, "debezium_schema", table.name)) == with_schema
    wrapped = [message.content for message in with_schema]
    assert [message["payload"] for message in wrapped] == debezium
    check_schema(case, wrapped[0]["schema"])
    check_slots(table)


def number_of(case: Case) -> Callable[[str], Any]:
    return Decimal if any(kind.startswith("decimal") for kind in case.types) else float


def check_schema(case: Case, schema: dict[str, Any]) -> None:
    names = ["before", "after", "source", "transaction", "op", "ts_ms", "ts_us", "ts_ns"]
    assert [field["field"] for field in schema["fields"]] == names
    for side in schema["fields"][:2]:
        for number, (field, type_text) in enumerate(zip(side["fields"][1:], case.types, strict=True)):
            assert field["field"] == f"c{number}"
            assert (field["type"], field.get("name")) == expected.meaning(type_text), type_text
            assert field["optional"] is ("not null" not in type_text)


def check_slots(table: TypeTable) -> None:
    """Use each column in turn as shard column: raw rows and Arrow columns must give the same slots."""
    read_batches = penstock.read_binlog(str(table.file), table.name, schemas=table.schemas)
    batches = [batch.to_arrow() for batch in read_batches]
    if any(value for batch in batches for value in batch["_metadata"].field("unrepresentable").to_pylist()):
        return
    for number, type_text in enumerate(table.case.types):
        if expected.name_of(type_text) in (*SLOTS_DIFFER, "vector"):
            continue
        key = [f"c{number}"]
        messages = rows_of(read_table(table, "debezium", shard_columns=key))
        slots = [
            slot
            for batch in batches
            for slot in pyarrow.array(shard_slots(batch, key, table.name)).to_pylist()
        ]
        assert [message.slot for message in messages] == slots, type_text


# --- The messages around the values ----------------------------------------------------------

CHANGES = (
    "INSERT INTO t VALUES (1, 'a', 1), (2, 'b', NULL)",
    "UPDATE t SET name = 'c' WHERE id = 1",
    "UPDATE t SET id = 9 WHERE id = 2",
    "DELETE FROM t WHERE id = 9",
)


@pytest.fixture
def changed(server: Server, fresh_database: FreshDatabase) -> tuple[str, Path]:
    """A table with a few changes; the last three share a transaction."""
    database = fresh_database(server)
    insert, *rest = CHANGES
    create = "CREATE TABLE t (id INT PRIMARY KEY, name VARCHAR(20) NOT NULL, n INT)"
    return database, run_logged(server, create, insert, "BEGIN", *rest, "COMMIT", database=database)


def test_debezium_reports_each_change_with_its_position(changed: tuple[str, Path], server: Server) -> None:
    database, file = changed
    messages = read(file, "debezium", f"{database}.*")
    rows = rows_of(messages)
    first, two = {"id": 1, "name": "a", "n": 1}, {"id": 2, "name": "b", "n": None}
    moved = {**two, "id": 9}
    assert [
        (told["op"], told["before"], told["after"]) for told in (message.content for message in rows)
    ] == [
        ("c", None, first),
        ("c", None, two),
        ("u", first, {**first, "name": "c"}),
        # A row with another key is a different row.
        ("d", two, None),
        ("c", None, moved),
        ("d", moved, None),
    ]
    assert [message.rows for message in rows] == [1, 1, 1, 0, 1, 1]
    assert [message.slot for message in rows] == [962, 963, 962, 963, 970, 970]
    assert {message.table for message in rows} == {f"{database}.t"}
    source = rows[1].content["source"]
    assert (source["name"], source["db"], source["table"], source["row"]) == ("shop", database, "t", 1)
    assert (source["file"], source["snapshot"], source["connector"]) == (file.name, "false", "mysql")
    ((server_id,),) = server.sql("SELECT @@server_id")
    assert source["server_id"] == server_id
    assert source["ts_ms"] * 1_000_000 == source["ts_ns"] // 1_000_000 * 1_000_000
    assert file.stat().st_size > source["pos"] > 4
    assert all(message.content["transaction"] is None for message in rows)
    ends = [message for message in messages if message.kind == END]
    assert [(message.value, message.slot) for message in ends] == [(b"", -1)] * 2
    assert all(message.end_offset for message in ends)


def shape(fields: Any) -> Any:
    """Return the names in a message in order; the names in a row are the columns of its table."""
    if not isinstance(fields, dict):
        return None
    of_table = ("before", "after", "data", "old", "mysqlType", "sqlType")
    return {name: name in of_table or shape(value) for name, value in fields.items()}


@pytest.mark.parametrize("dialect", ["debezium", "maxwell", "canal_flat"])
def test_page_shows_the_messages_as_produced(changed: tuple[str, Path], dialect: str) -> None:
    page = (Path(__file__).parents[2] / "docs/formats/messages.md").read_text()
    blocks = [block for block in page.split("\n\n") if block.startswith('    {"')]
    database, file = changed
    (update, *_) = [message for message in read(file, dialect, f"{database}.t") if message.kind == UPDATE]
    actual = update.content
    examples = [json.loads(block) for block in blocks]
    first = next(iter(actual))
    # Penstock's own dialect starts with the fields of Maxwell's.
    alike = [example for example in examples if next(iter(example)) == first]
    example = max(alike, key=lambda candidate: len(candidate.keys() & actual.keys()))
    optional = {"gtid", "thread_id"} if dialect == "maxwell" else set()
    wanted = {
        name: inside for name, inside in shape(example).items() if name in actual or name not in optional
    }
    assert list(shape(actual).items()) == list(wanted.items())


def test_debezium_reports_definitions(changed: tuple[str, Path]) -> None:
    database, file = changed
    (created,) = [message for message in read(file, "debezium", f"{database}.*") if message.kind == STATEMENT]
    assert created.content["ddl"].startswith("CREATE TABLE t")
    assert (created.content["databaseName"], created.slot) == (database, -1)
    assert created.end_offset is not None
    wrapped = [
        message for message in read(file, "debezium_schema", f"{database}.*") if message.kind == STATEMENT
    ]
    assert [message.content["payload"] for message in wrapped] == [created.content]


def test_maxwell_reports_each_change_with_its_transaction(changed: tuple[str, Path], server: Server) -> None:
    database, file = changed
    rows = [message.content for message in rows_of(read(file, "maxwell", f"{database}.*"))]
    this_first, two = {"id": 1, "name": "a", "n": 1}, {"id": 2, "name": "b", "n": None}
    moved = {**two, "id": 9}
    assert [(row["type"], row["data"], row.get("old")) for row in rows] == [
        ("insert", this_first, None),
        ("insert", two, None),
        ("update", {**this_first, "name": "c"}, {"name": "a"}),
        ("update", moved, {"id": 2}),
        ("delete", moved, None),
    ]
    assert [row.get("commit") for row in rows] == [None, True, None, None, True]
    assert [row.get("xoffset") for row in rows] == [0, None, 0, 1, None]
    first, second = {row["xid"] for row in rows[:2]}, {row["xid"] for row in rows[2:]}
    assert len(first) == len(second) == 1
    assert first != second
    assert {(row["database"], row["table"]) for row in rows} == {(database, "t")}
    events = [
        row
        for batch in penstock.read_binlog(str(file), emit="events")
        for row in batch.to_arrow().to_pylist()
    ]
    places = {f"{row['file']}:{row['offset']}": row for row in events if row["table"] == "t" and row["rows"]}
    assert {row["position"] for row in rows} == set(places)
    assert all(row["ts"] == places[row["position"]]["timestamp"].timestamp() for row in rows)
    assert all(row["gtid"] == places[row["position"]]["gtid"] for row in rows if "gtid" in row)


def test_maxwell_reports_table_definitions(changed: tuple[str, Path]) -> None:
    database, file = changed
    (created,) = [
        message.content for message in read(file, "maxwell", f"{database}.*") if message.kind == STATEMENT
    ]
    assert (created["type"], created["database"], created["table"]) == ("table-create", database, "t")
    assert created["sql"].startswith("CREATE TABLE t")


def test_transaction_larger_than_memory_leaves_maxwells_first_rows_without_a_number(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, pad VARCHAR(200))")
    inserts = [f"INSERT INTO t VALUES ({number}, repeat('x', 200))" for number in range(10)]
    file = run_logged(mysql_server, "BEGIN", *inserts, "COMMIT", database=database)
    rows = [
        message.content for message in rows_of(read(file, "maxwell", f"{database}.t", held_bytes_max=700))
    ]
    assert [row["data"]["id"] for row in rows] == list(range(10))
    numbered = [row for row in rows if "xid" in row]
    # The last row is always kept until the end of the transaction, whatever the memory bound.
    assert 0 < len(numbered) < 10
    assert rows[-len(numbered) :] == numbered
    assert [message.get("xoffset") for message in numbered] == [*range(10 - len(numbered), 9), None]
    assert [row for row in rows if row.get("commit")] == [rows[-1]]


def test_partially_logged_rows_include_only_their_columns(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, a INT, b INT)")
    file = run_logged(
        mysql_server,
        "SET binlog_row_image = MINIMAL",
        "INSERT INTO t VALUES (1, 2, 3)",
        "UPDATE t SET a = 5 WHERE id = 1",
        database=database,
    )
    _, updated = [message.content for message in rows_of(read(file, "debezium", f"{database}.t"))]
    assert (updated["before"], updated["after"]) == ({"id": 1}, {"a": 5})
    _, updated = [message.content for message in rows_of(read(file, "maxwell", f"{database}.t"))]
    assert updated["data"] == {"a": 5, "id": 1}
    assert "old" not in updated


def test_invalid_text_and_dates_do_not_stop_the_stream(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    table = f"{fresh_database(mysql_server)}.t"
    columns = (
        "id INT PRIMARY KEY, d DATE NOT NULL, t DATETIME NOT NULL, s TIMESTAMP(3) NOT NULL, x VARBINARY(9)"
    )
    with mysql_server.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'")
        cursor.execute(f"CREATE TABLE {table} ({columns})")
        cursor.execute("FLUSH BINARY LOGS")
        zero = "0000-00-00"
        cursor.execute(f"INSERT INTO {table} VALUES (1, '{zero}', '{zero}', '{zero}', x'61e462c3a4')")
    file = mysql_server.binlog_files()[-1]
    # The bytes are decoded as text, as if the column's character set were set incorrectly.
    schemas = {table: {"id": "int", "d": "date", "t": "datetime", "s": "timestamp(3)", "x": "varchar(9)"}}
    (debezium,) = [message.content["after"] for message in rows_of(read(file, "debezium", table, schemas))]
    assert debezium == {"id": 1, "d": 0, "t": 0, "s": "1970-01-01T00:00:00Z", "x": "YeRiw6Q="}
    (maxwell,) = [message.content["data"] for message in rows_of(read(file, "maxwell", table, schemas))]
    assert (maxwell["d"], maxwell["t"]) == (zero, f"{zero} 00:00:00")
    assert maxwell["s"] == f"{zero} 00:00:00.000"


def test_composite_keys_have_the_same_slots_everywhere(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    columns = (
        "a INT, b VARCHAR(9), c YEAR, d DECIMAL(9,2), e BIT(9), f BIGINT UNSIGNED, g VARBINARY(3), h DATE"
    )
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, {columns}, i DATETIME)")
    file = run_logged(
        server,
        "INSERT INTO t VALUES (1, -5, 'ü', 0, -0.50, 300, 18446744073709551615, x'ff00', '2024-02-29',"
        " '2024-02-29 01:02:03'), (2, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)",
        "UPDATE t SET b = '€' WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        database=database,
    )
    table = f"{database}.t"
    # The columns are listed in a different order than in the table; the order of the list is used.
    key = list("ihgfedcba")
    rows = penstock.read_binlog(str(file), table, changes=["insert", "update_postimage", "delete"])
    slots = [slot for batch in rows for slot in pyarrow.array(shard_slots(batch, key, table)).to_pylist()]
    actual_rows = [message.slot for message in rows_of(read(file, "maxwell", table, shard_columns=key))]
    assert actual_rows == slots
    assert len(set(actual_rows)) == 3


def test_invalid_key_of_arrow_rows_is_refused() -> None:
    batch = pyarrow.record_batch({"id": [1, 2], "flags": [[1], [2]], "name": ["a", None]})
    assert pyarrow.array(shard_slots(batch, ["id"])).to_pylist() == [962, 963]
    assert pyarrow.array(shard_slots(batch, ["name"])).to_pylist()[1] == 961
    assert len(set(pyarrow.array(shard_slots(batch, [], "shop.orders")).to_pylist())) == 1
    for column in ("flags", "missing"):
        with pytest.raises(OptionInvalid, match=column):
            shard_slots(batch, [column])
    with pytest.raises(OptionInvalid, match=r"`missing` is not among the columns of shop\.orders"):
        shard_slots(batch, ["missing"], "shop.orders")
