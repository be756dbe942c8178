# SPDX-License-Identifier: Apache-2.0
import pyarrow
import pytest

from penstock.errors import ValueMalformed
from penstock.sinks.lake.rows import read_rows
from penstock.sinks.lake.types import is_widened

INT8, INT32, INT64 = pyarrow.int8(), pyarrow.int32(), pyarrow.int64()
FLOAT32, FLOAT64, TEXT = pyarrow.float32(), pyarrow.float64(), pyarrow.string()


def decimal(precision: int, scale: int) -> pyarrow.DataType:
    return pyarrow.decimal128(precision, scale)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (INT8, INT32),
        (INT32, INT64),
        # The digits before the point must hold the longest value: -128, -2147483648, -9223372036854775808.
        (INT8, decimal(3, 0)),
        (INT32, decimal(10, 0)),
        (INT32, decimal(12, 2)),
        (INT64, decimal(19, 0)),
        (INT64, decimal(38, 19)),
        (INT64, TEXT),
        (INT32, FLOAT64),
        (decimal(10, 2), decimal(10, 2)),
        (decimal(10, 2), decimal(12, 4)),
        (decimal(10, 2), decimal(11, 2)),
        (decimal(10, 2), TEXT),
        (FLOAT32, FLOAT64),
    ],
    ids=str,
)
def test_type_change_that_keeps_every_stored_value_is_a_widening(
    stored: pyarrow.DataType, wanted: pyarrow.DataType
) -> None:
    assert is_widened(stored, wanted)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (INT32, INT8),
        (INT32, INT32),
        (INT8, decimal(2, 0)),
        (INT32, decimal(9, 0)),
        (INT32, decimal(11, 2)),
        (INT64, decimal(18, 0)),
        (INT64, decimal(38, 20)),
        # A double has 53 bits of precision.
        (INT64, FLOAT64),
        (INT32, FLOAT32),
        (decimal(10, 2), decimal(10, 3)),
        (decimal(10, 2), decimal(12, 1)),
        (decimal(10, 2), FLOAT64),
        (FLOAT64, FLOAT32),
        (FLOAT32, TEXT),
        (TEXT, INT32),
    ],
    ids=str,
)
def test_type_change_that_alters_or_refuses_a_stored_value_is_not_a_widening(
    stored: pyarrow.DataType, wanted: pyarrow.DataType
) -> None:
    assert not is_widened(stored, wanted)


def test_stored_text_that_is_declared_as_time_is_refused_by_name() -> None:
    stored = pyarrow.table({"c": ["10:00:00"]})
    with pytest.raises(ValueMalformed, match="column c of the target holds string"):
        read_rows(stored, pyarrow.schema([("c", pyarrow.duration("us"))]))
