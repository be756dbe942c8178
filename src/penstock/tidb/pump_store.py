# SPDX-License-Identifier: Apache-2.0
"""The data of a Pump: payloads in its log, open transactions in memory, released ones in the commit index.

    payloads ─▶ judged ─▶ log (fsync) ─▶ matching ─▶ commit index ─▶ PullBinlogs

The state in memory is the result of replaying the log from the last index entry, so a crash between any two
steps loses nothing that was acknowledged.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import structlog

from penstock._native import tidb_matched, tidb_prewrite_key
from penstock.errors import BinlogInconsistent, EventMalformed, LogFull, PenstockError, ServerBusy
from penstock.logstore.disk import Disk
from penstock.settings.daemon import LogSettings
from penstock.tidb.matching import Matching, OpenPrewrite, Verdict
from penstock.tidb.messages import BinlogHead, BinlogKind, encode_binlog
from penstock.tidb.pump_log import PumpLog
from penstock.tidb.release_index import Location, ReleaseEntry, ReleaseIndex

_log = structlog.get_logger(__name__)

_DIGEST_BYTES = 16
_INDEX_FOLDER = "releases"


@dataclass
class Write:
    """A binlog to store. After `PumpStore.write`, `problem` is the reason why the binlog was refused. None
    means that the binlog is durable.
    """

    payload: bytes | memoryview
    # Whether the outcome comes from TiKV or an operator. It is stored while the prewrite is open, even if
    # later transactions were released.
    is_decision: bool = False
    # Whether an operator made the decision. An operator's commit is refused if it comes too late. A late
    # commit from TiKV means that another Pump has the transaction.
    by_operator: bool = False
    # Whether the sender gave up before the binlog was stored.
    is_abandoned: bool = False
    problem: PenstockError | None = None


@dataclass
class StoreCounts:
    """Counts since the store was opened. `refused` counts refused binlogs by reason; a refused binlog was not
    acknowledged.
    """

    stored: int = 0
    repeated: int = 0
    probes: int = 0
    released: int = 0
    bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Judged:
    """A binlog that has to be stored."""

    write: Write
    head: BinlogHead
    digest: bytes


class PumpStore:
    """The state of one Pump. Only one thread writes. `pull` and the properties may be used by any thread."""

    def __init__(
        self,
        folder: Path,
        settings: LogSettings,
        cluster_id: int,
        *,
        counts: StoreCounts | None = None,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log and the index, and replay what the index does not have.

        Raises ServerChanged for the log of another cluster, and propagates errors from `Log.open`.
        """
        self.counts = counts or StoreCounts()
        # Why prewrites are refused, None while they are accepted. Outcomes are always accepted.
        self.refuses_prewrites: str | None = None
        # Binlogs of a batch for which the disk had no room. They are stored before anything else.
        self._staged: list[tuple[_Judged, Location]] = []
        # Released transactions that are not in the index yet because the disk was full.
        self._unindexed: list[ReleaseEntry] = []
        self.log = PumpLog(folder, settings, cluster_id, disk=disk, clock=clock)
        try:
            self.index = ReleaseIndex(self.log.log.disk, folder / _INDEX_FOLDER)
            self._replay()
        except BaseException:
            self.log.abandon()
            raise

    def _replay(self) -> None:
        last = self.index.last
        if last is not None and not self.log.has_all_after(last.replay_start):
            # Clear the index, so that Drainers that have not pulled the lost entries learn that transactions
            # are missing.
            _log.error(
                "the index of released transactions lost entries that the trimmed log no longer has",
                after=last.commit_ts,
                folder=str(self.log.log.folder),
            )
            self.index.clear()
            last = None
        self.matching: Matching[Location] = Matching(last.commit_ts if last else 0, self.index.contains)
        start = last.replay_start if last is not None else Location(0, 0)
        for payload, location in self.log.replay(max(start, self.log.earliest)):
            head = BinlogHead.decode(payload)
            self.matching.add(head, _digest_of(payload), location)
        self.matching.late = 0
        self._release()

    # --- State ------------------------------------------------------------------------------

    @property
    def released_ts(self) -> int:
        """The commit timestamp up to which everything was released and can be pulled."""
        last = self.index.last
        return last.commit_ts if last is not None else 0

    @property
    def has_unindexed(self) -> bool:
        """Whether released transactions wait for space in the index."""
        return bool(self._unindexed)

    @property
    def replay_start(self) -> Location:
        """Where a replay would start: retention must keep the log from here on."""
        if self._unindexed:
            last = self.index.last
            return last.replay_start if last is not None else self.log.earliest
        return self.matching.replay_start() or self.log.end

    # --- Writing ----------------------------------------------------------------------------

    def write(self, writes: Sequence[Write]) -> None:
        """Store a batch of binlogs durably, and release the transactions that can be released.

        A binlog that is refused has its `problem` set, and the others are stored. Raises DiskFailed, after
        which nothing of the batch may be acknowledged and the store has to be opened again.
        """
        judged = self._judge(writes)
        if not judged and not self._staged:
            return
        try:
            self._finish_staged()
            self._check_space()
            locations = self.log.stage([each.write.payload for each in judged])
            self._staged = list(zip(judged, locations, strict=True))
            self._finish_staged()
        except LogFull as problem:
            for each in judged:
                self._refuse(each.write, problem, "disk full")
            return
        self.counts.stored += len(judged)
        self.counts.bytes += sum(len(each.write.payload) for each in judged)

    def add_fake(self, timestamp: int) -> None:
        """Add a timestamp of the cluster, so that the Pump advances to it once no open prewrite can precede
        it.
        """
        self.matching.add_fake(timestamp)
        self._release()

    def decision(self, start_ts: int, commit_ts: int, *, by_operator: bool = False) -> Write:
        """Return the binlog that closes an open prewrite: a commit, or a rollback if `commit_ts` is 0."""
        kind = BinlogKind.COMMIT if commit_ts else BinlogKind.ROLLBACK
        return Write(encode_binlog(kind, start_ts, commit_ts), is_decision=True, by_operator=by_operator)

    def _judge(self, writes: Sequence[Write]) -> list[_Judged]:
        """Return the binlogs that have to be stored. Repeated binlogs and probes need not be stored and are
        finished at once. Refused binlogs have a `problem`.
        """
        judged: list[_Judged] = []
        # Prewrites and outcomes of this batch, which matching does not know yet.
        seen: set[tuple[BinlogKind, int]] = set()
        for write in writes:
            try:
                each = self._judge_one(write)
            except BinlogInconsistent as problem:
                self._refuse(write, problem, problem.reason)
                continue
            except EventMalformed as problem:
                self._refuse(write, problem, "malformed payload")
                continue
            except ServerBusy as problem:
                self._refuse(write, problem, "not online")
                continue
            if each is None:
                continue
            key = each.head.kind, each.head.start_ts
            if key in seen:
                twice = ServerBusy(f"the transaction {each.head.start_ts} is written twice at the same time")
                self._refuse(write, twice, "concurrent repetition")
                continue
            seen.add(key)
            judged.append(each)
        return judged

    def _judge_one(self, write: Write) -> _Judged | None:
        if not write.payload:
            self.counts.probes += 1
            return None
        head = BinlogHead.decode(write.payload)
        digest = _digest_of(write.payload) if head.kind is BinlogKind.PREWRITE else b""
        if write.is_decision:
            is_open = self.matching.open_prewrite(head.start_ts) is not None
            if is_open and write.by_operator:
                self.matching.check(head, digest)
            return _Judged(write, head, digest) if is_open else None
        verdict = self.matching.check(head, digest)
        if verdict is not Verdict.STORE:
            self.counts.repeated += verdict is Verdict.REPEATED
            self.counts.probes += verdict is Verdict.EMPTY
            return None
        if head.kind is BinlogKind.PREWRITE and self.refuses_prewrites is not None:
            raise ServerBusy(f"no online: {self.refuses_prewrites}")
        return _Judged(write, head, digest)

    def _finish_staged(self) -> None:
        """Write the staged binlogs, make them durable, and match them. Raises LogFull, DiskFailed."""
        if not self._staged:
            return
        self.log.store()
        self.log.sync()
        late = self.matching.late
        for each, location in self._staged:
            self.matching.add(each.head, each.digest, location)
        if self.matching.late > late:
            _log.warning(
                "transactions were committed before what is released here: another Pump has them",
                count=self.matching.late - late,
                start_ts=[each.head.start_ts for each, _ in self._staged if each.write.is_decision],
            )
        self._staged = []
        self._release()

    def _check_space(self) -> None:
        why = self.log.log.full_because()
        if why is not None:
            raise LogFull(why, hint="Free space, or lower log.retention")

    def _refuse(self, write: Write, problem: PenstockError, reason: str) -> None:
        write.problem = problem
        self.counts.refused[reason] += 1
        _log.warning("a binlog is refused", reason=str(reason), why=str(problem))

    def _release(self) -> None:
        end = self.log.end
        self._unindexed += [
            ReleaseEntry(entry.commit_ts, entry.start_ts, entry.location, entry.replay_start or end)
            for entry in self.matching.release()
        ]
        if not self._unindexed:
            return
        first = self._unindexed[0].commit_ts
        # Without its index, a trimmed log does not show what was released before, so the floor is not 0.
        floor = 0 if self.log.is_whole else first - 1
        try:
            self.index.append(self._unindexed, floor)
        except LogFull as problem:
            _log.warning("released transactions wait for space", why=str(problem), count=len(self._unindexed))
            return
        self.counts.released += len(self._unindexed)
        self._unindexed = []

    # --- Reading ----------------------------------------------------------------------------

    def pull(self, after_ts: int, count: int, bytes_max: int) -> Iterator[tuple[int, bytes]]:
        """Yield the commit timestamp and the binlog of released transactions, in commit order.

        Yields at most `count` transactions, and stops once they have `bytes_max` bytes. Raises PositionPurged
        if some of these transactions are no longer kept, and an error for a damaged log.
        """
        size = 0
        for entry in self.index.after(after_ts, count):
            if entry.location is None:
                payload = encode_binlog(BinlogKind.ROLLBACK, entry.start_ts, entry.commit_ts)
            else:
                commit = encode_binlog(BinlogKind.COMMIT, entry.start_ts, entry.commit_ts)
                payload = tidb_matched(self.log.read(entry.location), commit)
            yield entry.commit_ts, payload
            size += len(payload)
            if size >= bytes_max:
                return

    def prewrite_key(self, prewrite: OpenPrewrite[Location]) -> bytes:
        """Return the key that identifies a transaction in TiKV. Raises an error for a damaged log."""
        return tidb_prewrite_key(self.log.read(prewrite.location))

    # --- Closing ----------------------------------------------------------------------------

    def close(self) -> None:
        """Make everything durable and close the files. Raises DiskFailed, LogFull."""
        self.index.sync()
        self.index.close()
        self.log.close()

    def abandon(self) -> None:
        """Release the files as they are. The next open recovers them."""
        self.index.close()
        self.log.abandon()


def _digest_of(payload: bytes | memoryview) -> bytes:
    return blake2b(payload, digest_size=_DIGEST_BYTES).digest()
