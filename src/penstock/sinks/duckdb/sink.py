# SPDX-License-Identifier: Apache-2.0
"""DuckDB: mirrors and feeds in a database file. Each batch is one transaction, which also stores the batch
number.

Only one process may have the file open for writing. The process that drives the pipeline opens it for each
batch, so that other processes can read the file between batches.
"""

from contextlib import AbstractContextManager

from penstock.sinks.duckdb.database import Database, DuckdbTable, translate_errors
from penstock.sinks.sql.database_file import DatabaseFileSink, FileSettings

EXTRA = "duckdb"


class Settings(FileSettings):
    """The database file, and what its tables contain."""


def make(settings: Settings) -> "DuckdbSink":
    """Create the sink."""
    return DuckdbSink(settings)


class DuckdbSink(DatabaseFileSink[DuckdbTable]):
    """Writes the tables of a DuckDB file."""

    kind = "duckdb"
    product = "DuckDB"
    table_type = DuckdbTable

    def translating(self, what: str) -> AbstractContextManager[None]:
        return translate_errors(what)

    def connect(self) -> Database:
        return Database(self.settings.path)
