# SPDX-License-Identifier: Apache-2.0
"""Canal's authentication and rights, and the rejection of clients that do not speak the protocol."""

import itertools
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.limits import CANAL_GREETINGS_MAX
from tests.support.canal.client import (
    CLIENTAUTHENTICATION,
    PROTO,
    CanalClient,
    Refused,
    describe_entries,
    scramble,
)
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server, certificate

TOKEN = "operator"
RESIDENT_BYTES_MAX = 300 << 20
_ids = itertools.count(1)


@pytest.fixture(scope="module")
def server(server_of: Callable[[str], Server]) -> Iterator[Server]:
    """The shared MariaDB server, with two tables for the whole module."""
    actual = server_of("mariadb")
    actual.sql("CREATE DATABASE canal_a; CREATE TABLE canal_a.open (id INT PRIMARY KEY)")
    actual.sql("CREATE TABLE canal_a.secret (id INT PRIMARY KEY)")
    actual.sql("CREATE TABLE canal_a.wide (id INT PRIMARY KEY, v LONGTEXT)")
    yield actual
    actual.sql("DROP DATABASE canal_a")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[DaemonProcess]:
    """A daemon with three accounts, one of which sees one table, and only as client 7."""
    settings = {
        "listen": {"canal": "127.0.0.1:0", "token": TOKEN},
        "access": [
            {"name": "fleet", "user": "canal", "password": "canal"},
            {"name": "other", "user": "other", "password": "pässword"},
            {"name": "slow", "user": "slow", "password": "slow", "bytes_per_second": 200_000},
            {
                "name": "guest",
                "user": "guest",
                "password": "guest",
                "tables": ["canal_a.open"],
                "subscriptions": ["canal-7"],
            },
        ],
        "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
    }
    with DaemonProcess(tmp_path_factory.mktemp("canal"), settings, environment={}) as running:
        running.token = TOKEN
        write(server, running)
        yield running


def write(server: Server, daemon: DaemonProcess) -> str:
    """Insert a row into both tables, in one transaction each, and return its id once the daemon has it."""
    number = next(_ids)
    server.sql("; ".join(f"INSERT INTO canal_a.{table} VALUES ({number})" for table in ("secret", "open")))
    head = head_of(server)
    daemon.wait_for_head(head.file, head.offset)
    return str(number)


def connect(daemon: DaemonProcess, client_id: str = "1001") -> CanalClient:
    return CanalClient(daemon.ports["canal"], "shop", client_id)


def serves(daemon: DaemonProcess, server: Server) -> bool:
    """Return whether an unaffected client is still served."""
    number = write(server, daemon)
    with connect(daemon).log_in("canal", "canal").subscribe("canal_a\\.open") as client:
        batch_id, entries = client.get()
        client.ack(batch_id)
        return [entry[3]["id"] for entry in describe_entries(entries) if entry[0] == "INSERT"][-1:] == [
            number
        ]


def ends(client: CanalClient) -> bool:
    """Return whether the daemon has closed a connection."""
    try:
        client.receive_bytes()
    except (EOFError, ConnectionError):
        return True
    return False


# --- Authentication -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("canal", "wrong"),
        ("canal", b"canal"),
        ("canal", ""),
        ("nobody", "canal"),
        ("", "canal"),
        ("other", "canal"),
    ],
)
def test_unauthenticated_client_may_only_retry_its_password(
    daemon: DaemonProcess, user: str, password: str | bytes
) -> None:
    with connect(daemon, "13") as client:
        with pytest.raises(Refused) as refused:
            client.log_in(user, password)
        assert (refused.value.code, refused.value.text) == (400, f"auth failed for user:{user}")
        for ask, name in ((client.subscribe, "SUBSCRIPTION"), (client.get, "GET")):
            with pytest.raises(Refused, match=f"packet type: {name} is NOT supported!"):
                ask()
        client.log_in("other", "pässword").subscribe()
        assert client.get()[0] > 0


def test_password_proof_is_valid_for_its_own_connection_only(daemon: DaemonProcess) -> None:
    with connect(daemon) as first, connect(daemon) as other:
        assert first.seed != other.seed
        assert (len(first.seed), len(other.seed)) == (8, 8)
        with pytest.raises(Refused):
            first.log_in("canal", scramble("canal", other.seed))
        first.log_in("canal", scramble("canal", first.seed).upper())
    for _ in range(CANAL_GREETINGS_MAX):
        with pytest.raises(Refused):
            other = connect(daemon).log_in("canal", "wrong")


def test_repeated_wrong_passwords_close_the_connection_and_are_logged(daemon: DaemonProcess) -> None:
    with connect(daemon) as client:
        for _ in range(CANAL_GREETINGS_MAX):
            with pytest.raises(Refused):
                client.log_in("mallory", "wrong")
        assert ends(client)
    assert "user=mallory" in daemon.said()
    assert "error=AuthenticationFailed" in daemon.said()


