# SPDX-License-Identifier: Apache-2.0
"""Translates a column type as written in a statement into the text shown in information_schema.

Source: the manuals' "Data Types" and "Using Data Types from Other Database Engines". A type that is not in
the table of spellings raises an error and is never guessed.
"""

import re
from dataclasses import dataclass, field

from penstock.schema.statements.tokens import Kind, ServerSpelling, TokenCursor

# Display widths printed by MariaDB and by MySQL before 8.0.19: signed and unsigned.
_INTEGER_WIDTHS = {
    "tinyint": (4, 3),
    "smallint": (6, 5),
    "mediumint": (9, 8),
    "int": (11, 10),
    "bigint": (20, 20),
}
_INTEGERS = {
    "TINYINT": "tinyint",
    "INT1": "tinyint",
    "SMALLINT": "smallint",
    "INT2": "smallint",
    "MEDIUMINT": "mediumint",
    "MIDDLEINT": "mediumint",
    "INT3": "mediumint",
    "INT": "int",
    "INTEGER": "int",
    "INT4": "int",
    "BIGINT": "bigint",
    "INT8": "bigint",
}
_DECIMALS = ("DECIMAL", "DEC", "NUMERIC", "FIXED")
_TEXTS = ("TINYTEXT", "TEXT", "MEDIUMTEXT", "LONGTEXT")
_BLOBS = ("TINYBLOB", "BLOB", "MEDIUMBLOB", "LONGBLOB")
_SIZED_MAX = (1 << 8, 1 << 16, 1 << 24, 1 << 32)
_PLAIN = ("DATE", "UUID", "INET4", "INET6")
_FRACTIONAL = ("TIME", "DATETIME", "TIMESTAMP")
_GEOMETRIES = ("GEOMETRY", "POINT", "LINESTRING", "POLYGON", "MULTIPOINT", "MULTILINESTRING", "MULTIPOLYGON")
_GEOMETRY_COLLECTIONS = ("GEOMETRYCOLLECTION", "GEOMCOLLECTION")

# The longest character in bytes, MAXLEN of information_schema.CHARACTER_SETS. TEXT(n) counts characters.
_CHARACTER_BYTES_MAX = {
    **dict.fromkeys(("latin1", "latin2", "latin5", "latin7", "ascii", "binary", "cp1250", "cp1251"), 1),
    **dict.fromkeys(("cp1256", "cp1257", "cp850", "cp852", "cp866", "greek", "hebrew", "koi8r", "koi8u"), 1),
    **dict.fromkeys(("ucs2", "gbk", "gb2312", "big5", "euckr", "sjis", "cp932"), 2),
    **dict.fromkeys(("utf8mb3", "ujis", "eucjpms"), 3),
    **dict.fromkeys(("utf8mb4", "utf16", "utf16le", "utf32", "gb18030"), 4),
}
# The longest VARCHAR or VARBINARY in bytes, without its length prefix. The server turns a longer one into a
# TEXT or BLOB, or rejects it.
_VARCHAR_BYTES_MAX = 65_532
_VARYING = re.compile(r"var(?:char|binary)\((\d+)\)")

# The codec that shows whether a charset has a character: the codec of the charset itself, or of a standard
# that the charset contains.
_CODECS = {
    **dict.fromkeys(("utf8mb4", "utf16", "utf16le", "utf32", "binary"), "utf-8"),
    "latin1": "cp1252", "latin2": "iso8859-2", "cp1250": "cp1250", "cp1251": "cp1251", "cp1257": "cp1257",
    "greek": "iso8859-7", "gbk": "gb2312", "gb2312": "gb2312", "gb18030": "utf-8", "big5": "big5",
    "sjis": "shift-jis", "cp932": "shift-jis", "ujis": "euc-jp", "eucjpms": "euc-jp", "euckr": "euc-kr",
}  # fmt: skip
_BASIC_PLANE = ("utf8mb3", "ucs2")
# National variants of ASCII, which do not have all of its characters.
_NOT_ASCII = ("swe7",)

NATIONAL_CHARSET = "utf8mb3"

_MEMBER_ESCAPES = str.maketrans({"\\": "\\\\", "'": "''", "\0": "\\0", "\n": "\\n", "\r": "\\r"})


# SQL modes that change the meaning of types: ORACLE changes DATE and BLOB, MAXDB changes TIMESTAMP.
_MODES_WITH_OTHER_TYPES = frozenset(("ORACLE", "MAXDB"))


