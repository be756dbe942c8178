# SPDX-License-Identifier: Apache-2.0
"""Hostile clients on every port of a daemon are disconnected and logged, without effect on other clients."""

import itertools
import random
import select
import socket
import ssl
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.limits import (
    CONNECTIONS_PER_PEER_MAX,
    GREETING_SECONDS_MAX,
    HTTP_IDLE_SECONDS_MAX,
    MIB,
    REQUEST_BODY_BYTES_MAX,
)
from tests.support.canal.client import CanalClient
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import PENSTOCK, DaemonProcess, Refused
from tests.support.logstore.kept_log import penstock
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server, certificate

LISTENERS = ("http", "canal", "ptubes", "ptubes_monitor")
HTTP = ("http", "ptubes", "ptubes_monitor")

# Attackers use a separate address, as in reality.
ATTACKER = "127.0.0.2"

GROWN_BYTES_MAX = 96 << 20
# A call waits at most this long for a commit, and is answered at once when one arrives.
COMMIT_SECONDS_MAX = 25


@pytest.fixture(scope="module")
def daemon(
    server_of: Callable[[str], Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DaemonProcess]:
    server = server_of("mariadb")
    server.sql("CREATE DATABASE listeners; CREATE TABLE listeners.t (a INT PRIMARY KEY AUTO_INCREMENT)")
    settings = {
        "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
        "listen": {"token": "a-token", **dict.fromkeys(LISTENERS[1:], "127.0.0.1:0")},
        "access": [
            {"name": "reader", "token": "reader-token", "tables": ["listeners.t"], "requests_max": 2},
            {"name": "fleet", "user": "canal", "password": "canal"},
        ],
    }
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), settings) as running:
        running.token = "a-token"
        server.sql("INSERT INTO listeners.t VALUES ()")
        head = head_of(server)
        running.wait_for_head(head.file, head.offset)
        yield running
    server.sql("DROP DATABASE listeners")


@pytest.fixture(scope="module", autouse=True)
def slow(daemon: DaemonProcess) -> Iterator["dict[str, Future[float]]"]:
    """Connections that send a request byte by byte during the other tests, and how long each stayed open."""

    def trickle(name: str) -> float:
        started = time.monotonic()
        with closing(connect(daemon, name)) as peer:
            peer.settimeout(0.25)
            with suppress(ConnectionError):
                # For Canal the length of a frame that never arrives; for HTTP a head without an end.
                for byte in b"\0\0" if name == "canal" else b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ":
                    peer.sendall(bytes([byte]))
                while time.monotonic() - started < WAIT_SECONDS_MAX:
                    with suppress(TimeoutError):
                        if not peer.recv(4096):
                            break
                    if name != "canal":
                        peer.sendall(b"x")
        return time.monotonic() - started

    with ThreadPoolExecutor(len(LISTENERS)) as pool:
        yield {name: pool.submit(trickle, name) for name in LISTENERS}


def connect(daemon: DaemonProcess, name: str, source: str = ATTACKER) -> socket.socket:
    return socket.create_connection(
        ("127.0.0.1", daemon.ports[name]), WAIT_SECONDS_MAX, source_address=(source, 0)
    )


def is_closed(peer: socket.socket) -> bool:
    """Read until the daemon closes the connection; return whether it does."""
    started = time.monotonic()
    try:
        while time.monotonic() < started + WAIT_SECONDS_MAX:
            if not peer.recv(65_536):
                return True
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return False


def closed_of(peers: list[socket.socket]) -> int:
    """Return how many of these connections the daemon has closed."""
    ready = select.poll()
    for peer in peers:
        ready.register(peer, select.POLLRDHUP)
    return len(ready.poll(0))


def send_all(peer: socket.socket, content: bytes) -> None:
    """Send until everything is sent or the daemon closes the connection."""
    with suppress(ConnectionError, TimeoutError):
        peer.sendall(content)


