# SPDX-License-Identifier: Apache-2.0
"""The capture of a storage sink: its files become a log that every reader can read, even after restarts."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from penstock.capture.status import State
from penstock.logstore.reader import LogReader
from penstock.mysql.start import StartAt
from penstock.settings.daemon import InstanceSettings
from penstock.ticdc.capture import TicdcCapture
from penstock.ticdc.sink_log import SinkLog
from penstock.tidb.merged_capture import MergedCapture
from penstock.tidb.merged_log import end_of_merged_log
from tests.support.suite.patience import wait_until
from tests.support.ticdc.reading import changes, running_capture, statements, wait_for_ts
from tests.support.ticdc.sink import KEY, NAME, Sink, column, deleted, inserted, message, updated

CREATE, RENAME = "CREATE TABLE t (...)", "RENAME TABLE t TO u"


@pytest.fixture
def sink(tmp_path: Path) -> Sink:
    """A sink with the changes of one table up to 150."""
    sink = Sink(tmp_path / "sink")
    sink.database(90, "CREATE DATABASE shop")
    sink.table("t", 100, [KEY, NAME], CREATE, 3)
    rows = inserted(110, 1), inserted(110, 2), updated(120, 1, "n", "é"), deleted(130, 2)
    sink.rows("t/100/2026-11-23/CDC000001.json", *rows)
    sink.checkpoint(150)
    return sink


@contextmanager
def running_sink_capture(sink: Sink, folder: Path, start: StartAt | None = None) -> Iterator[MergedCapture]:
    """Run the capture of a sink with its log in a folder until the end of the block."""
    settings = {"source": sink.source, "ticdc": {"poll": 0.01}}
    with running_capture(TicdcCapture, settings, folder, start) as capture:
        yield capture


EXPECTED = [
    (110, "insert", "shop.t", 1, "n"),
    (110, "insert", "shop.t", 2, "n"),
    (120, "update_preimage", "shop.t", 1, "n"),
    (120, "update_postimage", "shop.t", 1, "é"),
    (130, "delete", "shop.t", 2, "n"),
]


def test_files_become_a_log_that_grows_with_the_checkpoint(sink: Sink, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with running_sink_capture(sink, folder) as capture:
        wait_for_ts(capture, 130)
        sink.rows("t/100/2026-11-24/CDC000001.json", inserted(160, 3))
        sink.checkpoint(170)
        wait_for_ts(capture, 160)
        wait_until(lambda: capture.snapshot().lag_seconds is not None and capture.progress.caught_up)
        assert capture.snapshot().server == sink.source
    assert changes(folder) == [*EXPECTED, (160, "insert", "shop.t", 3, "n")]


def test_restarted_capture_continues_after_its_last_transaction(sink: Sink, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    for checkpoint, last_ts in ((115, 110), (125, 120), (150, 130)):
        sink.checkpoint(checkpoint)
        with running_sink_capture(sink, folder) as capture:
            wait_for_ts(capture, last_ts)
    assert changes(folder) == EXPECTED


def test_capture_that_starts_latest_reads_what_follows_the_checkpoint(sink: Sink, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    for _ in range(2):
        with running_sink_capture(sink, folder, StartAt()) as capture:
            wait_until(lambda capture=capture: capture.progress.caught_up)
    sink.rows("t/100/2026-11-23/CDC000002.json", inserted(150, 3))
    sink.checkpoint(170)
    with running_sink_capture(sink, folder, StartAt()) as capture:
        wait_for_ts(capture, 150)
    assert changes(folder) == [(150, "insert", "shop.t", 3, "n")]


def test_crash_between_statements_of_one_timestamp_loses_none(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.table("a", 140, [KEY], "CREATE TABLE a (...)", 3)
    sink.table("b", 140, [KEY], "CREATE TABLE b (...)", 3)
    sink.table("c", 140, [KEY], "CREATE TABLE c (...)", 3)
    folder = tmp_path / "log"
    append = SinkLog.append
    crashed = threading.Event()

    def append_two(self: SinkLog, transaction: Any, statements_logged: int = 0) -> None:
        if transaction.commit_ts == 140 and not crashed.is_set():
            statements = transaction.statements[:2]
            append(self, type(transaction)(140, statements, ()), statements_logged)
            crashed.set()
            raise RuntimeError("killed")
        append(self, transaction, statements_logged)

    monkeypatch.setattr(SinkLog, "append", append_two)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with running_sink_capture(sink, folder):
        assert crashed.wait(30.0)
    sink.table("t", 145, [KEY], RENAME, 14)
    with running_sink_capture(sink, folder) as capture:
        wait_for_ts(capture, 145)
    texts = statements(folder)
    assert texts == [
        "CREATE DATABASE shop",
        CREATE,
        "CREATE TABLE a (...)",
        "CREATE TABLE b (...)",
        "CREATE TABLE c (...)",
        RENAME,
    ]


def test_crash_between_a_statement_and_rows_of_its_timestamp_loses_and_repeats_nothing(
    sink: Sink, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.table("a", 140, [KEY], "CREATE TABLE a (...)", 3)
    sink.table("b", 140, [KEY], "CREATE TABLE b (...)", 3)
    sink.rows("t/100/2026-11-23/CDC000002.json", inserted(140, 3))
    folder = tmp_path / "log"
    append = SinkLog.append
    crashed = threading.Event()

    def append_statements(self: SinkLog, transaction: Any, statements_logged: int = 0) -> None:
        if transaction.commit_ts == 140 and transaction.rows:
            crashed.set()
            raise RuntimeError("killed")
        append(self, transaction, statements_logged)

    with monkeypatch.context() as patched:
        patched.setattr(SinkLog, "append", append_statements)
        patched.setattr(threading, "excepthook", lambda arguments: None)
        with running_sink_capture(sink, folder):
            assert crashed.wait(30.0)
    # The log ends with the statements, followed by the rows of their timestamp.
    with running_sink_capture(sink, folder) as capture:
        wait_until(lambda: changes(folder)[-1][0] == 140)
    with running_sink_capture(sink, folder) as capture:
        sink.rows("t/100/2026-11-23/CDC000003.json", inserted(160, 4))
        sink.checkpoint(170)
        wait_for_ts(capture, 160)
    assert changes(folder)[len(EXPECTED) :] == [
        (140, "insert", "shop.t", 3, "n"),
        (160, "insert", "shop.t", 4, "n"),
    ]
    assert statements(folder)[2:] == ["CREATE TABLE a (...)", "CREATE TABLE b (...)"]


def test_values_of_every_type_reach_a_reader(sink: Sink, tmp_path: Path) -> None:
    columns = [
        KEY,
        column("u", "BIGINT UNSIGNED", 20),
        column("f", "FLOAT", 12),
        column("d", "DECIMAL", 20, ColumnScale="5"),
        column("b", "BIT", 10),
        column("y", "YEAR", 4),
        column("at", "DATETIME", ColumnScale="6"),
        column("da", "DATE"),
        column("ti", "TIME", ColumnScale="3"),
        column("c", "CHAR", 8),
        column("vb", "VARBINARY", 20),
        column("bl", "BLOB", 65535),
        column("tx", "LONGTEXT", 4294967295),
        column("j", "JSON"),
    ]
    texts = {
        "id": "-5",
        "u": "18446744073709551615",
        "f": "1.5",
        "d": "-12345.67890",
        "b": "682",
        "y": "2026",
        "at": "2026-11-22 11:15:00.123456",
        "da": "2026-11-22",
        "ti": "-12:34:56.789",
        "c": "ch",
        "vb": "ÿ\x00",
        "bl": "\x00\x01é",
        "tx": "héllo",
        "j": '{"a": [1, 2.5, null]}',
    }
    sink.table("types", 131, columns)
    sink.rows("types/131/CDC000001.json", message(140, "INSERT", texts, table="types"))
    with running_sink_capture(sink, tmp_path / "log") as capture:
        wait_for_ts(capture, 140)
    values = dict(zip(texts, changes(tmp_path / "log")[-1][3:], strict=True))
    assert values["vb"] == b"\xff\x00"
    assert values["bl"] == b"\x00\x01\xe9"
    assert [str(values[name]) for name in ("id", "u", "f", "d", "y", "c", "tx", "j")] == [
        texts[name] for name in ("id", "u", "f", "d", "y", "c", "tx", "j")
    ]
    assert (values["b"], str(values["at"]), str(values["da"])) == (682, texts["at"], texts["da"])


def test_changefeed_that_repeats_from_an_earlier_checkpoint_is_named(sink: Sink, tmp_path: Path) -> None:
    with running_sink_capture(sink, tmp_path / "log") as capture:
        wait_for_ts(capture, 130)
        sink.checkpoint(120)
        wait_until(lambda: "checkpoint 120" in (capture.snapshot().why or ""))
        assert not capture.progress.caught_up
        sink.rows("t/100/2026-11-23/CDC000002.json", deleted(130, 2), inserted(160, 3))
        sink.checkpoint(170)
        wait_for_ts(capture, 160)
        wait_until(lambda: capture.snapshot().why is None)
    assert changes(tmp_path / "log") == [*EXPECTED, (160, "insert", "shop.t", 3, "n")]


def test_log_starts_after_a_commit_timestamp(sink: Sink, tmp_path: Path) -> None:
    later = [change for change in EXPECTED if change[0] > EXPECTED[0][0]]
    with running_sink_capture(sink, tmp_path / "log", StartAt(commit_ts=EXPECTED[0][0])) as capture:
        wait_for_ts(capture, EXPECTED[-1][0])
    assert changes(tmp_path / "log") == later


@pytest.mark.parametrize(
    "start",
    [StartAt(commit_ts=970_639_217_768_660_992), StartAt(time_us=3_600_000_000_000_000)],
    ids=["commit timestamp", "time"],
)
def test_start_in_the_future_is_refused(sink: Sink, tmp_path: Path, start: StartAt) -> None:
    with running_sink_capture(sink, tmp_path / "log", start) as capture:
        wait_until(lambda: capture.snapshot().state in (State.STOPPED, State.RUNNING))
        failure = capture.snapshot().error
        assert failure is not None
        assert (failure.kind, "in the future" in failure.message) == ("OptionInvalid", True)


def test_start_between_the_checkpoint_and_the_present_is_accepted(sink: Sink, tmp_path: Path) -> None:
    start = StartAt(commit_ts=140)
    sink.checkpoint(135)
    with running_sink_capture(sink, tmp_path / "log", start) as capture:
        wait_until(lambda: capture.snapshot().state is State.RUNNING)
        sink.rows("t/100/2026-11-23/CDC000002.json", inserted(160, 3))
        sink.checkpoint(170)
        wait_for_ts(capture, 160)
    assert changes(tmp_path / "log") == [(160, "insert", "shop.t", 3, "n")]


def day_of(commit_ts: int) -> str:
    return f"t/100/2026-12-{commit_ts // 100:02}"


@pytest.mark.parametrize(
    ("start", "has_statement"),
    [(StartAt(earliest=True), False), (StartAt(earliest=True), True), (StartAt(), False)],
    ids=["after a row", "after a statement", "log without transactions"],
)
def test_days_that_expired_before_they_were_read_are_refused(
    sink: Sink, tmp_path: Path, start: StartAt, has_statement: bool
) -> None:
    if has_statement:
        sink.table("t", 140, [KEY, NAME], RENAME, 14)
    folder = tmp_path / "log"
    with running_sink_capture(sink, folder, start) as capture:
        wait_until(lambda: capture.progress.caught_up)
    for commit_ts in (200, 300):
        sink.rows(f"{day_of(commit_ts)}/CDC000001.json", inserted(commit_ts, commit_ts))
    sink.checkpoint(400)
    shutil.rmtree(sink.folder / "shop/t/100/2026-11-23")
    shutil.rmtree(sink.folder / "shop" / day_of(200))
    with running_sink_capture(sink, folder, start) as capture:
        wait_until(lambda: capture.snapshot().error is not None or capture.progress.caught_up)
        failure = capture.snapshot().error
        assert failure is not None
        assert (failure.kind, "2026-11-23/CDC000001.json" in failure.message) == ("SequenceGap", True)
    assert end_of_merged_log(LogReader.open(folder)).commit_ts < 200


def test_days_that_expired_after_they_were_read_do_not_stop_the_instance(sink: Sink, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with running_sink_capture(sink, folder) as capture:
        wait_for_ts(capture, 130)
        sink.checkpoint(160)
        wait_until(lambda: capture.snapshot().lag_seconds is not None and capture.progress.caught_up)
        sink.rows(f"{day_of(200)}/CDC000001.json", inserted(200, 3))
        sink.checkpoint(210)
        wait_for_ts(capture, 200)
    shutil.rmtree(sink.folder / "shop/t/100/2026-11-23")
    sink.rows(f"{day_of(300)}/CDC000001.json", inserted(300, 4))
    sink.checkpoint(400)
    with running_sink_capture(sink, folder) as capture:
        wait_for_ts(capture, 300)
    later = [(200, "insert", "shop.t", 3, "n"), (300, "insert", "shop.t", 4, "n")]
    assert changes(folder) == [*EXPECTED, *later]


def test_refused_file_stops_the_instance_by_name(sink: Sink, tmp_path: Path) -> None:
    sink.write("notes.txt", "")
    with running_sink_capture(sink, tmp_path / "log") as capture:
        wait_until(lambda: capture.snapshot().state is State.STOPPED)
        error = capture.snapshot().error
        assert error is not None
        assert "notes.txt" in str(error)


def test_log_of_another_sink_is_refused(sink: Sink, tmp_path: Path) -> None:
    folder = tmp_path / "log"
    with running_sink_capture(sink, folder) as capture:
        wait_for_ts(capture, 130)
    other = Sink(tmp_path / "other")
    other.checkpoint(100)
    with running_sink_capture(other, folder) as capture:
        wait_until(lambda: capture.snapshot().error is not None)
        assert "is the log of" in str(capture.snapshot().error)


@pytest.mark.parametrize(
    ("source", "others", "why"),
    [
        ("ticdc+kafka://broker", {}, "broker2:9092/topic"),
        ("ticdc+file", {}, "root of a storage sink"),
        ("ticdc+file:///x", {"server_id": 5}, "server_id: only for a MySQL"),
        ("ticdc+file:///x", {"ticdc": {"time_zone": "Mars"}}, "no time zone"),
        ("ticdc+file:///x", {"ticdc": {"virtual_columns": ["t.v"]}}, "database.table.column"),
        ("tidb://pd1", {"ticdc": {}}, "ticdc: only for a ticdc"),
    ],
)
def test_settings_that_cannot_work_are_refused(source: str, others: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        InstanceSettings.model_validate({"source": source, **others})
