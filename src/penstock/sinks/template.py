# SPDX-License-Identifier: Apache-2.0
"""Templates for names and keys: "{database}.{table}", "order:{id}", "{plan.items[0].sku}".

A placeholder in braces is one of

    database, table                       the target's name
    source.database, source.table         the table's name in the log
    _change_type, _commit_version,        the system columns of a change
    _commit_timestamp, _metadata.gtid, ...
    a column, or a path into a JSON column: plan.items[0].sku

A column is quoted in backticks if its name is not a word or is one of the names above: {`table`}. Literal
braces are doubled. Values are text as the server's client displays them; bytes are hexadecimal.
"""

import difflib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import TableName

_TOKEN = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_NAME = re.compile(r"`((?:[^`]|``)+)`|(\w+)", re.UNICODE)
_STEP = re.compile(r"\.(?:`((?:[^`]|``)+)`|([^.\[\]`]+))|\[(\d+)\]")
_METADATA = ("instance", "database", "table", "gtid", "file", "offset", "row", "server_id", "thread_id")
# Column types that may hold JSON.
_DOCUMENTS = re.compile(r"(json|char|varchar|(tiny|medium|long)?text)\b", re.IGNORECASE)
# Arrow's functions take longer to call than to make the texts of this many rows.
_FEW_ROWS_MAX = 64
# Characters with a special meaning in glob patterns of Redis and other servers.
_PATTERN = re.compile(r"([*?\[\]\\^])")


@dataclass(frozen=True)
class _Placeholder:
    """A field placeholder: its first name, whether it was quoted, and the path after it."""

    name: str
    quoted: bool
    path: tuple[int | str, ...]


