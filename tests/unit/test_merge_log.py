# SPDX-License-Identifier: Apache-2.0
"""The joined log of a merge, over forged logs of members: each transaction is joined once, regardless of
crashes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random
from threading import Event as Flag
from types import SimpleNamespace

import pytest

from penstock.capture import generated_log
from penstock.capture.generated_log import EPOCH, SERVER_ID
from penstock.capture.receive import Progress, Receiver
from penstock.errors import EventUnsupported, LogDamaged, PenstockError, SchemaUnknown
from penstock.gtid_sets import NO_GTIDS
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.disk import Disk
from penstock.logstore.log import Log
from penstock.merge import joining as joining_module
from penstock.merge import member as member_module
from penstock.merge.joined_log import JoinedLog, MergeState, begin_joined_log
from penstock.merge.joining import Joining
from penstock.merge.member import Member, MemberTransaction
from penstock.model import Position
from penstock.serve.own_log import OwnSource
from penstock.source.reading import read_range
from tests.support.binlog.events import (
    QUERY,
    XA_PREPARE,
    Event,
    assemble,
    compressed,
    events,
    query_body,
    with_table_metadata,
)
from tests.support.binlog.forged_log import insert
from tests.support.logstore.disk import Loss, SimulatedDisk
from tests.support.logstore.forged_members import (
    BusyConnection,
    ForgedServer,
    IdleConnection,
    IdleMember,
    asking_member,
)
from tests.support.logstore.source import FOLDER, SETTINGS

JOINED = FOLDER / "joined"
# 2023-11-21, in microseconds.
TIME_US = 1_700_564_400_000_000
RUNS = 12


class Crashed(Exception):
    """Signals that the process is killed."""


# A row: its member's table, and its number.
Row = tuple[str, int]


class Merge:
    """A merge of forged servers, which can crash and start again."""

    def __init__(
        self,
        servers: Sequence[ForgedServer],
        disk: Disk,
        make: Callable[[ForgedServer, Position], Member] = IdleMember,
    ) -> None:
        self.servers = servers
        self.disk = disk
        self.log = Log.open(JOINED, SETTINGS, disk)
        state = MergeState.load(self.log)
        if state is None or self.log.epoch is None:
            begins = {server.name: server.log.epochs.epochs[0].position for server in servers}
            state = MergeState(None, begins)
            state.write(self.log)
            begin_joined_log(self.log, "merge:test", "mysql", NO_GTIDS)
        self.state = state
        self.members: list[Member] = [make(server, state.positions[server.name]) for server in servers]
        receiver = Receiver(
            self.log,
            Progress(),
            Flag(),
            epoch=EPOCH,
            server_id=SERVER_ID,
            flavor="mysql",
            chunk_bytes=CAPTURE_CHUNK_BYTES,
            schemas=None,
            hold=lambda why: None,
            arrived=lambda: None,
        )
        self.joining = Joining(self.log, JoinedLog(self.log, receiver, "mysql"), self.members, state)

    def run(self) -> None:
        """Join the members' current changes."""
        while self.joining.step():
            pass


def rows_of(log: Log) -> list[Row]:
    """Return the rows of a log, in commit order."""
    source = OwnSource("joined", log)
    found: list[tuple[int, Row]] = []
    for byte_range in source.split() if log.visible is not None and log.extents() else []:
        for batch in read_range(source, byte_range):
            rows = batch.to_arrow()
            versions, numbers = (rows[name].to_pylist() for name in ("_commit_version", "id"))
            found += [
                (version, (str(batch.table), id_)) for version, id_ in zip(versions, numbers, strict=True)
            ]
    assert len({version for version, _ in found}) == len(found), "each transaction has its own version"
    return [row for _, row in sorted(found)]


def servers_of(
    random: Random, commits: int, names: Sequence[str] = ("db1", "db2")
) -> tuple[list[ForgedServer], list[Row]]:
    """Return servers that have committed in turn, and their rows in commit order."""
    servers = [ForgedServer(name, number, SimulatedDisk()) for number, name in enumerate(names, 1)]
    expected: list[Row] = []
    for number in range(commits):
        server = random.choice(servers)
        server.commit(TIME_US + number, number, b"note" * random.choice((1, 100)))
        expected.append((server.table, number))
    return servers, expected


