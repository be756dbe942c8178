# SPDX-License-Identifier: Apache-2.0
"""The two kinds of GTID sets: logged before a position, or executed by a server.

The set of transactions logged before a position is the same on every server. The set that a server reports as
executed corresponds to no position. MySQL adds a transaction to it only after writing the transaction to the
log, so the set may miss transactions at the end of the log. On a server that does not log, the set may
contain transactions that are in no file. The types keep them apart: an `ExecutedSet` is not text, so it
cannot be used in place of a `LoggedSet`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NewType

from penstock._native import GtidSet

# The GTIDs of every transaction before a position, read from the log itself; "" if the log has none.
LoggedSet = NewType("LoggedSet", str)
NO_GTIDS = LoggedSet("")


@dataclass(frozen=True)
class ExecutedSet:
    """The GTIDs that a server reports as executed, regardless of the current contents of its log.

    For MariaDB, `text` is its `gtid_binlog_state`: the last transaction of each domain and server id. `ends`
    contains the same transactions as numbers. Two servers may have written different transactions under the
    same sequence numbers. `applied` contains the last transactions that the server has applied from other
    servers, possibly without logging them (`gtid_slave_pos`). Its log may begin immediately after them.
    """

    text: str
    ends: Mapping[tuple[int, int], int] | None = None
    applied: frozenset[tuple[int, int, int]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.text or self.applied)

    def contains(self, gtid_set: str) -> bool:
        """Return whether the server has executed every transaction of a set."""
        return not self.missing(gtid_set)

    def missing(self, gtid_set: str) -> str:
        """Return the transactions of a set that the server has not executed, "" if it has executed them
        all.
        """
        if self.ends is None:
            return str(GtidSet.parse(gtid_set).subtract(GtidSet.parse(self.text)))
        ends = self.ends
        lacking = (
            gtid
            for gtid in mariadb_gtids(mariadb_position(gtid_set))
            if ends.get(gtid[:2], 0) < gtid[2] and gtid not in self.applied
        )
        return ",".join(f"{domain}-{server}-{number}" for domain, server, number in lacking)

    def shared(self, gtid_set: str) -> str:
        """Return the transactions of a set that the server has executed.

        For MariaDB, the result has the last executed transaction of each domain and server. Within a domain,
        the newest transaction comes last.
        """
        if self.ends is None:
            missing = GtidSet.parse(self.missing(gtid_set))
            return str(GtidSet.parse(gtid_set).subtract(missing))
        applied = {(domain, server): number for domain, server, number in self.applied}
        executed = {
            (domain, server): min(
                number, max(self.ends.get((domain, server), 0), applied.get((domain, server), 0))
            )
            for domain, server, number in mariadb_gtids(gtid_set)
        }
        ordered = sorted((domain, number, server) for (domain, server), number in executed.items() if number)
        return ",".join(f"{domain}-{server}-{number}" for domain, number, server in ordered)

    def unlogged(self, gtid_set: str) -> bool:
        """Return whether a MariaDB server executed a transaction of the set without logging it and has
        continued since.
        """
        ends = self.ends or {}
        return any(
            ends.get((domain, server), 0) < number < last
            for domain, server, number in mariadb_gtids(mariadb_position(gtid_set))
            for of_domain, _, last in self.applied
            if of_domain == domain
        )


@dataclass(frozen=True)
class LostGtids:
    """The transactions in a log that are missing from the server of a later epoch.

    `kept` contains the transactions of the log that this server does have. MariaDB numbers the transactions
    of all servers of a domain in one sequence. A set that ends with a lost transaction would therefore also
    cover the transactions to which the later server gave numbers up to that point.
    """

    lost: LoggedSet
    kept: LoggedSet

    def has_last_of(self, gtid_set: str) -> bool:
        """Return whether the newest transaction of any domain in a MariaDB set is lost."""
        lost, kept = self._ends(self.lost), self._ends(self.kept)
        return any(
            kept.get((domain, server), 0) < number <= lost.get((domain, server), 0)
            for domain, server, number in self._newest(gtid_set)
        )

    def precede(self, gtid_set: str) -> bool:
        """Return whether a MariaDB set's last transaction in any domain with a loss belongs to the later
        epoch.
        """
        lost, kept = self._ends(self.lost), self._ends(self.kept)
        domains = {domain for domain, _ in lost}
        return any(
            domain in domains and number > max(kept.get((domain, server), 0), lost.get((domain, server), 0))
            for domain, server, number in self._newest(gtid_set)
        )

    def has(self, gtid: str) -> bool:
        """Return whether a transaction is lost."""
        if is_mariadb(gtid):
            return self.has_last_of(gtid)
        return GtidSet.parse(self.lost).contains(GtidSet.parse(gtid))

    @staticmethod
    def _newest(gtid_set: str) -> list[tuple[int, int, int]]:
        return list(mariadb_gtids(mariadb_position(gtid_set))) if is_mariadb(gtid_set) else []

    @staticmethod
    def _ends(gtid_set: str) -> dict[tuple[int, int], int]:
        return {(domain, server): number for domain, server, number in mariadb_gtids(gtid_set)}


class OutsideSet:
    """Determines which transactions of a log are outside a GTID set. Call the instance with each
    transaction's GTID, in log order.

    `before` contains the transactions before the transaction of the first call. A call raises PositionInvalid
    if the answer cannot be determined from the log.
    """

    def __init__(self, gtid_set: str, before: LoggedSet) -> None:
        self._excluded = GtidSet.parse(gtid_set)
        self._before = GtidSet.parse(before)

    def __call__(self, gtid: str) -> bool:
        """Return whether the next transaction is outside the set. A transaction without a GTID counts as
        inside.
        """
        if not gtid:
            return False
        is_outside = not self._excluded.contains_in_log(gtid, self._before)
        if is_mariadb(gtid):
            self._before = self._before.union(GtidSet.parse(gtid))
        return is_outside


def is_mariadb(gtid_set: str) -> bool:
    """Return whether a set is a MariaDB set, which numbers transactions in log order."""
    return bool(gtid_set) and ":" not in gtid_set


def mariadb_position(gtid_set: str) -> str:
    """Return the newest transaction of each domain, which is what MariaDB accepts as a position."""
    return str(GtidSet.parse(gtid_set).position())


def mariadb_gtids(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield domain, server id and sequence number of each MariaDB GTID in a text."""
    for domain, server, number in re.findall(r"(\d+)-(\d+)-(\d+)", text):
        yield int(domain), int(server), int(number)


def union(first: LoggedSet, second: LoggedSet) -> LoggedSet:
    """Return the transactions in either set. If both sets belong to the same log, pass the earlier set
    first.
    """
    return LoggedSet(str(GtidSet.parse(first).union(GtidSet.parse(second))))
