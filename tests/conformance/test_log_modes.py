# SPDX-License-Identifier: Apache-2.0
"""The behaviour that every log must have, whether it is kept in memory, in files, or in both."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.captures import check_instances
from penstock.errors import (
    AccessDenied,
    LimitExceeded,
    LogFull,
    OptionInvalid,
    PositionInvalid,
    PositionPurged,
    QuotaReached,
    SourceMissing,
)
from penstock.logstore import holds, memory_log
from penstock.logstore.disk import Disk
from penstock.logstore.holds import Hold
from penstock.logstore.log import Log
from penstock.logstore.memory_disk import MemoryDisk
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position
from penstock.settings.daemon import LogSettings
from tests.support.capture.captured_log import capturing, head_of, settings_of, wait_for_position
from tests.support.logstore.source import SETTINGS, TIME_S, Captured, boundaries, check_log, server_files
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

MODES = ["memory", "file", "mixed"]
MIXED_BYTES = 6000


def settings(mode: str, **changes: object) -> LogSettings:
    memory_bytes = {"memory": 1 << 20, "file": 0, "mixed": MIXED_BYTES}[mode]
    return SETTINGS.model_copy(update={"mode": mode, "memory_bytes": memory_bytes, **changes})


def open_mode(mode: str, folder: Path, disk: Disk | None = None, **changes: object) -> Log:
    if mode == "memory":
        return MemoryLog.open_memory(settings(mode, **changes), instance="shop", clock=lambda: TIME_S)
    return Log.open(folder, settings(mode, **changes), disk, clock=lambda: TIME_S)


@pytest.fixture(params=MODES)
def log(request: pytest.FixtureRequest) -> Iterator[Log]:
    # Syncs to a real disk would dominate the run time of such a small log, and the tests do not depend on
    # them.
    with open_mode(request.param, Path("/log"), MemoryDisk(1 << 26)) as opened:
        yield opened


def capture_in_a_thread(log: Log, each: Callable[[Captured, int], None]) -> threading.Thread:
    thread = threading.Thread(target=Captured(log, each=each).run, daemon=True)
    thread.start()
    return thread


def test_captured_bytes_are_read_back_whole(log: Log) -> None:
    Captured(log).run()
    check_log(log, whole=True)
    assert len(log.segments) > 6


def test_any_range_equals_that_of_the_source(log: Log) -> None:
    Captured(log).run()
    for file in each(server_files()):
        first = 4 + int.from_bytes(file.content[13:17], "little")
        for start in each(range(first, len(file.content), 331)):
            for stop in (start + 1, start + 900, len(file.content)):
                stop = min(stop, len(file.content))
                read = b"".join(log.read(file.epoch, file.name, start, stop))
                assert read == file.content[start:stop]


def test_every_boundary_has_a_gtid_set_that_locates_it(log: Log) -> None:
    Captured(log).run()
    first = log.earliest()
    assert first is not None
    for position, gtid_set in boundaries().items():
        if position < first:
            continue
        assert log.gtid_set(position) == gtid_set
        if position.epoch == 0 and gtid_set:
            assert log.locate_gtid_set(gtid_set).position <= max(
                extent for extent, same in boundaries().items() if extent.epoch == 0 and same == gtid_set
            )


def test_every_position_and_time_is_located(log: Log) -> None:
    Captured(log).run()
    first = log.earliest()
    assert first is not None
    for position in boundaries():
        if position >= first:
            located = log.locate_position(position).position
            assert located == position or located.file != position.file
    for record in log.segments:
        if record.time_first_us:
            actual = log.locate_time(record.time_first_us).position
            assert actual <= Position(record.epoch, log.segment_head(record).file, record.base)


def test_reader_follows_a_growing_log_and_receives_every_byte_once(log: Log) -> None:
    got: dict[tuple[int, str], bytes] = {}
    writer = capture_in_a_thread(log, lambda _captured, _count: None)
    last = server_files()[-1]
    end = Position(last.epoch, last.name, len(last.content))
    seen: Position | None = None
    while seen != end:
        visible = log.wait_visible(seen, timeout=WAIT_SECONDS_MAX)
        assert visible is not None
        assert seen is None or visible > seen
        for extent in log.extents():
            if extent.first > visible:
                continue
            file = (extent.epoch, extent.file)
            done = extent.start + len(got.get(file, b""))
            stop = min(extent.end, visible.offset) if extent.file == visible.file else extent.end
            if done < stop:
                got[file] = got.get(file, b"") + b"".join(log.read(*file, done, stop))
        seen = visible
    writer.join(WAIT_SECONDS_MAX)
    for file in server_files():
        first = 4 + int.from_bytes(file.content[13:17], "little")
        assert got[file.epoch, file.name] == file.content[first:]


def test_visible_end_only_grows_and_is_a_boundary(log: Log) -> None:
    seen: list[Position] = []

    def look(_captured: Captured, _count: int) -> None:
        if log.visible is not None:
            seen.append(log.visible)

    Captured(log, piece_bytes=150, each=look).run()
    assert seen == sorted(seen)
    assert len(set(seen)) > 30
    assert set(seen) <= set(boundaries())


def test_sync_reports_the_durable_end(log: Log) -> None:
    Captured(log).run()
    assert log.sync() == log.visible == log.durable


def test_status_numbers_are_consistent(log: Log) -> None:
    Captured(log).run()
    status = log.status()
    assert status.segments == len(log.segments)
    assert status.epoch == 1
    assert (status.earliest, status.visible) == (log.earliest(), log.head())
    assert status.transactions > 20
    assert status.bytes > sum(len(file.content) for file in server_files()) * 0.9


def test_missing_positions_raise_the_same_errors_in_every_mode(log: Log) -> None:
    with pytest.raises(SourceMissing):
        log.head()
    assert log.earliest() is None
    Captured(log).run()
    last = server_files()[-1]
    with pytest.raises(PositionInvalid):
        list(log.read(last.epoch, last.name, 400, len(last.content) + 1))
    with pytest.raises(PositionPurged):
        log.locate_position(Position(0, "mysql-bin.000000", 4))
    with pytest.raises(PositionInvalid):
        log.locate_position(Position(1, last.name, len(last.content) + 1000))
    with pytest.raises(SourceMissing):
        log.head_bytes(0, "mysql-bin.000099")


def test_unfinished_transaction_sent_again_is_stored_once(log: Log) -> None:
    captured = Captured(log, piece_bytes=150)

    class Stop(Exception):
        """Signals that the connection is lost."""

    def lose(_captured: Captured, count: int) -> None:
        if count % 37 == 36:
            raise Stop

    captured.each = lose
    for _ in range(100):
        try:
            captured.run()
            break
        except Stop:
            continue
    check_log(log, whole=True)


def test_closing_wakes_a_waiting_thread(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    Captured(log).run()
    answers: list[Position | None] = []
    asleep = threading.Event()
    wait = log._changed.wait

    def wait_noted(timeout: float | None = None) -> bool:
        # The writer releases the lock while it waits, so the log is closed during its wait.
        asleep.set()
        return wait(timeout)

    monkeypatch.setattr(log._changed, "wait", wait_noted)
    waiting = threading.Thread(target=lambda: answers.append(log.wait_visible(log.visible)), daemon=True)
    visible = log.visible
    waiting.start()
    assert asleep.wait(WAIT_SECONDS_MAX)
    log.close()
    waiting.join(WAIT_SECONDS_MAX)
    assert answers == [visible]


# --- Specific to a mode ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["file", "mixed"])
def test_files_outlast_the_process(tmp_path: Path, mode: str) -> None:
    with open_mode(mode, tmp_path / "log") as log:
        Captured(log).run()
        visible = log.visible
    with open_mode(mode, tmp_path / "log") as log:
        assert log.visible == visible
        check_log(log, whole=True)


def test_memory_mode_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with open_mode("memory", tmp_path / "log") as log:
        Captured(log).run()
        assert not log.folder.exists()
    assert not [*tmp_path.iterdir()]


def test_mixed_mode_serves_buffered_bytes_from_memory(tmp_path: Path) -> None:
    with open_mode("mixed", tmp_path / "log") as log:
        Captured(log).run()
        assert log.memory is not None
        assert 0 < log.memory.bytes_held <= MIXED_BYTES
        last, first = server_files()[-1], server_files()[0]
        start = len(last.content) - 100
        held = log.memory.read(last.epoch, last.name, start, len(last.content))
        assert held is not None
        assert b"".join(held) == last.content[start:]
        assert log.memory.read(first.epoch, first.name, 300, 400) is None
        assert b"".join(log.read(first.epoch, first.name, 300, 400)) == first.content[300:400]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MemoryLog:
    """A memory log with room for about a third of the source."""
    monkeypatch.setattr(memory_log, "MEMORY_BYTES_MIN", 1)
    log = open_mode("memory", tmp_path, memory_bytes=30_000)
    assert isinstance(log, MemoryLog)
    return log


def patient(log: Log) -> list[float]:
    """Retry the log's writer while the log is full; return how often it was throttled."""
    append, held = log.append, []

    def again(*values: object, **named: object) -> None:
        while True:
            try:
                return append(*values, **named)  # type: ignore[arg-type]
            except LogFull:
                held.append(time.monotonic())
                time.sleep(0.002)

    log.append = again  # type: ignore[method-assign]
    return held


