# SPDX-License-Identifier: Apache-2.0
"""Requests for the newest bytes bypass the HTTP library, and have the same answers and errors."""

import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from penstock.errors import ConnectionLost, PenstockError
from penstock.gtid_sets import LoggedSet
from penstock.limits import SILENCE_SECONDS_MAX
from penstock.logstore.log import Log
from penstock.logstore.memory import MemoryTier
from penstock.model import Position
from penstock.serve.http import log as log_routes
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from penstock.source.direct_connection import DirectConnection
from penstock.source.followed_bytes import ArrivedBytes, ByteStreams
from tests.support.daemon.served_log import INSTANCE, ServedLog, serving
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, open_log

BEHIND = ArrivedBytes(b"events", 10, Position(0, "log.000001", 10), LoggedSet("a:1-2"))
HEADERS = (
    "HTTP/1.1 200 OK\r\npenstock-stop: 10\r\npenstock-position: log.000001:10\r\npenstock-gtid-set: a:1-2\r\n"
)
ANSWER = f"{HEADERS}content-length: 6\r\n\r\nevents".encode()


class Scripted:
    """A daemon that sends one scripted answer for each request, and notes on which connection each came.

    An answer is sent in the given parts; None closes the connection without an answer.
    """

    def __init__(self, *answers: "list[bytes] | None") -> None:
        self._answers = list(answers)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"penstock://127.0.0.1:{self._listener.getsockname()[1]}/{INSTANCE}"
        self.connections: list[int] = []
        self.requests: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for number in itertools.count():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer_all, args=(peer, number), daemon=True).start()

    def _answer_all(self, peer: socket.socket, number: int) -> None:
        with peer:
            while True:
                received = b""
                while b"\r\n\r\n" not in received:
                    part = peer.recv(65536)
                    if not part:
                        return
                    received += part
                self.connections.append(number)
                self.requests.append(received)
                parts = self._answers.pop(0)
                if parts is None:
                    return
                for part in parts:
                    peer.sendall(part)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(autouse=True)
def requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams, which replace the requests under load, have their own tests."""
    monkeypatch.setattr(ByteStreams, "open", lambda *_arguments: None)


@contextmanager
def client_of(url: str, silence_seconds: float = SILENCE_SECONDS_MAX) -> Iterator[DaemonClient]:
    address = DaemonAddress.parse(url, token="secret")
    with closing(DaemonClient(address, address.base_urls[0], silence_seconds)) as client:
        yield client


def behind(client: DaemonClient, bytes_max: int = 1 << 20) -> ArrivedBytes | None:
    return client.bytes_behind(0, "log.000001", 4, "", 0.0, bytes_max)


def test_requests_share_a_connection_and_carry_the_token() -> None:
    with closing(Scripted([ANSWER], [ANSWER], [ANSWER])) as daemon, client_of(daemon.url) as client:
        assert [behind(client) for _ in range(3)] == [BEHIND] * 3
        assert daemon.connections == [0, 0, 0]
        assert all(b"Authorization: Bearer secret\r\n" in request for request in daemon.requests)


@pytest.mark.parametrize("size", [1, 7, len(ANSWER) - 1])
def test_answer_may_arrive_in_any_parts(size: int) -> None:
    parts = [ANSWER[at : at + size] for at in range(0, len(ANSWER), size)]
    with closing(Scripted(parts)) as daemon, client_of(daemon.url) as client:
        assert behind(client) == BEHIND


@pytest.mark.parametrize(
    "unusable",
    [
        None,
        [b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n"],
        [f"{HEADERS}transfer-encoding: chunked\r\n\r\n6\r\nevents\r\n0\r\n\r\n".encode()],
        [f"{HEADERS}content-length: 6\r\nconnection: close\r\n\r\nevents".encode()],
        [b"no HTTP at all\r\n\r\n"],
    ],
)
def test_unusable_answer_is_asked_for_again_through_the_library(unusable: list[bytes] | None) -> None:
    with closing(Scripted(unusable, [ANSWER], [ANSWER])) as daemon, client_of(daemon.url) as client:
        assert behind(client) == BEHIND
        # The next request has a connection of its own again.
        assert behind(client) == BEHIND
        assert daemon.connections == [0, 1, 2]


def test_silent_daemon_counts_as_lost_after_one_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"penstock://127.0.0.1:{listener.getsockname()[1]}/{INSTANCE}"
        with client_of(url, 0.05) as client, pytest.raises(ConnectionLost, match="does not answer"):
            behind(client)
        # The library did not wait for a second answer.
        listener.setblocking(False)
        listener.accept()[0].close()
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_daemon_that_is_down_is_reported_by_the_library() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with client_of(f"penstock://127.0.0.1:{port}/{INSTANCE}") as client, pytest.raises(ConnectionLost):
        behind(client)


# --- The daemon's side ------------------------------------------------------------------------


@pytest.fixture
def daemon() -> Iterator[ServedLog]:
    with open_log(SimulatedDisk()) as log:
        log.memory = MemoryTier(1 << 20)
        Captured(log).run()
        with serving(log) as served:
            yield served


def answers_of(daemon: ServedLog, read: Callable[[DaemonClient, Log, int], Any]) -> list[Any]:
    """Return the answers of a client for every start in the last file of the log."""
    log = daemon.log
    head = log.head()
    (extent,) = [extent for extent in log.extents() if (extent.epoch, extent.file) == (head.epoch, head.file)]
    with client_of(f"penstock://127.0.0.1:{daemon.port()}/{INSTANCE}") as client:
        return [read(client, log, start) for start in range(extent.start, extent.end + 1, 37)]


def test_newest_bytes_are_those_that_a_thread_reads_from_the_log(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(client: DaemonClient, log: Log, start: int) -> Any:
        head = log.head()
        try:
            return client.bytes_behind(head.epoch, head.file, start, "", 0.0, 1 << 20)
        except PenstockError as problem:
            return type(problem), problem.message

    newest = log_routes.newest_bytes
    served: list[Any] = []
    monkeypatch.setattr(
        log_routes, "newest_bytes", lambda log, start: served.append(newest(log, start)) or served[-1]
    )
    fast = answers_of(daemon, read)
    assert any(served)
    monkeypatch.setattr(log_routes, "newest_bytes", lambda log, start: None)
    assert fast == answers_of(daemon, read)
    monkeypatch.setattr(DirectConnection, "get", lambda *_: None)
    assert fast == answers_of(daemon, read)
