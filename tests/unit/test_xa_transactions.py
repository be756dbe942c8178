# SPDX-License-Identifier: Apache-2.0
"""Rows of XA transactions are returned when they commit, for any ranges, and never after a rollback."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock._native import Decoder
from penstock.binlog import read_binlog
from penstock.errors import EventMalformed, IncidentLogged, PreparedMissing, StatementLogged
from penstock.source.files import FileSource
from penstock.source.reading import read_range
from penstock.source.source import ByteRange, SourceOptions
from tests.support.binlog.cut_source import CutSource, LiveSource
from tests.support.binlog.events import (
    ANNOTATE,
    GTID,
    INCIDENT,
    MARIADB_GTID,
    QUERY,
    STOP,
    XA_PREPARE,
    Event,
    events,
    first_event_end,
)
from tests.support.binlog.xa_log import COMMIT, Group, XaLog
from tests.support.suite.nonempty import each

SAMPLES = ("mysql-9.7-2", "mariadb-10.11-2", "mariadb-11.8-2")
DIALECTS = ("canal", "canal_flat", "debezium", "debezium_schema", "maxwell", "ptubes", "json")
SHAPES: dict[str, dict[str, Any]] = {
    "typed": {"emit": "typed"},
    "envelope": {"emit": "envelope"},
    **{dialect: {"emit": "messages", "dialect": dialect} for dialect in DIALECTS},
}
# Prepared transactions do not stay in memory, so their bytes are read again.
FORGETFUL = {"prepared_bytes_max": 0}


@pytest.fixture(params=SAMPLES)
def log(request: pytest.FixtureRequest) -> XaLog:
    """Each server's log."""
    return XaLog(request.param)


def rows_of(source: FileSource, file: str, start: int, stop: int | None = None, **options: Any) -> list[Any]:
    """Return the rows of the transactions that start in a part of a file."""
    byte_range = ByteRange(0, file, start, stop, aligned=start == first_event_end(source.head_bytes(file)))
    return [
        row
        for batch in read_range(source, byte_range, **options)
        for row in pyarrow.record_batch(batch).to_pylist()
    ]


def all_rows(path: Path, **options: Any) -> list[Any]:
    """Return the rows of a whole file."""
    return rows_of(source_of(path), path.name, first_event_end(path.read_bytes()), **options)


def source_of(*paths: Path) -> FileSource:
    return FileSource(SourceOptions.parse([str(path) for path in paths]))


def versions(rows: Sequence[Any]) -> list[int]:
    return [row["_commit_version"] for row in rows]


def group_start(path: Path, group: Group) -> int:
    """Return the offset of a group of events in a file, by the body of its first event."""
    return next(event.offset for event in events(path.read_bytes()) if event.body == group[0].body)


def pass_prepared(decoder: Decoder, data: bytes) -> None:
    """Feed a prepared transaction without reading any table."""
    while decoder.reads_prepared:
        data = data[decoder.feed_prepared(data) :]
        if decoder.state == "table":
            decoder.answer_table(None)


@pytest.mark.parametrize("options", [{}, FORGETFUL], ids=["kept", "forgetful"])
def test_rows_have_the_version_and_the_order_of_their_commit(
    log: XaLog, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare, *log.after, log.commit])
    rows = all_rows(path, emit="envelope", **options)
    commit = group_start(path, log.commit)
    committed = [row for row in rows if row["_commit_version"] == 1 << 32 | commit >> 4]
    assert committed
    assert committed == rows[-len(committed) :], "it commits last"
    assert versions(rows) == sorted(versions(rows))
    places = {(row["_metadata"]["file"], row["_metadata"]["offset"]) for row in committed}
    assert places == {
        (path.name, next(event.offset for event in events(path.read_bytes()) if COMMIT in event.body))
    }
    assert [row["_metadata"]["row"] for row in committed] == list(range(len(committed)))


@pytest.mark.parametrize("shape", SHAPES)
def test_rolled_back_transaction_returns_no_rows(log: XaLog, tmp_path: Path, shape: str) -> None:
    def rows(name: str, *groups: Group) -> list[Any]:
        folder = tmp_path / name
        folder.mkdir()
        return all_rows(log.write(folder / "mysql-bin.000001", groups), **SHAPES[shape])

    never = rows("never", *log.before, *log.after)
    assert rows("undone", *log.before, *log.after, log.prepare, log.rollback()) == never
    assert rows("prepared", *log.before, *log.after, log.prepare) == never
    assert rows("before", *log.before, *log.after, log.rollback()) == never, (
        "it was prepared before all of it"
    )


def test_every_cut_between_prepare_and_commit_returns_each_row_once(log: XaLog, tmp_path: Path) -> None:
    path = log.write(
        tmp_path / "mysql-bin.000001", [*log.before, log.prepare, *log.after[:2], log.commit, *log.after[2:]]
    )
    source, start = source_of(path), first_event_end(path.read_bytes())
    expected = rows_of(source, path.name, start, emit="envelope")
    first, last = group_start(path, log.prepare), path.stat().st_size
    for cut in each(range(first - 50, min(last, group_start(path, log.commit) + 250), 7), least=50):
        actual_rows = [
            row
            for begin, end in ((start, cut), (cut, None))
            for row in rows_of(source, path.name, begin, end, emit="envelope")
        ]
        assert actual_rows == expected, cut


