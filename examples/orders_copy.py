# SPDX-License-Identifier: Apache-2.0
"""Keep a copy of shop.orders in SQLite, by as many processes as you start.

    python examples/orders_copy.py penstock://127.0.0.1:7070/shop copy.db
    python examples/orders_copy.py mysql://repl@127.0.0.1:3306 copy.db    # without a daemon

Each batch is written with its shard's token in one transaction. What comes again changes nothing, and a
process that lost its shard without noticing writes nothing: the copy refuses a token smaller than one it has
seen. A program whose orders change their ids takes one shard, which keeps the order of all commits.
"""

import signal
import sqlite3
import sys
import threading

from penstock.client import ChangeBatch, Subscriber
from penstock.errors import LeaseLost

TABLES = """
CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, status TEXT, total TEXT);
CREATE TABLE IF NOT EXISTS owners (shard INTEGER PRIMARY KEY, token INTEGER NOT NULL);
"""


class Copy:
    """The copy, with a connection for each of the subscriber's threads."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._connections = threading.local()

    def write(self, batch: ChangeBatch) -> None:
        """Apply a batch, whole or not at all."""
        with self._connection() as database:
            database.execute("BEGIN IMMEDIATE")
            found = database.execute("SELECT token FROM owners WHERE shard = ?", [batch.shard]).fetchone()
            if found is not None and found[0] > batch.token:
                raise LeaseLost(f"shard {batch.shard} has another owner", position=str(batch.position))
            database.execute("REPLACE INTO owners VALUES (?, ?)", [batch.shard, batch.token])
            for row in batch.rows():
                if row.before is not None:
                    database.execute("DELETE FROM orders WHERE id = ?", [row.before["id"]])
                if row.after is not None:
                    database.execute(
                        "REPLACE INTO orders VALUES (?, ?, ?)", [row["id"], row["status"], str(row["total"])]
                    )

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._connections, "of_thread"):
            opened = sqlite3.connect(self._path, timeout=30)
            opened.executescript(TABLES)
            self._connections.of_thread = opened
        connection: sqlite3.Connection = self._connections.of_thread
        return connection


def main() -> None:
    """Copy until Ctrl-C."""
    source, path = sys.argv[1:]
    subscriber = Subscriber(source, name="orders-copy", tables=["shop.orders"], shards=4, begin="earliest")
    for number in (signal.SIGINT, signal.SIGTERM):
        # A thread of its own may wait; a signal handler may not.
        signal.signal(number, lambda *_: threading.Thread(target=subscriber.stop).start())
    subscriber.run(Copy(path).write)


if __name__ == "__main__":
    main()
