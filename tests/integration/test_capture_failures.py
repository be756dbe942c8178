# SPDX-License-Identifier: Apache-2.0
"""How a capture behaves when its log, its table definitions or its stream fails."""

import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock._native import BlockCutter
from penstock.capture import run
from penstock.capture.kept_schemas import follow_schemas
from penstock.capture.receive import Progress, Receiver, Schemas
from penstock.capture.run import Capture, CaptureParts
from penstock.capture.status import State
from penstock.errors import (
    AnswerTimedOut,
    ConnectionLost,
    DiskFailed,
    LeaseLost,
    LogDamaged,
    LogFull,
    PrivilegeMissing,
    SchemaInvalid,
    SchemaUnknown,
    StreamError,
)
from penstock.gtid_sets import NO_GTIDS
from penstock.logstore.log import Log
from penstock.model import Position, ServerAddress, StatementSession
from penstock.mysql.connection import Connection, connect
from penstock.mysql.replica import DumpStart, ReplicaName, ReplicaStream
from penstock.mysql.start import LogLookup, StartAt
from penstock.settings.daemon import Settings
from penstock.source.server import ServerSource
from penstock.source.source import SourceOptions
from tests.support.binlog.block_cutting import SMALL_LOGS, flavor_of, framed
from tests.support.capture.captured_log import (
    capturing,
    head_of,
    settings_of,
    wait_for,
    wait_for_position,
    wait_for_state,
)
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import FOLDER, SETTINGS, Captured, check_log
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server
from tools.servers.proxy import Proxy

# No server listens on this port.
NOBODY = "mysql://nobody@127.0.0.1:1"
# A small log named like a server's first file.
NAME = "mysql-bin.000001"


class FailingDisk(SimulatedDisk):
    """A disk whose queries and syncs fail while `failing` is set."""

    def fail(self, failing: bool = True) -> None:
        self.failing_syncs = failing

    def free_bytes(self, folder: Path) -> int:
        if self.failing_syncs:
            raise DiskFailed(f"asking for the free room of {folder} failed")
        return super().free_bytes(folder)


def places_of(address: ServerAddress, epoch: int, server_key: str) -> LogLookup:
    return ServerSource(
        SourceOptions(address=address, instance=str(address), epoch=epoch, server_key=server_key)
    )


@contextmanager
def capturing_into(
    open_log: Callable[[], Log],
    settings: Settings,
    schemas_of: Callable[..., Schemas | None] = lambda log, connection, position: None,
) -> Iterator[Capture]:
    """Capture into the caller's log, from the server's current end on."""
    parts = CaptureParts(open_log, places_of, lambda name: None, schemas_of)
    start = StartAt(earliest=False)
    capture = Capture("shop", settings.instances["shop"], settings.log_of("shop"), start, parts)
    capture.start()
    try:
        yield capture
    finally:
        capture.stop()
        assert capture.join(WAIT_SECONDS_MAX), "the capture does not end"


# --- The log ----------------------------------------------------------------------------------


