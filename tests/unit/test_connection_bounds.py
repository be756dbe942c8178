# SPDX-License-Identifier: Apache-2.0
"""Connections of every listener are counted from the start and closed if their peer reads nothing."""

import http.client as http_client
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.logstore.disk import FileRange, LocalDisk, LocalReadFile
from penstock.logstore.log import Log
from penstock.serve import accepting, connections, listener, ports
from penstock.serve.canal import protocol as canal
from penstock.serve.http import log as http
from tests.support.canal.client import CanalClient
from tests.support.daemon.served_log import INSTANCE, ServedLog, captured_log, serving
from tests.support.logstore.source import SETTINGS, TIME_S, Captured
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import certificate

# The timeout is long enough for the test to check the state before it, and short enough to wait for.
PATIENCE_SECONDS = 0.3
HOUR_SECONDS = 3600.0
# More bytes than the socket buffers of both ends hold together, at their largest size.
UNREAD_BYTES = 64 << 20
BUFFER_BYTES = 4096


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls") / "files"
    certificate.make(folder)
    return folder


class LargeSegment:
    """A segment larger than any buffer, either in memory or in a file of this size. It records when it is
    closed.
    """

    def __init__(self, log: Log, monkeypatch: pytest.MonkeyPatch, stored: Path | None = None) -> None:
        self.closed = threading.Event()
        self.pieces = 0
        self._stored = stored
        monkeypatch.setattr(http, "_readable_end", lambda *_: 4 + UNREAD_BYTES)
        monkeypatch.setattr(log, "pieces", self._read)

    def _read(self, *_: Any) -> Iterator[memoryview | FileRange]:
        file = None if self._stored is None else LocalReadFile(self._stored)
        try:
            for start in range(0, UNREAD_BYTES, 1 << 20):
                self.pieces += 1
                yield (
                    memoryview(bytes(1 << 20)) if file is None else FileRange(file, start, start + (1 << 20))
                )
        finally:
            if file is not None:
                file.close()
            self.closed.set()


@pytest.fixture(params=["memory", "file"])
def large_segment(
    request: pytest.FixtureRequest, log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> LargeSegment:
    stored = tmp_path / "segment" if request.param == "file" else None
    if stored is not None:
        with stored.open("wb") as file:
            file.truncate(UNREAD_BYTES)
    return LargeSegment(log, monkeypatch, stored)


def connect(daemon: ServedLog, name: str = "http", source: str = "127.0.0.2") -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", daemon.port(name)), WAIT_SECONDS_MAX, source_address=(source, 0)
    )


def ask_for_bytes(peer: socket.socket) -> None:
    path = f"/v1/instances/{INSTANCE}/bytes?epoch=0&file=mysql-bin.000001&start=4"
    peer.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())


def open_connections(daemon: ServedLog) -> int:
    count: int = daemon.in_loop(lambda: daemon.ports.connections.admission.open)
    return count


def handshakes(daemon: ServedLog) -> int:
    count: int = daemon.in_loop(lambda: daemon.ports.connections.admission.in_handshake)
    return count


# --- Answers that nobody reads --------------------------------------------------------------


def test_response_that_is_not_read_ends_and_frees_its_segment(
    log: Log, monkeypatch: pytest.MonkeyPatch, large_segment: LargeSegment
) -> None:
    segment = large_segment
    monkeypatch.setattr(connections, "SEND_SECONDS_MAX", PATIENCE_SECONDS)
    with serving(log) as daemon, closing(connect(daemon)) as peer:
        ask_for_bytes(peer)
        assert segment.closed.wait(WAIT_SECONDS_MAX)
        assert segment.pieces < UNREAD_BYTES >> 20, "all of it was read, for nobody"
        wait_until(lambda: open_connections(daemon) == 0)


def test_disconnecting_reader_frees_its_segment(log: Log, large_segment: LargeSegment) -> None:
    segment = large_segment
    with serving(log) as daemon:
        with closing(connect(daemon)) as peer:
            ask_for_bytes(peer)
            assert peer.recv(1)
        assert segment.closed.wait(WAIT_SECONDS_MAX)
        assert segment.pieces < UNREAD_BYTES >> 20


@pytest.mark.skipif(sys.platform != "linux", reason="files are sent by the system on Linux only")
def test_segment_that_ends_early_closes_the_connection(
    log: Log, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = 5 << 20
    (tmp_path / "segment").write_bytes(bytes(whole + 7))
    segment = LargeSegment(log, monkeypatch, tmp_path / "segment")
    with serving(log) as daemon, closing(connect(daemon)) as peer:
        ask_for_bytes(peer)
        received = b""
        with suppress(ConnectionResetError):
            while piece := peer.recv(1 << 20):
                received += piece
        assert f"content-length: {UNREAD_BYTES}".encode() in received.lower()
        assert len(received.partition(b"\r\n\r\n")[2]) <= whole + 7
        assert segment.closed.wait(WAIT_SECONDS_MAX)
        wait_until(lambda: open_connections(daemon) == 0)


@pytest.mark.skipif(sys.platform != "linux", reason="files are sent by the system on Linux only")
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_segments_on_disk_are_sent_from_their_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, method: str
) -> None:
    loaded: list[int] = []
    load = FileRange.load

    def counted_load(part: FileRange) -> None:
        loaded.append(len(part))
        load(part)

    monkeypatch.setattr(FileRange, "load", counted_load)
    # The segments of the tests are small.
    monkeypatch.setattr(http, "_SENT_BYTES_MIN", 1)
    with Log.open(tmp_path / "log", SETTINGS, LocalDisk(), clock=lambda: TIME_S) as log:
        Captured(log).run()
        log.memory = None
        with (
            serving(log) as daemon,
            # All requests share one connection, because a body of a wrong length would spoil the next
            # response.
            closing(http_client.HTTPConnection("127.0.0.1", daemon.port())) as connection,
        ):
            for extent in each(log.extents()):
                query = f"epoch={extent.epoch}&file={extent.file}&start={extent.start}&stop={extent.end}"
                connection.request(method, f"/v1/instances/{INSTANCE}/bytes?{query}")
                expected = b"".join(log.read(extent.epoch, extent.file, extent.start, extent.end))
                response = connection.getresponse()
                assert response.read() == (expected if method == "GET" else b"")
                assert response.headers["Content-Length"] == str(len(expected))
            stored_bytes = sum(extent.end - extent.start for extent in log.extents())
    assert sum(loaded) == (stored_bytes if method == "GET" else 0)


