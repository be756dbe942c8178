# SPDX-License-Identifier: Apache-2.0
"""SQL types compared: whether one holds every value of another, and which type holds the values of both."""

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
# Decimal digits of each integer type, the unsigned ones among them.
_DIGITS = {"tinyint": 3, "smallint": 5, "mediumint": 8, "int": 10, "bigint": 20}
_TEXTS = ("tinytext", "text", "mediumtext", "longtext")
_BLOBS = ("tinyblob", "blob", "mediumblob", "longblob")
_BINARY = (*_BLOBS, "binary", "varbinary", "bit")
_SPATIAL = re.compile(r"(multi)?(point|linestring|polygon)|geom(etry|collection|etrycollection)")
_DECIMAL_DIGITS_MAX, _SCALE_MAX = 65, 30


def keeps_values(old: str, new: str) -> bool:
    """Tell whether every value of one type stays what it is, as the server shows it, in another."""
    old, new = plain_type(old), plain_type(new)
    if old == new:
        return True
    one, other = old.split(" ")[0], new.split(" ")[0]
    unsigned = (" unsigned" in old, " unsigned" in new)
    if one in _INTEGERS and other in _INTEGERS:
        wider = _INTEGERS.index(other) > _INTEGERS.index(one)
        return (unsigned[0] == unsigned[1] and wider) or (unsigned == (True, False) and wider)
    for family in (_TEXTS, _BLOBS):
        if one in family and other in family:
            return family.index(other) >= family.index(one)
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
    """Tell whether every text of one character set stays what it is in another; None is no text."""
    old, new = _charset(old), _charset(new)
    if old == new:
        return True
    return old is not None and (new == "utf8mb4" or (old == "ascii" and new is not None))


def keeps_column_values(old: Column, new: Column) -> bool:
    """Tell whether every value of a column, null among them, stays what it is in another."""
    required = old.nullable and not new.nullable
    return (
        not required
        and keeps_values(old.type_text, new.type_text)
        and keeps_characters(old.charset, new.charset)
    )


def keeps_logged_values(old: Column, new: Column) -> bool:
    """Tell what `keeps_column_values` does, of a column as a log tells it and one as its server does.

    The log does not tell signs and digits of numbers that are no integers, kinds of geometry and dimensions.
    """
    old, new = (replace(column, type_text=_logged_type(column.type_text)) for column in (old, new))
    return keeps_column_values(old, new)


def refuses_negative(column: Column) -> bool:
    """Tell whether a column's numbers are no integers and have no sign."""
    word = re.split(r"[ (]", plain_type(column.type_text))[0]
    return word in ("decimal", "float", "double") and " unsigned" in column.type_text


def common_column(known: Column, other: Column) -> Column:
    """Return a column that holds the values of both, under the name of the first.

    What the first holds already leaves it as it is, so that joining comes to an end. Where no type but text
    has both, it is text as the server shows it; of binary types, bytes.
    """
    nullable = known.nullable or other.nullable
    holds = keeps_values(other.type_text, known.type_text) and keeps_characters(other.charset, known.charset)
    if holds:
        return _declared(known, known.type_text, known.charset, nullable)
    if keeps_values(known.type_text, other.type_text) and keeps_characters(known.charset, other.charset):
        return _declared(known, other.type_text, other.charset, nullable)
    wanted = _common_type(plain_type(known.type_text), plain_type(other.type_text))
    if wanted == plain_type(known.type_text) and not wanted.endswith("text"):
        return _declared(known, known.type_text, known.charset, nullable)
    return _declared(known, wanted, "utf8mb4" if wanted == "longtext" else None, nullable)


def plain_type(text: str) -> str:
    """Return a type's text without what is for display alone."""
    head, quote, members = text.strip().partition("('")
    return _WIDTH.sub(r"\1", head.lower()).replace(" zerofill", "") + quote + members


def _logged_type(text: str) -> str:
    """Return what the optional metadata of a Table_map event tells of a type, be it complete or not."""
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


def _common_type(one: str, other: str) -> str:
    words = [re.split(r"[ (]", text)[0] for text in (one, other)]
    if any(word in _BINARY or _SPATIAL.fullmatch(word) for word in words):
        return "longblob"
    if (number := _common_number(one, other, words)) is not None:
        return number
    if (a := _FRACTION.fullmatch(one)) and (b := _FRACTION.fullmatch(other)) and a[1] == b[1]:
        return f"{a[1]}({max(int(a[2] or 0), int(b[2] or 0))})"
    if (a := _DIMENSIONS.fullmatch(one)) and (b := _DIMENSIONS.fullmatch(other)):
        return f"vector({max(int(a[1]), int(b[1]))})"
    return "longtext"


def _common_number(one: str, other: str, words: list[str]) -> str | None:
    """Return the number type that has the values of two, None where there is none that is exact."""
    if all(word in _INTEGERS for word in words):
        # One of the two has a sign, or they would be of one line.
        unsigned = max(
            _INTEGERS.index(word)
            for word, text in zip(words, (one, other), strict=True)
            if " unsigned" in text
        )
        signed = max(
            _INTEGERS.index(word)
            for word, text in zip(words, (one, other), strict=True)
            if " unsigned" not in text
        )
        size = max(unsigned + 1, signed)
        return _INTEGERS[size] if size < len(_INTEGERS) else "decimal(20,0)"
    if set(words) <= {"float", "double"}:
        return "double"
    digits = [_digits_of(text, word) for text, word in zip((one, other), words, strict=True)]
    if any(count is None for count in digits):
        return "double" if "double" in words and _fits_double(words) else None
    (whole, scale), (other_whole, other_scale) = (count for count in digits if count is not None)
    scale = max(scale, other_scale)
    precision = max(whole, other_whole) + scale
    return (
        f"decimal({precision},{scale})" if precision <= _DECIMAL_DIGITS_MAX and scale <= _SCALE_MAX else None
    )


def _digits_of(text: str, word: str) -> tuple[int, int] | None:
    """Return how many digits a number has before and behind its point; None where it is no exact one."""
    if word in _DIGITS:
        return _DIGITS[word], 0
    found = _DECIMAL.match(text)
    return (int(found[1]) - int(found[2]), int(found[2])) if found else None


def _fits_double(words: list[str]) -> bool:
    # A double has 53 bits, so every integer but a bigint is one.
    return set(words) <= {"double", *_INTEGERS[:-1]}


def _charset(name: str | None) -> str | None:
    return {"utf8": "utf8mb3"}.get(name or "", name)
