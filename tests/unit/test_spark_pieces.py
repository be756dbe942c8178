# SPDX-License-Identifier: Apache-2.0
"""A batch too large for Spark's JVM is passed in slices that hold the same rows."""

import pyarrow as pa
import pytest

from penstock.limits import SPARK_BATCH_BYTES_MAX
from penstock.spark.partition import pieces


def _batch(rows: int, text_bytes: int) -> pa.RecordBatch:
    texts = pa.array([None if row % 3 == 0 else "x" * text_bytes for row in range(rows)])
    nested = pa.StructArray.from_arrays([pa.array(range(rows)), texts], ["row", "text"])
    return pa.record_batch({"id": pa.array(range(rows)), "nested": nested})


@pytest.mark.parametrize(("rows", "text_bytes"), [(20_003, 600), (9, 4_000_000), (2, 6_000_000)])
def test_slices_of_a_large_batch_hold_its_rows_in_order(rows: int, text_bytes: int) -> None:
    batch = _batch(rows, text_bytes)
    slices = list(pieces(batch))
    assert pa.Table.from_batches(slices).equals(pa.Table.from_batches([batch]))
    row_bytes = batch.nbytes / rows
    assert max(piece.num_rows for piece in slices) * row_bytes <= 2 * SPARK_BATCH_BYTES_MAX + 8 * row_bytes


@pytest.mark.parametrize("rows", [0, 1, 1000])
def test_small_batch_is_returned_whole(rows: int) -> None:
    batch = _batch(rows, 20)
    assert [piece.num_rows for piece in pieces(batch)] == [rows]
