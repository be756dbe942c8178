# SPDX-License-Identifier: Apache-2.0
"""Delta Lake: mirrors, feeds and histories. Each batch is one commit per table and needs no Spark.

The commit records the batch number as Delta's application transaction, so a replayed batch is recognized.
"""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

import pyarrow
from pydantic import Field

from penstock.changes import Target
from penstock.errors import OperatorError
from penstock.sinks.lake.lake_sink import LakeSettings, LakeSink
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.sink import Finding

EXTRA = "delta"


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

        return open_delta(self.location(target), self.settings.storage_options)

    def create_table(self, target: Target, schema: pyarrow.Schema) -> LakeTable:
        from penstock.sinks.delta.table import create_delta

        return create_delta(
            self.location(target),
            self.settings.storage_options,
            str(target.name),
            schema,
            self.settings.properties,
        )


make = DeltaSink
