# SPDX-License-Identifier: Apache-2.0
"""The commit log: the keys that each batch wrote or deleted in a target, committed with the rows."""

from collections.abc import Iterator

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Target
from penstock.model import TableName, quote_name
from penstock.sinks.images import puts
from penstock.sinks.mysql.connection import Session
from penstock.sinks.mysql.tables import create_database, layout_of
from penstock.sinks.sink import BatchMark

_COLUMNS = ("application", "number", "part", "table_name", "row_key", "action", "version", "committed")


def create_commit_log(session: Session, table: TableName) -> None:
    """Create the commit log's table if it does not exist."""
    if layout_of(session, table) is not None:
        return
    for statement in create_database(session, table.database):
        session.run(statement)
    session.run(
        f"CREATE TABLE IF NOT EXISTS {table.sql} (id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,"
        " application VARCHAR(255) CHARACTER SET utf8mb4 NOT NULL, number BIGINT NOT NULL, part INT NOT NULL,"
        " table_name VARCHAR(300) CHARACTER SET utf8mb4 NOT NULL, row_key TEXT CHARACTER SET utf8mb4,"
        " action VARCHAR(6) CHARACTER SET ascii NOT NULL, version BIGINT NOT NULL,"
        " committed TIMESTAMP(6) NULL, KEY (number))"
    )


def logged_statements(
    table: TableName, mark: BatchMark, part: int, target: Target, rows: pyarrow.RecordBatch, bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that log rows: their keys as JSON, null for tables without a key."""
    count = rows.num_rows
    key = list(target.primary_key)
    declared = [target.column(name) for name in key]
    columns = [(column.name, column.type_text, column.charset, column.nullable) for column in declared]
    keys = pyarrow.nulls(count, pyarrow.string())
    if key:
        objects = _native.json_objects(rows.select(key), columns, mariadb=target.mariadb, names=key)
        keys = pyarrow.array(objects).cast(pyarrow.string())
    values = [
        pyarrow.array([mark.application] * count),
        pyarrow.array([mark.number] * count, pyarrow.int64()),
        pyarrow.array([part] * count, pyarrow.int32()),
        pyarrow.array([str(target.name)] * count),
        keys,
        pc.if_else(puts(rows), "put", "take"),
        rows.column("_commit_version"),
        rows.column("_commit_timestamp"),
    ]
    batch = pyarrow.RecordBatch.from_arrays(values, names=list(_COLUMNS))
    head = f"INSERT INTO {table.sql} ({', '.join(map(quote_name, _COLUMNS))}) VALUES ".encode()
    for _, piece in _native.sql_values(batch, list(_COLUMNS), bytes_max=bytes_max):
        yield head, piece
