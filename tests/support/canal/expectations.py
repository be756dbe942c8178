# SPDX-License-Identifier: Apache-2.0
"""Computes the forms in which Canal and Ptubes write a value, by its SQL type and the text that the server's
client shows.

Shares no code with the kernel: it starts from the client's output and computes with Python numbers.
"""

import re
import struct
from datetime import timedelta

from tests.support.messages.json_expectations import (
    BYTES,
    EPOCH,
    GEOMETRIES,
    INTEGERS,
    TEXTS,
    is_bytes,
    micros_of_time,
    moment,
    name_of,
    raw,
)

# The codes of java.sql.Types, as used by Canal.
CANAL_TYPES = {
    "tinyint": -6,
    "smallint": 5,
    "mediumint": 4,
    "int": 4,
    "bigint": -5,
    "float": 7,
    "double": 8,
    "decimal": 3,
    "bit": -7,
    "timestamp": 93,
    "datetime": 93,
    "date": 91,
    "time": 92,
    "year": 12,
    "char": 1,
    "varchar": 12,
    "enum": 4,
    "set": -7,
    "json": 12,
    "uuid": 12,
    "inet4": 12,
    "inet6": 12,
}
CANAL_WIDE = {"tinyint": 5, "smallint": 4, "mediumint": 4, "int": -5, "bigint": 3}
CANAL_NULLS = {"set": 2004, "json": 1111}
INTEGER_BITS = {"tinyint": 8, "smallint": 16, "mediumint": 24, "int": 32, "bigint": 64}

PTUBES_TYPES = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "year"), 4),
    **dict.fromkeys(("int", "bigint"), -5),
    **dict.fromkeys(("varchar", "text", "json", "geometry"), 12),
    **dict.fromkeys(("datetime", "timestamp"), 93),
    **dict.fromkeys(("varbinary", "tinyblob", "blob", "mediumblob"), -3),
    **{"bit": -7, "float": 6, "double": 8, "decimal": 3, "char": 1, "date": 91, "time": 92},
    **{"binary": -2, "longblob": -4},
}
OTHER = 1111


def java(value: float, single: bool) -> str:
    """Return the text of Float.toString or Double.toString: the fewest digits that round-trip."""
    if value == 0:
        return str(value)
    for precision in range(17):
        digits = f"{abs(value):.{precision}e}"
        shortest = float(digits)
        if single:
            shortest = struct.unpack("<f", struct.pack("<f", shortest))[0]
        if shortest == abs(value):
            break
    mantissa, _, exponent = digits.partition("e")
    sign, figures, power = "-" if value < 0 else "", mantissa.replace(".", "").rstrip("0"), int(exponent)
    if 1e-3 <= abs(value) < 1e7:
        figures = figures.ljust(power + 1, "0") if power >= 0 else figures.rjust(len(figures) - power, "0")
        point = max(power, 0) + 1
        return f"{sign}{figures[:point]}.{figures[point:] or 0}"
    return f"{sign}{figures[0]}.{figures[1:] or 0}E{power}"


def members(type_text: str) -> list[str]:
    """Return the members of an ENUM or SET as the server stores them."""
    if "character set gbk" in type_text:
        type_text = type_text.encode("gbk", "replace").decode("gbk")
    matches = re.findall(r"'((?:[^'\\]|''|\\.)*)'", type_text, re.DOTALL)
    names = {"\\\\": "\\", "\\n": "\n"}
    return [
        re.sub(r"\\.", lambda match: names.get(match[0], match[0][1:]), text).replace("''", "'")
        for text in matches
    ]


def mask(text: str, type_text: str) -> int:
    known = members(type_text)
    return sum(1 << known.index(member) for member in text.split(",") if member)


