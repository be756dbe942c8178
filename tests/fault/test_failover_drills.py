# SPDX-License-Identifier: Apache-2.0
"""Fail-over drills: the primary of a busy cluster dies, hangs or is cut off, and its replica is promoted.

A daemon that knows both servers follows the cluster. Its readers are a subscriber and a pipeline that mirrors
tables into a MariaDB server; a second pipeline reads the servers directly and writes a feed into files. At
the end both targets equal the source, and the subscriber has seen every transaction in order. The tests print
how long each reader received no new rows; `pytest -s` shows it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from penstock.client import Subscriber
from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import PipelineSettings, pipeline_of_values
from tests.support.capture.captured_log import head_of
from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.daemon.process import DaemonProcess
from tests.support.daemon.subscribing import SESSION_SECONDS, Running
from tests.support.pipeline.oracle import Row, assert_same, mysql_rows, net_rows, parquet_rows, source_rows
from tests.support.pipeline.running import BATCH_SECONDS_MAX, running, wait_until_loaded
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import wait_until
from tools.servers import Server
from tools.servers.proxy import Proxy

READERS = ("daemon, mirror", "servers, feed", "subscriber")
TRANSACTION_SECONDS = 0.01
POLL_SECONDS = 0.2
SLOT = 0
BACKLOG = 300


@pytest.fixture(scope="module")
def times() -> Iterator[list[str]]:
    """The lines of the table that the module prints at its end: an event, and the seconds until each reader's
    next row.
    """
    lines: list[str] = []
    yield lines
    print("\n".join(["", f"{'':<24}" + "".join(f"{reader:>18}" for reader in READERS), *lines]))


class Writer:
    """Commits numbered transactions into one table of a cluster's primary, one after another.

    Each transaction inserts the order with its number and deletes an earlier order. The order `SLOT` contains
    the number of the last transaction.
    """

    def __init__(self, server: Server, table: str) -> None:
        self.server = server
        self.number = 0
        self._table = table
        self._running = threading.Event()
        self._thread = threading.Thread()
        server.sql(f"CREATE TABLE {table} (id INT PRIMARY KEY, customer INT, step INT)")
        server.sql(f"INSERT INTO {table} VALUES ({SLOT}, 0, 0)")

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Commit continuously while the block runs, at least one transaction."""
        self._running.set()
        self._thread = threading.Thread(target=self._run, name="writer")
        before = self.number
        self._thread.start()
        try:
            yield
            wait_until(lambda: self.number > before or not self._thread.is_alive())
        finally:
            self._running.clear()
            self._thread.join()
        assert self.number > before, "the writer fails"

    def _run(self) -> None:
        with self.server.connect() as connection, connection.cursor() as cursor:
            while self._running.is_set():
                self._commit(cursor)
                # Leave processor time for the readers.
                time.sleep(TRANSACTION_SECONDS)

    def _commit(self, cursor: Any) -> None:
        number = self.number + 1
        cursor.execute("BEGIN")
        cursor.execute(f"INSERT INTO {self._table} VALUES ({number}, {number % 10}, {number})")
        cursor.execute(f"UPDATE {self._table} SET step = {number} WHERE id = {SLOT}")
        cursor.execute(f"DELETE FROM {self._table} WHERE id = {number - 40} AND id > {SLOT}")
        cursor.execute("COMMIT")
        self.number = number


class Cluster:
    """A primary behind a proxy, its replica, and a writer. After `promote`, the replica is the primary."""

    def __init__(self, flavor: str, start_server: StartServer, proxy_of: Callable[[int], Proxy]) -> None:
        self.primary = start_server(flavor)
        self.follower = replica_of(self.primary, start_server)
        self.proxy = proxy_of(self.primary.port)
        self.others = [f"127.0.0.1:{self.follower.port}"]

    def url(self, *account: str) -> str:
        """Return the proxy's address, which stands for the primary."""
        return self.proxy.through(self.primary.url(*account))

    def is_replicated(self) -> bool:
        return gtids_executed(self.follower) == gtids_executed(self.primary)

    def fail(self, how: str) -> None:
        """Take the primary away."""
        if how == "hang":
            assert self.primary.pid is not None
            os.kill(self.primary.pid, signal.SIGSTOP)
        elif how == "hole":
            self.proxy.swallow()
        else:
            self.primary.kill()

    def promote(self) -> None:
        """Make the replica a primary, as an operator does."""
        replica = "SLAVE" if self.follower.family == "mariadb" else "REPLICA"
        self.follower.sql(f"STOP {replica}; RESET {replica} ALL")

    def return_primary(self, how: str) -> None:
        """Start the former primary again, with its data."""
        if how == "hang":
            assert self.primary.pid is not None
            os.kill(self.primary.pid, signal.SIGCONT)
        elif how == "hole":
            self.proxy.resume()
        else:
            self.primary.start()


