# SPDX-License-Identifier: Apache-2.0
"""The backends of the sinks' conformance suite: each is a real server or a folder, with a way to read it
back.

A backend is a class in this module with a `NAME`. It makes sinks for one target, where every test has its own
database, and returns the rows of a target's table. `running_backend` shares a backend among all tests of a
process; a test that kills or configures the server starts its own.
"""

import itertools
import json
import shutil
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import clickhouse_connect
import deltalake
import duckdb
import psycopg
import pyarrow
import pyarrow.dataset
import pymysql
import pytest
import redis
from redis.cluster import ClusterNode

from penstock.changes import Target
from penstock.sinks.iceberg.table import catalog_of
from penstock.sinks.postgres import connection as postgres_connection
from penstock.sinks.search.documents import Number, rows_of_sources
from penstock.sinks.sink import Sink, make_sink, settings_of
from tests.support.pipeline.oracle import mysql_rows, postgres_rows
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.clickhouse import ClickHouse
from tools.elasticsearch import Elasticsearch
from tools.mongo import Mongo
from tools.opensearch import OpenSearch
from tools.postgres import Postgres
from tools.redis import Redis, RedisCluster
from tools.servers import PartMissing, Server

Row = dict[str, Any]

ServerOf = Callable[[str], Server]

_places = itertools.count(1)
_RUNNING = pytest.StashKey[dict[str, "SinkBackend"]]()
_CHANGE_TYPES = ("insert", "update_preimage", "update_postimage", "delete")
_NO_SUCH_THREAD = 1094
_FEED_COLUMNS = ("id", "name", "_change_type", "_commit_version", "_row")


class FeedRow(NamedTuple):
    """A row in a target in feed mode, for a table with the columns `id` and `name`."""

    id: int
    name: str | None
    change: str
    version: int
    row: int


class SinkBackend(ABC):
    """A target that one kind of sink writes to."""

    NAME: ClassVar[str]
    #: The kind of the backend's sinks, if it differs from `NAME`.
    KIND: ClassVar[str | None] = None
    #: Whether the backend's cases belong to the deep tier; the cases of the other backends guard them.
    DEEP: ClassVar[bool] = False
    #: Whether the target mirrors the current rows of the source.
    MIRRORS: ClassVar[bool] = True
    #: The settings of the target's feed mode, or None if it has none.
    FEED: ClassVar[Mapping[str, Any] | None] = None
    #: Whether the rows of a feed carry `_metadata`.
    FEED_HAS_METADATA: ClassVar[bool] = False
    #: Column types whose values are lost or altered, as documented in the sink's guide.
    LOSES: ClassVar[frozenset[str]] = frozenset()
    #: Whether a value that the target's column cannot hold is stored as its exact text.
    KEEPS_UNREPRESENTABLE: ClassVar[bool] = False
    #: Whether the target's tables have columns that follow the source's.
    HAS_COLUMNS: ClassVar[bool] = True
    #: Whether columns that are missing from the target's table are left out of the written rows.
    LEAVES_COLUMNS_OUT: ClassVar[bool] = True
    #: Whether the target stores the numbers of batches.
    STORES_NUMBERS: ClassVar[bool] = True
    #: Whether the target refuses tables without a primary key.
    NEEDS_KEY: ClassVar[bool] = True
    #: An address with a password at which no server listens; None for folders.
    NOWHERE: ClassVar[str | None] = None

    @classmethod
    def shared(cls, server_of: ServerOf) -> Self:
        """Return a backend for all tests of a process, on the shared database server if it needs one."""
        return cls()

    @abstractmethod
    def start(self) -> None:
        """Start the required servers. Raises PartMissing."""

    def close(self) -> None:
        """Stop it."""

    @abstractmethod
    def sink(self, **settings: Any) -> Sink:
        """Return a sink that mirrors tables, with further settings of the sink's kind."""

    def sink_to_nowhere(self) -> Sink:
        """Return a sink whose server does not run."""
        return make_sink(self.kind(), settings_of(self.kind())(url=self.NOWHERE))

    @classmethod
    def kind(cls) -> str:
        """Return the kind of the backend's sinks."""
        return cls.KIND or cls.NAME

    def spoil(self, sink: Any, target: Target) -> None:
        """Make a target's table refuse two rows with the same name."""

    @classmethod
    def has_table_errors(cls) -> bool:
        """Return whether one table can fail while others do not."""
        return cls.spoil is not SinkBackend.spoil

    def rows(self, sink: Sink, target: Target) -> list[Row]:
        """Return the rows of a target in key order, in the types of `target.arrow()`."""
        columns = list(target.column_names)
        rows = [row for batch in sink.read(target) for row in batch.select(columns).to_pylist()]
        return sorted(rows, key=lambda row: tuple(row[name] for name in target.primary_key))

    def feed_rows(self, sink: Any, target: Target) -> list[FeedRow]:
        """Return the rows of a feed, in commit order."""
        rows = [
            FeedRow(row["id"], row["name"], row["_change_type"], row["_commit_version"], _row_number(row))
            for row in self.stored_feed(sink, target)
        ]
        return sorted(rows, key=lambda row: (row.version, row.row, _CHANGE_TYPES.index(row.change)))

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        """Return the rows of a feed read by the target's own reader, with `_row` or `_metadata`."""
        raise AssertionError(f"{self.NAME} keeps no feed")