def test_without_a_reader_the_oldest_bytes_of_memory_are_evicted(small: MemoryLog) -> None:
    held = patient(small)
    Captured(small).run()
    assert not held
    first = small.earliest()
    assert first is not None
    assert first > Position(0, server_files()[0].name, 2000)
    last = server_files()[-1]
    assert small.visible == Position(last.epoch, last.name, len(last.content))
    check_log(small)


def test_memory_reader_is_moved_only_by_its_account(
    small: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "HOLDS_PER_ACCOUNT_MAX", 1)
    Captured(small).run()
    head = small.head()
    small.hold(Hold("cache", head, account="orders"))
    with pytest.raises(AccessDenied, match="another account than search"):
        small.hold(Hold("cache", head, account="search"))
    with pytest.raises(QuotaReached, match="has 1 holds"):
        small.hold(Hold("more", head, account="orders"))
    small.hold(Hold("cache", head, account="operator"), admin=True)
    assert small.acknowledged() == {"cache": head}


def test_memory_reader_that_never_returns_expires() -> None:
    now = [TIME_S]
    log = MemoryLog.open_memory(
        settings("memory", memory_bytes=1 << 20), instance="shop", clock=lambda: now[0]
    )
    with log:
        Captured(log).run()
        start, head = log.earliest(), log.head()
        assert start is not None
        expires_us = int((TIME_S + 60) * 1_000_000)
        log.hold(Hold("gone", start, expires_us, "orders"))
        log.hold(Hold("back", start, expires_us, "orders"))
        assert log.acknowledged() == {"back": start, "gone": start}
        now[0] += 59
        log.hold(Hold("back", head, expires_us + 60_000_000, "orders"))
        assert log.acknowledged() == {"back": head, "gone": start}
        now[0] += 1
        assert log.acknowledged() == {"back": head}
        # The expired name is free again, also for another account.
        log.hold(Hold("gone", head, None, "search"))
        assert [hold.account for hold in log.holds()] == ["orders", "search"]


