# SPDX-License-Identifier: Apache-2.0
"""The gRPC service of a Pump: WriteBinlog for TiDB's pump client, PullBinlogs for Drainers.

It runs in one event loop. Writes that arrive together are queued for the group commit together, and answered
together. Reading the log for a Drainer runs in a thread.
"""

import asyncio
import gzip
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from penstock.tidb.grpc_server import CallRefused, GrpcCall, GrpcPeer
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

    call: GrpcCall

    def abandon(self) -> None:
        """Record that the sender gave up."""
        self.is_abandoned = True


class PumpService:
    """Answers WriteBinlog and PullBinlogs. Created in the event loop that serves them."""

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

    def receive(self, calls: Sequence[GrpcCall]) -> None:
        """Begin to answer calls that arrived together."""
        writes = []
        for call in calls:
            try:
                if call.method == WRITE_BINLOG:
                    writes.append(self._accept(call))
                elif call.method == PULL_BINLOGS:
                    call.run(self._pull(call))
                else:
                    raise CallRefused(grpc.StatusCode.UNIMPLEMENTED, f"a Pump has no method {call.method}")
            except CallRefused as refusal:
                call.refuse(refusal.code, str(refusal))
        if writes:
            self._commit.submit(writes)

    def end(self) -> None:
        """End the calls of Drainers, which connect again later or elsewhere."""
        self._is_ending = True
        self._wake_drainers()
        self._readers.shutdown(wait=False, cancel_futures=True)

    # --- Called by the storing thread -------------------------------------------------------

    def finish(self, writes: list[Write]) -> None:
        """Answer the senders of a batch."""
        self._call_soon(self._answer_senders, [each for each in writes if isinstance(each, _WaitingWrite)])

    def _answer_senders(self, writes: list[_WaitingWrite]) -> None:
        self._waiting_bytes -= sum(len(each.payload) for each in writes)
        accepted: defaultdict[GrpcPeer, list[int]] = defaultdict(list)
        for write in writes:
            if write.problem is None:
                accepted[write.call.peer].append(write.call.stream)
            else:
                write.call.refuse(_code_of(write.problem), str(write.problem))
        for peer, streams in accepted.items():
            peer.answer(streams, _ACCEPTED)

    def released(self) -> None:
        """Wake the Drainers that wait for more transactions."""
        self._call_soon(self._wake_drainers)

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        # The loop is already closed if a slow disk outlasted the port's end. Then nobody waits for an answer.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _wake_drainers(self) -> None:
        self._releases += 1
        waiters, self._release_waiters = self._release_waiters, set()
        _wake(list(waiters))

    # --- WriteBinlog ------------------------------------------------------------------------

    def _accept(self, call: GrpcCall) -> _WaitingWrite:
        """Return the write of a call, to be queued. Raises CallRefused."""
        try:
            cluster_id, payload = read_write_binlog_request(call.message())
        except EventMalformed as problem:
            raise self._refusal(
                "malformed request", grpc.StatusCode.INVALID_ARGUMENT, str(problem)
            ) from problem
        # With this status, TiDB's client tries another Pump, as it does with the original Pump.
        self._check_cluster(cluster_id, grpc.StatusCode.UNKNOWN)
        if self._waiting_bytes and self._waiting_bytes + len(payload) > PUMP_WAITING_BYTES_MAX:
            text = f"{self._waiting_bytes} bytes of binlogs wait for the disk"
            raise self._refusal("overloaded", grpc.StatusCode.UNAVAILABLE, text)
        # Count the bytes of the write until it is stored, even if its sender gives up.
        self._waiting_bytes += len(payload)
        write = _WaitingWrite(payload)
        write.call, call.on_cancel = call, write.abandon
        return write

    def _check_cluster(self, cluster_id: int, code: grpc.StatusCode) -> None:
        if cluster_id != self._cluster_id:
            # This is the message of the original Pump, which operators search for.
            text = f"cluster ID are mismatch, {cluster_id} vs {self._cluster_id}"
            raise self._refusal("wrong cluster id", code, text)

    def _refusal(self, reason: str, code: grpc.StatusCode, text: str) -> CallRefused:
        self._counts.refused[reason] += 1
        _log.warning("a request is refused", reason=reason, why=text)
        return CallRefused(code, text)

    # --- PullBinlogs ------------------------------------------------------------------------

    async def _pull(self, call: GrpcCall) -> None:
        try:
            cluster_id, after_ts = read_pull_binlogs_request(call.message())
        except EventMalformed as problem:
            raise self._refusal(
                "malformed request", grpc.StatusCode.INVALID_ARGUMENT, str(problem)
            ) from problem
        self._check_cluster(cluster_id, grpc.StatusCode.FAILED_PRECONDITION)
        is_compressed = self._compress and call.accepts_gzip
        while not self._is_ending:
            releases = self._releases
            try:
                after_ts, responses = await self._loop.run_in_executor(
                    self._readers, self._read, after_ts, is_compressed
                )
            except PenstockError as problem:
                _log.error("a Drainer cannot be served", after_ts=after_ts, why=str(problem))
                raise CallRefused(_code_of(problem), str(problem)) from problem
            if responses:
                await call.send(responses, gzip=is_compressed)
            elif releases == self._releases:
                waiter = self._loop.create_future()
                self._release_waiters.add(waiter)
                try:
                    await waiter
                finally:
                    self._release_waiters.discard(waiter)
        raise CallRefused(grpc.StatusCode.UNAVAILABLE, "the Pump is ending")

    def _read(self, after_ts: int, is_compressed: bool) -> tuple[int, list[bytes]]:
        """Return the next responses, and the commit timestamp after which to continue."""
        responses = []
        for commit_ts, payload in self._commit.store.pull(after_ts, PUMP_PULL_COUNT, PUMP_PULL_BYTES):
            response = pull_binlogs_response(commit_ts, payload)
            responses.append(gzip.compress(response, mtime=0) if is_compressed else response)
            after_ts = commit_ts
        return after_ts, responses


def _wake(futures: "list[asyncio.Future[None]]") -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def _code_of(problem: PenstockError) -> Any:
    """Return the status code that tells a client whether to try another Pump.

    It is never RESOURCE_EXHAUSTED, with which TiDB's client fails the transaction at once.
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
