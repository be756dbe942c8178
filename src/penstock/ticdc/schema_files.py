# SPDX-License-Identifier: Apache-2.0
"""The schema files of TiCDC's storage sink: a table's definition at a version, and the statement that created
it.

The name of a file contains a CRC32 of the definition without the statement. The CRC32 is computed from the
JSON text that Go's encoder produces, with the columns sorted by name and an indentation of four spaces.
"""

import json
import zlib
from dataclasses import dataclass
from typing import Any

from penstock.errors import ChecksumMismatch, EventMalformed, EventUnsupported
from penstock.ticdc.layout import SchemaFile

_FIELDS = {
    "Table": str,
    "Schema": str,
    "Version": int,
    "TableVersion": int,
    "Query": str,
    "Type": int,
    "TableColumns": list | None,
    "TableColumnsTotal": int,
}
_COLUMN_FIELDS = {
    "ColumnId",
    "ColumnName",
    "ColumnType",
    "ColumnDefault",
    "ColumnPrecision",
    "ColumnScale",
    "ColumnNullable",
    "ColumnIsPk",
}
_FORMAT = 1

_UTF8 = "utf8mb4"
# A longer VARCHAR does not fit into a binlog's table map as UTF-8.
_VARCHAR_CHARACTERS_MAX = 16_383
# The maximum number of characters in all members of a SET.
_SET_CHARACTERS_MAX = 16_383
_ENUM_CHARACTERS_MAX = 255

_INTEGERS = {"TINYINT", "SMALLINT", "MEDIUMINT", "INT", "BIGINT"}
_TEXTS = {"TINYTEXT", "TEXT", "MEDIUMTEXT", "LONGTEXT"}
_BLOBS = {"TINYBLOB", "BLOB", "MEDIUMBLOB", "LONGBLOB"}
_TIMES = {"DATETIME", "TIMESTAMP", "TIME"}
_PLAIN = {"FLOAT", "DOUBLE", "DATE", "YEAR", "JSON"}


@dataclass(frozen=True)
class SinkColumn:
    """A column: its name, TiCDC's type in upper case without UNSIGNED, and the MySQL type as declared."""

    name: str
    kind: str
    type_text: str
    is_nullable: bool
    is_key: bool

    @property
    def is_binary(self) -> bool:
        """Whether values are bytes."""
        return self.kind in _BLOBS or self.kind in ("BINARY", "VARBINARY")

    @property
    def fraction_digits(self) -> int | None:
        """The number of digits of a second's fraction; None for a type without a time of day."""
        if self.kind not in _TIMES:
            return None
        return int(self.type_text.partition("(")[2].rstrip(")") or 0)

    @property
    def charset(self) -> str | None:
        """The character set, None for a type without text. TiDB sends all text as UTF-8."""
        is_text = self.kind in _TEXTS or self.kind in ("CHAR", "VARCHAR", "VAR_STRING", "ENUM", "SET")
        return _UTF8 if is_text else None


@dataclass(frozen=True)
class TableSchema:
    """A version of a table (or of a database if `table` is empty), and the statement that produced it."""

    database: str
    table: str
    version: int
    query: str
    columns: tuple[SinkColumn, ...]