def seconds_until_answered(daemon: DaemonProcess, server: Server) -> float:
    """Return how long a well-behaved reader waits for a commit."""
    head = head_of(server)
    daemon.wait_for_head(head.file, head.offset)
    server.sql("INSERT INTO listeners.t VALUES ()")
    started = time.monotonic()
    position = daemon.get("/v1/instances/shop/head", after=str(head), timeout=COMMIT_SECONDS_MAX)["position"]
    assert position != str(head)
    return time.monotonic() - started


def assert_answers(daemon: DaemonProcess, server: Server) -> None:
    """Assert that a well-behaved reader receives a commit before its request times out."""
    assert seconds_until_answered(daemon, server) < COMMIT_SECONDS_MAX


def test_every_listener_reports_its_address(daemon: DaemonProcess) -> None:
    listeners = daemon.get("/v1/listeners")["listeners"]
    assert listeners == {name: f"127.0.0.1:{daemon.ports[name]}" for name in LISTENERS}
    assert len(set(daemon.ports.values())) == len(LISTENERS)


def test_command_line_reports_the_address(daemon: DaemonProcess) -> None:
    shown = penstock("status", "--config", daemon.config)
    addresses = ", ".join(f"{name} at 127.0.0.1:{daemon.ports[name]}" for name in LISTENERS)
    assert f"listens: {addresses}" in shown.out
    checked = penstock("serve", "--check", daemon.config)
    assert checked.code == 0
    for name in LISTENERS:
        assert f"127.0.0.1:{daemon.ports[name]}" in next(
            line for line in checked.lines if line.startswith(f"listen.{name} ")
        )
    assert "coordination.db" in checked.lines[-1]
    assert "a-token" not in checked.out


def test_random_bytes_close_only_their_own_connection(daemon: DaemonProcess, mariadb_server: Server) -> None:
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    before = daemon.resident_bytes()
    for name in LISTENERS:
        # The HTTP listener waits for a line's end or for its own limit. Only the longest inputs are sure to
        # reach that limit.
        for length in (8, 100, 5_000, 200_000) * 4:
            # The first byte alone is neither a valid frame length nor a letter of an HTTP method.
            content = b"\xf0" + chance.randbytes(length)
            with closing(connect(daemon, name)) as peer:
                send_all(peer, content)
                with suppress(OSError):
                    peer.shutdown(socket.SHUT_WR)
                assert is_closed(peer), (name, seed)
    assert daemon.resident_bytes() - before < GROWN_BYTES_MAX
    assert_answers(daemon, mariadb_server)
    said = daemon.said()
    for name in HTTP:
        assert any("is no HTTP" in line and f"listener={name} " in line for line in said.splitlines()), name
    assert any("listener=canal" in line and ATTACKER in line for line in said.splitlines())


@pytest.mark.parametrize("length", [0xFFFFFFFF, 0x7FFFFFFF, 1 << 30, 64 << 20, 2 << 20])
def test_oversized_frame_is_refused_before_it_arrives(daemon: DaemonProcess, length: int) -> None:
    before = daemon.resident_bytes()
    with closing(connect(daemon, "canal")) as waited_for, closing(connect(daemon, "canal")) as peer:
        waited_for.sendall(struct.pack(">I", 100))
        send_all(peer, struct.pack(">I", length) + bytes(8 << 20))
        assert is_closed(peer)
        # An incomplete frame keeps its deadline, which started earlier.
        assert closed_of([waited_for]) == 0
    assert daemon.resident_bytes() - before < GROWN_BYTES_MAX


@pytest.mark.parametrize("name", HTTP)
def test_oversized_requests_are_refused(daemon: DaemonProcess, name: str) -> None:
    before = daemon.resident_bytes()
    head = b"POST /v1/instances/shop/changes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a-token\r\n"
    for content in (
        b"GET /" + b"a" * (4 * MIB),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * (4 * MIB),
        head + b"Content-Length: %d\r\n\r\n" % (1 << 40) + bytes(8 * MIB),
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + bytes(MIB) + b"\r\n") * 8,
    ):
        with closing(connect(daemon, name)) as peer:
            send_all(peer, content)
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)
            assert is_closed(peer), content[:80]
    assert daemon.resident_bytes() - before < GROWN_BYTES_MAX


