# SPDX-License-Identifier: Apache-2.0
"""How a column's values stand in ClickHouse.

    bigint unsigned        UInt64                  decimal(65,30)     Decimal(65, 30)
    datetime(3)            DateTime64(3, 'UTC')    time               Int64, microseconds
    timestamp(6)           DateTime64(6, 'UTC')    vector(3)          Array(Float32)
    date                   Date32                  text, json, blob   String

A date that ClickHouse cannot hold (it has the years 1900 to 2299) is null.
"""

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime

import pyarrow
import pyarrow.compute as pc

from penstock.changes import Target
from penstock.model import Column

_BASE = re.compile(r"\s*([a-z]+)", re.IGNORECASE)
_ARGUMENTS = re.compile(r"\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)")
_DECIMAL_DEFAULT = (10, 0)

_SIGNED = {
    pyarrow.int8(): "Int8",
    pyarrow.int16(): "Int16",
    pyarrow.int32(): "Int32",
    pyarrow.int64(): "Int64",
}
# The decoder has no unsigned integers, so these stand in the next wider ones.
_UNSIGNED = {
    ("tinyint", pyarrow.int16()): (pyarrow.uint8(), "UInt8"),
    ("year", pyarrow.int16()): (pyarrow.uint16(), "UInt16"),
    ("smallint", pyarrow.int32()): (pyarrow.uint16(), "UInt16"),
    ("int", pyarrow.int64()): (pyarrow.uint32(), "UInt32"),
    ("bit", pyarrow.int64()): (pyarrow.uint64(), "UInt64"),
    ("bigint", pyarrow.decimal128(20, 0)): (pyarrow.uint64(), "UInt64"),
    ("bit", pyarrow.decimal128(20, 0)): (pyarrow.uint64(), "UInt64"),
}
_DATES = (date(1900, 1, 1), date(2299, 12, 31))
_TIMES = (datetime(1900, 1, 1), datetime(2299, 12, 31, 23, 59, 59, 999_999))


@dataclass(frozen=True)
class Stored:
    """A column of the table: its ClickHouse type without `Nullable`, and the Arrow type that is sent."""

    name: str
    sql: str
    arrow: pyarrow.DataType
    nullable: bool

    # Whether the rows have it as text, which Arrow would shorten (1E-30).
    as_text: bool = False

    @property
    def declared(self) -> str:
        """The whole type."""
        return f"Nullable({self.sql})" if self.nullable else self.sql

    def shown(self, quoted: str) -> str:
        """Return the expression that gives its values to a reader, by its quoted name."""
        if not self.as_text:
            return quoted
        return f"toDecimalString({quoted}, {_numbers(self.sql)[1]}) AS {quoted}"

    def cast(self, values: pyarrow.Array) -> pyarrow.Array:
        """Return values as they are sent. Raises pyarrow.ArrowInvalid."""
        values = self.within(values)
        if self.sql.startswith("DateTime64"):
            values = values.cast(pyarrow.timestamp("us"))
        elif self.sql.startswith("Array"):
            # An array has no null, and no vector is empty.
            values = pc.if_else(pc.is_null(values), pyarrow.scalar([], values.type), values)
        return values.cast(self.arrow)

    def within(self, values: pyarrow.Array) -> pyarrow.Array:
        """Return values with null for dates and times that the column cannot hold."""
        if self.sql == "Date32":
            return _within(values, *_DATES)
        if self.sql.startswith("DateTime64"):
            zone = values.type.tz
            return _within(
                values.cast(pyarrow.timestamp("us", zone)), *(_in_zone(one, zone) for one in _TIMES)
            )
        return values


def stored_columns(target: Target) -> list[Stored]:
    """Return a target's columns as they are stored, in order."""
    schema = target.arrow()
    return [
        _stored(column, schema.field(column.name).type, column.name in target.primary_key)
        for column in target.columns
    ]


def read_cast(values: pyarrow.ChunkedArray, wanted: pyarrow.DataType) -> pyarrow.ChunkedArray:
    """Return values that were read, in the type that a target declares."""
    if pyarrow.types.is_list(wanted):
        values = values.cast(wanted)
        return pc.if_else(pc.equal(pc.list_value_length(values), 0), pyarrow.scalar(None, wanted), values)
    return values.cast(wanted)


