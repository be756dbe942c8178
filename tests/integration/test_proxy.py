# SPDX-License-Identifier: Apache-2.0
"""The proxy that fault tests put in front of a server: it forwards bytes unchanged by default, and causes
faults exactly as requested.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pymysql
import pytest

from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import Proxy, Server
from tools.servers.ports import free_port

PAYLOAD_BYTES = 3_000_000
UNREAD_BYTES = 200_000_000
# More bytes than fit into a slow reader's receive buffer, but fewer than fit into the sender's buffer.
LATE_BYTES = 1_000_000


@pytest.fixture
def chatter() -> Iterator[int]:
    """Yield the port of a server that echoes its input and never closes first."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client:
            try:
                while chunk := client.recv(65536):
                    client.sendall(chunk)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    # Closing the socket without a shutdown would leave the thread blocked in accept, and the port occupied.
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), WAIT_SECONDS_MAX)


def _read_all(client: socket.socket) -> tuple[int, str]:
    """Read to the end; return the received bytes and the way the connection ended."""
    count = 0
    try:
        while chunk := client.recv(65536):
            count += len(chunk)
    except ConnectionResetError:
        return count, "reset"
    except TimeoutError:
        return count, "silence"
    return count, "close"


def _outcome(proxy: Proxy) -> tuple[int, str]:
    """Connect and read to the end; a reset may arrive before the connection is established."""
    try:
        with _connect(proxy) as client:
            return _read_all(client)
    except ConnectionResetError:
        return 0, "reset"