class Drill:
    """The daemon of a cluster, its subscriber and the pipelines. `prove` checks the pipelines' targets at the
    end.
    """

    def __init__(
        self,
        cluster: Cluster,
        writer: Writer,
        database: str,
        target: Server,
        folder: Path,
    ) -> None:
        self.cluster = cluster
        self.writer = writer
        self.database = database
        self._target = target
        self._folder = folder
        instance = {"source": cluster.url(), "servers": cluster.others, "start": "earliest"}
        self.daemon = DaemonProcess(folder, {"instances": {"shop": instance}})
        self.subscriber: Running | None = None
        self._files = folder / "files" / database / "orders"

    def _settings(self, name: str) -> PipelineSettings:
        """Return the pipeline of a reader."""
        servers: dict[str, Any] = {
            "name": "shop",
            "tables": f"{self.database}.*",
            "servers": self.cluster.others,
        }
        if name == "servers, feed":
            source = servers | {"url": self.cluster.url("root")}
            sink: dict[str, Any] = {"files": {"path": str(self._folder / "files")}}
        else:
            # A daemon provides the changes; the servers provide the rows to load.
            source = servers | {"url": self._instance, "server": self.cluster.url("root")}
            sink = {"mysql": {"url": self._target.url("root")}}
        values = {"name": name.split(",")[0], "source": source, "sink": sink, "batch": {"interval": 0.2}}
        return pipeline_of_values(values, self._folder)

    @property
    def _instance(self) -> str:
        return f"penstock://127.0.0.1:{self.daemon.port}/shop"

    @contextmanager
    def subscribing(self) -> Iterator[None]:
        """Subscribe while the block runs."""
        subscriber = Subscriber(
            self._instance,
            name="cache",
            shards=1,
            tables=[f"{self.database}.orders"],
            start="earliest",
            coordination=f"sqlite://{self._folder}/coordination.db",
            session_seconds=SESSION_SECONDS,
        )
        with Running(subscriber) as self.subscriber:
            self.subscriber.wait_owning(1)
            yield

    @contextmanager
    def pipelines(self) -> Iterator[None]:
        """Run both pipelines while the block runs. The block begins after both have loaded."""
        with ExitStack() as stack:
            every = [self._settings(reader) for reader in READERS[:2]]
            for settings in every:
                stack.enter_context(running(LocalDriver(), settings))
            for settings in every:
                wait_until_loaded(settings)
            yield

    def has(self, number: int) -> dict[str, bool]:
        """Return the readers that have received a transaction."""
        return {
            READERS[0]: self._mirror_has(number),
            READERS[1]: self._feed_has(number),
            READERS[2]: self._subscriber_has(number),
        }

    def _mirror_has(self, number: int) -> bool:
        table = f"{self.database}.orders"
        if not self._target.sql(f"SHOW TABLES FROM {self.database} LIKE 'orders'"):
            return False
        return bool(self._target.sql(f"SELECT 1 FROM {table} WHERE id = {SLOT} AND step >= {number}"))

    def _subscriber_has(self, number: int) -> bool:
        assert self.subscriber is not None
        steps = (step for _, order, step in reversed(self.subscriber.rows) if order == SLOT)
        return next(steps, 0) >= number

    def _feed_has(self, number: int) -> bool:
        if not self._files.exists():
            return False
        files = pyarrow.dataset.dataset(self._files, format="parquet")
        # The folder exists before its first file.
        return "id" in files.schema.names and bool(
            files.count_rows(filter=pyarrow.dataset.field("id") == number)
        )

    def wait_for(self, number: int, begun: float = 0.0) -> dict[str, float]:
        """Wait until every reader has received a transaction; return the seconds each took since a given
        time.
        """
        seconds: dict[str, float] = {}
        deadline = time.monotonic() + BATCH_SECONDS_MAX
        while len(seconds) < len(READERS):
            assert time.monotonic() < deadline, f"transaction {number} is only in {seconds}"
            # Polling without pauses would take processor time from the readers.
            time.sleep(POLL_SECONDS)
            for reader, has in self.has(number).items():
                if has:
                    seconds.setdefault(reader, time.monotonic() - begun)
        return seconds

    def prove(self) -> None:
        """Assert that the targets equal the source, and that the subscriber saw all transactions in order."""
        assert self.subscriber is not None
        source = source_rows(self.writer.server, self.database, "orders")
        assert_same(source, mysql_rows(self._target, self.database, "orders"), key=("id",))
        feed: list[Row] = parquet_rows(str(self._files / "**" / "[!_]*.parquet"))
        assert_same(
            source, net_rows(sorted(feed, key=lambda row: row["_commit_version"]), source), key=("id",)
        )
        seen = 0
        for step in (step for _, order, step in self.subscriber.rows if order == SLOT):
            # Transactions before its last checkpoint may be repeated, from their beginning on.
            assert step <= seen + 1, f"transactions {seen + 1} to {step - 1} are missing"
            seen = max(seen, step)
        assert seen == self.writer.number


