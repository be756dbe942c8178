# SPDX-License-Identifier: Apache-2.0
"""Appending to a log adds records to the segment's index. These records equal the records computed for the
whole segment at once.
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.logstore.records import BLOCK_DTYPE, RECORD_BYTES
from penstock.logstore.tail import unindexed

_FILE_NUMBER = 7


@settings(max_examples=50, deadline=None)
@given(
    earlier_ends=st.lists(st.integers(0, 40), max_size=3).map(sorted),
    ends=st.lists(st.integers(0, 40), max_size=6).map(sorted),
    indexed_end=st.integers(0, 40),
)
def test_only_blocks_past_the_indexed_end_are_added(
    earlier_ends: list[int], ends: list[int], indexed_end: int
) -> None:
    blocks = np.zeros(len(earlier_ends) + len(ends), BLOCK_DTYPE)
    blocks["source_end"] = [*earlier_ends, *ends]
    # Blocks of the previous file come first.
    blocks["file_number"] = [_FILE_NUMBER - 1] * len(earlier_ends) + [_FILE_NUMBER] * len(ends)
    late = (blocks["source_end"] <= indexed_end) | (blocks["file_number"] != _FILE_NUMBER)
    content = blocks.tobytes()
    assert unindexed(content, _FILE_NUMBER, indexed_end) == content[int(late.sum()) * RECORD_BYTES :]
