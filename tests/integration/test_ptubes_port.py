# SPDX-License-Identifier: Apache-2.0
"""The Ptubes port: bounds of responses, refusals, accounts, and monitors."""

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.ptubes.client import EARLIEST, LATEST
from tests.support.ptubes.packet import ERROR, RdsEnvelope, shards_of
from tests.support.ptubes.shop import END, INSERT, Shop, make_shop, of_kind, start_daemon
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

WAIT_MILLISECONDS = int(WAIT_SECONDS_MAX / 2) * 1000


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, server_of: Callable[[str], Server]
) -> Iterator[DaemonProcess]:
    running = start_daemon(server_of("mariadb"), tmp_path_factory.mktemp("daemon"))
    yield running
    running.kill()


@pytest.fixture
def shop(daemon: DaemonProcess, mariadb_server: Server, fresh_database: FreshDatabase) -> Shop:
    return make_shop(mariadb_server, daemon, fresh_database(mariadb_server))


# --- Limits of a response -------------------------------------------------------------------


def test_response_ends_at_the_first_bound(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES " + ", ".join(f"({at}, 'c', 1)" for at in range(1, 101)))
        shop.caught_up()
        assert client.fetch(batch=7).totalEventCount == 7
        small = client.fetch(size=1)
        assert small.totalEventCount == 1
        size = len(shards_of(small)[0][0].SerializeToString())
        assert client.fetch(size=10 * size).totalEventCount in (10, 11)
        taken = len(client.events[0])
        assert client.fetch().totalEventCount == 101 - taken
    assert len(client.events[0]) == 101


def test_fetch_without_events_waits_for_its_timeout(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        client.fetch(timeout_ms=1)
        started = time.monotonic()
        # If the daemon took the timeout for seconds, the response would arrive after the connection's own
        # timeout.
        assert client.fetch(timeout_ms=400).totalEventCount == 0
        assert time.monotonic() - started > 0.3


def test_waiting_fetch_is_answered_when_a_row_arrives(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        client.fetch(timeout_ms=1)
        for key in range(5):
            insert = threading.Thread(target=shop.sql, args=(f"INSERT INTO orders VALUES ({key}, 'a', 1)",))
            insert.start()
            # A response that ends by timeout has no events.
            assert client.fetch(timeout_ms=WAIT_MILLISECONDS).totalEventCount > 0
            insert.join()
            shop.read_all(client)
    assert [event.eventType for event in client.events[0]].count(INSERT) == 5


def test_responses_are_compressed_if_the_client_accepts_that(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES " + ", ".join(f"({at}, 'c', 1)" for at in range(1, 201)))
        shop.caught_up()
        request = {"batchSize": 1000, "timeoutMs": 50, "maxByteSize": 1_000_000}
        content = client.call("/v1/fetchMessages", request, {"accept-encoding": "gzip, deflate"})
    envelope = RdsEnvelope.FromString(gzip.decompress(content))
    assert envelope.totalEventCount == 201


# --- Refusals -------------------------------------------------------------------------------


def raw(port: int, *requests: bytes) -> bytes:
    """Send bytes on one connection, and return all received bytes until it is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS_MAX) as connection:
        for request in requests:
            connection.sendall(request)
        received = bytearray()
        while piece := connection.recv(1 << 16):
            received += piece
    return bytes(received)


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def test_fetch_before_a_subscription_closes_the_connection_silently(shop: Shop) -> None:
    body = b'{"batchSize": 1, "timeoutMs": 5, "maxByteSize": 5}'
    assert raw(shop.port, post("/v1/fetchMessages", body)) == b""


@pytest.mark.parametrize(
    ("path", "body", "answer"),
    [
        ("/v1/nowhere", b"{}", b"Bye"),
        ("/", b"", b"Bye"),
        ("/v1/subscribe", b"{", b"fail"),
        ("/v1/subscribe", b"x" * (2 << 20), b"fail"),
        ("/v1/adjustDumpPoint", b"{}", b"penstock position set"),
    ],
)
def test_failures_are_reported_with_status_200_and_a_closed_connection(
    shop: Shop, path: str, body: bytes, answer: bytes
) -> None:
    received = raw(shop.port, post(path, body))
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"connection: close" in head.lower()
    assert answer in content


def test_subscription_that_cannot_be_served_fails(shop: Shop) -> None:
    for changes in ({"codec": "JSON"}, {"codec": "RAW"}):
        with shop.client(**changes) as client:
            assert client.subscribe(LATEST) == "fail"
    with shop.client(instance="nobody") as client:
        assert client.server_info()["serverStatus"] == "UNAVAILABLE"
    with shop.client(instance="nobody") as client:
        assert client.subscribe(LATEST) == "fail"


def test_invalid_fetch_fails_and_the_next_one_continues(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
        assert client.call("/v1/fetchMessages", b"nonsense") == b"fail"
        shop.read_all(client)
    assert [event.eventType for event in client.events[0]] == [INSERT, END]


def test_client_gets_the_reason_why_the_log_cannot_be_read_further(shop: Shop) -> None:
    with shop.client() as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
        shop.sql("SET SESSION binlog_format = STATEMENT; INSERT INTO orders VALUES (2, 'b', 2)")
        shop.caught_up()
        client.fetch_until(lambda reading: len(reading.events.get(0, [])) == 2)
        request = {"batchSize": 10, "timeoutMs": 50, "maxByteSize": 1000}
        envelope = RdsEnvelope.FromString(client.call("/v1/fetchMessages", request))
        assert (envelope.messageType, envelope.error_code) == (ERROR, 3)
        assert "StatementLogged" in envelope.error_message
        assert "binlog_format = ROW" in envelope.error_message
        # The closed connection makes the client ask for another daemon.
        with pytest.raises(ConnectionError):
            client.fetch()


def test_pipelined_requests_are_answered_in_order_without_waiting(shop: Shop) -> None:
    subscribe = post(
        "/v1/subscribe", json.dumps({**shop.client().config, "buffaloCheckpoint": LATEST}).encode()
    )
    # A request that waited for its timeout would outlast the connection's own timeout.
    request = {"batchSize": 1, "timeoutMs": 2 * WAIT_MILLISECONDS, "maxByteSize": 5}
    fetch = post("/v1/fetchMessages", json.dumps(request).encode())
    last = post("/v1/nowhere", b"")
    received = raw(shop.port, subscribe + fetch + fetch + subscribe + fetch + last)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 200 OK")[1:]]
    assert [body[:7] for body in bodies] == [
        b"success",
        b"\x10\x01",
        b"\x10\x01",
        b"success",
        b"\x10\x01",
        b"Bye",
    ]


def test_browser_page_is_refused_under_a_foreign_host_name(shop: Shop) -> None:
    received = raw(shop.port, post("/v1/getServerInfo", b"{}", "Host: evil.example"))
    assert received.endswith(b"fail")


# --- Accounts -------------------------------------------------------------------------------


def test_known_account_is_accepted_by_a_header_or_by_the_token_of_a_subscription(
    mariadb_server: Server, fresh_database: Callable[[Server], str], tmp_path: Path
) -> None:
    server, database = mariadb_server, fresh_database(mariadb_server)
    server.sql(
        "CREATE TABLE mine (id INT PRIMARY KEY); CREATE TABLE theirs (id INT PRIMARY KEY)", database=database
    )
    access = {
        "name": "reader",
        "token": "a-token",
        "tables": [f"{database}.mine"],
        "subscriptions": ["cache"],
    }
    settings = {
        "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
        "listen": {"ptubes": "127.0.0.1:0", "token": "whole"},
        "access": [access],
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        daemon.token = "whole"
        port = int(daemon.get("/v1/listeners")["listeners"]["ptubes"].rpartition(":")[2])
        shop = Shop(daemon, server, port, 0, database)
        server.sql(f"INSERT INTO {database}.mine VALUES (1); INSERT INTO {database}.theirs VALUES (2)")
        shop.caught_up()
        mine, hidden_table = f"{database}.mine", f"{database}.theirs"

        def subscribes(table: str, **more: Any) -> bool:
            with shop.client(table, **more) as client:
                available = client.server_info()["serverStatus"] == "AVAILABLE"
            with shop.client(table, **more) as client:
                assert (client.subscribe(EARLIEST) == "success") == available
                if available:
                    shop.read_all(client)
                    assert [event.header.tableName for event in of_kind(client.events[0], INSERT)] == [table]
            return available

        assert subscribes(mine, token="a-token", task="cache")
        assert not subscribes(mine, token="a-token", task="search")
        assert not subscribes(hidden_table, token="a-token", task="cache")
        assert subscribes(hidden_table, token="whole")
        assert not subscribes(mine, token="wrong", task="cache")
        assert not subscribes(mine)
        with shop.client(mine, task="cache") as client:
            header = {"Authorization": "Bearer a-token"}
            assert client.call("/v1/subscribe", client.config, header) == b"success"
            assert client.fetch().totalEventCount == 2
        assert "a-token" not in daemon.said()


# --- Monitors -------------------------------------------------------------------------------


def test_account_sees_no_instance_that_it_may_not_read(
    mariadb_server: Server, fresh_database: Callable[[Server], str], tmp_path: Path
) -> None:
    server, database = mariadb_server, fresh_database(mariadb_server)
    instance = {"source": server.url(), "start": str(head_of(server))}
    settings = {
        "instances": {"shop": instance, "bank": instance},
        "listen": {"ptubes": "127.0.0.1:0", "ptubes_monitor": "127.0.0.1:0", "token": "whole"},
        "access": [{"name": "reader", "token": "a-token", "instances": ["shop"]}],
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        daemon.token = "whole"
        shop = Shop(daemon, server, daemon.ports["ptubes"], daemon.ports["ptubes_monitor"], database)
        server.sql("CREATE TABLE orders (id INT PRIMARY KEY)", database=database)
        head = head_of(server)
        for name in settings["instances"]:
            daemon.wait_for_head(head.file, head.offset, name)

        def ask(path: str, token: str) -> Any:
            head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            received = raw(shop.monitor, f"{head}Connection: close\r\n\r\n".encode())
            return json.loads(received.partition(b"\r\n\r\n")[2])

        with shop.client(instance="bank", task="payroll") as client:
            assert client.subscribe(EARLIEST, token="whole") == "success"
            for path, key in (
                ("/v1/readerTaskInfo", "readerTaskName"),
                ("/v1/readerTaskRuntimeConf?allTask=true", "readerTaskName"),
                ("/v1/readerTaskRuntimeConf?taskName=bank&taskName=shop", "readerTaskName"),
                ("/v1/clientSessionInfo", "writerTaskName"),
            ):
                whole, some = (
                    {session[key] for session in ask(path, token)} for token in ("whole", "a-token")
                )
                assert whole - some in ({"bank"}, {"payroll"}), path
            for token, tasks in (("whole", ["payroll"]), ("a-token", [])):
                with shop.client(token=token) as other:
                    assert other.server_info()["writerTaskList"] == tasks


@pytest.mark.parametrize("token", ["\ud800", "pässword"])
def test_non_text_token_is_refused_without_a_failure(
    mariadb_server: Server, tmp_path: Path, token: str
) -> None:
    settings = {
        "instances": {"shop": {"source": mariadb_server.url(), "start": str(head_of(mariadb_server))}},
        "listen": {"ptubes": "127.0.0.1:0", "token": "whole"},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        shop = Shop(daemon, mariadb_server, daemon.ports["ptubes"], 0, "nowhere")
        with shop.client() as client:
            assert client.subscribe(EARLIEST, token=token) == "fail"
        with shop.client(task=token) as client:
            client.subscribe(LATEST, token="whole")
            daemon.token = "whole"
            assert len(daemon.get("/v1/subscribers")["subscribers"]) <= 1
        assert "Traceback" not in daemon.said()


def test_monitors_see_the_status_and_no_password(shop: Shop) -> None:

    def ask(path: str) -> Any:
        received = raw(
            shop.monitor, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
        )
        assert b"replicate-on-loopback" not in received
        return json.loads(received.partition(b"\r\n\r\n")[2])

    with shop.client(task="cache") as client:
        client.subscribe(LATEST)
        shop.sql("INSERT INTO orders VALUES (1, 'a', 1)")
        shop.read_all(client)
        port = client.local_port
        (session,) = [session for session in ask("/v1/clientSessionInfo") if session["port"] == port]
        assert session["writerTaskName"] == "cache"
        assert (session["freqSubCalls"], session["freqErrorSubs"]) == (1, 0)
        assert session["freqBinlogGetCalls"] >= 1
        assert session["latestBinlogGetBinlogInfo"]["binlogOffset"] == client.latest.binlogOffset
        assert ask("/v1/containerInfo")["numPeers"] >= 1
        with shop.client() as other:
            # Sessions of disconnected clients are removed once their connections have ended.
            wait_until(lambda: other.server_info(buffaloCheckpoint=LATEST)["writerTaskList"] == ["cache"])
    (task,) = ask("/v1/readerTaskInfo")
    assert (task["readerTaskName"], task["storageMode"]) == ("shop", "MIX")
    assert task["fileStorageEngineDetail"]["maxBinlogInfo"]["binlogOffset"] > 0
    assert set(ask("/v1/basicInfo")) == {"startTime", "version"}
    (settings,) = ask("/v1/readerTaskRuntimeConf?allTask=true")
    assert ask("/v1/readerTaskRuntimeConf?taskName=shop&taskName=none") == [settings]
    assert ask("/v1/readerTaskRuntimeConf") == []
    # A session ends with its connection.
    wait_until(lambda: not ask("/v1/clientSessionInfo"))