def test_destination_in_the_authentication_packet_subscribes_the_client(
    daemon: DaemonProcess, server: Server
) -> None:
    more = {"destination": "shop", "client_id": "12", "filter": "canal_a\\.open"}
    with connect(daemon, "12").log_in("canal", "canal", **more) as client:
        assert {entry[1] for entry in describe_entries(client.get()[1]) if entry[0] == "INSERT"} == {"open"}
    with connect(daemon) as client, pytest.raises(Refused, match="destination:shoe should start first"):
        client.log_in("canal", "canal", **more | {"destination": "shoe"})


def test_account_sees_only_permitted_tables(daemon: DaemonProcess, server: Server) -> None:
    number = next(_ids)
    both = "; ".join(f"INSERT INTO canal_a.{table} VALUES ({number})" for table in ("secret", "open"))
    server.sql(f"BEGIN; {both}; COMMIT; ALTER TABLE canal_a.secret COMMENT 'x'")
    number = write(server, daemon)
    with connect(daemon, "7").log_in("guest", "guest") as client:
        client.subscribe(".*\\..*")
        _, entries = client.get()
        seen = describe_entries(entries)
        assert [entry[3]["id"] for entry in seen if entry[0] == "INSERT"][-1] == number
        assert {entry[1] for entry in seen if entry[0] == "INSERT"} == {"open"}
        assert b"secret" not in b"".join(entries)
    with connect(daemon, "8").log_in("guest", "guest") as client:
        for ask in (client.subscribe, client.get, client.unsubscribe):
            with pytest.raises(Refused, match="account guest may not read as subscription canal-8"):
                ask()


def test_statement_text_is_hidden_from_accounts_that_do_not_see_all_its_tables(
    daemon: DaemonProcess, server: Server
) -> None:
    server.sql("CREATE TABLE canal_a.vault (id INT PRIMARY KEY, word TEXT)")
    server.sql(
        "CREATE TRIGGER canal_a.copied AFTER INSERT ON canal_a.vault"
        " FOR EACH ROW INSERT INTO canal_a.open VALUES (NEW.id)"
    )
    copied, own = 500_000 + next(_ids), 500_000 + next(_ids)
    server.sql(
        f"INSERT INTO canal_a.vault VALUES ({copied}, 'xyzzy'); INSERT INTO canal_a.open VALUES ({own})"
    )
    write(server, daemon)
    for user, client_id, is_told in (("guest", "7", False), ("canal", "70", True)):
        with connect(daemon, client_id).log_in(user, user).subscribe() as client:
            _, entries = client.get()
            ids = {entry[3]["id"] for entry in describe_entries(entries) if entry[0] == "INSERT"}
            assert {str(copied), str(own)} <= ids
            assert (b"xyzzy" in b"".join(entries)) == is_told
            assert f"INTO canal_a.open VALUES ({own})".encode() in b"".join(entries)
    server.sql("DROP TABLE canal_a.vault")


def test_account_is_throttled_to_its_quota(daemon: DaemonProcess, server: Server) -> None:
    for number in range(6):
        server.sql(f"INSERT INTO canal_a.wide VALUES ({number}, REPEAT('x', 100000))")
    write(server, daemon)
    with connect(daemon, "60").log_in("slow", "slow").subscribe("canal_a\\.wide") as client:
        started, size = time.monotonic(), 0
        for batch_id, entries in iter(lambda: client.get(size=64), (-1, [])):
            size += sum(map(len, entries))
            client.ack(batch_id)
        # After an idle period, one second's quota is available; the remaining requests have to wait.
        assert time.monotonic() - started > 1.5
        [shown] = [
            subscriber
            for subscriber in daemon.get("/v1/subscribers")["subscribers"]
            if subscriber["subscriber"] == "canal-60"
        ]
        assert (shown["protocol"], shown["account"], shown["instance"]) == ("canal", "slow", "shop")
        assert (shown["rows"], shown["bytes"] > 600_000) == (6, True)


