# SPDX-License-Identifier: Apache-2.0
"""Messages made from Arrow rows equal those from the raw log, for every type and dialect."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock import _native
from penstock.binlog import load_schemas
from penstock.errors import EventUnsupported, OptionInvalid, SchemaInvalid
from penstock.model import TablePatterns, TableSchema
from penstock.source.reading import Batch, Selection, read_range
from penstock.source.source import ByteRange, SourceOptions, open_source
from tests.integration.test_messages_json import MATRIX, MESSAGE_FLAVORS, read, rows_of
from tests.support.binlog.decoding import run_logged
from tests.support.binlog.type_corpus import TypeTable, definition, on_each
from tests.support.canal.client import PROTO
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

JSON_DIALECTS = ("debezium", "debezium_schema", "maxwell", "canal_flat", "json")
# Fields that only messages made from events contain: the number and the end of a transaction, the second in
# which a statement began, and the index of a change within its event. (In messages made from Arrow data, the
# index counts within the transaction.)
OF_EVENTS = {
    "debezium": re.compile(rb'"row":\d+,'),
    "debezium_schema": re.compile(rb'"row":\d+,'),
    "maxwell": re.compile(rb',"(?:xid|xoffset|ts)":\d+|,"commit":true'),
    "canal_flat": re.compile(rb',"es":\d+'),
}
DIFFERENCES_SHOWN_MAX = 3


def typed(file: Path, tables: str, schemas: Any = None) -> list[Batch]:
    """Return the typed rows of a file, with the instance name that `read` uses."""
    source = open_source(SourceOptions.parse(str(file), instance="shop"))
    selection = Selection(TablePatterns(tables, None))
    whole = ByteRange(0, file.name, 4, None, aligned=True)
    return list(read_range(source, whole, selection, load_schemas(schemas)))


def convert(
    batch: Batch, schema: TableSchema, dialect: str, rows_max: int | None = None, **options: Any
) -> pyarrow.RecordBatch:
    """Return the messages of a batch of typed rows, or of its first rows."""
    database, _, table = batch.table.partition(".")
    columns = [(column.name, column.type_text, column.charset, column.nullable) for column in schema.columns]
    named = {"database": database, "table": table, "primary_key": list(schema.primary_key), "key": []}
    rows = batch if rows_max is None else batch.to_arrow().slice(0, rows_max)
    return pyarrow.record_batch(_native.encode_changes(rows, columns, dialect=dialect, **(named | options)))


def without_events(dialect: str, value: bytes) -> bytes:
    """Return a message without the fields that only events contain."""
    told_by_events = OF_EVENTS.get(dialect)
    return value if told_by_events is None else told_by_events.sub(b"", value)


def entries(packet: bytes) -> Iterator[Any]:
    """Return the entries of one Canal packet, without the fields that only events contain."""
    opened = PROTO["Packet"].FromString(packet)
    assert opened.type == 7
    for data in PROTO["Messages"].FromString(opened.body).messages:
        yield from of_entry(data)


def of_entry(data: bytes) -> Iterator[Any]:
    entry = PROTO["Entry"].FromString(data)
    change = PROTO["RowChange"].FromString(entry.storeValue)
    entry.storeValue = b""
    for field in ("executeTime", "eventLength"):
        entry.header.ClearField(field)
    kept = [pair for pair in entry.header.props if pair.key not in ("curtGtidSn", "curtGtidLct")]
    del entry.header.props[:]
    entry.header.props.extend(kept)
    change.ClearField("tableId")
    yield str(entry), str(change)


def declared(server: Server, table: str) -> dict[str, TableSchema]:
    """Return the table as information_schema describes it, with nullability and key."""
    definition_read = definition(server, table)[table]
    nullable = dict(
        server.sql(
            "SELECT column_name, is_nullable FROM information_schema.columns"
            " WHERE concat(table_schema, '.', table_name) = %s",
            table,
        )
    )
    columns = tuple(
        replace(column, nullable=nullable[column.name] == "YES") for column in definition_read.columns
    )
    return {table: replace(definition_read, columns=columns, primary_key=("id",))}


def change(table: TypeTable) -> Path:
    """Give each row the values of the next row, change some keys, and delete some rows; return the log."""
    name = table.name
    copied = ", ".join(f"a.c{number} = b.c{number}" for number in range(len(table.case.types)))
    return run_logged(
        table.server,
        "SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'",
        f"UPDATE {name} a JOIN {name} b ON b.id = a.id + 1 SET {copied}",
        f"UPDATE {name} SET id = id + 10000 WHERE id % 3 = 0",
        f"DELETE FROM {name} WHERE id % 2 = 0",
    )


def check(actual: list[Any], wanted: list[Any]) -> None:
    assert len(actual) == len(wanted)
    pairs = [(got, other) for got, other in zip(actual, wanted, strict=True) if got != other]
    assert not pairs, "\n\n".join(f"{got!r}\n{other!r}" for got, other in pairs[:DIFFERENCES_SHOWN_MAX])


@on_each(MATRIX, MESSAGE_FLAVORS)
def test_every_value_equals_that_of_the_raw_log(
    server_of: Callable[[str], Server], fresh_database: FreshDatabase, flavor: str, name: str
) -> None:
    server = server_of(flavor)
    table = TypeTable(server, fresh_database(server), MATRIX[name])
    schemas = declared(server, table.name)
    for file in (table.file, change(table)):
        assert_converted_equals_raw(file, table.name, schemas)


def assert_converted_equals_raw(file: Path, table: str, schemas: dict[str, TableSchema]) -> None:
    batches = typed(file, table, schemas)
    for dialect in JSON_DIALECTS:
        wanted = rows_of(read(file, dialect, table, schemas, message_per_row=True))
        actual_rows = [
            value
            for batch in batches
            for value in convert(batch, schemas[table], dialect, lines=True)["value"].to_pylist()
        ]
        check(
            [without_events(dialect, value) for value in actual_rows],
            [without_events(dialect, message.value) for message in wanted],
        )
    packets = [
        value for batch in batches for value in convert(batch, schemas[table], "canal")["value"].to_pylist()
    ]
    messages = rows_of(read(file, "canal", table, schemas, message_per_row=True))
    framed = [data for message in messages for data in PROTO["Messages"].FromString(message.value).messages]
    check(
        [entry for packet in packets for entry in entries(packet)],
        [entry for data in framed for entry in of_entry(data)],
    )


# --- The message around the values -------------------------------------------------------------


@pytest.fixture
def minimal(mysql_server: Server, fresh_database: FreshDatabase) -> tuple[str, Batch, TableSchema]:
    """Make changes with minimal row images."""
    database = fresh_database(mysql_server)
    file = run_logged(
        mysql_server,
        "CREATE TABLE t (id INT PRIMARY KEY, day DATE, name VARCHAR(20))",
        "SET binlog_row_image = 'MINIMAL', sql_mode = ''",
        "INSERT INTO t VALUES (1, '0000-00-00', 'a'), (2, '2024-02-29', 'b')",
        "UPDATE t SET name = 'c' WHERE id = 1",
        "UPDATE t SET id = 9 WHERE id = 2",
        "DELETE FROM t WHERE id = 9",
        database=database,
    )
    table = f"{database}.t"
    (batch,) = typed(file, table)
    return table, batch, declared(mysql_server, table)[table]


def messages_of(batch: Batch, schema: TableSchema, dialect: str, **options: Any) -> list[Any]:
    return [json.loads(value) for value in convert(batch, schema, dialect, **options)["value"].to_pylist()]


def test_columns_absent_from_an_image_are_omitted(minimal: tuple[str, Batch, TableSchema]) -> None:
    _, batch, schema = minimal
    images = [
        (message["change"], message["before"], message["after"])
        for message in messages_of(batch, schema, "json")
    ]
    assert images == [
        ("insert", None, {"id": 1, "day": "0000-00-00", "name": "a"}),
        ("insert", None, {"id": 2, "day": "2024-02-29", "name": "b"}),
        ("update", {"id": 1}, {"name": "c"}),
        # A row with another key is a different row.
        ("delete", {"id": 2}, None),
        ("insert", None, {"id": 9}),
        ("delete", {"id": 9}, None),
    ]


def test_keys_follow_each_dialect(minimal: tuple[str, Batch, TableSchema]) -> None:
    table, batch, schema = minimal

    def keys(dialect: str, *columns: str) -> list[Any]:
        actual_rows = convert(batch, schema, dialect, 2, key=list(columns))["key"].to_pylist()
        return [None if key is None else json.loads(key) for key in actual_rows]

    assert keys("json") == [None, None]
    assert keys("json", "day", "id") == [{"day": "0000-00-00", "id": 1}, {"day": "2024-02-29", "id": 2}]
    assert keys("canal", "name") == [{"name": "a"}, {"name": "b"}]
    assert keys("debezium", "day") == [{"day": None}, {"day": 19782}]
    assert keys("maxwell", "id")[0] == {"database": table[:-2], "table": "t", "pk.id": 1}
    (first, _) = keys("debezium_schema", "id")
    assert first["payload"] == {"id": 1}
    assert first["schema"]["name"] == f"shop.{table}.Key"
    assert first["schema"]["fields"] == [{"type": "int32", "optional": False, "field": "id"}]
    with pytest.raises(OptionInvalid, match="nothing"):
        keys("json", "nothing")
    whole = convert(batch, schema, "json", key=["id"])["key"].to_pylist()
    assert [json.loads(key)["id"] for key in whole] == [1, 2, 1, 2, 9, 9]
    with pytest.raises(EventUnsupported, match="`day`"):
        convert(batch, schema, "json", key=["day"])


def test_debezium_reports_a_changed_key_as_a_delete_and_an_insert(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    file = run_logged(
        mysql_server,
        "CREATE TABLE t (id INT PRIMARY KEY, n INT)",
        "INSERT INTO t VALUES (1, 1)",
        "UPDATE t SET id = 2",
        database=database,
    )
    (batch,) = typed(file, f"{database}.t")
    schema = declared(mysql_server, f"{database}.t")[f"{database}.t"]
    messages = convert(batch, schema, "debezium", key=["id"])
    assert messages["row"].to_pylist() == [0, 1, 2]
    assert messages["kind"].to_pylist() == [0, 2, 0]
    assert messages["key"].to_pylist() == [b'{"id":1}', b'{"id":1}', b'{"id":2}']
    assert [message["op"] for message in messages_of(batch, schema, "debezium", snapshot=True)] == [
        "r",
        "d",
        "r",
    ]
    assert messages_of(batch, schema, "debezium", snapshot=True)[0]["source"]["snapshot"] == "true"
    assert [message["type"] for message in messages_of(batch, schema, "maxwell", snapshot=True)] == [
        "bootstrap-insert",
        "update",
    ]


def test_rows_unlike_their_definition_are_refused_by_name(minimal: tuple[str, Batch, TableSchema]) -> None:
    _, batch, schema = minimal
    wide = replace(
        schema, columns=tuple(replace(column, type_text="bigint") for column in schema.columns[:1])
    )
    with pytest.raises(SchemaInvalid, match="`id`"):
        convert(batch, wide, "json")
    with pytest.raises(OptionInvalid, match="no dialect"):
        convert(batch, schema, "morse")
