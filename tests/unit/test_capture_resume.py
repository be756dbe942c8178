# SPDX-License-Identifier: Apache-2.0
"""Where capture goes on, decided over a server's answers and its real binlog files."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from penstock._native import GtidSet
from penstock.capture import start
from penstock.capture.connection import LogFile, LogHead, ServerIdentity
from penstock.capture.resume import Resumption
from penstock.capture.start import Beginning, StartAt, begin_after, begin_empty
from penstock.gtid_sets import NO_GTIDS, ExecutedSet, LoggedSet, union
from penstock.logstore.epochs import EpochFile
from penstock.logstore.layout import Layout
from penstock.logstore.log import Log
from penstock.model import Position, ServerAddress
from penstock.source.files import FileSource
from penstock.source.source import SourceOptions
from tests.logstore_disk import SimulatedDisk
from tests.logstore_source import SourceFile, boundaries, open_log, server_files

FILES = [file for file in server_files() if file.flavor == "mysql"]
FILE = FILES[1]
# The ends of its transactions; the events between two transactions are left out.
BOUNDARIES = list(
    {
        gtid_set: place
        for place, gtid_set in reversed(boundaries().items())
        if (place.epoch, place.file) == (0, FILE.name)
    }.values()
)[::-1]


@dataclass
class Server:
    """The answers of a server whose files are those of the tests; a `Connection` as far as it is asked."""

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
    cutter = replace(file, epoch=epoch.epoch).cutter(start, log.gtid_set(epoch.position))
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
    old = EpochFile(tuple(replace(one, is_logged_set=False) for one in log.epochs.epochs))
    old.write(log.disk, Layout(log.folder))


def resumption(log: Log, server: Server, places: FileSource) -> Resumption:
    connection: Any = server
    return Resumption(
        log,
        connection,
        lambda address, epoch, key: places,
        instance="shop",
        start_at=StartAt(),
        accept_loss=False,
    )


def reopened(log: Log, disk: SimulatedDisk) -> Log:
    log.abandon()
    return open_log(disk)


# --- Which set belongs to a position ----------------------------------------------------------


def test_latest_takes_the_transactions_that_the_server_has_yet_to_count(places: FileSource) -> None:
    server: Any = Server(executed_text=boundaries()[BOUNDARIES[-2]])
    beginning = begin_empty(server, StartAt(), places, 0)
    assert beginning.position == BOUNDARIES[-1]
    assert beginning.gtid_set == boundaries()[BOUNDARIES[-1]] != server.executed_text


@pytest.mark.parametrize("counted", [-2, -1], ids=["flushed", "counted"])
def test_the_end_of_the_log_is_after_a_set_only_if_the_log_holds_no_more(
    places: FileSource, monkeypatch: pytest.MonkeyPatch, counted: int
) -> None:
    outside = BOUNDARIES[-2]
    monkeypatch.setattr(start, "_first_outside", lambda connection, gtid_set, epoch: outside)
    known = boundaries()[BOUNDARIES[counted]]
    server: Any = Server(executed_text=known)
    assert begin_after(server, known, places, 0).position == BOUNDARIES[counted]


def test_set_of_a_server_is_no_text_and_fits_nowhere_that_a_set_of_a_log_does() -> None:
    assert not isinstance(ExecutedSet(""), str)
    with pytest.raises(TypeError):
        union(NO_GTIDS, ExecutedSet(""))  # type: ignore[arg-type]


# --- What version 0.1 wrote -------------------------------------------------------------------


def test_incomplete_set_of_an_older_epoch_is_completed_for_every_position_behind_it(
    places: FileSource,
) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    begun = BOUNDARIES[3]
    begin_epoch_as_0_1(log, "mysql:first", begun, LoggedSet(boundaries()[BOUNDARIES[1]]))
    log = reopened(log, disk)
    append(log, FILE, begun.offset, BOUNDARIES[-2].offset)
    log = reopened(log, disk)
    assert log.gtid_set(BOUNDARIES[-2]) != boundaries()[BOUNDARIES[-2]], "nothing is missing"
    server = Server(executed_text=boundaries()[BOUNDARIES[-1]])
    beginning = resumption(log, server, places).find()
    assert beginning == Beginning(BOUNDARIES[-2], LoggedSet(boundaries()[BOUNDARIES[-2]]))
    for again in (log, reopened(log, disk)):
        for position in BOUNDARIES[3:-1]:
            assert again.gtid_set(position) == boundaries()[position]


def test_transactions_that_were_skipped_when_an_older_epoch_began_are_named(places: FileSource) -> None:
    disk = SimulatedDisk()
    log = open_log(disk)
    begin_epoch_as_0_1(log, "mysql:second", BOUNDARIES[0], LoggedSet(boundaries()[BOUNDARIES[0]]))
    append(log, FILE, BOUNDARIES[0].offset, BOUNDARIES[2].offset)
    # The server had logged more than it counted, and the epoch began after that.
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


def test_union_of_logged_sets_holds_both() -> None:
    first, second = (LoggedSet(boundaries()[place]) for place in (BOUNDARIES[0], BOUNDARIES[-1]))
    assert union(first, second) == second == union(second, NO_GTIDS)
