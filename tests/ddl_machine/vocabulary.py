# SPDX-License-Identifier: Apache-2.0
"""Names, types, charsets and values for random statements.

Values expose a wrong definition: high bits for signs, characters whose bytes differ between charsets, and
numbers that no two columns share.
"""

import random
import re

# These names are quoted everywhere, because at least one server reserves them.
RESERVED_NAMES = (
    "add", "after", "as", "by", "change", "check", "column", "constraint", "default", "drop", "enum", "first",
    "for", "foreign", "from", "index", "key", "like", "not", "null", "order", "partition", "primary",
    "rename", "row", "select", "set", "table", "to", "unique", "where", "with", "a b", "a`b", "a\"b", "x,y",
    "z)", "--", "#", "'", "/*", "é(",
)  # fmt: skip
# Keywords that every server accepts as unquoted names.
KEYWORD_NAMES = (
    "algorithm", "ascii", "bit", "bool", "byte", "charset", "comment", "compressed", "data", "date",
    "disable", "enable", "end", "engine", "exchange", "fixed", "hash", "import", "invisible", "nowait",
    "open", "overlaps", "partitions", "password", "period", "point", "rebuild", "remove", "sequence",
    "serial", "start", "status", "system", "temporary", "text", "time", "timestamp", "truncate", "type",
    "unicode", "until", "value", "view", "wait", "without", "year",
)  # fmt: skip
PLAIN_NAMES = ("a", "b", "c", "d", "e", "F", "g1", "é", "名", "$h", "_i", "2k")
TABLE_NAMES = ("t", "u", "value", "period", "system", "v w", "like", "日本", "T2", "x`y", "sequence", "_new")

CHARSETS = ("latin1", "utf8mb4", "utf8mb3", "gbk", "cp1251", "ascii", "ucs2", "utf16", "sjis", "binary")
COLLATIONS = ("latin1_swedish_ci", "utf8mb4_bin", "utf8mb4_unicode_ci", "gbk_bin", "cp1251_general_ci",
              "utf8mb3_general_ci", "latin1_bin")  # fmt: skip
LETTERS = {
    "latin1": "é€ÿß", "utf8mb4": "中😀éß", "utf8mb3": "中éЖ", "gbk": "中文字", "cp1251": "ЖыЙя",
    "ascii": "az09",
    "ucs2": "中éЖ", "utf16": "😀中é", "sjis": "日本ア",
}  # fmt: skip

_INTEGERS = (
    "TINYINT", "tinyint unsigned", "TINYINT(1)", "BOOL", "SMALLINT", "SMALLINT UNSIGNED",
    "MEDIUMINT(5) ZEROFILL", "INT", "INTEGER UNSIGNED", "INT(7)", "INT4", "int1 unsigned", "MIDDLEINT",
    "BIGINT", "BIGINT UNSIGNED", "INT8 SIGNED", "BIGINT(20) UNSIGNED ZEROFILL",
)  # fmt: skip
_NUMBERS = (
    "DECIMAL", "DEC(5)", "NUMERIC(10,3) UNSIGNED", "FIXED(7,2)", "DECIMAL(30,10)", "FLOAT", "FLOAT(30)",
    "FLOAT(10)", "FLOAT(7,3) UNSIGNED", "DOUBLE PRECISION", "REAL", "DOUBLE(10,2) UNSIGNED", "FLOAT8",
    "BIT", "BIT(9)", "BIT(40)",
)  # fmt: skip
_TIMES = (
    "YEAR", "YEAR(4)", "DATE", "TIME", "TIME(3)", "DATETIME", "DATETIME(6)", "TIMESTAMP NULL",
    "TIMESTAMP(2) NULL", "TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP",
    "DATETIME(3) DEFAULT NOW(3) ON UPDATE NOW(3)",
)  # fmt: skip
_TEXTS = (
    "CHAR", "CHAR(5)", "CHARACTER VARYING(20)", "VARCHAR(30)", "VARCHARACTER(7)", "varchar(300)", "TEXT",
    "TEXT(40)", "TEXT(9000)", "TINYTEXT", "MEDIUMTEXT", "LONGTEXT", "LONG VARCHAR", "LONG",
    "ENUM('a','b','c')", "ENUM('x,y','z''q', 'é')", "SET('p','q','r')", "set('1)','2(')",
)  # fmt: skip
_FIXED_TEXTS = (
    "NATIONAL CHAR(4)", "NCHAR VARYING(9)", "NVARCHAR(5)", "NCHAR(3)", "NATIONAL VARCHAR(6)",
    "VARCHAR(8) BINARY", "CHAR(4) ASCII", "CHAR(4) UNICODE", "JSON",
)  # fmt: skip
_BYTES = (
    "BINARY(3)", "VARBINARY(20)", "BLOB", "BLOB(300)", "TINYBLOB", "LONGBLOB", "LONG VARBINARY",
    "CHAR(4) BYTE", "VARCHAR(9) BYTE", "MEDIUMBLOB", "BINARY",
)  # fmt: skip
_SHAPES = ("GEOMETRY", "POINT", "LINESTRING", "GEOMETRYCOLLECTION")
_MARIADB = (
    "UUID", "INET6", "INET4", "VARCHAR(20) COMPRESSED", "TEXT COMPRESSED", "BLOB COMPRESSED=zlib",
    "LONGTEXT COMPRESSED", "VARBINARY(50) COMPRESSED", "TINYINT SIGNED", "TINYBLOB COMPRESSED",
    "VARCHAR(30) /*M!100301 COMPRESSED*/",
)  # fmt: skip
_MYSQL = ("VECTOR(3)", "GEOMCOLLECTION", "INT SIGNED", "VECTOR")