def test_plain_passwords_and_tls_are_accepted_if_configured(
    tmp_path: Path, server: Server, daemon: DaemonProcess
) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    settings = dict(daemon.settings)
    settings["listen"] = {
        "canal": "127.0.0.1:0",
        "canal_accept_plain": True,
        "tls": {"cert": names["ssl-cert"], "key": names["ssl-key"]},
        "token": TOKEN,
    }
    with DaemonProcess(tmp_path, settings) as secured:
        context = ssl.create_default_context(cafile=names["ssl-ca"])
        context.check_hostname = False
        raw = socket.create_connection(("127.0.0.1", secured.ports["canal"]), WAIT_SECONDS_MAX)
        with CanalClient(0, over=context.wrap_socket(raw)) as client:
            with pytest.raises(Refused):
                client.log_in("canal", b"wrong")
            client.log_in("canal", b"canal").subscribe()
            for _ in range(5):
                write(server, daemon)
            assert client.get(1, int(WAIT_SECONDS_MAX) - 10, 3)[0] == 1
        raw = socket.create_connection(("127.0.0.1", secured.ports["canal"]), WAIT_SECONDS_MAX)
        # A silent client is tolerated for a while.
        raw.sendall(b"plain")
        with pytest.raises((EOFError, ConnectionError)):
            CanalClient(0, over=raw)
        raw = socket.create_connection(("127.0.0.1", secured.ports["canal"]), WAIT_SECONDS_MAX)
        with CanalClient(0, over=context.wrap_socket(raw)) as client:
            # Send bytes that are not TLS after a completed handshake.
            os.write(client.socket.fileno(), b"garbage" * 100)
            with pytest.raises((EOFError, OSError)):
                client.receive_bytes()
        wait_until(lambda: "listener=canal" in secured.said())
        assert "a session failed" not in secured.said()


# --- Clients that do not speak Canal's protocol --------------------------------------------


def garbage() -> Iterator[bytes]:
    chance = random.Random(5)
    for _ in range(40):
        yield chance.randbytes(chance.randrange(1, 4000))
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\xff" * 4
    yield struct.pack(">I", 1 << 30) + b"x" * 1000
    yield struct.pack(">I", 16) + b"\x00" * 16


def test_garbage_closes_only_its_own_connection(daemon: DaemonProcess, server: Server) -> None:
    before = len(daemon.said())
    resident = daemon.resident_bytes()
    with connect(daemon, "30").log_in("canal", "canal").subscribe() as calm:
        for content in garbage():
            with connect(daemon) as client:
                client.socket.sendall(content)
                client.socket.shutdown(socket.SHUT_WR)
                while not ends(client):
                    continue
        for content in garbage():
            # Send the same garbage from an authenticated client.
            with connect(daemon).log_in("canal", "canal") as client:
                client.socket.sendall(content)
                client.socket.shutdown(socket.SHUT_WR)
                while not ends(client):
                    continue
        assert calm.get()[0] > 0
    assert serves(daemon, server)

    def tells(content: bytes, words: str) -> bool:
        with connect(daemon) as client:
            client.socket.sendall(content)
            while not ends(client):
                continue
        return words in daemon.said(before)

    # Refusals of one kind are logged once per second, so another attempt may be needed.
    wait_until(lambda: tells(b"\xff" * 4, "a frame announces"))
    wait_until(lambda: tells(struct.pack(">I", 16) + bytes(16), "no Canal packet"))
    assert "Traceback" not in daemon.said(before)
    assert daemon.resident_bytes() - resident < 32 << 20
    assert daemon.resident_bytes() < RESIDENT_BYTES_MAX


def test_oversized_handshake_is_refused_before_it_is_read(daemon: DaemonProcess) -> None:
    with connect(daemon) as client:
        body = PROTO["ClientAuth"](username="x" * 100_000).SerializeToString()
        client.send_bytes(PROTO["Packet"](type=CLIENTAUTHENTICATION, body=body).SerializeToString())
        assert ends(client)


@pytest.mark.deep(guard="tests/integration/test_listeners.py::test_slow_client_is_disconnected_in_time")
def test_silent_or_slow_client_is_disconnected(daemon: DaemonProcess, server: Server) -> None:
    started = time.monotonic()
    silent = [connect(daemon) for _ in range(50)]
    slow = connect(daemon).log_in("canal", "canal")
    dripping = threading.Thread(target=drip, args=(slow,))
    dripping.start()
    assert serves(daemon, server)
    assert all(ends(client) for client in silent)
    assert time.monotonic() - started > 8
    # The client would need five minutes for the whole frame.
    dripping.join(WAIT_SECONDS_MAX)
    assert not dripping.is_alive()
    assert time.monotonic() - started > 15
    for client in silent:
        client.close()


def drip(client: CanalClient) -> None:
    """Send a frame byte by byte until the daemon closes the connection."""
    try:
        for byte in struct.pack(">I", 1000) + b"\x18\x06" * 500:
            client.socket.sendall(bytes([byte]))
            time.sleep(0.3)
    except OSError:
        client.close()


def test_client_is_disconnected_after_its_requested_idle_timeout(daemon: DaemonProcess) -> None:
    started = time.monotonic()
    # A client that subscribes during login sends nothing more. Without the timeout that it requested, the
    # daemon would let it stay idle for an hour.
    more = {"net_read_timeout": 300, "net_write_timeout": 300, "destination": "shop", "client_id": "1001"}
    with connect(daemon).log_in("canal", "canal", **more) as client:
        assert ends(client)
    assert time.monotonic() - started > 0.3
