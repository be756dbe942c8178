# SPDX-License-Identifier: Apache-2.0
"""Transactions written from values given as text are read with the same values."""

from typing import Any

import pytest

from penstock._native import RowEventWriter, tidb_file_head
from penstock.errors import EventMalformed, SchemaInvalid, ValueMalformed
from tests.support.binlog.decoding import Decoded, decode

FILE = "tidb-binlog.000001"
HEAD = tidb_file_head(server_id=1, time_s=0)
COMMIT_TS = 470_639_217_768_660_992

# A type with its character set, the text of a value, and the value that a reader of the binlog gets.
VALUES: list[tuple[str, str | None, bytes | None, Any]] = [
    ("int", None, b"-7", -7),
    ("bigint unsigned", None, b"18446744073709551615", 18446744073709551615),
    ("decimal(10,2)", None, b"-1.50", "-1.50"),
    ("double", None, b"2.5", 2.5),
    ("datetime(3)", None, b"2026-11-22 11:15:00.123", "2026-11-22 11:15:00.123000"),
    ("date", None, b"2024-02-29", "2024-02-29"),
    ("varchar(20)", "utf8mb4", "héllo".encode(), "héllo"),
    ("varbinary(20)", None, b"\0\xff", b"\0\xff"),
    ("enum('x','y')", "utf8mb4", b"y", "y"),
    ("set('p','q','r')", "utf8mb4", b"p,r", "p,r"),
    ("bit(10)", None, b"682", 682),
    ("json", None, b'{"b": [1, null]}', '{"b": [1, null]}'),
    ("text", "utf8mb4", None, None),
]
COLUMNS = [(f"c{index}", type_text, charset, True) for index, (type_text, charset, *_) in enumerate(VALUES)]
ROW = [text for _, _, text, _ in VALUES]


def written(writer: RowEventWriter) -> Decoded:
    """Return the rows that a reader gets from the open transaction after its commit."""
    return decode(HEAD + writer.commit(), file=FILE)


def opened(columns: list[tuple[str, str, str | None, bool]], key: list[str]) -> tuple[RowEventWriter, int]:
    """Return a writer with one table and an open transaction."""
    writer = RowEventWriter(cluster_id=7, server_id=1)
    table = writer.define("shop", "t", columns, key)
    writer.begin(COMMIT_TS, len(HEAD))
    return writer, table


def test_values_are_read_as_they_were_given() -> None:
    writer, table = opened(COLUMNS, ["c0"])
    writer.insert(table, [ROW])
    decoded = written(writer)
    (row,) = decoded.rows("shop.t")
    for index, (type_text, _, _, expected) in enumerate(VALUES):
        value = row[f"c{index}"]
        assert (str(value) if isinstance(expected, str) else value) == expected, type_text
    assert row["_commit_version"] == COMMIT_TS
    assert decoded.requests[0].primary_key == ["c0"]


def test_changes_keep_their_order_over_tables() -> None:
    writer = RowEventWriter(cluster_id=7, server_id=1)
    column = ("v", "varchar(5)", "utf8mb4", True)
    first, second = (writer.define("shop", name, [column], []) for name in ("a", "b"))
    writer.begin(COMMIT_TS, len(HEAD))
    writer.insert(first, [[b"1"], [b"2"]])
    writer.delete(second, [[None]])
    writer.update(first, [([b"2"], [b"3"])])
    decoded = written(writer)
    assert decoded.values("shop.a") == [
        ("insert", "1"),
        ("insert", "2"),
        ("update_preimage", "2"),
        ("update_postimage", "3"),
    ]
    assert decoded.values("shop.b") == [("delete", None)]
    assert [row["_metadata"]["row"] for row in decoded.rows("shop.b")] == [2]


def test_members_may_be_given_by_number() -> None:
    writer = RowEventWriter(cluster_id=7, server_id=1, numbered=True)
    columns = [("e", "enum('x','y')", "utf8mb4", True), ("s", "set('p','q')", "utf8mb4", True)]
    table = writer.define("shop", "t", columns, [])
    writer.begin(COMMIT_TS, len(HEAD))
    writer.insert(table, [[b"2", b"3"]])
    assert written(writer).values("shop.t") == [("insert", "y", "p,q")]


def test_statement_has_its_commit_timestamp() -> None:
    writer = RowEventWriter(cluster_id=7, server_id=1)
    events = writer.statement(COMMIT_TS, len(HEAD), "shop", "CREATE TABLE t (id INT)")
    (statement,) = decode(HEAD + events, file=FILE).statements
    assert (statement.database, statement.text) == ("shop", "CREATE TABLE t (id INT)")
    assert statement.commit_ts == COMMIT_TS


@pytest.mark.parametrize("row", [[b"x"], [b"1", b"2"], [b"99999999999"]])
def test_row_that_does_not_fit_its_table_is_refused(row: list[bytes | None]) -> None:
    writer, table = opened([("id", "int", None, False)], ["id"])
    with pytest.raises(ValueMalformed):
        writer.insert(table, [row])
    # The next transaction does not contain any part of the refused row.
    writer.begin(COMMIT_TS, len(HEAD))
    writer.insert(table, [[b"1"]])
    assert written(writer).values("shop.t") == [("insert", 1)]


@pytest.mark.parametrize(
    ("type_text", "text"),
    [
        ("datetime", b"2026-11-22 11:15:00.5"),
        ("datetime(3)", b"2026-11-22 11:15:00.1234"),
        ("timestamp(2)", b"2026-11-22 11:15:00.123"),
        ("time(1)", b"-838:59:58.12"),
    ],
)
def test_fraction_that_a_column_would_cut_is_refused(type_text: str, text: bytes) -> None:
    writer, table = opened([("at", type_text, None, False)], [])
    with pytest.raises(ValueMalformed, match=r"microseconds in a column of"):
        writer.insert(table, [[text]])


def test_use_out_of_turn_is_refused_by_name() -> None:
    writer = RowEventWriter(cluster_id=7, server_id=1)
    with pytest.raises(EventMalformed, match="outside a transaction"):
        writer.commit()
    with pytest.raises(SchemaInvalid, match="`x`, which is no column"):
        writer.define("shop", "t", [("id", "int", None, False)], ["x"])
    with pytest.raises(SchemaInvalid):
        writer.define("shop", "t", [("id", "no type", None, False)], [])