@pytest.mark.parametrize("files_between", [0, 2])
def test_commit_in_a_later_file_locates_the_prepared_rows(
    log: XaLog, tmp_path: Path, files_between: int
) -> None:
    paths = [log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare])]
    for number in range(files_between):
        paths.append(log.write(tmp_path / f"mysql-bin.{number + 2:06}", log.after[:1]))
    last = log.write(tmp_path / f"mysql-bin.{files_between + 2:06}", [log.commit, *log.after])
    source, start = source_of(*paths, last), first_event_end(last.read_bytes())
    rows = rows_of(source, last.name, start, emit="envelope")
    assert rows[0]["_commit_version"] == (files_between + 2) << 32 | group_start(last, log.commit) >> 4
    alone = source_of(last)
    with pytest.raises(PreparedMissing) as caught:
        rows_of(alone, last.name, start, emit="envelope")
    assert caught.value.position == f"{last.name}:{group_start(last, log.commit)}"
    assert caught.value.hint is not None


def test_whole_transactions_before_a_missing_prepare_are_returned(log: XaLog, tmp_path: Path) -> None:
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, *log.after, log.commit])
    expected = all_rows(log.write(tmp_path / "whole.000001", [*log.before, *log.after]), emit="envelope")
    actual_rows: list[Any] = []
    start = first_event_end(path.read_bytes())
    batches = read_range(source_of(path), ByteRange(0, path.name, start, None, True), emit="envelope")
    with pytest.raises(PreparedMissing):
        actual_rows.extend(row for batch in batches for row in pyarrow.record_batch(batch).to_pylist())
    assert versions(actual_rows) == versions(expected)


def test_reused_id_commits_the_newer_rows(log: XaLog, tmp_path: Path) -> None:
    """A crashed server may have lost the older transaction, so the log does not contain its outcome."""
    rows = [
        group for group in log.prepare if group.code not in (GTID, MARIADB_GTID, QUERY, XA_PREPARE, ANNOTATE)
    ]
    older = [group for group in log.prepare if group not in rows]
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, older, log.prepare, *log.after, log.commit])
    usual = log.write(tmp_path / "usual.000001", [*log.before, log.prepare, *log.after, log.commit])
    for options in ({}, FORGETFUL):
        actual_rows = all_rows(path, emit="envelope", **options)
        assert len(actual_rows) == len(all_rows(usual, emit="envelope"))


def test_events_of_another_transaction_are_refused(log: XaLog, tmp_path: Path) -> None:
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare, *log.after, log.commit])
    data = path.read_bytes()
    head = data[: first_event_end(data)]
    commit = group_start(path, log.commit)
    decoder = Decoder(
        instance="test", file=path.name, offset=commit, head=head, emit="envelope", statements=False
    )
    decoder.feed(data[commit:])
    assert decoder.state == "prepared"
    wrong = next(group for group in log.after if group[-1].code != QUERY)
    start = group_start(path, wrong)
    decoder.answer_prepared(path.name, start, start + sum(group.size for group in wrong), head)
    with pytest.raises(EventMalformed):
        pass_prepared(decoder, data[start:])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, FORGETFUL], ids=["kept", "forgetful"])
@pytest.mark.parametrize("log", SAMPLES[:2], indirect=True)
def test_lost_connections_lose_and_duplicate_no_row(
    log: XaLog, tmp_path: Path, shape: str, options: dict[str, Any]
) -> None:
    prepared = log.many_rows(6)
    path = log.write(
        tmp_path / "mysql-bin.000001", [*log.before, prepared, log.after[0], log.commit, *log.after[1:]]
    )
    # Every rows event is returned as its own batch.
    eager = {"batch_rows_max": 3, "batch_bytes_max": 64, "held_bytes_max": 1, **options, **SHAPES[shape]}
    start = first_event_end(path.read_bytes())
    expected = rows_of(CutSource(path, ()), path.name, start, **eager)
    first, commit = group_start(path, prepared), group_start(path, log.commit)
    for cuts in each(
        (
            [commit + 60],
            [commit + 90, commit + 30, first + 100],
            [first + 200, commit + 200, commit + 200],
            [first + 31 * step for step in range(8)],
        ),
        least=4,
    ):
        source = CutSource(path, cuts)
        assert rows_of(source, path.name, start, **eager) == expected, cuts
        assert source.losses >= len(cuts)


def test_files_and_ranges_return_the_same_rows(log: XaLog, tmp_path: Path) -> None:
    log.write(tmp_path / "mysql-bin.000001", [*log.before, log.prepare])
    log.write(tmp_path / "mysql-bin.000002", [log.after[0], log.commit, *log.after[1:]])
    single = log.write(
        tmp_path / "one.000001", [*log.before, log.prepare, log.after[0], log.commit, *log.after[1:]]
    )
    split = [str(path) for path in sorted(tmp_path.glob("mysql-bin.*"))]
    read: Callable[..., Any] = read_binlog
    counts = [sum(batch.rows for batch in read(paths, emit="envelope")) for paths in (split, [str(single)])]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("options", [{}, FORGETFUL], ids=["kept", "forgetful"])
