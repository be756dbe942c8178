# SPDX-License-Identifier: Apache-2.0
"""Segments in real fsspec object stores: a folder, and a memory store that counts its requests."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.errors import ChecksumMismatch, ConnectionLost, LogDamaged, OptionInvalid, StreamError
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import LocalDisk
from penstock.logstore.holds import Hold
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.records import CLOSED, COLD, TIERED, SegmentRecord
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.logstore.tier import Tier, TieredNote
from penstock.model import Position
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
from tests.support.logstore.source import SETTINGS, TIME_S, Captured, check_log, open_log
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX


class Counted(MemoryFileSystem):
    """The memory file system of fsspec, which counts requests and can be made to fail."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012, the one that fsspec's own class has
    requests: list[tuple[str, int | None, int | None]] = []  # noqa: RUF012
    away = False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        if Counted.away:
            raise TimeoutError("the store is away, and says secret-key-1234")
        Counted.requests.append((path.rsplit("/", 1)[-1], start, end))
        return super().cat_file(path, start=start, end=end, **options)

    def exists(self, path: str, **options: Any) -> bool:
        if Counted.away:
            raise TimeoutError("the store is away")
        return bool(super().exists(path, **options))

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))


fsspec.register_implementation("counted", Counted, clobber=True)


@pytest.fixture(autouse=True)
def empty_stores() -> Iterator[None]:
    """Clear the memory stores of earlier tests."""
    Counted.away = False
    Counted.requests.clear()
    for store in (Counted.store, MemoryFileSystem.store):
        store.clear()
    yield
    for store in (Counted.store, MemoryFileSystem.store):
        store.clear()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store" if request.param == "file" else "memory://bucket/prefix"


@cache
def recorded_disk() -> SimulatedDisk:
    """A disk with a log of a dozen segments."""
    disk = SimulatedDisk()
    with open_log(disk) as log:
        Captured(log).run()
    return disk


def captured() -> Log:
    """The log of `recorded_disk`, opened on a separate disk."""
    return open_log(recorded_disk().copy())


def content_of(log: Log) -> dict[Path, bytes]:
    assert isinstance(log.disk, SimulatedDisk)
    return log.disk.files()


def reopened(log: Log, lost: Path | None = None) -> Log:
    """The log as another process opens it."""
    log.close()
    assert isinstance(log.disk, SimulatedDisk)
    disk = log.disk.copy()
    if lost is not None:
        disk.remove(lost)
    return open_log(disk)


def move_all(log: Log, tier: Tier, *, cold: bool = True) -> None:
    log.tier = tier
    for segment in list(log.segments):
        if segment.state in (CLOSED, COLD):
            moved = (
                make_cold(log.disk, log.layout, log, segment) if cold and segment.state == CLOSED else segment
            )
            tier.move(log, moved)


def data_files(log: Log) -> list[str]:
    return [path.name for path in content_of(log) if ".binlog" in path.name]


@pytest.mark.parametrize("cold", [True, False], ids=["cold", "plain"])
def test_log_mostly_in_a_store_reads_the_same(url: str, cold: bool) -> None:
    log = captured()
    segments = len(log.segments)
    bytes_before = sum(segment.stored_bytes for segment in log.segments)
    move_all(log, Tier(url, log.disk, log.layout), cold=cold)
    assert [segment.state for segment in log.segments][:-1] == [TIERED] * (segments - 1)
    assert len(data_files(log)) == 1
    if not cold:
        assert sum(segment.stored_bytes for segment in log.segments) == bytes_before
    check_log(log, whole=True)
    again = reopened(log)
    again.tier = Tier(url, again.disk, again.layout)
    assert [segment.state for segment in again.segments][:-1] == [TIERED] * (segments - 1)
    check_log(again, whole=True)


def test_log_on_a_real_disk_moves_to_a_real_folder(tmp_path: Path) -> None:
    log = Log.open(tmp_path / "log", SETTINGS, LocalDisk(), clock=lambda: TIME_S)
    Captured(log).run()
    move_all(log, Tier(f"file://{tmp_path}/store", log.disk, log.layout))
    assert len([*log.folder.glob("20*/*.binlog*")]) == 1
    check_log(log, whole=True)