def canal_type(text: str | None, type_text: str) -> int:
    """Return the sqlType of a value, which depends on the magnitude of unsigned numbers and on NULL."""
    name = name_of(type_text)
    if is_bytes(type_text) or name in (*BYTES, *GEOMETRIES, "vector"):
        return 2004
    if text is None and name in CANAL_NULLS:
        return CANAL_NULLS[name]
    unsigned = "unsigned" in type_text or "zerofill" in type_text
    if name in INTEGERS and unsigned and text is not None and int(text) >> (INTEGER_BITS[name] - 1):
        return CANAL_WIDE[name]
    return CANAL_TYPES.get(name, 2005)


def canal(text: str, type_text: str) -> str:
    """Return the value of a column in Canal's entries."""
    name = name_of(type_text)
    if name in INTEGERS:
        return str(int(text))
    if name in ("float", "double"):
        return java(float(text), name == "float")
    if name == "bit":
        return str(int(text, 16))
    if is_bytes(type_text) or name in (*BYTES, *GEOMETRIES, "vector"):
        return raw(text).decode("latin-1")
    if name == "enum":
        return str(members(type_text).index(text) + 1 if text else 0)
    if name == "set":
        return str(mask(text, type_text))
    return text


def ptubes_type(type_text: str) -> int:
    """Return the sqlType of a column in Ptubes' events."""
    if "character set binary" in type_text:
        return PTUBES_TYPES["binary"]
    return PTUBES_TYPES.get(name_of(type_text), OTHER)


def ptubes(text: str, type_text: str) -> tuple[str, dict[str, str]]:
    """Return the value and props of a column in Ptubes' events, for a server whose time zone is UTC."""
    name = name_of(type_text)
    if name in ("date", "time", "datetime", "timestamp"):
        return ptubes_moment(text, name)
    if name == "year":
        return str(int(text)), {}
    if name == "bit":
        return raw(text).decode("latin-1"), {}
    if name in TEXTS and not is_bytes(type_text):
        return text, {}
    return canal(text, type_text), {}


def ptubes_moment(text: str, name: str) -> tuple[str, dict[str, str]]:
    if name == "time":
        micros = micros_of_time(f"{text}.0" if "." not in text else text)
        return milliseconds_and_props(micros, shown_fully(text))
    instant = moment(text)
    if name == "timestamp" and instant is None:
        return milliseconds_and_props(0, "0000-00-00 00:00:00.000000")
    exact = instant is not None and instant.year >= 1000
    micros = java_calendar(text)
    if instant is not None and exact:
        micros = (instant - EPOCH) // timedelta(microseconds=1)
    if name == "date":
        value, props = milliseconds_and_props(micros, None if exact else text)
        del props["nanos"]
        return value, props
    return milliseconds_and_props(micros, None if exact else shown_fully(text))


def milliseconds_and_props(micros: int, shown: str | None) -> tuple[str, dict[str, str]]:
    props = {"nanos": str(micros % 1_000_000 * 1000)}
    if shown is not None:
        props["fmtDate"] = shown
    return str(micros // 1000), props


def shown_fully(text: str) -> str:
    whole, _, fraction = text.partition(".")
    return f"{whole}.{fraction.ljust(6, '0')}"


def java_calendar(text: str) -> int:
    """Parse a date and time as java.util.Calendar does, and return it as microseconds since 1970."""
    day, _, clock = text.partition(" ")
    year, month, number = (int(part) for part in day.split("-"))
    # Months and days carry over. The Julian calendar applies before 1582. The day number follows Meeus.
    year, month = year + (month - 1) // 12, (month - 1) % 12 + 1
    if month <= 2:
        year, month = year - 1, month + 12
    century = year // 100
    gregorian = 2 - century + century // 4
    first = (1461 * (year + 4716)) // 4 + int(30.6001 * (month + 1)) - 1524
    days = first + number - 1 - 2440588 + 1
    days += gregorian if days + gregorian >= -141427 else 0
    micros = micros_of_time(f"{clock or '00:00:00'}{'' if '.' in clock else '.0'}")
    return days * 86_400_000_000 + micros