class TypeUnknown(Exception):
    """The type is not in the table of spellings."""


@dataclass
class DeclaredType:
    """A type and the charset set by its spelling, before the column's other attributes are known.

    `takes_charset` is true if columns of the type have a charset at all.
    """

    text: str
    takes_charset: bool = field(default=False, kw_only=True)
    charset: str | None = field(default=None, kw_only=True)
    characters_max: int | None = field(default=None, init=False)
    binary_charset: str | None = field(default=None, init=False)

    def resolve(self, charset: str | None) -> tuple[str, str | None]:
        """Return the type text and charset, given the charset that applies. Raises TypeUnknown."""
        if not self.takes_charset:
            _refuse_too_long(self.text)
            return self.text, None
        if charset is None:
            raise TypeUnknown(self.text)
        _refuse_too_long(self.text, _CHARACTER_BYTES_MAX.get(charset, 1))
        if self.text.startswith(("enum", "set")) and not _can_hold(charset, self.text):
            # Refuse the type, because the server stores members that differ from those in the statement.
            raise TypeUnknown(self.text)
        if charset == "binary":
            text = self.text if self.characters_max is None else _smallest_type(_TEXTS, self.characters_max)
            return _with_binary_charset(text), self.binary_charset
        if self.characters_max is None:
            return self.text, charset
        if charset not in _CHARACTER_BYTES_MAX:
            raise TypeUnknown(self.text)
        return _smallest_type(_TEXTS, self.characters_max * _CHARACTER_BYTES_MAX[charset]), charset


def take_type(cursor: TokenCursor, spelling: ServerSpelling) -> DeclaredType:
    """Parse a type with its length and sign. Raises TypeUnknown."""
    word = cursor.take().upper
    if not _MODES_WITH_OTHER_TYPES.isdisjoint(spelling.sql_mode):
        raise TypeUnknown(word)
    if word in _INTEGERS or word in ("BOOL", "BOOLEAN", "SERIAL"):
        return DeclaredType(_integer(word, cursor, spelling))
    if word in _DECIMALS:
        numbers = _numbers(cursor)
        precision, scale = (numbers + ["10", "0"][len(numbers) :])[:2]
        # In DECIMAL, a precision of 0 means the default precision.
        return DeclaredType(f"decimal({precision if precision != '0' else 10},{scale}){_sign(cursor)}")
    if word in ("FLOAT", "FLOAT4", "DOUBLE", "FLOAT8", "REAL"):
        return DeclaredType(_floating(word, cursor, spelling))
    if word in _FRACTIONAL:
        return DeclaredType(word.lower() + _parenthesis(_nonzero(_numbers(cursor))))
    if word in _PLAIN:
        return DeclaredType(word.lower())
    if word == "YEAR":
        width = "2" if _numbers(cursor) == ["2"] and spelling.mariadb else "4"
        return DeclaredType(f"year({width})" if spelling.shows_display_width else "year")
    if word == "BIT":
        return DeclaredType(f"bit{_parenthesis(_nonzero(_numbers(cursor)) or ['1'])}")
    if word == "JSON":
        return (
            DeclaredType("longtext", takes_charset=True, charset="utf8mb4")
            if spelling.mariadb
            else DeclaredType("json")
        )
    if word == "VECTOR":
        return DeclaredType(f"vector{_parenthesis(_numbers(cursor) or ['2048'])}")
    if word in _GEOMETRIES:
        return DeclaredType(word.lower())
    if word in _GEOMETRY_COLLECTIONS:
        return DeclaredType("geometrycollection" if spelling.shows_display_width else "geomcollection")
    return _textual(word, cursor, spelling)


def _integer(word: str, cursor: TokenCursor, spelling: ServerSpelling) -> str:
    if word in ("BOOL", "BOOLEAN"):
        return "tinyint(1)"
    if word == "SERIAL":
        return "bigint(20) unsigned" if spelling.shows_display_width else "bigint unsigned"
    name, numbers, sign = _INTEGERS[word], _nonzero(_numbers(cursor)), _sign(cursor)
    shows_width = (
        spelling.shows_display_width
        or "zerofill" in sign
        or (name == "tinyint" and numbers == ["1"] and not sign)
    )
    if not shows_width:
        return name + sign
    return name + _parenthesis(numbers or [str(_INTEGER_WIDTHS[name][bool(sign)])]) + sign