def cases() -> Iterator[Any]:
    """Yield the drills. The first runs in the deep tests, the others only in the long tests."""
    for flavor in ("mysql", "mariadb"):
        for how in ("kill", "hang", "hole", "backlog", "backlog of all"):
            marks = () if (flavor, how) == ("mysql", "kill") else pytest.mark.long
            yield pytest.param(flavor, how, id=f"{flavor}-{how.replace(' ', '_')}", marks=marks)


@pytest.mark.timeout(900)
@pytest.mark.deep(
    guard="tests/unit/test_run_outages.py::test_unavailable_server_is_replaced_by_the_next_reachable_one"
)
@pytest.mark.parametrize(("flavor", "how"), list(cases()))
def test_all_readers_follow_a_promoted_replica(
    flavor: str,
    how: str,
    start_server: StartServer,
    mariadb_server: Server,
    fresh_database: FreshDatabase,
    tmp_path: Path,
    times: list[str],
) -> None:
    database = fresh_database(mariadb_server)
    with ExitStack() as stack:
        cluster = Cluster(flavor, start_server, lambda port: stack.enter_context(Proxy(port)))
        cluster.primary.sql(f"CREATE DATABASE {database}")
        writer = Writer(cluster.primary, f"{database}.orders")
        drill = Drill(cluster, writer, database, mariadb_server, tmp_path)
        stack.enter_context(drill.daemon)
        head = head_of(cluster.primary)
        drill.daemon.wait_for_head(head.file, head.offset)
        stack.enter_context(drill.subscribing())
        with ExitStack() as reading:
            reading.enter_context(drill.pipelines())
            with writer.busy():
                drill.wait_for(writer.number + 20)
            if how.startswith("backlog"):
                reading.close()
                if how == "backlog of all":
                    drill.daemon.kill()
                written = writer.number
                with writer.busy():
                    wait_until(lambda: writer.number >= written + BACKLOG)
            wait_until(cluster.is_replicated)
            begun = time.monotonic()
            cluster.fail(how)
            cluster.promote()
            writer.server = cluster.follower
            if how.startswith("backlog"):
                reading.enter_context(drill.pipelines())
            if how == "backlog of all":
                drill.daemon.start()
            with writer.busy():
                seconds = drill.wait_for(writer.number + 1, begun)
                cluster.return_primary(how)
                drill.wait_for(writer.number + 20)
            times.append(
                f"{flavor + ', ' + how:<24}" + "".join(f"{seconds[one]:>16.1f} s" for one in READERS)
            )
            drill.wait_for(writer.number)
        drill.prove()
