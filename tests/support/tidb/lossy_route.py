# SPDX-License-Identifier: Apache-2.0
"""A route to a Pump on which some commits are lost after TiDB was told that they arrived."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

import grpc

from penstock.protobuf import Message
from penstock.tidb.messages import PULL_BINLOGS, WRITE_BINLOG, BinlogHead, BinlogKind
from tests.support.suite.patience import WAIT_SECONDS_MAX

# There are more threads than the writers and drainers of a test need, because each stream occupies a thread.
_THREADS = 64
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 50),
)


class LossyRoute(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Forwards calls to a Pump, but loses every `lost_of`th commit of a transaction. A context manager."""

    def __init__(self, pump_address: str, lost_of: int) -> None:
        self._channel = grpc.insecure_channel(pump_address, _OPTIONS)
        self._write = self._channel.unary_unary(WRITE_BINLOG)
        self._pull = self._channel.unary_stream(PULL_BINLOGS)
        self._lost_of = lost_of
        self._lock = threading.Lock()
        self._commits = 0
        # The start timestamps of the transactions whose commits were lost.
        self.lost: list[int] = []
        self._server = grpc.server(ThreadPoolExecutor(_THREADS))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(0).wait()
        self._channel.close()

    def service(self, call: Any) -> Any:
        """Return the handler of a call."""
        if call.method == WRITE_BINLOG:
            return grpc.unary_unary_rpc_method_handler(self._forward_write)
        if call.method == PULL_BINLOGS:
            return grpc.unary_stream_rpc_method_handler(self._forward_pull)
        return None

    def _forward_write(self, request: bytes, context: Any) -> bytes:
        if self._is_lost(Message(request).content(2)):
            return b""
        try:
            return bytes(self._write(request, timeout=WAIT_SECONDS_MAX))
        except grpc.RpcError as problem:
            context.abort(problem.code(), problem.details())
            raise

    def _is_lost(self, payload: bytes) -> bool:
        if not payload or (head := BinlogHead.decode(payload)).kind is not BinlogKind.COMMIT:
            return False
        with self._lock:
            self._commits += 1
            is_lost = self._commits % self._lost_of == 0
            if is_lost:
                self.lost.append(head.start_ts)
        return is_lost

    def _forward_pull(self, request: bytes, context: Any) -> Iterator[bytes]:
        responses = self._pull(request)
        context.add_callback(responses.cancel)
        try:
            yield from responses
        except grpc.RpcError as problem:
            context.abort(problem.code(), problem.details())
