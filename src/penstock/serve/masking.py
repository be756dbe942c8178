# SPDX-License-Identifier: Apache-2.0
"""The columns whose values are hidden from an account, by `masked` and `columns` of the account in
penstock.yaml.

Every call that shows row values to an account uses this module. A masked value is left out, never replaced: a
missing column is better than a wrong value. An account with hidden columns may not use calls whose responses
cannot leave out a value.
"""

import difflib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow

from penstock import errors
from penstock.errors import AccessDenied, OptionInvalid, PenstockError, StreamError
from penstock.model import TableName, TablePatterns
from penstock.source.reading import SYSTEM_COLUMNS
from penstock.source.rows_filter import SLOT_COLUMN

# The JSON text shown in place of a text that may contain a masked value.
HIDDEN_TEXT = "(masked)"

# Columns that a response adds to those of the table.
_ADDED_COLUMNS = {*SYSTEM_COLUMNS, SLOT_COLUMN}
_METADATA, _UNREPRESENTABLE = "_metadata", "unrepresentable"


_Rules = tuple[tuple[TablePatterns, frozenset[str]], ...]


@dataclass(frozen=True)
class MaskedColumns:
    """The masked columns of a table, in lower case: those in `names` and, unless `shown` is None, all columns
    that are not in `shown`.
    """

    names: frozenset[str] = frozenset()
    shown: frozenset[str] | None = None

    def __contains__(self, name: object) -> bool:
        return name in self.names or (self.shown is not None and name not in self.shown)

    def hides(self, name: str) -> bool:
        """Return whether a column of a response is masked. A column that the response adds is masked only if
        a rule names it.
        """
        return name in self.names if name in _ADDED_COLUMNS else name.casefold() in self

    def __bool__(self) -> bool:
        return bool(self.names) or self.shown is not None

    def __or__(self, other: "MaskedColumns") -> "MaskedColumns":
        shown = [columns.shown for columns in (self, other) if columns.shown is not None]
        return MaskedColumns(self.names | other.names, frozenset.intersection(*shown) if shown else None)


@dataclass(frozen=True)
class Masking:
    """The masked columns by table pattern, in lower case. All patterns that match a table apply to it.

    `rules` lists columns to mask, and `shown_rules` lists the only columns to show. The case of column and
    table names is ignored, because a server may fold names, and masking too much is better than masking too
    little.
    """

    rules: _Rules = ()
    shown_rules: _Rules = ()
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)
    shown_settings: Mapping[str, Sequence[str]] = field(default_factory=dict, compare=False)

    @classmethod
    def of_settings(
        cls, masked: Mapping[str, Sequence[str]], shown: Mapping[str, Sequence[str]] | None = None
    ) -> "Masking":
        """Return the masking of the settings `masked` and `columns`, which map table patterns to column
        names.

        Raises OptionInvalid.
        """
        shown = shown or {}
        return cls(_rules_of(masked), _rules_of(shown), masked, shown)

    def __bool__(self) -> bool:
        return bool(self.rules or self.shown_rules)

    def columns(self, table: TableName) -> MaskedColumns:
        """Return the masked columns of a table."""
        return self._columns_where(lambda tables: matches_in_any_case(tables, table))

    def _columns_where(self, applies: Callable[[TablePatterns], bool]) -> MaskedColumns:
        """Return the columns that are masked by the rules whose table patterns apply."""
        masked = MaskedColumns()
        for tables, names in self.rules:
            if applies(tables):
                masked |= MaskedColumns(names)
        for tables, shown in self.shown_rules:
            if applies(tables):
                masked |= MaskedColumns(shown=shown)
        return masked

    def prove_applies(self, table: TableName, columns: Iterable[str]) -> None:
        """Raise AccessDenied if a rule about only this table names none of the columns that the table had.

        When the row was logged, the masked column may have had another name, under which no rule would hide
        it.
        """
        known = {name.casefold() for name in columns}
        for tables, names in self.rules:
            if tables.single() is not None and matches_in_any_case(tables, table) and not names & known:
                raise AccessDenied(
                    f"{', '.join(sorted(names))} of {table} is masked for this account, and the table had no"
                    " such column then",
                    hint="Mask the name that the column has there too: access in penstock.yaml",
                )

    def prove_all_apply(
        self, table: TableName, columns: Iterable[str], definitions: Iterable[Iterable[str]]
    ) -> None:
        """Raise AccessDenied if a rule about only this table might fail to hide a column.

        `columns` are the columns that the row was logged with, and `definitions` are the columns of every
        known definition of the table. Each name in the rule must be a column in one of the definitions, and
        no definition may have more of the names than `columns`. Otherwise, a masked column may have had
        another name when the row was logged, and no rule would hide that name.
        """
        known = {name.casefold() for name in columns}
        every = [known, *({name.casefold() for name in names} for names in definitions)]
        for tables, names in self.rules:
            if tables.single() is None or not matches_in_any_case(tables, table):
                continue
            unknown = sorted(names - set().union(*every))
            if unknown:
                near = difflib.get_close_matches(unknown[0], sorted(set().union(*every)), 1)
                raise AccessDenied(
                    f"{', '.join(unknown)} of {table} is masked for this account, and the table has no such"
                    " column",
                    hint=f"{f'Did you mean {near[0]}? ' if near else ''}Correct or remove it: access in"
                    " penstock.yaml",
                )
            if len(names & known) < max(len(names & others) for others in every):
                raise AccessDenied(
                    f"{', '.join(sorted(names - known))} of {table} is masked for this account, and the table"
                    " had no such column then",
                    hint="Mask the name that the column had then too; or, if it did not exist yet, name it"
                    f" under a pattern with *, as in {table}*: access in penstock.yaml",
                )

    def idle_names(self, table: TableName, columns: Iterable[str]) -> tuple[str, ...]:
        """Return the column names that occur in rules for this table alone and match none of its columns."""
        own = [
            names for tables, names in self.rules if tables.single() and matches_in_any_case(tables, table)
        ]
        return tuple(sorted(frozenset().union(*own) - {name.casefold() for name in columns}))

    def hidden_among(self, table: TableName, columns: Sequence[str]) -> frozenset[str]:
        """Return the columns of a table to hide. If a rule for this table alone matches none of its columns,
        hide all columns.
        """
        try:
            self.prove_applies(table, columns)
        except AccessDenied:
            return frozenset(columns)
        masked = self.columns(table)
        return frozenset(name for name in columns if name.casefold() in masked)

    @property
    def all_columns(self) -> MaskedColumns:
        """The columns that are masked in any table."""
        return self._columns_where(lambda tables: True)

    def masked_among(self, columns: Iterable[str], tables: TablePatterns) -> list[str]:
        """Return which of the columns are masked in a table that the patterns may select."""
        names = [TablePatterns([pattern]).single() for pattern in tables.include]

        def may_select(patterns: TablePatterns) -> bool:
            # A wildcard may select any table.
            return not names or any(name is None or matches_in_any_case(patterns, name) for name in names)

        masked = self._columns_where(may_select)
        return sorted(name for name in columns if masked.hides(name))


