# SPDX-License-Identifier: Apache-2.0
"""Ranges of a log exported as plain files, and read by the servers' own tools."""

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock._native import read_segment_head
from penstock.errors import LogFull, OptionInvalid, PositionInvalid, PositionPurged
from penstock.logstore.cold import make_cold
from penstock.logstore.disk import LocalDisk
from penstock.logstore.export import export
from penstock.logstore.log import Log
from penstock.logstore.records import CLOSED
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.model import Position
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import (
    SourceFile,
    boundaries,
    open_log,
    recorded_disk,
    server_files,
)
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import PartMissing
from tools.servers.packages import install

FLAVORS = ["mysql", "mariadb"]
TOOLS = {"mysql": "mysqlbinlog", "mariadb": "mariadb-binlog"}


@pytest.fixture
def log() -> Log:
    return open_log(recorded_disk())


@pytest.fixture
def tool(missing_part: MissingPart) -> Callable[[str, Path], str]:
    """Return a function that reads a file with a flavor's own tool, verifying checksums and decoding rows."""

    def read(flavor: str, path: Path) -> str:
        try:
            words = install(flavor).argv(TOOLS[flavor])
        except PartMissing as error:
            missing_part(TOOLS[flavor], str(error))
        options = ["--no-defaults", "--verify-binlog-checksum", "--base64-output=decode-rows", "-vv"]
        done = subprocess.run(
            [*words, *options, path], capture_output=True, timeout=WAIT_SECONDS_MAX, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        assert not [line for line in done.stderr.decode().splitlines() if "ERROR" in line]
        return done.stdout.decode(errors="replace")

    return read


def of_flavor(flavor: str) -> list[SourceFile]:
    return [file for file in server_files() if file.flavor == flavor]


def places(text: str) -> list[int]:
    """Return the source offsets at which events end according to the tool."""
    return [int(matches) for matches in re.findall(r"end_log_pos (\d+)", text) if int(matches)]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("### ")]


def body(path: Path) -> bytes:
    content = path.read_bytes()
    return content[read_segment_head(content)[0] :]


def test_whole_log_exports_as_one_file_per_source_file(log: Log, tmp_path: Path) -> None:
    written = export(log, tmp_path / "out")
    assert [exported.path.name for exported in written] == [
        f"epoch{file.epoch}-{file.name}" for file in server_files()
    ]
    for this_exported, file in zip(written, server_files(), strict=True):
        first = 4 + int.from_bytes(file.content[13:17], "little")
        assert this_exported.path.read_bytes()[:first] == file.content[:first]
        assert body(this_exported.path) == file.content[first:]
        assert this_exported.path.stat().st_size == this_exported.bytes_written
        assert (this_exported.start.offset, this_exported.end.offset) == (first, len(file.content))
    assert not [*(tmp_path / "out").glob("*.tmp")]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_own_tool_shows_the_same_rows_at_the_same_positions(
    log: Log, tmp_path: Path, tool: Callable[[str, Path], str], flavor: str
) -> None:
    for file in each(of_flavor(flavor)):
        source = tmp_path / file.name
        source.write_bytes(file.content)
        position = Position(file.epoch, file.name, 4)
        end = Position(file.epoch, file.name, len(file.content))
        (written,) = export(log, tmp_path / f"out-{file.name}", position, end)
        shown, expected = tool(flavor, written.path), tool(flavor, source)
        assert rows(shown) == rows(expected)
        assert rows(shown)
        first = written.start.offset
        assert [position for position in places(shown) if position > first] == [
            position for position in places(expected) if position > first
        ]


@pytest.mark.parametrize("flavor", FLAVORS)
def test_range_between_any_two_boundaries_is_a_file_that_the_tool_reads(
    log: Log, tmp_path: Path, tool: Callable[[str, Path], str], flavor: str
) -> None:
    file = max(of_flavor(flavor), key=lambda server_file: len(server_file.content))
    inside = [
        boundary for boundary in boundaries() if (boundary.epoch, boundary.file) == (file.epoch, file.name)
    ]
    inside = [server_file for server_file in inside if server_file.offset > 600]
    start, end = inside[1], inside[-2]
    (written,) = export(log, tmp_path, start, end)
    assert written.path.name == f"{file.name.split('.')[0]}-{start.offset}.{file.name.split('.')[1]}"
    assert body(written.path) == file.content[start.offset : end.offset]
    _, name, base, gtid_set, _ = read_segment_head(written.path.read_bytes())
    assert (name, base, gtid_set) == (file.name, start.offset, boundaries()[start])
    source = tmp_path / file.name
    source.write_bytes(file.content)
    positions = [position for position in places(tool(flavor, written.path)) if position > start.offset]
    assert positions == [
        position for position in places(tool(flavor, source)) if start.offset < position <= end.offset
    ]
    assert positions[-1] == end.offset