def _floating(word: str, cursor: TokenCursor, spelling: ServerSpelling) -> str:
    if word == "DOUBLE":
        cursor.accept("PRECISION")
    numbers = _numbers(cursor)
    if numbers == ["0", "0"]:
        numbers = []
    if word in ("FLOAT", "FLOAT4") and len(numbers) < 2:
        # FLOAT(p) is a single-precision number up to 24 bits of precision. The server does not store p.
        name = "double" if numbers and int(numbers[0]) > 24 else "float"
        return name + _sign(cursor)
    single = word in ("FLOAT", "FLOAT4") or (word == "REAL" and "REAL_AS_FLOAT" in spelling.sql_mode)
    name = "float" if single else "double"
    return name + _parenthesis(numbers) + _sign(cursor)


def _textual(word: str, cursor: TokenCursor, spelling: ServerSpelling) -> DeclaredType:
    charset = None
    if word == "NATIONAL":
        word, charset = cursor.take().upper, NATIONAL_CHARSET
    if word in ("NCHAR", "NVARCHAR"):
        word, charset = word[1:], NATIONAL_CHARSET
    if word in ("CHAR", "CHARACTER", "VARCHAR", "VARCHARACTER"):
        varying = word.startswith("VAR") or cursor.accept("VARYING") or cursor.accept("VARCHAR")
        return _characters("varchar" if varying else "char", cursor, charset, spelling)
    if charset is not None:
        raise TypeUnknown(word)
    if word in ("BINARY", "VARBINARY"):
        length = _parenthesis(_length(cursor))
        return DeclaredType(word.lower() + length + _compressed(cursor, spelling))
    if word in _BLOBS:
        numbers = _large_length(cursor, spelling)
        name = _smallest_type(_BLOBS, int(numbers[0])) if numbers and word == "BLOB" else word.lower()
        return DeclaredType(name + _compressed(cursor, spelling))
    if word == "LONG":
        if cursor.accept("VARBINARY") or cursor.accept("BYTE"):
            return DeclaredType("mediumblob")
        if not (cursor.accept("CHARACTER", "VARYING") or cursor.accept("CHAR", "VARYING")):
            cursor.accept_any("VARCHAR", "VARCHARACTER")
        return DeclaredType("mediumtext", takes_charset=True)
    if word in _TEXTS:
        numbers = _large_length(cursor, spelling)
        if cursor.accept("BYTE"):
            return DeclaredType(word.lower().replace("text", "blob"))
        declared = DeclaredType(word.lower() + _compressed(cursor, spelling), takes_charset=True)
        if numbers and word == "TEXT":
            declared.characters_max = int(numbers[0])
        return declared
    if word in ("ENUM", "SET"):
        declared = DeclaredType(f"{word.lower()}({_members(cursor, spelling)})", takes_charset=True)
        # For members with charset binary, MariaDB prints the charset and MySQL does not.
        declared.binary_charset = "binary" if spelling.mariadb else None
        return declared
    raise TypeUnknown(word)


def _characters(
    name: str, cursor: TokenCursor, charset: str | None, spelling: ServerSpelling
) -> DeclaredType:
    length = _parenthesis(_length(cursor))
    if cursor.accept("BYTE"):
        return DeclaredType(name.replace("char", "binary") + length)
    return DeclaredType(name + length + _compressed(cursor, spelling), takes_charset=True, charset=charset)


def convert_type(type_text: str, charset: str, new_charset: str) -> str:
    """Return a column's type after CONVERT TO CHARACTER SET, large enough for the same number of characters.

    Raises TypeUnknown.
    """
    try:
        old_bytes, new_bytes = _CHARACTER_BYTES_MAX[charset], _CHARACTER_BYTES_MAX[new_charset]
    except KeyError:
        raise TypeUnknown(type_text) from None
    name, blank, attributes = type_text.partition(" ")
    if name.upper() in _TEXTS:
        size_bytes = _SIZED_MAX[_TEXTS.index(name.upper())] - 1
        characters = size_bytes // old_bytes
        return (
            _smallest_type(_TEXTS, min(max(characters * new_bytes, size_bytes), _SIZED_MAX[-1] - 1))
            + blank
            + attributes
        )
    _refuse_too_long(name, new_bytes)
    return type_text


