# SPDX-License-Identifier: Apache-2.0
"""BSON documents of the kernel, read by MongoDB's own library."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import bson
import numpy
import pyarrow
import pytest
from bson.decimal128 import Decimal128
from hypothesis import given
from hypothesis import strategies as st

from penstock import _native
from penstock.errors import OptionInvalid


def documents(batch: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    array = pyarrow.array(_native.bson_documents(batch))
    options: Any = bson.CodecOptions(tz_aware=True)
    return [bson.decode(document.as_py(), options) for document in array]


def test_field_type_follows_its_column_type() -> None:
    columns = {
        "tiny": pyarrow.array([-128, None], pyarrow.int8()),
        "small": pyarrow.array([1, None], pyarrow.int16()),
        "int": pyarrow.array([-(2**31), None], pyarrow.int32()),
        "long": pyarrow.array([-(2**63), None], pyarrow.int64()),
        "huge": pyarrow.array([2**64 - 1, 5], pyarrow.uint64()),
        "float": pyarrow.array([numpy.float32(0.1), None], pyarrow.float32()),
        "double": pyarrow.array([0.1, float("-inf")], pyarrow.float64()),
        "text": pyarrow.array(["ä\x00b", ""], pyarrow.string()),
        "bytes": pyarrow.array([b"\x00\xff", b""], pyarrow.binary()),
        "flag": pyarrow.array([True, False]),
        "day": pyarrow.array([date(1, 1, 1), None]),
        "moment": pyarrow.array([datetime(2026, 3, 1, 1, 2, 3, 456_000), None], pyarrow.timestamp("ms")),
        "list": pyarrow.array([[1.5, -2.0], []], pyarrow.list_(pyarrow.float32())),
        "none": pyarrow.nulls(2),
    }
    key = pyarrow.StructArray.from_arrays([columns["int"], columns["text"]], names=["a", "b"])
    first, second = documents(pyarrow.record_batch({"_id": key, **columns}))
    assert first == {
        "_id": {"a": -(2**31), "b": "ä\x00b"},
        "tiny": -128,
        "small": 1,
        "int": -(2**31),
        "long": -(2**63),
        "huge": Decimal128("18446744073709551615"),
        "float": float(numpy.float32(0.1)),
        "double": 0.1,
        "text": "ä\x00b",
        "bytes": b"\x00\xff",
        "flag": True,
        "day": datetime(1, 1, 1, tzinfo=UTC),
        "moment": datetime(2026, 3, 1, 1, 2, 3, 456_000, UTC),
        "list": [1.5, -2.0],
        "none": None,
    }
    assert list(first) == ["_id", *columns]
    assert second["huge"] == 5
    assert second["list"] == []
    assert second["int"] is None


@given(
    st.integers(0, 34).flatmap(
        lambda scale: st.tuples(st.just(scale), st.lists(st.integers(-(10**34) + 1, 10**34 - 1), min_size=1))
    )
)
def test_decimals_keep_every_digit_and_their_scale(scaled: tuple[int, list[int]]) -> None:
    scale, numbers = scaled
    values = [Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale)) for number in numbers]
    batch = pyarrow.record_batch({"d": pyarrow.array(values, pyarrow.decimal128(34, scale))})
    for document, value in zip(documents(batch), values, strict=True):
        decimal = document["d"].to_decimal()
        assert decimal == value
        assert decimal.as_tuple().exponent == -scale


def test_value_without_a_bson_type_is_refused_by_name() -> None:
    for odd in (
        pyarrow.array([1], pyarrow.duration("us")),
        pyarrow.array([Decimal(1)], pyarrow.decimal128(35, 0)),
        pyarrow.array([datetime(2026, 3, 1)], pyarrow.timestamp("us")),
    ):
        with pytest.raises(OptionInvalid, match="`odd`"):
            documents(pyarrow.record_batch({"odd": odd}))
