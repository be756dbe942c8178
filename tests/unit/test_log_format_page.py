# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest

from penstock.logstore.records import BLOCK_DTYPE, BLOCKS_MAGIC, SEGMENT_DTYPE, SEGMENTS_MAGIC, IndexHeader
from tests.tidy.tree import ROOT

PAGE = (ROOT / "docs/formats/log.md").read_text()


@pytest.mark.parametrize(
    ("heading", "dtype"),
    [("## L2: the index of a segment", BLOCK_DTYPE), ("## L1: the index of the log", SEGMENT_DTYPE)],
)
def test_format_page_shows_each_record_as_written(heading: str, dtype: np.dtype) -> None:
    part = PAGE[PAGE.index(heading) :]
    part = part[: part.index("\n## ", 3)]
    pictured = [
        (name, int(offset), int(size))
        for offset, size, name in re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", part, re.MULTILINE)
    ]
    fields = dtype.fields
    assert fields is not None
    assert pictured == [(name, fields[name][1], fields[name][0].itemsize) for name in dtype.names or ()]


def test_format_page_lists_the_magics() -> None:
    for magic in (BLOCKS_MAGIC, SEGMENTS_MAGIC):
        assert f"`{magic[:6].decode()}`, {magic[6]}, {magic[7]}" in PAGE
        assert IndexHeader(magic).encode()[:8] == magic
