# SPDX-License-Identifier: Apache-2.0
"""The port of a Pump or Drainer: who may connect, and what keeps it from being served."""

import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

import grpc
import pytest

from penstock.errors import OptionInvalid
from penstock.tidb.channels import ClusterTls
from penstock.tidb.node_port import NodePort, PortTls, bind_port
from tests.support.suite.patience import wait_until
from tests.support.tidb.pump_client import PumpClient
from tests.support.tidb.running_pump import ask
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


@pytest.mark.parametrize("folder", ["missing", "long" * 30])
def test_port_without_a_folder_for_its_grpc_server_refuses_to_start(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if folder != "missing":
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    bound = bind_port("127.0.0.1", 0)

    async def answer(method: str, path: str) -> None:
        return None

    port = NodePort("test", bound, lambda loop: Answering(), answer, None)
    with pytest.raises(OptionInvalid, match="the port cannot be served"):
        port.start()
    port.stop()
    assert bound.fileno() == -1


class Answering(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Accepts every binlog."""

    def service(self, handler_call_details: Any) -> Any:
        async def accept(request: bytes, context: Any) -> bytes:
            return b""

        return grpc.unary_unary_rpc_method_handler(accept)


def outcome(client: PumpClient) -> str:
    try:
        client.write(b"")
    except grpc.RpcError as problem:
        return str(problem.code().name)
    return "OK"
