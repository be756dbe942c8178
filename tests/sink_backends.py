# SPDX-License-Identifier: Apache-2.0
"""The targets of the sinks' conformance suite, each a real server or folder with a way to read it back.

A backend is a class here, found by its `NAME`. It makes sinks into one place, where every test has a database
of its own, and returns the rows that a target's table has there.
"""

import itertools
import json
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
import redis

from penstock.changes import Target
from penstock.sinks import postgres_connection
from penstock.sinks.elasticsearch_documents import Number, rows_of_sources
from penstock.sinks.iceberg_table import catalog_of
from penstock.sinks.sink import Sink, make_sink, settings_of
from tests.patience import WAIT_SECONDS_MAX
from tools.clickhouse import ClickHouse
from tools.elasticsearch import Elasticsearch
from tools.mongo import Mongo
from tools.postgres import Postgres
from tools.redis import Redis
from tools.servers import Server

Row = dict[str, Any]

_places = itertools.count(1)


class SinkBackend(ABC):
    """A place that a kind of sink writes to."""

    NAME: ClassVar[str]
    #: Column types whose values do not come back, or not the same, as the sink's guide says.
    LOSES: ClassVar[frozenset[str]] = frozenset()
    #: Whether a value that its column cannot hold stands in the target as its exact text.
    KEEPS_UNREPRESENTABLE: ClassVar[bool] = False
    #: Whether tables there have columns that follow the source's.
    HAS_COLUMNS: ClassVar[bool] = True

    @abstractmethod
    def start(self) -> None:
        """Start what it needs. Raises PartMissing."""

    def close(self) -> None:
        """Stop it."""

    @abstractmethod
    def sink(self) -> Sink:
        """Return a sink that mirrors tables."""

    def spoil(self, sink: Any, target: Target) -> bool:
        """Have a target's table refuse two rows of one name; False where nothing is a table's own."""
        return False

    def rows(self, sink: Sink, target: Target) -> list[Row]:
        """Return the rows that a target has, in the order of its key, in the types of `target.arrow()`."""
        found = [row for batch in sink.read(target) for row in batch.to_pylist()]
        return sorted(found, key=lambda row: tuple(row[name] for name in target.primary_key))


class _ServerBackend(SinkBackend):
    """A backend with a server of its own."""

    SERVER: ClassVar[type]
    SETTINGS: ClassVar[Mapping[str, Any]] = {}

    def __init__(self) -> None:
        self.server = self.SERVER()

    def start(self) -> None:
        self.server.start()

    def close(self) -> None:
        self.server.close()

    def sink(self) -> Sink:
        return make_sink(self.NAME, settings_of(self.NAME)(url=self.server.url, **self.SETTINGS))


class ClickHouseBackend(_ServerBackend):
    """ClickHouse's own engine."""

    NAME = "clickhouse"
    SERVER = ClickHouse

    def spoil(self, sink: Any, target: Target) -> bool:
        sink.session.run(f"DROP TABLE {sink.place(target).sql}")
        return True


class MongoBackend(_ServerBackend):
    """A server of MongoDB's protocol."""

    NAME = "mongodb"
    SERVER = Mongo
    HAS_COLUMNS = False

    def spoil(self, sink: Any, target: Target) -> bool:
        database, collection = sink.place(target)
        sink.client[database][collection].create_index("name", unique=True)
        return True


class ElasticsearchBackend(_ServerBackend):
    """A real node."""

    NAME = "elasticsearch"
    SERVER = Elasticsearch
    SETTINGS: ClassVar[Mapping[str, Any]] = {"refresh": "now"}
    LOSES = frozenset({"geometry"})

    def spoil(self, sink: Any, target: Target) -> bool:
        sink.client.indices.delete(index=sink.index(target))
        return True


