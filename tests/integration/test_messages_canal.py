# SPDX-License-Identifier: Apache-2.0
"""Canal's entries and flat messages, and Ptubes' events, compared with the server's own client.

The entries are parsed by the `protobuf` package, with a message description that was written independently.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.integration.test_messages_json import MESSAGE_FLAVORS, Message, read, read_table, rows_of
from tests.support.binlog.decoding import run_logged
from tests.support.binlog.type_corpus import CASES, CorpusOf, TypeTable, definition, on_each
from tests.support.canal import expectations as expected
from tests.support.canal.client import EVENTS, PROTO, ROWDATA, TRANSACTIONBEGIN, TRANSACTIONEND
from tests.support.messages.json_expectations import GEOMETRIES, name_of
from tests.support.ptubes.packet import RdsEvent, RdsMessage
from tests.support.suite.fixture_types import FreshDatabase
from tools.servers import Server

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

INSERT, UPDATE, DELETE, STATEMENT, BEGIN, END, HEARTBEAT = range(7)
DIFFERENCES_SHOWN_MAX = 8
# A JSON document; updates change the values at these paths.
DOCUMENT = """{"a": "b\\"c\\\\\\\\d", "n": 10000000.0, "s": 0.0001, "t": "é\\u0001"}"""


class Entry:
    """A decoded Canal entry."""

    def __init__(self, message: Message) -> None:
        self.message = message
        answer = PROTO["Messages"].FromString(message.value)
        (data,) = answer.messages
        self.entry = PROTO["Entry"].FromString(data)
        self.header = self.entry.header
        kinds = {TRANSACTIONBEGIN: "TransactionBegin", ROWDATA: "RowChange", TRANSACTIONEND: "TransactionEnd"}
        self.store = PROTO[kinds[self.entry.entryType]].FromString(self.entry.storeValue)
        # Encoding the entry again gives the same bytes: fields are in order, and default values are omitted.
        assert self.entry.SerializeToString() == data
        assert self.store.SerializeToString() == self.entry.storeValue

    @property
    def event(self) -> str:
        return str(EVENTS[self.header.eventType - 1])

    @property
    def event_rows(self) -> list[Any]:
        """Return the entry's rows, or an empty list if it is not a row entry."""
        return list(self.store.rowDatas) if self.entry.entryType == ROWDATA else []

    @property
    def props(self) -> dict[str, str]:
        return {pair.key: pair.value for pair in self.header.props}


def entries(*arguments: Any, **options: Any) -> list[Entry]:
    return [Entry(message) for message in read(arguments[0], "canal", *arguments[1:], **options)]


def column_texts(columns: Any) -> dict[str, str | None]:
    return {column.name: None if column.isNull else column.value for column in columns}


def updated(columns: Any) -> set[str]:
    return {column.name for column in columns if column.updated}


def check(differ: Iterator[str]) -> None:
    lines = list(differ)
    assert not lines, "\n".join([f"{len(lines)} differ", *lines[:DIFFERENCES_SHOWN_MAX]])


# --- Every type ------------------------------------------------------------------------------


def declared(server: Server, table: str) -> list[str]:
    database, _, name = table.partition(".")
    return [
        text
        for (text,) in server.sql(
            "SELECT COLUMN_TYPE FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s"
            " ORDER BY ORDINAL_POSITION",
            database,
            name,
        )
    ]


@on_each(CASES, MESSAGE_FLAVORS)
def test_every_value_equals_canals_and_ptubes_form_of_the_clients_text(
    type_corpus: CorpusOf, flavor: str, name: str
) -> None:
    table = type_corpus(flavor).table(name)
    types = table.case.types

    rows = [Entry(message) for message in read_table(table, "canal") if message.kind == INSERT]
    columns = [data.afterColumns for entry in rows for data in entry.store.rowDatas]
    check(canal_differences(types, declared(table.server, table.name), columns, table.texts))

    flat = [json.loads(message.value) for message in rows_of(read_table(table, "canal_flat"))]
    assert [row for message in flat for row in message["data"]] == [column_texts(row) for row in columns]
    for message, entry in zip(flat, rows, strict=True):
        last = entry.store.rowDatas[-1].afterColumns
        assert message["sqlType"] == {column.name: column.sqlType for column in last}
        assert message["mysqlType"] == {column.name: column.mysqlType for column in last}

    events = [event_of(message.value) for message in rows_of(read_table(table, "ptubes"))]
    check(ptubes_differences(table, events))


def canal_differences(
    types: Sequence[str], shown: Sequence[str], rows: Sequence[Any], texts: Sequence[Sequence[str | None]]
) -> Iterator[str]:
    assert len(rows) == len(texts)
    for number, (row, wanted) in enumerate(zip(rows, texts, strict=True)):
        assert [column.index for column in row] == list(range(len(types) + 1))
        assert [column.isKey for column in row] == [True] + [False] * len(types)
        assert all(column.updated and column.HasField("isNull") for column in row)
        assert not any(column.HasField("length") or column.props for column in row)
        assert (row[0].sqlType, row[0].value) == (4, str(number))
        assert [column.mysqlType for column in row] == list(shown)
        for column, type_text, text in zip(row[1:], types, wanted, strict=True):
            value = None if text is None else expected.canal(text, type_text)
            actual = (None if column.isNull else column.value, column.sqlType)
            if actual != (value, expected.canal_type(text, type_text)):
                yield f"{type_text}: {actual!r}, expected {value!r} of {text!r}"
            if value in (None, ""):
                assert not column.HasField("value")


def event_of(framed: bytes) -> Any:
    (data,) = RdsMessage.FromString(framed).messages
    return RdsEvent.FromString(data)


def ptubes_differences(table: TypeTable, events: Sequence[Any]) -> Iterator[str]:
    server, types, texts = table.server, table.case.types, [list(row) for row in table.texts]
    assert len(events) == len(texts)
    spatial = [number for number, kind in enumerate(types) if name_of(kind) in GEOMETRIES]
    for number in spatial:
        # MySQL swaps the axes of a geographic system in its output; the expected WKT does not.
        axes = ", 'axis-order=long-lat'" if server.flavor == "mysql" else ""
        shown = server.sql(f"SELECT st_astext(c{number}{axes}) FROM {table.name} ORDER BY id")
        for row, (text,) in zip(texts, shown, strict=True):
            row[number] = text
    for event, wanted in zip(events, texts, strict=True):
        row = event.rowData.afterColumns
        assert not event.rowData.beforeColumns
        for number, (type_text, text) in enumerate(zip(types, wanted, strict=True)):
            column = row[f"c{number}"]
            assert (column.name, column.index, column.updated) == (f"c{number}", number + 1, False)
            assert column.HasField("isNull")
            props = {pair.key: pair.value for pair in column.props}
            actual = (None if column.isNull else column.value, props)
            if text is None:
                correct: tuple[str | None, dict[str, str]] = (None, {})
            elif number in spatial:
                correct = (plain_wkt(text), {})
                actual = (plain_wkt(column.value), props)
            else:
                correct = expected.ptubes(text, type_text)
            if actual != correct or column.sqlType != expected.ptubes_type(type_text):
                yield f"{type_text}: {actual!r} ({column.sqlType}), expected {correct!r} of {text!r}"


def plain_wkt(text: str) -> str:
    return text.replace(", ", ",").replace(" (", "(")


# --- Entries of a transaction ----------------------------------------------------------------


def test_transaction_starts_ends_and_names_its_events(server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (id INT PRIMARY KEY, name VARCHAR(9), n INT UNSIGNED)")
    schemas = definition(server, f"{database}.t")
    file = run_logged(
        server,
        "BEGIN",
        "INSERT INTO t VALUES (1, 'a', 2147483648), (2, NULL, 5)",
        "UPDATE t SET name = 'b' WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "COMMIT",
        database=database,
    )
    messages = entries(file, f"{database}.t", schemas, executed="")
    rows = [entry for entry in messages if entry.message.kind in (INSERT, UPDATE, DELETE)]
    logged = {
        start: (kind, end)
        for _, start, kind, _, end, *_ in server.sql(f"SHOW BINLOG EVENTS IN '{file.name}'")
    }
    assert [entry.entry.entryType for entry in (messages[0], messages[-1])] == [
        TRANSACTIONBEGIN,
        TRANSACTIONEND,
    ]
    assert [entry.event for entry in rows] == ["INSERT", "UPDATE", "DELETE"]
    assert [entry.props["rowsCount"] for entry in rows] == ["2", "1", "1"]
    assert [entry.message.rows for entry in rows] == [2, 1, 1]
    assert [entry.message.slot for entry in rows] == [-1, 962, 963]
    for entry in messages:
        header = entry.header
        kind, end = logged[header.logfileOffset]
        assert (header.version, header.serverenCode, header.sourceType) == (1, "UTF-8", 2)
        assert header.logfileName == file.name
        # MariaDB may log 0 as the end position of an event inside a transaction.
        assert end in (0, header.logfileOffset + header.eventLength)
        assert header.serverId == server.sql("SELECT @@server_id")[0][0]
        assert header.executeTime % 1000 == 0
        assert header.gtid.startswith(entry.props["curtGtid"].partition(":")[0])
        if server.flavor == "mysql":
            assert list(entry.props)[:3] == ["curtGtid", "curtGtidSn", "curtGtidLct"]
            assert int(entry.props["curtGtidSn"]) > int(entry.props["curtGtidLct"])
        if entry in rows:
            assert "rows" in kind.lower()
            assert (header.schemaName, header.tableName) == (database, "t")
            assert entry.store.HasField("isDdl")
            assert not entry.store.isDdl
        else:
            assert not header.HasField("schemaName")
            assert not header.HasField("tableName")
    # MariaDB's BEGIN is its GTID event, which contains the thread id since 11.5, if configured.
    assert messages[0].store.threadId > 0 or server.flavor != "mysql"
    assert messages[-1].store.transactionId.isdigit()
    assert (
        messages[-1].message.end_offset == messages[-1].header.logfileOffset + messages[-1].header.eventLength
    )
    assert [entry.message.end_offset for entry in messages[:-1]] == [None] * (len(messages) - 1)

    inserted, changed, deleted = (entry.store.rowDatas for entry in rows)
    assert [column_texts(row.afterColumns) for row in inserted] == [
        {"id": "1", "name": "a", "n": "2147483648"},
        {"id": "2", "name": None, "n": "5"},
    ]
    assert [[column.sqlType for column in row.afterColumns] for row in inserted] == [[4, 12, -5], [4, 12, 4]]
    assert not inserted[0].beforeColumns
    assert column_texts(changed[0].beforeColumns) == {"id": "1", "name": "a", "n": "2147483648"}
    assert column_texts(changed[0].afterColumns) == {"id": "1", "name": "b", "n": "2147483648"}
    assert (updated(changed[0].beforeColumns), updated(changed[0].afterColumns)) == (set(), {"name"})
    assert column_texts(deleted[0].beforeColumns) == {"id": "2", "name": None, "n": "5"}
    assert not deleted[0].afterColumns
    assert not updated(deleted[0].beforeColumns)


def test_rows_are_distinguished_by_slot_if_requested(
    mysql_server: Server, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(mysql_server)
    table = f"{database}.t"
    mysql_server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, k VARCHAR(20), j INT)")
    schemas = definition(mysql_server, table)
    file = run_logged(
        mysql_server,
        "INSERT INTO t VALUES (1, 'order-10001', 12), (2, 'abc', 1), (3, NULL, 0)",
        "UPDATE t SET k = 'abc' WHERE id = 1",
        database=database,
    )
    whole = [Entry(message) for message in read(file, "canal", table, schemas)]
    split = [Entry(message) for message in read(file, "canal", table, schemas, message_per_row=True)]
    assert [entry.message.slot for entry in split if entry.event_rows] == [962, 963, 964, 962]
    assert [row for entry in split for row in entry.event_rows] == [
        row for entry in whole for row in entry.event_rows
    ]
    by_text = read(file, "canal", table, schemas, ["k"], message_per_row=True)
    assert [message.slot for message in rows_of(by_text)] == [12646, 31812, 961, 31812]
    # The slot for several columns is computed from their concatenated texts, in the table's column order.
    # NULL is the word null. For example, the texts are "abc1" or "null0".
    both = read(file, "canal_flat", table, schemas, ["j", "k"], message_per_row=True)
    assert [message.slot for message in rows_of(both)][1] == slot_of("abc1")
    assert [message.slot for message in rows_of(both)][2] == slot_of("null0")


def slot_of(text: str) -> int:
    """Return the slot of a text, computed with Python numbers."""
    hashed = 0
    for unit in text:
        hashed = hashed * 31 + ord(unit)
    hashed = (31 * 32 + hashed) & 0xFFFFFFFF
    return abs(hashed - (1 << 32) if hashed >> 31 else hashed) % 32767
