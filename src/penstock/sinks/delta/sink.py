# SPDX-License-Identifier: Apache-2.0
"""Delta Lake: mirrors, feeds and histories. Each batch is one commit per table and needs no Spark.

The commit records the batch number as Delta's application transaction, so a replayed batch is recognized.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import pyarrow
from pydantic import Field

from penstock.changes import Target
from penstock.errors import OperatorError
from penstock.settings.values import Bytes, Section
from penstock.sinks.lake.lake_sink import LakeSink, Mode
from penstock.sinks.lake.table import LakeTable
from penstock.sinks.sink import Finding

EXTRA = "delta"

_FILE_BYTES_DEFAULT = 64 << 20
_MEMORY_BYTES_DEFAULT = 256 << 20


class Settings(Section):
    """Where the tables are, and what they contain."""

    path: str = Field(
        min_length=1,
        description="the lake's folder or URL: s3://, gs://, az://; tables are at path/database/table",
    )
    mode: Mode = Field(
        default=Mode.MIRROR,
        description="mirror: the current rows of the source; feed: every change; history: every version of"
        " every row with its validity (SCD type 2)",
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
    file_bytes: Bytes = Field(
        default=_FILE_BYTES_DEFAULT, ge=1 << 16, description="approximate size of a data file"
    )
    memory_bytes: Bytes = Field(
        default=_MEMORY_BYTES_DEFAULT,
        ge=1 << 20,
        description="memory for one table's rows of a batch; more is spilled to files",
    )
    compression: str = Field(
        default="snappy", description="compression of data files: snappy, zstd, gzip, none"
    )


def folder_name(name: str) -> str:
    """Return a database's or table's name as one folder name that cannot escape its parent."""
    quoted = quote(name, safe="")
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def make(settings: Settings) -> "DeltaSink":
    """Create the sink."""
    return DeltaSink(settings)


class DeltaSink(LakeSink):
    """Writes Delta tables."""

    kind = "delta"

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings.mode,
            file_bytes=settings.file_bytes,
            memory_bytes=settings.memory_bytes,
            compression=settings.compression,
        )
        self.settings = settings

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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__
