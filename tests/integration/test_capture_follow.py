# SPDX-License-Identifier: Apache-2.0
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    PositionPurged,
    ServerChanged,
)
from penstock.limits import RECONNECT_TRIES_MAX
from penstock.model import Position, Secret, ServerAddress, Tls
from penstock.mysql.connection import connect
from penstock.mysql.follow import Stretch, follow
from penstock.mysql.replica import DumpStart
from penstock.retry import RECONNECT
from tests.support.capture.captured_log import purge
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Server
from tools.servers.proxy import Proxy

HEADER_BYTES = 19
XID = 16
QUERY = 2
ROWS = 30
ROWS_MARIADB = 23


class Reader:
    """Counts the rows events of whole transactions and tracks the resume position, like a small decoder."""

    def __init__(self, start: DumpStart) -> None:
        self.start = start
        self.rows = 0
        self.ends: list[int] = []

    def resume_at(self) -> DumpStart | None:
        if not self.ends or self.start.position is None:
            return None
        return DumpStart(position=replace(self.start.position, offset=self.ends[-1]))

    def read(self, stretch: Stretch) -> None:
        position = stretch.start.position
        assert position is not None
        held, offset, pending = b"", position.offset, 0
        for chunk in stretch:
            held += chunk
            while len(held) >= HEADER_BYTES:
                length = int.from_bytes(held[9:13], "little")
                if len(held) < length:
                    break
                event, held = held[:length], held[length:]
                if event[17] & 0x20 or event[4] in (4, 15, 27, 41):
                    continue
                offset += length
                pending += event[4] in (ROWS, ROWS_MARIADB)
                if event[4] == XID:
                    self.rows, pending = self.rows + pending, 0
                    self.ends.append(offset)


def _plain(address: ServerAddress, proxy: Proxy) -> ServerAddress:
    """Return the address through the proxy and without TLS, so that the proxy sees packets."""
    return replace(address, port=proxy.port, tls=Tls("disabled"))


def start_of(server: Server) -> DumpStart:
    with connect(ServerAddress.parse(server.url())) as connection:
        head = connection.head()
    return DumpStart(position=Position(0, head.file, head.offset))


def filled(server: Server, database: str, transactions: int) -> DumpStart:
    """Create a table, then commit this many transactions of three rows events each; return their start."""
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY AUTO_INCREMENT, b VARCHAR(500))")
    start = start_of(server)
    insert = f"INSERT INTO {database}.t (b) VALUES (REPEAT('x', 400));"
    server.sql(f"BEGIN; {insert * 3} COMMIT;" * transactions)
    return start


def test_network_cuts_lose_and_repeat_nothing(server: Server, fresh_database: FreshDatabase) -> None:
    start = filled(server, fresh_database(server), 200)
    address = ServerAddress.parse(server.url())
    reader = Reader(start)
    with Proxy(server.port) as proxy:
        for bytes_down in (20_000, 60_000, 100_001):
            proxy.cut_after(bytes_down, in_packet=True)
        stretches = follow(
            _plain(address, proxy), start, reader.resume_at, bounded=True, sleep=lambda seconds: None
        )
        failures = []
        for stretch in stretches:
            reader.read(stretch)
            failures.append(stretch.failure)
    assert reader.rows == 600
    assert len(failures) == 4
    assert all(isinstance(failure, ConnectionLost) for failure in failures[:-1])
    assert stretch.complete
    assert len(reader.ends) == len(set(reader.ends)) == 200