def test_canal_session_with_unread_responses_is_closed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canal, "SEND_SECONDS_MAX", PATIENCE_SECONDS)
    with serving(log, {"canal": "127.0.0.1:0"}) as daemon:
        # Accepted connections inherit the small send buffer, so it fills up quickly.
        daemon.ports.sockets["canal"].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        over = connect(daemon, "canal")
        over.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        with CanalClient(daemon.port("canal"), over=over) as client:
            client.log_in(net_write_timeout=int(HOUR_SECONDS * 1000))
            unknown = b"\x18\x63"
            request = struct.pack(">I", len(unknown)) + unknown
            over.settimeout(PATIENCE_SECONDS / 10)
            with suppress(ConnectionError):
                while open_connections(daemon):
                    # The daemon reads no more requests before its responses are read.
                    with suppress(TimeoutError):
                        over.sendall(request * 1000)
        wait_until(lambda: open_connections(daemon) == 0)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system has no such option")
def test_closing_connection_is_not_kept_for_unread_bytes(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "SEND_SECONDS_MAX", PATIENCE_SECONDS)
    with serving(log, {"canal": "127.0.0.1:0"}) as daemon:
        daemon.ports.sockets["http"].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        with closing(peer):
            peer.connect(("127.0.0.1", daemon.port()))
            peer.sendall(b"GET /v1/openapi.json HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            wait_until(lambda: open_connections(daemon) == 0)


# --- Handshakes -----------------------------------------------------------------------------


@pytest.fixture
def secure(log: Log, tls: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], ServedLog]]:
    """Serve over TLS, with room for four handshakes per peer."""
    monkeypatch.setattr(accepting, "HANDSHAKES_PER_PEER_MAX", 4)
    names = certificate.server_options(tls)
    with ExitStack() as stack:

        def start() -> ServedLog:
            listen = {"tls": {"cert": names["ssl-cert"], "key": names["ssl-key"]}, "canal": "127.0.0.1:0"}
            return stack.enter_context(serving(log, listen))

        yield start


@pytest.mark.parametrize("name", ["http", "canal"])
def test_handshakes_in_progress_are_counted_and_bounded_per_peer(
    secure: Callable[[], ServedLog], tls: Path, name: str
) -> None:
    daemon = secure()
    trusting = ssl.create_default_context(cafile=str(certificate.server_options(tls)["ssl-ca"]))
    trusting.check_hostname = False
    with ExitStack() as stack:
        silent = [stack.enter_context(closing(connect(daemon, name))) for _ in range(4)]
        wait_until(lambda: handshakes(daemon) == 4)
        with closing(connect(daemon, name)) as one_more:
            assert one_more.recv(1) == b""
        with trusting.wrap_socket(connect(daemon, name, "127.0.0.3")) as other:
            wait_until(lambda: open_connections(daemon) == 5 and handshakes(daemon) == 4)
            assert other.version()
        silent[0].close()
        wait_until(lambda: handshakes(daemon) == 3)
        with trusting.wrap_socket(connect(daemon, name)) as again:
            assert again.version()
    wait_until(lambda: open_connections(daemon) == 0)


def test_silent_handshake_times_out(secure: Callable[[], ServedLog], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "GREETING_SECONDS_MAX", PATIENCE_SECONDS)
    daemon = secure()
    with closing(connect(daemon)) as silent:
        assert silent.recv(1) == b""
        wait_until(lambda: open_connections(daemon) == 0)


def test_connections_per_peer_are_bounded(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "CONNECTIONS_PER_PEER_MAX", 3)
    with serving(log, {"ptubes": "127.0.0.1:0"}) as daemon, ExitStack() as stack:
        peers = [stack.enter_context(closing(connect(daemon, name))) for name in ("http", "ptubes", "http")]
        wait_until(lambda: open_connections(daemon) == 3)
        with closing(connect(daemon)) as one_more:
            assert one_more.recv(1) == b""
        peers[0].close()
        wait_until(lambda: open_connections(daemon) == 2)
        assert daemon.ask("GET", "/v1/status").status == 200


def test_closed_connections_free_their_place(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections closed before they were accepted wait in the listen queue while the loop is busy."""
    monkeypatch.setattr(accepting, "_ACCEPTED_AT_ONCE", 2)
    monkeypatch.setattr(accepting, "CONNECTIONS_MAX", 40)
    with serving(log) as daemon:
        busy, ended = threading.Event(), threading.Event()

        def wait() -> None:
            busy.set()
            assert ended.wait(WAIT_SECONDS_MAX)

        waiting = threading.Thread(target=daemon.in_loop, args=(wait,))
        waiting.start()
        assert busy.wait(WAIT_SECONDS_MAX)
        for _ in range(40):
            peer = connect(daemon)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
        with closing(connect(daemon, source="127.0.0.3")) as good:
            ended.set()
            waiting.join(WAIT_SECONDS_MAX)
            good.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert good.recv(12) == b"HTTP/1.1 200"
