# SPDX-License-Identifier: Apache-2.0
"""Builds the statements that write and delete rows of a MySQL or MariaDB target, with many rows per
statement.
"""

from collections.abc import Iterator, Sequence

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Target
from penstock.model import Column, quote_name
from penstock.sinks.mysql.tables import Layout
from penstock.sinks.sql.rows import split_rows

# Conditions on several columns use optimizer memory, which is limited.
_KEYS_MAX = 500


def columns_written(target: Target, layout: Layout) -> list[str]:
    """Return the writable columns that the rows and the table have in common."""
    return [name for name in target.column_names if name in layout.columns and name not in layout.generated]


def replace_statements(
    batch: pyarrow.RecordBatch, target: Target, layout: Layout, bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that write rows. An existing row that shares a unique value with a written row is
    replaced.

    A table with a single unique key and columns that the rows do not have is updated in place, so that those
    columns keep their values.
    """
    columns = columns_written(target, layout)
    names = ", ".join(map(quote_name, columns))
    has_other_columns = len(columns) + len(layout.generated) < len(layout.columns)
    verb, tail = "REPLACE", b""
    if has_other_columns and len(layout.unique_keys) == 1:
        verb = "INSERT"
        updates = ", ".join(f"{quote_name(name)}=VALUES({quote_name(name)})" for name in columns)
        tail = f" ON DUPLICATE KEY UPDATE {updates}".encode()
    head = f"{verb} INTO {target.name.sql} ({names}) VALUES ".encode()
    for part in split_rows(batch):
        for _, piece in _native.sql_values(part, columns, bytes_max=bytes_max):
            yield head, piece, tail


def insert_statements(
    batch: pyarrow.RecordBatch, target: Target, columns: Sequence[str], bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that insert rows."""
    head = f"INSERT INTO {target.name.sql} ({', '.join(map(quote_name, columns))}) VALUES ".encode()
    for part in split_rows(batch):
        for _, piece in _native.sql_values(part, columns, bytes_max=bytes_max):
            yield head, piece


def delete_statements(
    batch: pyarrow.RecordBatch, target: Target, key: Sequence[str], bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    """Yield the statements that delete rows by key, compared byte by byte."""
    head = f"DELETE FROM {target.name.sql} WHERE ".encode()
    for part in split_rows(batch):
        for condition in _conditions(part, target, key, bytes_max):
            yield (head, *condition)


def _conditions(
    batch: pyarrow.RecordBatch, target: Target, key: Sequence[str], bytes_max: int
) -> Iterator[tuple[bytes, ...]]:
    exact = {name: f"CAST(CONVERT({quote_name(name)} USING utf8mb4) AS BINARY)" for name in key}
    texts = [name for name in key if target.column(name).charset is not None]
    if len(key) == 1:
        pieces = _native.sql_values(batch, key, before=[""], behind="", bytes_max=bytes_max)
        for _, piece in pieces:
            condition: tuple[bytes, ...] = (quote_name(key[0]).encode(), b" IN (", piece, b")")
            if texts:
                # A collation may treat different letters as equal. The index finds candidates, and a
                # comparison of bytes selects among them.
                condition += (b" AND ", exact[key[0]].encode(), b" IN (", piece, b")")
            yield condition
        return
    before = [f"{' AND ' if index else '('}{quote_name(name)}=" for index, name in enumerate(key)]
    before += [f" AND {exact[name]}=" for name in texts]
    for _, piece in _native.sql_values(
        batch, [*key, *texts], before=before, between=" OR ", bytes_max=bytes_max, rows_max=_KEYS_MAX
    ):
        yield (piece,)


def delete_equal_statements(
    batch: pyarrow.RecordBatch, target: Target, columns: Sequence[str], mariadb: bool
) -> Iterator[bytes]:
    """For each row, yield a statement that deletes one of the table's rows that equal this row."""
    compared = [name for name in columns if not target.column(name).type_text.startswith("vector")]
    comparisons = [_equal(target.column(name), mariadb) for name in compared]
    before = [f"DELETE FROM {target.name.sql} WHERE {comparisons[0]}"] + [
        f" AND {comparison}" for comparison in comparisons[1:]
    ]
    for part in split_rows(_widen_floats(batch, compared)):
        pieces = _native.sql_values(part, compared, before=before, behind=" LIMIT 1", between="", rows_max=1)
        for _, statement in pieces:
            yield statement


def _equal(column: Column, mariadb: bool) -> str:
    name = quote_name(column.name)
    if column.charset is not None:
        return f"CAST(CONVERT({name} USING utf8mb4) AS BINARY)<=>"
    if column.type_text == "json" and not mariadb:
        # Compare a JSON document by its text, because the row was read in that form.
        return f"CAST({name} AS CHAR)<=>"
    return f"{name}<=>"


def _widen_floats(batch: pyarrow.RecordBatch, columns: Sequence[str]) -> pyarrow.RecordBatch:
    """Return rows with FLOAT columns as DOUBLE.

    The server compares FLOAT columns as doubles. The shortest decimal text of a float denotes a different
    double, so the comparison would fail.
    """
    for name in columns:
        index = batch.schema.get_field_index(name)
        if pyarrow.types.is_float32(batch.column(index).type):
            wide = pc.cast(batch.column(index), pyarrow.float64())
            batch = batch.set_column(index, name, wide)
    return batch