def test_oversized_body_is_refused_before_it_arrives(daemon: DaemonProcess) -> None:
    with closing(connect(daemon, "http")) as peer:
        peer.sendall(
            b"POST /v1/instances/shop/changes HTTP/1.1\r\nHost: localhost\r\n"
            b"Authorization: Bearer a-token\r\nContent-Length: %d\r\n\r\n" % (REQUEST_BODY_BYTES_MAX + 1)
        )
        answer = b""
        while b"}" not in answer and (piece := peer.recv(65_536)):
            answer += piece
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"type":"LimitExceeded"' in answer


def test_connections_over_the_limit_of_a_peer_are_refused(
    daemon: DaemonProcess, mariadb_server: Server
) -> None:
    hosts = itertools.count(3)

    def is_greeted(source: str) -> bool:
        with closing(connect(daemon, "canal", source)) as peer, suppress(ConnectionError):
            return peer.recv(4) == struct.pack(">I", 16)
        return False

    def are_connected_in_time() -> bool:
        """Connect too many clients at once; return whether they all connected before any of them exceeded its
        silence timeout.
        """
        source, started = f"127.0.0.{next(hosts)}", time.monotonic()
        with ExitStack() as held:
            peers = [
                held.enter_context(closing(connect(daemon, LISTENERS[number % 4], source)))
                for number in range(CONNECTIONS_PER_PEER_MAX + 40)
            ]
            # Connections over the limit are closed at once; the other connections stay.
            wait_until(lambda: closed_of(peers) >= 40)
            seconds_until_answered(daemon, mariadb_server)
            closed = closed_of(peers)
            in_time = time.monotonic() - started < GREETING_SECONDS_MAX
            assert closed == 40 or not in_time
        # The connections are closed, so their places are free again.
        wait_until(lambda: is_greeted(source))
        return in_time

    wait_until(are_connected_in_time)
    assert "too many connections" in daemon.said()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer sesame-43"}, 401),
        ({"Authorization": "Basic !!"}, 401),
        ({"Authorization": "Bearer reader-token"}, 403),
        ({"Authorization": "Bearer a-token"}, 404),
    ],
)
def test_forbidden_request_is_refused_and_logged(
    daemon: DaemonProcess, headers: dict[str, str], status: int
) -> None:
    daemon_token, daemon.token = daemon.token, None
    try:
        with pytest.raises(Refused) as refused:
            daemon.get("/v1/instances/shop/head_bytes", headers, file="mysql-bin.999999")
    finally:
        daemon.token = daemon_token
    assert refused.value.status in ((status,) if status != 404 else (404, 410, 416))
    if status == 401:
        assert "AuthenticationFailed" in daemon.said()
        assert "sesame-43" not in daemon.said()


def test_account_sees_its_tables_and_has_its_quota(daemon: DaemonProcess, mariadb_server: Server) -> None:
    reader = {"Authorization": "Bearer reader-token"}
    head = head_of(mariadb_server)
    daemon.wait_for_head(head.file, head.offset)
    shop = "/v1/instances/shop"
    schema = daemon.get(f"{shop}/schema", reader, position=str(head))["schema"]
    assert {table["name"] for table in schema["tables"]} == {"listeners.t"}
    with pytest.raises(Refused) as refused:
        daemon.get(f"{shop}/schema", reader, position=str(head), table="mysql.user")
    assert refused.value.problem["type"] == "AccessDenied"
    used_up: list[Refused] = []

    def ask(**query: Any) -> Any:
        """Send a request, retrying while other requests of the account are in progress."""
        while True:
            try:
                return daemon.get(f"{shop}/head", reader, **query)
            except Refused as refusal:
                if refusal.status != 429:
                    raise
                used_up.append(refusal)
                if not query:
                    return None

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, after=str(head), timeout=COMMIT_SECONDS_MAX) for _ in "ab"]
        wait_until(lambda: ask() is None)
        mariadb_server.sql("INSERT INTO listeners.t VALUES ()")
        assert all(response.result()["position"] != str(head) for response in waiting)
    assert {response.problem["type"] for response in used_up} == {"QuotaReached"}
    assert daemon.get(f"{shop}/head", reader)["position"]


