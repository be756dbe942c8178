# SPDX-License-Identifier: Apache-2.0
"""SQLite: mirrors and feeds in a database file. Each batch is one transaction, which also stores the batch
number.

The process that drives the pipeline opens the file for each batch. Other programs may read it at any time.
"""

from contextlib import AbstractContextManager

import pyarrow

from penstock.changes import Changes, Target
from penstock.sinks.lake.table_sink import Mode
from penstock.sinks.sink import Evolution
from penstock.sinks.sql.database_file import DatabaseFileSink, FileSettings
from penstock.sinks.sql.rows import feed_rows, feed_target
from penstock.sinks.sqlite.database import Database, SqliteTable, fold, translate_errors

EXTRA = ""


class Settings(FileSettings):
    """The database file, and what its tables contain."""


def make(settings: Settings) -> "SqliteSink":
    """Create the sink."""
    return SqliteSink(settings)


class SqliteSink(DatabaseFileSink[SqliteTable]):
    """Writes the tables of an SQLite file."""

    kind = "sqlite"
    product = "SQLite"
    table_type = SqliteTable

    def fold(self, name: str) -> str:
        return fold(name)

    def translating(self, what: str) -> AbstractContextManager[None]:
        return translate_errors(what)

    def schema_of(self, target: Target) -> pyarrow.Schema:
        schema = super().schema_of(target)
        if self.mode is not Mode.FEED:
            return schema
        # A feed stores the row's number within its transaction instead of nested metadata.
        metadata = schema.get_field_index("_metadata")
        return schema.set(metadata, pyarrow.field("_row", pyarrow.int32()))

    def rows_of(self, changes: Changes) -> tuple[Target, pyarrow.Table]:
        return feed_target(changes.target), pyarrow.Table.from_batches([feed_rows(changes.rows)])

    def prepare(self, target: Target, evolution: Evolution) -> None:
        super().prepare(target, evolution)
        if self.mode is Mode.MIRROR:
            self.open_prepared(target).index(target.primary_key)

    def connect(self) -> Database:
        return Database(self.settings.path)
