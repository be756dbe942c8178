# SPDX-License-Identifier: Apache-2.0
"""GTID positions in MariaDB logs whose sequence numbers go back, as they may with gtid_strict_mode=OFF."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow
import pytest

from penstock.errors import PositionInvalid
from penstock.gtid_sets import OutsideSet
from penstock.source.bounds import Bound, locate
from penstock.source.decoding import RangeDecoding
from penstock.source.source import Source, SourceOptions, open_source
from tests.support.binlog.mariadb_log import keep_mariadb_file, write_mariadb_files
from tests.support.logstore.folders import open_log

File = tuple[str, Sequence[str]]


def files(folder: Path, *contents: File) -> Source:
    write_mariadb_files(folder, *contents)
    return open_source(SourceOptions(paths=(str(folder / "*"),)))


def kept(folder: Path, *contents: File) -> Source:
    """Return a kept log with one epoch of one file for each server, counted from 1."""
    log = open_log(folder)
    for epoch, (before, transactions) in enumerate(contents):
        keep_mariadb_file(log, epoch, epoch + 1, before, transactions)
    log.close()
    return open_source(SourceOptions(paths=(str(folder),)))


def read(source: Source, start: str | None, end: str | None = None) -> list[str]:
    """Return the GTIDs that a read from one set to another yields, range by range."""
    first, last = (Bound(gtid_set=gtid_set) if gtid_set else None for gtid_set in (start, end))
    bounds = locate(source, first, last)
    gtids: list[str] = []
    for byte_range in source.split(bounds.start, ranges_min=4, range_bytes=1):
        decoding = RangeDecoding(
            source,
            byte_range,
            emit="transactions",
            gtid_after=bounds.gtid_after,
            gtid_until=bounds.gtid_until,
        )
        for _ in decoding.states():
            gtids += pyarrow.record_batch(decoding.take_batch())["gtid"].to_pylist()
    return gtids


@pytest.mark.parametrize("kind", [files, kept])
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("0-1-100", ["0-2-50", "0-1-101", "0-2-51"]),
        ("0-1-100,0-2-50", ["0-1-101", "0-2-51"]),
        ("0-1-101", ["0-2-51"]),
    ],
)
def test_lower_number_of_another_server_behind_the_position_is_read(
    kind: Callable[..., Source], start: str, expected: list[str], tmp_path: Path
) -> None:
    log = "0-2-7", ["0-1-99", "0-1-100", "0-2-50", "0-1-101", "0-2-51"]
    assert read(kind(tmp_path / "log", log), start) == expected


def test_position_with_a_lower_number_than_what_precedes_it_is_refused(tmp_path: Path) -> None:
    """Alone it does not tell that the log has it, until all of the log is read."""
    source = files(tmp_path / "log", ("0-2-7", ["0-1-99", "0-1-100", "0-2-50", "0-1-101"]))
    with pytest.raises(PositionInvalid, match="0-1-99 comes without 0-2-50 before it"):
        read(source, "0-2-50")


def test_file_that_begins_behind_a_lower_number_is_not_taken_for_the_position(tmp_path: Path) -> None:
    source = files(
        tmp_path / "log",
        ("", ["0-1-99", "0-1-100", "0-2-50"]),
        ("0-1-100,0-2-50", ["0-2-51", "0-1-101"]),
    )
    assert read(source, "0-1-100") == ["0-2-50", "0-2-51", "0-1-101"]
    assert read(source, None, "0-1-100") == ["0-1-99", "0-1-100"]


def test_position_contains_what_an_earlier_primary_wrote(tmp_path: Path) -> None:
    source = files(tmp_path / "log", ("0-3-7", ["0-2-8", "0-2-9", "0-1-10", "0-1-11"]))
    assert read(source, "0-1-10") == ["0-1-11"]


@pytest.mark.parametrize("again", ["0-1-50", "0-1-100"])
def test_number_of_a_server_that_goes_back_or_repeats_stops_a_read_by_gtid(
    again: str, tmp_path: Path
) -> None:
    source = files(tmp_path / "log", ("", ["0-1-99", "0-1-100", again]))
    assert read(source, None) == ["0-1-99", "0-1-100", again], "a read by position needs no order"
    with pytest.raises(PositionInvalid, match=f"{again} comes after the same or a higher number") as refused:
        read(source, "0-1-100")
    assert refused.value.position is not None
    assert "penstock verify" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("start", "expected"),
    [("0-1-101", ["0-2-101", "0-2-102"]), ("0-1-100", ["0-1-101", "0-2-101", "0-2-102"])],
)
def test_transaction_of_the_next_primary_with_a_number_that_was_lost_is_read(
    start: str, expected: list[str], tmp_path: Path
) -> None:
    source = kept(tmp_path / "log", ("", ["0-1-100", "0-1-101"]), ("0-1-100", ["0-2-101", "0-2-102"]))
    assert read(source, start) == expected


def test_log_without_the_position_is_refused(tmp_path: Path) -> None:
    """The next primary wrote another transaction under the number of the position."""
    source = kept(tmp_path / "log", ("0-1-99", ["0-1-100", "0-2-101", "0-2-102"]))
    with pytest.raises(PositionInvalid, match="0-2-101 comes without 0-1-101 before it"):
        read(source, "0-1-101")


def test_log_of_a_restored_server_is_read_from_its_start(tmp_path: Path) -> None:
    assert read(kept(tmp_path / "log", ("", ["0-2-101"])), "0-1-100") == ["0-2-101"]


def test_transactions_outside_a_set_are_told_in_the_order_of_the_log() -> None:
    is_outside = OutsideSet("0-1-100", "0-2-40")
    assert [is_outside(gtid) for gtid in ("0-2-41", "0-1-100", "0-2-50", "")] == [False, False, True, False]