def _rules_of(columns: Mapping[str, Sequence[str]]) -> _Rules:
    return tuple(
        (in_any_case(pattern), frozenset(name.casefold() for name in names))
        for pattern, names in columns.items()
    )


def in_any_case(pattern: str) -> TablePatterns:
    """Return a table pattern that matches in lower case, for `matches_in_any_case`."""
    if not (pattern.startswith("/") and pattern.endswith("/")):
        return TablePatterns([pattern.casefold()])
    try:
        return TablePatterns([f"/(?i:{pattern[1:-1]})/"])
    except OptionInvalid:
        # The pattern has inline flags, which are valid only at its start.
        return TablePatterns([pattern])


def matches_in_any_case(tables: TablePatterns, table: TableName) -> bool:
    """Return whether a pattern of `in_any_case` matches a table's name, as it is or in lower case."""
    return tables.matches(table.database, table.table) or tables.matches(
        table.database.casefold(), table.table.casefold()
    )


def without_masked(rows: pyarrow.RecordBatch, masked: MaskedColumns) -> pyarrow.RecordBatch:
    """Return typed rows without the masked columns, and without their texts in `_metadata`."""
    if not masked:
        return rows
    kept = [name for name in rows.schema.names if not masked.hides(name)]
    rows = rows.select(kept)
    at = rows.schema.get_field_index(_METADATA)
    if at < 0:
        return rows
    metadata = rows.column(at)
    number = metadata.type.get_field_index(_UNREPRESENTABLE)
    texts = metadata.field(number)
    if texts.null_count == len(texts):
        return rows
    shown = [
        None if row is None else [pair for pair in row if pair[0].casefold() not in masked]
        for row in texts.to_pylist()
    ]
    fields = [metadata.field(index) for index in range(metadata.type.num_fields)]
    fields[number] = pyarrow.array([row or None for row in shown], texts.type)
    changed = pyarrow.StructArray.from_arrays(fields, fields=list(metadata.type))
    return rows.set_column(at, rows.schema.field(at), changed)


@contextmanager
def hiding_texts(*, hides: bool) -> Iterator[None]:
    """Hide error texts about the data, which may contain a hidden value."""
    try:
        yield
    except StreamError as problem:
        if not hides:
            raise
        raise type(problem)(HIDDEN_TEXT, position=problem.position) from None


def mask_part(part: Mapping[str, Any], masked: Container[str]) -> dict[str, Any]:
    """Return a part of a history or a response, as JSON, without what is masked.

    The field `masked` of a change lists the columns that are left out. The texts of statements and of errors
    about the data may contain a value, so they are hidden.
    """
    if not masked:
        return dict(part)
    match part["kind"]:
        case "change":
            return {**part, **_mask_images(part, masked)}
        case "statement":
            return {**part, "text": HIDDEN_TEXT}
        case "unreadable":
            return {**part, "why": HIDDEN_TEXT, "hint": None}
        case "problem":
            return hide_problem(part)
    return dict(part)


def hide_problem(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a problem as JSON, without its texts if they are about the data and may contain a value."""
    if issubclass(getattr(errors, part["type"], PenstockError), StreamError):
        return {**part, "detail": HIDDEN_TEXT, "hint": None}
    return dict(part)


def _mask_images(change: Mapping[str, Any], masked: Container[str]) -> dict[str, Any]:
    images = {image: change[image] for image in ("before", "after") if change[image] is not None}
    hidden = {name: None for values in images.values() for name in values if name.casefold() in masked}
    shown = {
        image: {name: value for name, value in values.items() if name not in hidden}
        for image, values in images.items()
    }
    return {**shown, "masked": list(hidden)}
