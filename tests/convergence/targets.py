# SPDX-License-Identifier: Apache-2.0
"""The targets of the convergence machine: what a pipeline's file says, and rows by their own clients."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Self

import deltalake
import psycopg
import pyarrow.dataset
import pyarrow.parquet

from penstock.sinks.iceberg.table import catalog_of
from tests.convergence.grammar import ABILITIES
from tests.support.pipeline.oracle import Row, Source, mysql_rows, net_rows, postgres_rows
from tools.postgres import Postgres
from tools.servers import Server

# What a lake can follow: its columns become wider and keep their key, and a table has one.
_OF_LAKES = ABILITIES - {"convert", "other key", "keyless"}
# A feed shows what was logged, and nothing else; a history shows besides that a table was emptied.
_OF_FEEDS = frozenset({"unique"})
_OF_HISTORIES = frozenset({"unique", "empty"})


class ConvergenceTarget(ABC):
    """One kind of target, in one of its modes."""

    #: By mode: what it can follow.
    MODES: ClassVar[dict[str, frozenset[str]]]

    def __init__(self, mode: str, folder: Path) -> None:
        self.mode = mode
        self.folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def sink(self, database: str) -> dict[str, Any]:
        """Return the section `sink` of the file of a pipeline that copies a database."""

    @abstractmethod
    def stored(self, database: str, table: str) -> list[Row]:
        """Return what is stored of a table, [] where it is not there."""

    def rows(self, database: str, source: Source, table: str) -> list[Row]:
        """Return the rows that the target says the source has now."""
        stored = self.stored(database, table)
        if self.mode == "feed":
            named = [{name: row.get(name) for name in source.types} | row for row in stored]
            return net_rows(sorted(named, key=lambda row: row["_commit_version"]), source)
        if self.mode == "history":
            return [row for row in stored if row["_valid_to_version"] is None]
        return stored


class MysqlTarget(ConvergenceTarget):
    """A server of MySQL's kind."""

    FLAVOR = "mysql"
    MODES: ClassVar = {"mirror": ABILITIES, "feed": _OF_FEEDS | {"keyless"}}

    def __enter__(self) -> Self:
        self._server = Server(self.FLAVOR).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def sink(self, database: str) -> dict[str, Any]:
        return {
            "mysql": {
                "url": self._server.url("root"),
                "mode": self.mode,
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

    def __enter__(self) -> Self:
        self._server = Postgres()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def sink(self, database: str) -> dict[str, Any]:
        return {
            "postgres": {"url": self._server.url, "mode": self.mode, "positions": f"penstock.of_{database}"}
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
        return {"delta": {"path": str(self.folder / database), "mode": self.mode}}

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
        return {"iceberg": {"path": str(self.folder / database), "mode": self.mode}}

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


TARGETS: dict[str, type[ConvergenceTarget]] = {
    "mysql": MysqlTarget,
    "mariadb": MariadbTarget,
    "postgres": PostgresTarget,
    "delta": DeltaTarget,
    "iceberg": IcebergTarget,
    "files": FilesTarget,
}
