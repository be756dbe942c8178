# SPDX-License-Identifier: Apache-2.0
"""The targets of the convergence machine: each target's section of a pipeline file, and how to read the
target's rows with its own client.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import deltalake
import elasticsearch
import psycopg
import pyarrow.dataset
import pyarrow.parquet
from clickhouse_connect.driver.exceptions import DatabaseError

from penstock.sinks.iceberg.table import catalog_of
from tests.convergence.grammar import ABILITIES
from tests.support.pipeline.oracle import Row, Source, mysql_rows, net_rows, postgres_rows
from tests.support.sinks.kafka_reading import rows_held
from tests.support.sinks.store_reading import READERS, as_source, clickhouse_stored
from tools.clickhouse import ClickHouse
from tools.companion import Companion
from tools.elasticsearch import Elasticsearch
from tools.kafka import Kafka
from tools.mongo import Mongo
from tools.postgres import Postgres
from tools.redis import Redis
from tools.servers import Server

# The abilities of a lake: columns can become wider, but primary keys do not change, and every table has a
# key. ClickHouse has the same abilities.
_OF_LAKES = ABILITIES - {"convert", "other key", "keyless"}
# A feed shows only what was logged. A history also shows that a table was emptied.
_OF_FEEDS = frozenset({"unique"})
_OF_HISTORIES = frozenset({"unique", "empty", "unlogged"})
# Tables with foreign keys are not dropped and keep their keys, because the rows that a dropped foreign key
# would change can no longer be determined.
_OF_CASCADES = frozenset({"unique", "cascade"})
# The mode of a mirror whose tables have foreign keys.
CASCADES = "cascades"


class ConvergenceTarget(ABC):
    """One kind of target, in one of its modes. `server` is what `new_server` returned, running.

    Targets with different databases may share a server.
    """

    # By mode: the abilities of the target.
    MODES: ClassVar[dict[str, frozenset[str]]]

    def __init__(self, mode: str, folder: Path, server: Any) -> None:
        self.mode = mode
        self.folder = folder
        self._server = server

    @classmethod
    def new_server(cls) -> AbstractContextManager[Any]:
        """Return a server of the target, which runs inside a `with` block; nothing, if it is a folder."""
        return nullcontext()

    @property
    def sink_mode(self) -> str:
        """The name of the mode in the sink's settings."""
        return "mirror" if self.mode == CASCADES else self.mode

    @property
    def settings(self) -> dict[str, Any]:
        """Further sections of the pipeline file."""
        return {"on_cascade": "reread"} if self.mode == CASCADES else {}

    @abstractmethod
    def sink(self, database: str) -> dict[str, Any]:
        """Return the section `sink` of the pipeline file for copying a database."""

    @abstractmethod
    def stored(self, database: str, table: str) -> list[Row]:
        """Return the stored rows of a table, [] if it does not exist."""

    def current(self, database: str, source: Source, table: str) -> list[Row]:
        """Return the current rows in a mirror."""
        return self.stored(database, table)

    def rows(self, database: str, source: Source, table: str) -> list[Row]:
        """Return the source's current rows, as derived from the target."""
        if self.mode not in ("feed", "history"):
            return self.current(database, source, table)
        stored = self.stored(database, table)
        if self.mode == "feed":
            named = [{name: row.get(name) for name in source.types} | row for row in stored]
            return net_rows(sorted(named, key=lambda row: row["_commit_version"]), source)
        return [row for row in stored if row["_valid_to_version"] is None]


class MysqlTarget(ConvergenceTarget):
    """A MySQL server."""

    FLAVOR = "mysql"
    MODES: ClassVar = {"mirror": ABILITIES, "feed": _OF_FEEDS | {"keyless"}, CASCADES: _OF_CASCADES}

    @classmethod
    def new_server(cls) -> AbstractContextManager[Any]:
        return Server(cls.FLAVOR)

    def sink(self, database: str) -> dict[str, Any]:
        return {
            "mysql": {
                "url": self._server.url("root"),
                "mode": self.sink_mode,
                "positions": f"penstock.of_{database}",
            }
        }

    def stored(self, database: str, table: str) -> list[Row]:
        found = self._server.sql(
            "SELECT 1 FROM information_schema.TABLES"
            f" WHERE TABLE_SCHEMA = '{database}' AND TABLE_NAME = '{table}'"
        )
        return mysql_rows(self._server, database, table) if found else []


class MariadbTarget(MysqlTarget):
    """A MariaDB server."""

    FLAVOR = "mariadb"


class PostgresTarget(ConvergenceTarget):
    """A PostgreSQL server."""

    MODES: ClassVar = {"mirror": ABILITIES, "feed": _OF_FEEDS | {"keyless"}}

    @classmethod
    def new_server(cls) -> AbstractContextManager[Any]:
        return Postgres()

    def sink(self, database: str) -> dict[str, Any]:
        return {
            "postgres": {
                "url": self._server.url,
                "mode": self.sink_mode,
                "positions": f"penstock.of_{database}",
            }
        }

    def stored(self, database: str, table: str) -> list[Row]:
        try:
            return postgres_rows(self._server.url, f'"{database}"."{table}"')
        except psycopg.errors.UndefinedTable:
            return []


class DeltaTarget(ConvergenceTarget):
    """Delta tables in a folder."""

    MODES: ClassVar = {"mirror": _OF_LAKES, "feed": _OF_FEEDS, "history": _OF_HISTORIES}

    def sink(self, database: str) -> dict[str, Any]:
        return {"delta": {"path": str(self.folder / database), "mode": self.sink_mode}}

    def stored(self, database: str, table: str) -> list[Row]:
        place = self.folder / database / database / table
        if not deltalake.DeltaTable.is_deltatable(str(place)):
            return []
        rows: list[Row] = pyarrow.table(deltalake.DeltaTable(str(place)).to_pyarrow_table()).to_pylist()
        return rows


