# SPDX-License-Identifier: Apache-2.0
"""GTID positions in MariaDB logs whose sequence numbers go back, as they may with gtid_strict_mode=OFF."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.errors import PositionInvalid, PositionPurged
from penstock.gtid_sets import OutsideSet
from penstock.logstore.reader import LogReader
from penstock.source.source import Source, SourceOptions, open_source
from tests.support.binlog.mariadb_log import gtids_between, keep_mariadb_file, write_mariadb_files
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


@pytest.mark.parametrize("kind", [files, kept])
@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("0-1-100", ["0-2-50", "0-1-101", "0-2-51"]),
        ("0-1-100,0-2-50", ["0-1-101", "0-2-51"]),
        ("0-1-101", ["0-2-51"]),
    ],
)
def test_lower_number_of_another_server_behind_the_position_is_gtids_between(
    kind: Callable[..., Source], start: str, expected: list[str], tmp_path: Path
) -> None:
    log = "0-2-7", ["0-1-99", "0-1-100", "0-2-50", "0-1-101", "0-2-51"]
    assert gtids_between(kind(tmp_path / "log", log), start) == expected


def test_position_with_a_lower_number_than_what_precedes_it_is_refused(tmp_path: Path) -> None:
    """Unless the whole log is read, nothing shows whether the log contains this position."""
    source = files(tmp_path / "log", ("0-2-7", ["0-1-99", "0-1-100", "0-2-50", "0-1-101"]))
    with pytest.raises(PositionInvalid, match="0-1-99 comes without 0-2-50 before it"):
        gtids_between(source, "0-2-50")


def test_file_that_begins_behind_a_lower_number_is_not_taken_for_the_position(tmp_path: Path) -> None:
    source = files(
        tmp_path / "log",
        ("", ["0-1-99", "0-1-100", "0-2-50"]),
        ("0-1-100,0-2-50", ["0-2-51", "0-1-101"]),
    )
    assert gtids_between(source, "0-1-100") == ["0-2-50", "0-2-51", "0-1-101"]
    assert gtids_between(source, None, "0-1-100") == ["0-1-99", "0-1-100"]


def test_position_contains_what_an_earlier_primary_wrote(tmp_path: Path) -> None:
    source = files(tmp_path / "log", ("0-3-7", ["0-2-8", "0-2-9", "0-1-10", "0-1-11"]))
    assert gtids_between(source, "0-1-10") == ["0-1-11"]


@pytest.mark.parametrize("again", ["0-1-50", "0-1-100"])
def test_number_of_a_server_that_goes_back_or_repeats_stops_a_read_by_gtid(
    again: str, tmp_path: Path
) -> None:
    source = files(tmp_path / "log", ("", ["0-1-99", "0-1-100", again]))
    assert gtids_between(source, None) == ["0-1-99", "0-1-100", again], "a read by position needs no order"
    with pytest.raises(PositionInvalid, match=f"{again} comes after the same or a higher number") as refused:
        gtids_between(source, "0-1-100")
    assert refused.value.position is not None
    assert "penstock verify" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("start", "expected"),
    [("0-1-101", ["0-2-101", "0-2-102"]), ("0-1-100", ["0-1-101", "0-2-101", "0-2-102"])],
)
def test_transaction_of_the_next_primary_with_a_number_that_was_lost_is_gtids_between(
    start: str, expected: list[str], tmp_path: Path
) -> None:
    source = kept(tmp_path / "log", ("", ["0-1-100", "0-1-101"]), ("0-1-100", ["0-2-101", "0-2-102"]))
    assert gtids_between(source, start) == expected


@pytest.fixture
def accepted(tmp_path: Path) -> Source:
    """A log whose second server lacks 0-1-103 to 0-1-105, which an operator has accepted."""
    log = open_log(tmp_path / "log")
    keep_mariadb_file(log, 0, 1, "", ["0-1-101", "0-1-102", "0-1-103", "0-1-104", "0-1-105"])
    keep_mariadb_file(log, 1, 2, "0-1-102", ["0-2-103", "0-2-104", "0-2-105"], lost="0-1-105")
    keep_mariadb_file(log, 1, 2, "0-1-102,0-2-105", ["0-2-106"], number=2, lost="0-1-105")
    log.close()
    return open_source(SourceOptions(paths=(str(tmp_path / "log"),)))


NEW = ["0-2-103", "0-2-104", "0-2-105", "0-2-106"]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        # These readers have received lost transactions, so their positions are before the second server's
        # transactions.
        ("0-1-105", NEW),
        ("0-1-104", ["0-1-105", *NEW]),
        ("0-1-102", ["0-1-103", "0-1-104", "0-1-105", *NEW]),
        # These positions come from the second server, which never had the lost transactions.
        ("0-2-104", NEW[2:]),
        ("0-1-102,0-2-104", NEW[2:]),
        ("0-1-105,0-2-103", NEW[1:]),
        ("0-1-105,0-2-106", []),
        ("0-1-101", ["0-1-102", "0-1-103", "0-1-104", "0-1-105", *NEW]),
    ],
)
def test_reader_of_lost_transactions_receives_those_of_the_accepted_server(
    accepted: Source, start: str, expected: list[str]
) -> None:
    assert gtids_between(accepted, start) == expected


def test_lost_transaction_is_located_before_the_accepted_server(tmp_path: Path, accepted: Source) -> None:
    log = LogReader.open(tmp_path / "log")
    epochs = {gtid: log.locate_gtid(gtid).position.epoch for gtid in ("0-1-104", "0-2-104")}
    assert epochs == {"0-1-104": 0, "0-2-104": 1}


def test_reader_of_lost_transactions_is_refused_if_the_log_no_longer_has_them(tmp_path: Path) -> None:
    log = open_log(tmp_path / "log")
    keep_mariadb_file(log, 1, 2, "0-1-102", ["0-2-103", "0-2-104"], lost="0-1-105")
    log.close()
    source = open_source(SourceOptions(paths=(str(tmp_path / "log"),)))
    assert gtids_between(source, "0-2-103") == ["0-2-104"]
    with pytest.raises(PositionPurged, match="the log begins with"):
        gtids_between(source, "0-1-105")


def test_log_without_the_position_is_refused(tmp_path: Path) -> None:
    """The next primary wrote another transaction under the number of the position."""
    source = kept(tmp_path / "log", ("0-1-99", ["0-1-100", "0-2-101", "0-2-102"]))
    with pytest.raises(PositionInvalid, match="0-2-101 comes without 0-1-101 before it"):
        gtids_between(source, "0-1-101")


def test_log_of_a_restored_server_is_read_from_its_start(tmp_path: Path) -> None:
    assert gtids_between(kept(tmp_path / "log", ("", ["0-2-101"])), "0-1-100") == ["0-2-101"]


def test_transactions_outside_a_set_are_told_in_the_order_of_the_log() -> None:
    is_outside = OutsideSet("0-1-100", "0-2-40")
    assert [is_outside(gtid) for gtid in ("0-2-41", "0-1-100", "0-2-50", "")] == [False, False, True, False]