def test_object_is_a_file_for_standard_tools(tmp_path: Path) -> None:
    log = captured()
    first = log.segments[0]
    plain = log.disk.read(log.layout.segment(first.hour, first.version))
    move_all(log, Tier(f"file://{tmp_path}/store", log.disk, log.layout))
    [path] = (tmp_path / "store").glob(f"*/{first.hour}/{first.version:019d}.binlog.zst")
    done = subprocess.run(
        ["zstd", "-d", "-c", path], capture_output=True, check=True, timeout=WAIT_SECONDS_MAX
    )
    assert done.stdout == plain


def test_positions_are_located_without_the_data() -> None:
    log = captured()
    asked = list(log.segments)
    sets = [log.segment_head(segment).gtid_set for segment in asked]
    times = [log.locate_time(segment.time_first_us).position for segment in asked]
    places = [log.locate_gtid_set(gtid_set).position for gtid_set in sets[1:]]
    move_all(log, Tier("counted://bucket", log.disk, log.layout))
    log = reopened(log)
    log.tier = Tier("counted://bucket", log.disk, log.layout)
    Counted.requests.clear()
    assert [log.locate_time(segment.time_first_us).position for segment in asked] == times
    assert [log.locate_gtid_set(gtid_set).position for gtid_set in sets[1:]] == places
    assert not Counted.requests


def test_range_is_read_by_its_own_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.logstore.tier._REQUEST_BYTES", 512)
    log = captured()
    largest = max(
        (segment for segment in log.segments if segment.source_end), key=lambda segment: segment.stored_bytes
    )
    move_all(log, Tier("counted://bucket", log.disk, log.layout), cold=False)
    record = log.segments.get(largest.version)
    assert record is not None
    assert record.stored_bytes > 2048
    with log.open_segment(record) as reader:
        Counted.requests.clear()
        position = record.source_end - 300
        assert len(reader.read_bytes(position, position + 20)) == 20
    asked = [(start, end) for _, start, end in Counted.requests]
    assert all(start is not None and end is not None and end - start <= 512 for start, end in asked)
    assert 1 <= len(asked) <= 2


def test_neighboring_reads_share_a_request() -> None:
    log = captured()
    move_all(log, Tier("counted://bucket", log.disk, log.layout))
    record = log.segments[0]
    with log.open_segment(record) as reader:
        for position in range(record.base, record.source_end - 10, 10):
            reader.read_bytes(position, position + 10)
        Counted.requests.clear()
        reader.read_bytes(record.base, record.source_end)
    assert not Counted.requests


# --- Several logs -------------------------------------------------------------------------------


def test_logs_that_share_a_tier_keep_their_own_objects(url: str) -> None:
    first, second = captured(), captured()
    move_all(first, Tier(url, first.disk, first.layout), cold=True)
    move_all(second, Tier(url, second.disk, second.layout), cold=False)
    for log in (first, second):
        check_log(log, whole=True)
    assert first.tier is not None
    for segment in each(segment for segment in first.segments if segment.state == TIERED):
        first.tier.remove(TieredNote.load(first.disk, first.tier.note_path(segment)))
    check_log(second, whole=True)


def named_by_hour(log: Log, tier: Tier, index: int = 0) -> tuple[SegmentRecord, TieredNote]:
    """Rename a moved segment's object to its name in version 0.1.0; return the segment's record and note."""
    record = log.segments[index]
    note = TieredNote.load(log.disk, tier.note_path(record))
    old = replace(note, name=note.name.partition("/")[2])
    tier._files.makedirs(tier._path(old.name).rpartition("/")[0], exist_ok=True)
    tier._files.mv(tier._path(note.name), tier._path(old.name))
    assert isinstance(log.disk, SimulatedDisk)
    log.disk.put(tier.note_path(record), old.encode())
    log._heads.clear()
    return record, old


def test_object_without_a_log_id_is_read_and_removed_if_its_bytes_match_the_log() -> None:
    log = captured()
    tier = Tier("memory://bucket", log.disk, log.layout)
    move_all(log, tier)
    _, note = named_by_hour(log, tier)
    check_log(log, whole=True)
    tier.remove(note)
    assert not tier._files.exists(tier._path(note.name))