def test_range_that_begins_or_ends_inside_a_transaction_is_refused(log: Log, tmp_path: Path) -> None:
    """Tools would stop at its first event, or miss the end of its last transaction without saying so."""
    first, *_, last = [
        boundary for boundary in boundaries() if (boundary.epoch, boundary.file) == (0, "mysql-bin.000001")
    ]
    inside = replace(first, offset=first.offset + 1)
    assert first < inside < last
    for start, end in ((inside, last), (first, inside), (inside, None), (None, inside)):
        with pytest.raises(PositionInvalid, match="no transaction begins or ends here") as refused:
            export(log, tmp_path, start, end)
        assert refused.value.position == str(inside)
    assert not list(tmp_path.iterdir())


def test_range_over_several_files_is_cut_at_their_ends(log: Log, tmp_path: Path) -> None:
    first, two, three = of_flavor("mysql")[:3]
    start = [position for position in boundaries() if position.file == first.name and position.epoch == 0][-3]
    end = [position for position in boundaries() if position.file == three.name and position.epoch == 0][4]
    written = export(log, tmp_path, start, end)
    assert [body(each.path) for each in written] == [
        first.content[start.offset :],
        two.content[4 + int.from_bytes(two.content[13:17], "little") :],
        three.content[4 + int.from_bytes(three.content[13:17], "little") : end.offset],
    ]
    assert [each.path.name for each in written][1:] == [two.name, three.name]


def test_compressed_log_gives_the_same_files(log: Log, tmp_path: Path) -> None:
    before = {exported.path.name: exported.path.read_bytes() for exported in export(log, tmp_path / "plain")}
    for segment in list(log.segments):
        if segment.state == CLOSED:
            make_cold(log.disk, log.layout, log, segment)
    after = export(log, tmp_path / "cold")
    # The generated events carry the time of the export; all other bytes are equal.
    assert {exported.path.name: body(exported.path) for exported in after} == {
        name: content[read_segment_head(content)[0] :] for name, content in before.items()
    }


def test_progress_is_reported(log: Log, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    written = export(log, tmp_path, progress=lambda done, of: reports.append((done, of)))
    total = sum(exported.end.offset - exported.start.offset for exported in written)
    assert reports == sorted(reports)
    assert reports[-1] == (total, total)


# --- What is refused ----------------------------------------------------------------------------


def test_purged_range_is_refused(log: Log, tmp_path: Path) -> None:
    Retention(log.disk, log.layout, RetentionPolicy(age_seconds=None, bytes_max=5000)).run(log)
    with pytest.raises(PositionPurged):
        export(log, tmp_path / "out", Position(0, of_flavor("mysql")[0].name, 4))
    assert not (tmp_path / "out").exists()


def test_range_without_bytes_is_refused(log: Log, tmp_path: Path) -> None:
    end = log.head()
    with pytest.raises(PositionInvalid):
        export(log, tmp_path, end)
    start = [*boundaries()][5]
    with pytest.raises(PositionInvalid):
        export(log, tmp_path, start, start)


def test_existing_file_is_not_overwritten(log: Log, tmp_path: Path) -> None:
    file = of_flavor("mysql")[1]
    (tmp_path / file.name).write_bytes(b"somebody's")
    with pytest.raises(OptionInvalid):
        export(
            log,
            tmp_path,
            Position(0, of_flavor("mysql")[0].name, 4),
            Position(0, file.name, len(file.content)),
        )
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert (tmp_path / file.name).read_bytes() == b"somebody's"


def test_full_disk_leaves_no_file_that_looks_complete(log: Log) -> None:
    target = SimulatedDisk(room=2000)
    with pytest.raises(LogFull):
        export(log, Path("/out"), disk=target)
    whole = {f"epoch{file.epoch}-{file.name}": len(file.content) for file in server_files()}
    for path, content in target.files().items():
        assert path.suffix == ".tmp" or len(content) >= whole[path.name]
    assert isinstance(log.disk, SimulatedDisk)
    assert not isinstance(log.disk, LocalDisk)
