# SPDX-License-Identifier: Apache-2.0
"""The two kinds of GTID sets, which differ in what they prove.

A set that a log holds before a position belongs to that position on every server. A set that a server
reports as executed belongs to no position: MySQL counts a transaction after it is in the log, so the set may
miss transactions before the end of the log, and on an unlogged server it may hold some that are in no file.
The types keep them apart: an `ExecutedSet` is no text, so it fits nowhere that a `LoggedSet` does.
"""

from dataclasses import dataclass
from typing import NewType

from penstock._native import GtidSet

# The GTIDs of every transaction before a position, read from the log itself; "" where the log has none.
LoggedSet = NewType("LoggedSet", str)
NO_GTIDS = LoggedSet("")


@dataclass(frozen=True)
class ExecutedSet:
    """The GTIDs that a server reports as executed, whatever its log holds up to now."""

    text: str

    def __bool__(self) -> bool:
        return bool(self.text)

    def contains(self, gtid_set: str) -> bool:
        """Tell whether the server has executed every transaction of a set."""
        return not self.missing(gtid_set)

    def missing(self, gtid_set: str) -> str:
        """Return the transactions of a set that the server has not executed, "" where it has them all."""
        return str(GtidSet.parse(gtid_set).subtract(GtidSet.parse(self.text)))


def union(first: LoggedSet, second: LoggedSet) -> LoggedSet:
    """Return the transactions of either set. For two sets of one log."""
    return LoggedSet(str(GtidSet.parse(first).union(GtidSet.parse(second))))
