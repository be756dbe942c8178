# SPDX-License-Identifier: Apache-2.0
"""Loaded values equal logged values bit by bit: every type and charset, on every server."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow
import pymysql
import pytest

import penstock
from penstock.changes import SYSTEM_COLUMNS, Changes, Origin, Target
from penstock.errors import SchemaChanged
from penstock.model import Column, ServerAddress, TablePatterns, TableSchema
from penstock.pipeline.load.chunks import Chunk, hold_order, is_reordered, plan_chunks
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.session import open_session
from penstock.pipeline.load.targets import targets_of
from tests.support.binlog.type_corpus import CASES, DOCUMENTS, NUMBERS, Case, CorpusOf, TypeTable, on_each
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

# The server reports which of these characters each character set can encode.
TEXT = "Az ~ äöü€ łčé Привет Ελλ שלום سلام ไทย 資料庫 数据 テーブル ｱ 데이터 😀"


def load(server: Server, table: str, **options: Any) -> tuple[Target, list[Changes]]:
    """Load a table in its chunks."""
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(table))
    return target, [
        changes
        for chunk in plan_chunks(address, target)
        for changes in read_chunk(address, target, chunk, instance="test", **options)
    ]


def bits(column: pyarrow.Array) -> pyarrow.Array:
    """Return floats as the integers of their bits, so that minus zero differs from zero."""
    if pyarrow.types.is_float32(column.type):
        return column.view(pyarrow.int32())
    return column.view(pyarrow.int64()) if pyarrow.types.is_float64(column.type) else column


def by_id(batches: Sequence[pyarrow.RecordBatch]) -> pyarrow.Table:
    return pyarrow.Table.from_batches(batches).sort_by("id").combine_chunks()


def differences(read: pyarrow.Table, logged: pyarrow.Table) -> Iterator[str]:
    own = [name for name in logged.schema.names if name not in SYSTEM_COLUMNS]
    assert read.num_rows == logged.num_rows > 0
    assert read.schema.equals(logged.schema, check_metadata=False)
    for name in own:
        left, right = (bits(left.column(name).chunk(0)) for left in (read, logged))
        if not left.equals(right):
            yield f"{name}: {left.to_pylist()} is read, {right.to_pylist()} logged"
    for table, other in zip(read["_metadata"].to_pylist(), logged["_metadata"].to_pylist(), strict=True):
        if table["unrepresentable"] != other["unrepresentable"]:
            yield f"{table['unrepresentable']} is told, {other['unrepresentable']} logged"


@on_each({**CASES, **DOCUMENTS, **NUMBERS})
def test_loaded_value_equals_the_logged_value(type_corpus: CorpusOf, flavor: str, name: str) -> None:
    assert_loaded_equals_logged(type_corpus(flavor).table(name))


def assert_loaded_equals_logged(table: TypeTable) -> pyarrow.Table:
    """Assert that a load of a table equals its log, and return the loaded rows."""
    target, changes = load(table.server, table.name)
    logged = penstock.read_binlog(str(table.file), table.name, schemas=_described(target))
    read = by_id([change.rows for change in changes])
    differing = list(differences(read, by_id([batch.to_arrow() for batch in logged])))
    assert not differing, "\n".join(differing)
    return read


def _described(target: Target) -> Mapping[str, Any]:
    schema = TableSchema(target.name.database, target.name.table, target.columns, target.primary_key)
    return {str(target.name): schema}


def _letters(server: Server, charset: str) -> str:
    """Return the letters of a character set."""
    marks = " UNION ALL ".join(
        f"SELECT {at}, CONVERT(CONVERT(_utf8mb4 x'{letter.encode().hex()}' USING {charset}) USING utf8mb4)"
        for at, letter in enumerate(TEXT)
    )
    shown = {int(n): text for n, text in server.sql(marks)}
    return "".join(letter for at, letter in enumerate(TEXT) if shown[at] == letter)


def test_loaded_text_equals_the_logged_text_in_every_charset(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    rows = server.sql(
        "SELECT CHARACTER_SET_NAME FROM information_schema.CHARACTER_SETS"
        " WHERE CHARACTER_SET_NAME <> 'binary'"
    )
    charsets = sorted(str(charset) for (charset,) in rows)
    assert len(charsets) > 35
    for group in _groups(charsets, 10):
        texts = {charset: _letters(server, charset) for charset in group}
        case = Case(
            [type_ for charset in group for type_ in _types(charset, texts[charset])],
            [
                [value for text in texts.values() for value in _values(text, text.split()[0])],
                [value for text in texts.values() for value in _values(f"{text} ", "x")],
            ],
        )
        server.sql(f"DROP TABLE IF EXISTS {database}.matrix")
        read = assert_loaded_equals_logged(TypeTable(server, database, case))
        assert [read[f"c{at * 5 + 1}"][0].as_py() for at in range(len(group))] == list(texts.values())


def _types(charset: str, text: str) -> list[str]:
    first = text.split()[0]
    types = ["char(60)", "varchar(60)", "text", f"enum('{first}','x')", f"set('{first}','x')"]
    return [f"{type_} character set {charset}" for type_ in types]


def _values(text: str, member: str) -> list[str]:
    return [f"'{text}'"] * 3 + [f"'{member}'"] * 2


def _groups(values: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


def test_rows_are_marked_as_loaded_and_have_the_log_position(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, v INT)")
    server.sql("FLUSH BINARY LOGS")
    start = f"{server.binlog_files()[-1].name}:4"
    server.sql(f"INSERT INTO {database}.t VALUES (1, 10), (2, NULL)")
    target, changes = load(server, f"{database}.t")
    (rows,) = [change.rows.to_pylist() for change in changes]
    assert [(row["id"], row["v"], row["_change_type"], row["_metadata"]["row"]) for row in rows] == [
        (1, 10, "insert", 0),
        (2, None, "insert", 1),
    ]
    assert changes[0].origin is Origin.LOAD
    assert changes[0].source == changes[0].target.name == target.name
    ((server_id,),) = server.sql("SELECT @@server_id")
    metadata = rows[0]["_metadata"]
    assert (metadata["instance"], metadata["table"], metadata["server_id"]) == ("test", "t", server_id)
    logged = list(penstock.read_binlog(server.url(), f"{database}.t", start=start))
    versions = [row["_commit_version"] for batch in logged for row in batch.to_arrow().to_pylist()]
    assert max(versions) < rows[0]["_commit_version"]
    server.sql(f"UPDATE {database}.t SET v = 11 WHERE id = 1")
    logged = list(penstock.read_binlog(server.url(), f"{database}.t", start=start))
    versions = [row["_commit_version"] for batch in logged for row in batch.to_arrow().to_pylist()]
    assert max(versions) > rows[0]["_commit_version"]


def test_invisible_columns_are_read(
    mysql_server: Server, mariadb11_server: Server, fresh_database: FreshDatabase
) -> None:
    for server in (mysql_server, mariadb11_server):
        database = fresh_database(server)
        server.sql(
            f"CREATE TABLE {database}.t (id INT PRIMARY KEY, hidden INT INVISIBLE DEFAULT 5,"
            " doubled INT AS (id * 2) VIRTUAL, kept INT AS (id * 3) STORED, long_text TEXT"
            f"{', UNIQUE (long_text)' if server is mariadb11_server else ''})"
        )
        server.sql(f"INSERT INTO {database}.t (id, long_text) VALUES (1, 'x')")
        target, changes = load(server, f"{database}.t")
        assert target.column_names == ("id", "hidden", "doubled", "kept", "long_text")
        (row,) = changes[0].rows.to_pylist()
        assert (row["hidden"], row["doubled"], row["kept"], row["long_text"]) == (5, 2, 3, "x")


@pytest.mark.parametrize(
    "altered", ["DROP COLUMN v", "CONVERT TO CHARACTER SET utf8mb4", "MODIFY v DATETIME"]
)
def test_altered_table_stops_the_read(server: Server, fresh_database: FreshDatabase, altered: str) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, v VARCHAR(20) CHARACTER SET latin1)")
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    (chunk,) = plan_chunks(address, target)
    server.sql(f"INSERT INTO {database}.t VALUES (1, '2020-01-01')")
    server.sql(f"ALTER TABLE {database}.t {altered}")
    with pytest.raises(SchemaChanged):
        list(read_chunk(address, target, chunk, instance="test"))


@pytest.mark.parametrize(
    ("altered", "is_other"),
    [
        ("MODIFY id VARCHAR(20) CHARACTER SET latin1 COLLATE latin1_bin NOT NULL", True),
        ("MODIFY id VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL", True),
        ("MODIFY id VARBINARY(20) NOT NULL", True),
        ("DROP PRIMARY KEY, ADD PRIMARY KEY (v, id)", True),
        ("DROP PRIMARY KEY", True),
        ("RENAME TO gone", True),
        ("MODIFY id VARCHAR(30) CHARACTER SET latin1 NOT NULL", False),
        ("ADD UNIQUE KEY (v)", False),
    ],
)
def test_rows_in_another_order_stop_the_read(
    server: Server, fresh_database: FreshDatabase, altered: str, is_other: bool
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id VARCHAR(20) PRIMARY KEY, v INT NOT NULL) CHARSET latin1")
    server.sql(f"INSERT INTO {database}.t VALUES ('a', 1), ('B', 2), ('c', 3)")
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    chunk, *_ = plan_chunks(address, target, rows=1)
    chunk = Chunk.from_json(json.loads(json.dumps(chunk.to_json())))
    server.sql(f"ALTER TABLE {database}.t {altered}", database=database)
    assert is_reordered(address, chunk) == is_other
    if not is_other:
        assert sum(map(len, read_chunk(address, target, chunk, instance="test")))
        return
    with pytest.raises(SchemaChanged, match="ordered by"):
        list(read_chunk(address, target, chunk, instance="test"))


@pytest.mark.deep(guard="tests/integration/test_load_values.py::test_rows_in_another_order_stop_the_read")
def test_table_keeps_its_definition_while_a_chunk_is_read(
    server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id VARCHAR(20) PRIMARY KEY) CHARSET latin1")
    address = ServerAddress.parse(server.url())
    (target,) = targets_of(address, TablePatterns(f"{database}.t"))
    (chunk,) = plan_chunks(address, target)
    alter = f"ALTER TABLE {database}.t CONVERT TO CHARACTER SET utf8mb4"
    with open_session(address) as session:
        hold_order(session, chunk)
        with pytest.raises(pymysql.err.OperationalError, match="Lock wait timeout"):
            server.sql(f"SET SESSION lock_wait_timeout = 1; {alter}")
    server.sql(alter)


def test_columns_can_be_excluded(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(f"CREATE TABLE {database}.t (a INT, id INT PRIMARY KEY, v INT)")
    mysql_server.sql(f"INSERT INTO {database}.t VALUES (1, 2, 3), (4, 5, 6)")
    _, (changes,) = load(mysql_server, f"{database}.t", columns=["v"], where="a > 1")
    assert changes.target.columns == (Column("v", "int"),)
    assert changes.rows.schema.names == ["v", *SYSTEM_COLUMNS]
    assert changes.rows.column("v").to_pylist() == [6]
