# SPDX-License-Identifier: Apache-2.0
"""Compares SQL types: whether one type can hold every value of another, and which type can hold the values of
both.
"""

import re
from dataclasses import replace

from penstock.model import Column

_WIDTH = re.compile(r"^(tinyint|smallint|mediumint|int|bigint|year)\(\d+\)")
_LENGTH = re.compile(r"(varchar|char|varbinary)\((\d+)\)")
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)(.*)")
_MEMBERS = re.compile(r"(enum|set)\((.*)\)", re.DOTALL)
_FRACTION = re.compile(r"(datetime|timestamp|time)(?:\((\d)\))?")
_APPROXIMATE = re.compile(r"^(float|double)\(\d+,\d+\)")
_DIMENSIONS = re.compile(r"vector\((\d+)\)")
_INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
# Decimal digits of each integer type, signed or unsigned.
_DIGITS = {"tinyint": 3, "smallint": 5, "mediumint": 8, "int": 10, "bigint": 20}
_TEXTS = ("tinytext", "text", "mediumtext", "longtext")
_BLOBS = ("tinyblob", "blob", "mediumblob", "longblob")
_BINARY = (*_BLOBS, "binary", "varbinary", "bit")
_SPATIAL = re.compile(r"(multi)?(point|linestring|polygon)|geom(etry|collection|etrycollection)")
_DECIMAL_DIGITS_MAX, _SCALE_MAX = 65, 30


def keeps_values(old: str, new: str) -> bool:
    """Return whether the server displays every value of the type `old` with the same text after conversion to
    the type `new`.
    """
    old, new = plain_type(old), plain_type(new)
    if old == new:
        return True
    old_word, new_word = old.split(" ")[0], new.split(" ")[0]
    unsigned = (" unsigned" in old, " unsigned" in new)
    if old_word in _INTEGERS and new_word in _INTEGERS:
        wider = _INTEGERS.index(new_word) > _INTEGERS.index(old_word)
        return (unsigned[0] == unsigned[1] and wider) or (unsigned == (True, False) and wider)
    for family in (_TEXTS, _BLOBS):
        if old_word in family and new_word in family:
            return family.index(new_word) >= family.index(old_word)
    if (a := _LENGTH.fullmatch(old)) and (b := _LENGTH.fullmatch(new)):
        return a[1] == b[1] and int(b[2]) >= int(a[2])
    if _LENGTH.match(old) and old.startswith("varchar") and new in _TEXTS[1:]:
        return True
    if (a := _DECIMAL.fullmatch(old)) and (b := _DECIMAL.fullmatch(new)):
        return a[2] == b[2] and int(b[1]) >= int(a[1]) and a[3] == b[3]
    if (a := _FRACTION.fullmatch(old)) and (b := _FRACTION.fullmatch(new)):
        return a[1] == b[1] and int(b[2] or 0) >= int(a[2] or 0)
    if (a := _MEMBERS.fullmatch(old)) and (b := _MEMBERS.fullmatch(new)):
        return a[1] == b[1] and (b[2] == a[2] or b[2].startswith(a[2] + ","))
    return False


def keeps_characters(old: str | None, new: str | None) -> bool:
    """Return whether every text in a character set is unchanged in another. None stands for a column that is
    not text.
    """
    old, new = _charset(old), _charset(new)
    if old == new:
        return True
    return old is not None and (new == "utf8mb4" or (old == "ascii" and new is not None))


def keeps_column_values(old: Column, new: Column) -> bool:
    """Return whether every value of a column, including null, remains unchanged under a new definition of the
    column.
    """
    required = old.nullable and not new.nullable
    return (
        not required
        and keeps_values(old.type_text, new.type_text)
        and keeps_characters(old.charset, new.charset)
    )


def keeps_logged_values(old: Column, new: Column) -> bool:
    """Compare like `keeps_column_values`, but only as far as a log describes columns.

    The log omits the sign and digits of decimal and floating point types, the kind of geometry, and the
    dimensions of vectors.
    """
    old, new = (replace(column, type_text=_logged_type(column.type_text)) for column in (old, new))
    return keeps_column_values(old, new)


def refuses_negative(column: Column) -> bool:
    """Return whether a column is an unsigned decimal or floating point number."""
    word = re.split(r"[ (]", plain_type(column.type_text))[0]
    return word in ("decimal", "float", "double") and " unsigned" in column.type_text


