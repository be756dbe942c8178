# SPDX-License-Identifier: Apache-2.0
"""Searches for XA transactions that were prepared before a range, and reads their bytes, also in damaged logs
and after errors.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.errors import ConnectionLost, PenstockError, PositionPurged, PreparedMissing
from penstock.model import Position
from penstock.source import decoding
from penstock.source.files import FileSource
from penstock.source.reading import read_range
from penstock.source.source import ByteRange, SourceOptions
from tests.support.binlog.events import INCIDENT, Event, compressed, events, first_event_end
from tests.support.binlog.xa_log import Group, XaLog

XID = "X'78',X'',1"
UNKNOWN = 119
ROWS_QUERY, IGNORABLE = 29, 0x80


@pytest.fixture(params=["mysql-9.7-2", "mariadb-10.11-2"])
def log(request: pytest.FixtureRequest) -> XaLog:
    """Each flavor's log."""
    return XaLog(request.param)


class FailingSource(FileSource):
    """Files that can be opened a number of times, after which opening them raises `error`, if it is set."""

    error: PenstockError | None = None
    opens_before_error = 0
    opened = 0

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        self.opened += 1
        if self.error is not None and self.opened > self.opens_before_error:
            raise self.error
        yield from super().open(byte_range, resume_at)


def source_of(*paths: Path) -> FailingSource:
    return FailingSource(SourceOptions.parse([str(path) for path in paths]))


def group_start(path: Path, group: Group) -> int:
    """Return the offset of a group of events in a file, by the body of its first event."""
    return next(event.offset for event in events(path.read_bytes()) if event.body == group[0].body)


def rows_from(source: FileSource, path: Path, start: int | None = None, **options: Any) -> list[Any]:
    """Return the rows of a file from an event on, by default from its first event."""
    first = first_event_end(path.read_bytes()) if start is None else start
    byte_range = ByteRange(0, path.name, first, None, aligned=True)
    return [
        row
        for batch in read_range(source, byte_range, emit="envelope", **options)
        for row in pyarrow.record_batch(batch).to_pylist()
    ]


def test_repeated_search_after_an_error_gives_the_same_positions(log: XaLog, tmp_path: Path) -> None:
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare, *log.after[:2]])
    source, end = source_of(path), Position(0, path.name, path.stat().st_size)
    prepared = source.find_prepared(XID, Position(0, path.name, group_start(path, log.after[1])))
    assert prepared is not None
    source.error = ConnectionLost("the connection was lost")
    with pytest.raises(ConnectionLost):
        source.find_prepared(XID, end)
    source.error = None
    assert source.find_prepared(XID, end) == prepared


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
def test_rows_already_committed_or_rolled_back_are_not_committed_again(
    log: XaLog, tmp_path: Path, outcome: str
) -> None:
    """The id is used again, and the second prepared transaction is missing from the log."""
    ended = log.commit if outcome == "commit" else log.rollback()
    for number, groups in enumerate(([*log.before, log.prepare], [ended], log.after[:1]), 1):
        log.write(tmp_path / f"mysql-bin.{number:06}", groups)
    last = log.write(tmp_path / "mysql-bin.000004", [log.commit])
    with pytest.raises(PreparedMissing):
        rows_from(source_of(tmp_path), last)


def test_repeated_search_at_one_position_reads_nothing(log: XaLog, tmp_path: Path) -> None:
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare])
    source, end = source_of(path), Position(0, path.name, path.stat().st_size)
    prepared = source.find_prepared(XID, end)
    assert prepared is not None
    for _ in range(2):
        assert source.find_prepared(XID, end) == prepared
    assert source.opened == 1


def test_search_forgets_purged_files(log: XaLog, tmp_path: Path) -> None:
    first = log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare])
    last = log.write(tmp_path / "mysql-bin.000002", log.after[:1])
    source, end = source_of(tmp_path), Position(0, last.name, last.stat().st_size)
    assert source.find_prepared(XID, end) is not None
    first.unlink()
    assert source.find_prepared(XID, end) is None
    assert {file for _, file in source._prepared._searched} == {last.name}


@pytest.mark.parametrize(
    "damage",
    [Event(0, INCIDENT, 1, 0, 0, b"\1\0\4lost"), Event(0, UNKNOWN, 1, 0, 0, b"of a later server")],
    ids=["incident", "unknown event"],
)
def test_old_damage_does_not_stop_a_reader_that_starts_after_it(
    log: XaLog, tmp_path: Path, damage: Event
) -> None:
    groups = [*log.before, [damage], log.prepare, log.commit, *log.after[:1]]
    path = log.write(tmp_path / "mysql-bin.000001", groups)
    whole = log.write(tmp_path / "whole.000001", [group for group in groups if group != [damage]])
    actual_rows = rows_from(source_of(path), path, group_start(path, log.commit))
    expected = rows_from(source_of(whole), whole, group_start(whole, log.commit))
    assert [row["after"] for row in actual_rows] == [row["after"] for row in expected]
    assert actual_rows


def test_whole_transactions_come_before_an_error_in_prepared_bytes(log: XaLog, tmp_path: Path) -> None:
    groups = [*log.before, log.prepare, *log.after[:1]]
    whole = log.write(tmp_path / "whole.000001", groups)
    path = log.write(tmp_path / "mysql-bin.000001", [*groups, log.commit])
    source, start = source_of(path), first_event_end(path.read_bytes())
    source.error, source.opens_before_error = PositionPurged("the file was purged"), 1
    byte_range = ByteRange(0, path.name, start, None, True)
    batches = read_range(source, byte_range, emit="envelope", prepared_bytes_max=0)
    actual_rows: list[Any] = []
    with pytest.raises(PositionPurged):
        actual_rows.extend(row for batch in batches for row in pyarrow.record_batch(batch).to_pylist())
    expected = rows_from(source_of(whole), whole)
    assert [row["_commit_version"] for row in actual_rows] == [row["_commit_version"] for row in expected]
    assert actual_rows


@pytest.mark.parametrize("log", ["mysql-9.7-2"], indirect=True)
@pytest.mark.parametrize("padding_bytes", [0, 1 << 20])
def test_compressed_transaction_at_the_end_of_its_file_is_read_in_large_pieces(
    log: XaLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, padding_bytes: int
) -> None:
    pieces = [0]
    bytes_missing = decoding._bytes_missing

    def counted(part: bytearray) -> int:
        pieces[0] += 1
        return bytes_missing(part)

    monkeypatch.setattr(decoding, "_bytes_missing", counted)
    gtid, begin, *rows = log.prepare
    padding = replace(begin, code=ROWS_QUERY, body=b"\0" + os.urandom(padding_bytes), flags=IGNORABLE)
    first = log.write(
        tmp_path / "mysql-bin.000001", [*log.before, [gtid, compressed([begin, padding, *rows])]]
    )
    last = log.write(tmp_path / "mysql-bin.000002", [log.commit])
    actual_rows = rows_from(source_of(first, last), last)
    plain = log.write(tmp_path / "plain.000001", [*log.before, log.prepare])
    expected = rows_from(
        source_of(plain, renamed := log.write(tmp_path / "plain.000002", [log.commit])), renamed
    )
    assert [row["after"] for row in actual_rows] == [row["after"] for row in expected]
    assert actual_rows
    assert pieces[0] < 10