def test_writer_is_throttled_until_every_registered_reader_has_acknowledged(small: MemoryLog) -> None:
    held = patient(small)
    started = threading.Event()
    start = Position(0, server_files()[0].name, 127)

    def register(_captured: Captured, count: int) -> None:
        if count == 1:
            small.hold(Hold("fast", start))
            small.hold(Hold("slow", start))
            started.set()

    writer = capture_in_a_thread(small, register)
    assert started.wait(WAIT_SECONDS_MAX)
    wait_until(lambda: held)
    small.hold(Hold("fast", small.head()))
    stuck = small.head()
    time.sleep(0.05)
    assert small.head() == stuck, "the slow reader holds it back"
    assert small.full_because() is None or "slow" in (small.full_because() or "")
    got = b""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    last = server_files()[-1]
    end = Position(last.epoch, last.name, len(last.content))
    while small.head() != end or small.acknowledged()["slow"] != end:
        visible = small.head()
        at = small.acknowledged()["slow"]
        for extent in small.extents():
            first = max(extent.first, at)
            stop = min(extent.last, visible)
            if (first.epoch, first.file) == (extent.epoch, extent.file) and first < stop:
                got += b"".join(small.read(extent.epoch, extent.file, first.offset, stop.offset))
        small.hold(Hold("slow", visible))
        small.hold(Hold("fast", visible))
        assert time.monotonic() < deadline
    writer.join(WAIT_SECONDS_MAX)
    expected = b"".join(
        file.content[4 + int.from_bytes(file.content[13:17], "little") :] for file in server_files()
    )
    assert got == expected, "every byte once"


