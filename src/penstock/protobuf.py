# SPDX-License-Identifier: Apache-2.0
"""Protobuf's wire format, for small messages with field numbers that the caller knows."""

from collections.abc import Iterator

from penstock.errors import EventMalformed

_UINT64 = (1 << 64) - 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIELD_NUMBER_MAX = (1 << 29) - 1

Value = int | bytes | memoryview


def varint(value: int) -> bytes:
    """Return a 64-bit integer as a varint; a negative integer in two's complement."""
    value &= _UINT64
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def length_head(number: int, length: int) -> bytes:
    """Return the header of a length-delimited field, which precedes its content."""
    return varint(number << 3 | _BYTES) + varint(length)


def encode(*fields: tuple[int, Value | str | bool]) -> bytes:
    """Return a message with these fields in this order: integers as varints, all other values with a
    length.
    """
    parts: list[bytes | memoryview] = []
    for number, value in fields:
        if isinstance(value, int):
            parts += (varint(number << 3 | _VARINT), varint(value))
        else:
            content = value.encode() if isinstance(value, str) else value
            parts += (length_head(number, len(content)), content)
    return b"".join(parts)


class Message:
    """A decoded message: the values of each field, by field number. A missing field has protobuf's default
    value.
    """

    def __init__(self, content: bytes | memoryview) -> None:
        """Decode a message without copying its fields. Raises EventMalformed."""
        self._values: dict[int, list[int | memoryview]] = {}
        for number, value in fields_of(content):
            self._values.setdefault(number, []).append(value)

    def has(self, number: int) -> bool:
        """Return whether a field is present."""
        return number in self._values

    def unsigned(self, number: int) -> int:
        """Return the last value of an integer field as uint64. Raises EventMalformed."""
        values = self._values.get(number)
        if values is None:
            return 0
        value = values[-1]
        if not isinstance(value, int):
            raise EventMalformed(f"field {number} of a message is no integer")
        return value

    def signed(self, number: int) -> int:
        """Return the last value of an integer field as int64. Raises EventMalformed."""
        value = self.unsigned(number)
        return value - (1 << 64) if value >> 63 else value

    def view(self, number: int) -> memoryview:
        """Return the last value of a length-delimited field, without a copy. Raises EventMalformed."""
        views = self.views(number)
        return views[-1] if views else memoryview(b"")

    def content(self, number: int) -> bytes:
        """Return the last value of a length-delimited field. Raises EventMalformed."""
        return bytes(self.view(number))

    def text(self, number: int) -> str:
        """Return the last value of a text field; invalid UTF-8 is replaced. Raises EventMalformed."""
        return self.content(number).decode(errors="replace")

    def views(self, number: int) -> list[memoryview]:
        """Return all values of a repeated length-delimited field. Raises EventMalformed."""
        values = self._values.get(number, [])
        views = [value for value in values if isinstance(value, memoryview)]
        if len(views) < len(values):
            raise EventMalformed(f"field {number} of a message has no length")
        return views

    def message(self, number: int) -> "Message":
        """Return the last value of a message field; an empty message if it is missing."""
        return Message(self.view(number))

    def messages(self, number: int) -> list["Message"]:
        """Return all values of a repeated message field."""
        return [Message(view) for view in self.views(number)]


def fields_of(content: bytes | memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and value of each field of a message: integers as unsigned, other values as views.

    Raises EventMalformed at the first malformed field.
    """
    message = memoryview(content)
    at, end = 0, len(message)
    while at < end:
        tag, at = _read_varint(message, at)
        number, kind = tag >> 3, tag & 7
        if not 0 < number <= _FIELD_NUMBER_MAX:
            raise EventMalformed(f"a message has a field with the invalid number {number}")
        if kind == _VARINT:
            value, at = _read_varint(message, at)
            yield number, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, at = _read_varint(message, at)
        if size is None:
            raise EventMalformed(f"a message has a field {number} of wire type {kind}")
        if at + size > end:
            raise EventMalformed(f"field {number} of a message ends {at + size - end} bytes after it")
        yield number, message[at : at + size]
        at += size


def _read_varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & _UINT64, at
        shift += 7
    raise EventMalformed("a message ends inside an integer, or has one of more than 64 bits")
