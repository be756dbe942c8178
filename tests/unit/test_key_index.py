# SPDX-License-Identifier: Apache-2.0

import random
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow
import pytest

from penstock.sinks.lake.key_index import KeyIndex

TYPES: dict[str, tuple[pyarrow.DataType, list[Any]]] = {
    "dense": (pyarrow.int32(), list(range(50))),
    "sparse": (pyarrow.int64(), [-(2**63), -1, 0, 7, 2**62, 2**63 - 1]),
    "text": (pyarrow.string(), ["", "a", "A", "ä", "b", "a "]),
    "bytes": (pyarrow.binary(), [b"", b"\x00", b"\xff", b"a"]),
    "decimal": (pyarrow.decimal128(20, 0), [Decimal(0), Decimal(2**64 - 1), Decimal(-1)]),
    "day": (pyarrow.date32(), [date(1, 1, 1), date(2026, 3, 1), None]),
    "time": (pyarrow.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 12, 31), None]),
    "moment": (pyarrow.duration("us"), [timedelta(hours=-800), timedelta(0)]),
    "double": (pyarrow.float64(), [0.0, -1.5, 2.5, 1e300]),
}


def column(name: str, values: list[Any]) -> pyarrow.ChunkedArray:
    half = len(values) // 2
    return pyarrow.chunked_array([values[:half], values[half:]], TYPES[name][0])


@pytest.mark.parametrize(
    "names", [(name,) for name in TYPES] + [("dense", "text"), ("time", "day", "sparse")]
)
def test_each_row_is_located_only_by_its_own_key(names: tuple[str, ...]) -> None:
    chance = random.Random(str(names))
    drawn = {tuple(chance.choice(TYPES[name][1]) for name in names) for _ in range(30)}
    keys = sorted(drawn, key=str)[: max(1, len(drawn) * 2 // 3)]
    rows = [tuple(chance.choice(TYPES[name][1]) for name in names) for _ in range(200)]
    index = KeyIndex(
        pyarrow.table({name: column(name, [key[at] for key in keys]) for at, name in enumerate(names)})
    )
    indexes = index.find([column(name, [row[at] for row in rows]) for at, name in enumerate(names)])
    assert indexes.tolist() == [keys.index(row) if row in keys else -1 for row in rows]


def test_positive_and_negative_zero_are_one_key() -> None:
    index = KeyIndex(pyarrow.table({"double": column("double", [0.0])}))
    assert index.find([column("double", [-0.0, 1.0])]).tolist() == [0, -1]


def test_files_are_skipped_by_their_bounds_only_where_that_is_safe() -> None:
    keys = pyarrow.table({"dense": column("dense", [10, 20]), "text": column("text", ["b", "b"])})
    index = KeyIndex(keys)
    assert index.may_have([(20, 30, False), ("a", "c", False)])
    assert not index.may_have([(11, 19, False), ("a", "c", False)])
    assert not index.may_have([(10, 10, False), ("c", "d", False)])
    assert index.may_have([None, None])
    assert not KeyIndex(keys.slice(0, 0)).may_have([None, None])


def test_null_key_is_searched_in_files_with_nulls() -> None:
    index = KeyIndex(pyarrow.table({"day": column("day", [None])}))
    assert index.may_have([(date(2026, 1, 1), date(2026, 2, 1), True)])
    assert not index.may_have([(date(2026, 1, 1), date(2026, 2, 1), False)])