class Template:
    """A template for the rows of one target. Raises OptionInvalid if it contains an unknown name."""

    def __init__(self, text: str, target: Target) -> None:
        self.text = text
        self._target = target
        self._parts: list[str | _Placeholder] = []
        end = 0
        for token in _TOKEN.finditer(text):
            self._add(text[end : token.start()])
            end = token.end()
            if token[0] in ("{{", "}}"):
                self._add(token[0][0])
            elif token[1] is None:
                raise OptionInvalid(
                    f"the template {text!r} has a brace without its other half",
                    hint="Write {{ or }} for a brace that is meant as such",
                )
            else:
                self._add(self._parse_placeholder(token[1]))
        self._add(text[end:])
        parts = [part for part in self._parts if isinstance(part, str)]
        # The text if it is the same for every row, otherwise None.
        self.constant = "".join(parts) if len(parts) == len(self._parts) else None

    def texts(self, changes: Changes) -> pyarrow.Array:
        """Return the text for each row as strings, null if a value is null."""
        if (constant := self.constant) is not None:
            return pyarrow.repeat(constant, len(changes)).cast(pyarrow.string())
        pieces = [part if isinstance(part, str) else self._values(part, changes) for part in self._parts]
        if len(changes) <= _FEW_ROWS_MAX:
            return _few_texts(pieces)
        return pc.binary_join_element_wise(*pieces, "")

    def glob(self) -> str:
        """Return a glob pattern that matches every possible text: a star for each value, the rest escaped."""
        return "".join(_PATTERN.sub(r"\\\1", part) if isinstance(part, str) else "*" for part in self._parts)

    @property
    def stem(self) -> str:
        """The prefix that all possible texts share."""
        return self._parts[0] if self._parts and isinstance(self._parts[0], str) else ""

    def may_equal(self, other: "Template") -> bool:
        """Return whether both templates can produce the same text for some values."""
        first_signs, second_signs = (
            [*itertools.chain(*(_signs(part) for part in template._parts))] for template in (self, other)
        )
        # After each character of `first_signs`, `reached` contains the indexes in `second_signs` where a
        # common text could continue. A value stands for any number of characters.
        reached = _skip_values(second_signs, {0})
        for sign in first_signs:
            if sign is None:
                reached = set(range(min(reached), len(second_signs) + 1)) if reached else reached
            else:
                kept = {
                    index for index in reached if index < len(second_signs) and second_signs[index] is None
                }
                moved = {
                    index + 1
                    for index in reached
                    if index < len(second_signs) and second_signs[index] == sign
                }
                reached = _skip_values(second_signs, kept | moved)
        return len(second_signs) in reached

    def _add(self, part: str | _Placeholder) -> None:
        if isinstance(part, _Placeholder) or not part:
            if part:
                self._parts.append(part)
        elif self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += part
        else:
            self._parts.append(part)

    def _parse_placeholder(self, inner: str) -> str | _Placeholder:
        """Parse a placeholder: return a constant for all rows, or the column and path to read in each row."""
        field = _read(inner)
        if field is None:
            raise OptionInvalid(
                f"{{{inner}}} in the template {self.text!r} names nothing",
                hint="Write a column, or a path such as {plan.items[0].sku}; `column` for odd names",
            )
        target = self._target.name
        if not field.quoted and field.name in ("database", "table") and not field.path:
            return target.database if field.name == "database" else target.table
        if not field.quoted and (field.name == "source" or field.name in SYSTEM_COLUMNS):
            self._check_system(inner, field)
        elif field.name not in self._target.column_names:
            self._unknown(inner, field.name, self._target.column_names)
        elif field.path and not _DOCUMENTS.match(self._target.column(field.name).type_text):
            raise OptionInvalid(
                f"{{{inner}}} in the template {self.text!r} looks into a column that holds no documents",
                hint=f"{field.name} is {self._target.column(field.name).type_text}: write {{{field.name}}}",
            )
        return field

    def _check_system(self, inner: str, field: _Placeholder) -> None:
        known: dict[str, tuple[str, ...]] = {"source": ("database", "table"), "_metadata": _METADATA}
        names = known.get(field.name)
        if names is None and not field.path:
            return
        if names is None or len(field.path) != 1 or field.path[0] not in names:
            if field.name == "source" and "source" in self._target.column_names:
                return
            self._unknown(inner, str(field.path[-1]) if field.path else "", names or ())

    def _unknown(self, inner: str, name: str, names: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(name, names, 1)
        shown = ", ".join(names) or "nothing behind it"
        raise OptionInvalid(
            f"{{{inner}}} in the template {self.text!r}: {self._target.name} has no {name or inner!r}",
            hint=f"Did you mean {near[0]}?" if near else f"There is {shown}",
        )

    def _values(self, field: _Placeholder, changes: Changes) -> pyarrow.Array:
        if not field.quoted and field.name == "source" and field.path in (("database",), ("table",)):
            return _source(changes.source, str(field.path[0]), len(changes))
        if not field.quoted and field.name in SYSTEM_COLUMNS:
            values = changes.rows.column(field.name)
            if field.path:
                values = pc.struct_field(values, str(field.path[0]))
            return _as_texts(values)
        return column_texts(changes, field.name, field.path)


def _as_texts(values: pyarrow.Array) -> pyarrow.Array:
    if len(values) <= _FEW_ROWS_MAX and pyarrow.types.is_integer(values.type):
        numbers = values.to_pylist()
        return pyarrow.array(
            [None if number is None else str(number) for number in numbers], pyarrow.string()
        )
    return values.cast(pyarrow.string())


def _few_texts(pieces: Sequence[str | pyarrow.Array]) -> pyarrow.Array:
    """Return the same as Arrow's join for a few rows. At least one of the pieces is a column."""
    columns = [itertools.repeat(piece) if isinstance(piece, str) else piece.to_pylist() for piece in pieces]
    # A constant never ends, so the columns determine the number of rows.
    rows = zip(*columns, strict=False)
    return pyarrow.array([None if None in row else "".join(row) for row in rows], pyarrow.string())


def column_texts(changes: Changes, name: str, path: tuple[int | str, ...] = ()) -> pyarrow.Array:
    """Return a column's values as strings. With a path, return the values at that path in the column's JSON
    documents.

    Null values stay null. Raises OptionInvalid, and ValueMalformed if a document is truncated before the
    path.
    """
    column = changes.target.column(name)
    declared = (column.name, column.type_text, column.charset, column.nullable)
    mariadb = changes.target.mariadb
    rows = _needed(changes.rows, name)
    return pyarrow.array(_native.column_texts(rows, declared, mariadb=mariadb, path=list(path)))


def _needed(rows: pyarrow.RecordBatch, name: str) -> pyarrow.RecordBatch:
    """Return rows with the columns that the texts of one column are made of.

    Passing a column to the kernel costs more than the texts of a few rows.
    """
    index = rows.schema.get_field_index("_metadata")
    if name not in rows.schema.names or index < 0:
        return rows
    metadata = rows.column(index)
    has_exact = metadata.type.get_field_index("unrepresentable") >= 0
    is_plain = not has_exact or metadata.field("unrepresentable").null_count == len(metadata)
    return rows.select([name] if is_plain else [name, "_metadata"])


def default_key(target: Target) -> str:
    """Return the template of default keys: "database:table:" and the values of the primary key."""
    columns = ":".join(placeholder(name) for name in target.primary_key)
    return f"{{database}}:{{table}}:{columns}"


def placeholder(column: str) -> str:
    """Return the placeholder for a column with any name."""
    return "{`" + column.replace("`", "``") + "`}"


def _signs(part: "str | _Placeholder") -> list[str | None]:
    """Return the characters of a part of a template, or a single None for a part that stands for a value."""
    return list(part) if isinstance(part, str) else [None]


def _skip_values(signs: list[str | None], reached: set[int]) -> set[int]:
    """Return the indexes reachable if values may be empty."""
    reachable = set(reached)
    for index in sorted(reached):
        while index < len(signs) and signs[index] is None:
            index += 1
            reachable.add(index)
    return reachable


def _source(name: TableName, part: str, rows: int) -> pyarrow.Array:
    return pyarrow.repeat(name.database if part == "database" else name.table, rows).cast(pyarrow.string())


def _read(inner: str) -> _Placeholder | None:
    first = _NAME.match(inner)
    if first is None:
        return None
    path: list[int | str] = []
    end = first.end()
    while end < len(inner):
        path_step = _STEP.match(inner, end)
        if path_step is None:
            return None
        path.append(
            int(path_step[3]) if path_step[3] is not None else path_step[2] or path_step[1].replace("``", "`")
        )
        end = path_step.end()
    quoted = first[1] is not None
    return _Placeholder(first[1].replace("``", "`") if quoted else first[2], quoted, tuple(path))