@pytest.mark.deep(
    guard="tests/conformance/test_coordination.py::test_unresponsive_store_is_reported_lost_and_recovers"
)
def test_capture_and_readers_do_not_wait_for_an_unavailable_ensemble(
    mariadb_server: Server, daemon: DaemonProcess, tmp_path: Path
) -> None:
    settings = {
        "instances": {"shop": {"source": mariadb_server.url(), "start": str(head_of(mariadb_server))}},
        "listen": {"canal": "127.0.0.1:0"},
        "coordination": "zookeeper://127.0.0.1:1/penstock",
    }
    with DaemonProcess(tmp_path, settings) as running:
        mariadb_server.sql("INSERT INTO listeners.t VALUES ()")
        head = head_of(mariadb_server)
        running.wait_for_head(head.file, head.offset)
        with closing(connect(running, "canal")) as peer:
            # The connection waits for a server that can serve it, so no greeting arrives.
            peer.settimeout(0.3)
            with pytest.raises(TimeoutError):
                peer.recv(1)
        assert running.terminate() == 0


def test_occupied_port_is_reported_before_anything_starts(
    daemon: DaemonProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("taken")
    other = DaemonProcess(folder, {"instances": {"shop": {"source": "mysql://nobody@127.0.0.1:1"}}})
    other.settings["listen"] = {"canal": f"127.0.0.1:{daemon.ports['canal']}"}
    other._write_config()
    done = subprocess.run(
        [*PENSTOCK, "serve", other.config], capture_output=True, text=True, timeout=WAIT_SECONDS_MAX
    )
    assert done.returncode == 2
    assert "listen.canal" in done.stderr
    assert not (folder / "log").exists()


def test_every_listener_speaks_tls_if_it_has_a_certificate(daemon: DaemonProcess, tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    settings = {
        "instances": {"shop": {"source": "mysql://nobody@127.0.0.1:1"}},
        "listen": {
            "tls": {"cert": names["ssl-cert"], "key": names["ssl-key"]},
            **dict.fromkeys(LISTENERS[1:], "127.0.0.1:0"),
        },
    }
    trusting = ssl.create_default_context(cafile=str(names["ssl-ca"]))
    trusting.check_hostname = False
    with DaemonProcess(tmp_path, settings) as running:
        for name in LISTENERS:
            with closing(connect(running, name)) as plain:
                send_all(plain, b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert is_closed(plain)
            with trusting.wrap_socket(connect(running, name)) as peer:
                if name == "canal":
                    assert peer.recv(4) == struct.pack(">I", 16)
                else:
                    peer.sendall(b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert peer.recv(9) == b"HTTP/1.1 "


def test_slow_client_is_disconnected_in_time(
    daemon: DaemonProcess, slow: "dict[str, Future[float]]", mariadb_server: Server
) -> None:
    assert_answers(daemon, mariadb_server)
    took = {name: slow[name].result() for name in LISTENERS}
    for name, seconds in took.items():
        # If the server does not disconnect the client, the client gives up by itself.
        assert GREETING_SECONDS_MAX / 2 < seconds < WAIT_SECONDS_MAX, (name, took)
    said = daemon.said()
    for name in HTTP:
        assert any("does not arrive" in line and f"listener={name} " in line for line in said.splitlines())


def test_daemon_with_sessions_on_every_port_shuts_down_in_order(daemon: DaemonProcess) -> None:
    with ExitStack() as held:
        for name in HTTP:
            peer = held.enter_context(closing(connect(daemon, name)))
            peer.sendall(b"GET /monitor/alive HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert peer.recv(9) == b"HTTP/1.1 "
        client = held.enter_context(CanalClient(daemon.ports["canal"]))
        client.log_in("canal", "canal").subscribe()
        client.ask(timeout=0)
        started = time.monotonic()
        assert daemon.terminate() == 0
        # The daemon does not wait for the connections, each of which could stay idle for longer than this.
        assert time.monotonic() - started < HTTP_IDLE_SECONDS_MAX - 10
        daemon.start()