def test_logs_are_joined_in_commit_order_and_read_like_any_log() -> None:
    servers, expected = servers_of(Random(1), 30)
    merge = Merge(servers, SimulatedDisk())
    merge.run()
    assert rows_of(merge.log) == expected
    assert merge.joining.held_back_by() == []
    # The log's GTID set contains the GTIDs of both servers.
    assert (
        merge.log.gtid_set(merge.log.head()).count("-30") + merge.log.gtid_set(merge.log.head()).count(":1-")
        == 2
    )


def test_restart_anywhere_loses_and_repeats_nothing() -> None:
    for seed in range(RUNS):
        random = Random(seed)
        servers, expected = servers_of(random, 40)
        disk = SimulatedDisk()
        merge = Merge(servers, disk)
        for number in range(40, 60):
            action = random.random()
            if action < 0.4:
                merge.joining.step()
            elif action < 0.6:
                merge.joining.make_durable()
            elif action < 0.8:
                # The process is killed, or the power fails.
                loss = random.choice([None, *Loss])
                disk = disk.after_kill() if loss is None else disk.after_power_failure(loss, number)
                merge = Merge(servers, disk)
            server = random.choice(servers)
            server.commit(TIME_US + number, number)
            expected.append((server.table, number))
        merge.run()
        rows = rows_of(merge.log)
        assert sorted(rows) == sorted(expected), seed
        for server in servers:
            own = [number for table, number in rows if table == server.table]
            assert own == sorted(own), seed


def test_long_transactions_and_full_files_are_joined_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (member_module, joining_module, generated_log):
        monkeypatch.setattr(module, "CAPTURE_CHUNK_BYTES", 500)
    monkeypatch.setattr(generated_log, "FILE_BYTES_MAX", 4_000)
    random = Random(1)
    servers, expected = servers_of(random, 10)
    for number in range(10, 20):
        server = random.choice(servers)
        server.commit(TIME_US + number, number, bytes(3_000))
        expected.append((server.table, number))
    disk = SimulatedDisk()
    merge = Merge(servers, disk)
    while merge.joining.step():
        # Each step runs in another process; some steps end at the end of a file.
        merge = Merge(servers, disk.after_kill())
    assert rows_of(merge.log) == expected
    assert len({extent.file for extent in merge.log.extents()}) > 3


@pytest.mark.parametrize(
    ("what", "error", "why"),
    [
        ("xa", EventUnsupported, "the XA transaction X'78',X'',1 cannot be merged"),
        ("xa commit", EventUnsupported, "the XA transaction X'78',X'',1 cannot be merged"),
        ("compressed xa commit", EventUnsupported, "the XA transaction X'78',X'',1 cannot be merged"),
        ("metadata", SchemaUnknown, "does not name the columns of db2.notes"),
        ("compressed", SchemaUnknown, "does not name the columns of db2.notes"),
        ("gtid", EventUnsupported, "db1 and db2 both log"),
    ],
)
def test_what_logs_cannot_share_is_refused_by_name(what: str, error: type[PenstockError], why: str) -> None:
    first, second = (
        ForgedServer(name, 1 if what == "gtid" else number, SimulatedDisk())
        for number, name in enumerate(("db1", "db2"), 1)
    )
    second.commit(TIME_US, 1)
    gtid, begin, table_map, rows, end = insert(1, second.table, 2, b"note")
    if what == "xa":
        end = Event(end.timestamp, XA_PREPARE, 1, 0, 0, b"\0" + b"".join(map(_u32, (1, 1, 0))) + b"x")
    if what in ("metadata", "compressed"):
        described = events(with_table_metadata(assemble([table_map]), {1, 2, 3}))
        (table_map,) = described
    if what == "gtid":
        first.commit(TIME_US + 1, 1)
    else:
        following = [begin, table_map, rows, end]
        if what.endswith("xa commit"):
            following = [replace(end, code=QUERY, body=query_body("XA COMMIT X'78',X'',1"))]
        second.append([gtid, *([compressed(following)] if what.startswith("compressed") else following)])
    merge = Merge([first, second], SimulatedDisk())
    with pytest.raises(error, match=why) as refused:
        merge.run()
    assert "db" in str(refused.value.position)
    # The transactions before the refused one are stored.
    assert rows_of(merge.log)[:1] == [("db2.notes", 1)]


