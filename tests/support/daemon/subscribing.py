# SPDX-License-Identifier: Apache-2.0
"""A table whose changes subscribers consume, and subscribers that run in threads beside the test."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.client import ChangeBatch, Subscriber
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server

# Members leave explicitly, so no session has to expire. No member may lose its shards while the machine is
# paused.
SESSION_SECONDS = WAIT_SECONDS_MAX


class Orders:
    """A table of orders on a server, with helpers to insert rows and to subscribe."""

    def __init__(self, server: Server, database: str, daemon: DaemonProcess, folder: Path) -> None:
        self.server = server
        self.table = f"{database}.orders"
        self.daemon = daemon
        self.coordination = f"sqlite://{folder}/coordination.db"
        self.url = f"penstock://127.0.0.1:{daemon.port}/shop"
        server.sql(f"CREATE TABLE {self.table} (id INT PRIMARY KEY, customer INT, step INT)")
        self.settle()

    def insert(self, *ids: int, step: int = 0) -> None:
        """Insert orders in one transaction; an order's customer is its id modulo ten."""
        values = ", ".join(f"({id_}, {id_ % 10}, {step})" for id_ in ids)
        self.server.sql(f"INSERT INTO {self.table} VALUES {values}")

    def server_key(self) -> str:
        """Return the key that identifies this server."""
        key: str = self.daemon.get("/v1/instances/shop/epochs")["epochs"][0]["server_key"]
        return key

    def settle(self) -> None:
        """Wait until the daemon has captured the server's whole log."""
        head = head_of(self.server)
        self.daemon.wait_for_head(head.file, head.offset)

    def words(self, name: str = "cache", **options: Any) -> dict[str, Any]:
        """Return the arguments of a subscriber to this table."""
        known = {
            "name": name,
            "tables": [self.table],
            "coordination": self.coordination,
            "session_seconds": SESSION_SECONDS,
        }
        return {**known, **options}

    def subscriber(self, name: str = "cache", **options: Any) -> Subscriber:
        """Return a subscriber to this table."""
        return Subscriber(self.url, **self.words(name, **options))


class Running:
    """A subscriber that runs in a thread. As a context manager, it is stopped at the end of the block.

    `rows` contains (shard, id, step) in order of arrival. `batches` contains the batches that delivered these
    rows.
    """

    def __init__(self, subscriber: Subscriber, callback: Callable[[ChangeBatch], None] | None = None) -> None:
        self.subscriber = subscriber
        self.rows: list[tuple[int, int, int]] = []
        self.batches: list[ChangeBatch] = []
        self.failure: BaseException | None = None
        self._callback = callback
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.stop()
        self.join()

    def join(self) -> None:
        """Wait until the subscriber ends, and raise its error."""
        self._thread.join(WAIT_SECONDS_MAX)
        assert not self._thread.is_alive(), "it does not end"
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            self.subscriber.run(self._keep)
        except BaseException as problem:  # noqa: BLE001 - it is raised where the test waits.
            self.failure = problem

    def _keep(self, batch: ChangeBatch) -> None:
        if self._callback is not None:
            self._callback(batch)
        self.batches.append(batch)
        image = [row.after if row.after is not None else row.before for row in batch.rows()]
        self.rows += [(batch.shard, row["id"], row.get("step")) for row in image if row is not None]

    def wait_for(self, count: int) -> None:
        """Wait for exactly this many rows."""
        self.wait_until(lambda: len(self.rows) >= count)
        assert len(self.rows) == count

    def wait_owning(self, count: int) -> None:
        """Wait until the subscriber owns this many shards."""
        self.wait_until(lambda: len(self.subscriber.status().shards) == count)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition, or raise the error with which the subscriber ended."""
        try:
            wait_until(lambda: self.failure is not None or condition())
        except AssertionError as problem:
            problem.add_note(f"{len(self.rows)} rows, {self.subscriber.status()}")
            raise
        if self.failure is not None:
            raise self.failure
