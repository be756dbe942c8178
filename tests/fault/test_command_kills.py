# SPDX-License-Identifier: Apache-2.0
"""`penstock run --local` is killed while it writes to a store or a broker, and the target still reaches the
source's state.
"""

import json
import signal
import sqlite3
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar

import duckdb
import pika
import pytest
import redis
from redis.cluster import ClusterNode

from penstock.local.driver import LocalDriver
from penstock.pipeline.settings import load_pipeline
from tests.support.pipeline.commands import lines, penstock, write_pipeline
from tests.support.pipeline.oracle import Row, assert_same, redis_rows, source_rows
from tests.support.pipeline.running import run_to_end
from tests.support.pipeline.workload import KEYS, Workload
from tests.support.sinks.rocketmq_reading import rocketmq_messages
from tests.support.sinks.store_reading import as_source
from tests.support.suite.fixture_types import FreshDatabase, MissingPart
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.opensearch import OpenSearch
from tools.rabbitmq import RabbitMQ
from tools.redis import RedisCluster
from tools.rocketmq import RocketMQ
from tools.servers import PartMissing, Server

# Maximum number of rows of a table, because all of them are read at once.
_ROWS_MAX = 10_000


class Target(ABC):
    """A target in a folder or on a separate server, whose content is read by the target's own client."""

    KIND: ClassVar[str]
    # Whether values are JSON, in which bytes are base64.
    IN_JSON = True
    # Whether the target follows a TRUNCATE.
    TRUNCATES = True
    server: Any = None

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return the settings of the target's sink."""

    @abstractmethod
    def rows(self, database: str, table: str) -> list[Row]:
        """Return the rows of a table."""


class OpenSearchTarget(Target):
    """Documents."""

    KIND = "opensearch"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = OpenSearch()

    def settings(self) -> dict[str, Any]:
        return {"url": self.server.url}

    def rows(self, database: str, table: str) -> list[Row]:
        index = f"{self.server.url}/{database}.{table}"
        urllib.request.urlopen(f"{index}/_refresh", timeout=WAIT_SECONDS_MAX).close()
        with urllib.request.urlopen(f"{index}/_search?size={_ROWS_MAX}", timeout=WAIT_SECONDS_MAX) as answer:
            hits = json.load(answer, parse_float=Decimal)["hits"]
        assert hits["total"] == {"value": len(hits["hits"]), "relation": "eq"}
        return [hit["_source"] for hit in hits["hits"]]


class RedisClusterTarget(Target):
    """JSON values on three Redis masters, each with a replica."""

    KIND = "redis"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = RedisCluster(replicas=1)

    def settings(self) -> dict[str, Any]:
        return {"url": self.server.url, "cluster": True}

    def rows(self, database: str, table: str) -> list[Row]:
        nodes = [ClusterNode("127.0.0.1", node.port) for node in self.server.nodes]
        with redis.RedisCluster(startup_nodes=nodes, socket_timeout=WAIT_SECONDS_MAX) as client:
            return redis_rows(client, f"{database}:{table}:*", kind="json")


class RabbitTarget(Target):
    """A queue of messages for each table. The last message of a key contains the key's row."""

    KIND = "rabbitmq"
    TRUNCATES = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = RabbitMQ()

    def settings(self) -> dict[str, Any]:
        return {"url": self.server.url, "format": "json"}

    def rows(self, database: str, table: str) -> list[Row]:
        bodies = []
        with pika.BlockingConnection(pika.URLParameters(self.server.url)) as connection:
            channel = connection.channel()
            while (got := channel.basic_get(f"{database}.{table}", auto_ack=True))[0] is not None:
                bodies.append(got[2])
        return _rows_held(table, bodies)


class RocketTarget(Target):
    """A topic of messages for each table. The last message of a key contains the key's row."""

    KIND = "rocketmq"
    TRUNCATES = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.server = RocketMQ()

    def settings(self) -> dict[str, Any]:
        return {"url": self.server.url, "format": "json"}

    def rows(self, database: str, table: str) -> list[Row]:
        bodies = [message.body for message in rocketmq_messages(self.server, f"{database}_{table}")]
        return _rows_held(table, bodies)


def _rows_held(table: str, bodies: Iterable[bytes]) -> list[Row]:
    """Return the rows that result from applying messages in Penstock's JSON in order, key by key."""
    held: dict[tuple[Any, ...], Row | None] = {}
    for body in bodies:
        message = json.loads(body, parse_float=Decimal)
        image = message["after"] or message["before"]
        held[tuple(image[name] for name in KEYS[table])] = message["after"]
    return [row for row in held.values() if row is not None]