def common_column(known: Column, other: Column) -> Column:
    """Return a column that holds the values of both columns, under the name of the first column.

    A first column that already holds them is returned unchanged, so repeated joining converges. If only text
    can hold both, the values are text as the server displays them. Binary types become bytes.
    """
    nullable = known.nullable or other.nullable
    holds = keeps_values(other.type_text, known.type_text) and keeps_characters(other.charset, known.charset)
    if holds:
        return _declared(known, known.type_text, known.charset, nullable)
    if keeps_values(known.type_text, other.type_text) and keeps_characters(known.charset, other.charset):
        return _declared(known, other.type_text, other.charset, nullable)
    common = _common_type(plain_type(known.type_text), plain_type(other.type_text))
    if common == plain_type(known.type_text) and not common.endswith("text"):
        return _declared(known, known.type_text, known.charset, nullable)
    return _declared(known, common, "utf8mb4" if common == "longtext" else None, nullable)


def plain_type(text: str) -> str:
    """Return a type's text without display-only attributes."""
    head, quote, members = text.strip().partition("('")
    return _WIDTH.sub(r"\1", head.lower()).replace(" zerofill", "") + quote + members


def _logged_type(text: str) -> str:
    """Return what the optional metadata of a Table_map event, minimal or full, reveals about a type."""
    plain = plain_type(text)
    word = re.split(r"[ (]", plain)[0]
    if _SPATIAL.fullmatch(word):
        return "geometry"
    if word == "vector":
        return word
    if word in ("decimal", "float", "double"):
        plain = plain.removesuffix(" unsigned")
    return _APPROXIMATE.sub(r"\1", plain)


def _declared(known: Column, type_text: str, charset: str | None, nullable: bool) -> Column:
    return Column(known.name, type_text, charset, nullable)


def _common_type(first: str, second: str) -> str:
    words = [re.split(r"[ (]", text)[0] for text in (first, second)]
    if any(word in _BINARY or _SPATIAL.fullmatch(word) for word in words):
        return "longblob"
    if (number := _common_number(first, second, words)) is not None:
        return number
    if (a := _FRACTION.fullmatch(first)) and (b := _FRACTION.fullmatch(second)) and a[1] == b[1]:
        return f"{a[1]}({max(int(a[2] or 0), int(b[2] or 0))})"
    if (a := _DIMENSIONS.fullmatch(first)) and (b := _DIMENSIONS.fullmatch(second)):
        return f"vector({max(int(a[1]), int(b[1]))})"
    return "longtext"


def _common_number(first: str, second: str, words: list[str]) -> str | None:
    """Return the exact number type that holds the values of two number types, None if there is none."""
    if all(word in _INTEGERS for word in words):
        # Exactly one of the two types is signed. Otherwise one of them would hold every value of the other.
        unsigned = max(
            _INTEGERS.index(word)
            for word, text in zip(words, (first, second), strict=True)
            if " unsigned" in text
        )
        signed = max(
            _INTEGERS.index(word)
            for word, text in zip(words, (first, second), strict=True)
            if " unsigned" not in text
        )
        size = max(unsigned + 1, signed)
        return _INTEGERS[size] if size < len(_INTEGERS) else "decimal(20,0)"
    if set(words) <= {"float", "double"}:
        return "double"
    digits = [_digits_of(text, word) for text, word in zip((first, second), words, strict=True)]
    if any(count is None for count in digits):
        return "double" if "double" in words and _fits_double(words) else None
    (whole, scale), (other_whole, other_scale) = (count for count in digits if count is not None)
    scale = max(scale, other_scale)
    precision = max(whole, other_whole) + scale
    return (
        f"decimal({precision},{scale})" if precision <= _DECIMAL_DIGITS_MAX and scale <= _SCALE_MAX else None
    )


def _digits_of(text: str, word: str) -> tuple[int, int] | None:
    """Return the number of digits of a numeric type before and after the decimal point, None if the type is
    not exact.
    """
    if word in _DIGITS:
        return _DIGITS[word], 0
    match = _DECIMAL.match(text)
    return (int(match[1]) - int(match[2]), int(match[2])) if match else None


def _fits_double(words: list[str]) -> bool:
    # A double has a 53-bit mantissa, so it holds every integer type but bigint exactly.
    return set(words) <= {"double", *_INTEGERS[:-1]}


def _charset(name: str | None) -> str | None:
    return {"utf8": "utf8mb3"}.get(name or "", name)
