# SPDX-License-Identifier: Apache-2.0
"""Runs a merge over open logs: reads the members, orders and stores their transactions, and records the
progress.
"""

import time
from collections.abc import Sequence

from penstock.errors import EventUnsupported, PenstockError
from penstock.limits import CAPTURE_CHUNK_BYTES
from penstock.logstore.log import Log
from penstock.merge.commit_order import CommitOrder
from penstock.merge.joined_log import JoinedLog, MergeState, encode_origin
from penstock.merge.member import Member, MemberTransaction


class Joining:
    """Appends the members' transactions to a log, in commit order. Used by one thread."""

    def __init__(self, log: Log, joined: JoinedLog, members: Sequence[Member], state: MergeState) -> None:
        """`state` holds each member's position, at which reading starts."""
        self._log = log
        self._joined = joined
        self._state = state
        self._members = {member.name: member for member in members}
        self._order: CommitOrder[MemberTransaction] = CommitOrder(list(self._members))
        self._saved = dict(state.positions)
        self._now_us = 0

    def step(self) -> bool:
        """Read the members, and store the transactions that are due; return whether any were stored.

        Raises an error for a transaction that cannot be merged, and propagates errors from reading and
        writing the logs.
        """
        for name, member in self._members.items():
            if not self._order.has_queued(name):
                now_us = self._read_clock()
                for transaction in member.read():
                    self._order.offer(name, transaction.time_us, transaction, now_us)
        is_stored, is_moved = self._store_due(), False
        for name in self._order.held_back_by():
            member = self._members[name]
            if is_stored and member.problem is not None:
                # While there is other work, do not wait for a server that does not answer.
                continue
            watermark_us = member.watermark_us()
            if watermark_us is not None:
                self._order.advance(name, min(watermark_us, self._read_clock()))
                is_moved = True
        return (is_moved and self._store_due()) or is_stored

    def held_back_by(self) -> list[Member]:
        """Return the members that the next transaction waits for."""
        return [self._members[name] for name in self._order.held_back_by()]

    def is_caught_up(self) -> bool:
        """Return whether everything that the servers have sent is stored."""
        return all(
            member.is_caught_up() and not self._order.has_queued(name)
            for name, member in self._members.items()
        )

    def make_durable(self) -> None:
        """Make the log durable, and record the position of each member. Raises LogFull, DiskFailed."""
        if self._state.positions == self._saved:
            return
        self._log.sync()
        self._state.log_end = self._log.visible
        self._state.write(self._log)
        self._saved = dict(self._state.positions)

    def hold(self, merge: str, seconds: float | None) -> None:
        """Keep the members' logs from deleting data that is not durable in this log. Raises QuotaReached,
        LogFull, DiskFailed.
        """
        if seconds is not None:
            for name, member in self._members.items():
                member.hold(merge, self._saved[name], seconds)

    def close(self) -> None:
        """Close the connections to the members' servers."""
        for member in self._members.values():
            member.close()

    # --- Inside -----------------------------------------------------------------------------

    def _read_clock(self) -> int:
        """Return this host's time. If the clock was set back, reduce all later times in the commit order to
        this time.
        """
        now_us, before_us = time.time_ns() // 1000, self._now_us
        self._now_us = now_us
        if now_us < before_us:
            self._order.limit(now_us)
        return now_us

    def _store_due(self) -> bool:
        """Store up to about a chunk of transactions that are due; return whether there were any."""
        added: dict[str, MemberTransaction] = {}
        added_bytes = 0
        try:
            for name, transaction in self._order.take():
                self._add(self._members[name], transaction)
                added[name] = transaction
                added_bytes += transaction.end - transaction.start
                if added_bytes >= CAPTURE_CHUNK_BYTES:
                    break
        finally:
            # If a transaction cannot be merged, the transactions before it are still stored.
            self._joined.flush()
            for name, transaction in added.items():
                self._state.positions[name] = transaction.end_position
        return bool(added)

    def _add(self, member: Member, transaction: MemberTransaction) -> None:
        self._check_source(member, transaction)
        origin = encode_origin(member.name, transaction.end_position)
        try:
            mover = member.mover(transaction)
            self._joined.add(origin, member.events(transaction), mover, transaction.time_us)
        except PenstockError as problem:
            problem.position = (
                problem.position or f"{member.name}, transaction {transaction.file}:{transaction.start}"
            )
            raise

    def _check_source(self, member: Member, transaction: MemberTransaction) -> None:
        """Raise EventUnsupported for a GTID that another member may have given to another transaction."""
        source = transaction.source
        if not source:
            return
        owner = self._state.sources.setdefault(source, member.name)
        if owner != member.name:
            raise EventUnsupported(
                f"{member.name} and {owner} both log transactions of the GTID source {source}",
                position=f"{member.name}, {transaction.file}:{transaction.start}",
                hint="Name each server once, and none that replicates from another member; on MariaDB set"
                " gtid_domain_id to another number on each server, then begin the merge",
            )
