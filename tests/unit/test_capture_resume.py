# SPDX-License-Identifier: Apache-2.0
"""Resume a capture according to a server's answers and its real binlog files."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock._native import GtidSet
from penstock.capture.resume import Resumption
from penstock.cli.shared.accepted_server import plan_acceptance
from penstock.cli.shared.log_folder import LogFolder
from penstock.errors import OptionInvalid, PenstockError, PositionInvalid, ServerBehind, ServerChanged
from penstock.gtid_sets import NO_GTIDS, ExecutedSet, LoggedSet, union
from penstock.logstore.disk import LocalDisk
from penstock.logstore.epochs import EpochFile
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.logstore.verify import verify
from penstock.model import Position, ServerAddress
from penstock.mysql import start
from penstock.mysql.connection import LogFile, LogHead, ServerIdentity
from penstock.mysql.start import Beginning, StartAt, begin_after, begin_empty
from penstock.source.files import FileSource
from penstock.source.source import ByteRange, SourceOptions, open_source
from penstock.source.walk import TransactionWalk
from tests.support.binlog.mariadb_log import keep_mariadb_file
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import (
    BLOCK_BYTES,
    SETTINGS,
    SourceFile,
    boundaries,
    open_log,
    server_files,
)

FILES = [file for file in server_files() if file.flavor == "mysql"]
FILE = FILES[1]
# The ends of the transactions in FILE, without the events between two transactions.
BOUNDARIES = list(
    {
        gtid_set: position
        for position, gtid_set in reversed(boundaries().items())
        if (position.epoch, position.file) == (0, FILE.name)
    }.values()
)[::-1]


@dataclass
class Server:
    """Replaces a `Connection`. It answers like a server that has the binlog files of the tests."""

    key: str = "mysql:first"
    gtid_mode: str = "ON"
    executed_text: str = ""
    head_at: Position = BOUNDARIES[-1]
    address: ServerAddress = field(default_factory=ServerAddress)

    def identity(self) -> ServerIdentity:
        uuid = self.key.partition(":")[2]
        return ServerIdentity("mysql", (9, 7, 0), "9.7.0", 7, uuid, None, self.gtid_mode)

    def executed(self) -> ExecutedSet:
        return ExecutedSet(self.executed_text)

    def head(self) -> LogHead:
        return LogHead(self.head_at.file, self.head_at.offset)

    def binary_logs(self) -> list[LogFile]:
        return [LogFile(file.name, len(file.content), False) for file in FILES]

    def query(self, sql: str, args: tuple[str, str]) -> list[dict[str, Any]]:
        assert "GTID_SUBSET" in sql
        return [{"kept": True, "known": self.executed().contains(args[1])}]


@pytest.fixture
def places(tmp_path: Path) -> FileSource:
    for file in FILES:
        (tmp_path / file.name).write_bytes(file.content)
    return FileSource(SourceOptions(paths=(str(tmp_path / "*"),)))


def append(log: Log, file: SourceFile, start: int, stop: int) -> None:
    """Add [start, stop) of a file to the newest epoch of a log."""
    epoch = log.epoch
    assert epoch is not None
    cutter = replace(file, epoch=epoch.epoch).cutter(start, log.gtid_set(epoch.position), log.time_max_us)
    described = file.content[4 : 4 + int.from_bytes(file.content[13:17], "little")]
    log.begin_file(
        file.name,
        start,
        described,
        LoggedSet(cutter.gtid_set),
        epoch=epoch.epoch,
        server_id=7,
        flavor="mysql",
    )
    assert cutter.feed(file.content[start:stop]) == stop - start
    log.append(
        cutter.take_data(),
        start,
        stop,
        cutter.boundary,
        cutter.take_records(),
        time_max_us=cutter.time_max_us,
        gtid_set=LoggedSet(cutter.gtid_set),
    )


def begin_epoch_as_0_1(log: Log, key: str, position: Position, gtid_set: LoggedSet) -> None:
    """Begin an epoch with the record that version 0.1 wrote."""
    log.begin_epoch(
        epoch=position.epoch,
        server_key=key,
        server_id=7,
        flavor="mysql",
        version="9.7.0",
        file=position.file,
        offset=position.offset,
        gtid_set=gtid_set,
    )
    old = EpochFile(tuple(replace(epoch, is_logged_set=False) for epoch in log.epochs.epochs))
    old.write(log.disk, Layout(log.folder))


def resumption(log: Log, server: Server, places: FileSource) -> Resumption:
    connection: Any = server
    return Resumption(
        log,
        connection,
        lambda address, epoch, key: FileSource(replace(places.options, epoch=epoch)),
        instance="shop",
        start_at=StartAt(),
        accept_loss=False,
    )


def reopened(log: Log, disk: SimulatedDisk) -> Log:
    log.abandon()
    return open_log(disk)


# --- The GTID set of a position ----------------------------------------------------------


def test_latest_includes_transactions_not_yet_in_gtid_executed(places: FileSource) -> None:
    server: Any = Server(executed_text=boundaries()[BOUNDARIES[-2]])
    beginning = begin_empty(server, StartAt(), places, 0)
    assert beginning.position == BOUNDARIES[-1]
    assert beginning.gtid_set == boundaries()[BOUNDARIES[-1]] != server.executed_text


@pytest.mark.parametrize("counted", [-2, -1], ids=["flushed", "counted"])
def test_end_of_the_log_matches_a_gtid_set_only_if_the_log_holds_no_more(
    places: FileSource, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    outside = BOUNDARIES[-2]
    monkeypatch.setattr(start, "_first_outside", lambda connection, gtid_set, epoch: outside)
    known = boundaries()[BOUNDARIES[counted]]
    server: Any = Server(executed_text=known)
    assert begin_after(server, known, places, 0).position == BOUNDARIES[counted]


def test_gtid_set_with_a_gap_starts_at_the_gap_and_names_repeated_transactions(
    places: FileSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = boundaries()[BOUNDARIES[-1]]
    first, second = (GtidSet.parse(boundaries()[position]) for position in BOUNDARIES[2:4])
    gap = second.subtract(first)
    known = str(GtidSet.parse(logged).subtract(gap))
    monkeypatch.setattr(start, "_first_outside", lambda connection, gtid_set, epoch: BOUNDARIES[2])
    for executed in (logged, known):
        # The server has logged the missing transaction, even if it is not in the server's executed set.
        server: Any = Server(executed_text=executed)
        beginning = begin_after(server, known, places, 0)
        assert (beginning.position, beginning.gtid_set) == (BOUNDARIES[2], boundaries()[BOUNDARIES[2]])
        assert beginning.note is not None
        assert str(GtidSet.parse(logged).subtract(second)) in beginning.note


def test_gtid_set_of_a_server_does_not_pass_for_that_of_a_log() -> None:
    assert not isinstance(ExecutedSet(""), str)
    with pytest.raises(TypeError):
        union(NO_GTIDS, ExecutedSet(""))  # type: ignore[arg-type]


# --- Another file of the same name ------------------------------------------------------------


def begun_later(file: SourceFile) -> bytes:
    """Return a file's content with another creation time in its header."""
    length = int.from_bytes(file.content[13:17], "little")
    described = bytearray(file.content[4 : 4 + length])
    described[:4] = (int.from_bytes(described[:4], "little") + 60).to_bytes(4, "little")
    described[-4:] = zlib.crc32(described[:-4]).to_bytes(4, "little")
    return file.content[:4] + bytes(described) + file.content[4 + length :]


