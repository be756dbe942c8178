# SPDX-License-Identifier: Apache-2.0
"""Names and keys made from rows: "{database}.{table}", "order:{id}", "{plan.items[0].sku}".

In braces stands one of

    database, table                       the target's name
    source.database, source.table         the table's name in the log
    _change_type, _commit_version,        what each change has beside its row
    _commit_timestamp, _metadata.gtid, ...
    a column, or a path into one that holds JSON: plan.items[0].sku

A column with another name than a word, or with one of the names above, stands in backticks: {`table`}. Braces
that are meant as such are doubled. A value is text as the server's client shows it; bytes are hexadecimal.
"""

import difflib
import itertools
import re
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
# Types of columns that may hold JSON.
_DOCUMENTS = re.compile(r"(json|char|varchar|(tiny|medium|long)?text)\b", re.IGNORECASE)
# What Redis and others read as a pattern.
_PATTERN = re.compile(r"([*?\[\]\\^])")


@dataclass(frozen=True)
class _Place:
    """What stands in one pair of braces: the first name, whether it was quoted, and the steps behind it."""

    name: str
    quoted: bool
    path: tuple[int | str, ...]


class Template:
    """A template for the rows of one target. Raises OptionInvalid where it names what is not there."""

    def __init__(self, text: str, target: Target) -> None:
        self.text = text
        self._target = target
        self._parts: list[str | _Place] = []
        at = 0
        for token in _TOKEN.finditer(text):
            self._add(text[at : token.start()])
            at = token.end()
            if token[0] in ("{{", "}}"):
                self._add(token[0][0])
            elif token[1] is None:
                raise OptionInvalid(
                    f"the template {text!r} has a brace without its other half",
                    hint="Write {{ or }} for a brace that is meant as such",
                )
            else:
                self._add(self._place(token[1]))
        self._add(text[at:])

    @property
    def constant(self) -> str | None:
        """What it makes of every row, or None where rows decide."""
        parts = [one for one in self._parts if isinstance(one, str)]
        return "".join(parts) if len(parts) == len(self._parts) else None

    def texts(self, changes: Changes) -> pyarrow.Array:
        """Return the text for each row, as strings; null where a value that is asked for is null."""
        if (constant := self.constant) is not None:
            return pyarrow.repeat(constant, len(changes)).cast(pyarrow.string())
        pieces = [one if isinstance(one, str) else self._values(one, changes) for one in self._parts]
        return pc.binary_join_element_wise(*pieces, "")

    def glob(self) -> str:
        """Return a pattern for all it can make: a star for each value, all else escaped."""
        return "".join(_PATTERN.sub(r"\\\1", one) if isinstance(one, str) else "*" for one in self._parts)

    @property
    def stem(self) -> str:
        """What all that it can make begins with."""
        return self._parts[0] if self._parts and isinstance(self._parts[0], str) else ""

    def may_equal(self, other: "Template") -> bool:
        """Tell whether both can make the same text, whatever the values are."""
        one, two = ([*itertools.chain(*(_signs(part) for part in made._parts))] for made in (self, other))
        # Of `one` up to a sign, with which signs of `two` it can end: a place takes any number of signs.
        reached = _past_places(two, {0})
        for sign in one:
            if sign is None:
                reached = set(range(min(reached), len(two) + 1)) if reached else reached
            else:
                kept = {at for at in reached if at < len(two) and two[at] is None}
                moved = {at + 1 for at in reached if at < len(two) and two[at] == sign}
                reached = _past_places(two, kept | moved)
        return len(two) in reached

    def _add(self, part: str | _Place) -> None:
        if isinstance(part, _Place) or not part:
            if part:
                self._parts.append(part)
        elif self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += part
        else:
            self._parts.append(part)

    def _place(self, inner: str) -> str | _Place:
        """Read what stands in braces: text that is the same for all rows, or a place in each."""
        place = _read(inner)
        if place is None:
            raise OptionInvalid(
                f"{{{inner}}} in the template {self.text!r} names nothing",
                hint="Write a column, or a path such as {plan.items[0].sku}; `column` for odd names",
            )
        target = self._target.name
        if not place.quoted and place.name in ("database", "table") and not place.path:
            return target.database if place.name == "database" else target.table
        if not place.quoted and (place.name == "source" or place.name in SYSTEM_COLUMNS):
            self._check_system(inner, place)
        elif place.name not in self._target.column_names:
            self._unknown(inner, place.name, self._target.column_names)
        elif place.path and not _DOCUMENTS.match(self._target.column(place.name).type_text):
            raise OptionInvalid(
                f"{{{inner}}} in the template {self.text!r} looks into a column that holds no documents",
                hint=f"{place.name} is {self._target.column(place.name).type_text}: write {{{place.name}}}",
            )
        return place

    def _check_system(self, inner: str, place: _Place) -> None:
        known: dict[str, tuple[str, ...]] = {"source": ("database", "table"), "_metadata": _METADATA}
        names = known.get(place.name)
        if names is None and not place.path:
            return
        if names is None or len(place.path) != 1 or place.path[0] not in names:
            if place.name == "source" and "source" in self._target.column_names:
                return
            self._unknown(inner, str(place.path[-1]) if place.path else "", names or ())

    def _unknown(self, inner: str, name: str, names: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(name, names, 1)
        shown = ", ".join(names) or "nothing behind it"
        raise OptionInvalid(
            f"{{{inner}}} in the template {self.text!r}: {self._target.name} has no {name or inner!r}",
            hint=f"Did you mean {near[0]}?" if near else f"There is {shown}",
        )

    def _values(self, place: _Place, changes: Changes) -> pyarrow.Array:
        if not place.quoted and place.name == "source" and place.path in (("database",), ("table",)):
            return _source(changes.source, str(place.path[0]), len(changes))
        if not place.quoted and place.name in SYSTEM_COLUMNS:
            values = changes.rows.column(place.name)
            if place.path:
                values = pc.struct_field(values, str(place.path[0]))
            return values.cast(pyarrow.string())
        return column_texts(changes, place.name, place.path)


def column_texts(changes: Changes, name: str, path: tuple[int | str, ...] = ()) -> pyarrow.Array:
    """Return a column's values as strings, null where they are; with a path what that leads to in a document.

    Raises OptionInvalid, and ValueMalformed where a document breaks off on the path.
    """
    column = changes.target.column(name)
    declared = (column.name, column.type_text, column.charset, column.nullable)
    mariadb = changes.target.mariadb
    return pyarrow.array(_native.column_texts(changes.rows, declared, mariadb=mariadb, path=list(path)))


def default_key(target: Target) -> str:
    """Return the template of keys that name a row: "database:table:" and the values of the primary key."""
    columns = ":".join(placeholder(name) for name in target.primary_key)
    return f"{{database}}:{{table}}:{columns}"


def placeholder(column: str) -> str:
    """Return what stands for a column in a template, whatever its name."""
    return "{`" + column.replace("`", "``") + "`}"


def _signs(part: "str | _Place") -> list[str | None]:
    """Return a part sign by sign, None for values."""
    return list(part) if isinstance(part, str) else [None]


def _past_places(signs: list[str | None], reached: set[int]) -> set[int]:
    """Return the places that are reached where a value may be empty."""
    found = set(reached)
    for at in sorted(reached):
        while at < len(signs) and signs[at] is None:
            at += 1
            found.add(at)
    return found


def _source(name: TableName, part: str, rows: int) -> pyarrow.Array:
    return pyarrow.repeat(name.database if part == "database" else name.table, rows).cast(pyarrow.string())


def _read(inner: str) -> _Place | None:
    first = _NAME.match(inner)
    if first is None:
        return None
    path: list[int | str] = []
    at = first.end()
    while at < len(inner):
        step = _STEP.match(inner, at)
        if step is None:
            return None
        path.append(int(step[3]) if step[3] is not None else step[2] or step[1].replace("``", "`"))
        at = step.end()
    quoted = first[1] is not None
    return _Place(first[1].replace("``", "`") if quoted else first[2], quoted, tuple(path))
