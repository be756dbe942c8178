# SPDX-License-Identifier: Apache-2.0
"""Pulls transactions from Pumps, with one thread per Pump and a queue that merges them.

    Pump 1 ──PullBinlogs──▶ PumpReader ─┐
    Pump 2 ──PullBinlogs──▶ PumpReader ─┴─▶ MergeQueue ──▶ the drainer's thread

While the queue has no room for a Pump's transactions, its reader stops reading. gRPC's flow control then
makes the Pump stop sending. The Pump keeps its binlogs for days.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import structlog

from penstock.errors import (
    ConnectionLost,
    EventMalformed,
    LogDamaged,
    PenstockError,
    PositionPurged,
    ServerChanged,
    TransactionLate,
    TransientError,
)
from penstock.retry import Backoff, Retry
from penstock.tidb.channels import ClusterTls, open_channel, translate_rpc_error
from penstock.tidb.merge import Merge, PulledTransaction
from penstock.tidb.messages import (
    PULL_BINLOGS,
    BinlogHead,
    BinlogKind,
    pull_binlogs_request,
    read_pull_binlogs_response,
)

_log = structlog.get_logger(__name__)

_BACKOFF = Backoff(first=0.1, longest=3.0)
# An unreachable Pump is reported at its first failures, and then about once a minute.
_REPORTED_FAILURES = 3
_REPORTED_EVERY = 40

# Permanent refusals of a Pump, by the status code of its answer, with hints.
_REFUSALS: Mapping[grpc.StatusCode, tuple[type[PenstockError], str]] = {
    grpc.StatusCode.OUT_OF_RANGE: (
        PositionPurged,
        "Load the tables again into a new log; to keep more, raise log.retention of the Pump",
    ),
    grpc.StatusCode.DATA_LOSS: (LogDamaged, "Check the Pump's disk, and run there: penstock log verify"),
    grpc.StatusCode.FAILED_PRECONDITION: (
        ServerChanged,
        "Correct the Pump's entry in the registry: another cluster's Pump is at its address",
    ),
}


class MergeQueue:
    """A merge that several readers fill and one thread drains. Thread-safe."""

    def __init__(
        self,
        position: int,
        bytes_max: int,
        record_late: Callable[[TransactionLate], None] = lambda late: None,
    ) -> None:
        """`record_late` records durably that a transaction is missing. It may raise LogFull, DiskFailed."""
        self._merge = Merge(position)
        self._bytes_max = bytes_max
        self._record_late = record_late
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        # The first transaction that came too late, even if another error or a stop ended the merge.
        self.late: TransactionLate | None = None
        self._closed = False

    # --- Members ----------------------------------------------------------------------------

    def join(self, pump: str, after_ts: int | None = None) -> int:
        """Add a Pump; see `Merge.join`."""
        with self._changed:
            return self._merge.join(pump, after_ts)

    def leave(self, pump: str) -> None:
        """Remove a Pump; see `Merge.leave`."""
        with self._changed:
            self._merge.leave(pump)
            self._changed.notify_all()

    def reached(self, pump: str) -> int | None:
        """Return the commit timestamp up to which a Pump has sent everything; None if it is not a member."""
        with self._changed:
            return self._merge.reached(pump) if pump in self._merge.members else None

    def positions(self) -> dict[str, int]:
        """Return the commit timestamp up to which each Pump has sent everything."""
        with self._changed:
            return {pump: self._merge.reached(pump) for pump in self._merge.members}

    def position(self) -> int:
        """Return the commit timestamp up to which every transaction was taken."""
        with self._changed:
            return self._merge.position

    def holding_back(self) -> list[str]:
        """Return the Pumps that transactions of other Pumps wait for."""
        with self._changed:
            return self._merge.holding_back()

    def forget_before(self, commit_ts: int) -> None:
        """Forget transactions taken before; see `Merge.forget_before`."""
        with self._changed:
            self._merge.forget_before(commit_ts)

    # --- Readers ----------------------------------------------------------------------------

    def offer(self, pump: str, transaction: PulledTransaction) -> bool:
        """Add a Pump's next transaction, once there is room for it; return False once the Pump has left.

        Raises TransactionLate, and propagates errors from recording the transaction.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended(pump) or self._has_room(pump))
            if self._has_ended(pump):
                return False
            try:
                self._merge.offer(pump, transaction)
            except TransactionLate as problem:
                self.late = self.late or problem
                # Record the late transaction before anything else, because no Pump sends it again.
                self._record_late(self.late)
                raise
            self._changed.notify_all()
            return True

    def advance(self, pump: str, commit_ts: int) -> bool:
        """Record that a Pump has nothing more up to a commit timestamp; return False once it has left."""
        with self._changed:
            if self._has_ended(pump):
                return False
            self._merge.advance(pump, commit_ts)
            self._changed.notify_all()
            return True

    def fail(self, problem: Exception) -> None:
        """Raise an error or a defect in the draining thread, after all earlier transactions were taken."""
        with self._changed:
            self._failure = self._failure or problem
            self._changed.notify_all()

    def _has_ended(self, pump: str) -> bool:
        return self._closed or pump not in self._merge.members

    def _has_room(self, pump: str) -> bool:
        return self._merge.has_room(pump, self._bytes_max)

    # --- The draining thread ----------------------------------------------------------------

    def take(self, bytes_max: int, seconds: float) -> tuple[list[tuple[PulledTransaction, ...]], int]:
        """Wait for transactions; return those that are due, and the position after them.

        Each entry has the transactions of one commit timestamp. At most `bytes_max` are returned, but at
        least one entry if one is due within `seconds`. Raises the error of a reader.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._failure is not None or self._merge.has_due(), seconds
            )
            taken, taken_bytes = [], 0
            while taken_bytes < bytes_max and (transactions := self._merge.take()):
                taken.append(transactions)
                taken_bytes += sum(len(transaction.payload) for transaction in transactions)
            if not taken and self._failure is not None:
                raise self._failure
            if taken:
                self._changed.notify_all()
            return taken, self._merge.position

    def close(self) -> None:
        """Wake all threads that wait; nothing can be added any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PumpReader:
    """Reads one Pump until it is stopped. It reconnects whenever the connection is lost."""

    def __init__(
        self,
        pump: str,
        address: str,
        queue: MergeQueue,
        cluster_id: int,
        tls: ClusterTls | None,
        *,
        compress: bool,
        heard: Callable[[], None],
    ) -> None:
        self.pump = pump
        self.address = address
        # Why the Pump cannot be read now.
        self.problem: str | None = None
        # When the Pump last sent something over the current stream; None if it has not.
        self._sent_at: float | None = None
        self._queue = queue
        self._cluster_id = cluster_id
        self._tls = tls
        self._compress = compress
        self._heard = heard
        self._stopping = threading.Event()
        self._stream: Any = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"pump-{pump}", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading; `join` waits for the end."""
        self._stopping.set()
        with self._lock:
            if self._stream is not None:
                self._stream.cancel()

    def silent_seconds(self) -> float | None:
        """Return how many seconds ago the Pump sent something; None if it has sent nothing over the current
        stream.
        """
        sent_at = self._sent_at
        return None if sent_at is None else time.monotonic() - sent_at

    def join(self) -> None:
        """Wait for the end of the thread."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        retry = Retry("a pump is read again", backoff=_BACKOFF, stop=self._stopping, quiet_seconds=3600.0)
        while not self._stopping.is_set():
            try:
                self._read(retry)
            except TransientError as problem:
                if self._stopping.is_set():
                    return
                self.problem = problem.message
                self._wait(retry, problem)
            except PenstockError as problem:
                if not self._stopping.is_set():
                    self.problem = problem.message
                    self._queue.fail(problem)
                return
            except Exception as defect:
                # The end of the thread prints the traceback.
                self.problem = repr(defect)
                self._queue.fail(defect)
                raise

    def _wait(self, retry: Retry, problem: TransientError) -> None:
        if retry.failures < _REPORTED_FAILURES or retry.failures % _REPORTED_EVERY == 0:
            _log.warning("a pump cannot be read", pump=self.pump, why=problem.message)
        retry.wait(problem)

    def _read(self, retry: Retry) -> None:
        """Read one stream to its end. Raises what `_translate_refusal` returns, and propagates errors from
        the merge.
        """
        reached = self._queue.reached(self.pump)
        if reached is None:
            self._stopping.set()
            return
        channel = open_channel(self.address, self._tls)
        try:
            request = pull_binlogs_request(self._cluster_id, reached)
            compression = grpc.Compression.Gzip if self._compress else None
            with self._lock:
                self._stream = channel.unary_stream(PULL_BINLOGS)(request, compression=compression)
                if self._stopping.is_set():
                    self._stream.cancel()
            for response in self._stream:
                retry.succeeded()
                self.problem, self._sent_at = None, time.monotonic()
                if not self._take(response):
                    self._stopping.set()
                    return
            raise ConnectionLost(f"{self.address}: the Pump ended its stream")
        except grpc.RpcError as problem:
            raise _translate_refusal(problem, self.address) from problem
        finally:
            self._sent_at = None
            # Closing the channel also cancels the stream.
            channel.close()

    def _take(self, response: bytes) -> bool:
        """Add a binlog to the merge; return False once the Pump has left. Raises EventMalformed."""
        payload = read_pull_binlogs_response(response)
        head = BinlogHead.decode(payload)
        self._heard()
        if head.kind is BinlogKind.COMMIT:
            transaction = PulledTransaction(head.commit_ts, head.start_ts, payload)
            return self._queue.offer(self.pump, transaction)
        if head.is_fake:
            return self._queue.advance(self.pump, head.commit_ts)
        if head.kind is not BinlogKind.ROLLBACK:
            raise EventMalformed(
                f"{self.address} sent a binlog of type {head.kind.name}, which no Pump releases",
                position=str(head.start_ts),
                hint="Check the version of the Pump",
            )
        return self._queue.reached(self.pump) is not None


def _translate_refusal(problem: Any, address: str) -> PenstockError:
    """Return the error of a failed pull: by its status code if the Pump refuses permanently, otherwise like
    any failed call.
    """
    refusal = _REFUSALS.get(problem.code())
    if refusal is None:
        return translate_rpc_error(problem, address, PULL_BINLOGS)
    kind, hint = refusal
    return kind(f"the Pump at {address} refuses: {problem.details()}", hint=hint)