def test_object_without_a_log_id_is_verified_once_and_again_after_it_changed() -> None:
    log = captured()
    tier = Tier("counted://bucket", log.disk, log.layout, writes=True)
    move_all(log, tier, cold=False)
    record, note = named_by_hour(log, tier)

    def requests_of_a_new_process() -> int:
        Counted.requests.clear()
        Tier("counted://bucket", log.disk, log.layout, writes=True).reader(record).close()
        return len(Counted.requests)

    assert requests_of_a_new_process() > 0
    assert requests_of_a_new_process() == 0
    whole = tier._files.cat_file(tier._path(note.name))
    tier._files.rm_file(tier._path(note.name))
    tier._files.pipe_file(tier._path(note.name), bytes(len(whole)))
    with pytest.raises(LogDamaged, match="not what this log moved there"):
        requests_of_a_new_process()
    log.disk.write_atomic(log.layout.tier_proofs, b"damaged")
    tier._files.pipe_file(tier._path(note.name), whole)
    assert requests_of_a_new_process() > 0


def test_log_reader_writes_no_proof() -> None:
    log = captured()
    tier = Tier("memory://bucket", log.disk, log.layout)
    move_all(log, tier)
    record, _ = named_by_hour(log, tier)
    tier.reader(record).close()
    assert not log.disk.exists(log.layout.tier_proofs)


def test_object_of_another_position_is_refused_despite_its_crc() -> None:
    log = captured()
    tier = Tier("memory://bucket", log.disk, log.layout)
    move_all(log, tier, cold=False)
    record, note = named_by_hour(log, tier)
    elsewhere = replace(note, record=replace(note.record, base=note.record.base + 1))
    log.disk.put(tier.note_path(record), elsewhere.encode())
    with pytest.raises(LogDamaged, match="not what this log moved there"):
        tier.reader(record)
    tier.remove(elsewhere)
    assert tier._files.exists(tier._path(note.name))


@pytest.mark.parametrize("first_to_write", ["original", "copy"])
def test_copied_folder_reads_the_objects_of_the_original_and_never_removes_them(
    tmp_path: Path, first_to_write: str
) -> None:
    url = f"file://{tmp_path}/store"
    original = tmp_path / "original"
    with Log.open(original, SETTINGS, LocalDisk(), clock=lambda: TIME_S) as log:
        Captured(log).run()
        tier = Tier(url, log.disk, log.layout, writes=True)
        first, second = log.segments[0], log.segments[1]
        tier.move(log, first)
    copied = tmp_path / "copy"
    shutil.copytree(original, copied)
    tiers = {
        folder.name: Tier(url, LocalDisk(), Layout(folder), writes=True) for folder in (original, copied)
    }
    order = sorted(tiers, key=lambda name: name != first_to_write)
    notes = {}
    for name in order:
        moved = tiers[name].copy(second)
        notes[name] = TieredNote.load(LocalDisk(), tiers[name].note_path(moved))
    assert notes["original"].name != notes["copy"].name
    shared = TieredNote.load(LocalDisk(), tiers["copy"].note_path(first))
    tiers["copy"].reader(first).close()
    tiers["copy"].remove(shared)
    tiers["copy"].remove(notes["original"])
    tiers["original"].verify(shared)
    tiers["original"].verify(notes["original"])
    tiers["copy"].remove(notes["copy"])
    tiers["original"].remove(shared)
    assert not (tmp_path / "store" / shared.name).exists()


def test_object_overwritten_by_another_log_is_refused_and_kept() -> None:
    log = captured()
    tier = Tier("memory://bucket", log.disk, log.layout)
    move_all(log, tier, cold=False)
    record, note = named_by_hour(log, tier)
    other = bytes(note.stored_bytes)
    tier._files.pipe_file(tier._path(note.name), other)
    with pytest.raises(LogDamaged, match="not what this log moved there"), log.open_segment(record):
        pass
    tier.remove(note)
    assert tier._files.cat_file(tier._path(note.name)) == other


def test_upload_cut_by_a_crash_is_ignored_and_a_complete_upload_is_accepted() -> None:
    log = captured()
    tier = Tier("memory://bucket", log.disk, log.layout)
    record = log.segments[0]
    moved = tier.copy(record)
    note = TieredNote.load(log.disk, tier.note_path(moved))
    whole = tier._files.cat_file(tier._path(note.name))
    assert TieredNote.load(log.disk, tier.note_path(tier.copy(record))).name == note.name
    tier._files.pipe_file(tier._path(note.name), whole[:-1])
    again = TieredNote.load(log.disk, tier.note_path(tier.copy(record)))
    assert again.name == f"{note.name}.1"
    assert tier._files.cat_file(tier._path(note.name)) == whole[:-1]
    tier.verify(again)


