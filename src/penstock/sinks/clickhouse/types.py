# SPDX-License-Identifier: Apache-2.0
"""The ClickHouse types of columns.

    bigint unsigned        UInt64                  decimal(65,30)     Decimal(65, 30)
    datetime(3)            DateTime64(3, 'UTC')    time               Int64, microseconds
    timestamp(6)           DateTime64(6, 'UTC')    vector(3)          Array(Float32)
    date                   Date32                  text, json, blob   String

A date outside ClickHouse's range (the years 1900 to 2299) is null.
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
# The decoder has no unsigned integers and uses the next wider signed type.
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
    """A column of the target table: its ClickHouse type without `Nullable`, and the Arrow type that is
    sent.
    """

    name: str
    sql: str
    arrow: pyarrow.DataType
    nullable: bool

    # Whether the rows hold the number as text, because Arrow would print it in short form (1E-30).
    as_text: bool = False

    @property
    def declared(self) -> str:
        """The complete type."""
        return f"Nullable({self.sql})" if self.nullable else self.sql

    def select_expression(self, quoted: str) -> str:
        """Return the expression that selects the column's values, by its quoted name."""
        if not self.as_text:
            return quoted
        return f"toDecimalString({quoted}, {_numbers(self.sql)[1]}) AS {quoted}"

    def cast(self, values: pyarrow.Array) -> pyarrow.Array:
        """Return values in the type that is sent. Raises pyarrow.ArrowInvalid."""
        values = self.within(values)
        if self.sql.startswith("DateTime64"):
            values = values.cast(pyarrow.timestamp("us"))
        elif self.sql.startswith("Array"):
            # An array cannot be null in ClickHouse. No vector is empty, so an empty array can stand for null.
            values = pc.if_else(pc.is_null(values), pyarrow.scalar([], values.type), values)
        return values.cast(self.arrow)

    def within(self, values: pyarrow.Array) -> pyarrow.Array:
        """Return values with null for dates and times outside the column's range."""
        if self.sql == "Date32":
            return _within(values, *_DATES)
        if self.sql.startswith("DateTime64"):
            zone = values.type.tz
            return _within(
                values.cast(pyarrow.timestamp("us", zone)), *(_in_zone(moment, zone) for moment in _TIMES)
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
    """Convert values that were read from the server to a target's declared type."""
    if pyarrow.types.is_list(wanted):
        values = values.cast(wanted)
        return pc.if_else(pc.equal(pc.list_value_length(values), 0), pyarrow.scalar(None, wanted), values)
    return values.cast(wanted)


def holds(existing: str, wanted: str) -> bool:
    """Return whether a column of one type can hold every value of another."""
    if _nullable(wanted) and not _nullable(existing) and not wanted.startswith("Array"):
        return False
    return _bare_holds(_bare(existing), _bare(wanted))


def _bare_holds(existing: str, wanted: str) -> bool:
    if existing == wanted or existing == "String":
        return True
    own_range, wanted_range = _INTEGERS.get(existing), _INTEGERS.get(wanted)
    if own_range is not None and wanted_range is not None:
        return own_range[0] <= wanted_range[0] and wanted_range[1] <= own_range[1]
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
    sent, sql = _sent_type(word, column.type_text, arrow)
    # Values without a representation become null even in NOT NULL columns. Every number has a representation.
    numeric = pyarrow.types.is_integer(sent) or pyarrow.types.is_floating(sent) or sql.startswith("Decimal")
    nullable = not key and not sql.startswith("Array") and (column.nullable or not numeric)
    as_text = pyarrow.types.is_string(arrow) and pyarrow.types.is_decimal(sent)
    return Stored(column.name, sql, sent, nullable, as_text)


def _sent_type(word: str, text: str, arrow: pyarrow.DataType) -> tuple[pyarrow.DataType, str]:
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
        arguments = _ARGUMENTS.search(text)
        return pyarrow.timestamp("us"), f"DateTime64({arguments[1] if arguments else 0}, 'UTC')"
    if types.is_list(arrow):
        return arrow, "Array(Float32)"
    if word in ("decimal", "numeric") and types.is_string(arrow):
        arguments = _ARGUMENTS.search(text)
        digits, scale = (int(arguments[1]), int(arguments[2] or 0)) if arguments else _DECIMAL_DEFAULT
        return pyarrow.decimal256(digits, scale), f"Decimal({digits}, {scale})"
    return arrow, "String"


def _in_zone(moment: datetime, zone: str | None) -> datetime:
    return moment if zone is None else moment.replace(tzinfo=UTC)


def _within(values: pyarrow.Array, low: date, high: date) -> pyarrow.Array:
    bounds = [pyarrow.scalar(bound, values.type) for bound in (low, high)]
    fits = pc.and_(pc.greater_equal(values, bounds[0]), pc.less_equal(values, bounds[1]))
    return pc.if_else(fits, values, pyarrow.scalar(None, values.type))


def _nullable(text: str) -> bool:
    return text.startswith(("Nullable(", "LowCardinality(Nullable("))


def _bare(text: str) -> str:
    for wrapper in ("LowCardinality(", "Nullable("):
        if text.startswith(wrapper):
            text = text[len(wrapper) : -1]
    return text


def _numbers(text: str) -> tuple[int, int]:
    """Return the number of digits of a Decimal type, and how many of them are fractional. A DateTime64 has
    fractional digits only.
    """
    first, *more = [int(number) for number in re.findall(r"\d+", text.partition("(")[2])]
    return (first, more[0]) if more else (first, first)
