# SPDX-License-Identifier: Apache-2.0
"""Output of rows: aligned lines, or one JSON object per line."""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from penstock.durations import duration_text
from penstock.sizes import size_text

# Longer cells are truncated in aligned lines. JSON output contains the whole value.
_CELL_CHARACTERS_MAX = 200


@dataclass(frozen=True)
class Field:
    """One column of aligned lines. The last column of a line is not padded."""

    name: str
    width: int
    right: bool = False


class LineWriter:
    """Prints aligned lines under a heading. The heading is printed before the first line."""

    def __init__(self, out: TextIO, fields: Sequence[Field]) -> None:
        self._out = out
        self._fields = fields
        self._headed = False

    def write(self, cells: Sequence[Any]) -> None:
        """Print one line."""
        if not self._headed:
            self._headed = True
            heading = self._line([field.name for field in self._fields])
            Console(file=self._out, highlight=False, soft_wrap=True).print(Text(heading, "bold"))
        self._out.write(self._line(["" if cell is None else cell_text(cell) for cell in cells]) + "\n")

    def _line(self, texts: Sequence[str]) -> str:
        last_index = len(texts) - 1
        padded = [
            text if index == last_index and not field.right else _pad(text, field)
            for index, (text, field) in enumerate(zip(texts, self._fields, strict=True))
        ]
        return "  ".join(padded).rstrip()


def write_json(out: TextIO, rows: Iterable[Mapping[str, Any]]) -> None:
    """Print one JSON object per line; see `json_value` for values without a JSON form."""
    for row in rows:
        out.write(json.dumps(row, default=json_value, ensure_ascii=False) + "\n")


def json_value(value: Any) -> Any:
    """Return a value as JSON: bytes in base64, decimals as text, times in ISO 8601, durations as
    [-]hh:mm:ss.
    """
    match value:
        case bytes():
            return base64.b64encode(value).decode()
        case Decimal():
            return str(value)
        case datetime() | date():
            return time_text(value)
        case timedelta():
            return duration_text(value)
    raise AssertionError(f"{type(value)} has no JSON form")


def field_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field: its name in words, and its value as text, or - without a value."""
    names = {name: name.replace("_", " ") for name in fields}
    width = max(map(len, names.values()), default=0) + 2
    for name, value in fields.items():
        text = ("yes" if value else "no") if isinstance(value, bool) else cell_text(value)
        yield f"{names[name]:<{width}}{'-' if value in (None, '') else text}"


def cell_text(value: Any) -> str:
    """Return a value as one short line."""
    match value:
        case bytes():
            text = "0x" + value.hex()
        case datetime() | date():
            text = time_text(value)
        case timedelta():
            text = duration_text(value)
        case dict() | list():
            text = json.dumps(value, default=json_value, ensure_ascii=False)
        case _:
            text = str(value)
    text = " ".join(text.split()) if not text.isprintable() else text
    return text if len(text) <= _CELL_CHARACTERS_MAX else text[: _CELL_CHARACTERS_MAX - 1] + "…"


def time_text(moment: datetime | date) -> str:
    """Return a time in ISO 8601, with a Z for UTC."""
    if isinstance(moment, datetime) and moment.tzinfo is not None:
        return moment.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"
    return moment.isoformat()


def bytes_text(count: float | None) -> str:
    """Return a number of bytes with a suitable unit, `-` if unknown."""
    return "-" if count is None else size_text(count)


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {noun if number == 1 else noun + 's'}"


def _pad(text: str, field: Field) -> str:
    return text.rjust(field.width) if field.right else text.ljust(field.width)