class DuckdbTarget(Target):
    """Tables in a DuckDB file."""

    KIND = "duckdb"
    IN_JSON = False

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "target.duckdb"

    def settings(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def rows(self, database: str, table: str) -> list[Row]:
        with duckdb.connect(str(self.path), read_only=True) as connection:
            stored = connection.sql(f'SELECT * FROM target."{database}"."{table}"').to_arrow_table()
        return list(stored.to_pylist())


class SqliteTarget(Target):
    """Tables in an SQLite file."""

    KIND = "sqlite"
    IN_JSON = False

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "target.sqlite"

    def settings(self) -> dict[str, Any]:
        return {"path": str(self.path)}

    def rows(self, database: str, table: str) -> list[Row]:
        with closing(sqlite3.connect(self.path)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f'SELECT * FROM "{database}.{table}"')]


TARGETS = {
    target.KIND: target
    for target in (
        DuckdbTarget,
        OpenSearchTarget,
        RabbitTarget,
        RedisClusterTarget,
        RocketTarget,
        SqliteTarget,
    )
}


@pytest.fixture(params=sorted(TARGETS))
def target(request: pytest.FixtureRequest, missing_part: MissingPart, tmp_path: Path) -> Iterator[Target]:
    """Each target in turn."""
    target: Target = TARGETS[request.param](tmp_path)
    try:
        if target.server is not None:
            target.server.start()
    except PartMissing as error:
        missing_part(target.KIND, str(error))
    yield target
    if target.server is not None:
        target.server.close()


def assert_followed(source: Server, target: Target, database: str, workload: Workload) -> None:
    """Assert that a target has the rows of its source."""
    for table in each(workload.tables):
        wanted = source_rows(source, database, table)
        rows = as_source(wanted, target.rows(database, table), target.IN_JSON)
        assert_same(wanted, rows, key=workload.keys(table))


@pytest.mark.deep(
    guard="tests/integration/test_local_pipelines.py"
    "::test_killed_and_restarted_pipeline_ends_equal_to_its_source"
)
def test_killed_command_leaves_a_target_that_ends_equal_to_its_source(
    mysql_server: Server, fresh_database: FreshDatabase, tmp_path: Path, target: Target
) -> None:
    database = fresh_database(mysql_server)
    workload = Workload(mysql_server, database, seed=36, truncates=target.TRUNCATES, big_rows=300)
    workload.create()
    file = write_pipeline(tmp_path, mysql_server, database, {target.KIND: target.settings()}, "full")
    with workload.busy(0.002):
        # The first process is killed during the load, the second while it follows the log.
        for batches in (1, 4):
            with penstock("run", "--local", str(file), "--json") as killed:
                lines(killed, batches)
                killed.send_signal(signal.SIGKILL)
    run_to_end(LocalDriver(2), load_pipeline(file))
    assert_followed(mysql_server, target, database, workload)


@pytest.mark.deep(
    guard="tests/integration/test_sink_redis_cluster.py::test_cluster_of_one_master_has_every_key"
)
def test_pipeline_follows_a_fail_over_of_each_master(
    mysql_server: Server, fresh_database: FreshDatabase, missing_part: MissingPart, tmp_path: Path
) -> None:
    target = RedisClusterTarget(tmp_path)
    try:
        target.server.start()
    except PartMissing as error:
        missing_part("redis-server", str(error))
    cluster: RedisCluster = target.server
    try:
        database = fresh_database(mysql_server)
        workload = Workload(mysql_server, database, seed=37, big_rows=300)
        workload.create()
        file = write_pipeline(tmp_path, mysql_server, database, {target.KIND: target.settings()}, "full")
        with workload.busy(0.002), penstock("run", "--local", str(file), "--json") as killed:
            lines(killed, 2)
            for number in range(3):
                cluster.fail_over(number)
                lines(killed, 2)
            killed.send_signal(signal.SIGKILL)
        # The replicas are the masters now, so the sink must find the cluster without its first address.
        cluster.nodes[0].kill()
        run_to_end(LocalDriver(2), load_pipeline(file))
        cluster.nodes[0].start()
        assert_followed(mysql_server, target, database, workload)
    finally:
        cluster.close()