def column_type(chance: random.Random, mariadb: bool) -> str:
    """Return a type, with a charset if it may have one."""
    own = _MARIADB if mariadb else _MYSQL
    kinds = (_INTEGERS, _NUMBERS, _TIMES, _TEXTS, _FIXED_TEXTS, _BYTES, _SHAPES, own)
    [kind] = chance.choices(kinds, weights=(30, 14, 12, 26, 4, 8, 3, 5))
    text = chance.choice(kind)
    if kind is _TEXTS and chance.random() < 0.5:
        text += " " + charset_clause(chance)
    return text


def charset_clause(chance: random.Random, equals: str = "") -> str:
    """Return `CHARACTER SET x`, `COLLATE x` or both, in one of their spellings."""
    charset = chance.choice(CHARSETS)
    words = chance.choice(("CHARACTER SET", "CHARSET", "character  set", "CHAR SET"))
    name = chance.choice((charset, charset.upper(), f"'{charset}'", f"`{charset}`"))
    match chance.randrange(4):
        case 0:
            return f"COLLATE {equals} {chance.choice(COLLATIONS)}"
        case 1 if charset != "binary":
            return f"{words} {equals} {name} COLLATE {equals} {charset}_bin"
        case _:
            return f"{words} {equals} {name}"


def value(chance: random.Random, type_text: str, charset: str | None, mariadb: bool) -> str | None:
    """Return an expression for a value of a type in information_schema, None for a type without values."""
    name = re.split(r"[ (]", type_text, maxsplit=1)[0]
    numbers = [int(number) for number in re.findall(r"\d+", type_text.partition("(")[2].partition(")")[0])]
    if name in _INTEGER_BITS:
        return _integer(chance, _INTEGER_BITS[name], "unsigned" in type_text)
    if name in ("decimal", "float", "double"):
        digits = min(6, numbers[0] - numbers[1]) if len(numbers) == 2 else 5
        sign = chance.choice(("", "" if "unsigned" in type_text else "-"))
        return f"{sign}{chance.randrange(10**digits)}{'' if numbers[1:] == [0] else '.5'}"
    if name == "bit":
        return str(chance.getrandbits(numbers[0]))
    if name in ("enum", "set"):
        members = type_text.count("','") + 1
        return str(chance.randint(1, members if name == "enum" else (1 << members) - 1))
    if name in ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"):
        # MySQL keeps the bytes when a BLOB becomes a VECTOR. Unless they are floats, readers stop with a
        # named error.
        length = min(numbers[0] if numbers else 8, 6 if mariadb else 8)
        return f"x'{chance.randbytes(length).hex()}'"
    if name in ("char", "varchar", "tinytext", "text", "mediumtext", "longtext"):
        length = min(numbers[0] if numbers else 5, 5)
        letters = LETTERS.get(charset or "", "az")
        return quoted("".join(chance.choice(letters) for _ in range(chance.randint(1, length))))
    return _moment(chance, name, numbers) or _special(chance, name, numbers, mariadb)


def quoted(text: str) -> str:
    """Return a literal that has the same meaning in every SQL mode and session charset."""
    return f"CONVERT(x'{text.encode().hex()}' USING utf8mb4)"


_INTEGER_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}


def _integer(chance: random.Random, bits: int, unsigned: bool) -> str:
    if unsigned:
        return str((1 << bits) - chance.randint(1, 100))
    return str(chance.choice((1, -1)) * chance.randint(1, (1 << bits - 1) - 1))


def _moment(chance: random.Random, name: str, numbers: list[int]) -> str | None:
    day = f"20{chance.randrange(10, 30)}-{chance.randint(1, 12):02}-{chance.randint(1, 28):02}"
    clock = f"{chance.randrange(24):02}:{chance.randrange(60):02}:{chance.randrange(60):02}"
    fraction = f".{chance.randrange(10 ** numbers[0]):0{numbers[0]}}" if numbers and name != "year" else ""
    return {
        "year": str(chance.randint(1901, 2155)),
        "date": f"'{day}'",
        "time": f"'{chance.choice(('', '-'))}{clock}{fraction}'",
        "datetime": f"'{day} {clock}{fraction}'",
        "timestamp": f"'{day} {clock}{fraction}'",
    }.get(name)


def _special(chance: random.Random, name: str, numbers: list[int], mariadb: bool) -> str | None:
    x, y = chance.randint(1, 99), chance.randint(1, 99)
    floats = ",".join(str(chance.randrange(9)) for _ in range(min(numbers[0], 4) if numbers else 3))
    return {
        "json": f"'{{\"a\": {x}}}'",
        "geometry": f"ST_GeomFromText('POINT({x} {y})')",
        "point": f"ST_GeomFromText('POINT({x} {y})')",
        "linestring": f"ST_GeomFromText('LINESTRING({x} {y},1 2)')",
        "geometrycollection": f"ST_GeomFromText('GEOMETRYCOLLECTION(POINT({x} {y}))')",
        "geomcollection": f"ST_GeomFromText('GEOMETRYCOLLECTION(POINT({x} {y}))')",
        "uuid": f"'123e4567-e89b-12d3-a456-4266141740{x:02}'",
        "inet4": f"'10.0.{x}.{y}'",
        "inet6": f"'::{x}:{y}'",
        "vector": f"{'VEC_FromText' if mariadb else 'STRING_TO_VECTOR'}('[{floats}]')",
    }.get(name)