def test_every_byte_passes_unchanged_in_both_directions(mariadb_server: Server) -> None:
    with (
        Proxy(mariadb_server.port) as proxy,
        mariadb_server.connect(port=proxy.port) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("SELECT REPEAT('x', %s), LENGTH(%s)", (PAYLOAD_BYTES, "y" * PAYLOAD_BYTES))
        assert cursor.fetchall() == (("x" * PAYLOAD_BYTES, PAYLOAD_BYTES),)
        proxy.wait_for(lambda counters: counters.bytes_down > PAYLOAD_BYTES)
        assert proxy.accepted_count == 1
        assert proxy.through(mariadb_server.url()).endswith(f"@127.0.0.1:{proxy.port}")


@pytest.mark.parametrize("how", ["reset", "close"])
def test_planned_cut_passes_the_exact_number_of_bytes(chatter: int, how: str) -> None:
    with Proxy(chatter) as proxy:
        proxy.cut_after(100_001, how)  # type: ignore[arg-type]
        with _connect(proxy) as client:
            client.sendall(b"x" * 100_002)
            assert _read_all(client) == (100_001, how)
        with _connect(proxy) as client:
            client.sendall(b"x" * 200_000)
            client.shutdown(socket.SHUT_WR)
            assert _read_all(client) == (200_000, "close")
        assert proxy.cut_count == 1


@pytest.mark.parametrize("how", ["reset", "close"])
def test_slow_client_has_every_byte_before_a_planned_cut(how: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as talker, Proxy(talker.getsockname()[1]) as proxy:
        proxy.cut_after(LATE_BYTES, how)  # type: ignore[arg-type]
        with _connect(proxy) as client:
            speaking = threading.Thread(target=_speak, args=(talker, 2 * LATE_BYTES))
            speaking.start()
            proxy.wait_for(lambda counters: counters.bytes_down == LATE_BYTES)
            assert _read_all(client) == (LATE_BYTES, how)
        speaking.join()


def _speak(talker: socket.socket, count: int) -> None:
    """Send this many bytes to the first client, or until it stops reading."""
    client, _ = talker.accept()
    with client, contextlib.suppress(OSError):
        client.sendall(b"x" * count)


def test_cut_in_a_packet_falls_in_its_middle(chatter: int) -> None:
    packet = (1000).to_bytes(3, "little") + b"\0" + b"x" * 1000
    with Proxy(chatter) as proxy, _connect(proxy) as client:
        proxy.cut_after(2 * len(packet) + 1, "close", in_packet=True)
        client.sendall(packet * 6)
        assert _read_all(client) == (3 * len(packet) + 4 + 500, "close")


def test_client_of_a_real_server_sees_a_packet_end_in_its_middle(mariadb_server: Server) -> None:
    with Proxy(mariadb_server.port) as proxy:
        connection = mariadb_server.connect(port=proxy.port)
        with connection.cursor() as cursor:
            proxy.cut_after(proxy.bytes_down, in_packet=True)
            with pytest.raises(pymysql.err.OperationalError):
                cursor.execute("SELECT REPEAT('x', 1000000)")
        proxy.wait_for(lambda counters: counters.cut_count == 1)


def test_requested_cut_reaches_every_live_connection(chatter: int) -> None:
    with Proxy(chatter) as proxy, _connect(proxy) as first, _connect(proxy) as two:
        # The cut reaches every connection, even one that the proxy has not accepted yet.
        assert proxy.cut() == 2
        assert _read_all(first) == (0, "reset")
        assert _read_all(two) == (0, "reset")
        assert proxy.cut() == 0


def test_requested_cut_is_not_delayed_by_a_reader_that_does_not_read(chatter: int) -> None:
    with Proxy(chatter) as proxy, _connect(proxy) as client:
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.sendall(b"x" * UNREAD_BYTES)
        assert proxy.cut() == 1


def test_silent_connection_stays_open_and_loses_nothing_when_resumed(chatter: int) -> None:
    with Proxy(chatter) as proxy, _connect(proxy) as client:
        client.sendall(b"before")
        assert client.recv(100) == b"before"
        assert proxy.cut("silence") == 1
        client.sendall(b"after")
        client.settimeout(0.3)
        assert _read_all(client) == (0, "silence")
        with _connect(proxy) as other:
            other.sendall(b"other")
            assert other.recv(100) == b"other"
        proxy.resume()
        client.settimeout(WAIT_SECONDS_MAX)
        assert client.recv(100) == b"after"


def test_a_hole_swallows_what_live_and_new_connections_send_until_it_closes(chatter: int) -> None:
    with Proxy(chatter) as proxy, _connect(proxy) as live:
        proxy.wait_for(lambda it: it.accepted_count == 1)
        proxy.swallow()
        with _connect(proxy) as other:
            for client, word in ((live, b"live"), (other, b"other")):
                client.sendall(word)
                client.settimeout(0.1)
                assert _read_all(client) == (0, "silence")
            proxy.resume()
            for client, word in ((live, b"live"), (other, b"other")):
                client.settimeout(WAIT_SECONDS_MAX)
                assert client.recv(100) == word


def test_proxy_that_refuses_resets_new_connections_only(chatter: int) -> None:
    with Proxy(chatter) as proxy, _connect(proxy) as live:
        proxy.wait_for(lambda counters: counters.accepted_count == 1)
        proxy.refuse()
        assert _outcome(proxy) == (0, "reset")
        live.sendall(b"live")
        assert live.recv(100) == b"live"
        proxy.refuse(False)
        with _connect(proxy) as again:
            again.sendall(b"again")
            assert again.recv(100) == b"again"


def test_stopped_server_shows_as_a_reset() -> None:
    with Proxy(free_port()) as proxy:
        assert _outcome(proxy) == (0, "reset")


def test_planned_cuts_can_be_repeated_and_forgotten(chatter: int) -> None:
    with Proxy(chatter) as proxy:
        proxy.cut_after(5, "close", times=3)
        for _ in range(2):
            with _connect(proxy) as client:
                client.sendall(b"0123456789")
                assert _read_all(client) == (5, "close")
        proxy.disarm()
        with _connect(proxy) as client:
            client.sendall(b"0123456789")
            client.shutdown(socket.SHUT_WR)
            assert _read_all(client) == (10, "close")


def test_wait_for_missing_events_ends_with_the_counts(chatter: int) -> None:
    with Proxy(chatter) as proxy, pytest.raises(TimeoutError, match="0 cuts"):
        proxy.wait_for(lambda counters: counters.cut_count > 0, seconds_max=0.1)