class RedisBackend(_ServerBackend):
    """A real server, whose values are rows as JSON."""

    NAME = "redis"
    SERVER = Redis
    LOSES = frozenset({"geometry"})
    KEEPS_UNREPRESENTABLE = True
    HAS_COLUMNS = False

    def rows(self, sink: Sink, target: Target) -> list[Row]:
        with redis.Redis.from_url(self.server.url, socket_timeout=WAIT_SECONDS_MAX) as client:
            keys = list(client.scan_iter(f"{target.name.database}:{target.name.table}:*", 1000))
            values = client.mget(keys) if keys else []
        sources = [json.loads(value, parse_float=Number) for value in values]
        found = rows_of_sources(target, sources).to_pylist()
        return sorted(found, key=lambda row: tuple(row[name] for name in target.primary_key))


class MysqlBackend(SinkBackend):
    """A real MySQL server."""

    NAME = "mysql"
    FLAVOR: ClassVar[str] = "mysql"
    KEEPS_UNREPRESENTABLE = True

    def start(self) -> None:
        self.server = Server(self.FLAVOR)
        self.server.start()

    def close(self) -> None:
        self.server.close()

    def sink(self) -> Sink:
        # Batches of one test are numbered as those of the others.
        positions = f"penstock.positions_{next(_places)}"
        told = settings_of("mysql")(url=self.server.url("root"), positions=positions, statement_bytes=2048)
        return make_sink("mysql", told)

    def spoil(self, sink: Any, target: Target) -> bool:
        self.server.sql(f"DROP TABLE {target.name}")
        return True


class MariadbBackend(MysqlBackend):
    """A real MariaDB server."""

    NAME = "mariadb"
    FLAVOR = "mariadb"


class PostgresBackend(_ServerBackend):
    """A real PostgreSQL server, connected to however long the machine stands still."""

    NAME = "postgres"
    SERVER = Postgres

    def start(self) -> None:
        self._patience = patient_connections()
        super().start()

    def close(self) -> None:
        self._patience.undo()
        super().close()

    def sink(self) -> Sink:
        positions = f"penstock.positions_{next(_places)}"
        return make_sink("postgres", settings_of("postgres")(url=self.server.url, positions=positions))

    def spoil(self, sink: Any, target: Target) -> bool:
        with psycopg.connect(self.server.url) as connection:
            connection.execute(f"DROP TABLE {target.name}".encode())
        return True


class DeltaBackend(SinkBackend):
    """Delta tables in a folder of this host."""

    NAME = "delta"

    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-delta-"))

    def close(self) -> None:
        shutil.rmtree(self.folder)

    def sink(self) -> Sink:
        # Small files, so that several are gone through.
        told = settings_of("delta")(path=str(self.folder), file_bytes=1 << 16, memory_bytes=1 << 20)
        return make_sink("delta", told)

    def spoil(self, sink: Any, target: Target) -> bool:
        shutil.rmtree(sink.place(target))
        return True


class IcebergBackend(DeltaBackend):
    """Iceberg tables in a folder of this host, with a catalog in SQLite."""

    NAME = "iceberg"

    def sink(self) -> Sink:
        told = settings_of("iceberg")(path=str(self.folder), file_bytes=1 << 16, memory_bytes=1 << 20)
        return make_sink("iceberg", told)

    def spoil(self, sink: Any, target: Target) -> bool:
        catalog_of(sink._catalog()).drop_table(sink.place(target))
        return True


def patient_connections() -> pytest.MonkeyPatch:
    """Let sinks wait for PostgreSQL's greeting as long as tests wait for anything, until it is undone."""
    patch = pytest.MonkeyPatch()
    patch.setattr(postgres_connection, "CONNECT_SECONDS_MAX", int(WAIT_SECONDS_MAX))
    return patch


def sink_backends() -> dict[str, type[SinkBackend]]:
    """Return the backends by name."""
    found: dict[str, type[SinkBackend]] = {}
    waiting: list[type[SinkBackend]] = [SinkBackend]
    while waiting:
        one = waiting.pop()
        waiting += one.__subclasses__()
        if "NAME" in vars(one):
            found[one.NAME] = one
    return dict(sorted(found.items()))