def _row_number(row: Row) -> int:
    return int(row["_metadata"]["row"] if "_metadata" in row else row["_row"])


class _ServerBackend(SinkBackend):
    """A backend with its own server."""

    SERVER: ClassVar[type]
    SETTINGS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self.server = self.SERVER()

    def start(self) -> None:
        self.server.start()

    def close(self) -> None:
        self.server.close()

    def sink(self, **settings: Any) -> Sink:
        options = {"url": self.server.url, **self.SETTINGS, **settings}
        return make_sink(self.kind(), settings_of(self.kind())(**options))


class ClickHouseBackend(_ServerBackend):
    """A ClickHouse server."""

    NAME = "clickhouse"
    STORES_NUMBERS = False
    DEEP = True
    SERVER = ClickHouse
    FEED: ClassVar[Mapping[str, Any]] = {"write": "append"}
    NOWHERE = "http://somebody:hunter2@127.0.0.1:1"

    def spoil(self, sink: Any, target: Target) -> None:
        sink.client.run(f"DROP TABLE {sink.location(target).sql}")

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        client = clickhouse_connect.get_client(host="127.0.0.1", port=self.server.port)
        try:
            result = client.query(f"SELECT {', '.join(_FEED_COLUMNS)} FROM {sink.location(target).sql}")
            return [dict(zip(_FEED_COLUMNS, row, strict=True)) for row in result.result_rows]
        finally:
            client.close()


class MongoBackend(_ServerBackend):
    """A MongoDB server."""

    NAME = "mongodb"
    STORES_NUMBERS = False
    DEEP = True
    SERVER = Mongo
    HAS_COLUMNS = False
    LEAVES_COLUMNS_OUT = False
    NOWHERE = "mongodb://somebody:hunter2@127.0.0.1:1"

    def spoil(self, sink: Any, target: Target) -> None:
        database, collection = sink.location(target)
        sink.client[database][collection].create_index("name", unique=True)


class ElasticsearchBackend(_ServerBackend):
    """A real Elasticsearch node."""

    NAME = "elasticsearch"
    STORES_NUMBERS = False
    DEEP = True
    SERVER = Elasticsearch
    SETTINGS: ClassVar[Mapping[str, Any]] = {"refresh": "now"}
    LOSES = frozenset({"geometry"})
    LEAVES_COLUMNS_OUT = False
    NOWHERE = "http://somebody:hunter2@127.0.0.1:1"

    def spoil(self, sink: Any, target: Target) -> None:
        sink.client.request("DELETE", sink.index(target), "")


class OpenSearchBackend(ElasticsearchBackend):
    """A real OpenSearch node."""

    NAME = "opensearch"
    SERVER = OpenSearch


