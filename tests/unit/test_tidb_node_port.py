# SPDX-License-Identifier: Apache-2.0
"""The port of a Pump or Drainer: permitted clients, and failures that prevent serving."""

import asyncio
import functools
import socket
import ssl
import stat
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from penstock.tidb import node_port
from penstock.tidb.channels import ClusterTls
from penstock.tidb.grpc_server import GrpcCall
from penstock.tidb.messages import WRITE_BINLOG
from penstock.tidb.node_port import NodePort, PortTls, bind_port
from tests.support.suite.patience import wait_until
from tests.support.tidb.binlogs import prewrite
from tests.support.tidb.pump_client import PumpClient
from tests.support.tidb.running_pump import (  # noqa: F401
    Start,
    ask,
    pump_cluster,
    pump_start,
    refusal,
)
from tools.servers import certificate


@pytest.mark.parametrize(
    ("allowed", "accepted"), [((), True), (("Penstock test server",), True), (("someone else",), False)]
)
def test_port_over_tls_requires_an_allowed_certificate(
    tmp_path: Path, allowed: tuple[str, ...], accepted: bool
) -> None:
    certificate.make(tmp_path / "tls")
    ca, key, cert = (tmp_path / "tls" / name for name in ("authority.pem", "server-key.pem", "server.pem"))
    bound = bind_port("127.0.0.1", 0)
    address = "{}:{}".format(*bound.getsockname())

    async def answer(method: str, path: str) -> dict[str, str]:
        return {"asked": path}

    tls = PortTls(ClusterTls(ca, cert, key), allowed)
    path = tmp_path / "pump.sock"
    port = NodePort("test", bound, lambda loop: Answering(), answer, tls, unix_path=str(path))
    port.start()
    try:
        credentials = grpc.ssl_channel_credentials(ca.read_bytes(), key.read_bytes(), cert.read_bytes())
        with PumpClient(address, credentials=credentials) as known:
            if accepted:
                wait_until(lambda: outcome(known) == "OK")
            assert (outcome(known) == "OK") is accepted
        with PumpClient(address, credentials=grpc.ssl_channel_credentials(ca.read_bytes())) as unknown:
            assert outcome(unknown) == "UNAVAILABLE"
        with PumpClient(address) as plain:
            assert outcome(plain) == "UNAVAILABLE"
        with PumpClient(f"unix:{path}") as local:
            assert outcome(local) == "OK", "the socket's mode decides who may connect"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    finally:
        port.stop()


def test_compressed_calls_are_read_and_unknown_encodings_are_refused(start: Start) -> None:
    begun = start()
    with grpc.insecure_channel(begun.pump.address) as channel:
        write = channel.unary_unary(WRITE_BINLOG)
        request = begun.client.request(prewrite(1, bytes(100_000)))
        assert write(request, timeout=30, compression=grpc.Compression.Gzip) == b""
        assert begun.pump.status()["stored_bytes"] == len(prewrite(1, bytes(100_000)))
        deflated = functools.partial(write, request, timeout=30, compression=grpc.Compression.Deflate)
        assert refusal(deflated)[0] == "UNIMPLEMENTED"
        assert refusal(lambda: channel.unary_unary("/binlog.Pump/Other")(b"", timeout=30)) == (
            "UNIMPLEMENTED",
            "a Pump has no method /binlog.Pump/Other",
        )


def test_ending_pump_answers_what_has_arrived_and_does_not_wait_for_idle_clients(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_port, "DRAIN_SECONDS_MAX", 60.0)
    begun = start()
    hanging, hung = threading.Event(), threading.Event()
    sync = begun.pump._store.log.sync

    def hang() -> None:
        hung.set()
        assert hanging.wait(60)
        sync()

    with PumpClient(begun.pump.address) as idle:
        idle.write(b"")
        monkeypatch.setattr(begun.pump._store.log, "sync", hang)
        waiting = begun.client.write_later(prewrite(1))
        assert hung.wait(30)
        begun.pump._port._loop.call_soon_threadsafe(begun.pump._port._stopping.set)
        hanging.set()
        assert waiting.result() == b""
        # The thread ends far before the time limit for running calls.
        begun.pump._port._thread.join(20)
        assert not begun.pump._port._thread.is_alive()


def test_answers_are_sent_at_once() -> None:
    bound = bind_port("127.0.0.1", 0)

    async def answer(method: str, path: str) -> dict[str, str]:
        (connection,) = port._connections
        accepted = connection.transport.get_extra_info("socket")
        return {"nodelay": str(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))}

    port = NodePort("test", bound, lambda loop: Answering(), answer, None)
    address = "{}:{}".format(*bound.getsockname())
    port.start()
    try:
        assert ask(address, "GET", "/status") == (200, {"nodelay": "1"})
    finally:
        port.stop()


