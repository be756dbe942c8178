# SPDX-License-Identifier: Apache-2.0
"""A log with one prepared XA transaction, as groups of events that a test can reorder."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.support.binlog.events import (
    GTID,
    MARIADB_GTID,
    QUERY,
    ROTATE,
    STOP,
    XA_PREPARE,
    Event,
    assemble,
    events,
)

LOGS = Path(__file__).parents[3] / "native/kernel/tests/logs"
COMMIT, ROLLBACK = b"XA COMMIT", b"XA ROLLBACK"

Group = list[Event]


class XaLog:
    """The event groups of a log. The prepared and committed XA transaction is kept separate from the other
    groups.
    """

    def __init__(self, sample: str) -> None:
        self.head: Group = []
        self.others: list[Group] = []
        group = self.head
        for event in events((LOGS / f"{sample}.binlog").read_bytes()):
            if event.code in (ROTATE, STOP):
                break
            if event.code in (GTID, MARIADB_GTID):
                group = []
                self.others.append(group)
            group.append(event)
        prepared = next(at for at, group in enumerate(self.others) if group[-1].code == XA_PREPARE)
        self.commit = self.others.pop(prepared + 1)
        self.prepare = self.others.pop(prepared)
        assert COMMIT in self.commit[-1].body
        # The tables and their last rows precede the XA transaction.
        self.before, self.after = self.others[:prepared], self.others[prepared:]

    def rollback(self) -> Group:
        """Return the group that the server logs for a rollback."""
        *head, statement = self.commit
        return [*head, replace(statement, body=statement.body.replace(COMMIT, ROLLBACK))]

    def commit_numbered(self, number: int) -> Group:
        """Return the commit with another MariaDB sequence number; MySQL's commit is unchanged."""
        sequence = number.to_bytes(8, "little")
        return [
            replace(event, body=sequence + event.body[8:]) if event.code == MARIADB_GTID else event
            for event in self.commit
        ]

    def many_rows(self, count: int) -> Group:
        """Return the prepared transaction with its rows repeated this many times."""
        rows = [event for event in self.prepare if event.code not in (GTID, MARIADB_GTID, QUERY, XA_PREPARE)]
        first = self.prepare.index(rows[0])
        return [*self.prepare[:first], *rows * count, *self.prepare[first + len(rows) :]]

    def write(self, path: Path, groups: Sequence[Group]) -> Path:
        """Write a file of these event groups."""
        path.write_bytes(assemble([*self.head, *(event for group in groups for event in group)]))
        return path


def _prepared_insert(id: int) -> list[str]:
    insert = f"INSERT INTO shop.items VALUES ({id}, 'prepared')"
    return [f"XA START '{id}'", insert, f"XA END '{id}'", f"XA PREPARE '{id}'"]


# XA statements, by the number of the transaction that they follow. The first XA transaction stays prepared.
XA_STATEMENTS = {40: _prepared_insert(9040), 60: _prepared_insert(9060), 120: ["XA COMMIT '9060'"]}
