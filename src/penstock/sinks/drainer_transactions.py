# SPDX-License-Identifier: Apache-2.0
"""Encodes changes in the transaction formats of TiDB-Binlog's Drainer: `slave.binlog` in Kafka, `pb_binlog`
in files.

Each message holds a whole transaction or a statement, with its commit timestamp. In Kafka the changes are
grouped by table, and each group starts with the columns and keys of its table. In files the changes are
events in commit order, each with the names and types of its columns. Both formats are protobuf
(github.com/pingcap/tidb-binlog, `secondary_binlog.proto` and `pb_binlog.proto`). Comments in the code give
the names of the fields.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, DefiningStatement, Origin, Target
from penstock.errors import LimitExceeded
from penstock.limits import DRAINER_TRANSACTION_BYTES_MAX
from penstock.model import Column
from penstock.protobuf import encode

DrainerForm = Literal["kafka", "file"]

# Rows of a full load do not belong to a transaction, and are cut into messages of about this size. Brokers
# accept 1 MiB by default.
_LOAD_BYTES = 1 << 19

_DML, _DDL = 0, 1
_UNSPECIFIED = -1
_TYPE = re.compile(r"(?:(?:long )?[a-z0-9]+)")
_MEMBER = re.compile(r"'((?:[^']|'')*)'")

# The widths that TiDB reports for integer types without a width: signed and unsigned.
_INTEGER_WIDTHS = {
    "tinyint": (4, 3),
    "smallint": (6, 5),
    "mediumint": (9, 8),
    "int": (11, 10),
    "bigint": (20, 20),
}
_TIME_WIDTHS = {"time": 10, "datetime": 19, "timestamp": 19}
_WIDTHS = {
    "year": 4,
    "date": 10,
    "float": 12,
    "double": 22,
    "tinyblob": 255,
    "tinytext": 255,
    "blob": 65535,
    "text": 65535,
    "mediumblob": 16777215,
    "mediumtext": 16777215,
}
# MySQL's type numbers. TiDB stores each of the types DECIMAL, JSON, ENUM, SET, BLOB and TEXT under its own
# number.
_CODES = {
    "tinyint": 0x01,
    "smallint": 0x02,
    "int": 0x03,
    "float": 0x04,
    "double": 0x05,
    "timestamp": 0x07,
    "bigint": 0x08,
    "mediumint": 0x09,
    "date": 0x0A,
    "time": 0x0B,
    "datetime": 0x0C,
    "year": 0x0D,
    "varchar": 0x0F,
    "varbinary": 0x0F,
    "bit": 0x10,
    "json": 0xF5,
    "decimal": 0xF6,
    "enum": 0xF7,
    "set": 0xF8,
    "tinyblob": 0xF9,
    "tinytext": 0xF9,
    "mediumblob": 0xFA,
    "mediumtext": 0xFA,
    "longblob": 0xFB,
    "longtext": 0xFB,
    "blob": 0xFC,
    "text": 0xFC,
    "char": 0xFE,
    "binary": 0xFE,
}
_STRING_CODE = 0x0F


@dataclass
class _OpenTransaction:
    """The transaction whose changes are being collected: its parts by table, in order of appearance."""

    instance: str
    version: int
    bytes: int = 0
    parts: dict[Target, list[memoryview]] = field(default_factory=dict)
    events: list[memoryview] = field(default_factory=list)


class DrainerTransactions:
    """Collects changes in commit order, and returns each transaction as a message once it is complete."""

    def __init__(self, form: DrainerForm, *, bytes_max: int = DRAINER_TRANSACTION_BYTES_MAX) -> None:
        self._form = form
        self._bytes_max = bytes_max
        self._open: _OpenTransaction | None = None
        self._heads: dict[Target, list[bytes]] = {}

    def add(self, changes: Changes) -> Iterator[bytes]:
        """Add changes, and yield every transaction except the last one: a transaction is complete once a
        later one begins.

        Rows of a full load are complete at once. Raises EventUnsupported for a row image that is missing a
        column, and LimitExceeded for a transaction above the limit.
        """
        if not len(changes):
            return
        target = changes.target
        parts = pyarrow.record_batch(
            _native.encode_drainer(
                changes.rows,
                target.declared,
                database=target.name.database,
                table=target.name.table,
                mariadb=target.mariadb,
                heads=self._heads_of(target) if self._form == "file" else None,
            )
        )
        instance = pc.struct_field(changes.rows.column("_metadata"), "instance")[0].as_py()
        is_load = changes.origin is Origin.LOAD
        for version, content in _runs(parts, _LOAD_BYTES if is_load else None):
            same = self._open is not None and (self._open.instance, self._open.version) == (instance, version)
            if not same or is_load:
                yield from self.finish()
            if self._open is None:
                self._open = _OpenTransaction(instance, version)
            self._open.bytes += len(content)
            if self._open.bytes > self._bytes_max:
                raise LimitExceeded(
                    f"a transaction has more than {self._bytes_max} bytes in Drainer's form, which cannot"
                    " divide it",
                    position=str(version),
                    hint="Use a sink that writes large transactions in parts, such as mysql or files",
                )
            if self._form == "file":
                self._open.events.append(content)
            else:
                self._open.parts.setdefault(target, []).append(content)
        if is_load:
            yield from self.finish()

    def statement(self, statement: DefiningStatement) -> Iterator[bytes]:
        """Yield the transaction that is still open, and then the statement."""
        yield from self.finish()
        database, table = statement.database, ""
        if len(statement.tables) == 1:
            database, table = database or statement.tables[0].database, statement.tables[0].table
        if self._form == "file":
            quoted = statement.database.replace("`", "``")
            text = f"use `{quoted}`; {statement.text};" if quoted else f"{statement.text};"
            content = text.encode()
        else:
            # DDLData.schema_name, table_name, ddl_query
            content = encode((1, database), (2, table), (3, statement.text))
        # Binlog.type or tp, commit_ts, ddl_data or ddl_query
        yield encode((1, _DDL), (2, statement.version), (4, content))

    def finish(self) -> Iterator[bytes]:
        """Yield the transaction that is still open, if there is one."""
        transaction, self._open = self._open, None
        if transaction is None:
            return
        if self._form == "file":
            content = b"".join(transaction.events)
        else:
            # DMLData.tables
            content = b"".join(
                encode((1, _table_head(target) + b"".join(parts) + _table_keys(target)))
                for target, parts in transaction.parts.items()
            )
        # Binlog.type or tp, commit_ts, dml_data
        yield encode((1, _DML), (2, transaction.version), (3, content))

    def _heads_of(self, target: Target) -> list[bytes]:
        """Return what precedes the values of each column in a file: its name, type number and type."""
        heads = self._heads.get(target)
        if heads is None:
            heads = []
            for column in target.columns:
                name = _type_name(column)
                code = _CODES.get(name, _STRING_CODE)
                # Column.name, tp, mysql_type
                heads.append(encode((1, column.name), (2, bytes([code])), (3, name)))
            self._heads[target] = heads
        return heads


def _runs(parts: pyarrow.RecordBatch, bytes_max: int | None) -> Iterator[tuple[int, memoryview]]:
    """Yield runs of consecutive changes that have the same commit version, as the version and the
    concatenated values. The values are not copied.

    With `bytes_max`, a run ends as soon as it has reached this size.
    """
    values, versions = parts.column("value"), parts.column("version").to_numpy(zero_copy_only=False)
    _, offsets, data = values.buffers()
    ends = memoryview(offsets).cast("q")
    content = memoryview(data) if data is not None else memoryview(b"")
    first = 0
    for index in range(1, len(versions) + 1):
        is_full = bytes_max is not None and ends[index] - ends[first] >= bytes_max
        if is_full or index == len(versions) or versions[index] != versions[first]:
            yield int(versions[first]), content[ends[first] : ends[index]]
            first = index
            if first == len(versions):
                return


def _table_head(target: Target) -> bytes:
    """Return the fields of a `Table` that precede its mutations: names and columns."""
    # Table.schema_name, table_name
    parts = [encode((1, target.name.database), (2, target.name.table))]
    for column in target.columns:
        width, scale = _width(column)
        # ColumnInfo.name, mysql_type, is_primary_key, flen, decimal
        info = encode(
            (1, column.name),
            (2, _type_name(column)),
            (3, int(column.name in target.primary_key)),
            (4, width),
            (5, scale),
        )
        parts.append(encode((3, info)))
    return b"".join(parts)


def _table_keys(target: Target) -> bytes:
    """Return the unique keys of a `Table`, the primary key first. Other keys are named after their first
    column.
    """
    keys = [("PRIMARY", target.primary_key)] if target.primary_key else []
    keys += [(columns[0], columns) for columns in target.unique_keys if columns != target.primary_key]
    # Table.unique_keys; Key.name, column_names
    return b"".join(
        encode((5, encode((1, name), *((2, column) for column in columns)))) for name, columns in keys
    )


def _type_name(column: Column) -> str:
    """Return the name of a column's type, without its width and attributes."""
    match = _TYPE.match(column.type_text.lower())
    return match[0] if match else column.type_text.lower()


def _width(column: Column) -> tuple[int, int]:
    """Return the width and the number of decimals of a column, as TiDB reports them; -1 for unspecified."""
    name, text = _type_name(column), column.type_text.lower()
    if name in ("enum", "set"):
        members = [len(member.replace("''", "'")) for member in _MEMBER.findall(column.type_text)]
        return (sum(members) + len(members) - 1 if name == "set" else max(members, default=0)), 0
    numbers = re.match(r"[a-z0-9 ]+\((\d+)(?:,(\d+))?\)", text)
    width, scale = (int(numbers[1]), int(numbers[2] or 0)) if numbers else (None, 0)
    if name in _INTEGER_WIDTHS:
        return (_INTEGER_WIDTHS[name]["unsigned" in text] if width is None else width), 0
    if name in _TIME_WIDTHS:
        return _TIME_WIDTHS[name] + (width + 1 if width else 0), width or 0
    if name in ("float", "double") and numbers is None:
        return _WIDTHS[name], _UNSPECIFIED
    return (_WIDTHS.get(name, _UNSPECIFIED) if width is None else width), scale