def _u32(number: int) -> bytes:
    return number.to_bytes(4, "little")


def test_log_that_lost_what_was_durable_is_refused() -> None:
    servers, _ = servers_of(Random(1), 10)
    disk = SimulatedDisk()
    merge = Merge(servers, disk)
    merge.run()
    merge.joining.make_durable()
    state = disk.files()[JOINED / "merge.json"]
    other = SimulatedDisk()
    merge = Merge(servers[:1], other)
    other.put(JOINED / "merge.json", state)
    with pytest.raises(LogDamaged, match="which was durable"):
        Merge(servers, other.after_kill())


def test_member_that_is_away_holds_the_others_back() -> None:
    first, second = (
        ForgedServer(name, number, SimulatedDisk()) for number, name in enumerate(("db1", "db2"), 1)
    )
    merge = Merge([first, second], SimulatedDisk())
    away = merge.members[1]
    assert isinstance(away, IdleMember)
    away.is_away = True
    first.commit(TIME_US, 1)
    assert not merge.joining.step()
    assert [member.name for member in merge.joining.held_back_by()] == ["db2"]
    second.commit(TIME_US - 1, 2)
    second.commit(TIME_US + 1, 3)
    merge.run()
    # The third row is after the earliest commit that the first server may still make.
    assert rows_of(merge.log) == [("db2.notes", 2), ("db1.notes", 1), ("db2.notes", 3)]


def test_busy_server_whose_clock_is_behind_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        ForgedServer(name, number, SimulatedDisk()) for number, name in enumerate(("db1", "db2"), 1)
    )
    connection = BusyConnection(second, TIME_US - 3_600_000_000)
    monkeypatch.setattr(member_module, "connect", lambda *_: connection)
    merge = Merge([first, second], SimulatedDisk(), asking_member)
    first.commit(TIME_US, 1)
    connection.head()
    for _ in range(4):
        # New transactions arrive during each query, so the end of the server's log is never reached.
        merge.joining.step()
    assert ("db1.notes", 1) in rows_of(merge.log)


def test_server_that_has_failed_over_and_is_idle_holds_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (
        ForgedServer(name, number, SimulatedDisk()) for number, name in enumerate(("db1", "db2"), 1)
    )
    second.commit(TIME_US, 1)
    first.commit(TIME_US + 1, 2)
    # The log begins an epoch with the first change of the other server.
    second.session_start = Position(1, "replica-bin.000007", 500)
    second.identity = SimpleNamespace(key="mysql:9")
    connection = IdleConnection(second.identity, second.session_start)
    monkeypatch.setattr(member_module, "connect", lambda *_: connection)
    merge = Merge([first, second], SimulatedDisk(), asking_member)
    merge.run()
    assert rows_of(merge.log) == [("db2.notes", 1), ("db1.notes", 2)]


def test_first_transaction_of_a_file_may_be_of_another_member_after_a_crash(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generated_log, "CAPTURE_CHUNK_BYTES", 500)
    first, second = (
        ForgedServer(name, number, SimulatedDisk()) for number, name in enumerate(("db1", "db2"), 1)
    )
    first.commit(TIME_US, 1, bytes(3_000))
    disk = SimulatedDisk()
    merge = Merge([first, second], disk)

    def crash(self: Member, transaction: MemberTransaction) -> Iterator[bytes]:
        events = bytes(transaction.events or b"")
        yield events[:-40]
        raise Crashed

    with monkeypatch.context() as patch:
        patch.setattr(Member, "events", crash)
        with pytest.raises(Crashed):
            merge.run()
    # The clock of the second server is behind, so its transaction arrived too late before the crash.
    second.commit(TIME_US - 1, 2)
    merge = Merge([first, second], disk.after_kill())
    merge.run()
    assert rows_of(merge.log) == [("db2.notes", 2), ("db1.notes", 1)]
