# SPDX-License-Identifier: Apache-2.0
"""Key columns in SQL: how to select a value, write it as a literal, and find a value between two values.

Literals have the column's own charset and type, so that the server compares them with its rows by the
column's own collation, and can use the index.
"""

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv6Address
from typing import Any
from unicodedata import normalize

from penstock import _native
from penstock.errors import PenstockError
from penstock.model import Column, quote_name

_WORD = re.compile(r"\s*(\w+)")
_WHOLE = frozenset(("tinyint", "smallint", "mediumint", "int", "integer", "bigint", "year"))
_REAL = frozenset(("float", "double", "real"))
_TEMPORAL = frozenset(("date", "time", "datetime", "timestamp"))
_NUMBERED = frozenset(("enum", "set", "bit"))
_ADDRESSES = frozenset(("uuid", "inet4", "inet6"))
_TEXTS = frozenset(("char", "varchar", "tinytext", "text", "mediumtext", "longtext"))
_BYTES = frozenset(("binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"))
# BINARY pads its values, so it orders them differently.
_PLAIN_BYTES = _BYTES - {"binary"}

_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
# The characters that nearly every key consists of, in an order that all collations share.
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class KeyColumn:
    """One column of a key."""

    column: Column

    @property
    def word(self) -> str:
        """The first word of the column's type, in lower case."""
        match = _WORD.match(self.column.type_text.lower())
        return match[1] if match else ""

    @property
    def sql(self) -> str:
        """The column's quoted name."""
        return quote_name(self.column.name)

    @property
    def is_ordered(self) -> bool:
        """Whether the column's values can be compared with a literal."""
        return self.word in _WHOLE | _REAL | _TEMPORAL | _NUMBERED | _ADDRESSES | _TEXTS | _BYTES | {
            "decimal"
        }

    @property
    def is_text(self) -> bool:
        """Whether the column holds text with a collation."""
        return self.word in _TEXTS and self.column.charset not in (None, "binary")

    @property
    def is_bytes(self) -> bool:
        """Whether it holds bytes."""
        return self.word in _BYTES or (self.word in _TEXTS and not self.is_text)

    @property
    def select_expression(self) -> str:
        """The SQL expression that selects a value as text, from which `literal` makes a literal."""
        if self.is_text or self.is_bytes:
            return f"HEX({self.sql})"
        if self.word in _NUMBERED:
            return f"CAST({self.sql} AS UNSIGNED)"
        if self.word in _REAL:
            return f"CAST({self.sql} * 1e0 AS CHAR)"
        return f"CAST({self.sql} AS CHAR)"

    def literal(self, answer: Any) -> str:
        """Return a literal for a value of `select_expression`."""
        text = answer.decode("ascii") if isinstance(answer, bytes) else str(answer)
        if self.is_text:
            return f"_{self.column.charset} x'{text}'"
        if self.is_bytes:
            return f"x'{text}'"
        if self.word in _REAL:
            return text if "e" in text else f"{text}e0"
        if self.word in _TEMPORAL | _ADDRESSES:
            return f"'{text}'"
        return text

    def literal_of_sent(self, sent: bytes) -> str | None:
        """Return a literal for a value as the server sent it in a row, None if it cannot be derived."""
        if self.word in ("enum", "set"):
            return None
        if self.word == "bit":
            return str(int.from_bytes(sent, "big"))
        return self.literal(sent.hex().upper() if self.is_text or self.is_bytes else sent)

    def value(self, literal: str) -> Any:
        """Return the value of a literal, in the Python type that Arrow uses.

        The result is text or bytes; an int, Decimal or float; or a date, a datetime without a zone, or a
        timedelta. Addresses are returned as text, and so are dates that do not exist in the calendar. Members
        of ENUM and SET are returned as their numbers.
        """
        if self.is_text:
            return self._text(literal)
        if self.is_bytes:
            return bytes.fromhex(literal[2:-1])
        if self.word == "decimal":
            return Decimal(literal)
        if self.word in _REAL:
            return float(literal)
        if self.word in _TEMPORAL:
            return _moment(self.word, literal[1:-1])
        return literal[1:-1] if self.word in _ADDRESSES else int(literal)

    def _text(self, literal: str) -> Any:
        charset, _, digits = literal[1:-1].partition(" x'")
        sent = bytes.fromhex(digits)
        try:
            return _native.decode_text(charset, sent)
        except PenstockError:
            # Bytes that are not valid text in the charset are not valid in Arrow either.
            return sent

    def between(self, low: str, high: str, share: float) -> str | None:
        """Return a literal above `low` and at most `high`, at about `share` (0 to 1) of the way.

        None if it cannot be computed. The server may order values differently, so the caller has to check.
        """
        if self.is_text:
            return self._text_between(low, high, share)
        if self.is_bytes:
            middle = _bytes_between(bytes.fromhex(low[2:-1]), bytes.fromhex(high[2:-1]), share)
            return f"x'{middle.hex().upper()}'"
        first, last = (self._number(bound) for bound in (low, high))
        if first is None or last is None or first >= last:
            return None
        number = first + max(1, int((last - first) * Decimal(share)))
        return self._from_number(number, low)

    def _number(self, literal: str) -> int | None:
        """Return an integer for a value. These integers sort like the values."""
        value = self.value(literal)
        match value:
            case float():
                bits = struct.unpack("<q", struct.pack("<d", value))[0]
                return int(bits if bits >= 0 else -(bits & (1 << 63) - 1))
            case Decimal():
                return int(value.scaleb(_scale(literal)))
            case int():
                return value
            case datetime():
                return (value - _EPOCH) // _MICROSECOND
            case date():
                return value.toordinal()
            case timedelta():
                return value // _MICROSECOND
        match self.word:
            case "uuid":
                return int(str(value).replace("-", ""), 16)
            case "inet4":
                return int(IPv4Address(value))
            case "inet6":
                return int(IPv6Address(value))
        return None

    def _from_number(self, number: int, like: str) -> str:
        match self.word:
            case "float" | "double" | "real":
                bits = number if number >= 0 else -number - (1 << 63)
                return self.literal(repr(struct.unpack("<d", struct.pack("<q", bits))[0]))
            case "decimal":
                return f"{Decimal(number).scaleb(-_scale(like)):f}"
            case "date":
                return f"'{date.fromordinal(number).isoformat()}'"
            case "datetime" | "timestamp":
                return f"'{(_EPOCH + number * _MICROSECOND).isoformat(' ', 'microseconds')}'"
            case "time":
                seconds, micros = divmod(abs(number), 1_000_000)
                clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.{micros:06}"
                return f"'{'-' if number < 0 else ''}{clock}'"
            case "uuid":
                digits = f"{number:032x}"
                return f"'{'-'.join([digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]])}'"
            case "inet4":
                return f"'{IPv4Address(number)}'"
            case "inet6":
                return f"'{IPv6Address(number)}'"
        return str(number)

    def _text_between(self, low: str, high: str, share: float) -> str | None:
        first, last = self.value(low), self.value(high)
        if not isinstance(first, str) or not isinstance(last, str):
            return None
        middle = _text_between(first, last, share)
        return None if middle is None else f"_utf8mb4 x'{middle.encode().hex().upper()}'"


