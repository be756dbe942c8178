# SPDX-License-Identifier: Apache-2.0
"""The column types of the convergence machine: for each type, the types to which it can be widened, and
literals.
"""

import random
import re
from dataclasses import dataclass
from typing import Any

import pymysql

_INTEGER_BYTES = {"tinyint": 1, "smallint": 2, "mediumint": 3, "int": 4, "bigint": 8}
_WORDS = ("", "a", "A", "b", "B ", "canal", "Zürich", "O'Neil", "a\\b", "naïve", "12", "-7", "3.5", "x" * 40)
_WIDE_WORDS = ("水", "🚰", "TAB\t")

TYPES = (
    "INT",
    "BIGINT",
    "BIGINT UNSIGNED",
    "SMALLINT",
    "TINYINT UNSIGNED",
    "DECIMAL(10,2)",
    "DECIMAL(30,10)",
    "DOUBLE",
    "VARCHAR(10)",
    "VARCHAR(60)",
    "VARCHAR(40) CHARACTER SET latin1",
    "CHAR(8)",
    "TEXT",
    "VARBINARY(30)",
    "BLOB",
    "DATE",
    "DATETIME",
    "DATETIME(6)",
    "TIMESTAMP(3) NULL",
    "TIME(3)",
    "YEAR",
    "ENUM('new', 'paid', 'sent')",
    "SET('a', 'b', 'c')",
    "BIT(12)",
    "JSON",
)

# For each type, a wider type that holds all of its values in every target with types.
WIDENINGS = {
    "smallint": "INT",
    "int": "BIGINT",
    "varchar(10)": "VARCHAR(60)",
    "decimal(10,2)": "DECIMAL(20,2)",
}

KEYS = (
    ("id INT NOT NULL", "id"),
    ("id BIGINT UNSIGNED NOT NULL", "id"),
    ("id VARCHAR(12) NOT NULL", "id"),
    ("id VARBINARY(8) NOT NULL", "id"),
    ("id INT NOT NULL, line SMALLINT NOT NULL", "id, line"),
    ("code VARCHAR(10) NOT NULL, id INT NOT NULL", "code, id"),
    ("id DATETIME(3) NOT NULL", "id"),
    ("id DECIMAL(8,2) NOT NULL", "id"),
)


@dataclass(frozen=True)
class SourceColumn:
    """A column according to information_schema."""

    name: str
    kind: str
    nullable: bool
    charset: str | None
    is_generated: bool
    in_primary_key: bool


def columns_of(cursor: Any, table: str) -> list[SourceColumn]:
    """Return the columns of a table in the session's database, [] if the table does not exist."""
    cursor.execute(
        "SELECT COLUMN_NAME, COLUMN_TYPE, IS_NULLABLE, CHARACTER_SET_NAME, EXTRA, COLUMN_KEY"
        " FROM information_schema.COLUMNS WHERE TABLE_SCHEMA = DATABASE() AND TABLE_NAME = %s"
        " ORDER BY ORDINAL_POSITION",
        (table,),
    )
    return [
        SourceColumn(
            name,
            str(kind).lower(),
            nullable == "YES",
            charset,
            "GENERATED" in extra.upper().replace("DEFAULT_GENERATED", ""),
            key == "PRI",
        )
        for name, kind, nullable, charset, extra, key in cursor.fetchall()
    ]


def literal(chance: random.Random, column: SourceColumn) -> str:
    """Return an SQL literal that a column accepts. Keys are chosen from few values, so that they collide."""
    if column.nullable and chance.random() < 0.2:
        return "NULL"
    word = re.split(r"[( ]", column.kind)[0]
    if word in _INTEGER_BYTES:
        return str(
            _integer(chance, 8 * _INTEGER_BYTES[word], "unsigned" in column.kind, column.in_primary_key)
        )
    numbers = [int(number) for number in re.findall(r"\d+", column.kind.split(")")[0])]
    if word == "decimal":
        whole = chance.choice((0, 1, chance.randint(0, 10 ** (numbers[0] - numbers[1]) - 1)))
        whole = chance.randint(0, 12) if column.in_primary_key else whole
        return f"{chance.choice(('', '-'))}{whole}.{chance.randint(0, 10 ** numbers[1] - 1):0{numbers[1]}}"
    if word in ("float", "double"):
        return str(chance.randint(-4000, 4000) / 8)
    if word in ("varchar", "char", "tinytext", "text", "mediumtext", "longtext"):
        if column.charset is not None and column.charset.startswith("utf8mb4") and chance.random() < 0.1:
            return _quoted(chance.choice(_WIDE_WORDS))
        text = chance.choice(_WORDS)
        if column.in_primary_key:
            text = f"{chance.choice('aAbB')}{chance.randint(0, 6)}"
        return _quoted(text[: numbers[0] if word in ("varchar", "char") else None])
    if "blob" in word or "binary" in word:
        length = 1 if column.in_primary_key else chance.randint(0, min(numbers[0], 20) if numbers else 20)
        return f"X'{chance.randbytes(length).hex()}'"
    if word in ("enum", "set"):
        return _quoted(chance.choice(re.findall(r"'([^']*)'", column.kind)))
    if word == "bit":
        return str(chance.randint(0, 2 ** numbers[0] - 1))
    if word == "json":
        return f"""'{{"n": {chance.randint(0, 9)}, "t": ["x", null, {chance.randint(0, 99)}.5]}}'"""
    if word == "year":
        return str(chance.choice((1901, 2000, 2026, 2155)))
    return f"'{_moment(chance, word, numbers[0] if numbers else 0, column.in_primary_key)}'"


def _integer(chance: random.Random, bits: int, is_unsigned: bool, is_key: bool) -> int:
    low, high = (0, 2**bits - 1) if is_unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if is_key or chance.random() < 0.7:
        return chance.randint(0, 14)
    return chance.choice((low, high, chance.randint(low, high)))


def _moment(chance: random.Random, word: str, digits: int, is_key: bool) -> str:
    day = f"{chance.choice((1971, 2000, 2026))}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"
    clock = f"{chance.randint(0, 23):02}:{chance.randint(0, 59):02}:{chance.randint(0, 59):02}"
    if is_key:
        day, clock = "2026-01-01", f"00:00:{chance.randint(0, 14):02}"
    fraction = f".{chance.randint(0, 10**digits - 1):0{digits}}" if digits and not is_key else ""
    if word == "date":
        return day
    return clock + fraction if word == "time" else f"{day} {clock}{fraction}"


def _quoted(text: str) -> str:
    escaped: str = pymysql.converters.escape_string(text)
    return f"'{escaped}'"
