# SPDX-License-Identifier: Apache-2.0
"""A pipeline in one process copies from a real server's daemon into a real Redis."""

import itertools
import json
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from penstock.engine.run import PipelineRun
from penstock.errors import ConnectionLost, StepFailed
from penstock.local.driver import LocalDriver
from penstock.pipeline.dead_letter import dead_letters
from penstock.pipeline.settings import PipelineSettings, load_pipeline, pipeline_of_values
from tests.support.capture.captured_log import head_of
from tests.support.daemon.process import PENSTOCK, DaemonProcess
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.redis import Redis
from tools.servers import Server


@pytest.fixture(scope="module")
def daemon(mysql_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    settings = {"instances": {"shop": {"source": mysql_server.url(), "start": "latest"}}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), settings) as started:
        started.wait_for(lambda status: status["state"] == "running")
        yield started


@pytest.fixture(scope="module")
def cache() -> Iterator[Redis]:
    with Redis() as server:
        yield server


class Shop:
    """A table, a pipeline that reads it through a daemon, and the cache that the pipeline writes."""

    def __init__(
        self, server: Server, database: str, daemon: DaemonProcess, cache: Redis, folder: Path
    ) -> None:
        self.server = server
        self.database = database
        self.table = f"{database}.orders"
        self.cache = redis.Redis.from_url(cache.url, decode_responses=True)
        self.folder = folder
        self.value: dict[str, Any] = {
            "name": database,
            "source": {
                "url": f"penstock://127.0.0.1:{daemon.port}/shop",
                "tables": [f"{database}.*"],
                "start": "earliest",
            },
            "load": "none",
            "sink": {"redis": {"url": cache.url, "key": f"{database}:{{id}}"}},
        }
        server.sql(f"CREATE TABLE {self.table} (id INT PRIMARY KEY, status VARCHAR(20), total DECIMAL(10,2))")
        head = head_of(server)
        daemon.wait_for_head(head.file, head.offset)

    def settings(self, **more: Any) -> PipelineSettings:
        return pipeline_of_values(self.value | more, self.folder)

    def cached(self) -> dict[int, Any]:
        """Return the cached values by id."""
        values_by_key = {key: self.cache.get(key) for key in self.cache.keys(f"{self.database}:*")}
        # A key may be deleted between the two queries.
        return {int(key.rpartition(":")[2]): json.loads(text) for key, text in values_by_key.items() if text}

    def wait_for(self, wanted: Callable[[dict[int, Any]], bool]) -> None:
        try:
            wait_until(lambda: wanted(self.cached()))
        except AssertionError as problem:
            problem.add_note(str(self.cached()))
            raise


@pytest.fixture
def shop(
    mysql_server: Server, fresh_database: FreshDatabase, daemon: DaemonProcess, cache: Redis, tmp_path: Path
) -> Shop:
    return Shop(mysql_server, fresh_database(mysql_server), daemon, cache, tmp_path)


class Running:
    """Runs a pipeline in a thread inside the block, and records every batch and every failure."""

    def __init__(self, settings: PipelineSettings, *, standby: bool = False) -> None:
        self.reports: list[dict[str, Any]] = []
        self.run = PipelineRun(
            settings,
            LocalDriver(2),
            report=lambda report: self.reports.append(dict(report)),
            standby=standby,
        )
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.run.run()
        except BaseException as problem:  # noqa: BLE001
            self.failure = problem

    @property
    def is_alive(self) -> bool:
        """Whether the run is alive."""
        return self._thread.is_alive()

    def __enter__(self) -> "Running":
        self._thread.start()
        return self

    def __exit__(self, *of: object) -> None:
        self.run.stop()
        self._thread.join(WAIT_SECONDS_MAX)
        assert not self._thread.is_alive()

    @property
    def batches(self) -> list[dict[str, Any]]:
        """The reports of the run's batches."""
        return [report for report in self.reports if "batch" in report and "error" not in report]

    def wait(self) -> BaseException | None:
        """Wait until the run ends by itself."""
        self._thread.join(WAIT_SECONDS_MAX)
        assert not self._thread.is_alive()
        return self.failure