@pytest.mark.deep(
    guard="tests/fault/test_daemon_kills.py::test_server_that_dies_under_load_is_followed_after_its_restart"
)
def test_restarted_server_is_followed_again(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        server = start_server(flavor)
        server.sql("CREATE DATABASE d")
        start = filled(server, "d", 5)
        address = ServerAddress.parse(server.url())
        reader = Reader(start)
        stretches = follow(address, start, reader.resume_at)
        first = next(stretches)
        chunks = iter(first)
        next(chunks)
        restarter = threading.Thread(target=server.restart)
        restarter.start()
        # Discard the rest of this range, like a process that dies.
        for _ in chunks:
            pass
        restarter.join()
        assert isinstance(first.failure, ConnectionLost)
        second = next(stretches)
        server.sql("FLUSH BINARY LOGS")
        _until(second, b"XXXX", server)
        server.close()


def _until(stretch: Stretch, word: bytes, server: Server) -> None:
    """Read a range until a marker arrives that is committed concurrently."""
    server.sql(f"CREATE DATABASE {word.decode()}")
    held = b""
    for chunk in stretch:
        held += chunk
        if word in held:
            return
    raise AssertionError("the stretch ended before the word arrived")


def test_attempts_are_bounded_and_backoff_doubles(server: Server) -> None:
    pauses: list[float] = []
    with Proxy(server.port) as proxy:
        proxy.refuse()
        address = replace(ServerAddress.parse(server.url()), port=proxy.port)
        stretches = follow(address, DumpStart(gtid_set=""), lambda: None, sleep=pauses.append)
        with pytest.raises(ConnectionLost):
            next(stretches)
    assert len(pauses) == RECONNECT_TRIES_MAX
    assert all(pause <= RECONNECT.bound(number) for number, pause in enumerate(pauses, 1))


def test_progress_resets_the_attempts(server: Server, fresh_database: FreshDatabase) -> None:
    start = filled(server, fresh_database(server), RECONNECT_TRIES_MAX * 3)
    address = ServerAddress.parse(server.url())
    reader = Reader(start)
    pauses: list[float] = []
    with Proxy(server.port) as proxy:
        # Each connection is cut shortly after its first transactions. There are more cuts than allowed
        # attempts.
        proxy.cut_after(9_000, in_packet=True, times=RECONNECT_TRIES_MAX + 3)
        for stretch in follow(
            _plain(address, proxy), start, reader.resume_at, bounded=True, sleep=pauses.append
        ):
            reader.read(stretch)
    assert reader.rows == RECONNECT_TRIES_MAX * 9
    assert len(pauses) > 3
    assert max(pauses) <= RECONNECT.first


def test_wrong_password_is_not_retried(server: Server) -> None:
    address = replace(ServerAddress.parse(server.url()), password=Secret("wrong"))
    with pytest.raises(AuthenticationFailed):
        next(follow(address, DumpStart(gtid_set=""), lambda: None, sleep=_never))


def test_purged_position_is_not_retried(start_server: StartServer) -> None:
    server = start_server("mysql")
    start = start_of(server)
    server.sql("FLUSH BINARY LOGS")
    purge(server)
    stretches = follow(ServerAddress.parse(server.url()), start, lambda: None, sleep=_never)
    with pytest.raises(PositionPurged):
        _drain(stretches)


def test_another_server_at_the_same_address_is_refused(start_server: StartServer) -> None:
    for flavor in ("mysql", "mariadb"):
        first, other = start_server(flavor), start_server(flavor)
        with connect(ServerAddress.parse(first.url())) as connection:
            key = connection.identity().key
        address = ServerAddress.parse(other.url())
        with pytest.raises(ServerChanged):
            next(follow(address, start_of(other), lambda: None, server_key=key, sleep=_never))
        first.close()
        other.close()


def test_leaving_the_iteration_ends_the_dump(mysql_server: Server) -> None:
    stretches = follow(ServerAddress.parse(mysql_server.url()), start_of(mysql_server), lambda: None)
    stretch = next(stretches)
    next(iter(stretch))
    stretches.close()
    with pytest.raises(ConnectionLost):
        stretch.stream.receive_into(memoryview(bytearray(8)))


def _never(seconds: float) -> None:
    raise AssertionError(f"this failure is tried again after {seconds} s")


def _drain(stretches: Iterator[Stretch]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    for stretch in stretches:
        for _ in stretch:
            assert time.monotonic() < deadline, "the stretch never ends"