# --- What goes wrong ----------------------------------------------------------------------------


def test_upload_that_differs_from_its_segment_is_refused_and_the_segment_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = captured()
    files = data_files(log)
    whole = MemoryFileSystem.cat_file

    def flipped(self: Any, path: str, start: int | None = None, end: int | None = None, **rest: Any) -> bytes:
        content = bytearray(whole(self, path, start=start, end=end, **rest))
        content[len(content) // 2] ^= 4
        return bytes(content)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", flipped)
    with pytest.raises(ChecksumMismatch):
        move_all(log, Tier("memory://bucket", log.disk, log.layout), cold=False)
    assert not MemoryFileSystem.store, "the refused object is removed"
    assert data_files(log) == files
    assert log.segments[0].state == CLOSED
    check_log(log, whole=True)


@pytest.mark.parametrize("harm", ["gone", "shorter", "flipped"])
def test_changed_object_is_named(tmp_path: Path, harm: str) -> None:
    log = captured()
    tier = Tier(f"file://{tmp_path}/store", log.disk, log.layout)
    move_all(log, tier)
    record = log.segments[0]
    path = next((tmp_path / "store").rglob(f"{record.version:019d}*"))
    content = path.read_bytes()
    half = len(content) // 2
    if harm == "gone":
        path.unlink()
    elif harm == "shorter":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :])
    log._heads.clear()
    with pytest.raises(StreamError) as damaged, log.open_segment(record) as reader:
        reader.read_bytes(record.base, record.source_end)
    assert path.name in str(damaged.value)
    assert isinstance(damaged.value, ChecksumMismatch if harm == "flipped" else LogDamaged)
    with pytest.raises(StreamError):
        tier.verify(TieredNote.load(log.disk, tier.note_path(record)))


def test_unavailable_store_is_retried_later_and_reveals_no_secret() -> None:
    log = captured()
    move_all(log, Tier("counted://bucket", log.disk, log.layout))
    record = log.segments[0]
    Counted.away = True
    log._heads.clear()
    with pytest.raises(ConnectionLost) as away, log.open_segment(record) as reader:
        reader.read_bytes(record.base, record.source_end)
    assert "secret-key" not in str(away.value)
    Counted.away = False
    with log.open_segment(record) as reader:
        assert reader.read_bytes(record.base, record.source_end)


def test_damaged_note_is_named() -> None:
    log = captured()
    tier = Tier("memory://bucket", log.disk, log.layout)
    move_all(log, tier)
    path = tier.note_path(log.segments[0])
    assert isinstance(log.disk, SimulatedDisk)
    log.disk.put(path, log.disk.read(path).replace(b"binlog", b"binlag"))
    with pytest.raises(LogDamaged):
        tier.head(log.segments[0])


def test_missing_tier_error_names_the_setting() -> None:
    log = captured()
    move_all(log, Tier("memory://bucket", log.disk, log.layout))
    log.tier = None
    with pytest.raises(OptionInvalid) as refused, log.open_segment(log.segments[0]):
        pass
    assert "log.tier" in str(refused.value)


def test_settings_name_the_tier_of_a_log() -> None:
    log = captured()
    move_all(log, Tier("memory://bucket", log.disk, log.layout))
    log.close()
    assert isinstance(log.disk, SimulatedDisk)
    named = SETTINGS.model_copy(update={"tier": "memory://bucket"})
    with Log.open(log.folder, named, log.disk.copy(), clock=lambda: TIME_S) as again:
        check_log(again, whole=True)


def test_url_of_an_unknown_kind_is_refused() -> None:
    log = captured()
    with pytest.raises(OptionInvalid):
        Tier("nowhere://bucket", log.disk, log.layout)


def test_missing_fsspec_error_names_the_install_command() -> None:
    code = (
        "import sys; sys.modules['fsspec'] = None\n"
        "from pathlib import Path\n"
        "from penstock.errors import DependencyMissing\n"
        "from penstock.logstore.disk import LocalDisk\n"
        "from penstock.logstore.layout import Layout\n"
        "from penstock.logstore.tier import Tier\n"
        "try:\n    Tier('memory://bucket', LocalDisk(), Layout(Path('/')))\n"
        "except DependencyMissing as problem:\n    print(problem.hint)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_SECONDS_MAX
    )
    assert (done.returncode, done.stdout.strip()) == (0, "pip install 'penstock[tier]'"), done.stderr


