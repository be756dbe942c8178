# SPDX-License-Identifier: Apache-2.0
"""The statements that put rows into a MySQL or MariaDB target and take them away, many rows in each."""

from collections.abc import Iterator, Sequence

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Target
from penstock.model import Column, quote_name
from penstock.sinks.mysql.tables import Layout
from penstock.sinks.sql.rows import bounded

# Conditions on several columns cost the optimizer memory, which is bounded.
_KEYS_MAX = 500


def columns_written(target: Target, layout: Layout) -> list[str]:
    """Return the columns that both have, and that take values."""
    return [name for name in target.column_names if name in layout.columns and name not in layout.generated]


def put_statements(
    batch: pyarrow.RecordBatch, target: Target, layout: Layout, bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that put rows in place of whatever shares a unique value with them.

    A table with one key only, and with columns that the rows do not have, is updated in place, so that those
    keep their values.
    """
    columns = columns_written(target, layout)
    names = ", ".join(map(quote_name, columns))
    further = len(columns) + len(layout.generated) < len(layout.columns)
    verb, tail = "REPLACE", b""
    if further and len(layout.unique_keys) == 1:
        verb = "INSERT"
        updates = ", ".join(f"{quote_name(name)}=VALUES({quote_name(name)})" for name in columns)
        tail = f" ON DUPLICATE KEY UPDATE {updates}".encode()
    head = f"{verb} INTO {target.name.sql} ({names}) VALUES ".encode()
    for some in bounded(batch):
        for _, piece in _native.sql_values(some, columns, bytes_max=bytes_max):
            yield head, piece, tail


def insert_statements(
    batch: pyarrow.RecordBatch, target: Target, columns: Sequence[str], bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that add rows."""
    head = f"INSERT INTO {target.name.sql} ({', '.join(map(quote_name, columns))}) VALUES ".encode()
    for some in bounded(batch):
        for _, piece in _native.sql_values(some, columns, bytes_max=bytes_max):
            yield head, piece


def take_statements(
    batch: pyarrow.RecordBatch, target: Target, key: Sequence[str], bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that take away the rows of some keys, and none whose key has other bytes."""
    head = f"DELETE FROM {target.name.sql} WHERE ".encode()
    for some in bounded(batch):
        for condition in _conditions(some, target, key, bytes_max):
            yield (head, *condition)


def _conditions(
    batch: pyarrow.RecordBatch, target: Target, key: Sequence[str], bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    exact = {name: f"CAST(CONVERT({quote_name(name)} USING utf8mb4) AS BINARY)" for name in key}
    texts = [name for name in key if target.column(name).charset is not None]
    if len(key) == 1:
        pieces = _native.sql_values(batch, key, before=[""], behind="", bytes_max=bytes_max)
        for _, piece in pieces:
            found: tuple[bytes, ...] = (quote_name(key[0]).encode(), b" IN (", piece, b")")
            if texts:
                # To a collation other letters are the same; the index finds them, and their bytes decide.
                found += (b" AND ", exact[key[0]].encode(), b" IN (", piece, b")")
            yield found
        return
    before = [f"{' AND ' if place else '('}{quote_name(name)}=" for place, name in enumerate(key)]
    before += [f" AND {exact[name]}=" for name in texts]
    for _, piece in _native.sql_values(
        batch, [*key, *texts], before=before, between=" OR ", bytes_max=bytes_max, rows_max=_KEYS_MAX
    ):
        yield (piece,)


def take_equal_statements(
    batch: pyarrow.RecordBatch, target: Target, columns: Sequence[str], mariadb: bool
) -> Iterator[bytes]:
    """Yield one statement for each row, which takes away one row that is equal with it."""
    compared = [name for name in columns if not target.column(name).type_text.startswith("vector")]
    found = [_equal(target.column(name), mariadb) for name in compared]
    before = [f"DELETE FROM {target.name.sql} WHERE {found[0]}"] + [f" AND {one}" for one in found[1:]]
    for some in bounded(_wide(batch, compared)):
        pieces = _native.sql_values(some, compared, before=before, behind=" LIMIT 1", between="", rows_max=1)
        for _, statement in pieces:
            yield statement


def _equal(column: Column, mariadb: bool) -> str:
    name = quote_name(column.name)
    if column.charset is not None:
        return f"CAST(CONVERT({name} USING utf8mb4) AS BINARY)<=>"
    if column.type_text == "json" and not mariadb:
        # A document is compared by the text that it was read as.
        return f"CAST({name} AS CHAR)<=>"
    return f"{name}<=>"


def _wide(batch: pyarrow.RecordBatch, columns: Sequence[str]) -> pyarrow.RecordBatch:
    """A FLOAT compares as the DOUBLE that it is exactly, which its own shortest digits are not."""
    for name in columns:
        place = batch.schema.get_field_index(name)
        if pyarrow.types.is_float32(batch.column(place).type):
            wide = pc.cast(batch.column(place), pyarrow.float64())
            batch = batch.set_column(place, name, wide)
    return batch
