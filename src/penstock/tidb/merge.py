# SPDX-License-Identifier: Apache-2.0
"""Merges the streams of all Pumps by commit timestamp, without connections or threads.

Each Pump sends its transactions in strictly rising order of commit timestamps. An idle Pump sends a fake
binlog every few seconds. It says that the Pump has no further transaction up to the timestamp of the fake
binlog. So the last timestamp that a Pump sent is a lower bound for everything that it can still send. A
transaction is released once no member can send an earlier one.

    pump 1   3 ── 7 ── 12              reached 12
    pump 2   4 ── 9                    reached 9      released: 3, 4, 7, 9; held: 12
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.errors import TransactionLate


@dataclass(frozen=True)
class PulledTransaction:
    """A transaction as a Pump sent it. `payload` is one binlog with both the commit and the prewrite's
    content.
    """

    commit_ts: int
    start_ts: int
    payload: bytes = field(repr=False)


@dataclass
class _Member:
    """A Pump in the merge. It has sent everything up to `reached`."""

    reached: int


class Merge:
    """Merges the transactions of all Pumps in commit order. Not thread-safe.

    `position` is a commit timestamp. Every transaction up to it has been taken, and no later one. A Pump
    remains a member, and holds back later transactions, until it leaves.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._members: dict[str, _Member] = {}
        self._queue: list[tuple[int, int, str, PulledTransaction]] = []
        self._queued: set[tuple[int, int]] = set()
        # Transactions taken since `_taken_since`, to recognize copies of them.
        self._taken: set[tuple[int, int]] = set()
        self._taken_since = position
        self.buffered_bytes = 0

    # --- Members ----------------------------------------------------------------------------

    @property
    def members(self) -> Sequence[str]:
        """The Pumps in the merge."""
        return tuple(self._members)

    def join(self, pump: str, after_ts: int | None = None) -> int:
        """Add a Pump; return the commit timestamp after which the Pump has to send transactions, by default
        the position.

        A Pump that announces itself joins at the position before it accepts its first transaction. A Pump
        that is discovered later joins at an earlier position, at which it was not yet known to be registered.
        Transactions that it sends from before the current position raise TransactionLate instead of being
        lost.
        """
        member = self._members.get(pump)
        if member is None:
            reached = self.position if after_ts is None else min(after_ts, self.position)
            member = self._members[pump] = _Member(reached)
        return member.reached

    def leave(self, pump: str) -> None:
        """Remove a Pump that will send nothing more. What it has sent stays in the merge."""
        self._members.pop(pump, None)

    def reached(self, pump: str) -> int:
        """Return the commit timestamp up to which a member has sent everything."""
        return self._members[pump].reached

    # --- Input ------------------------------------------------------------------------------

    def offer(self, pump: str, transaction: PulledTransaction) -> None:
        """Add the next transaction of a member. Copies of a transaction that another Pump sent are dropped.

        Raises TransactionLate for a transaction that is not in the order of its Pump, or that belongs before
        the position.
        """
        member = self._members[pump]
        key = transaction.commit_ts, transaction.start_ts
        if key in self._queued or key in self._taken:
            member.reached = max(member.reached, transaction.commit_ts)
            return
        if transaction.commit_ts <= max(member.reached, self._position):
            raise TransactionLate(
                f"the Pump {pump} sent the transaction that started at {transaction.start_ts} after"
                f" everything up to {max(member.reached, self._position)} had been merged",
                position=str(transaction.commit_ts),
                hint="It is missing in the log: compare the tables with penstock verify",
            )
        member.reached = transaction.commit_ts
        heapq.heappush(self._queue, (*key, pump, transaction))
        self._queued.add(key)
        self.buffered_bytes += len(transaction.payload)

    def advance(self, pump: str, commit_ts: int) -> None:
        """Record that a member has nothing more up to a commit timestamp, according to its fake binlog."""
        member = self._members[pump]
        member.reached = max(member.reached, commit_ts)

    # --- Output -----------------------------------------------------------------------------

    @property
    def frontier(self) -> int:
        """The commit timestamp up to which all members have sent everything."""
        if self._members:
            return min(member.reached for member in self._members.values())
        # Without members, nothing more can arrive.
        return max((entry[0] for entry in self._queue), default=self._position)

    @property
    def position(self) -> int:
        """The commit timestamp up to which every transaction was taken."""
        reached = self.frontier
        if self._queue:
            reached = min(reached, self._queue[0][0] - 1)
        self._position = max(self._position, reached)
        return self._position

    def take(self) -> tuple[PulledTransaction, ...]:
        """Return the next transactions of one commit timestamp, ordered by start timestamp; () if none is
        due.

        Usually a commit timestamp has a single transaction.
        """
        if not self._queue or self._queue[0][0] > self.frontier:
            return ()
        commit_ts = self._queue[0][0]
        transactions = []
        while self._queue and self._queue[0][0] == commit_ts:
            transaction = heapq.heappop(self._queue)[-1]
            key = commit_ts, transaction.start_ts
            self._queued.discard(key)
            self._taken.add(key)
            self.buffered_bytes -= len(transaction.payload)
            transactions.append(transaction)
        self._position = max(self._position, commit_ts)
        return tuple(transactions)

    def has_due(self) -> bool:
        """Return whether `take` would return a transaction."""
        return bool(self._queue) and self._queue[0][0] <= self.frontier

    def forget_before(self, commit_ts: int) -> None:
        """Forget transactions taken up to a commit timestamp. No Pump may join before that timestamp any
        more.
        """
        self._taken_since = max(self._taken_since, commit_ts)
        self._taken = {key for key in self._taken if key[0] > self._taken_since}

    # --- Flow -------------------------------------------------------------------------------

    def has_room(self, pump: str, bytes_max: int) -> bool:
        """Return whether to read more from a member while `bytes_max` may be buffered.

        A member that holds back the other members may always be read, unless a transaction is already due.
        """
        if self.buffered_bytes < bytes_max:
            return True
        return not self.has_due() and self._members[pump].reached <= self.frontier

    def holding_back(self) -> list[str]:
        """Return the members that later transactions of other members wait for."""
        if not self._queue or self.has_due():
            return []
        frontier = self.frontier
        return [pump for pump, member in self._members.items() if member.reached <= frontier]