# --- Recovery and retention ---------------------------------------------------------------------


def test_lost_segment_index_is_rebuilt_with_tiered_segments() -> None:
    log = captured()
    move_all(log, Tier("memory://bucket", log.disk, log.layout))
    before = [segment for segment in log.segments if segment.state == TIERED]
    again = reopened(log, lost=log.layout.segments_index)
    again.tier = Tier("memory://bucket", again.disk, again.layout)
    assert [segment for segment in again.segments if segment.state == TIERED] == before
    check_log(again, whole=True)


def test_expired_segments_are_removed_from_the_store_too(tmp_path: Path) -> None:
    log = captured()
    tier = Tier(f"file://{tmp_path}/store", log.disk, log.layout)
    move_all(log, tier)
    kept = Retention(log.disk, log.layout, RetentionPolicy(age_seconds=0), tier=tier)
    kept.run(log)
    assert len([*(tmp_path / "store").rglob("*.zst")]) > 5
    assert len(log.segments) == 1
    kept.run(log)
    assert not [*(tmp_path / "store").rglob("*.zst")]
    assert not log.disk.list(log.folder / "expired")
    check_log(log, whole=True)


def test_unavailable_store_does_not_prevent_freeing_the_disk() -> None:
    log = captured()
    tier = Tier("counted://bucket", log.disk, log.layout)
    log.tier = tier
    for segment in list(log.segments)[:2]:
        tier.move(log, segment)
    kept = Retention(log.disk, log.layout, RetentionPolicy(age_seconds=None, bytes_max=0), tier=tier)
    newest = log.segments[len(log.segments) - 1]
    position = Position(log.segments[4].epoch, log.segment_head(log.segments[4]).file, log.segments[4].base)
    kept.holds.put(Hold("job", position))
    kept.run(log)
    kept.holds.remove("job")
    Counted.away = True
    for _ in range(2):
        with pytest.raises(ConnectionLost):
            kept.run(log)
        assert [segment.version for segment in log.segments] == [newest.version]
    # The local segments have been removed. The expired segments in the store are removed once the store
    # answers again.
    assert [name[-5:] for name in log.disk.list(log.folder / "expired")] == ["iered"] * 2
    log.disk.remove(log.folder / "expired" / log.disk.list(log.folder / "expired")[0])
    Counted.away = False
    kept.run(log)
    assert not log.disk.list(log.folder / "expired")
    check_log(log, whole=True)


def test_unreadable_note_does_not_block_the_others() -> None:
    log = captured()
    tier = Tier("counted://bucket", log.disk, log.layout)
    move_all(log, tier)
    kept = Retention(log.disk, log.layout, RetentionPolicy(age_seconds=0), tier=tier)
    kept.run(log)
    expired = log.folder / "expired"
    notes = [name for name in log.disk.list(expired) if name.endswith(".tiered")]
    assert isinstance(log.disk, SimulatedDisk)
    log.disk.put(expired / notes[0], b"{}")
    with pytest.raises(LogDamaged):
        kept.run(log)
    assert log.disk.list(expired) == notes[:1]
    assert len(Counted.store) == 1


def test_power_loss_at_any_step_of_a_move_loses_nothing() -> None:
    disk = recorded_disk()

    def move(on: SimulatedDisk, log: Log) -> None:
        log.tier = Tier("memory://bucket", on, log.layout)
        first = log.segments[0]
        if first.state == CLOSED:
            first = make_cold(on, log.layout, log, first)
        if first.state == COLD:
            log.tier.move(log, first)

    whole = disk.copy()
    log = open_log(whole)
    first_step = len(whole.steps)
    move(whole, log)
    steps = len(whole.steps) - first_step
    assert steps > 12
    for stop in range(steps):
        MemoryFileSystem.store.clear()
        stopped = disk.copy()
        log = open_log(stopped)
        stopped.stop_at = len(stopped.steps) + stop
        with pytest.raises(PowerLost):
            move(stopped, log)
        for loss in Loss:
            recovered = stopped.after_power_failure(loss, seed=stop)
            with open_log(recovered) as after:
                after.tier = Tier("memory://bucket", recovered, after.layout)
                check_log(after, whole=True)
                move(recovered, after)
                assert after.segments[0].state == TIERED
                check_log(after, whole=True)
