# SPDX-License-Identifier: Apache-2.0
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pymysql
import pytest

from penstock.errors import (
    ConnectionLost,
    DumpReplaced,
    PositionInvalid,
    PositionPurged,
    PrivilegeMissing,
    StreamError,
)
from penstock.model import Position, ServerAddress, Tls
from penstock.mysql import replica
from penstock.mysql.connection import LogHead, connect
from penstock.mysql.replica import DumpStart, ReplicaName, ReplicaStream, open_stream
from tests.support.capture.captured_log import purge, rotate
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import wait_until
from tools.servers import Server
from tools.servers.proxy import Proxy

# MySQL and MariaDB differ only in lower layers, whose everyday tests run on both.
pytestmark = pytest.mark.deep_flavors("mariadb")

HEADER_BYTES = 19
FORMAT_DESCRIPTION = 15
ROTATE = 4
MARIADB_ANNOTATE = 160
HEARTBEATS = (27, 41)
ARTIFICIAL = 0x20


@dataclass(frozen=True)
class Event:
    kind: int
    flags: int
    body: bytes

    @property
    def logged(self) -> bool:
        """Return whether the event is in the file, instead of being generated for the dump."""
        return not self.flags & ARTIFICIAL and self.kind not in (*HEARTBEATS, ROTATE, FORMAT_DESCRIPTION)

    @property
    def checksum_holds(self) -> bool:
        return zlib.crc32(self.body[:-4]) == int.from_bytes(self.body[-4:], "little")


def events_of(chunks: Iterator[memoryview]) -> Iterator[Event]:
    held = b""
    for chunk in chunks:
        held += chunk
        start = 0
        while len(held) - start >= HEADER_BYTES:
            length = int.from_bytes(held[start + 9 : start + 13], "little")
            if len(held) - start < length:
                break
            body = held[start : start + length]
            yield Event(body[4], int.from_bytes(body[17:19], "little"), body)
            start += length
        held = held[start:]


def dumped(address: ServerAddress, start: DumpStart) -> list[Event]:
    with open_stream(address, start, bounded=True) as stream:
        return list(events_of(stream.event_chunks()))


def logged(address: ServerAddress, start: DumpStart) -> list[bytes]:
    return [event.body for event in dumped(address, start) if event.logged]


def at(head: LogHead) -> DumpStart:
    return DumpStart(position=Position(0, head.file, head.offset))


def executed_on(server: Server) -> str:
    with connect(ServerAddress.parse(server.url())) as connection:
        return connection.executed().text


def head_of(server: Server) -> LogHead:
    with connect(ServerAddress.parse(server.url())) as connection:
        return connection.head()


@pytest.fixture
def address(server: Server) -> ServerAddress:
    return ServerAddress.parse(server.url())


def test_bounded_dump_equals_the_file_byte_for_byte(
    server: Server, address: ServerAddress, fresh_database: FreshDatabase
) -> None:
    rotate(server)
    head = head_of(server)
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b TEXT)")
    for number in range(50):
        server.sql(f"INSERT INTO {database}.t VALUES ({number}, REPEAT('x', {number * 100}))")
    events = dumped(address, DumpStart(position=Position(0, head.file, 4)))
    sent = b"".join(event.body for event in events if not event.flags & ARTIFICIAL and event.kind != 15)
    with open(server.data_directory / head.file, "rb") as file:
        whole = file.read()
    format_bytes = int.from_bytes(whole[4 + 9 : 4 + 13], "little")
    assert whole[4 + format_bytes :] == sent
    assert all(event.checksum_holds for event in events)


