# SPDX-License-Identifier: Apache-2.0
"""A table as of a point in time, if its primary key changes or has values that Arrow cannot represent."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import LimitExceeded
from penstock.model import TableName
from penstock.serve.own_log import OwnSource
from penstock.source import table_as_of
from penstock.source.table_as_of import TableAsOf
from tests.support.binlog.events import (
    DELETE_ROWS,
    QUERY,
    UPDATE_ROWS,
    WRITE_ROWS,
    Event,
    assemble,
    events,
    query_body,
)
from tests.support.binlog.forged_log import NOTES, forged_log, insert, keep_forged_log
from tests.support.logstore.folders import open_log

# The server's code for each column type, and the bytes of one value.
INT, FLOAT, BIGINT, DATE = 3, 4, 8, 10
BYTES = {INT: 4, FLOAT: 4, BIGINT: 8, DATE: 3}
TWO_INTS = (INT, INT)


def change(gno: int, code: int, kinds: Sequence[int], key: Sequence[int], *values: int) -> list[Event]:
    """Return a transaction that inserts or deletes one row of a table with the columns a and b."""
    gtid, begin, table_map, rows, commit = insert(gno, NOTES, 1, b"")
    named = b"".join(len(name).to_bytes(1, "little") + name + b"\0" for name in (b"shop", b"notes"))
    fields = ((1, b"\0"), (4, b"\x01a\x01b"), (8, bytes(key)))
    metadata = b"".join(bytes((kind, len(value))) + value for kind, value in fields)
    sizes = [BYTES[kind] for kind in kinds if kind == FLOAT]
    types = bytes((2, *kinds, len(sizes), *sizes, 0))
    table = (70).to_bytes(6, "little") + b"\x01\0" + named + types + metadata
    image = b"\0" + b"".join(
        value.to_bytes(BYTES[kind], "little") for kind, value in zip(kinds, values, strict=True)
    )
    body = (70).to_bytes(6, "little") + b"\x01\0\x02\0\x02\x03" + image
    return [gtid, begin, replace(table_map, body=table), replace(rows, code=code, body=body), commit]


def statement(gno: int, text: str) -> list[Event]:
    """Return a statement that commits itself."""
    gtid, begin, *_ = insert(gno, NOTES, 1, b"")
    return [gtid, replace(begin, code=QUERY, body=query_body(text, "shop"))]


def rows_after(
    folder: Path, transactions: Sequence[list[Event]], count: int | None = None
) -> tuple[list[tuple[object, object]], bool]:
    """Return the rows as of the end of some of the transactions, and whether the rows are complete."""
    description, previous, *_ = events(forged_log(0))
    parts = [event for transaction in transactions for event in transaction]
    keep_forged_log(folder, assemble([description, previous, *parts]))
    shown = [event for transaction in transactions[:count] for event in transaction]
    end = len(assemble([description, previous, *shown]))
    with open_log(folder) as log:
        as_of = TableAsOf(log, OwnSource("shop", log), TableName.parse(NOTES))
        as_of.read(f"binlog.000001:{end}")
        return [(row.values.get("a"), row.values.get("b")) for row in as_of.rows()], as_of.is_complete


def partial_update(gno: int, before: dict[int, int], after: dict[int, int]) -> list[Event]:
    """Return a transaction that updates one row. An image maps column numbers to values."""
    gtid, begin, table_map, rows, commit = change(gno, WRITE_ROWS, TWO_INTS, [0], 0, 0)
    bitmaps = bytes(sum(1 << column for column in image) for image in (before, after))
    images = b"".join(
        b"\0" + b"".join(value.to_bytes(4, "little") for value in image.values()) for image in (before, after)
    )
    body = (70).to_bytes(6, "little") + b"\x01\0\x02\0\x02" + bitmaps + images
    return [gtid, begin, table_map, replace(rows, code=UPDATE_ROWS, body=body), commit]


TRUNCATED = statement(1, "TRUNCATE TABLE notes")


def test_rows_go_by_the_primary_key_that_replaced_theirs(tmp_path: Path) -> None:
    transactions = [
        TRUNCATED,
        change(2, WRITE_ROWS, TWO_INTS, [0], 1, 10),
        change(3, WRITE_ROWS, TWO_INTS, [0], 2, 20),
        statement(4, "ALTER TABLE notes DROP PRIMARY KEY, ADD PRIMARY KEY (b)"),
        change(5, DELETE_ROWS, TWO_INTS, [1], 1, 10),
    ]
    assert rows_after(tmp_path / "deleted", transactions) == ([(2, 20)], True)
    assert rows_after(tmp_path / "untouched", transactions, count=4) == ([(1, 10), (2, 20)], True)


def test_float_is_the_same_value_in_each_primary_key(tmp_path: Path) -> None:
    value = int.from_bytes(struct.pack("<f", 1.1), "little")
    kinds = (FLOAT, INT)
    transactions = [
        TRUNCATED,
        change(2, WRITE_ROWS, kinds, [0], value, 10),
        statement(3, "ALTER TABLE notes DROP PRIMARY KEY, ADD PRIMARY KEY (a, b)"),
        change(4, WRITE_ROWS, kinds, [0, 1], value, 11),
        change(5, DELETE_ROWS, kinds, [0, 1], value, 10),
    ]
    assert rows_after(tmp_path, transactions) == ([(1.1, 11)], True)


def test_later_change_by_another_key_does_not_repeat_a_row(tmp_path: Path) -> None:
    transactions = [
        change(1, WRITE_ROWS, TWO_INTS, [0], 1, 10),
        statement(2, "ALTER TABLE notes DROP PRIMARY KEY, ADD PRIMARY KEY (b)"),
        change(3, DELETE_ROWS, TWO_INTS, [1], 1, 10),
    ]
    assert rows_after(tmp_path, transactions, count=2) == ([(1, 10)], False)


def test_rows_with_another_type_of_the_key_are_forgotten(tmp_path: Path) -> None:
    def transactions(kind: int) -> list[list[Event]]:
        return [
            TRUNCATED,
            change(2, WRITE_ROWS, TWO_INTS, [0], 1, 10),
            statement(3, "ALTER TABLE notes MODIFY a BIGINT"),
            change(4, WRITE_ROWS, (kind, INT), [0], 2, 20),
        ]

    rows, is_complete = rows_after(tmp_path / "integers", transactions(BIGINT))
    assert (rows, is_complete) == ([(1, 10), (2, 20)], True)
    rows, is_complete = rows_after(tmp_path / "others", transactions(DATE))
    assert (len(rows), is_complete) == (1, False)


def test_keys_that_arrow_cannot_represent_are_told_apart(tmp_path: Path) -> None:
    january, february = (2026 << 9 | month << 5 for month in (1, 2))
    transactions = [
        change(gno, WRITE_ROWS, (INT, DATE), [0, 1], 7, date)
        for gno, date in ((1, january), (2, february), (3, 0))
    ]
    rows, _ = rows_after(tmp_path, transactions)
    assert rows == [(7, "2026-01-00"), (7, "2026-02-00"), (7, "0000-00-00")]


# --- Memory -----------------------------------------------------------------------------------

COMMENT = "ALTER TABLE notes COMMENT 'ends a batch'"


def in_batches(changes: Sequence[tuple[int, int]]) -> list[list[Event]]:
    """Return transactions that insert or delete the row of a key, each read as a separate batch."""
    return [TRUNCATED] + [
        transaction
        for gno, (code, key) in enumerate(changes, 2)
        for transaction in (change(2 * gno, code, TWO_INTS, [0], key, key), statement(2 * gno + 1, COMMENT))
    ]


def test_rows_that_are_gone_need_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_as_of, "AS_OF_BYTES_MAX", 12_000)
    gone = [(code, key) for key in range(40) for code in (WRITE_ROWS, DELETE_ROWS)]
    assert rows_after(tmp_path / "gone", in_batches([*gone, (WRITE_ROWS, 99)])) == ([(99, 99)], True)
    alive = [(WRITE_ROWS, key) for key in range(40)]
    with pytest.raises(LimitExceeded):
        rows_after(tmp_path / "alive", in_batches(alive))


def test_small_batches_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that changes rarely has a batch for each change, which needs more memory than the row
    itself.
    """
    monkeypatch.setattr(table_as_of, "AS_OF_BYTES_MAX", 80_000)
    rows, _ = rows_after(tmp_path, in_batches([(WRITE_ROWS, key) for key in range(100)]))
    assert rows == [(key, key) for key in range(100)]


