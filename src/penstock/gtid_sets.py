# SPDX-License-Identifier: Apache-2.0
"""The two kinds of GTID sets, which differ in what they prove.

A set that a log holds before a position belongs to that position on every server. A set that a server
reports as executed belongs to no position: MySQL counts a transaction after it is in the log, so the set may
miss transactions before the end of the log, and on an unlogged server it may hold some that are in no file.
The types keep them apart: an `ExecutedSet` is no text, so it fits nowhere that a `LoggedSet` does.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NewType

from penstock._native import GtidSet

# The GTIDs of every transaction before a position, read from the log itself; "" where the log has none.
LoggedSet = NewType("LoggedSet", str)
NO_GTIDS = LoggedSet("")


@dataclass(frozen=True)
class ExecutedSet:
    """The GTIDs that a server reports as executed, whatever its log holds up to now.

    MariaDB's text names the last transaction of each domain, and says nothing of those before it: another
    server may have written other transactions under the same sequence numbers. `ends` has the highest
    sequence number that the server's log has of each domain and server id (`gtid_binlog_state`), which tells.
    `applied` are the last transactions that it has from other servers, perhaps without logging them
    (`gtid_slave_pos`): its log may begin after exactly these.
    """

    text: str
    ends: Mapping[tuple[int, int], int] | None = None
    applied: frozenset[tuple[int, int, int]] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.text or self.applied)

    def contains(self, gtid_set: str) -> bool:
        """Tell whether the server has executed every transaction of a set."""
        return not self.missing(gtid_set)

    def missing(self, gtid_set: str) -> str:
        """Return the transactions of a set that the server has not executed, "" where it has them all."""
        if self.ends is None:
            return str(GtidSet.parse(gtid_set).subtract(GtidSet.parse(self.text)))
        ends = self.ends
        lacking = (
            gtid
            for gtid in mariadb_gtids(gtid_set)
            if ends.get(gtid[:2], 0) < gtid[2] and gtid not in self.applied
        )
        return ",".join(f"{domain}-{server}-{number}" for domain, server, number in lacking)

    def unlogged(self, gtid_set: str) -> bool:
        """Tell whether a MariaDB server went on from a transaction of a set and logged nothing of it."""
        ends = self.ends or {}
        return any(
            ends.get((domain, server), 0) < number < last
            for domain, server, number in mariadb_gtids(gtid_set)
            for of_domain, _, last in self.applied
            if of_domain == domain
        )


def mariadb_gtids(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield domain, server id and sequence number of each MariaDB GTID in a text."""
    for domain, server, number in re.findall(r"(\d+)-(\d+)-(\d+)", text):
        yield int(domain), int(server), int(number)


def union(first: LoggedSet, second: LoggedSet) -> LoggedSet:
    """Return the transactions of either set. For two sets of one log."""
    return LoggedSet(str(GtidSet.parse(first).union(GtidSet.parse(second))))