def test_cache_follows_a_table_through_the_steps(shop: Shop) -> None:
    steps = [
        {"filter": "status <> 'draft'"},
        {"map": {"add": {"total": "total * 2"}, "drop": []}},
    ]
    with Running(shop.settings(steps=steps)) as running:
        shop.server.sql(
            f"INSERT INTO {shop.table} VALUES (1, 'paid', 1.25), (2, 'draft', 2.00), (3, 'paid', 3.00)"
        )
        shop.wait_for(lambda cached: set(cached) == {1, 3})
        assert float(shop.cached()[1]["total"]) == 2.5
        shop.server.sql(
            f"UPDATE {shop.table} SET status = IF(status = 'draft', 'paid', 'draft') WHERE id < 3"
        )
        shop.wait_for(lambda cached: set(cached) == {2, 3})
        shop.server.sql(f"DELETE FROM {shop.table} WHERE id = 3")
        shop.wait_for(lambda cached: set(cached) == {2})
    assert running.failure is None
    assert sum(batch["written"] for batch in running.batches) > 0


@pytest.mark.timing
def test_run_keeps_up_with_writers_that_never_pause(shop: Shop) -> None:
    behind, done = threading.Event(), threading.Event()

    def write() -> None:
        with shop.server.connect(autocommit=True) as connection, connection.cursor() as cursor:
            for number in itertools.takewhile(lambda _: not done.is_set(), itertools.count(1)):
                cursor.execute(f"INSERT INTO {shop.table} VALUES ({number}, 'a', 1)")
                if number == 100:
                    behind.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        # A slow writer may be no faster than the run, so the run starts with a backlog.
        assert behind.wait(WAIT_SECONDS_MAX)
        with Running(shop.settings()) as running:
            wait_until(lambda: len(shop.cache.keys(f"{shop.database}:*")) > 1500)
    finally:
        done.set()
        writer.join()
    assert running.failure is None
    rows = sum(batch["rows"] for batch in running.batches)
    assert len(running.batches) < rows, "what has arrived is written together"


