# SPDX-License-Identifier: Apache-2.0
"""A client of a Pump for tests: writes binlogs as a TiDB server does, and pulls them as a Drainer does."""

from collections.abc import Iterator
from itertools import islice
from types import TracebackType
from typing import Any, Self

import grpc

from penstock.protobuf import encode
from penstock.tidb.messages import (
    PULL_BINLOGS,
    WRITE_BINLOG,
    pull_binlogs_request,
    read_pull_binlogs_response,
)
from tests.support.suite.patience import WAIT_SECONDS_MAX

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 50),
)


class PumpClient:
    """A connection to a Pump. Refused calls raise grpc.RpcError."""

    def __init__(
        self, address: str, cluster_id: int = 7001, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        self._cluster_id = cluster_id
        self._channel = (
            grpc.insecure_channel(address, _OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, credentials, _OPTIONS)
        )
        self._write = self._channel.unary_unary(WRITE_BINLOG)
        self._pull = self._channel.unary_stream(PULL_BINLOGS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def write(self, payload: bytes) -> None:
        """Write a binlog; it is durable on return."""
        assert self._write(self.request(payload), timeout=WAIT_SECONDS_MAX) == b""

    def write_later(self, payload: bytes) -> Any:
        """Return the future of a write."""
        return self._write.future(self.request(payload), timeout=WAIT_SECONDS_MAX)

    def request(self, payload: bytes) -> bytes:
        """Return a WriteBinlogReq."""
        return encode((1, self._cluster_id), (2, payload))

    def pull(self, after_ts: int = 0, **options: Any) -> Iterator[bytes]:
        """Yield binlogs after a commit timestamp, from a stream that does not end."""
        request = pull_binlogs_request(self._cluster_id, after_ts)
        responses = self._pull(request, timeout=WAIT_SECONDS_MAX, **options)
        try:
            for response in responses:
                yield read_pull_binlogs_response(response)
        finally:
            responses.cancel()

    def pull_some(self, count: int, after_ts: int = 0, **options: Any) -> list[bytes]:
        """Return the first binlogs after a commit timestamp, without fakes."""
        pulling = self.pull(after_ts, **options)
        transactions = (payload for payload in pulling if not payload.startswith(b"\x08\x02"))
        try:
            return list(islice(transactions, count))
        finally:
            pulling.close()  # type: ignore[attr-defined]
