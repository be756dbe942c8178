# SPDX-License-Identifier: Apache-2.0
"""The server from which the samples are written: its tables, their changes, and the server's own record of
them.

Rows are held as JSON values: numbers, and text for everything else. This module does not use Penstock's
decoding, so its record is an independent reference for the samples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.capture.captured_log import head_of
from tests.support.logstore.kept_log import transactions
from tools.servers import Server

ORDERS, NOTES = "shop.orders", "shop.notes"
# This code is not a number, although a step of the sample pipeline requires a number.
BAD_CODE = "A-7"
_ROWS_PER_PHASE = 24

Row = Mapping[str, Any]


@dataclass
class Shop:
    """A server with the tables `shop.orders` and `shop.notes`. Every change is recorded as it is made.

    `changes` are the row changes of each table in commit order, as [change type, row].
    """

    server: Server
    changes: dict[str, list[tuple[str, dict[str, Any]]]] = field(
        default_factory=lambda: {ORDERS: [], NOTES: []}
    )
    phases: list[dict[str, Any]] = field(default_factory=list)
    remark: str = "note"

    def create(self) -> None:
        """Create the database and its tables."""
        self.server.sql(
            "CREATE DATABASE shop;"
            f"CREATE TABLE {ORDERS} (id INT PRIMARY KEY, code VARCHAR(20), total DECIMAL(10,2),"
            " placed DATETIME(3), note VARCHAR(200));"
            f"CREATE TABLE {NOTES} (author VARCHAR(20), body TEXT)"
        )

    def alter(self) -> None:
        """Rename a column and add one. A log without column names records this only in its statements."""
        self.server.sql(
            f"ALTER TABLE {ORDERS} RENAME COLUMN note TO remark, ADD COLUMN state ENUM('new', 'paid')"
        )
        self.remark = "remark"

    def insert(self, first: int, count: int = _ROWS_PER_PHASE) -> None:
        """Insert orders, each in its own transaction; a few have a code that is not a number."""
        for number in range(first, first + count):
            row = {
                "id": number,
                "code": BAD_CODE if number % 17 == 0 else str(number * 3),
                "total": f"{number}.50",
                "placed": f"2026-03-{number % 28 + 1:02} 08:15:30.125",
                self.remark: f"order {number} " + "é" * 60,
            }
            if self.remark == "remark":
                row["state"] = "new"
            self._insert(ORDERS, row)

    def note(self, author: str, body: str) -> None:
        """Insert a row into the table without a key."""
        self._insert(NOTES, {"author": author, "body": body})

    def update(self, number: int, total: str) -> None:
        """Change one order's total."""
        before = self._order(number)
        self.server.sql(f"UPDATE {ORDERS} SET total = {total} WHERE id = {number}")
        self.changes[ORDERS] += [
            ("update_preimage", before),
            ("update_postimage", {**before, "total": total}),
        ]

    def delete(self, number: int) -> None:
        """Delete one order."""
        before = self._order(number)
        self.server.sql(f"DELETE FROM {ORDERS} WHERE id = {number}")
        self.changes[ORDERS].append(("delete", before))

    def end_phase(self, name: str) -> dict[str, Any]:
        """Record the server's state: position, GTID set, time, the tables' rows, and the changes so far."""
        head = head_of(self.server)
        gtids, time_us = self.server.sql(
            "SELECT @@GLOBAL.gtid_executed, CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)"
        )[0]
        phase = {
            "name": name,
            "position": str(head),
            "gtid_set": gtids.replace("\n", ""),
            "time_us": int(time_us),
            "changes": {table: len(changes) for table, changes in self.changes.items()},
            "rows": {ORDERS: self.rows(ORDERS, "id"), NOTES: self.rows(NOTES, "author, body")},
        }
        self.phases.append(phase)
        return phase

    def rows(self, table: str, order: str) -> list[dict[str, Any]]:
        """Return the current rows of a table on the server."""
        database, _, name = table.partition(".")
        columns = self.server.sql(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = %s AND table_name = %s"
            " ORDER BY ordinal_position",
            database,
            name,
        )
        names = [column for (column,) in columns]
        return [
            dict(zip(names, map(plain, row), strict=True))
            for row in self.server.sql(f"SELECT * FROM {table} ORDER BY {order}")
        ]

    def account(self) -> dict[str, Any]:
        """Return the record of the server and its log: identity, files, transactions, changes and phases."""
        files = [path.name for path in self.server.binlog_files()]
        logged = transactions(self.server, files)
        return {
            "server_key": server_key(self.server),
            "files": files,
            "transactions": [
                {"gtid": one.gtid, "start": str(one.start), "end": str(one.end)} for one in logged
            ],
            "changes": {
                table: [[change, row] for change, row in changes] for table, changes in self.changes.items()
            },
            "phases": self.phases,
        }

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        marks = ", ".join(["%s"] * len(row))
        self.server.sql(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", *row.values())
        self.changes[table].append(("insert", row))

    def _order(self, number: int) -> dict[str, Any]:
        return next(row for row in self.rows(ORDERS, "id") if row["id"] == number)


def server_key(server: Server) -> str:
    """Return the identity of a MySQL server, as Penstock writes it."""
    return f"mysql:{server.sql('SELECT @@server_uuid')[0][0]}"


def plain(value: Any) -> Any:
    """Return a value as JSON: numbers and null unchanged, times to the millisecond."""
    if value is None or isinstance(value, int | str):
        return value
    if hasattr(value, "isoformat"):
        return value.isoformat(sep=" ", timespec="milliseconds")
    return str(value)


def plain_rows(rows: Sequence[Row], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return some columns of rows as JSON values."""
    return [{name: plain(row[name]) for name in columns} for row in rows]
