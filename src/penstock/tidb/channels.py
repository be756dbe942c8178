# SPDX-License-Identifier: Apache-2.0
"""gRPC connections to the members of a TiDB cluster, with messages as bytes.

Every failed call raises one of Penstock's errors; `translate_rpc_error` chooses it by the status code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import (
    AccessDenied,
    AnswerTimedOut,
    ConnectionLost,
    DependencyMissing,
    PenstockError,
    ServerUnsupported,
    TlsFailed,
)
from penstock.limits import TIDB_MESSAGE_BYTES_MAX

try:
    import grpc
    from grpc.experimental import ChannelOptions
except ImportError as problem:
    raise DependencyMissing(
        "a TiDB cluster speaks gRPC, which needs the package grpcio",
        hint="Run: pip install 'penstock[tidb]'",
    ) from problem

MESSAGE_OPTIONS = (
    ("grpc.max_receive_message_length", TIDB_MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", TIDB_MESSAGE_BYTES_MAX),
)
_OPTIONS = (
    *MESSAGE_OPTIONS,
    # A silent peer is detected within half a minute, even without a call.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The longest backoff between attempts to connect. The default of two minutes is too long for a server
    # that has restarted.
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.enable_http_proxy", 0),
    # If a call receives a GOAWAY, gRPC repeats it, and sometimes waits forever, past its deadline (grpcio
    # 1.85). So gRPC's retries are disabled, and the callers retry their calls themselves.
    ("grpc.enable_retries", 0),
    # The thread that reads a stream also receives its messages. By default, each message passes through a
    # second thread.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)


@dataclass(frozen=True)
class ClusterTls:
    """The PEM files for connections within a cluster: the cluster's authority, and the instance's certificate
    and key.
    """

    ca: Path
    cert: Path
    key: Path

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Return the authority, the key and the certificate. Raises TlsFailed."""
        try:
            return self.ca.read_bytes(), self.key.read_bytes(), self.cert.read_bytes()
        except OSError as problem:
            raise TlsFailed(
                f"{problem.filename} cannot be read: {problem.strerror}", hint="Correct tidb.tls"
            ) from problem


def open_channel(address: str, tls: ClusterTls | None) -> grpc.Channel:
    """Return a channel to host:port, which connects with its first call. Raises TlsFailed."""
    if tls is None:
        return grpc.insecure_channel(address, _OPTIONS)
    ca, key, certificate = tls.read()
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, certificate), _OPTIONS)


def call(channel: grpc.Channel, address: str, method: str, request: bytes, seconds: float) -> bytes:
    """Call a method with one response. Raises what `translate_rpc_error` returns."""
    unary: Callable[..., Any] = channel.unary_unary(method)
    try:
        response: bytes = unary(request, timeout=seconds)
    except grpc.RpcError as problem:
        raise translate_rpc_error(problem, address, method) from problem
    return response


def translate_rpc_error(problem: Any, address: str, method: str) -> PenstockError:
    """Return the Penstock error of a failed call: `problem` is a grpc.RpcError with a status."""
    code = problem.code()
    text = f"{address}: {method.rpartition('/')[2]} failed with {code.name}: {problem.details()}"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ServerUnsupported(text, hint="Check that the address is the right kind of server")
    if code in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED):
        return AccessDenied(text, hint="Check tidb.tls, and the names that the server allows")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return AnswerTimedOut(text)
    return ConnectionLost(text)


def without_scheme(url: str) -> str:
    """Return host:port of `http://host:port` or `https://host:port`."""
    return url.partition("://")[2].rstrip("/") or url
