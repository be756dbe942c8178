# SPDX-License-Identifier: Apache-2.0
"""The port of a Pump or Drainer: who may connect, and what keeps it from being served."""

import functools
import socket
import stat
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
        # Far below the time for running calls.
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


class Answering:
    """Accepts every binlog."""

    def receive(self, calls: Sequence[GrpcCall]) -> None:
        for call in calls:
            call.peer.answer([call.stream], b"")


def outcome(client: PumpClient) -> str:
    try:
        client.write(b"")
    except grpc.RpcError as problem:
        return str(problem.code().name)
    return "OK"
