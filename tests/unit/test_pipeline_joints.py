# SPDX-License-Identifier: Apache-2.0
"""If there is a gap or an overlap between the ranges of a batch, the batch is rejected before its sink
commits.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.engine.joints import Ends, prove_joints
from penstock.errors import RangesDisagree
from penstock.limits import MIB, RANGE_BYTES_MIN
from penstock.pipeline.record import RangeWork
from penstock.source.source import Source, SourceOptions, open_source
from tests.support.binlog.events import assemble
from tests.support.binlog.forged_log import NAME, NOTES, forged_log, insert, write_forged_log


def works_of(source: Source) -> list[RangeWork]:
    return [RangeWork("shop", byte_range) for byte_range in source.split(ranges_min=3)]


def opened(path: Path) -> Source:
    return open_source(SourceOptions.parse(str(path)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_forged_log(tmp_path_factory.mktemp("files"), 3 * RANGE_BYTES_MIN, spacing=MIB)


def test_adjacent_ranges_of_one_file_meet(file: Path) -> None:
    source = opened(file)
    works = works_of(source)
    assert len(works) == 3
    prove_joints(works, {at: Ends.of(source, work) for at, work in enumerate(works)})


def test_hosts_with_different_copies_of_a_file_are_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / NAME
    # This file is as long as the first file, and has an event boundary where the first file has the middle of
    # a BLOB.
    content = forged_log(400)
    content += assemble(insert(500, NOTES, 500, bytes(9 * MIB)), offset=len(content))
    content += assemble(insert(501, NOTES, 501, bytes(20 * MIB)), offset=len(content))
    other.write_bytes(content)
    works = works_of(opened(file))
    ends = {at: Ends.of(opened(file if at == 0 else other), work) for at, work in enumerate(works)}
    with pytest.raises(RangesDisagree, match="the next one begins at") as caught:
        prove_joints(works, ends)
    assert caught.value.position == f"{NAME}:{works[1].byte_range.start}"


def test_plan_with_a_gap_or_an_overlap_is_refused(file: Path) -> None:
    source = opened(file)
    works = works_of(source)
    ends = {at: Ends.of(source, work) for at, work in enumerate(works)}
    for start in (works[1].byte_range.start - 1, works[1].byte_range.start + 1):
        moved = replace(works[1], byte_range=replace(works[1].byte_range, start=start))
        with pytest.raises(RangesDisagree):
            prove_joints([works[0], moved, works[2]], ends)
    with pytest.raises(RangesDisagree):
        prove_joints([works[0], works[2]], {0: ends[0], 1: ends[2]})


def test_failed_range_is_not_checked(file: Path) -> None:
    source = opened(file)
    works = works_of(source)
    prove_joints(works, {2: Ends.of(source, works[2])})