def test_client_that_does_not_read_is_sent_no_more_whatever_its_window_is() -> None:
    streaming = Streaming()
    bound = bind_port("127.0.0.1", 0)
    port = NodePort("test", bound, lambda loop: streaming, no_http, None)
    port.start()
    try:
        with socket.create_connection(bound.getsockname()) as client:
            client.sendall(call_with_largest_window())
            wait_until(lambda: [each for each in port._connections if not each.transport.is_reading()])
            asyncio.run_coroutine_threadsafe(rounds(500), port._loop).result(30)
            sent = streaming.sent
            assert sent < 64, "the answers are kept in memory"
            received = 0
            while received < 80 << 20:
                received += len(client.recv(1 << 20))
            assert streaming.sent > sent
    finally:
        port.stop()


@pytest.mark.parametrize("over_tls", [True, False])
def test_ending_port_closes_connections_of_clients_that_keep_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, over_tls: bool
) -> None:
    monkeypatch.setattr(node_port, "DRAIN_SECONDS_MAX", 0.1)
    certificate.make(tmp_path / "tls")
    ca, key, cert = (tmp_path / "tls" / name for name in ("authority.pem", "server-key.pem", "server.pem"))
    bound = bind_port("127.0.0.1", 0)
    tls = PortTls(ClusterTls(ca, cert, key)) if over_tls else None
    port = NodePort("test", bound, lambda loop: Streaming(), no_http, tls)
    port.start()
    client = socket.create_connection(bound.getsockname())
    if over_tls:
        context = ssl.create_default_context(cafile=ca)
        context.check_hostname = False
        context.load_cert_chain(cert, key)
        client = context.wrap_socket(client)
    with client:
        client.sendall(call_with_largest_window())
        wait_until(lambda: [each for each in port._connections if each.transport.get_write_buffer_size()])
        [accepted] = [each.transport.get_extra_info("socket") for each in port._connections]
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        port.stop()
        assert accepted.fileno() == -1
        assert not port._connections


def test_disk_slower_than_the_end_of_the_port_does_not_end_the_storing_thread(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_port, "DRAIN_SECONDS_MAX", 0.1)
    begun = start()
    hanging, hung = threading.Event(), threading.Event()
    sync = begun.pump._store.log.sync

    def hang() -> None:
        hung.set()
        assert hanging.wait(60)
        sync()

    monkeypatch.setattr(begun.pump._store.log, "sync", hang)
    waiting = begun.client.write_later(prewrite(1))
    assert hung.wait(30)
    begun.pump._port.stop()
    assert waiting.exception().code() is grpc.StatusCode.UNAVAILABLE
    later = begun.pump._commit.call(lambda store: "called")
    hanging.set()
    assert later.result(30) == "called"


async def rounds(count: int) -> None:
    """Let the event loop make this many turns."""
    for _ in range(count):
        await asyncio.sleep(0)


async def no_http(method: str, path: str) -> None:
    """Answer every HTTP request with 404."""


class Streaming:
    """Answers each call with an endless stream of 1 MiB messages."""

    sent = 0

    def receive(self, calls: Sequence[GrpcCall]) -> None:
        for call in calls:
            call.run(self._stream(call))

    async def _stream(self, call: GrpcCall) -> None:
        while True:
            await call.send([bytes(1 << 20)])
            self.sent += 1


def call_with_largest_window() -> bytes:
    """Return the bytes of a client that makes one call and permits the server to send 2 GiB."""

    def frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
        return struct.pack(">I", len(content))[1:] + struct.pack(">BBI", kind, flags, stream) + content

    largest = (1 << 31) - 1
    headers = {":method": "POST", ":scheme": "http", ":path": "/a", "content-type": "application/grpc"}
    encoded = b"".join(
        bytes([0, len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in headers.items()
    )
    return b"".join(
        (
            node_port._PREFACE,
            frame(4, 0, 0, struct.pack(">HI", 4, largest)),
            frame(8, 0, 0, struct.pack(">I", largest - 65535)),
            frame(1, 4, 1, encoded),
            frame(0, 1, 1, bytes(5)),
        )
    )


class Answering:
    """Accepts every binlog that a call submits."""

    def receive(self, calls: Sequence[GrpcCall]) -> None:
        for call in calls:
            call.peer.answer([call.stream], b"")


def outcome(client: PumpClient) -> str:
    try:
        client.write(b"")
    except grpc.RpcError as problem:
        return str(problem.code().name)
    return "OK"
