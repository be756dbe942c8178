# SPDX-License-Identifier: Apache-2.0
"""The order of the transactions of several servers, without logs or clocks.

Each member offers its transactions in the order of its log. A transaction is taken once no other member can
offer an earlier one, which is known when every other member has offered a later transaction or reported a
later watermark.

    db1   3 ── 7 ── 12             watermark 12
    db2   4 ── 9                   watermark 9       taken: 3, 4, 7, 9; held back by db2: 12

A member's times never go backward: a transaction with a time before the member's watermark gets the watermark
as its time. So if the servers' clocks disagree, nothing is delayed or lost, and only the order between
servers is affected.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

EntryT = TypeVar("EntryT")


class CommitOrder(Generic[EntryT]):
    """Orders the transactions of all members by time, then by member, then by the member's own order. Not
    thread-safe.

    Times are in microseconds since 1970, UTC.
    """

    def __init__(self, members: Sequence[str]) -> None:
        self._members = tuple(members)
        self._queues: dict[str, deque[tuple[int, EntryT]]] = {name: deque() for name in self._members}
        self._watermarks = dict.fromkeys(self._members, 0)

    def offer(self, member: str, time_us: int, entry: EntryT, now_us: int) -> None:
        """Add the next transaction of a member. A time after `now_us`, from a clock that is ahead, counts as
        `now_us`.
        """
        time_us = max(self._watermarks[member], min(time_us, now_us))
        self._watermarks[member] = time_us
        self._queues[member].append((time_us, entry))

    def advance(self, member: str, time_us: int) -> None:
        """Record that a member has offered everything that it committed before a time."""
        self._watermarks[member] = max(self._watermarks[member], time_us)

    def limit(self, now_us: int) -> None:
        """Reduce every time that is later than `now_us`, because this host's clock was set back."""
        self._watermarks = {member: min(time_us, now_us) for member, time_us in self._watermarks.items()}
        for member, queue in self._queues.items():
            self._queues[member] = deque((min(time_us, now_us), entry) for time_us, entry in queue)

    def has_queued(self, member: str) -> bool:
        """Return whether the member has queued transactions."""
        return bool(self._queues[member])

    def take(self) -> Iterator[tuple[str, EntryT]]:
        """Remove and yield the transactions that are due, each with its member."""
        while (due := self._next()) is not None and not self._holding_back(*due):
            member = self._members[due[1]]
            yield member, self._queues[member].popleft()[1]

    def held_back_by(self) -> list[str]:
        """Return the members that the next transaction waits for; [] if none waits."""
        due = self._next()
        return [] if due is None else self._holding_back(*due)

    def _next(self) -> tuple[int, int] | None:
        """Return the time of the earliest queued transaction, and the number of its member."""
        heads = (
            (self._queues[member][0][0], number)
            for number, member in enumerate(self._members)
            if self._queues[member]
        )
        return min(heads, default=None)

    def _holding_back(self, time_us: int, number: int) -> list[str]:
        return [
            member
            for other, member in enumerate(self._members)
            if not self._queues[member]
            and other != number
            and (self._watermarks[member], other) < (time_us, number)
        ]
