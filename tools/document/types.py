# SPDX-License-Identifier: Apache-2.0
"""The page of types: each SQL type with its Arrow type and its Spark type."""

from typing import NamedTuple

import pyarrow
from pyspark.sql.pandas.types import from_arrow_schema

from penstock import _native
from tools.document.markdown import document, table


class SqlType(NamedTuple):
    """A type on the page. `note` describes its values, and `unfit` lists values that the Arrow type cannot
    represent.
    """

    text: str
    note: str = ""
    unfit: str = ""
    charset: str | None = None
    mariadb: bool = False


_NO_DAY = "zero and partial dates: `0000-00-00`, `2026-00-15`"
_NO_MOMENT = "zero and partial dates: `0000-00-00 00:00:00`"
_TEXT = "decoded from the column's character set to UTF-8"
_PLAIN = "this type needs a server or `schemas`: the log alone declares the column as `binary`"
_BAD_TEXT = "bytes that are not valid in the character set, as a hexadecimal literal"

NUMBERS = (
    SqlType("tinyint"),
    SqlType("tinyint unsigned"),
    SqlType("smallint"),
    SqlType("smallint unsigned"),
    SqlType("mediumint"),
    SqlType("mediumint unsigned"),
    SqlType("int"),
    SqlType("int unsigned"),
    SqlType("bigint"),
    SqlType("bigint unsigned", "Spark has no unsigned integers"),
    SqlType("decimal(10,2)"),
    SqlType("decimal(38,10)"),
    SqlType("decimal(65,30)", "over 38 digits: the text that the server prints"),
    SqlType("float"),
    SqlType("double"),
    SqlType("bit(1)"),
    SqlType("bit(63)"),
    SqlType("bit(64)"),
)
MOMENTS = (
    SqlType("year", "0, or 1901 to 2155"),
    SqlType("date", "", _NO_DAY),
    SqlType("time", "negative and over 24 hours too"),
    SqlType("time(6)"),
    SqlType("datetime", "no zone", _NO_MOMENT),
    SqlType("datetime(6)", "", _NO_MOMENT),
    SqlType("timestamp", "a point in time, in UTC", "the zero date"),
    SqlType("timestamp(6)", "", "the zero date"),
)
TEXTS = (
    SqlType("char(10)", _TEXT, _BAD_TEXT, "utf8mb4"),
    SqlType("varchar(255)", _TEXT, _BAD_TEXT, "latin1"),
    SqlType("text", _TEXT, _BAD_TEXT, "gbk"),
    SqlType("longtext", _TEXT, _BAD_TEXT, "utf8mb4"),
    SqlType("enum('a','b')", "the member; an empty string for an invalid value"),
    SqlType("set('a','b')", "members separated by commas"),
    SqlType("json", "the text that the server prints"),
    SqlType("json", "a LONGTEXT, unchanged", _BAD_TEXT, "utf8mb4", mariadb=True),
    SqlType("uuid", _PLAIN, mariadb=True),
    SqlType("inet4", _PLAIN, mariadb=True),
    SqlType("inet6", _PLAIN, mariadb=True),
)
BYTES = (
    SqlType("binary(16)", "padded with zero bytes to its length"),
    SqlType("varbinary(255)"),
    SqlType("blob"),
    SqlType("longblob"),
    SqlType("geometry", "SRID in four bytes, little-endian, then well-known binary"),
    SqlType("point", "the same"),
    SqlType("vector(3)"),
    SqlType("vector(3)", "as logged: little-endian 32-bit floats", mariadb=True),
)


def page() -> str:
    """Return the page."""
    head = (
        "The Arrow and Spark type of each SQL type. A decoded type never\n"
        "depends on a setting, and every column may be null. A value that its type cannot hold is null;\n"
        "`_metadata.unrepresentable`, a map of column to text, has the exact value. A column that is"
        " missing from\n"
        "a row image is null and listed in `_metadata.absent`."
    )
    parts = [head]
    for title, kinds in (
        ("Numbers", NUMBERS),
        ("Days and times", MOMENTS),
        ("Text", TEXTS),
        ("Bytes", BYTES),
    ):
        columns = ("SQL", "Arrow", "Spark", "value", "unrepresentable")
        parts += [f"## {title}", table(columns, [row(kind) for kind in kinds])]
    parts += ["## System columns", table(("column", "Arrow", "Spark", "null"), system_rows(_typed_system()))]
    parts += ["## Envelope", _ENVELOPE, table(("column", "Arrow", "Spark", "null"), system_rows(_envelope()))]
    return document("Types", "native/kernel/src/column", *parts)


_ENVELOPE = (
    "All tables in one shape: the system columns, the definition as JSON text, and the raw row\n"
    "images. Inserts have no `before` image and deletes no `after` image: it is null. The byte format:\n"
    "[envelope](../formats/envelope.md)."
)


def row(kind: SqlType) -> list[str]:
    """Return a type's row."""
    column = ("value", kind.text, kind.charset, True)
    schema = pyarrow.schema(_native.arrow_schema([column], mariadb=kind.mariadb, wanted=["value"]))
    where = " (MariaDB)" if kind.mariadb else ""
    return [
        f"`{kind.text}`{where}",
        f"`{schema.field(0).type}`",
        f"`{spark_of(schema)}`",
        kind.note,
        kind.unfit,
    ]


def spark_of(schema: pyarrow.Schema) -> str:
    """Return Spark's name for the type of a schema's first column."""
    return str(from_arrow_schema(schema, prefer_timestamp_ntz=True).fields[0].dataType.simpleString())


def system_rows(schema: pyarrow.Schema) -> list[list[str]]:
    """Return a row for each column, and for each field of a struct."""
    rows = []
    for field in schema:
        inner = list(field.type) if pyarrow.types.is_struct(field.type) else []
        kind = "struct" if inner else str(field.type)
        rows.append([f"`{field.name}`", f"`{kind}`", _spark_kind(field), "yes" if field.nullable else "no"])
        for member in inner:
            name = f"`{field.name}.{member.name}`"
            rows.append([name, f"`{member.type}`", _spark_kind(member), "yes" if member.nullable else "no"])
    return rows


def _spark_kind(field: pyarrow.Field) -> str:
    text = spark_of(pyarrow.schema([field]))
    return "`struct`" if text.startswith("struct<") else f"`{text}`"


def _typed_system() -> pyarrow.Schema:
    return pyarrow.schema(_native.arrow_schema([]))


def _envelope() -> pyarrow.Schema:
    columns = [field for field in pyarrow.schema(_native.envelope_schema()) if not field.name.startswith("_")]
    return pyarrow.schema(columns)