class RedisBackend(_ServerBackend):
    """A real Redis server whose values are rows as JSON."""

    NAME = "redis"
    STORES_NUMBERS = False
    SERVER = Redis
    LOSES = frozenset({"geometry"})
    KEEPS_UNREPRESENTABLE = True
    HAS_COLUMNS = False
    LEAVES_COLUMNS_OUT = False
    NOWHERE = "redis://somebody:hunter2@127.0.0.1:1/0"

    def rows(self, sink: Sink, target: Target) -> list[Row]:
        with self.client() as client:
            keys = list(client.scan_iter(f"{target.name.database}:{target.name.table}:*", 1000))
            values = self.values(client, keys)
        sources = [json.loads(value, parse_float=Number) for value in values]
        actual_rows = rows_of_sources(target, sources).to_pylist()
        return sorted(actual_rows, key=lambda row: tuple(row[name] for name in target.primary_key))

    def client(self) -> Any:
        """Return Redis's own client."""
        return redis.Redis.from_url(self.server.url, socket_timeout=WAIT_SECONDS_MAX)

    def values(self, client: Any, keys: list[bytes]) -> list[Any]:
        """Return the values of keys."""
        return list(client.mget(keys)) if keys else []


class RedisClusterBackend(RedisBackend):
    """A Redis Cluster with three masters."""

    NAME = "redis_cluster"
    KIND = "redis"
    DEEP = True
    SERVER = RedisCluster
    SETTINGS: ClassVar[Mapping[str, Any]] = {"cluster": True}

    def client(self) -> Any:
        nodes = [ClusterNode("127.0.0.1", node.port) for node in self.server.nodes]
        return redis.RedisCluster(startup_nodes=nodes, socket_timeout=WAIT_SECONDS_MAX)

    def values(self, client: Any, keys: list[bytes]) -> list[Any]:
        return list(client.mget_nonatomic(keys)) if keys else []


class SqlBackend(SinkBackend):
    """An SQL server with unique keys and transactions. The backend's sinks use a separate account."""

    NEEDS_KEY = False
    FEED: ClassVar[Mapping[str, Any]] = {"mode": "feed"}
    #: Settings that use other write paths, by name.
    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]]
    #: The variants whose cases belong to the deep tier.
    DEEP_VARIANTS: ClassVar[frozenset[str]] = frozenset()
    #: Settings that split a part into many statements, which still become visible at once.
    WHOLE_PARTS: ClassVar[Mapping[str, Any]]
    #: Whether an added column keeps the source's column order; otherwise it is the last column.
    PLACES_COLUMNS: ClassVar[bool]

    server: Any

    @abstractmethod
    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows."""

    @abstractmethod
    def oracle_rows(self, target: Target) -> list[Row]:
        """Read a table's rows with the server's own client, in the form that `assert_same` expects."""

    @abstractmethod
    def disconnect_sinks(self) -> None:
        """End the connections of all sinks."""

    def create_table(self, target: Target, columns: str) -> None:
        """Create a table as another user would."""
        self.sql(f"CREATE SCHEMA IF NOT EXISTS {target.name.database}")
        self.sql(f"CREATE TABLE {target.name} ({columns})")

    def stored(self, target: Target, *names: str) -> list[tuple[Any, ...]]:
        """Return some columns of all rows, sorted; by default all stored columns."""
        columns = ", ".join(names or target.column_names)
        return sorted(self.sql(f"SELECT {columns} FROM {target.name}"))

    def stored_columns(self, target: Target) -> list[str]:
        """Return the names of a table's columns, in order."""
        rows = self.sql(
            "SELECT column_name FROM information_schema.columns"
            f" WHERE table_schema = '{target.name.database}' AND table_name = '{target.name.table}'"
            " ORDER BY ordinal_position"
        )
        return [name for (name,) in rows]

    def spoil(self, sink: Any, target: Target) -> None:
        self.sql(f"DROP TABLE {target.name}")

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        return [dict(zip(_FEED_COLUMNS, row, strict=True)) for row in self.stored(target, *_FEED_COLUMNS)]


