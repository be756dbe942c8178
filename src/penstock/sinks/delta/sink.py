# SPDX-License-Identifier: Apache-2.0
"""Delta Lake: mirrors, feeds and histories. Each batch is one commit per table and needs no Spark.

The commit records the batch number as Delta's application transaction, so a replayed batch is recognized.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from urllib.parse import quote

import pyarrow
import structlog
from pydantic import Field

from penstock.changes import Target
from penstock.errors import OperatorError, PenstockError
from penstock.model import TableName
from penstock.sinks.lake.lake_sink import LakeSettings, LakeSink
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.sink import Finding

EXTRA = "delta"

_log = structlog.get_logger(__name__)


class Settings(LakeSettings):
    """Where the tables are, and what they contain."""

    path: str = Field(
        min_length=1,
        description="the lake's folder or URL: s3://, gs://, az://; tables are at path/database/table",
    )
    table: str = Field(default="{database}/{table}", description="a table's path below `path`, a template")
    storage_options: Mapping[str, str] = Field(
        default_factory=dict,
        repr=False,
        description="deltalake's options for the URL: keys, region, endpoint",
    )
    properties: Mapping[str, str] = Field(
        default_factory=dict,
        description="properties of new tables; delta.checkpointInterval defaults to 10",
    )


@lru_cache(maxsize=16_384)
def folder_name(name: str) -> str:
    """Return a database's or table's name as one folder name that cannot escape its parent."""
    quoted = quote(name, safe="")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


class DeltaSink(LakeSink):
    """Writes Delta tables."""

    settings: Settings
    kind = "delta"
    commit_threads_max = 4
    prepare_threads_max = 4

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # The locations of tables that this sink prepared or met before their first commit.
        self._unwritten: set[str] = set()

    def check(self) -> Sequence[Finding]:
        from penstock.sinks.delta.table import can_write

        try:
            can_write(self.settings.path, self.settings.storage_options)
        except OperatorError as problem:
            return [Finding(self.settings.path, str(problem))]
        return []

    def location(self, target: Target) -> str:
        name = self.settings.table.format(
            database=folder_name(target.name.database), table=folder_name(target.name.table)
        )
        return f"{self.settings.path.rstrip('/')}/{name}"

    def open_table(self, target: Target) -> LakeTable | None:
        from penstock.sinks.delta.table import open_delta
        from penstock.sinks.delta.unwritten_table import open_unwritten

        location = self.location(target)
        return open_unwritten(location) or open_delta(location, self.settings.storage_options)

    def create_table(self, target: Target, schema: pyarrow.Schema) -> LakeTable:
        from penstock.sinks.delta.table import create_delta, is_local
        from penstock.sinks.delta.unwritten_table import prepare_unwritten

        location = self.location(target)
        if is_local(location) and not self.settings.properties:
            self._unwritten.add(location)
            return prepare_unwritten(location, str(target.name), schema)
        return create_delta(
            location, self.settings.storage_options, str(target.name), schema, self.settings.properties
        )

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        from penstock.sinks.delta.unwritten_table import open_unwritten

        # An earlier process may have prepared tables and ended before it wrote them.
        locations = {self.location(target) for target in targets} - self._unwritten
        self._unwritten.update(location for location in locations if open_unwritten(location))
        return super().columns_missing(targets)

    def keep_alive(self) -> None:
        """Create the prepared tables that got no rows, such as those of empty source tables.

        A table whose first rows are in one of the next batches of a load costs less if that batch creates it.
        So this waits for a call since which no batch has created a table.
        """
        if self._unwritten:
            self._create_unwritten(waits=True)

    def close(self) -> None:
        if self._unwritten:
            self._create_unwritten(waits=False)

    def _create_unwritten(self, *, waits: bool) -> None:
        from penstock.sinks.delta.unwritten_table import open_unwritten

        try:
            tables = {location: table for location in self._unwritten if (table := open_unwritten(location))}
            if not waits or tables.keys() == self._unwritten:
                for location in list(tables):
                    tables.pop(location).commit([], [], {})
            self._unwritten = set(tables)
        except PenstockError as problem:
            # The next call or the next run tries again.
            _log.warning("a table that has no rows cannot be created yet", why=str(problem))


make = DeltaSink