class IcebergTarget(ConvergenceTarget):
    """Iceberg tables in a folder, with a catalog in SQLite."""

    MODES: ClassVar = DeltaTarget.MODES

    def sink(self, database: str) -> dict[str, Any]:
        (self.folder / database).mkdir(exist_ok=True)
        return {"iceberg": {"path": str(self.folder / database), "mode": self.sink_mode}}

    def stored(self, database: str, table: str) -> list[Row]:
        place = self.folder / database
        catalog = catalog_of({"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": str(place)})
        if not catalog.table_exists((database, table)):
            return []
        rows: list[Row] = catalog.load_table((database, table)).scan().to_arrow().to_pylist()
        return rows


class FilesTarget(ConvergenceTarget):
    """Parquet files in a folder."""

    MODES: ClassVar = {"feed": _OF_FEEDS}

    def sink(self, database: str) -> dict[str, Any]:
        return {"files": {"path": str(self.folder / database)}}

    def stored(self, database: str, table: str) -> list[Row]:
        place = self.folder / database / database / table
        if not place.exists():
            return []
        schema = pyarrow.parquet.read_schema(place / "_schema.parquet")
        rows: list[Row] = (
            pyarrow.dataset.dataset(place, format="parquet", schema=schema).to_table().to_pylist()
        )
        return rows


class StoreTarget(ConvergenceTarget):
    """A target on a separate server, whose content is read by the server's own client."""

    NAME: ClassVar[str]
    SERVER: ClassVar[type[Companion]]
    # Whether the target stores bytes as base64.
    IN_JSON: ClassVar[bool] = False

    @classmethod
    def new_server(cls) -> AbstractContextManager[Any]:
        return cls.SERVER()

    def sink(self, database: str) -> dict[str, Any]:
        return {self.NAME: {"url": self._server.url}}

    def stored(self, database: str, table: str) -> list[Row]:
        return READERS[self.NAME](self._server, database, table)

    def current(self, database: str, source: Source, table: str) -> list[Row]:
        return as_source(source, self.stored(database, table), self.IN_JSON)


class ClickHouseTarget(StoreTarget):
    """A ClickHouse server."""

    NAME = "clickhouse"
    SERVER = ClickHouse
    MODES: ClassVar = {"mirror": _OF_LAKES, "feed": _OF_FEEDS, CASCADES: _OF_CASCADES}

    def sink(self, database: str) -> dict[str, Any]:
        write = "append" if self.mode == "feed" else "mirror"
        return {self.NAME: {"url": self._server.url, "write": write}}

    def stored(self, database: str, table: str) -> list[Row]:
        try:
            return clickhouse_stored(self._server, database, table, is_mirror=self.mode != "feed")
        except DatabaseError as problem:
            if "UNKNOWN_TABLE" in str(problem) or "UNKNOWN_DATABASE" in str(problem):
                return []
            raise

    def current(self, database: str, source: Source, table: str) -> list[Row]:
        rows = super().current(database, source, table)
        bits = [name for name, kind in source.types.items() if kind.startswith("bit")]
        for row in rows:
            # A column that previously held texts stores a number as its digits.
            row |= {name: int(row[name]) for name in bits if isinstance(row[name], bytes)}
        return rows


class MongoTarget(StoreTarget):
    """A MongoDB server. Its documents have no declared columns."""

    NAME = "mongodb"
    SERVER = Mongo
    MODES: ClassVar = {"mirror": ABILITIES - {"keyless", "other key"}, CASCADES: _OF_CASCADES}


class ElasticsearchTarget(StoreTarget):
    """An Elasticsearch node. The type of a field never changes."""

    NAME = "elasticsearch"
    SERVER = Elasticsearch
    IN_JSON = True
    MODES: ClassVar = {"mirror": _OF_LAKES}

    def stored(self, database: str, table: str) -> list[Row]:
        try:
            return super().stored(database, table)
        except elasticsearch.NotFoundError:
            return []


class RedisTarget(StoreTarget):
    """A Redis server whose values are rows as JSON. Its content can be cleared, but not compared with the
    source.
    """

    NAME = "redis"
    SERVER = Redis
    IN_JSON = True
    MODES: ClassVar = {"mirror": _OF_FEEDS | {"empty"}}


class KafkaTarget(ConvergenceTarget):
    """A Kafka broker. Readers keep the last message of each key."""

    MODES: ClassVar = {"mirror": _OF_FEEDS}

    @classmethod
    def new_server(cls) -> AbstractContextManager[Any]:
        return Kafka()

    def sink(self, database: str) -> dict[str, Any]:
        return {"kafka": {"servers": self._server.servers, "format": "json", "tombstones": True}}

    def stored(self, database: str, table: str) -> list[Row]:
        return rows_held(self._server, f"{database}.{table}", ())

    def current(self, database: str, source: Source, table: str) -> list[Row]:
        return as_source(source, self.stored(database, table), json=True)


TARGETS: dict[str, type[ConvergenceTarget]] = {
    "mysql": MysqlTarget,
    "mariadb": MariadbTarget,
    "postgres": PostgresTarget,
    "delta": DeltaTarget,
    "iceberg": IcebergTarget,
    "files": FilesTarget,
    "clickhouse": ClickHouseTarget,
    "mongodb": MongoTarget,
    "elasticsearch": ElasticsearchTarget,
    "redis": RedisTarget,
    "kafka": KafkaTarget,
}
