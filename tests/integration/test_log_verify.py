# SPDX-License-Identifier: Apache-2.0
"""The integrity scan reports every kind of damage, and nothing in a sound log."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from penstock.errors import LogLocked
from penstock.logstore.cold import make_cold
from penstock.logstore.index import SegmentIndex
from penstock.logstore.layout import INDEX_SUFFIX, SEGMENT_SUFFIX
from penstock.logstore.log import Log
from penstock.logstore.records import CLOSED, RECORD_BYTES, seal
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.logstore.tier import Tier
from penstock.logstore.verify import Finding, FindingKind, verify
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import BLOCK_BYTES, Captured, check_log, open_log, recorded_disk


@pytest.fixture
def disk() -> SimulatedDisk:
    return recorded_disk()


def findings(disk: SimulatedDisk, **options: object) -> list[Finding]:
    with open_log(disk.copy()) as log:
        layout = log.layout
    return list(verify(disk, layout, block_bytes=BLOCK_BYTES, **options))  # type: ignore[arg-type]


def files(disk: SimulatedDisk, suffix: str) -> list[Path]:
    return [path for path in disk.files() if path.name.endswith(suffix) and path.name[0].isdigit()]


def change(disk: SimulatedDisk, path: Path, change: Callable[[bytearray], None]) -> None:
    content = bytearray(disk.read(path))
    change(content)
    disk.put(path, bytes(content))


def test_sound_log_has_no_findings(disk: SimulatedDisk) -> None:
    reports: list[tuple[int, int]] = []
    before = disk.files()
    assert findings(disk, progress=lambda done, of: reports.append((done, of))) == []
    assert reports == sorted(reports)
    total = sum(len(disk.read(path)) for path in files(disk, SEGMENT_SUFFIX))
    assert {of for _, of in reports} == {total}
    assert reports[-1][0] > 0.8 * total
    assert disk.files() == before


def test_sound_log_with_compressed_trimmed_and_tiered_segments_has_no_findings(disk: SimulatedDisk) -> None:
    MemoryFileSystem.store.clear()
    with open_log(disk) as log:
        tier = log.tier = Tier("memory://bucket", disk, log.layout)
        bound = sum(segment.stored_bytes for segment in list(log.segments)[2:])
        Retention(disk, log.layout, RetentionPolicy(age_seconds=None, bytes_max=bound)).run(log)
        for segment in [segment for segment in log.segments if segment.state == CLOSED][:5]:
            make_cold(disk, log.layout, log, segment)
        for segment in list(log.segments)[:3]:
            tier.move(log, segment)
    assert findings(disk) == []
    assert findings(disk, tier=tier) == []


def test_log_being_written_has_no_findings(disk: SimulatedDisk) -> None:
    empty = SimulatedDisk()
    problems: list[Finding] = []
    with open_log(empty) as log:

        def scan(_captured: Captured, count: int) -> None:
            if count % 4 == 0:
                problems.extend(finding for finding in findings_of(empty, log) if not finding.harmless)

        Captured(log, each=scan).run()
    assert problems == []


def findings_of(disk: SimulatedDisk, log: Log) -> list[Finding]:
    return list(verify(disk, log.layout, block_bytes=BLOCK_BYTES))


@pytest.mark.parametrize("seed", range(12))
def test_bit_flipped_anywhere_in_the_data_is_reported_with_its_segment(
    disk: SimulatedDisk, seed: int
) -> None:
    numbers = random.Random(seed)
    path = numbers.choice(files(disk, SEGMENT_SUFFIX))

    def flip(content: bytearray) -> None:
        content[numbers.randrange(4, len(content))] ^= 1 << numbers.randrange(8)

    change(disk, path, flip)
    with_name = [
        finding for finding in list(verify_folder(disk)) if finding.name == path.name and not finding.harmless
    ]
    assert with_name
    assert with_name[0].kind in (FindingKind.DATA, FindingKind.ORDER)
    assert ":" in with_name[0].position


def verify_folder(disk: SimulatedDisk, **options: object) -> list[Finding]:
    """Scan the folder without opening the log, which may be too damaged to open."""
    with open_log(recorded_disk()) as log:
        layout = log.layout
    return list(verify(disk, layout, block_bytes=BLOCK_BYTES, **options))  # type: ignore[arg-type]


def test_flipped_event_is_named_by_its_source_position(disk: SimulatedDisk) -> None:
    with open_log(disk.copy()) as log:
        record = log.segments[1]
        with log.open_blocks(record) as (reader, blocks):
            start = blocks.record(1).source_start
            name = reader.head.file
    path = next(file for file in files(disk, SEGMENT_SUFFIX) if f"{record.version:019d}" in file.name)
    position = record.head_bytes + start - record.base

    def flip(content: bytearray) -> None:
        content[position + 25] ^= 1

    change(disk, path, flip)
    (finding, *_) = verify_folder(disk)
    assert (finding.kind, finding.position) == (FindingKind.DATA, f"{name}:{start}")
    assert "CRC32" in finding.message


def test_bit_flipped_in_a_block_index_is_reported_and_healed(disk: SimulatedDisk) -> None:
    numbers = random.Random(3)
    whole = disk.files()
    for path in files(disk, INDEX_SUFFIX)[:-1]:

        def flip(content: bytearray) -> None:
            content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)

        change(disk, path, flip)
        (findings,) = verify_folder(disk)
        assert (findings.kind, findings.name, findings.healed) == (FindingKind.BLOCKS, path.name, False)
        (healed,) = verify_folder(disk, heal=True)
        assert healed.healed
        assert verify_folder(disk) == []
    assert {path for path in disk.files() if not path.name.endswith("lock")} == {
        path for path in whole if not path.name.endswith("lock")
    }


def test_well_formed_but_wrong_index_is_reported(disk: SimulatedDisk) -> None:
    """The record's checksum is valid, but its number of transactions is wrong, which only the data
    reveals.
    """
    path = files(disk, INDEX_SUFFIX)[1]

    def lie(content: bytearray) -> None:
        record = bytearray(content[RECORD_BYTES : 2 * RECORD_BYTES])
        record[68] += 1
        content[RECORD_BYTES : 2 * RECORD_BYTES] = seal(bytes(record[:124]))

    change(disk, path, lie)
    findings = [finding for finding in verify_folder(disk) if finding.kind is FindingKind.BLOCKS]
    assert [finding.name for finding in findings] == [path.name]
    verify_folder(disk, heal=True)
    assert verify_folder(disk) == []


@pytest.mark.parametrize("harm", ["gone", "damaged", "stale"])
def test_inconsistent_segment_index_is_reported_and_healed(disk: SimulatedDisk, harm: str) -> None:
    with open_log(disk.copy()) as log:
        path = log.layout.segments_index
    whole = disk.read(path)
    if harm == "gone":
        disk.remove(path)
    elif harm == "damaged":
        change(disk, path, lambda content: content.__setitem__(300, content[300] ^ 1))
    else:
        stale = SegmentIndex.load(disk, path)
        assert stale is not None
        stale.drop(stale[3].version).write(disk, path)
    findings = verify_folder(disk)
    assert {finding.kind for finding in findings} == {FindingKind.SEGMENTS}
    assert all(finding.healed for finding in verify_folder(disk, heal=True))
    assert disk.read(path) == whole
    assert verify_folder(disk) == []


def test_missing_segment_is_reported_by_its_neighbor_and_by_the_index(disk: SimulatedDisk) -> None:
    gone = files(disk, SEGMENT_SUFFIX)[4]
    following = files(disk, SEGMENT_SUFFIX)[5]
    disk.remove(gone)
    findings = verify_folder(disk)
    assert {(finding.kind, finding.name) for finding in findings if not finding.harmless} == {
        (FindingKind.ORDER, following.name),
        (FindingKind.SEGMENTS, gone.name),
    }


def test_truncated_segment_is_reported(disk: SimulatedDisk) -> None:
    path = files(disk, SEGMENT_SUFFIX)[3]

    def shorten(content: bytearray) -> None:
        del content[-10:]

    change(disk, path, shorten)
    findings = verify_folder(disk)
    assert (findings[0].kind, findings[0].name) == (FindingKind.DATA, path.name)


def test_missing_or_damaged_epochs_are_reported(disk: SimulatedDisk) -> None:
    path = next(path for path in disk.files() if path.name == "epochs.json")
    change(disk, path, lambda content: content.__setitem__(slice(40, 41), b"~"))
    assert {finding.kind for finding in verify_folder(disk)} == {FindingKind.EPOCHS}


def test_changed_object_in_the_store_is_reported_if_the_store_is_checked(disk: SimulatedDisk) -> None:
    MemoryFileSystem.store.clear()
    with open_log(disk) as log:
        tier = log.tier = Tier("memory://bucket", disk, log.layout)
        moved = tier.move(log, log.segments[0])
    (path,) = MemoryFileSystem.store
    content = bytearray(tier._files.cat_file(path))
    content[-20] ^= 1
    tier._files.pipe_file(path, bytes(content))
    assert verify_folder(disk) == []
    findings = verify_folder(disk, tier=tier)
    assert [finding.kind for finding in findings] == [FindingKind.TIER]
    assert f"{moved.version:019d}" in findings[0].position


def test_open_log_is_not_healed(disk: SimulatedDisk) -> None:
    with open_log(disk) as log:
        list(verify(disk, log.layout, block_bytes=BLOCK_BYTES))
        with pytest.raises(LogLocked):
            list(verify(disk, log.layout, heal=True, block_bytes=BLOCK_BYTES))


def test_healed_log_opens_and_is_whole(disk: SimulatedDisk) -> None:
    for path in [
        *files(disk, INDEX_SUFFIX),
        *[file for file in disk.files() if file.name == "segments.index"],
    ]:
        disk.remove(path)
    assert all(finding.healed for finding in verify_folder(disk, heal=True))
    with open_log(disk) as log:
        check_log(log, whole=True)