def test_dump_by_gtid_set_equals_dump_by_position(
    server: Server, address: ServerAddress, fresh_database: FreshDatabase
) -> None:
    database = fresh_database(server)
    rotate(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
    head, executed = head_of(server), executed_on(server)
    for number in range(5):
        server.sql(f"INSERT INTO {database}.t VALUES ({number})")
    by_position = logged(address, at(head))
    by_gtids = logged(address, DumpStart(gtid_set=executed))
    # A dump by GTID set opens the file at its start, so the file's list of previous GTIDs comes first.
    assert by_gtids[-len(by_position) :] == by_position
    assert len(by_position) >= 20
    assert not logged(address, at(head_of(server)))


def test_tagged_gtid_set_is_supported(mysql_server: Server, fresh_database: FreshDatabase) -> None:
    database = fresh_database(mysql_server)
    mysql_server.sql(
        f"CREATE TABLE {database}.t (a INT PRIMARY KEY); SET gtid_next = 'AUTOMATIC:import';"
        f"INSERT INTO {database}.t VALUES (1); SET gtid_next = 'AUTOMATIC'"
    )
    head, executed = head_of(mysql_server), executed_on(mysql_server)
    assert ":import:" in executed
    address = ServerAddress.parse(mysql_server.url())
    mysql_server.sql(f"INSERT INTO {database}.t VALUES (2)")
    expected = logged(address, at(head))
    assert logged(address, DumpStart(gtid_set=executed))[-len(expected) :] == expected


@pytest.mark.parametrize("mode", ["disabled", "required"])
def test_every_transport_carries_the_same_bytes(
    server: Server, address: ServerAddress, fresh_database: FreshDatabase, mode: str
) -> None:
    if mode == "required" and server.family == "mariadb" and server.flavor == "mariadb":
        # MariaDB 10.11 has no default certificate; the test of TLS modes configures one.
        mode = "disabled"
    database = fresh_database(server)
    rotate(server)
    head = head_of(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b LONGTEXT)")
    server.sql(f"INSERT INTO {database}.t VALUES (1, REPEAT('y', 3000000))")
    over_tcp = logged(replace(address, tls=Tls(mode)), at(head))
    over_socket = logged(replace(address, unix_socket=str(server.socket)), at(head))
    assert over_tcp == over_socket
    assert max(map(len, over_tcp)) > 3_000_000


@pytest.mark.deep(
    guard="tests/integration/traps/test_streams.py::test_events_over_sixteen_mebibytes_return_their_rows"
)
def test_events_over_sixteen_mebibytes_arrive_whole(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        log = "innodb_redo_log_capacity" if flavor == "mysql" else "innodb_log_file_size"
        server = start_server(flavor, max_allowed_packet="256M", **{log: "512M"})
        address = ServerAddress.parse(server.url())
        server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY, b LONGTEXT)")
        head = head_of(server)
        sizes = [16_777_215, 40_000_000]
        # An event that ends exactly at a packet boundary is followed by an empty packet.
        overhead = _overhead_bytes(server, address)
        sizes.append(16_777_215 - 1 - overhead)
        for number, size in enumerate(sizes):
            server.sql(f"INSERT INTO d.t SELECT {number}, REPEAT('z', {size})")
        events = dumped(address, at(head))
        large = [event for event in events if len(event.body) > 16_000_000 and event.kind != MARIADB_ANNOTATE]
        assert [len(event.body) - overhead for event in large] == sizes
        assert all(event.checksum_holds for event in events)
        server.close()


def _overhead_bytes(server: Server, address: ServerAddress) -> int:
    """Return the overhead of a row event beyond its text."""
    head = head_of(server)
    server.sql("INSERT INTO d.t SELECT 99, REPEAT('z', 100000)")
    return max(len(event.body) for event in dumped(address, at(head))) - 100_000


def test_live_stream_waits_and_continues(
    server: Server, address: ServerAddress, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "HEARTBEAT_SECONDS", 0.3)
    database = fresh_database(server)
    with open_stream(address, at(head_of(server))) as stream:
        events = events_of(stream.event_chunks())
        assert next(event.kind for event in events if event.kind in HEARTBEATS) in HEARTBEATS
        server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
        text = next(event.body for event in events if b"CREATE TABLE" in event.body)
        assert database.encode() in text
        server.sql("FLUSH BINARY LOGS")
        rotated = next(event for event in events if event.kind == ROTATE)
        assert head_of(server).file.encode() in rotated.body


def test_stream_without_checksums_is_passed_unchanged(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        server = start_server(flavor, binlog_checksum="NONE")
        address = ServerAddress.parse(server.url())
        head = head_of(server)
        server.sql("CREATE DATABASE d")
        sent = logged(address, at(head))
        with open(server.data_directory / head.file, "rb") as file:
            assert file.read()[head.offset :] == b"".join(sent)
        server.close()


def test_silence_is_reported_as_a_lost_connection(
    server: Server, address: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "SILENCE_SECONDS_MAX", 0.5)
    with Proxy(server.port) as proxy:
        through = replace(address, port=proxy.port)
        with open_stream(through, at(head_of(server))) as stream:
            proxy.cut("silence")
            with pytest.raises(ConnectionLost, match="heartbeat"):
                list(stream.event_chunks())


@pytest.mark.parametrize("how", ["reset", "close"])
def test_cut_is_reported_as_a_lost_connection(server: Server, address: ServerAddress, how: str) -> None:
    with Proxy(server.port) as proxy:
        through = replace(address, port=proxy.port)
        with open_stream(through, at(head_of(server))) as stream:
            proxy.cut(how)  # type: ignore[arg-type]
            with pytest.raises(ConnectionLost):
                list(stream.event_chunks())


def kill(server: Server, thread: int) -> None:
    try:
        server.sql(f"KILL {thread}")
    except pymysql.err.OperationalError as error:
        # Dumps of earlier tests linger until the server writes to them, and may end now.
        if error.args[0] != pymysql.constants.ER.NO_SUCH_THREAD:
            raise


def test_killed_dump_is_reported_as_a_lost_connection(server: Server, address: ServerAddress) -> None:
    with open_stream(address, at(head_of(server))) as stream:
        chunks = stream.event_chunks()
        next(chunks)
        for row in server.sql("SHOW PROCESSLIST"):
            if str(row[4]).startswith("Binlog Dump"):
                kill(server, row[0])
        with pytest.raises(ConnectionLost):
            list(chunks)


@pytest.mark.deep(
    guard="tests/integration/test_capture_replica.py::test_silence_is_reported_as_a_lost_connection"
)
def test_stopped_server_is_reported_as_a_lost_connection(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        server = start_server(flavor)
        with open_stream(ServerAddress.parse(server.url()), at(head_of(server))) as stream:
            chunks = stream.event_chunks()
            next(chunks)
            stopper = threading.Thread(target=server.stop)
            stopper.start()
            with pytest.raises(ConnectionLost):
                list(chunks)
            stopper.join()


def test_purged_file_is_distinguished_from_a_file_that_never_existed(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        server = start_server(flavor)
        address = ServerAddress.parse(server.url())
        before, executed_before = head_of(server), executed_on(server)
        server.sql("CREATE DATABASE d; FLUSH BINARY LOGS; CREATE DATABASE e; FLUSH BINARY LOGS")
        purge(server)
        newest = head_of(server)
        base = newest.file.rpartition(".")[0]
        refusals = [
            (at(before), PositionPurged),
            (DumpStart(gtid_set=executed_before), PositionPurged),
            (DumpStart(position=Position(0, f"{base}.000999", 4)), PositionInvalid),
            (DumpStart(position=Position(0, newest.file, 1 << 31)), PositionInvalid),
            (DumpStart(gtid_set=_beyond(executed_on(server))), PositionInvalid),
            (DumpStart(position=Position(0, newest.file, 21)), StreamError),
        ]
        for start, kind in refusals:
            with pytest.raises(kind):
                dumped(address, start)


def _beyond(gtid_set: str) -> str:
    """Return a GTID set with a transaction that is not on the server."""
    if ":" in gtid_set:
        return gtid_set + ":999999"
    return gtid_set.rpartition("-")[0] + "-999999"


def test_twin_replica_takes_over_the_dump_and_the_loser_is_reported(
    server: Server, address: ServerAddress
) -> None:
    name = ReplicaName.choose(None)
    twin = ReplicaName(name.server_id, name.uuid)
    with open_stream(address, at(head_of(server)), name=name) as first:
        chunks = first.event_chunks()
        next(chunks)
        with open_stream(address, at(head_of(server)), name=twin) as second:
            next(second.event_chunks())
            with pytest.raises(DumpReplaced):
                list(chunks)


def test_two_replicas_with_different_ids_coexist(server: Server, address: ServerAddress) -> None:
    with (
        open_stream(address, at(head_of(server))) as first,
        open_stream(address, at(head_of(server))) as other,
    ):
        for stream in (first, other):
            next(stream.event_chunks())
        assert {first.name.host, other.name.host} <= _listed(server)


def _listed(server: Server) -> set[str]:
    """Return the hosts of the replicas listed by the server. MariaDB shows them only to an administrator."""
    with connect(ServerAddress.parse(server.url("root"))) as connection:
        return {row["host"] for row in connection.replicas()}


def test_account_without_replication_rights_is_refused_by_name(
    server: Server, fresh_database: FreshDatabase
) -> None:
    fresh_database(server)
    server.sql("DROP USER IF EXISTS reader; CREATE USER reader IDENTIFIED BY 'x-1-Y-2'")
    server.sql("GRANT SELECT ON *.* TO reader")
    address = ServerAddress.parse(server.url("reader"), password="x-1-Y-2")
    with pytest.raises(PrivilegeMissing):
        dumped(address, at(head_of(server)))


def test_position_beyond_the_command_limit_is_reached(
    server: Server, address: ServerAddress, fresh_database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = fresh_database(server)
    rotate(server)
    head = head_of(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY)")
    direct = logged(address, at(head))
    # With this limit, the offset is too large for the command, as in a file larger than 4 GiB.
    monkeypatch.setattr(replica, "DUMP_OFFSET_MAX", 100)
    with open_stream(address, at(head), bounded=True) as stream:
        wide = [event.body for event in events_of(stream.event_chunks()) if event.logged]
        assert stream.start.position is not None
        if server.family == "mysql":
            assert stream.start == at(head)
            assert wide == direct
        else:
            # MariaDB's dump command has only 32 bits for the offset, so the file is read from its start, and
            # the reader skips ahead.
            assert stream.start.position.offset == 4
            assert wide[-len(direct) :] == direct


def test_bytes_read_ahead_by_the_session_are_not_lost(server: Server, address: ServerAddress) -> None:
    with open_stream(address, at(head_of(server)), bounded=True) as stream:
        whole = bytearray()
        piece = memoryview(bytearray(7))
        # The last packet is the end of the stream: length 5, a sequence number, and a payload that starts
        # with fe.
        while not (whole[-9:-6] == b"\x05\x00\x00" and whole[-5] == 0xFE):
            whole += piece[: stream.receive_into(piece)]
    again = ReplicaStream(
        address,
        _closed_socket(),
        bytes(whole),
        start=stream.start,
        identity=stream.identity,
        name=stream.name,
        bounded=True,
    )
    kinds = [event.kind for event in events_of(again.event_chunks())]
    assert kinds[:2] == [ROTATE, FORMAT_DESCRIPTION]


def _closed_socket() -> "replica.socket.socket":
    return replica.socket.socket()


def test_closing_twice_is_harmless_and_ends_the_servers_side(server: Server, address: ServerAddress) -> None:
    stream = open_stream(address, at(head_of(server)))
    stream.close()
    stream.close()
    with pytest.raises(ConnectionLost):
        stream.receive_into(memoryview(bytearray(8)))

    def is_gone() -> bool:
        # The dump thread notices the closed connection at its next write.
        server.sql("FLUSH BINARY LOGS")
        return stream.name.host not in _listed(server)

    wait_until(is_gone)
