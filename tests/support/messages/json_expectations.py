# SPDX-License-Identifier: Apache-2.0
"""Computes the forms in which Debezium and Maxwell write a value, by its SQL type and the text in the
server's client.

Shares no code with the kernel: it starts from the client's output and computes with Python numbers.
"""

import base64
import json
import re
import struct
from datetime import datetime, timedelta
from decimal import Decimal, localcontext
from typing import Any

EPOCH = datetime(1970, 1, 1)
MICROSECOND = timedelta(microseconds=1)
TEXTS = ("char", "varchar", "tinytext", "text", "mediumtext", "longtext", "uuid", "inet4", "inet6")
BYTES = ("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob")
INTEGERS = ("tinyint", "smallint", "mediumint", "int", "bigint")
GEOMETRIES = ("geometry", "point", "polygon")

# The Connect type and semantic name of each SQL type whose parameters do not matter.
MEANINGS = {
    "tinyint": ("int16", None),
    "smallint": ("int16", None),
    "mediumint": ("int32", None),
    "int": ("int32", None),
    "bigint": ("int64", None),
    "float": ("float", None),
    "double": ("double", None),
    "decimal": ("bytes", "org.apache.kafka.connect.data.Decimal"),
    "bit": ("bytes", "io.debezium.data.Bits"),
    "year": ("int32", "io.debezium.time.Year"),
    "date": ("int32", "io.debezium.time.Date"),
    "time": ("int64", "io.debezium.time.MicroTime"),
    "timestamp": ("string", "io.debezium.time.ZonedTimestamp"),
    "enum": ("string", "io.debezium.data.Enum"),
    "set": ("string", "io.debezium.data.EnumSet"),
    "json": ("string", "io.debezium.data.Json"),
    "geometry": ("struct", "io.debezium.data.geometry.Geometry"),
    "polygon": ("struct", "io.debezium.data.geometry.Geometry"),
    "point": ("struct", "io.debezium.data.geometry.Point"),
    "vector": ("array", "io.debezium.data.FloatVector"),
}
WIDER = {"smallint": "int32", "int": "int64"}


def is_bytes(type_text: str) -> bool:
    return "character set binary" in type_text or name_of(type_text) in BYTES


def name_of(type_text: str) -> str:
    match = re.match(r"[a-z0-9]+", type_text)
    assert match
    return match[0]


def number_in(type_text: str, default: int = 0) -> int:
    match = re.search(r"\((\d+)", type_text)
    return int(match[1]) if match else default


def raw(text: str) -> bytes:
    """Return the bytes that the client shows as 0x..."""
    assert text.startswith("0x")
    return bytes.fromhex(text[2:])


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def micros_of_time(text: str) -> int:
    sign = -1 if text.startswith("-") else 1
    hours, minutes, seconds = text.removeprefix("-").split(":")
    whole, _, fraction = seconds.partition(".")
    clock = (int(hours) * 60 + int(minutes)) * 60 + int(whole)
    return sign * (clock * 1_000_000 + int(fraction.ljust(6, "0")))


def moment(text: str) -> datetime | None:
    """Return the text as a calendar instant, or None if the calendar has no such date."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def unscaled(text: str, type_text: str) -> str:
    """Return Kafka Connect's Decimal: the shortest two's complement of the unscaled number."""
    scale = int(type_text.partition(",")[2].rstrip(")") or 0)
    with localcontext() as context:
        context.prec = 100
        number = int(Decimal(text).scaleb(scale))
    for width in range(1, 40):
        if -(1 << (8 * width - 1)) <= number < 1 << (8 * width - 1):
            return encoded(number.to_bytes(width, "big", signed=True))
    raise AssertionError(f"{text} takes over 40 bytes")


def floats(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def geometry(data: bytes, name: str) -> dict[str, Any]:
    (srid,) = struct.unpack_from("<I", data)
    fields = {"wkb": encoded(data[4:]), "srid": srid or None}
    if name == "point":
        x, y = struct.unpack_from("<dd", data, 9)
        fields = {"x": x, "y": y, **fields}
    return fields


def debezium(text: str | None, type_text: str) -> Any:
    """Return the JSON value of a nullable column in Debezium's messages."""
    name = name_of(type_text)
    if text is None:
        return None
    if name in INTEGERS:
        number = int(text)
        return number - (1 << 64) if number >= 1 << 63 else number
    if name == "bit":
        data = raw(text)
        return bool(data[0]) if type_text == "bit(1)" else encoded(data[::-1])
    if name in ("datetime", "timestamp"):
        instant = moment(text)
        if instant is None:
            return None
        if name == "timestamp":
            return text.replace(" ", "T") + "Z"
        micros = (instant - EPOCH) // MICROSECOND
        return micros if number_in(type_text) > 3 else micros // 1000
    if name == "date":
        instant = moment(text)
        return None if instant is None else (instant - EPOCH).days
    if is_bytes(type_text):
        return encoded(raw(text))
    plain: dict[str, Any] = {"year": int, "float": float, "double": float, "time": micros_of_time}
    if name in plain:
        return plain[name](text)
    if name == "decimal":
        return unscaled(text, type_text)
    if name == "vector":
        return floats(raw(text))
    return geometry(raw(text), name) if name in GEOMETRIES else text


def maxwell(text: str | None, type_text: str) -> Any:
    """Return the JSON value in Maxwell's messages; fractional numbers of DECIMAL columns are Decimals."""
    name = name_of(type_text)
    if text is None:
        return None
    if name in INTEGERS or name == "year":
        return int(text)
    if name == "bit":
        return int(text, 16)
    if is_bytes(type_text):
        return encoded(raw(text))
    if name in ("float", "double"):
        return float(text)
    if name == "decimal":
        return Decimal(text) if "." in text else int(text)
    if name == "vector":
        return floats(raw(text))
    if name == "set":
        return text.split(",") if text else []
    return json.loads(text) if name == "json" else text


def meaning(type_text: str) -> tuple[str, str | None]:
    """Return the Connect type of a column and its semantic name."""
    name = name_of(type_text)
    if type_text == "bit(1)":
        return "boolean", None
    if name == "datetime":
        return "int64", f"io.debezium.time.{'Micro' * (number_in(type_text) > 3)}Timestamp"
    if is_bytes(type_text):
        return "bytes", None
    if "unsigned" in type_text or "zerofill" in type_text:
        return WIDER.get(name, MEANINGS[name][0]), None
    return MEANINGS.get(name, ("string", None))


def plain_wkt(text: str) -> str:
    """Return well-known text without optional spaces, which differ between writers."""
    return re.sub(r"\s*([(),])\s*", r"\1", text).upper()