def _refuse_too_long(type_text: str, character_bytes: int = 1) -> None:
    """Raise TypeUnknown for a VARCHAR or VARBINARY that servers do not accept in strict mode."""
    length = _VARYING.match(type_text)
    if length is not None and int(length[1]) * character_bytes > _VARCHAR_BYTES_MAX:
        raise TypeUnknown(type_text)


def _can_hold(charset: str, text: str) -> bool:
    """Return whether a charset is known to have every character of a text."""
    if text.isascii():
        return charset not in _NOT_ASCII
    if charset in _BASIC_PLANE:
        return max(text) <= "\uffff"
    try:
        text.encode(_CODECS[charset])
    except (KeyError, UnicodeEncodeError):
        return False
    return True


def _with_binary_charset(text: str) -> str:
    """Return the type under CHARACTER SET binary: BINARY for CHAR, BLOB for TEXT; ENUM and SET stay."""
    if text.startswith(("enum", "set")):
        return text
    return text.replace("char", "binary", 1).replace("text", "blob", 1)


def _smallest_type(names: tuple[str, ...], size_bytes: int) -> str:
    """Return the smallest type of the family that holds this many bytes."""
    for name, bound in zip(names, _SIZED_MAX, strict=True):
        if size_bytes < bound:
            return name.lower()
    raise TypeUnknown(names[-1])


def _members(cursor: TokenCursor, spelling: ServerSpelling) -> str:
    """Return the members of an ENUM or SET with the quoting of information_schema (`append_unescaped`).

    Raises TypeUnknown.
    """
    inside = cursor.within_parentheses()
    members = []
    for part in inside.parts() if inside else []:
        member = part.take()
        if member.kind not in (Kind.STRING, Kind.DOUBLE) or not part.ended:
            raise TypeUnknown("ENUM or SET")
        if not spelling.escapes and "\\" in member.text:
            # Refuse the members, because the text that servers log for CREATE TABLE ... SELECT has escapes in
            # every mode.
            raise TypeUnknown("ENUM or SET")
        # The server drops trailing spaces of members when the table is created.
        members.append("'" + member.text.rstrip(" ").translate(_MEMBER_ESCAPES) + "'")
    if not members:
        raise TypeUnknown("ENUM or SET")
    return ",".join(members)


def _compressed(cursor: TokenCursor, spelling: ServerSpelling) -> str:
    """Parse MariaDB's COMPRESSED attribute, which may name a method: COMPRESSED=zlib."""
    if not spelling.mariadb or not cursor.accept("COMPRESSED"):
        return ""
    if cursor.accept("="):
        cursor.take()
    return " /*M!100301 COMPRESSED*/"


def _numbers(cursor: TokenCursor) -> list[str]:
    """Parse `(1)` or `(1,2)` if it comes next. Raises TypeUnknown if the parentheses hold anything else."""
    inside = cursor.within_parentheses()
    if inside is None:
        return []
    numbers = [part.take().text if part.ahead(1).text == "" else "" for part in inside.parts()]
    if not numbers or len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
        raise TypeUnknown("length")
    return [str(int(number)) for number in numbers]


def _nonzero(numbers: list[str]) -> list[str]:
    """Return the numbers in parentheses that are not 0. A 0 means the default, as if the number were
    missing.
    """
    return [number for number in numbers if number != "0"]


def _large_length(cursor: TokenCursor, spelling: ServerSpelling) -> list[str]:
    """Parse the length of a TEXT or BLOB. MariaDB ignores a length of 0."""
    numbers = _numbers(cursor)
    return _nonzero(numbers) if spelling.mariadb else numbers


def _length(cursor: TokenCursor) -> list[str]:
    """Parse `(n)`, 1 if there is none. Raises TypeUnknown."""
    numbers = _numbers(cursor) or ["1"]
    if len(numbers) != 1:
        raise TypeUnknown("length")
    return numbers


def _parenthesis(numbers: list[str]) -> str:
    return f"({','.join(numbers)})" if numbers else ""


def _sign(cursor: TokenCursor) -> str:
    unsigned = zerofill = False
    while True:
        if cursor.accept("UNSIGNED"):
            unsigned = True
        elif cursor.accept("ZEROFILL"):
            zerofill = True
        elif not cursor.accept("SIGNED"):
            return (" unsigned" if unsigned or zerofill else "") + (" zerofill" if zerofill else "")