class MysqlBackend(SqlBackend):
    """A MySQL server: the one that tests share, or one started by `start`."""

    NAME = "mysql"
    FLAVOR: ClassVar[str] = "mysql"
    KEEPS_UNREPRESENTABLE = True
    NOWHERE = "mysql://somebody:hunter2@127.0.0.1:1"
    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "one_connection": {"connections": 1, "statement_bytes": 4096},
        "four_connections": {"connections": 4, "statement_bytes": 4096},
        "long_statements": {"connections": 3, "statement_bytes": 1 << 20},
        "serial": {"apply": "serial", "statement_bytes": 4096},
    }
    WHOLE_PARTS: ClassVar[Mapping[str, Any]] = {
        "apply": "serial",
        "held_bytes": 1024,
        "statement_bytes": 1024,
    }
    DEEP_VARIANTS = frozenset({"one_connection", "long_statements"})
    PLACES_COLUMNS = True
    ACCOUNT = "sink_writer"

    def __init__(self, server: Server | None = None) -> None:
        self.server = server
        self._shared = server is not None

    @classmethod
    def shared(cls, server_of: ServerOf) -> Self:
        return cls(server_of(cls.FLAVOR))

    def start(self) -> None:
        if self.server is None:
            self.server = Server(self.FLAVOR)
        if not self.server.running:
            self.server.start()
        # The sinks' separate account distinguishes their connections from all others.
        self.sql(f"CREATE USER IF NOT EXISTS {self.ACCOUNT}@'%'; GRANT ALL ON *.* TO {self.ACCOUNT}@'%'")

    def close(self) -> None:
        if not self._shared:
            self.server.close()

    def sink(self, **settings: Any) -> Sink:
        # Batches of different tests have the same numbers, so each sink gets a separate table of positions.
        options = {
            "url": self.server.url(self.ACCOUNT),
            "positions": f"penstock.positions_{next(_places)}",
            "statement_bytes": 2048,
            **settings,
        }
        return make_sink("mysql", settings_of("mysql")(**options))

    def sink_to_nowhere(self) -> Sink:
        return make_sink("mysql", settings_of("mysql")(url=self.NOWHERE))

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self.server.sql(statement)
        return rows

    def oracle_rows(self, target: Target) -> list[Row]:
        return mysql_rows(self.server, target.name.database, target.name.table)

    def disconnect_sinks(self) -> None:
        with self.server.connect() as connection, connection.cursor() as cursor:
            cursor.execute(f"SELECT ID FROM information_schema.PROCESSLIST WHERE USER = '{self.ACCOUNT}'")
            for (number,) in cursor.fetchall():
                try:
                    cursor.execute(f"KILL {number}")
                except pymysql.err.MySQLError as problem:
                    # The connection may have been closed by another test.
                    if problem.args[0] != _NO_SUCH_THREAD:
                        raise


class MariadbBackend(MysqlBackend):
    """A real MariaDB server."""

    NAME = "mariadb"
    FLAVOR = "mariadb"
    DEEP_VARIANTS = frozenset({"one_connection", "long_statements", "serial"})


class PostgresBackend(_ServerBackend, SqlBackend):
    """A PostgreSQL server. Sinks wait for its greeting for the tests' own timeout."""

    NAME = "postgres"
    SERVER = Postgres
    NOWHERE = "postgresql://somebody:hunter2@127.0.0.1:1/postgres"
    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "small_buffer": {"held_bytes": 200_000},
    }
    WHOLE_PARTS: ClassVar[Mapping[str, Any]] = {"held_bytes": 1024}
    PLACES_COLUMNS = False

    def start(self) -> None:
        self._patience = patient_connections()
        super().start()

    def close(self) -> None:
        self._patience.undo()
        super().close()

    def sink(self, **settings: Any) -> Sink:
        return super().sink(**{"positions": f"penstock.positions_{next(_places)}"} | settings)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.server.url, autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def oracle_rows(self, target: Target) -> list[Row]:
        return postgres_rows(self.server.url, f'"{target.name.database}"."{target.name.table}"')

    def disconnect_sinks(self) -> None:
        self.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'penstock'")


class _FolderBackend(SinkBackend):
    """A folder of this host."""

    SETTINGS: ClassVar[Mapping[str, Any]] = {}

    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"penstock-{self.NAME}-"))

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def sink(self, **settings: Any) -> Sink:
        options = {"path": str(self.folder), **self.SETTINGS, **settings}
        return make_sink(self.NAME, settings_of(self.NAME)(**options))


class DeltaBackend(_FolderBackend):
    """Delta tables in a folder on this host."""

    NAME = "delta"
    FEED: ClassVar[Mapping[str, Any]] = {"mode": "feed"}
    FEED_HAS_METADATA = True
    # The files are small, so that a table has several files.
    SETTINGS: ClassVar[Mapping[str, Any]] = {"file_bytes": 1 << 16, "memory_bytes": 1 << 20}

    def spoil(self, sink: Any, target: Target) -> None:
        shutil.rmtree(sink.location(target))

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        table: pyarrow.Table = deltalake.DeltaTable(sink.location(target)).to_pyarrow_table()
        return list(table.to_pylist())


