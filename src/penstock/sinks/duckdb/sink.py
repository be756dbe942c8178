# SPDX-License-Identifier: Apache-2.0
"""DuckDB: mirrors and feeds in a database file. Each batch is one transaction, which has its number.

Only one process may have the file open for writing. The process that drives the pipeline opens it for each
batch, so that others can read it between batches.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

import pyarrow
import pyarrow.compute as pc
from pydantic import Field, field_validator

from penstock.changes import Target
from penstock.errors import OperatorError, OptionInvalid
from penstock.settings.values import Bytes, Section
from penstock.sinks.duckdb.database import POSITIONS, Database, DuckdbTable, translate_errors
from penstock.sinks.duckdb.writer import DuckdbWriter
from penstock.sinks.lake.table_sink import Mode, TableSink
from penstock.sinks.sink import BatchMark, Delivery, Finding, Spread, Writer, is_repeated
from penstock.sinks.sql.rows import SkippingWriter

EXTRA = "duckdb"


class Settings(Section):
    """The database file, and what its tables contain."""

    path: str = Field(min_length=1, description="the file of the database; created if missing")
    mode: Literal["mirror", "feed"] = Field(
        default="mirror", description="mirror: the current rows of the source; feed: every change as a row"
    )
    held_bytes: Bytes = Field(
        default=256 << 20, ge=1024, description="approximate bytes that are buffered before they are written"
    )

    @field_validator("path")
    @classmethod
    def _is_a_file(cls, path: str) -> str:
        if path.startswith(":memory:"):
            raise ValueError("a database in memory is lost when it is closed, after each batch: name a file")
        return path


def make(settings: Settings) -> "DuckdbSink":
    """Create the sink."""
    return DuckdbSink(settings)


class DuckdbSink(TableSink[DuckdbTable]):
    """Writes the tables of a file."""

    kind = "duckdb"
    delivery = Delivery.EXACTLY_ONCE
    spread = Spread.WHOLE
    in_driver = True

    def __init__(self, settings: Settings) -> None:
        super().__init__(Mode(settings.mode))
        self.settings = settings

    def check(self) -> Sequence[Finding]:
        try:
            self.connect().close()
        except OperatorError as problem:
            return [Finding(self.settings.path, problem.message, mend=problem.hint or "")]
        return []

    def check_together(self, targets: Sequence[Target]) -> None:
        own = str(POSITIONS)
        spellings: dict[str, str] = {}
        for name in (str(target.name) for target in targets):
            if name.lower() == own:
                raise OptionInvalid(
                    f"{name} is the table with the numbers of batches",
                    hint="Give the source's table another name with a route step",
                )
            other = spellings.setdefault(name.lower(), name)
            if other != name:
                raise OptionInvalid(
                    f"{other} and {name} are one table in DuckDB, which ignores the case of names",
                    hint="Give one of them another name with a route step",
                )

    def location(self, target: Target) -> str:
        return f"{self.settings.path}: {target.name}"

    def translate_errors(self, target: Target) -> AbstractContextManager[None]:
        return translate_errors(self.location(target))

    def open_table(self, target: Target) -> DuckdbTable | None:
        with self.translate_errors(target):
            return DuckdbTable.open(self.connect(), target)

    def create_table(self, target: Target, schema: pyarrow.Schema) -> DuckdbTable:
        with self.translate_errors(target):
            return DuckdbTable.create(self.connect(), target, schema)

    def open(self, mark: BatchMark, part: int) -> Writer:
        if self._has(mark, part):
            return SkippingWriter()
        return DuckdbWriter(self, self.connect(), mark, part)

    def settle_load(self, mark: BatchMark, targets: Sequence[Target]) -> int | None:
        # One transaction has all tables of a batch.
        if self.mode is not Mode.FEED or not self._has(mark, 0):
            return None
        versions = [
            pc.max(batch.column(0)).as_py()
            for target in targets
            for batch in self.open_prepared(target).batches(["_commit_version"])
        ]
        return max((version for version in versions if version is not None), default=None)

    def _has(self, mark: BatchMark, part: int) -> bool:
        """Return whether the file has a part of a batch. Raises StateOutdated."""
        database = self.connect()
        try:
            return is_repeated(mark, database.number_of_part(mark.application, part))
        finally:
            database.close()

    def connect(self) -> Database:
        """Open the file. Raises Penstock errors."""
        return Database(self.settings.path)