@pytest.mark.deep(
    guard="tests/unit/test_batch_recording.py::test_batches_of_a_sink_that_can_rewind_are_recorded_together"
)
def test_killed_run_writes_its_unrecorded_batches_again(shop: Shop) -> None:
    file = shop.folder / "pipeline.yaml"
    file.write_text(yaml.safe_dump(shop.value))
    done, chosen = threading.Event(), random.Random(7)

    def write() -> None:
        with shop.server.connect(autocommit=True) as connection, connection.cursor() as cursor:
            while not done.is_set():
                row = chosen.randint(1, 40)
                if chosen.random() < 0.3:
                    cursor.execute(f"DELETE FROM {shop.table} WHERE id = {row}")
                else:
                    cursor.execute(
                        f"REPLACE INTO {shop.table} VALUES ({row}, 'a', {chosen.randint(1, 9999)})"
                    )

    writer = threading.Thread(target=write)
    writer.start()
    try:
        words = [*PENSTOCK, "run", "--local", str(file), "--json"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            batches = (json.loads(line) for line in killed.stdout if line.startswith("{"))
            for _ in itertools.takewhile(lambda report: report.get("batch", 0) < 50, batches):
                pass
            killed.kill()
    finally:
        done.set()
        writer.join()
    rows = shop.server.sql(f"SELECT id, total FROM {shop.table}")
    wanted = {int(row): float(total) for row, total in rows}
    with Running(load_pipeline(file), standby=True):
        shop.wait_for(lambda cached: {row: float(value["total"]) for row, value in cached.items()} == wanted)


def test_run_continues_where_it_stopped_and_follows_new_columns(shop: Shop) -> None:
    with Running(shop.settings()):
        shop.server.sql(f"INSERT INTO {shop.table} VALUES (1, 'a', 1)")
        shop.wait_for(lambda cached: set(cached) == {1})
    shop.cache.delete(f"{shop.database}:1")
    shop.server.sql(f"INSERT INTO {shop.table} VALUES (2, 'b', 2)")
    shop.server.sql(f"ALTER TABLE {shop.table} ADD COLUMN note VARCHAR(10), MODIFY total BIGINT")
    shop.server.sql(f"INSERT INTO {shop.table} VALUES (3, 'c', 3, 'new')")
    with Running(shop.settings()) as running:
        shop.wait_for(lambda cached: set(cached) == {2, 3})
    assert running.failure is None
    cached_rows = shop.cached()
    assert cached_rows[3]["note"] == "new"
    assert cached_rows[2].get("note") is None


def test_rows_that_a_step_rejects_are_stored_or_end_the_run(shop: Shop) -> None:
    steps = [{"map": {"cast": {"status": "int"}}}]
    with Running(shop.settings(steps=steps, errors={"rows": "dead_letter"})) as running:
        shop.server.sql(f"INSERT INTO {shop.table} VALUES (1, '7', 1), (2, 'seven', 1), (3, '8', 1)")
        shop.wait_for(lambda cached: set(cached) == {1, 3})
    assert running.failure is None
    (letter,) = dead_letters(shop.settings())
    assert (letter.rows, letter.step, str(letter.table)) == (1, "map", shop.table)
    assert letter.position is not None
    with Running(shop.settings(steps=steps, name=f"{shop.database}-strict")) as strict:
        failure = strict.wait()
    assert isinstance(failure, StepFailed)
    assert failure.position == letter.position


def test_changes_from_a_named_server_are_not_applied(shop: Shop) -> None:
    number = int(shop.server.sql("SELECT @@server_id")[0][0])
    with Running(shop.settings(loops={"server_ids": [number]})) as running:
        shop.server.sql(f"INSERT INTO {shop.table} VALUES (1, 'a', 1)")
        wait_until(lambda: sum(batch["rows"] for batch in running.batches))
    assert (running.failure, shop.cached()) == (None, {})
    assert not any(batch["written"] for batch in running.batches)


@pytest.mark.timing
def test_unavailable_target_is_retried(shop: Shop, tmp_path: Path) -> None:
    with Redis() as other:
        settings = shop.settings(
            sink={"redis": {"url": other.url, "key": "{id}"}}, name=f"{shop.database}-away"
        )
        with Running(settings) as running:
            shop.server.sql(f"INSERT INTO {shop.table} VALUES (1, 'a', 1)")
            connection = redis.Redis.from_url(other.url)
            wait_until(lambda: connection.exists("1"))
            other.kill()
            shop.server.sql(f"INSERT INTO {shop.table} VALUES (2, 'b', 1)")
            time.sleep(0.5)
            assert running.failure is None
            other.start()
            wait_until(lambda: connection.exists("2"))
        assert running.failure is None


@pytest.mark.timing
def test_target_that_stays_unavailable_ends_the_run(shop: Shop) -> None:
    with Redis() as other:
        sink = {"redis": {"url": other.url, "key": "{id}"}}
        settings = shop.settings(sink=sink, name=f"{shop.database}-gone", errors={"retry_for": "0.3s"})
        running = Running(settings)
        with running:
            wait_until(lambda: running.batches)
            other.kill()
            shop.server.sql(f"INSERT INTO {shop.table} VALUES (1, 'a', 1)")
            assert isinstance(running.wait(), ConnectionLost)


def test_standby_takes_over_when_the_run_ends(shop: Shop) -> None:
    with Running(shop.settings()) as first:
        wait_until(lambda: first.batches)
        with Running(shop.settings(), standby=True) as second:
            wait_until(lambda: any(report.get("error") == "LeaseLost" for report in second.reports))
            shop.server.sql(f"INSERT INTO {shop.table} VALUES (1, 'a', 1)")
            shop.wait_for(lambda cached: set(cached) == {1})
            assert not second.batches
            first.run.stop()
            wait_until(lambda: not first.is_alive)
            shop.server.sql(f"INSERT INTO {shop.table} VALUES (2, 'a', 1)")
            shop.wait_for(lambda cached: set(cached) == {1, 2})
    assert (first.failure, second.failure) == (None, None)


@pytest.mark.timing
def test_relay_command_runs_until_it_is_stopped(shop: Shop, tmp_path: Path) -> None:
    file = tmp_path / "relay.yaml"
    file.write_text(yaml.safe_dump(shop.value))
    words = [*PENSTOCK, "relay", str(file), "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        shop.server.sql(f"INSERT INTO {shop.table} VALUES (5, 'a', 1)")
        shop.wait_for(lambda cached: set(cached) == {5})
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=WAIT_SECONDS_MAX)
    finally:
        process.kill()
    assert process.returncode == 0, err
    lines = [json.loads(line) for line in out.splitlines()]
    assert sum(line.get("written", 0) for line in lines) == 1
