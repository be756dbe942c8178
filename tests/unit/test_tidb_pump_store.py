# SPDX-License-Identifier: Apache-2.0
"""The store of a Pump: writes are durable before they are acknowledged, a restart changes nothing, and
invalid payloads are rejected with a named error.
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import (
    BinlogInconsistent,
    EventMalformed,
    LogDamaged,
    LogFull,
    PositionPurged,
    ServerBusy,
    ServerChanged,
)
from penstock.logstore.disk import LocalAppendFile
from penstock.settings.daemon import LogSettings
from penstock.tidb import release_index
from penstock.tidb.pump_store import PumpStore, Write
from penstock.tidb.release_index import Location
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
from tests.support.tidb.binlogs import commit, matched, prewrite, rollback

CLUSTER = 7001
FOLDER = Path("/shop.pump")


def open_store(folder: Path, **settings: object) -> PumpStore:
    return PumpStore(folder / "shop.pump", LogSettings.model_validate(settings), CLUSTER)


@pytest.fixture
def store(tmp_path: Path) -> PumpStore:
    return open_store(tmp_path)


def write(store: PumpStore, *payloads: bytes) -> list[type[Exception] | None]:
    """Write payloads in one batch and return the kind of problem of each."""
    writes = [Write(payload) for payload in payloads]
    store.write(writes)
    return [None if each.problem is None else type(each.problem) for each in writes]


def pulled(store: PumpStore, after_ts: int = 0) -> list[tuple[int, bytes]]:
    return list(store.pull(after_ts, count=1000, bytes_max=1 << 20))


def test_committed_transactions_are_pulled_in_commit_order(store: PumpStore) -> None:
    assert write(store, prewrite(1), prewrite(3, b"x" * 100_000), prewrite(4)) == [None] * 3
    assert write(store, commit(3, 5), commit(1, 7), rollback(4)) == [None] * 3
    assert pulled(store) == [(5, matched(3, 5, b"x" * 100_000)), (7, matched(1, 7))]
    assert pulled(store, after_ts=5) == [(7, matched(1, 7))]
    assert pulled(store, after_ts=7) == []


def test_restart_anywhere_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for payload in (prewrite(1), prewrite(3), commit(3, 5), prewrite(6), commit(1, 7), commit(6, 9)):
        assert write(store, payload) == [None]
        # The state that a killed process leaves.
        store.abandon()
        store = open_store(tmp_path)
    assert [commit_ts for commit_ts, _ in pulled(store)] == [5, 7, 9]
    assert write(store, prewrite(1), commit(3, 5)) == [None, None]
    assert store.counts.stored == 1, "a commit that was released before is not stored again"


@pytest.mark.parametrize("kept_bytes", [0, 10, 64, 64 + 64, 64 + 64 + 30])
def test_index_that_lost_its_tail_is_derived_again(tmp_path: Path, kept_bytes: int) -> None:
    store = open_store(tmp_path)
    write(store, prewrite(1), prewrite(3), prewrite(4))
    write(store, commit(4, 6), commit(1, 7), commit(3, 9))
    before = pulled(store)
    store.abandon()
    (path,) = (tmp_path / "shop.pump/releases").iterdir()
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert pulled(open_store(tmp_path)) == before
    assert len(before) == 3


def test_index_of_many_files_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_index, "_FILE_BYTES_MAX", 4 * 64)
    store = open_store(tmp_path)
    for start_ts in range(1, 100, 3):
        write(store, prewrite(start_ts))
        write(store, commit(start_ts, start_ts + 1))
    everything = [start_ts + 1 for start_ts in range(1, 100, 3)]
    for after_ts in range(101):
        expected = [commit_ts for commit_ts in everything if commit_ts > after_ts]
        received: list[int] = []
        while batch := pulled(store, max([after_ts, *received])):
            received += [commit_ts for commit_ts, _ in batch]
        assert received == expected
    store.index.trim(Location(1, 1 << 40))
    assert store.index.floor == everything[-1] - 3 * ((len(everything) - 1) % 3 + 1)
    with pytest.raises(PositionPurged, match="keeps binlogs after"):
        pulled(store, after_ts=5)


def test_entries_that_neither_the_index_nor_the_trimmed_log_has_are_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tidb.pump_log._FILE_BYTES_MAX", 1000)
    store = open_store(tmp_path)
    for start_ts in (1, 11, 21, 31):
        write(store, prewrite(start_ts, bytes(1000)))
        write(store, commit(start_ts, start_ts + 1))
    store.close()
    # The index is damaged after its first entry, and the log has lost the data that would replace the next
    # entries.
    (path,) = (tmp_path / "shop.pump/releases").iterdir()
    path.write_bytes(path.read_bytes()[: 2 * 64])
    segments = sorted(tmp_path.glob("shop.pump/*/*.binlog"))
    store = _opened_after_trimming(tmp_path, segments[:3])
    (last,) = pulled(store, after_ts=31)
    assert last == (32, matched(31, 32, bytes(1000)))
    for after_ts in (0, 2, 12):
        with pytest.raises(PositionPurged, match="keeps binlogs after 31"):
            pulled(store, after_ts)


def _opened_after_trimming(folder: Path, removed: list[Path]) -> PumpStore:
    """Remove segments as retention does, and open the store again."""
    for path in removed:
        path.unlink()
        path.with_suffix(".index").unlink(missing_ok=True)
    (folder / "shop.pump/segments.index").unlink()
    return open_store(folder)


def test_log_that_was_trimmed_at_the_end_of_a_file_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.tidb.pump_log._FILE_BYTES_MAX", 1000)
    store = open_store(tmp_path)
    write(store, prewrite(1, bytes(1000)))
    write(store, commit(1, 2))
    write(store, prewrite(11))
    store.close()
    store = _opened_after_trimming(tmp_path, sorted(tmp_path.glob("shop.pump/*/*.binlog"))[:1])
    write(store, commit(11, 12))
    assert [commit_ts for commit_ts, _ in pulled(store, after_ts=2)] == [12]


def test_index_file_that_is_removed_while_it_is_read_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_index, "_FILE_BYTES_MAX", 2 * 64)
    store = open_store(tmp_path)
    for start_ts in (1, 11, 21):
        write(store, prewrite(start_ts))
        write(store, commit(start_ts, start_ts + 1))
    file = store.index._files[0]
    first_after, close, closed = release_index._File.first_after, file.reader.close, []

    def note_close() -> None:
        closed.append(file.path)
        close()

    def trim_meanwhile(self: release_index._File, commit_ts: int) -> int:
        store.index.trim(Location(1, 1 << 40))
        assert (file.path.exists(), closed) == (False, [])
        return first_after(self, commit_ts)

    monkeypatch.setattr(file.reader, "close", note_close)
    monkeypatch.setattr(release_index._File, "first_after", trim_meanwhile)
    assert [entry.commit_ts for entry in store.index.after(0, 10)] == [2]
    assert closed == [file.path]


def test_payloads_of_several_files_are_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.tidb.pump_log._FILE_BYTES_MAX", 3000)
    store = open_store(tmp_path)
    write(store, prewrite(1))
    for start_ts in range(3, 40, 2):
        write(store, prewrite(start_ts, bytes(500)), rollback(start_ts + 1))
        write(store, commit(start_ts, start_ts + 1))
    store.abandon()
    store = open_store(tmp_path)
    assert len(store.log.log.extents()) > 2
    write(store, commit(1, 50))
    assert [commit_ts for commit_ts, _ in pulled(store)] == [*range(4, 41, 2), 50]


@pytest.mark.parametrize(
    ("payload", "kind", "reason"),
    [
        (b"\xff\xff", EventMalformed, "malformed payload"),
        (commit(9, 11), BinlogInconsistent, "commit without prewrite"),
        (prewrite(1, b"other"), BinlogInconsistent, "two prewrites of one start timestamp"),
        (commit(1, 1), BinlogInconsistent, "timestamp goes backwards"),
    ],
)
def test_bad_input_is_refused_beside_good_input(
    store: PumpStore, payload: bytes, kind: type[Exception], reason: str
) -> None:
    write(store, prewrite(1))
    assert write(store, payload, commit(1, 7)) == [kind, None]
    assert store.counts.refused == {reason: 1}
    assert [commit_ts for commit_ts, _ in pulled(store)] == [7]


def test_full_disk_acknowledges_nothing_and_loses_nothing(
    store: PumpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, prewrite(1))
    monkeypatch.setattr(store.log.log, "full_because", lambda: "0 bytes are free")
    assert write(store, commit(1, 7)) == [LogFull]
    assert store.counts.refused == {"disk full": 1}
    monkeypatch.undo()
    assert write(store, commit(1, 7)) == [None]
    assert [commit_ts for commit_ts, _ in pulled(store)] == [7]


def test_batch_that_found_the_disk_full_is_stored_first_afterwards(
    store: PumpStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    append: Callable[..., None] = store.log.log.append
    failures = [LogFull("no space"), LogFull("no space")]

    def append_later(*arguments: object, **options: object) -> None:
        if failures:
            raise failures.pop()
        append(*arguments, **options)

    monkeypatch.setattr(store.log.log, "append", append_later)
    assert write(store, prewrite(1)) == [LogFull]
    assert write(store, prewrite(3)) == [LogFull]
    assert write(store, prewrite(1), prewrite(3)) == [None, None]
    write(store, commit(1, 7), commit(3, 8))
    assert [commit_ts for commit_ts, _ in pulled(store)] == [7, 8]


def test_disk_full_at_the_start_loses_no_acknowledged_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    write(store, prewrite(1), prewrite(9))
    append = release_index.ReleaseIndex.append

    def find_disk_full(*_: object) -> None:
        raise LogFull("no space")

    monkeypatch.setattr(release_index.ReleaseIndex, "append", find_disk_full)
    assert write(store, commit(1, 7), commit(9, 11)) == [None, None]
    store.abandon()
    store = open_store(tmp_path)
    assert (pulled(store), store.replay_start) == ([], store.log.earliest), "retention keeps them"
    monkeypatch.setattr(release_index.ReleaseIndex, "append", append)
    write(store, prewrite(13))
    write(store, commit(13, 15))
    everything = [(7, matched(1, 7)), (11, matched(9, 11)), (15, matched(13, 15))]
    assert pulled(store) == everything
    store.abandon()
    assert pulled(open_store(tmp_path)) == everything


def test_index_file_that_found_the_disk_full_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_index, "_FILE_BYTES_MAX", 2 * 64)
    store = open_store(tmp_path)
    write(store, prewrite(1))
    write(store, commit(1, 2))

    def find_disk_full(*_: object) -> None:
        raise LogFull("no space")

    write(store, prewrite(3), prewrite(5))
    with monkeypatch.context() as full:
        full.setattr(LocalAppendFile, "truncate", find_disk_full)
        assert write(store, commit(3, 4)) == [None]
    write(store, commit(5, 6))
    assert [commit_ts for commit_ts, _ in pulled(store, after_ts=2)] == [4, 6]
    store.abandon()
    assert [commit_ts for commit_ts, _ in pulled(open_store(tmp_path), after_ts=2)] == [4, 6]


def test_paused_pump_refuses_prewrites_and_accepts_outcomes(store: PumpStore) -> None:
    write(store, prewrite(1))
    store.refuses_prewrites = "paused"
    assert write(store, prewrite(3), commit(1, 7), b"") == [ServerBusy, None, None]


def test_log_of_another_cluster_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    with pytest.raises(ServerChanged, match="the cluster 7001, not of 7002"):
        PumpStore(tmp_path / "shop.pump", LogSettings(), 7002)


def test_decision_of_the_resolver_survives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    write(store, prewrite(1), prewrite(3))
    store.write([store.decision(1, 5), store.decision(3, 0), store.decision(9, 11)])
    store.abandon()
    store = open_store(tmp_path)
    assert (pulled(store), store.matching.open_count) == ([(5, matched(1, 5))], 0)


@pytest.mark.parametrize("commit_ts", [5, 7])
def test_commit_of_an_operator_that_comes_too_late_is_refused(store: PumpStore, commit_ts: int) -> None:
    for payload in (prewrite(1), commit(1, 7), prewrite(6)):
        write(store, payload)
    decided = store.decision(6, commit_ts, by_operator=True)
    store.write([decided])
    assert isinstance(decided.problem, BinlogInconsistent)
    assert store.matching.open_count == 1, "the transaction is not lost"
    store.write([store.decision(6, 9, by_operator=True)])
    assert [commit_ts for commit_ts, _ in pulled(store)] == [7, 9]


def test_corrupt_entry_of_the_index_is_never_pulled(store: PumpStore, tmp_path: Path) -> None:
    write(store, prewrite(1))
    write(store, commit(1, 7))
    (path,) = (tmp_path / "shop.pump/releases").iterdir()
    with path.open("r+b") as file:
        file.seek(64)
        file.write(b"\x08")
    with pytest.raises(LogDamaged, match="index of released transactions is corrupt"):
        pulled(store)


def test_payload_that_lacks_its_last_part_is_passed_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (location,) = store.log.stage([prewrite(1)])
    store.log.store()
    store.abandon()
    (segment,) = tmp_path.glob("shop.pump/*/*.binlog")
    # The segment ends with the first of two parts, as after a crash between two events.
    content = bytearray(segment.read_bytes())
    start = len(content) - location.size
    struct.pack_into("<Q", content, start + 19, location.size * 2)
    struct.pack_into("<I", content, len(content) - 4, zlib.crc32(content[start:-4]))
    segment.write_bytes(content)
    store = open_store(tmp_path)
    assert write(store, prewrite(3)) == [None]
    store.abandon()
    store = open_store(tmp_path)
    assert [each.start_ts for each in store.matching.open_prewrites()] == [3]


# --- Power failures -------------------------------------------------------------------------


def run_until_power_fails(disk: SimulatedDisk) -> tuple[list[int], list[int]]:
    """Write transactions until the power fails; return the acknowledged prewrites and commits."""
    prewritten, committed = [], []
    try:
        store = PumpStore(FOLDER, LogSettings(memory_bytes=0), CLUSTER, disk=disk)
        for start_ts in range(1, 60, 3):
            if write(store, prewrite(start_ts)) == [None]:
                prewritten.append(start_ts)
            if start_ts % 2 and write(store, commit(start_ts, start_ts + 1)) == [None]:
                committed.append(start_ts + 1)
            if start_ts == 31:
                store.index.sync()
        disk.stop_at = len(disk.steps)
        store.close()
    except PowerLost:
        pass
    return prewritten, committed


@pytest.mark.parametrize("loss", Loss)
def test_power_failure_at_any_step_keeps_everything_acknowledged(loss: Loss) -> None:
    whole = SimulatedDisk()
    run_until_power_fails(whole)
    lost = []
    for stop_at in range(0, len(whole.steps), 7):
        disk = SimulatedDisk(stop_at=stop_at)
        prewritten, committed = run_until_power_fails(disk)
        recovered = disk.after_power_failure(loss, seed=stop_at)
        store = PumpStore(FOLDER, LogSettings(memory_bytes=0), CLUSTER, disk=recovered)
        # Every transaction with an even start timestamp is rolled back, so that nothing holds the commits
        # back.
        store.write(
            [
                store.decision(each.start_ts, 0)
                for each in store.matching.open_prewrites()
                if each.start_ts % 2 == 0
            ]
        )
        known = {each.start_ts for each in store.matching.open_prewrites()}
        known |= {commit_ts - 1 for commit_ts, _ in pulled(store)}
        lost += [stop_at for start_ts in prewritten if start_ts % 2 and start_ts not in known]
        lost += [stop_at for commit_ts in committed if commit_ts not in {found for found, _ in pulled(store)}]
    assert len(whole.steps) > 60
    assert not lost
