# SPDX-License-Identifier: Apache-2.0
"""The gRPC service of a Pump: WriteBinlog for TiDB's pump client, PullBinlogs for Drainers.

It runs in one event loop. A write waits for the group commit as a future; reading the log for a Drainer runs
in a thread.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import structlog

from penstock.errors import (
    BinlogInconsistent,
    EventMalformed,
    PenstockError,
    PositionPurged,
    StreamError,
)
from penstock.limits import PUMP_PULL_BYTES, PUMP_PULL_COUNT, PUMP_PULLS_MAX, PUMP_WAITING_BYTES_MAX
from penstock.tidb.group_commit import GroupCommit
from penstock.tidb.messages import (
    PULL_BINLOGS,
    WRITE_BINLOG,
    pull_binlogs_response,
    read_pull_binlogs_request,
    read_write_binlog_request,
)
from penstock.tidb.pump_store import StoreCounts, Write

_log = structlog.get_logger(__name__)

# A WriteBinlogResp without an error.
_ACCEPTED = b""


class _WaitingWrite(Write):
    """A write whose sender waits for its acknowledgement."""

    future: "asyncio.Future[None]"


class PumpService(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The handlers of both methods. Created in the event loop that serves them."""

    def __init__(
        self,
        cluster_id: int,
        counts: StoreCounts,
        loop: asyncio.AbstractEventLoop,
        commit: GroupCommit,
        *,
        compress: bool,
    ) -> None:
        self._cluster_id = cluster_id
        self._counts = counts
        self._loop = loop
        self._compress = compress
        self._commit = commit
        self._waiting_bytes = 0
        self._releases = 0
        self._is_ending = False
        self._release_waiters: set[asyncio.Future[None]] = set()
        self._readers = ThreadPoolExecutor(PUMP_PULLS_MAX, "pump-pull")
        self._handlers: dict[str, Any] = {
            WRITE_BINLOG: grpc.unary_unary_rpc_method_handler(self._write),
            PULL_BINLOGS: grpc.unary_stream_rpc_method_handler(self._pull),
        }

    def service(self, handler_call_details: Any) -> Any:
        """Return the handler of a method; None for an unknown one."""
        return self._handlers.get(handler_call_details.method)

    def end(self) -> None:
        """End the calls of Drainers, which connect again elsewhere or later."""
        self._is_ending = True
        self._wake_drainers()
        self._readers.shutdown(wait=False, cancel_futures=True)

    # --- Called by the storing thread -------------------------------------------------------

    def finish(self, writes: list[Write]) -> None:
        """Answer the senders of a batch."""
        self._loop.call_soon_threadsafe(
            self._answer_senders, [each for each in writes if isinstance(each, _WaitingWrite)]
        )

    def _answer_senders(self, writes: list[_WaitingWrite]) -> None:
        self._waiting_bytes -= sum(len(each.payload) for each in writes)
        _wake([each.future for each in writes])

    def released(self) -> None:
        """Wake the Drainers that wait for more."""
        self._loop.call_soon_threadsafe(self._wake_drainers)

    def _wake_drainers(self) -> None:
        self._releases += 1
        waiters, self._release_waiters = self._release_waiters, set()
        _wake(list(waiters))

    # --- WriteBinlog ------------------------------------------------------------------------

    async def _write(self, request: bytes, context: Any) -> bytes:
        try:
            cluster_id, payload = read_write_binlog_request(request)
        except EventMalformed as problem:
            await self._refuse(context, "malformed request", grpc.StatusCode.INVALID_ARGUMENT, str(problem))
            raise
        # TiDB's client tries another Pump, as it does with the original.
        await self._check_cluster(cluster_id, context, grpc.StatusCode.UNKNOWN)
        if self._waiting_bytes and self._waiting_bytes + len(payload) > PUMP_WAITING_BYTES_MAX:
            text = f"{self._waiting_bytes} bytes of binlogs wait for the disk"
            await self._refuse(context, "overloaded", grpc.StatusCode.UNAVAILABLE, text)
        write = _WaitingWrite(payload)
        write.future = self._loop.create_future()
        # Until it is stored, it needs memory, even if its sender gives up.
        self._waiting_bytes += len(payload)
        self._commit.submit(write)
        try:
            await write.future
        except asyncio.CancelledError:
            write.is_abandoned = True
            raise
        if write.problem is not None:
            await context.abort(_code_of(write.problem), str(write.problem))
        return _ACCEPTED

    async def _check_cluster(self, cluster_id: int, context: Any, code: Any) -> None:
        if cluster_id != self._cluster_id:
            # The original's words, which operators search for.
            text = f"cluster ID are mismatch, {cluster_id} vs {self._cluster_id}"
            await self._refuse(context, "wrong cluster id", code, text)

    async def _refuse(self, context: Any, reason: str, code: Any, text: str) -> None:
        self._counts.refused[reason] += 1
        _log.warning("a request is refused", reason=reason, why=text)
        await context.abort(code, text)

    # --- PullBinlogs ------------------------------------------------------------------------

    async def _pull(self, request: bytes, context: Any) -> None:
        try:
            cluster_id, after_ts = read_pull_binlogs_request(request)
        except EventMalformed as problem:
            await self._refuse(context, "malformed request", grpc.StatusCode.INVALID_ARGUMENT, str(problem))
            raise
        await self._check_cluster(cluster_id, context, grpc.StatusCode.FAILED_PRECONDITION)
        if self._compress:
            context.set_compression(grpc.Compression.Gzip)
        while not self._is_ending:
            releases = self._releases
            try:
                binlogs = await self._loop.run_in_executor(self._readers, self._read, after_ts)
            except PenstockError as problem:
                _log.error("a Drainer cannot be served", after_ts=after_ts, why=str(problem))
                await context.abort(_code_of(problem), str(problem))
                raise
            for commit_ts, payload in binlogs:
                await context.write(pull_binlogs_response(commit_ts, payload))
                after_ts = commit_ts
            if not binlogs and releases == self._releases:
                waiter = self._loop.create_future()
                self._release_waiters.add(waiter)
                try:
                    await waiter
                finally:
                    self._release_waiters.discard(waiter)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the Pump is ending")

    def _read(self, after_ts: int) -> list[tuple[int, bytes]]:
        return list(self._commit.store.pull(after_ts, PUMP_PULL_COUNT, PUMP_PULL_BYTES))


def _wake(futures: "list[asyncio.Future[None]]") -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _code_of(problem: PenstockError) -> Any:
    """Return the status code by which a client knows whether to try another Pump.

    RESOURCE_EXHAUSTED is never among them: TiDB's client fails the transaction at once.
    """
    if isinstance(problem, PositionPurged):
        return grpc.StatusCode.OUT_OF_RANGE
    if isinstance(problem, BinlogInconsistent):
        return grpc.StatusCode.FAILED_PRECONDITION
    if isinstance(problem, EventMalformed):
        return grpc.StatusCode.INVALID_ARGUMENT
    if isinstance(problem, StreamError):
        return grpc.StatusCode.DATA_LOSS
    return grpc.StatusCode.UNAVAILABLE