def holds(existing: str, wanted: str) -> bool:
    """Tell whether a column of one type can have every value of another."""
    if _nullable(wanted) and not _nullable(existing) and not wanted.startswith("Array"):
        return False
    return _bare_holds(_bare(existing), _bare(wanted))


def _bare_holds(existing: str, wanted: str) -> bool:
    if existing == wanted or existing == "String":
        return True
    ours, theirs = _INTEGERS.get(existing), _INTEGERS.get(wanted)
    if ours is not None and theirs is not None:
        return ours[0] <= theirs[0] and theirs[1] <= ours[1]
    if existing == "Float64":
        return wanted == "Float32"
    for kind in ("Decimal", "DateTime64"):
        if existing.startswith(f"{kind}(") and wanted.startswith(f"{kind}("):
            (digits, scale), (digits_wanted, scale_wanted) = _numbers(existing), _numbers(wanted)
            return scale >= scale_wanted and digits - scale >= digits_wanted - scale_wanted
    return False


_INTEGERS = {
    f"{sign}Int{bits}": ((-(1 << bits - 1), (1 << bits - 1) - 1) if not sign else (0, (1 << bits) - 1))
    for bits in (8, 16, 32, 64)
    for sign in ("", "U")
}


def _stored(column: Column, arrow: pyarrow.DataType, key: bool) -> Stored:
    base = _BASE.match(column.type_text)
    word = base[1].lower() if base else ""
    sent, sql = _sent(word, column.type_text, arrow)
    # A value that its type cannot hold is null also where the source has no nulls; of numbers there is none.
    numeric = pyarrow.types.is_integer(sent) or pyarrow.types.is_floating(sent) or sql.startswith("Decimal")
    nullable = not key and not sql.startswith("Array") and (column.nullable or not numeric)
    as_text = pyarrow.types.is_string(arrow) and pyarrow.types.is_decimal(sent)
    return Stored(column.name, sql, sent, nullable, as_text)


def _sent(word: str, text: str, arrow: pyarrow.DataType) -> tuple[pyarrow.DataType, str]:
    if (word, arrow) in _UNSIGNED:
        return _UNSIGNED[word, arrow]
    if arrow in _SIGNED:
        return arrow, _SIGNED[arrow]
    types = pyarrow.types
    if types.is_decimal(arrow):
        return arrow, f"Decimal({arrow.precision}, {arrow.scale})"
    if types.is_floating(arrow):
        return arrow, "Float32" if arrow == pyarrow.float32() else "Float64"
    if types.is_date(arrow):
        return arrow, "Date32"
    if types.is_duration(arrow):
        return pyarrow.int64(), "Int64"
    if types.is_timestamp(arrow):
        found = _ARGUMENTS.search(text)
        return pyarrow.timestamp("us"), f"DateTime64({found[1] if found else 0}, 'UTC')"
    if types.is_list(arrow):
        return arrow, "Array(Float32)"
    if word in ("decimal", "numeric") and types.is_string(arrow):
        found = _ARGUMENTS.search(text)
        digits, scale = (int(found[1]), int(found[2] or 0)) if found else _DECIMAL_DEFAULT
        return pyarrow.decimal256(digits, scale), f"Decimal({digits}, {scale})"
    return arrow, "String"


def _in_zone(moment: datetime, zone: str | None) -> datetime:
    return moment if zone is None else moment.replace(tzinfo=UTC)


def _within(values: pyarrow.Array, low: date, high: date) -> pyarrow.Array:
    bounds = [pyarrow.scalar(one, values.type) for one in (low, high)]
    fits = pc.and_(pc.greater_equal(values, bounds[0]), pc.less_equal(values, bounds[1]))
    return pc.if_else(fits, values, pyarrow.scalar(None, values.type))


def _nullable(text: str) -> bool:
    return text.startswith(("Nullable(", "LowCardinality(Nullable("))


def _bare(text: str) -> str:
    for around in ("LowCardinality(", "Nullable("):
        if text.startswith(around):
            text = text[len(around) : -1]
    return text


def _numbers(text: str) -> tuple[int, int]:
    """Return the digits of a Decimal and how many of them are fractions; a DateTime64 has only those."""
    first, *more = [int(number) for number in re.findall(r"\d+", text.partition("(")[2])]
    return (first, more[0]) if more else (first, first)
