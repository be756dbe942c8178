# SPDX-License-Identifier: Apache-2.0
"""Retention of a log with real bytes, on a real disk and on a disk that loses power at every step."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.errors import (
    AccessDenied,
    LogDamaged,
    OptionInvalid,
    PositionPurged,
    QuotaReached,
    SourceMissing,
)
from penstock.logstore import holds as holds_module
from penstock.logstore.catalog import FolderCatalog
from penstock.logstore.disk import LocalDisk
from penstock.logstore.epochs import seal_json
from penstock.logstore.holds import Hold, Holds
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.records import TIERED
from penstock.logstore.retention import Reason, Retention, RetentionPolicy
from penstock.model import Position
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
from tests.support.logstore.source import FOLDER, SETTINGS, TIME_S, Captured, check_log, open_log

HOUR_S = 3600
SECOND_US = 1_000_000


class Clock:
    """A clock in seconds since 1970 that advances by an hour with each requested segment."""

    def __init__(self, now: float = TIME_S) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    @property
    def now_us(self) -> int:
        return int(self.now * SECOND_US)


def capture(log: Log, clock: Clock) -> None:
    """Fill a log with a dozen segments over several hours."""

    def an_hour_passes(_captured: Captured, count: int) -> None:
        clock.now += HOUR_S if count % 5 == 0 else 0

    Captured(log, each=an_hour_passes).run()
    log.sync()


@cache
def recorded_disk() -> tuple[SimulatedDisk, float]:
    """Return a disk with a captured log, and its capture time."""
    disk, clock = SimulatedDisk(), Clock()
    with open_log(disk, clock) as log:
        capture(log, clock)
    return disk, clock.now


@pytest.fixture
def clock() -> Clock:
    return Clock(recorded_disk()[1])


@pytest.fixture
def log(clock: Clock) -> Log:
    """The open log, on a separate disk."""
    return open_log(recorded_disk()[0].copy(), clock)


def retention(log: LogReader, policy: RetentionPolicy, clock: Clock | None = None) -> Retention:
    return Retention(log.disk, log.layout, policy, clock=(lambda: clock.now_us) if clock else None)


def disk_of(log: Log) -> SimulatedDisk:
    assert isinstance(log.disk, SimulatedDisk)
    return log.disk


def data_files(log: Log) -> list[str]:
    return [str(path) for path in disk_of(log).files() if ".binlog" in path.name]


def test_segments_older_than_their_age_are_removed_by_hour(log: Log, clock: Clock) -> None:
    before = list(log.segments)
    hours = sorted({segment.hour for segment in before})
    assert len(hours) > 3
    # Two and a half hours after the newest segment began, segments that ended two hours ago are due.
    clock.now += 1.5 * HOUR_S
    plan = retention(log, RetentionPolicy(age_seconds=2 * HOUR_S), clock).run(log)
    gone = [departure.segment.version for departure in plan.departures]
    assert gone == [segment.version for segment in before if segment.hour <= hours[-3]]
    assert gone
    assert {departure.reason for departure in plan.departures} == {Reason.AGE}
    assert [segment.version for segment in log.segments] == [
        segment.version for segment in before if segment.hour > hours[-3]
    ]
    check_log(log, whole=True)


def test_default_retention_is_a_day(log: Log, clock: Clock) -> None:
    kept = retention(log, RetentionPolicy(), clock)
    oldest = log.segments[0]
    clock.now = TIME_S + 25 * HOUR_S - 1
    assert not kept.plan(log.segments).departures
    clock.now += 1
    assert kept.plan(log.segments).departures[0].segment == oldest


def test_segments_over_the_byte_limit_are_removed_oldest_first(log: Log) -> None:
    before = list(log.segments)
    allowed = sum(segment.stored_bytes for segment in before[4:])
    plan = retention(log, RetentionPolicy(age_seconds=None, bytes_max=allowed)).run(log)
    assert [departure.segment for departure in plan.departures] == before[:4]
    assert {departure.reason for departure in plan.departures} == {Reason.BYTES}
    assert plan.bytes_freed == sum(segment.stored_bytes for segment in before[:4])
    check_log(log, whole=True)


def test_low_disk_space_removes_the_oldest_segments(log: Log) -> None:
    before = list(log.segments)
    disk_of(log).room = disk_of(log).used + 100_000
    policy = RetentionPolicy(age_seconds=None, free_bytes=100_000 + before[0].stored_bytes + 1)
    plan = retention(log, policy).run(log)
    assert [departure.segment for departure in plan.departures] == before[:2]
    assert {departure.reason for departure in plan.departures} == {Reason.FREE_BYTES}


def test_completely_full_disk_is_freed(log: Log) -> None:
    before = list(log.segments)
    disk = disk_of(log)
    disk.room = disk.used
    retention(log, RetentionPolicy(age_seconds=None, free_bytes=before[0].stored_bytes + 1)).run(log)
    assert disk.free_bytes(log.folder) > 0
    assert list(log.segments) == before[2:]
    disk_copy = disk.copy()
    disk_copy.room = None
    with open_log(disk_copy) as again:
        check_log(again, whole=True)


def test_newest_segment_is_never_removed(log: Log, clock: Clock) -> None:
    clock.now += 1000 * HOUR_S
    newest = log.segments[len(log.segments) - 1]
    everything = RetentionPolicy(age_seconds=0, bytes_max=0, free_bytes=1 << 60)
    retention(log, everything, clock).run(log)
    assert [segment.version for segment in log.segments] == [newest.version]
    check_log(log, whole=True)


def test_plan_changes_nothing(log: Log) -> None:
    files = data_files(log)
    plan = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0)).plan(log.segments)
    assert plan.departures
    assert data_files(log) == files
    assert not log.disk.list(log.folder / "expired")


# --- Two phases ---------------------------------------------------------------------------------


def test_removed_segments_are_renamed_first_and_deleted_by_the_next_pass(log: Log) -> None:
    allowed = sum(segment.stored_bytes for segment in list(log.segments)[2:])
    kept = retention(log, RetentionPolicy(age_seconds=None, bytes_max=allowed))
    plan = kept.run(log)
    moved = log.disk.list(log.folder / "expired")
    versions = [f"{departure.segment.version:019d}" for departure in plan.departures]
    assert moved == sorted(
        [f"{version}.binlog" for version in versions] + [f"{version}.index" for version in versions]
    )
    assert not kept.run(log).departures
    assert log.disk.list(log.folder / "expired") == []


def test_reader_of_an_open_segment_continues(log: Log) -> None:
    first = log.segments[0]
    kept = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0))
    with log.open_segment(first) as reader:
        whole = reader.read_bytes(first.base, first.source_end)
        kept.run(log)
        kept.run(log)
        assert not any(f"{first.version:019d}" in name for name in data_files(log))
        assert reader.read_bytes(first.base, first.source_end) == whole


def test_late_reader_gets_the_start_of_the_log(log: Log) -> None:
    start = log.earliest()
    assert start is not None
    allowed = sum(segment.stored_bytes for segment in list(log.segments)[3:])
    retention(log, RetentionPolicy(age_seconds=None, bytes_max=allowed)).run(log)
    with pytest.raises(PositionPurged) as purged:
        list(log.read(start.epoch, start.file, start.offset, start.offset + 10))
    assert str(log.earliest()) in str(purged.value)


def test_hour_without_segments_has_no_folder(log: Log, clock: Clock) -> None:
    clock.now += 1000 * HOUR_S
    retention(log, RetentionPolicy(age_seconds=0), clock).run(log)
    assert log.layout.hours(log.disk) == [log.segments[0].hour]


def test_log_without_a_writer_is_trimmed_by_its_folder(tmp_path: Path, clock: Clock) -> None:
    disk, layout = LocalDisk(), Layout(tmp_path / "log")
    with Log.open(layout.folder, SETTINGS, disk, clock=clock) as written:
        capture(written, clock)
    catalog = FolderCatalog.load(disk, layout)
    newest = list(catalog.segments)[-1]
    Retention(disk, layout, RetentionPolicy(age_seconds=None, bytes_max=0)).run(catalog)
    log = Log.open(tmp_path / "log", SETTINGS)
    assert [segment.version for segment in log.segments] == [newest.version]
    check_log(log, whole=True)


# --- Holds --------------------------------------------------------------------------------------


def test_held_segments_are_not_removed(log: Log) -> None:
    before = list(log.segments)
    needed = before[5]
    holds = Holds(log.disk, log.layout)
    inside = Position(needed.epoch, log.segment_head(needed).file, needed.base + 1)
    holds.put(Hold("job", inside))
    kept = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0))
    plan = kept.run(log)
    assert [departure.segment for departure in plan.departures] == before[:5]
    assert plan.held_by == Hold("job", inside)
    assert [departure.segment for departure in plan.held] == before[5:-1]
    assert next(iter(log.read(inside.epoch, inside.file, inside.offset, inside.offset + 1)))
    holds.remove("job")
    assert [departure.segment for departure in kept.run(log).departures] == before[5:-1]


def test_oldest_hold_counts(log: Log) -> None:
    before = list(log.segments)
    holds = Holds(log.disk, log.layout)
    for name, at in (("late", 8), ("early", 2), ("middle", 5)):
        segment = before[at]
        holds.put(Hold(name, Position(segment.epoch, log.segment_head(segment).file, segment.base)))
    plan = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0)).plan(log.segments)
    assert [departure.segment for departure in plan.departures] == before[:2]
    assert plan.held_by is not None
    assert plan.held_by.name == "early"


def test_advanced_hold_releases_segments(log: Log) -> None:
    holds = Holds(log.disk, log.layout)
    for at in (1, 4):
        segment = log.segments[at]
        holds.put(Hold("job", Position(segment.epoch, log.segment_head(segment).file, segment.base)))
    assert len(holds.all()) == 1
    plan = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0)).plan(log.segments)
    assert len(plan.departures) == 4


def test_hold_is_moved_only_by_its_account(log: Log) -> None:
    first = log.earliest()
    assert first is not None
    head = log.head()
    holds = Holds(log.disk, log.layout)
    holds.put(Hold("job", first, account="orders"))
    with pytest.raises(AccessDenied, match="belongs to another account than search"):
        holds.put(Hold("job", head, account="search"))
    assert holds.all() == [Hold("job", first, account="orders")]
    holds.put(Hold("job", head, account="orders"))
    holds.put(Hold("job", first, account="operator"), admin=True)
    assert holds.all() == [Hold("job", first, account="orders")]


def test_unowned_or_expired_hold_may_be_taken_over(log: Log) -> None:
    head = log.head()
    holds = Holds(log.disk, log.layout)
    holds.put(Hold("early", head))
    holds.put(Hold("late", head, expires_us=1, account="orders"))
    for name in ("early", "late"):
        holds.put(Hold(name, head, account="search"))
    assert [hold.account for hold in holds.all()] == ["search", "search"]


def test_number_of_holds_per_account_is_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "HOLDS_PER_ACCOUNT_MAX", 2)
    head = log.head()
    holds = Holds(log.disk, log.layout)
    for number in range(2):
        holds.put(Hold(f"job-{number}", head, account="orders"))
    with pytest.raises(QuotaReached, match="has 2 holds"):
        holds.put(Hold("job-2", head, account="orders"))
    holds.put(Hold("job-1", head, account="orders"))
    holds.put(Hold("job-2", head, account="search"))


def test_hold_beyond_its_byte_limit_holds_nothing(log: Log) -> None:
    before = list(log.segments)
    holds = Holds(log.disk, log.layout)
    for name, at in (("far", 1), ("near", 6)):
        segment = before[at]
        holds.put(Hold(name, Position(segment.epoch, log.segment_head(segment).file, segment.base)))
    within = sum(segment.stored_bytes for segment in before[6:])
    for bound, left in ((None, 1), (within, 6), (within - 1, len(before) - 1)):
        policy = RetentionPolicy(age_seconds=None, bytes_max=0, hold_bytes=bound)
        assert len(retention(log, policy).plan(log.segments).departures) == left


def put_holds(log: Log, **holds: int) -> None:
    """Set holds at the starts of segments, by number."""
    for name, at in holds.items():
        segment = log.segments[at]
        position = Position(segment.epoch, log.segment_head(segment).file, segment.base)
        Holds(log.disk, log.layout).put(Hold(name, position))


def broken_by(kept: Retention) -> dict[str, str]:
    return {broken_hold.hold.name: broken_hold.why.split(":")[0] for broken_hold in kept.broken}


def test_hold_is_broken_before_the_disk_is_full(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(log.segments)
    put_holds(log, far=2, middle=4, near=8)
    free = [10_000_000]
    monkeypatch.setattr(log.disk, "free_bytes", lambda _: free[0])
    # The third and fourth segment are needed.
    bound = free[0] + sum(segment.stored_bytes for segment in before[:4])
    kept = retention(log, RetentionPolicy(age_seconds=0, hold_free_bytes=free[0]))
    assert len(kept.run(log).departures) == 2
    assert kept.broken == ()
    kept = retention(log, RetentionPolicy(age_seconds=0, hold_free_bytes=bound))
    free[0] += sum(segment.stored_bytes for segment in before[:2])
    # The hold still counts in the pass that breaks it, so that other removals are tried first.
    assert kept.run(log).departures == []
    assert broken_by(kept) == {"far": "the disk has less than hold_free_bytes free"}
    assert [departure.segment for departure in kept.run(log).departures] == before[2:4]
    # The disk has space again, and the held segments are gone.
    free[0] = bound
    assert not kept.run(log).departures
    assert broken_by(kept) == {"far": "what it was to keep has left the log"}
    assert kept.plan(log.segments).held_by == Hold("middle", kept.holds.all()[1].position)
    # A broken hold does not protect segments again after a restart.
    again = retention(log, kept.policy)
    assert not again.run(log).departures
    assert broken_by(again) == {"far": "what it was to keep has left the log"}
    assert again.plan(log.segments).held_by == Hold("middle", again.holds.all()[1].position)


def test_hold_at_the_start_of_the_first_file_of_a_log_is_whole(log: Log) -> None:
    first = log.segments[0]
    assert first.base > 4
    position = Position(first.epoch, log.segment_head(first).file, 4)
    Holds(log.disk, log.layout).put(Hold("reader", position), log=log)
    kept = retention(log, RetentionPolicy(age_seconds=0))
    assert not kept.run(log).departures
    assert kept.broken == ()


def test_free_disk_limit_does_not_break_a_hold_on_tiered_segments(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(log.segments)
    put_holds(log, far=2, near=8)
    monkeypatch.setattr(log.disk, "free_bytes", lambda _: 0)
    policy = RetentionPolicy(age_seconds=0, hold_free_bytes=1)
    # Removing the first local segment frees space; without a local segment, breaking a hold frees none.
    for first_here, broken in ((1, set()), (6, {"far"}), (8, {"far", "near"}), (len(before), set())):
        segments = [
            replace(segment, state=TIERED) if at < first_here else segment
            for at, segment in enumerate(before)
        ]
        plan = retention(log, policy).plan(segments)
        assert {segment.hold.name for segment in plan.broken} == broken


def test_broken_hold_is_reported_once_and_when_it_holds_again(log: Log) -> None:
    put_holds(log, far=1)
    kept = retention(log, RetentionPolicy(age_seconds=None, hold_bytes=1))
    with capture_logs() as lines:
        kept.run(log)
        kept.run(log)
        put_holds(log, far=len(log.segments) - 1)
        kept.policy = RetentionPolicy(age_seconds=None)
        kept.run(log)
    hold_events = [(line["event"], line["hold"]) for line in lines if "hold" in line]
    assert hold_events == [
        ("a hold is broken and holds nothing", "far"),
        ("a hold is no longer broken", "far"),
    ]


def test_hold_of_0_1_0_is_read(log: Log) -> None:
    head = log.head()
    written = seal_json({"position": str(head), "expires_us": None})
    disk_of(log).make_folder(log.folder / "holds")
    disk_of(log).put(log.folder / "holds" / "job.json", written)
    assert Holds(log.disk, log.layout).all() == [Hold("job", head)]


def test_hold_expires(log: Log, clock: Clock) -> None:
    first = log.earliest()
    assert first is not None
    kept = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0), clock)
    kept.holds.put(Hold("job", first, expires_us=clock.now_us + 60 * SECOND_US))
    assert not kept.run(log).departures
    clock.now += 61
    assert kept.run(log).departures
    assert log.disk.list(log.folder / "holds") == []


def test_damaged_hold_is_named_in_each_pass_and_holds_nothing(log: Log, clock: Clock) -> None:
    before = list(log.segments)
    kept = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0), clock)
    for name, at, expires_us in (("spoilt", 1, None), ("sound", 4, None), ("over", 2, clock.now_us)):
        position = Position(before[at].epoch, log.segment_head(before[at]).file, before[at].base)
        kept.holds.put(Hold(name, position, expires_us))
    path = log.folder / "holds" / "spoilt.json"
    content = json.loads(log.disk.read(path))
    content["position"] = "mysql-bin.000999:4"
    disk_of(log).put(path, json.dumps(content).encode())
    disk_of(log).put(log.folder / "holds" / "no name.json", b"{}")
    for departed in (4, 0):
        with capture_logs() as log_lines:
            plan = kept.run(log)
        assert len(plan.departures) == departed
        assert plan.held_by is not None
        assert plan.held_by.name == "sound"
        errors = {line["hold"]: line["reason"] for line in log_lines if line["log_level"] == "error"}
        assert errors.keys() == {"spoilt", "no name"}
        assert f"rm {path}" in errors["spoilt"]
    # The damaged file stays for inspection, and removing the hold by hand reports the damage.
    assert log.disk.list(log.folder / "holds") == ["no name.json", "sound.json", "spoilt.json"]
    log.disk.remove(log.folder / "holds" / "no name.json")
    with pytest.raises(LogDamaged):
        kept.holds.all()


def test_many_threads_set_one_hold(tmp_path: Path) -> None:
    layout = Layout(tmp_path)

    def set_often(_number: int) -> None:
        for offset in range(4, 24):
            holds = Holds(LocalDisk(), layout)
            holds.put(Hold("job", Position(0, "mysql-bin.000001", offset)))
            assert [hold.name for hold in holds.all()] == ["job"]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(set_often, range(6)))


class Interrupted(SimulatedDisk):
    """A disk on which another thread acts while a file is being read or the free space is being queried."""

    meanwhile: Callable[[], None] | None = None
    thread: threading.Thread | None = None

    def read(self, path: Path, start: int = 0, stop: int | None = None) -> bytes:
        content = super().read(path, start, stop)
        if path.parent.name == "holds":
            self._interrupt()
        return content

    def free_bytes(self, folder: Path) -> int:
        self._interrupt()
        return super().free_bytes(folder)

    def _interrupt(self) -> None:
        act, self.meanwhile = self.meanwhile, None
        if act is not None:
            self.thread = threading.Thread(target=act)
            self.thread.start()
            self.thread.join(0.3)

    def end(self) -> None:
        """Wait until the other thread is done."""
        assert self.thread is not None
        self.thread.join()


def interrupted(clock: Clock) -> tuple[Log, Interrupted]:
    disk = Interrupted()
    for path, content in recorded_disk()[0].files().items():
        disk.make_folder(path.parent)
        disk.put(path, content)
    return open_log(disk, clock), disk


def test_hold_renewed_while_it_expires_stays(clock: Clock) -> None:
    log, disk = interrupted(clock)
    first = log.earliest()
    assert first is not None
    kept = retention(log, RetentionPolicy(age_seconds=None, bytes_max=0), clock)
    kept.holds.put(Hold("job", first, expires_us=clock.now_us))
    disk.meanwhile = lambda: Holds(disk, log.layout).put(Hold("job", first))
    kept.holds.remove_expired(clock.now_us)
    disk.end()
    assert kept.holds.all() == [Hold("job", first)]


def test_hold_set_during_a_pass_holds_or_is_refused_as_too_late(clock: Clock) -> None:
    log, disk = interrupted(clock)
    first = log.earliest()
    assert first is not None
    refused = []

    def set_hold() -> None:
        try:
            Holds(disk, log.layout).put(Hold("job", first), log=log)
        except PositionPurged as problem:
            refused.append(problem)

    disk.meanwhile = set_hold
    departures = retention(log, RetentionPolicy(age_seconds=None, free_bytes=1 << 60)).run(log).departures
    disk.end()
    assert bool(departures) == bool(refused)
    assert departures


@pytest.mark.parametrize("name", ["", "../position", "a/b", ".hidden", "x" * 200])
def test_hold_name_is_restricted(log: Log, name: str) -> None:
    with pytest.raises(OptionInvalid):
        Holds(log.disk, log.layout).put(Hold(name, Position(0, "mysql-bin.000001", 4)))


# --- Power lost at every step -------------------------------------------------------------------


def everything(disk: SimulatedDisk, log: Log) -> None:
    """Run two passes, so that both phases run, and set and remove a hold between them."""
    kept = Retention(disk, log.layout, RetentionPolicy(age_seconds=None, bytes_max=3000))
    segment = log.segments[1]
    kept.holds.put(Hold("job", Position(segment.epoch, log.segment_head(segment).file, segment.base)))
    kept.run(log)
    kept.holds.remove("job")
    kept.run(log)
    kept.run(log)


def swept(work: Callable[[SimulatedDisk, Log], None], disk: SimulatedDisk) -> int:
    """Lose power at every step of some work on a log; return the number of steps."""
    whole = disk.copy()
    log = open_log(whole)
    first_step = len(whole.steps)
    work(whole, log)
    steps = len(whole.steps) - first_step
    for stop in range(steps):
        stopped = disk.copy()
        log = open_log(stopped)
        stopped.stop_at = len(stopped.steps) + stop
        with pytest.raises(PowerLost):
            work(stopped, log)
        for loss in Loss:
            recovered = stopped.after_power_failure(loss, seed=stop)
            with open_log(recovered) as after:
                check_log(after, whole=True)
                work(recovered, after)
                check_log(after, whole=True)
    return steps


def test_power_loss_at_any_step_of_a_pass_loses_no_kept_segment() -> None:
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
    assert swept(everything, disk) > 20
    disk_copy = disk.copy()
    with open_log(disk_copy) as log:
        everything(disk_copy, log)
        assert sum(segment.stored_bytes for segment in list(log.segments)[:-1]) <= 3000
    assert not [path for path in disk_copy.files() if path.is_relative_to(FOLDER / "expired")]


def test_folder_without_an_index_is_not_trimmed(tmp_path: Path) -> None:
    with pytest.raises((LogDamaged, SourceMissing)):
        FolderCatalog.load(LocalDisk(), Layout(tmp_path))
