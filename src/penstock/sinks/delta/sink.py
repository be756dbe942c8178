# SPDX-License-Identifier: Apache-2.0
"""Delta Lake: mirrors, feeds and histories. Each batch is one commit per table and needs no Spark.

The commit records the batch number as Delta's application transaction, so a replayed batch is recognized.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

import pyarrow
import structlog
from pydantic import Field

from penstock.changes import Target
from penstock.errors import OperatorError, OptionInvalid, PenstockError
from penstock.model import TableName
from penstock.sinks.concurrent_calls import call_for_each
from penstock.sinks.lake.lake_sink import LakeSettings, LakeSink
from penstock.sinks.lake.parquet_files import translate_file_errors
from penstock.sinks.lake.table import LakeTable, sync_tables
from penstock.sinks.sink import Finding

if TYPE_CHECKING:
    from penstock.sinks.delta.unwritten_table import UnwrittenDelta

EXTRA = "delta"

# What deltalake cannot have in a local path, or decodes.
_UNUSABLE = re.compile(r"[/\\\x00-\x1f]|%[0-9A-Fa-f]{2}")

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
        # Within `preparing`: the tables whose files are not written yet.
        self._prepared: list[UnwrittenDelta] | None = None

    def check(self) -> Sequence[Finding]:
        from penstock.sinks.delta.table import can_write

        try:
            can_write(self.settings.path, self.settings.storage_options)
        except OperatorError as problem:
            return [Finding(self.settings.path, str(problem))]
        return []

    def location(self, target: Target) -> str:
        """Return the folder or the URL of a target's table. Raises OptionInvalid.

        In a local folder, names are not quoted, because deltalake decodes percent signs of local paths.
        An earlier version quoted them there too, and its folders are used as they are.
        """
        path = self.settings.path.rstrip("/")
        if path.startswith("file://"):
            path = unquote(path.removeprefix("file://"))
        names = {"database": target.name.database, "table": target.name.table}
        quoted = self.settings.table.format(**{key: folder_name(name) for key, name in names.items()})
        plain = self.settings.table.format(**names)
        if plain == quoted or "://" in path or os.path.isdir(f"{path}/{quoted}"):
            return f"{path}/{quoted}"
        if any(not name.strip(".") or _UNUSABLE.search(name) for name in names.values()):
            raise OptionInvalid(
                f"{target.name} would be the folder {plain} of {path}, which deltalake cannot use",
                hint="Give it another name: table in the sink, or a route step",
            )
        return f"{path}/{plain}"

    def open_table(self, target: Target) -> LakeTable | None:
        from penstock.sinks.delta.table import open_delta
        from penstock.sinks.delta.unwritten_table import open_unwritten

        location = self.location(target)
        return open_unwritten(location) or open_delta(location, self.settings.storage_options)

    def create_table(self, target: Target, schema: pyarrow.Schema) -> LakeTable:
        from penstock.sinks.delta.table import create_delta, is_local
        from penstock.sinks.delta.unwritten_table import new_unwritten, save_tables

        location = self.location(target)
        if is_local(location) and not self.settings.properties:
            table = new_unwritten(location, str(target.name), schema)
            self._unwritten.add(location)
            if self._prepared is None:
                save_tables([table])
            else:
                self._prepared.append(table)
            return table
        return create_delta(
            location, self.settings.storage_options, str(target.name), schema, self.settings.properties
        )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        from penstock.sinks.delta.unwritten_table import save_tables

        prepared: list[UnwrittenDelta] = []
        self._prepared = prepared
        try:
            yield
        finally:
            self._prepared = None
        save_tables(prepared)

    def columns_missing(self, targets: Sequence[Target]) -> Mapping[TableName, Sequence[str]]:
        from penstock.sinks.delta.unwritten_table import open_unwritten

        # An earlier process may have prepared tables and ended before it wrote them.
        for location in {self.location(target) for target in targets} - self._unwritten:
            # Writing the table's rows will raise an error again, and then `errors.table` decides.
            with suppress(OperatorError):
                if open_unwritten(location):
                    self._unwritten.add(location)
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

        tables: dict[str, UnwrittenDelta] = {}
        # A table that cannot be created now is created with its first rows, or by the next run.
        locations, self._unwritten = self._unwritten, set()
        for location in locations:
            with _problem_noted(location):
                if table := open_unwritten(location):
                    tables[location] = table
        if waits and tables.keys() != locations:
            self._unwritten = set(tables)
            return

        def create(location: str) -> None:
            with _problem_noted(location):
                tables[location].commit([], [], {})
                with translate_file_errors(location):
                    sync_tables([tables[location]])

        call_for_each(create, tables, self.commit_threads_max)


@contextmanager
def _problem_noted(location: str) -> Iterator[None]:
    try:
        yield
    except PenstockError as problem:
        _log.warning("a table without rows cannot be created", table=location, why=str(problem))


make = DeltaSink
