# SPDX-License-Identifier: Apache-2.0
"""The writer that changes a fleet's source, and a subscriber of the fleet, each in a thread."""

import random
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pymysql

from penstock.client import ChangeBatch, Subscriber
from tests.chaos.servers import Servers
from tests.support.daemon.subscribing import Running
from tests.support.suite.patience import wait_until

# The row that contains the number of the last transaction.
NEWEST = 0
# A pause between transactions lets Canal's client, which prints each change, keep up on two busy cores.
_PAUSE_SECONDS = 0.05
# The fractions of transactions with many rows, and of those that begin a new binlog file.
LARGE, LARGE_ROWS = 0.002, 1000
ROTATING = 0.01


class Writer:
    """Commits numbered transactions into a separate table. Transaction n ends with `step = n` in row 0."""

    def __init__(self, servers: Servers, table: str, seed: str) -> None:
        self.table = table
        self.step = 0
        # The row changes that were committed.
        self.changes = 1
        self.failure: BaseException | None = None
        self._servers = servers
        self._random = random.Random(seed)
        self._ids: list[int] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"writer-{table}")
        servers.primary.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, step INT, note VARCHAR(2000))")

    def __enter__(self) -> "Writer":
        self._servers.primary.sql(f"INSERT INTO {self.table} VALUES ({NEWEST}, 0, '')")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def rows(self) -> dict[int, tuple[int, str]]:
        """Return the rows of the table by id."""
        rows = self._servers.primary.sql(f"SELECT * FROM {self.table}")
        return {id_: (step, note) for id_, step, note in rows}

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_PAUSE_SECONDS):
                self._commit()
        except BaseException as problem:  # noqa: BLE001 - it is raised where the run waits.
            self.failure = problem

    def _commit(self) -> None:
        step, chosen = self.step + 1, self._random
        ids = list(self._ids)
        note = "x" * chosen.randrange(2000)
        statements = [f"INSERT INTO {self.table} VALUES ({step}, {step}, '{note}')"]
        ids.append(step)
        if self._ids and chosen.random() < 0.5:
            statements.append(f"UPDATE {self.table} SET step = {step} WHERE id = {chosen.choice(self._ids)}")
        if len(ids) > 200:
            statements.append(f"DELETE FROM {self.table} WHERE id = {ids.pop(chosen.randrange(len(ids)))}")
        statements.append(f"UPDATE {self.table} SET step = {step} WHERE id = {NEWEST}")
        changes = len(statements)
        if chosen.random() < LARGE:
            # These rows are deleted again within the transaction.
            rows = ", ".join(f"({-number}, {step}, '{note}')" for number in range(1, LARGE_ROWS + 1))
            statements[:0] = [
                f"INSERT INTO {self.table} VALUES {rows}",
                f"DELETE FROM {self.table} WHERE id < 0",
            ]
            changes += 2 * LARGE_ROWS
        if chosen.random() < ROTATING:
            self._rotate()
        try:
            self._servers.primary.sql("; ".join(["BEGIN", *statements, "COMMIT"]))
        except pymysql.err.OperationalError:
            # The server may have committed the transaction.
            if self._newest() != step:
                return
        self.step, self._ids = step, ids
        self.changes += changes

    def _rotate(self) -> None:
        # A server that restarts begins a new file anyway.
        with suppress(pymysql.err.OperationalError):
            self._servers.primary.sql("FLUSH BINARY LOGS")

    def _newest(self) -> int:
        answers: list[int] = []

        def has_answered() -> bool:
            with suppress(pymysql.err.OperationalError):
                rows = self._servers.primary.sql(f"SELECT step FROM {self.table} WHERE id = {NEWEST}")
                answers.append(int(rows[0][0]))
            return bool(answers)

        wait_until(has_answered)
        return answers[0]


class Follower:
    """The changes that a subscriber has received from the writers' tables. As a context manager, it runs
    inside the block.
    """

    def __init__(self, make_subscriber: Callable[[], Subscriber]) -> None:
        # For each table: the numbers of the transactions in order of arrival, and the rows after them.
        self.steps: dict[str, list[int]] = {}
        self.rows: dict[str, dict[int, tuple[int, str]]] = {}
        self._make_subscriber = make_subscriber

    def __enter__(self) -> "Follower":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start a subscriber, which continues at the last subscriber's checkpoint."""
        self.running = Running(self._make_subscriber(), self._keep)
        self.running.__enter__()

    def stop(self) -> None:
        """Stop the subscriber cleanly."""
        self.running.__exit__()

    def newest(self, table: str) -> int:
        """Return the number of the last transaction that arrived."""
        if self.running.failure is not None:
            raise self.running.failure
        return max(self.steps.get(table, ()), default=0)

    def _keep(self, batch: ChangeBatch) -> None:
        steps, rows = self.steps.setdefault(batch.table, []), self.rows.setdefault(batch.table, {})
        for row in batch.rows():
            image: dict[str, Any] = row.after or row.before or {}
            if row.after is None:
                rows.pop(image["id"], None)
            else:
                rows[image["id"]] = image["step"], image["note"]
            if image["id"] == NEWEST:
                steps.append(image["step"])