def order_of(type_text: str, collation: str | None) -> str:
    """Return the properties that determine the order of a column's values. Types of a kind that differ only
    in length have the same order.
    """
    match = _WORD.match(type_text.lower())
    word = match[1] if match else ""
    if word in _TEXTS and collation is not None:
        # Before MySQL 8.0.30 and MariaDB 10.6, collations of utf8mb3 were named after its alias.
        return re.sub(r"^utf8_", "utf8mb3_", collation)
    if word in _WHOLE or word in _PLAIN_BYTES:
        return "integer" if word in _WHOLE else "bytes"
    return type_text.lower()


def _scale(literal: str) -> int:
    return len(literal.partition(".")[2])


def _moment(word: str, text: str) -> Any:
    try:
        match word:
            case "date":
                return date.fromisoformat(text)
            case "time":
                hours, minutes, seconds = text.lstrip("-").split(":")
                whole, _, fraction = seconds.partition(".")
                micros = int(fraction.ljust(6, "0")) if fraction else 0
                span = timedelta(
                    hours=int(hours), minutes=int(minutes), seconds=int(whole), microseconds=micros
                )
                return -span if text.startswith("-") else span
        return datetime.fromisoformat(text)
    except ValueError:
        # An invalid date that the server stores and compares nevertheless.
        return text


def _bytes_between(low: bytes, high: bytes, share: float) -> bytes:
    width = max(len(low), len(high)) + 2
    first, last = (int.from_bytes(bound.ljust(width, b"\0"), "big") for bound in (low, high))
    number = first + max(1, int((last - first) * Decimal(share)))
    middle = min(number, last).to_bytes(width, "big").rstrip(b"\0")
    # Trailing zeros are significant: without them the result may equal the lower bound.
    return middle if middle > low else high


def _text_between(low: str, high: str, share: float) -> str | None:
    """Interpolate over the letters after the common prefix, as over the digits of two fractions."""
    front = 0
    while front < min(len(low), len(high)) and low[front] == high[front]:
        front += 1
    letters = _alphabet(low[front:] + high[front:])
    base = len(letters) + 1
    width = 8
    digit_of_letter = {letter: position for position, letter in enumerate(letters, start=1)}

    def number(text: str) -> int:
        digits = [digit_of_letter[letter] for letter in text[front : front + width]]
        value = 0
        for digit in digits + [0] * (width - len(digits)):
            value = value * base + digit
        return value

    first, last = number(low), number(high)
    if first >= last:
        return None
    value = first + max(1, int((last - first) * Decimal(share)))
    digits = []
    for _ in range(width):
        value, digit = divmod(value, base)
        digits.append(digit)
    # Zero stands for no letter, so the text ends at the first zero.
    suffix = ""
    for digit in reversed(digits):
        if digit == 0:
            break
        suffix += letters[digit - 1]
    middle = low[:front] + suffix
    return middle if number(middle) > first else high


def _alphabet(seen: str) -> Sequence[str]:
    """Return letters in a likely sort order, including the letters of `seen`."""
    return sorted({*_LETTERS, *seen}, key=lambda letter: (normalize("NFKD", letter.lower()), letter))
