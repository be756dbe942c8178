# SPDX-License-Identifier: Apache-2.0
"""Finds the rows that the step `lookup` remembers by their keys."""

from decimal import Decimal
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.steps.lookup import _places

KINDS = {
    pyarrow.int32(): st.integers(-3, 3),
    pyarrow.string(): st.sampled_from(["", "a", "A", "ab", "\0"]),
    pyarrow.binary(): st.sampled_from([b"", b"a", b"\xff"]),
    pyarrow.decimal128(20, 0): st.integers(0, 3).map(Decimal),
}


@pytest.mark.parametrize("kinds", [tuple(KINDS)[:1], tuple(KINDS)[1:]], ids=["one column", "three columns"])
def test_place_of_a_key_is_that_of_the_only_row_with_its_values(kinds: Any) -> None:
    keys = st.tuples(*(KINDS[kind] | st.none() for kind in kinds))

    def columns_of(values: list[Any]) -> list[pyarrow.Array]:
        return [pyarrow.array([key[number] for key in values], kind) for number, kind in enumerate(kinds)]

    @settings(max_examples=50, deadline=None)
    @given(st.lists(keys, max_size=9), st.lists(keys, unique=True, max_size=9), st.booleans())
    def check(asked: list[Any], remembered: list[Any], in_chunks: bool) -> None:
        names = [str(number) for number in range(len(kinds))]
        batch = pyarrow.RecordBatch.from_arrays(columns_of(remembered), names=names)
        halves = [batch.slice(0, len(remembered) // 2), batch.slice(len(remembered) // 2)]
        rows = pyarrow.Table.from_batches(halves) if in_chunks else batch
        wanted = [-1 if None in key or key not in remembered else remembered.index(key) for key in asked]
        assert _places(columns_of(asked), rows).tolist() == wanted

    check()