def test_live_range_ends_after_a_commit(
    log: XaLog, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.source.decoding._SYNC_SECONDS_MAX", 0)
    path = log.write(tmp_path / "mysql-bin.000001", [log.prepare, log.commit])
    start, stop = first_event_end(path.read_bytes()), path.stat().st_size
    rows = rows_of(LiveSource(path), path.name, start, stop, emit="envelope", **options)
    assert rows == all_rows(path, emit="envelope")
    assert rows


def test_cut_is_proved_only_against_events_of_its_own_file(log: XaLog, tmp_path: Path) -> None:
    first = log.write(tmp_path / "mysql-bin.000001", [*log.before, log.many_rows(20)])
    last = log.write(tmp_path / "mysql-bin.000002", [log.commit, *log.after * 4])
    source, start = source_of(first, last), first_event_end(last.read_bytes())
    expected = rows_of(source, last.name, start, emit="envelope")
    cuts = [event.offset for event in events(last.read_bytes()) if event.offset > start]
    for cut in each(cuts, least=15):
        ranges = (
            ByteRange(0, last.name, start, cut, True, is_cut=True),
            ByteRange(0, last.name, cut, None, False),
        )
        actual_rows = [
            row
            for byte_range in ranges
            for batch in read_range(source, byte_range, emit="envelope")
            for row in pyarrow.record_batch(batch).to_pylist()
        ]
        assert actual_rows == expected, cut


def test_transaction_inside_an_xa_transaction_is_refused(log: XaLog, tmp_path: Path) -> None:
    unended = log.prepare[:-1]
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, unended, log.after[0]])
    with pytest.raises(EventMalformed, match="a transaction begins inside") as caught:
        all_rows(path, emit="envelope")
    assert caught.value.position == f"{path.name}:{group_start(path, log.after[0])}"


def test_incident_inside_a_rolled_back_xa_transaction_is_reported(log: XaLog, tmp_path: Path) -> None:
    incident = Event(0, INCIDENT, 1, 0, 0, b"\1\0\4lost")
    prepare = [*log.prepare[:-1], incident, log.prepare[-1]]
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, prepare, log.rollback()])
    with pytest.raises(IncidentLogged):
        all_rows(path, emit="envelope")


def test_file_closed_inside_an_xa_transaction_ends_there(log: XaLog, tmp_path: Path) -> None:
    stop = Event(0, STOP, 1, 0, 0, b"")
    path = log.write(tmp_path / "mysql-bin.000001", [[*log.prepare[:-1], stop]])
    decoder = Decoder(instance="test", file=path.name, emit="envelope")
    decoder.feed(path.read_bytes())
    assert decoder.closed


def test_statement_of_an_xa_transaction_is_reported_at_its_commit(log: XaLog, tmp_path: Path) -> None:
    commit = log.commit[-1]
    statement = replace(commit, body=commit.body[: commit.body.rindex(COMMIT)] + b"INSERT INTO t VALUES (1)")
    prepare = [*log.prepare[:-1], statement, log.prepare[-1]]
    first = log.write(tmp_path / "mysql-bin.000001", [*log.before, *log.before, prepare])
    last = log.write(tmp_path / "mysql-bin.000002", [log.commit])
    with pytest.raises(StatementLogged) as caught:
        rows_of(source_of(first, last), last.name, first_event_end(last.read_bytes()), emit="envelope")
    position = next(event.offset for event in events(last.read_bytes()) if COMMIT in event.body)
    assert caught.value.position == f"{last.name}:{position}"


def test_returned_rows_are_counted_when_prepared_bytes_start_again(log: XaLog, tmp_path: Path) -> None:
    prepared = log.many_rows(6)
    path = log.write(tmp_path / "mysql-bin.000001", [*log.before, prepared, log.commit])
    data = path.read_bytes()
    head = data[: first_event_end(data)]
    start, commit = group_start(path, prepared), group_start(path, log.commit)
    rows_bytes = [event.size for event in events(data) if start < event.offset < commit]
    for held_bytes_max in each(range(1, sum(rows_bytes), 7), least=20):
        decoder = Decoder(
            instance="test",
            file=path.name,
            offset=commit,
            head=head,
            emit="envelope",
            statements=False,
            held_bytes_max=held_bytes_max,
        )
        decoder.feed(data[commit:])
        row_count = 0
        # Reading fails after two thirds of the bytes, and starts again.
        for end in (start + (commit - start) * 2 // 3, commit):
            decoder.answer_prepared(path.name, start, commit, head)
            at = start
            while decoder.reads_prepared:
                at += decoder.feed_prepared(data[at:end])
                if decoder.state == "table":
                    decoder.answer_table(from_log=True)
                elif decoder.state == "batch":
                    row_count += decoder.take_batch().rows
                    assert decoder.handed_out()[0] == row_count, held_bytes_max
                elif decoder.state == "prepared":
                    break
