# SPDX-License-Identifier: Apache-2.0
"""Rows as SQL and COPY text, and groups of rows that share a key value."""

import pyarrow
import pytest

from penstock import _native
from penstock.errors import OptionInvalid
from tests.support.pipeline.changes_made import Made, changes_of, insert, target_of


def batch(**columns: pyarrow.Array) -> pyarrow.RecordBatch:
    return pyarrow.RecordBatch.from_pydict(columns)


def test_values_are_mysql_literals() -> None:
    target = target_of(
        {
            "id": "int",
            "amount": "decimal(10,2)",
            "share": "float",
            "text": "varchar(20)",
            "bytes": "varbinary(9)",
            "day": "date",
            "spent": "time(3)",
            "at": "timestamp(6)",
        }
    )
    values = {
        "id": -1,
        "amount": "-0.05",
        "share": 0.5,
        "text": "a'b\\c\0",
        "bytes": b"\xff'",
        "spent": -1500000,
    }
    row = [Made("insert", 1, values, 0, {"day": "0000-00-00", "at": "0000-00-00 00:00:00"})]
    values["amount"] = pyarrow.scalar("-0.05").cast(pyarrow.decimal128(10, 2)).as_py()
    rows = changes_of(target, row).rows
    ((count, text),) = _native.sql_values(rows, target.column_names)
    assert count == 1
    assert text == (
        rb"(-1,-0.05,0.5e0,'a\'b\\c\0',_binary'" + b"\xff" + rb"\'','0000-00-00','-00:00:01.5',"
        rb"'0000-00-00 00:00:00')"
    )


def test_statement_parts_stay_within_their_bounds() -> None:
    rows = batch(n=pyarrow.array(range(1000)))
    pieces = _native.sql_values(rows, ["n"], bytes_max=64)
    assert all(len(text) <= 64 for _, text in pieces)
    assert b",".join(text for _, text in pieces) == b",".join(b"(%d)" % n for n in range(1000))
    assert [count for count, _ in _native.sql_values(rows, ["n"], rows_max=300)] == [300, 300, 300, 100]
    long = batch(n=pyarrow.array(["x" * 100] * 3))
    assert [count for count, _ in _native.sql_values(long, ["n"], bytes_max=10)] == [1, 1, 1]


def test_frame_surrounds_the_values() -> None:
    rows = batch(a=pyarrow.array([1, None]), b=pyarrow.array(["x", "y"]))
    ((_, text),) = _native.sql_values(rows, ["a", "b"], before=["(a<=>", " AND b<=>"], between=" OR ")
    assert text == b"(a<=>1 AND b<=>'x') OR (a<=>NULL AND b<=>'y')"
    with pytest.raises(OptionInvalid):
        _native.sql_values(rows, ["a", "b"], before=["("])
    with pytest.raises(OptionInvalid, match="no column"):
        _native.sql_values(rows, ["c"])


def test_copy_escapes_text_and_counts_values_that_postgresql_cannot_hold() -> None:
    target = target_of(
        {"id": "int", "text": "varchar(20)", "bytes": "blob", "day": "date", "at": "timestamp"}
    )
    rows = changes_of(
        target,
        insert(1, id=1, text="a\tb\n\\N", bytes=b"\x00\xff"),
        insert(1, id=2, text="a\0"),
        [Made("insert", 1, {"id": 3}, 0, {"day": "2026-00-00"})],
    ).rows
    pieces, lost = _native.copy_text(rows, target.column_names)
    assert b"".join(text for _, text in pieces) == (
        b"1\ta\\tb\\n\\\\N\t\\\\x00ff\t\\N\t\\N\n2\t\\N\t\\N\t\\N\t\\N\n3\t\\N\t\\N\t\\N\t\\N\n"
    )
    assert lost == [0, 1, 0, 1, 0]


def groups(rows: pyarrow.RecordBatch, *keys: list[str]) -> list[int]:
    return pyarrow.array(_native.key_groups(rows, list(keys))).to_pylist()


def test_rows_sharing_a_key_value_are_one_group() -> None:
    rows = batch(id=pyarrow.array([1, 2, 3, 1, 4]), seat=pyarrow.array([7, 8, None, 9, 8]))
    assert groups(rows, ["id"]) == [0, 1, 2, 0, 3]
    assert groups(rows, ["id"], ["seat"]) == [0, 1, 2, 0, 1]
    # A null equals no other value.
    assert groups(batch(seat=pyarrow.array([None, None], pyarrow.int32())), ["seat"]) == [0, 1]


def test_rows_are_grouped_transitively() -> None:
    rows = batch(
        id=pyarrow.array([1, 2, 3, 4]), seat=pyarrow.array([1, 2, 1, 9]), label=pyarrow.array([5, 6, 6, 7])
    )
    assert groups(rows, ["id"], ["seat"], ["label"]) == [0, 0, 0, 1]


def test_adjacent_key_parts_are_not_confused() -> None:
    rows = batch(a=pyarrow.array(["a", "ab"]), b=pyarrow.array(["bc", "c"]))
    assert groups(rows, ["a", "b"]) == [0, 1]


def test_texts_of_any_script_stay_together_if_they_may_be_equal() -> None:
    rows = batch(name=pyarrow.array(["a", "A", "á", "b", "a "]))
    assert groups(rows, ["name"]) == [0, 0, 0, 1, 0]
    # Rows that may be equal stay together.
    assert groups(batch(name=pyarrow.array(["a", "カ", "b"])), ["name"]) == [0, 0, 0]
