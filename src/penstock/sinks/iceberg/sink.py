# SPDX-License-Identifier: Apache-2.0
"""Apache Iceberg: mirrors, feeds and histories. Each batch is one commit per table and needs no Spark.

The commit records the batch number as a table property, so a replayed batch is recognized.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow
from pydantic import Field

from penstock.changes import Target
from penstock.errors import OperatorError, OptionInvalid
from penstock.sinks.lake.lake_sink import LakeSettings, LakeSink
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.sink import Finding

EXTRA = "iceberg"

# The sink's own catalog file, and how long its writers wait for one another.
_CATALOG_FILE, _CATALOG_WAIT_SECONDS = "catalog.db", 60


class Settings(LakeSettings):
    """Where the tables are, and what they contain."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="a local folder with its own SQLite catalog; alternative to `catalog`",
    )
    catalog: Mapping[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="pyiceberg's catalog properties: type, uri, warehouse, credential",
    )
    namespace: str = Field(default="{database}", description="a table's namespace, a template")
    table: str = Field(default="{table}", description="a table's name, a template")
    properties: Mapping[str, str] = Field(
        default_factory=dict, description="properties of new tables, such as format-version"
    )
    compression: str = Field(
        default="zstd", description="compression of data files: zstd, snappy, gzip, none"
    )


class IcebergSink(LakeSink):
    """Writes Iceberg tables."""

    settings: Settings
    kind = "iceberg"
    integer_bits_min = 32

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if (settings.path is None) == (not settings.catalog):
            raise OptionInvalid(
                "an iceberg sink has a path or a catalog",
                hint="Write path: /lake to have a catalog made there, or catalog: {type: rest, uri: ...}",
            )

    def check(self) -> Sequence[Finding]:
        from penstock.sinks.iceberg.table import reach

        if self.settings.path is not None and not Path(self.settings.path).exists():
            return []
        try:
            reach(self._catalog())
        except OperatorError as problem:
            # The catalog's address may contain a password, so do not report it.
            return [Finding(self.settings.path or "catalog", str(problem))]
        return []

    def location(self, target: Target) -> str:
        return ".".join(self._name(target))

    def open_table(self, target: Target) -> LakeTable | None:
        from penstock.sinks.iceberg.table import open_iceberg

        if self.settings.path is not None and not (Path(self.settings.path) / _CATALOG_FILE).exists():
            return None
        return open_iceberg(self._catalog(), *self._name(target))

    def create_table(self, target: Target, schema: pyarrow.Schema) -> LakeTable:
        from penstock.sinks.iceberg.table import create_iceberg

        if self.settings.path is not None:
            Path(self.settings.path).mkdir(parents=True, exist_ok=True)
        return create_iceberg(self._catalog(), *self._name(target), schema, self.settings.properties)

    def _name(self, target: Target) -> tuple[str, str]:
        words = {"database": target.name.database, "table": target.name.table}
        names = self.settings.namespace.format(**words), self.settings.table.format(**words)
        # The sink's own catalog turns names into folders. This name would escape the catalog's folder.
        if self.settings.path is not None and any(not part.strip(".") or "/" in part for part in names):
            raise OptionInvalid(
                f"{target.name} would be the folder {'/'.join(names)} of {self.settings.path}",
                hint="Give it other names: namespace and table in the sink, or a route step",
            )
        return names

    def _catalog(self) -> Mapping[str, str]:
        """Return the properties of the catalog."""
        if self.settings.path is None:
            return self.settings.catalog
        folder = Path(self.settings.path).absolute()
        return {
            "type": "sql",
            "uri": f"sqlite:///{folder / _CATALOG_FILE}?timeout={_CATALOG_WAIT_SECONDS}",
            "warehouse": folder.as_uri(),
        }


make = IcebergSink