def test_disk_failure_that_heals_pauses_capture_and_loses_no_byte(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    disk = FailingDisk()
    settings = settings_of(tmp_path, mariadb_server.url())
    with capturing_into(lambda: Log.open(FOLDER, SETTINGS, disk), settings) as capture:
        wait_for_state(capture, State.RUNNING)
        mariadb_server.sql(f"CREATE TABLE {database}.t (a INT)")
        wait_for_position(capture, head_of(mariadb_server))
        disk.fail()
        mariadb_server.sql(f"INSERT INTO {database}.t VALUES (1)")
        status = wait_for(capture, lambda status: status.error is not None and status.state is State.WAITING)
        assert status.error is not None
        assert status.error.kind == "DiskFailed"
        disk.fail(False)
        wait_for_state(capture, State.RUNNING)
        wait_for_position(capture, head_of(mariadb_server))
    assert capture.snapshot().state is State.CLOSED


def test_stopped_capture_still_serves_a_log_that_cannot_be_synced(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    disk, refused = SimulatedDisk(), threading.Event()

    def schemas_of(log: Log, connection: object, position: Position) -> None:
        if refused.is_set():
            disk.failing_syncs = True
            raise SchemaInvalid("the kept definitions are none of ours")

    unsynced = SETTINGS.model_copy(update={"fsync": "never"})
    with Proxy(mariadb_server.port) as proxy:
        settings = settings_of(tmp_path, proxy.through(mariadb_server.url()) + "?ssl_mode=disabled")
        with capturing_into(lambda: Log.open(FOLDER, unsynced, disk), settings, schemas_of) as capture:
            wait_for_state(capture, State.RUNNING)
            mariadb_server.sql(f"CREATE TABLE {database}.t (a INT)")
            wait_for_position(capture, head_of(mariadb_server))
            refused.set()
            proxy.cut("reset")
            status = wait_for_state(capture, State.STOPPED)
            assert status.error is not None
            assert status.error.kind == "SchemaInvalid"
            capture.join(0.3)
            assert list(capture.log().extents())
    assert capture.snapshot().state is State.STOPPED


def test_idle_log_reports_a_failed_background_sync() -> None:
    disk = SimulatedDisk()
    log = Log.open(FOLDER, SETTINGS.model_copy(update={"fsync": "seconds", "fsync_seconds": 0.01}), disk)

    def fail(captured: Captured, number: int) -> None:
        disk.failing_syncs = True
        wait_until(lambda: log.durable == log.visible or log.full_because())

    with pytest.raises(DiskFailed):
        Captured(log, each=fail).run()
    with pytest.raises(DiskFailed, match="failed before"):
        log.full_because()
    log.close()


def test_abandoned_log_is_unlocked_and_continues_where_it_ended() -> None:
    disk = SimulatedDisk()
    log = Log.open(FOLDER, SETTINGS, disk)
    Captured(log).run()
    visible, steps = log.visible, len(disk.steps)
    log.abandon()
    log.abandon()
    log.close()
    assert len(disk.steps) == steps, "an abandoned log was finished"
    with Log.open(FOLDER, SETTINGS, disk) as again:
        assert again.visible == visible
        check_log(again)


def test_log_still_written_by_another_process_is_waited_for(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, NOBODY)
    with Log.open(tmp_path / "shop", settings.log_of("shop")) as other, capturing(settings) as capture:
        status = wait_for_state(capture, State.WAITING)
        assert status.error is not None
        assert status.error.kind == "LogLocked"
        other.close()
        wait_for(capture, lambda status: status.error is not None and status.error.kind == "ConnectionLost")


@contextmanager
def hung_server() -> Iterator[str]:
    """A server that accepts connections and never answers, like a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"mysql://nobody@127.0.0.1:{listener.getsockname()[1]}"


def test_hanging_server_is_abandoned_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "_ANSWER_SECONDS_MIN", 0.1)
    asked = []

    def connect_noted(address: ServerAddress, answer_seconds: float) -> Connection:
        asked.append(address.port)
        return connect(address, answer_seconds)

    monkeypatch.setattr(run, "connect", connect_noted)
    with hung_server() as source:
        settings = settings_of(tmp_path, source, servers=[NOBODY], fail_over_after="100ms")
        with capturing(settings) as capture:
            wait_for(capture, lambda status: 1 in asked)
            status = wait_for(capture, lambda status: status.error is not None)
            assert status.error is not None
    assert len(asked) >= 3


def test_question_to_a_hanging_server_is_asked_once_for_all_waiters() -> None:
    with hung_server() as source:
        server = ServerSource(SourceOptions(address=ServerAddress.parse(source), instance="shop"))
        questions = []

        def connect_noted(address: ServerAddress) -> Connection:
            questions.append(address)
            return connect(address, 0.1)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("penstock.source.server.connect", connect_noted)
            with pytest.raises(AnswerTimedOut, match="does not answer"):
                server.head()
    assert len(questions) == 1


def test_error_that_stopped_a_capture_does_not_grow_with_its_readers(tmp_path: Path) -> None:
    def open_log() -> Log:
        raise LogDamaged("the log is not what was written")

    settings = settings_of(tmp_path, NOBODY)
    with capturing_into(open_log, settings) as capture:
        wait_for_state(capture, State.STOPPED)
        depths = []
        for _ in range(3):
            with pytest.raises(LogDamaged) as stopped:
                capture.log()
            depths.append(len(traceback.extract_tb(stopped.value.__traceback__)))
    assert depths[0] == depths[1] == depths[2]


# --- Definitions ------------------------------------------------------------------------------


def test_session_end_closes_every_definitions_file(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    kept: list[Any] = []

    def schemas_of(*arguments: Any) -> Schemas:
        kept.append(follow_schemas(*arguments))
        return kept[-1]

    def opened() -> list[str]:
        paths = []
        for name in os.listdir("/proc/self/fd"):
            # Another thread may close a file that was just listed.
            with suppress(FileNotFoundError):
                paths.append(os.readlink(f"/proc/self/fd/{name}"))
        return [path for path in paths if path.startswith(str(tmp_path))]

    settings = settings_of(tmp_path, mariadb_server.url())
    log = settings.log_of("shop")
    with capturing_into(lambda: Log.open(log.folder, log), settings, schemas_of) as capture:
        wait_for_state(capture, State.RUNNING)
        mariadb_server.sql(f"CREATE TABLE {database}.t (a INT)")
        wait_for_position(capture, head_of(mariadb_server))
        assert any(path.endswith(".schemas") for path in opened())
    assert kept
    assert opened() == []


def test_statements_are_not_buffered_without_a_consumer(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cutters: list[BlockCutter] = []

    def cutter(**options: Any) -> BlockCutter:
        cutters.append(BlockCutter(**options))
        return cutters[-1]

    monkeypatch.setattr(run, "BlockCutter", cutter)
    database = fresh_database(mariadb_server)
    settings = settings_of(tmp_path, mariadb_server.url())
    log = settings.log_of("shop")
    with capturing_into(lambda: Log.open(log.folder, log), settings) as capture:
        wait_for_state(capture, State.RUNNING)
        mariadb_server.sql(f"CREATE TABLE {database}.t (a INT)")
        wait_for_position(capture, head_of(mariadb_server))
    assert cutters[0].events
    assert cutters[0].take_statements() == []


# --- The stream -------------------------------------------------------------------------------


class Statements:
    """Accepts statements up to a limit and rejects the next one."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken: list[Position] = []

    def apply(self, text: str, database: str, position: Position, session: StatementSession) -> bool:
        if len(self.taken) == self.most:
            raise SchemaUnknown("the definition is not known", position=str(position))
        self.taken.append(position)
        return True

    def received(self, position: Position) -> None:
        """Do nothing, because no reader waits for the position."""

    def close(self) -> None:
        """Do nothing, because the stub has no resources."""


def events_of(file: Path) -> list[bytes]:
    content, at, split = file.read_bytes(), 4, []
    while at < len(content):
        end = at + int.from_bytes(content[at + 9 : at + 13], "little")
        split.append(content[at:end])
        at = end
    return split


def receive(
    log: Log,
    file: Path,
    packets: bytes,
    schemas: Schemas | None = None,
    stream_at: Any = None,
    begin_epoch: Callable[[object], None] | None = None,
    pause_reason: Callable[[], str | None] = lambda: None,
) -> None:
    """Receive packets that start with a file's first event, over a socket that is closed after them."""
    client_end, server_end = socket.socketpair()
    flavor = flavor_of(file)
    address, position, identity = stream_at or (None, Position(0, NAME, 4), None)
    name = ReplicaName.choose(None)
    stream = ReplicaStream(
        address, client_end, b"", start=DumpStart(position), identity=identity, name=name, bounded=False
    )
    begin = partial(
        log.begin_epoch,
        epoch=0,
        server_key="k",
        server_id=7,
        flavor=flavor,
        version="",
        file=NAME,
        offset=4,
        gtid_set=NO_GTIDS,
    )
    if begin_epoch is None:
        begin()
    receiver = Receiver(
        log,
        Progress(),
        threading.Event(),
        epoch=0,
        server_id=7,
        flavor=flavor,
        chunk_bytes=512,
        schemas=schemas,
        hold=lambda why: None,
        arrived=lambda: None,
        begin_epoch=None if begin_epoch is None else lambda: begin_epoch(begin()),
        pause_reason=pause_reason,
    )
    # The packets are few enough for the socket buffer.
    server_end.sendall(packets)
    server_end.close()
    with stream:
        receiver.receive(stream, BlockCutter(epoch=0, file=NAME, offset=4, flavor=flavor, live=True))


def test_bytes_are_not_stored_before_their_statements_are_applied(tmp_path: Path) -> None:
    file = next(path for path in SMALL_LOGS if path.name == "mysql-9.7-1.binlog")
    packets = b"".join(framed(events_of(file)))
    with Log.open(tmp_path / "whole", SETTINGS) as log:
        every = Statements(-1)
        with pytest.raises(ConnectionLost):
            receive(log, file, packets, every)
        assert log.visible is not None
        assert len(every.taken) == 2
        assert log.visible >= every.taken[1]
    with Log.open(tmp_path / "part", SETTINGS) as log:
        with pytest.raises(SchemaUnknown):
            receive(log, file, packets, Statements(1))
        assert log.visible is None or log.visible < every.taken[1]


def test_lease_lost_while_the_log_is_full_stores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(path for path in SMALL_LOGS if path.name == "mysql-9.7-1.binlog")
    monkeypatch.setattr("penstock.capture.receive._HOLD_SECONDS", 0.0)
    with Log.open(tmp_path / "shop", SETTINGS) as log:
        tries: list[int] = []

        def refuse(data: object, start: int, *arguments: object, **options: object) -> None:
            assert not tries, "bytes are stored without a lease"
            tries.append(start)
            raise LogFull("no space is left")

        def pause_reason() -> str | None:
            if tries:
                raise LeaseLost("another host captures")
            return None

        monkeypatch.setattr(log, "append", refuse)
        with pytest.raises(LeaseLost):
            receive(log, file, b"".join(framed(events_of(file))), pause_reason=pause_reason)
        assert len(tries) == 1


def test_epoch_starts_with_its_first_byte_and_not_with_a_refused_dump(tmp_path: Path) -> None:
    file = next(path for path in SMALL_LOGS if path.name == "mysql-9.7-1.binlog")
    start: list[Position | None] = []
    with Log.open(tmp_path / "shop", SETTINGS) as log:

        def note(record: object) -> None:
            start.append(log.visible)

        denied = b"\xff" + (1227).to_bytes(2, "little") + b"#42000Access denied"
        refused = [*framed(events_of(file)[:1]), len(denied).to_bytes(3, "little") + b"\x02" + denied]
        with pytest.raises(PrivilegeMissing):
            receive(log, file, b"".join(refused), begin_epoch=note)
        assert log.epoch is None
        with pytest.raises(ConnectionLost):
            receive(log, file, b"".join(framed(events_of(file))), begin_epoch=note)
        assert start == [None]
        assert log.epoch is not None
        assert log.visible is not None


def test_midstream_error_is_not_judged_by_the_start_of_the_session(server: Server, tmp_path: Path) -> None:
    address = ServerAddress.parse(server.url())
    with connect(address) as connection:
        identity = connection.identity()
        oldest = connection.binary_logs()[0].file
    purged = Position(0, oldest.rpartition(".")[0] + ".000000", 4)
    file = SMALL_LOGS[0]
    refusal = b"\xff" + (1236).to_bytes(2, "little") + b"#HY000the event is truncated"
    events = events_of(file)
    packets = [*framed(events), len(refusal).to_bytes(3, "little") + bytes([len(events) + 1]) + refusal]
    with Log.open(tmp_path / "shop", SETTINGS) as log, pytest.raises(StreamError, match="server error 1236"):
        receive(log, file, b"".join(packets), None, (address, purged, identity))