class IcebergBackend(DeltaBackend):
    """Iceberg tables in a folder on this host, with a catalog in SQLite."""

    NAME = "iceberg"

    def spoil(self, sink: Any, target: Target) -> None:
        catalog_of(sink._catalog()).drop_table(sink.location(target))

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        name = (target.name.database, target.name.table)
        return list(catalog_of(sink._catalog()).load_table(name).scan().to_arrow().to_pylist())


class DuckdbBackend(_FolderBackend):
    """A DuckDB database file."""

    NAME = "duckdb"
    DEEP = True
    FEED: ClassVar[Mapping[str, Any]] = {"mode": "feed"}
    FEED_HAS_METADATA = True

    def sink(self, **settings: Any) -> Sink:
        # A database file stores the numbers of its batches, and different tests use the same numbers, so each
        # sink has its own file. A schema may have the same name as the database.
        path = str(self.folder / str(next(_places)) / "conform_1.duckdb")
        Path(path).parent.mkdir()
        return super().sink(**{"path": path} | settings)

    def spoil(self, sink: Any, target: Target) -> None:
        with duckdb.connect(sink.settings.path) as database:
            database.execute(f"DROP TABLE {_in_database(target)}")

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        with duckdb.connect(sink.settings.path, read_only=True) as database:
            rows = database.sql(f"SELECT * FROM {_in_database(target)}").to_arrow_table()
        return list(rows.to_pylist())


class SqliteBackend(_FolderBackend):
    """An SQLite database file."""

    NAME = "sqlite"
    FEED: ClassVar[Mapping[str, Any]] = {"mode": "feed"}

    def sink(self, **settings: Any) -> Sink:
        # Batches of different tests have the same numbers, so each sink gets a separate file.
        return super().sink(**{"path": str(self.folder / f"{next(_places)}.sqlite")} | settings)

    def spoil(self, sink: Any, target: Target) -> None:
        with closing(sqlite3.connect(sink.settings.path)) as connection, connection:
            connection.execute(f'DROP TABLE "{target.name}"')

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        with closing(sqlite3.connect(sink.settings.path)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(f'SELECT * FROM "{target.name}"')]


def _in_database(target: Target) -> str:
    return f'conform_1."{target.name.database}"."{target.name.table}"'


class FilesBackend(_FolderBackend):
    """Parquet files in a folder on this host. They form a feed, not a mirror."""

    NAME = "files"
    MIRRORS = False
    FEED: ClassVar[Mapping[str, Any]] = {}
    FEED_HAS_METADATA = True

    def sink(self, **settings: Any) -> Sink:
        # A folder remembers its batches, and batches of different tests have the same numbers, so each sink
        # gets a separate folder.
        return super().sink(**{"path": str(self.folder / str(next(_places)))} | settings)

    def stored_feed(self, sink: Any, target: Target) -> list[Row]:
        folder = Path(sink.settings.path) / target.name.database / target.name.table
        return list(pyarrow.dataset.dataset(folder, format="parquet").to_table().to_pylist())


def patient_connections() -> pytest.MonkeyPatch:
    """Let sinks wait for PostgreSQL's greeting up to the timeout of the tests. Undoing the returned patch
    ends this.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(postgres_connection, "CONNECT_SECONDS_MAX", int(WAIT_SECONDS_MAX))
    return patch


def sink_backends() -> dict[str, type[SinkBackend]]:
    """Return the backends by name."""
    backends: dict[str, type[SinkBackend]] = {}
    waiting: list[type[SinkBackend]] = [SinkBackend]
    while waiting:
        backend = waiting.pop()
        waiting += backend.__subclasses__()
        if "NAME" in vars(backend):
            backends[backend.NAME] = backend
    return dict(sorted(backends.items()))


def running_backend(
    name: str, config: pytest.Config, server_of: ServerOf, missing_part: MissingPart
) -> SinkBackend:
    """Return this process's backend of a name; it starts at its first use and is closed when the run ends."""
    running = config.stash.setdefault(_RUNNING, {})
    if name not in running:
        backend = sink_backends()[name].shared(server_of)
        try:
            backend.start()
        except PartMissing as error:
            missing_part(name, str(error))
        config.add_cleanup(backend.close)
        running[name] = backend
    return running[name]