def captured(start: Position, upto: Position) -> Log:
    """Return a log that holds the range between two positions of its first server."""
    log = open_log(SimulatedDisk())
    begin_epoch_as_0_1(log, "mysql:first", start, LoggedSet(boundaries()[start]))
    log = reopened(log, log.disk)
    append(log, FILE, start.offset, upto.offset)
    return log


def test_server_with_another_file_is_followed_by_gtids_if_they_all_precede_its_log(
    places: FileSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured(BOUNDARIES[0], BOUNDARIES[3])
    server = Server(executed_text=boundaries()[BOUNDARIES[-1]])
    assert resumption(log, server, places).find().position == BOUNDARIES[3]
    (tmp_path / FILE.name).write_bytes(begun_later(FILE))
    with pytest.raises(PositionInvalid, match="was begun at"):
        resumption(log, server, FileSource(places.options)).find()
    # On this restored server, all transactions of the log precede the oldest file.
    for file in FILES:
        (tmp_path / file.name).unlink()
    (tmp_path / FILE.name).write_bytes(begun_later(FILES[2]))
    elsewhere = Position(1, FILE.name, 4)
    monkeypatch.setattr(start, "_first_outside", lambda connection, gtid_set, epoch: elsewhere)
    beginning = resumption(log, server, FileSource(places.options)).find()
    assert beginning.position == elsewhere
    assert beginning.note is not None
    assert FILE.name in beginning.note


def test_server_with_a_file_of_the_same_name_but_missing_transactions_is_behind(
    places: FileSource, tmp_path: Path
) -> None:
    log = captured(BOUNDARIES[0], BOUNDARIES[3])
    (tmp_path / FILE.name).write_bytes(begun_later(FILE))
    with pytest.raises(ServerBehind) as refused:
        resumption(log, Server(), FileSource(places.options)).find()
    assert refused.value.missing == boundaries()[BOUNDARIES[3]]


def test_server_missing_its_own_transactions_is_refused() -> None:
    log = captured(BOUNDARIES[0], BOUNDARIES[3])
    uuid = boundaries()[BOUNDARIES[3]].partition(":")[0]
    server: Any = Server(f"mysql:{uuid.upper()}", executed_text=boundaries()[BOUNDARIES[1]])
    with pytest.raises(ServerChanged, match="it was restored") as refused:
        plan_acceptance(LogFolder(log.folder), log, server)
    assert "Begin a new log" in str(refused.value.hint)


class MariadbServer(Server):
    """A server that has executed certain transactions. `ends` contains the last sequence number of each
    domain and server id.
    """

    def __init__(self, ends: dict[tuple[int, int], int], server_id: int) -> None:
        super().__init__()
        self._ends, self._server_id = ends, server_id

    def identity(self) -> ServerIdentity:
        return replace(super().identity(), flavor="mariadb", server_id=self._server_id, server_uuid=None)

    def executed(self) -> ExecutedSet:
        return ExecutedSet("the text is not used", self._ends)


@pytest.mark.parametrize(
    ("ends", "server_id", "error", "words"),
    [
        # The number that may be missing here belongs to a transaction that the server wrote itself.
        ({(0, 1): 3, (0, 2): 4}, 2, OptionInvalid, "lacks no transaction"),
        (
            {(0, 1): 2, (0, 2): 3},
            1,
            ServerChanged,
            "missing transactions that it wrote itself: it was restored",
        ),
    ],
)
def test_mariadb_server_that_cannot_be_accepted_is_refused(
    tmp_path: Path, ends: dict[tuple[int, int], int], server_id: int, error: type[PenstockError], words: str
) -> None:
    log = Log.open(tmp_path / "shop")
    keep_mariadb_file(log, 0, 1, "", ["0-1-1", "0-1-2", "0-1-3"])
    server: Any = MariadbServer(ends, server_id)
    with pytest.raises(error, match=words):
        plan_acceptance(LogFolder(log.folder), log, server)
    log.close()


def test_lost_transaction_of_mysql_is_located_before_the_epoch_that_lacks_it() -> None:
    log = captured(BOUNDARIES[0], BOUNDARIES[3])
    kept = boundaries()[BOUNDARIES[1]]
    lost = str(GtidSet.parse(boundaries()[BOUNDARIES[3]]).subtract(GtidSet.parse(kept)))
    log.begin_epoch(
        epoch=1,
        server_key="mysql:second",
        server_id=2,
        flavor="mysql",
        version="9.7",
        file=FILE.name,
        offset=BOUNDARIES[3].offset,
        gtid_set=LoggedSet(kept),
        lost=LoggedSet(lost),
    )
    append(log, FILE, BOUNDARIES[3].offset, BOUNDARIES[4].offset)
    source, _, numbers = lost.partition(":")
    last = f"{source}:{numbers.rpartition('-')[2]}"
    assert log.locate_gtid(last).position < log.epochs.epochs[1].position
    log.close()


# --- Logs written by version 0.1 -------------------------------------------------------------------


def test_incomplete_gtid_set_of_an_older_epoch_is_completed_for_every_later_position(
    places: FileSource,
) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    start = BOUNDARIES[3]
    begin_epoch_as_0_1(log, "mysql:first", start, LoggedSet(boundaries()[BOUNDARIES[1]]))
    log = reopened(log, disk)
    append(log, FILE, start.offset, BOUNDARIES[-2].offset)
    log = reopened(log, disk)
    assert log.gtid_set(BOUNDARIES[-2]) != boundaries()[BOUNDARIES[-2]], "nothing is missing"
    server = Server(executed_text=boundaries()[BOUNDARIES[-1]])
    beginning = resumption(log, server, places).find()
    assert beginning == Beginning(BOUNDARIES[-2], LoggedSet(boundaries()[BOUNDARIES[-2]]))
    for again in (log, reopened(log, disk)):
        for position in BOUNDARIES[3:-1]:
            assert again.gtid_set(position) == boundaries()[position]


def test_transactions_skipped_when_an_older_epoch_began_are_named(places: FileSource) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    begin_epoch_as_0_1(log, "mysql:second", BOUNDARIES[0], LoggedSet(boundaries()[BOUNDARIES[0]]))
    append(log, FILE, BOUNDARIES[0].offset, BOUNDARIES[2].offset)
    # The server had logged more than its executed set contained, and the epoch started after that.
    known = LoggedSet(boundaries()[BOUNDARIES[2]])
    begin_epoch_as_0_1(log, "mysql:first", replace(BOUNDARIES[4], epoch=1), known)
    log = reopened(log, disk)
    server = Server(executed_text=boundaries()[BOUNDARIES[-1]])
    find: Callable[[], Beginning] = resumption(log, server, places).find
    note = find().note
    skipped = GtidSet.parse(boundaries()[BOUNDARIES[4]]).subtract(GtidSet.parse(known))
    assert skipped
    assert note is not None
    assert str(skipped) in note
    assert "penstock verify" in note
    assert find().note is None, "an epoch is completed once"


@pytest.mark.parametrize("last", [1, 126, 127, 255])
def test_log_of_an_older_version_continues_in_an_epoch_with_higher_commit_versions(
    places: FileSource, tmp_path: Path, last: int
) -> None:
    with Log.open(tmp_path / "log", SETTINGS) as log:
        begin_epoch_as_0_1(log, "mysql:first", replace(BOUNDARIES[0], epoch=last), NO_GTIDS)
    for key in ("mysql:second", "mysql:third"):
        log = Log.open(tmp_path / "log", SETTINGS)
        append(log, FILE, BOUNDARIES[0].offset, BOUNDARIES[4].offset)
        server = Server(key)
        position = resumption(log, server, places).find().position
        begin_epoch_as_0_1(log, key, replace(BOUNDARIES[0], epoch=position.epoch), NO_GTIDS)
        log.close()
    with Log.open(tmp_path / "log", SETTINGS) as log:
        append(log, FILE, BOUNDARIES[0].offset, BOUNDARIES[4].offset)
        epochs = [epoch.epoch for epoch in log.epochs.epochs]
    assert epochs[0] == last
    assert len(epochs) == 3
    source = open_source(SourceOptions(paths=(str(tmp_path / "log"),)))
    versions = [
        version
        for extent in source.extents()
        for batch in TransactionWalk(
            source, ByteRange(extent.epoch, extent.file, extent.start, extent.end, True)
        )
        for version in batch["commit_version"].to_pylist()
    ]
    assert len(versions) >= 3 * 4
    assert versions == sorted(set(versions))
    reader = LogReader.open(tmp_path / "log")
    positions = [reader.epochs.decode_version(version) for version in versions]
    assert positions == sorted(positions)
    assert {epoch for epoch, _ in positions} == set(epochs)
    assert {number for _, number in positions} == {BOUNDARIES[0].file_number}
    assert [segment.epoch for segment in reader.segments] == epochs
    assert not list(verify(LocalDisk(), Layout(tmp_path / "log"), block_bytes=BLOCK_BYTES))


def test_union_of_logged_sets_contains_both() -> None:
    first, second = (LoggedSet(boundaries()[position]) for position in (BOUNDARIES[0], BOUNDARIES[-1]))
    assert union(first, second) == second == union(second, NO_GTIDS)
