# SPDX-License-Identifier: Apache-2.0
"""Matches the prewrites of a Pump with their outcomes, and releases transactions in commit order, without
connections or threads.

A TiDB server draws the commit timestamp only after a Pump has acknowledged the prewrite. So the commit
timestamp of every open prewrite, and of every prewrite that arrives later, is above its own start timestamp
and above every commit timestamp drawn before. Therefore a committed transaction is released as soon as its
commit timestamp is below the start timestamps of all open prewrites, because no transaction with a lower
commit timestamp can follow.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from penstock.errors import BinlogInconsistent
from penstock.limits import PUMP_OUTCOMES_MAX
from penstock.tidb.messages import BinlogHead, BinlogKind

# The start timestamp that is used for a fake binlog. No transaction has it.
_FAKE = 0

# Where a prewrite is stored.
Location = TypeVar("Location")


class Verdict(StrEnum):
    """How to handle a binlog that is consistent with the previous binlogs."""

    STORE = "store"
    # The writer sent the binlog again, because the acknowledgement was lost.
    REPEATED = "repeated"
    # A probe, or the rollback of a transaction without a prewrite here.
    EMPTY = "empty"


class Reason(StrEnum):
    """How a binlog contradicts the previous binlogs."""

    NO_PREWRITE = "commit without prewrite"
    TWO_PREWRITES = "two prewrites of one start timestamp"
    TWO_OUTCOMES = "two outcomes of one transaction"
    BACKWARDS = "timestamp goes backwards"
    UNKNOWN_KIND = "unknown kind of binlog"


@dataclass(frozen=True)
class OpenPrewrite(Generic[Location]):
    """A prewrite without an outcome. `digest` identifies its payload."""

    start_ts: int
    digest: bytes
    location: Location


@dataclass(frozen=True)
class Released(Generic[Location]):
    """A released transaction. Transactions are released in commit order.

    `location` is None for a fake binlog, which only shows how far its Pump has advanced. Replaying the log
    from `replay_start` restores the state after this release. None means the end of the log.
    """

    commit_ts: int
    start_ts: int
    location: Location | None
    replay_start: Location | None


@dataclass(frozen=True)
class _Outcome:
    """The outcome of a transaction; `commit_ts` is 0 for a rollback."""

    digest: bytes
    commit_ts: int


class Matching(Generic[Location]):
    """The open prewrites of one Pump, and the committed transactions that are not released yet.

    `check` checks a binlog without changing anything, and `add` adds a binlog that was stored. Both must be
    called in the order of the log. The result depends on this order alone, so that replaying the log produces
    the same releases. Transactions up to `released_ts` have already been released. `was_released` returns
    whether the transaction with a commit and a start timestamp was one of them.
    """

    def __init__(
        self,
        released_ts: int = 0,
        was_released: Callable[[int, int], bool] = lambda commit_ts, start_ts: False,
    ) -> None:
        self.released_ts = released_ts
        self._was_released = was_released
        # The number of transactions that were at or below `released_ts` when it became known that they were
        # committed. Another Pump must have acknowledged them, because their writer obtained the commit
        # timestamp without this Pump's acknowledgement.
        self.late = 0
        self._open: dict[int, OpenPrewrite[Location]] = {}
        self._open_heap: list[int] = []
        self._outcomes: OrderedDict[int, _Outcome] = OrderedDict()
        self._finished: list[tuple[int, int]] = []
        self._fake_waits = False
        # The prewrites of finished transactions and of open ones, in the order of the log.
        self._unreleased: dict[int, Location] = {}

    # --- State ------------------------------------------------------------------------------

    @property
    def open_count(self) -> int:
        """The number of prewrites without an outcome."""
        return len(self._open)

    @property
    def waiting_count(self) -> int:
        """The number of transactions that have an outcome and wait for open prewrites."""
        return len(self._finished)

    def oldest_open(self) -> OpenPrewrite[Location] | None:
        """Return the oldest open prewrite, which holds back later transactions; None if there is none."""
        while self._open_heap and self._open_heap[0] not in self._open:
            heapq.heappop(self._open_heap)
        return self._open[self._open_heap[0]] if self._open_heap else None

    def open_prewrite(self, start_ts: int) -> OpenPrewrite[Location] | None:
        """Return the open prewrite of a transaction; None if it has none."""
        return self._open.get(start_ts)

    def outcome(self, start_ts: int) -> int | None:
        """Return the commit timestamp of a transaction, 0 if it was rolled back, None if it is unknown."""
        outcome = self._outcomes.get(start_ts)
        return None if outcome is None else outcome.commit_ts

    def open_prewrites(self) -> list[OpenPrewrite[Location]]:
        """Return all open prewrites, in the order of the log."""
        return list(self._open.values())

    def replay_start(self) -> Location | None:
        """Return the prewrite at which a replay has to start to reach this state; None means the end of the
        log.
        """
        return next(iter(self._unreleased.values()), None)

    # --- Binlogs ----------------------------------------------------------------------------

    def check(self, head: BinlogHead, digest: bytes) -> Verdict:
        """Judge a binlog from a writer. Raises BinlogInconsistent if it contradicts the previous ones."""
        if head.start_ts == 0 and head.commit_ts == 0:
            return Verdict.EMPTY
        if head.kind is BinlogKind.PREWRITE:
            return self._check_prewrite(head, digest)
        if head.kind is BinlogKind.COMMIT:
            return self._check_commit(head)
        if head.kind is BinlogKind.ROLLBACK:
            return self._check_rollback(head)
        raise _inconsistent(
            Reason.UNKNOWN_KIND,
            f"the binlog of {head.start_ts} has the kind {head.kind.name}, which no TiDB writes",
        )

    def add(self, head: BinlogHead, digest: bytes, location: Location) -> None:
        """Add a stored binlog. Repeated information is ignored."""
        start_ts = head.start_ts
        if head.kind is BinlogKind.PREWRITE:
            if start_ts not in self._open and start_ts not in self._outcomes:
                self._open[start_ts] = OpenPrewrite(start_ts, digest, location)
                heapq.heappush(self._open_heap, start_ts)
                self._unreleased[start_ts] = location
            return
        prewrite = self._open.pop(start_ts, None)
        if prewrite is None:
            return
        commit_ts = head.commit_ts if head.kind is BinlogKind.COMMIT else 0
        self._remember(start_ts, _Outcome(prewrite.digest, commit_ts))
        if commit_ts > self.released_ts:
            heapq.heappush(self._finished, (commit_ts, start_ts))
            return
        del self._unreleased[start_ts]
        self.late += commit_ts > 0 and not self._was_released(commit_ts, start_ts)

    def add_fake(self, timestamp: int) -> None:
        """Add a timestamp of the cluster, which is released like a transaction without content.

        While an earlier timestamp waits for open prewrites, a new one is ignored.
        """
        if timestamp > self.released_ts and not self._fake_waits:
            self._fake_waits = True
            heapq.heappush(self._finished, (timestamp, _FAKE))

    def release(self) -> list[Released[Location]]:
        """Return, in commit order, the transactions that nothing can precede any more."""
        oldest = self.oldest_open()
        released: list[Released[Location]] = []
        while self._finished and (oldest is None or self._finished[0][0] < oldest.start_ts):
            commit_ts, start_ts = heapq.heappop(self._finished)
            location = None
            if start_ts == _FAKE:
                self._fake_waits = False
            else:
                location = self._unreleased.pop(start_ts)
            released.append(Released(commit_ts, start_ts or commit_ts, location, self.replay_start()))
            self.released_ts = commit_ts
        return released

    # --- Judging ----------------------------------------------------------------------------

    def _check_prewrite(self, head: BinlogHead, digest: bytes) -> Verdict:
        start_ts = head.start_ts
        if start_ts <= 0:
            raise _inconsistent(Reason.BACKWARDS, f"a prewrite has the start timestamp {start_ts}")
        earlier = self._open.get(start_ts) or self._outcomes.get(start_ts)
        if earlier is None:
            return Verdict.STORE
        if earlier.digest == digest:
            return Verdict.REPEATED
        raise _inconsistent(
            Reason.TWO_PREWRITES, f"the transaction {start_ts} has another prewrite with other content"
        )

    def _check_commit(self, head: BinlogHead) -> Verdict:
        start_ts, commit_ts = head.start_ts, head.commit_ts
        outcome = self._outcomes.get(start_ts)
        if outcome is not None:
            if outcome.commit_ts == commit_ts:
                return Verdict.REPEATED
            raise _inconsistent(
                Reason.TWO_OUTCOMES,
                f"the transaction {start_ts} commits at {commit_ts}, and was"
                f" {f'committed at {outcome.commit_ts}' if outcome.commit_ts else 'rolled back'} before",
            )
        if start_ts not in self._open:
            if commit_ts <= self.released_ts and self._was_released(commit_ts, start_ts):
                return Verdict.REPEATED
            raise _inconsistent(
                Reason.NO_PREWRITE,
                f"the transaction {start_ts} commits at {commit_ts} without a prewrite here",
            )
        if commit_ts <= max(start_ts, self.released_ts):
            raise _inconsistent(
                Reason.BACKWARDS,
                f"the transaction {start_ts} commits at {commit_ts}, after {self.released_ts} was released",
            )
        return Verdict.STORE

    def _check_rollback(self, head: BinlogHead) -> Verdict:
        outcome = self._outcomes.get(head.start_ts)
        if outcome is not None and outcome.commit_ts:
            raise _inconsistent(
                Reason.TWO_OUTCOMES,
                f"the transaction {head.start_ts} is rolled back after its commit at {outcome.commit_ts}",
            )
        if head.start_ts in self._open:
            return Verdict.STORE
        return Verdict.REPEATED if outcome is not None else Verdict.EMPTY

    def _remember(self, start_ts: int, outcome: _Outcome) -> None:
        self._outcomes[start_ts] = outcome
        # Keep a transaction until it is released, because its prewrite may be repeated.
        while len(self._outcomes) > PUMP_OUTCOMES_MAX and next(iter(self._outcomes)) not in self._unreleased:
            self._outcomes.popitem(last=False)


def _inconsistent(reason: Reason, message: str) -> BinlogInconsistent:
    return BinlogInconsistent(
        message,
        hint="Check that the cluster's timestamps were not reset, and that a Pump has one address",
        reason=reason,
    )