def test_disconnecting_reader_unblocks_the_writer(small: MemoryLog) -> None:
    held = patient(small)
    start = Position(0, server_files()[0].name, 127)
    writer = capture_in_a_thread(
        small, lambda _captured, count: small.hold(Hold("reader", start)) if count == 1 else None
    )
    wait_until(lambda: held)
    small.give_up("reader", "")
    writer.join(WAIT_SECONDS_MAX)
    assert not writer.is_alive()


def test_concurrent_acknowledgement_makes_room_for_the_next_attempt(
    small: MemoryLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = patient(small)
    make_room = small._make_room

    def acknowledged_late(all_segments: bool = False) -> Position | None:
        """Make the reader acknowledge everything immediately after acknowledgements were requested."""
        has_room = make_room(all_segments)
        if "reader" in small.acknowledged():
            small.hold(Hold("reader", small.head()))
        return has_room

    monkeypatch.setattr(small, "_make_room", acknowledged_late)
    start = Position(0, server_files()[0].name, 127)
    Captured(small, each=lambda _, count: small.hold(Hold("reader", start)) if count == 1 else None).run()
    assert held
    last = server_files()[-1]
    assert small.head() == Position(last.epoch, last.name, len(last.content))


def test_late_memory_reader_gets_the_start_of_memory(small: MemoryLog) -> None:
    Captured(small).run()
    with pytest.raises(PositionPurged) as purged:
        small.hold(Hold("late", Position(0, server_files()[0].name, 127)))
    assert str(small.earliest()) in str(purged.value)
    assert small.acknowledged() == {}


def test_transaction_larger_than_memory_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_log, "MEMORY_BYTES_MIN", 1)
    log = open_mode("memory", tmp_path, memory_bytes=4000)
    with pytest.raises(LimitExceeded) as refused:
        Captured(log, piece_bytes=150).run()
    assert "log.memory_bytes" in str(refused.value)


def test_acknowledgement_after_the_end_of_the_log_is_refused(small: MemoryLog) -> None:
    Captured(small).run()
    small.hold(Hold("reader", small.head()))
    with pytest.raises(PositionInvalid):
        small.hold(Hold("reader", Position(9, "mysql-bin.000001", 4)))


def test_memory_log_has_a_minimum_size() -> None:
    with pytest.raises(OptionInvalid):
        MemoryLog.open_memory(settings("memory", memory_bytes=1000), instance="shop")


# --- A real server, captured ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_server_is_captured_in_every_mode(
    mode: str, mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    start = head_of(mariadb_server)
    mariadb_server.sql("CREATE TABLE t (a INT); INSERT INTO t VALUES (1), (2), (3)", database=database)
    end = head_of(mariadb_server)
    folder = tmp_path / "log"
    chosen = settings_of(folder, mariadb_server.url(), {"mode": mode}, start=f"{start.file}:{start.offset}")
    own = (mariadb_server.data_directory / start.file).read_bytes()[start.offset : end.offset]
    with capturing(chosen) as capture:
        wait_for_position(capture, end)
        log = capture.log()
        assert b"".join(log.read(0, start.file, start.offset, end.offset)) == own
    assert folder.exists() == (mode != "memory")


def test_bytes_evicted_from_memory_are_not_acknowledged_to_the_server(tmp_path: Path) -> None:
    chosen = settings_of(tmp_path, "mysql://repl@127.0.0.1:1", {"mode": "memory"}, semi_sync=True)
    with pytest.raises(OptionInvalid) as refused:
        check_instances(chosen)
    assert "semi_sync" in str(refused.value)