def read_schema(file: SchemaFile, content: bytes) -> TableSchema:
    """Read a schema file.

    Raises EventMalformed for a file in another format, ChecksumMismatch if the content does not match the
    checksum in the file's name, and EventUnsupported for a type that MySQL does not have.
    """
    try:
        values = json.loads(content)
        if not isinstance(values, dict) or values.keys() != _FIELDS.keys():
            raise ValueError(f"its fields are {sorted(values)}")
        for name, kind in _FIELDS.items():
            if not isinstance(values[name], kind):
                raise ValueError(f"{name} is {values[name]!r}")
        columns = values["TableColumns"] or []
        for column in columns:
            if unknown := column.keys() - _COLUMN_FIELDS:
                raise ValueError(f"a column has the fields {sorted(unknown)}")
        if values["Version"] != _FORMAT or values["TableColumnsTotal"] != len(columns):
            raise ValueError(f"it has format {values['Version']} and {len(columns)} columns")
        if (values["Schema"], values["Table"], values["TableVersion"]) != (
            file.database,
            file.table,
            file.version,
        ):
            raise ValueError(f"it describes {values['Schema']}.{values['Table']} at {values['TableVersion']}")
        read = tuple(_column(column) for column in columns)
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise EventMalformed(
            f"{file.path} is not a schema file of TiCDC: {problem}",
            hint="Report it with the version of TiCDC",
        ) from problem
    if (checksum := definition_checksum(values)) != file.checksum:
        raise ChecksumMismatch(
            f"{file.path} has the checksum {checksum:010d}",
            hint="The file is damaged, or of an unknown version of TiCDC: begin a new changefeed",
        )
    return TableSchema(file.database, file.table, file.version, values["Query"], read)


def definition_checksum(values: dict[str, Any]) -> int:
    """Return the checksum of a schema file's definition."""
    columns = sorted(values["TableColumns"] or [], key=lambda column: str(column["ColumnName"]).encode())
    definition = {
        "Table": values["Table"],
        "Schema": values["Schema"],
        "Version": 0,
        "TableColumns": columns,
        "TableColumnsTotal": len(columns),
    }
    text = json.dumps(definition, indent=4, ensure_ascii=False)
    # Go's encoder escapes these characters, so that its output can be embedded in HTML.
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return zlib.crc32(text.encode())


def _column(values: dict[str, Any]) -> SinkColumn:
    type_name = str(values["ColumnType"])
    kind = type_name.removesuffix(" UNSIGNED")
    precision, scale = (values.get(field) for field in ("ColumnPrecision", "ColumnScale"))
    type_text = type_text_of(values["ColumnName"], kind, precision, scale, is_unsigned=type_name != kind)
    flags = {}
    for field, expected in (("ColumnNullable", "false"), ("ColumnIsPk", "true")):
        if (flag := values.get(field)) not in (None, expected):
            raise ValueError(f"{field} is {flag!r}")
        flags[field] = flag is not None
    return SinkColumn(
        str(values["ColumnName"]), kind, type_text, not flags["ColumnNullable"], flags["ColumnIsPk"]
    )


def type_text_of(name: str, kind: str, precision: str | None, scale: str | None, *, is_unsigned: bool) -> str:
    """Return the type of a column as MySQL declares it.

    Raises EventUnsupported for a type that MySQL does not have.
    """
    type_text = _type_text(name, kind, precision, scale)
    is_number = kind in _INTEGERS | {"DECIMAL", "FLOAT", "DOUBLE"}
    return f"{type_text} unsigned" if is_unsigned and is_number else type_text


def _type_text(name: str, kind: str, precision: str | None, scale: str | None) -> str:
    length = int(precision) if precision is not None else None
    word = kind.lower()
    if kind in _INTEGERS or kind in _TEXTS or kind in _BLOBS or kind in _PLAIN:
        return word
    if kind in _TIMES:
        return f"{word}({int(scale)})" if scale is not None else word
    if kind == "DECIMAL":
        return f"decimal({length},{int(scale or 0)})"
    if kind in ("BIT", "BINARY", "VARBINARY"):
        return f"{word}({length})"
    if kind in ("CHAR", "VARCHAR", "VAR_STRING") and length is not None:
        if length > _VARCHAR_CHARACTERS_MAX:
            return "mediumtext"
        return f"{'char' if kind == 'CHAR' else 'varchar'}({length})"
    if kind in ("ENUM", "SET"):
        # The file does not list the members of the type, so values are text.
        return f"varchar({_ENUM_CHARACTERS_MAX if kind == 'ENUM' else _SET_CHARACTERS_MAX})"
    raise EventUnsupported(
        f"the column `{name}` has the type {kind}, which has no equivalent in MySQL's binlog",
        hint="Leave the table out of the changefeed, with a filter rule",
    )