def test_rows_inserted_after_the_moment_are_not_shown_however_often_they_come_back(tmp_path: Path) -> None:
    transactions = [
        change(1, WRITE_ROWS, TWO_INTS, [0], 1, 10),
        change(2, WRITE_ROWS, TWO_INTS, [0], 2, 20),
        change(3, DELETE_ROWS, TWO_INTS, [0], 2, 20),
        change(4, WRITE_ROWS, TWO_INTS, [0], 2, 21),
        change(5, DELETE_ROWS, TWO_INTS, [0], 2, 21),
        change(6, DELETE_ROWS, TWO_INTS, [0], 1, 10),
        change(7, DELETE_ROWS, TWO_INTS, [0], 3, 30),
        change(8, WRITE_ROWS, TWO_INTS, [0], 3, 31),
        change(9, DELETE_ROWS, TWO_INTS, [0], 3, 31),
    ]
    assert rows_after(tmp_path, transactions, count=1) == ([(1, 10), (3, 30)], False)


def test_column_that_no_image_of_an_update_has_is_missing(tmp_path: Path) -> None:
    inserted = [TRUNCATED, change(2, WRITE_ROWS, TWO_INTS, [0], 1, 10)]
    # In updates, MariaDB 11.8.9 logs no generated columns, and with binlog_row_image=MINIMAL only the changed
    # columns.
    unlogged = partial_update(3, {0: 1}, {0: 1})
    minimal = partial_update(4, {0: 1}, {1: 30})
    assert rows_after(tmp_path / "unlogged", [*inserted, unlogged]) == ([(1, None)], True)
    assert rows_after(tmp_path / "minimal", [*inserted, unlogged, minimal]) == ([(1, 30)], True)
