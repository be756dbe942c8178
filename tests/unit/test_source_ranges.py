# SPDX-License-Identifier: Apache-2.0
"""Ranges cover the requested interval exactly once, and options can be pickled."""

import pickle
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import OptionInvalid
from penstock.limits import RANGE_BYTES_MIN
from penstock.logstore.extent import Extent
from penstock.model import Position
from penstock.source.source import ByteRange, SourceOptions, cut
from penstock.source.tracking import whole_files

MIB = 1 << 20


def _file(number: int) -> str:
    return f"bin.{number:06d}"


@given(
    sizes=st.lists(st.integers(0, 600 * MIB), min_size=1, max_size=5),
    start=st.integers(4, 50 * MIB),
    end=st.integers(4, 50 * MIB) | st.none(),
    ranges_min=st.integers(1, 40),
    range_bytes=st.integers(1, 300 * MIB),
    splittable=st.booleans(),
)
def test_ranges_are_contiguous(
    sizes: list[int], start: int, end: int | None, ranges_min: int, range_bytes: int, splittable: bool
) -> None:
    extents = [Extent(0, _file(number), 4, size, splittable) for number, size in enumerate(sizes, start=1)]
    first = Position(0, _file(1), start)
    last = Position(0, _file(len(sizes)), end) if end is not None else None
    ranges = cut(extents, first, last, ranges_min, range_bytes)
    by_file: dict[str, list[ByteRange]] = {}
    for range_ in ranges:
        by_file.setdefault(range_.file, []).append(range_)
    assert list(by_file) == sorted(by_file)
    for file, parts in by_file.items():
        assert parts[0].start == (start if file == _file(1) else 4)
        assert parts[0].aligned
        assert not any(part.aligned for part in parts[1:])
        assert parts[-1].stop == (end if file == _file(len(sizes)) else None)
        assert all(part.stop == other.start for part, other in pairwise(parts))
        assert splittable or len(parts) == 1
        assert [part.is_cut for part in parts] == [True] * (len(parts) - 1) + [False]
    empty = {extent.file for extent in extents} - by_file.keys()
    assert empty <= {_file(len(sizes))}, "only the last file can have nothing in it"


def test_no_range_is_too_small_to_pay_for_locating_its_first_transaction() -> None:
    extents = [Extent(0, _file(1), 4, 100 * MIB)]
    ranges = cut(extents, Position(0, _file(1), 4), None, ranges_min=1000)
    assert all((range_.stop or 100 * MIB) - range_.start >= RANGE_BYTES_MIN // 2 for range_ in ranges)
    assert len(ranges) > 8


def test_boundaries_make_every_range_aligned_and_nonempty() -> None:
    extents = [Extent(0, _file(1), 4, 100 * MIB)]
    boundaries = [4, 30 * MIB, 70 * MIB]
    ranges = cut(
        extents,
        Position(0, _file(1), 4),
        None,
        ranges_min=10,
        boundary=lambda position: max(boundary for boundary in boundaries if boundary <= position.offset),
    )
    assert [(range_.start, range_.stop) for range_ in ranges] == [
        (4, 30 * MIB),
        (30 * MIB, 70 * MIB),
        (70 * MIB, None),
    ]
    assert all(range_.aligned for range_ in ranges)
    assert [range_.is_cut for range_ in ranges] == [True, True, False]


def test_joined_ranges_end_at_no_cut() -> None:
    extents = [Extent(0, _file(1), 4, 100 * MIB)]
    ranges = cut(extents, Position(0, _file(1), 4), Position(0, _file(1), 90 * MIB), ranges_min=5)
    assert len(ranges) > 1
    assert whole_files(ranges) == [ByteRange(0, _file(1), 4, 90 * MIB, aligned=True)]


def test_number_of_ranges_equals_that_of_executors_if_there_are_enough_bytes() -> None:
    extents = [Extent(0, _file(1), 4, 1000 * MIB)]
    assert len(cut(extents, Position(0, _file(1), 4), None, ranges_min=16)) >= 16


def test_empty_interval_has_no_range() -> None:
    extents = [Extent(0, _file(1), 4, 1000)]
    position = Position(0, _file(1), 500)
    assert cut(extents, position, position) == []


def test_ranges_and_options_pickle_for_executors() -> None:
    byte_range = ByteRange(1, _file(3), 4, None, aligned=True)
    assert pickle.loads(pickle.dumps(byte_range)) == byte_range
    options = SourceOptions.parse("mysql://repl:secret@db.example:3307", instance="shop")
    assert pickle.loads(pickle.dumps(options)) == options


def test_source_prints_no_password() -> None:
    options = SourceOptions.parse("mysql://repl:hunter2@db.example", password="hunter2")
    assert "hunter2" not in repr(options)
    assert options.address is not None
    assert "hunter2" not in str(options.address)


@pytest.mark.parametrize("sources", [[], ["mysql://a@b", "bin.000001"], ["mysql://a@b", "mysql://c@d"]])
def test_source_is_files_or_one_server(sources: list[str]) -> None:
    with pytest.raises(OptionInvalid):
        SourceOptions.parse(sources)
