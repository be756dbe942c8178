# SPDX-License-Identifier: Apache-2.0
"""`route`: rename tables, or merge many tables into one.

- route: {tables: "shop_*.orders_*", to: shop.orders, shard_column: _shard, shard_value: "{1}/{2}"}

Templates may contain `{database}`, `{table}`, `{instance}`, columns of the row, and `{1}`, `{2}`... for what
the stars or groups of the pattern matched. `:lower` and `:upper` after a name change its case. If the
target's name depends on the row, an update that moves a row to another table becomes a delete in the old
table and an insert in the new table.
"""

import re
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import pyarrow
import pyarrow.compute as compute
from pydantic import Field, field_validator, model_validator

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import OptionInvalid, StepFailed
from penstock.model import Column, TableName, TablePatterns
from penstock.pipeline.expressions import type_known
from penstock.pipeline.pairs import filter_pairs, position_of
from penstock.pipeline.row_metadata import refuse_absent
from penstock.pipeline.step import Rejected, ShardValue, Step
from penstock.pipeline.step_section import OnError, StepSection, resolve_column

VERB = "route"

_CASES: Mapping[str, Callable[[str], str]] = {"": str, "lower": str.lower, "upper": str.upper}
_ARROW_CASES = {"lower": compute.utf8_lower, "upper": compute.utf8_upper}


@dataclass(frozen=True)
class _Piece:
    """Literal text, or a name in braces and the case to convert it to."""

    text: str
    is_name: bool = False
    case: str = ""


def _pieces(template: str) -> list[_Piece]:
    pieces = []
    for text, name, case, conversion in string.Formatter().parse(template):
        if text:
            pieces.append(_Piece(text))
        if name is not None:
            if not name or conversion or (case or "") not in _CASES:
                raise ValueError(
                    "in braces stands a name, and :lower or :upper where it is wanted: {table:lower}"
                )
            pieces.append(_Piece(name, True, case or ""))
    return pieces


def _halves(template: str) -> tuple[str, str]:
    """Return the templates of database and table, split at the first dot outside braces."""
    match = re.fullmatch(r"((?:[^{}.]|\{[^{}]*\})+)\.((?:[^{}]|\{[^{}]*\})+)", template)
    if match is None:
        raise ValueError("write database.table, as shop.orders or {database}_copy.{table}")
    return match[1], match[2]


class Settings(StepSection):
    """Where rows go."""

    to: str = Field(description="the target, database.table; both parts are templates")
    shard_column: str | None = Field(
        default=None,
        min_length=1,
        description="a column to add that identifies the source table of a row; it becomes part of every key",
    )
    shard_value: str = Field(
        default="{instance}.{database}.{table}", description="the shard column's value, a template"
    )
    shard_type: str = Field(default="varchar(191)", description="the shard column's SQL type")
    on_error: OnError = Field(
        default=None, description="what to do with rows for which a template's value is null"
    )

    @field_validator("to")
    @classmethod
    def _valid_name_template(cls, to: str) -> str:
        for half in _halves(to):
            _pieces(half)
        return to

    @field_validator("shard_value")
    @classmethod
    def _valid_template(cls, value: str) -> str:
        _pieces(value)
        return value

    @model_validator(mode="after")
    def _known_type(self) -> "Settings":
        if self.shard_column is not None and self.shard_column in SYSTEM_COLUMNS:
            raise ValueError(f"shard_column: {self.shard_column} is taken")
        return self

    def target_name(self, name: TableName) -> TableName:
        return RouteStep(self).target_name(name)

    @property
    def is_named_by_rows(self) -> bool:
        pieces = [piece for half in _halves(self.to) for piece in _pieces(half) if piece.is_name]
        return not all(piece.text in ("database", "table") or piece.text.isdecimal() for piece in pieces)


class RouteStep(Step):
    """Renames the target table of rows."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._database, self._table = (_pieces(half) for half in _halves(settings.to))
        self._value = _pieces(settings.shard_value)
        self._patterns = [(TablePatterns([text]), _grouping(text)) for text in settings.tables]

    def target(self, target: Target) -> Target | None:
        if not self.settings.applies_to(target):
            return target
        self._row_names(target, self._placeholders(target.name), [*self._database, *self._table])
        return self._with_shard(replace(target, name=self.target_name(target.name)))

    def target_name(self, name: TableName) -> TableName:
        """Return the target's name, with the placeholders that depend on rows left in braces."""
        if not self.settings.selects(name):
            return name
        known = self._placeholders(name)
        return TableName(self._fill_in(self._database, known), self._fill_in(self._table, known))

    def named_by_rows(self, target: Target) -> bool:
        return self.settings.applies_to(target) and bool(
            self._unknown_pieces(self._placeholders(target.name))
        )

    def empties(self, target: Target) -> bool:
        return not self.settings.applies_to(target) or self._one_to_one()

    def shard_of(self, target: Target, instance: str) -> ShardValue | None:
        column = self.settings.shard_column
        known = self._placeholders(target.name) | {"instance": instance}
        if (
            column is None
            or not self.settings.applies_to(target)
            or any(piece.is_name and piece.text not in known for piece in self._value)
        ):
            return None
        return ShardValue(column, self._fill_in(self._value, known))

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        routed = self.target(changes.target)
        assert routed is not None, "rows of every table pass"
        if not self.settings.applies_to(changes.target):
            yield changes
            return
        changes, rejected = self._without_null(changes)
        if rejected is not None:
            yield rejected
        rows = self._rows(changes, routed)
        known = self._placeholders(changes.target.name)
        if not self._unknown_pieces(known):
            yield replace(changes, target=routed, rows=rows)
            return
        # The templates refer to columns of the incoming rows, not to the columns that this step adds.
        names = compute.binary_join_element_wise(
            self._texts(self._database, changes, known), self._texts(self._table, changes, known), "\0"
        )
        for name in names.unique().to_pylist():
            mask = compute.equal(names, name).to_numpy(zero_copy_only=False)
            named = replace(routed, name=TableName(*name.split("\0")))
            yield filter_pairs(replace(changes, target=named, rows=rows), mask)

    # --- Names ------------------------------------------------------------------------------

    def _placeholders(self, name: TableName) -> dict[str, str]:
        """Return the placeholders that a table's own name determines."""
        known = {"database": name.database, "table": name.table}
        for patterns, grouping in self._patterns:
            if patterns.matches(name.database, name.table):
                match = grouping.fullmatch(f"{name.database}.{name.table}")
                groups = match.groups() if match is not None else ()
                known |= {str(number): text or "" for number, text in enumerate(groups, 1)}
                break
        return known

    def _fill_in(self, pieces: Iterable[_Piece], known: Mapping[str, str]) -> str:
        """Return a name with all known placeholders filled in. Others stay in braces."""
        return "".join(
            _CASES[piece.case](known[piece.text])
            if piece.is_name and piece.text in known
            else (f"{{{piece.text}}}" if piece.is_name else piece.text)
            for piece in pieces
        )

    def _unknown_pieces(self, known: Mapping[str, str]) -> list[_Piece]:
        return [
            piece for piece in (*self._database, *self._table) if piece.is_name and piece.text not in known
        ]

    def _row_names(self, target: Target, known: Mapping[str, str], pieces: Iterable[_Piece]) -> list[str]:
        """Return the columns that pieces refer to. Raises OptionInvalid for an unknown column."""
        columns = []
        for piece in pieces:
            if not piece.is_name or piece.text in known or piece.text == "instance":
                continue
            if piece.text.isdecimal():
                raise OptionInvalid(
                    f"route: the pattern of {target.name} has no {{{piece.text}}}",
                    hint="{1} is what the first star or group of the pattern in tables was",
                )
            columns.append(resolve_column(piece.text, target.column_names, VERB, target.name))
        return columns

    def _texts(self, pieces: list[_Piece], changes: Changes, known: Mapping[str, str]) -> pyarrow.Array:
        """Return a template's text for each row, null if one of its values is null."""
        parts = []
        for piece in pieces:
            if not piece.is_name or piece.text in known:
                text = _CASES[piece.case](known[piece.text]) if piece.is_name else piece.text
                parts.append(pyarrow.repeat(pyarrow.scalar(text), len(changes)))
                continue
            values = self._column(piece.text, changes)
            parts.append(_ARROW_CASES[piece.case](values) if piece.case else values)
        return compute.binary_join_element_wise(*parts, "") if len(parts) > 1 else parts[0]

    def _column(self, name: str, changes: Changes) -> pyarrow.Array:
        if name == "instance":
            return compute.struct_field(changes.rows.column("_metadata"), "instance")
        column = resolve_column(name, changes.target.column_names, VERB, changes.target.name)
        return changes.rows.column(column).cast(pyarrow.string())

    # --- Rows -------------------------------------------------------------------------------

    def _without_null(self, changes: Changes) -> tuple[Changes, Rejected | None]:
        """Return the rows whose templates have no null value, and separately the rejected rows."""
        known = self._placeholders(changes.target.name)
        pieces = [*self._database, *self._table, *(self._value if self.settings.shard_column else ())]
        columns = self._row_names(changes.target, known, pieces)
        refuse_absent(changes.rows, columns, VERB)
        null_columns = [name for name in columns if changes.rows.column(name).null_count]
        if not null_columns:
            return changes, None
        problem = StepFailed(
            f"route: {', '.join(null_columns)} is null in a row, so that it has no table to go to",
            hint="Put a filter before, or give the column a value by a map step",
        )
        mask = changes.rows.column(null_columns[0]).is_valid()
        for name in null_columns[1:]:
            mask = compute.and_(mask, changes.rows.column(name).is_valid())
        whole = mask.to_numpy(zero_copy_only=False)
        rejected = filter_pairs(changes, ~whole)
        problem.position = position_of(rejected)
        if self.settings.on_error in (None, "stop"):
            raise problem
        kept = self.settings.on_error == "dead_letter"
        return filter_pairs(changes, whole), Rejected(rejected, VERB, problem, kept=kept)

    def _rows(self, changes: Changes, routed: Target) -> pyarrow.RecordBatch:
        if self.settings.shard_column is None:
            return changes.rows
        values = self._texts(self._value, changes, self._placeholders(changes.target.name))
        try:
            values = values.cast(routed.arrow().field(self.settings.shard_column).type)
        except pyarrow.ArrowException as problem:
            raise OptionInvalid(
                f"route: {self.settings.shard_value} is no {self.settings.shard_type}: {problem}",
                hint="Choose another shard_type",
            ) from problem
        return changes.rows.add_column(len(changes.target.columns), self.settings.shard_column, values)

    # --- Keys -------------------------------------------------------------------------------

    def _one_to_one(self) -> bool:
        """Whether no two tables can be routed to the same target."""
        names = {piece.text for piece in (*self._database, *self._table) if piece.is_name}
        if not names <= {"database", "table"} and not all(name.isdecimal() for name in names):
            return False
        whole = TablePatterns(list(self.settings.tables), list(self.settings.exclude))
        if whole.single() is not None or {"database", "table"} <= names:
            return True
        groups = self._patterns[0][1].groups if len(self._patterns) == 1 else 0
        return groups == 1 and "1" in names

    def _with_shard(self, target: Target) -> Target:
        column = self.settings.shard_column
        if column is None:
            # Values that are unique in each table may not be unique in the merged table.
            return target if self._one_to_one() else replace(target, unique_keys=())
        if any(name.casefold() == column.casefold() for name in target.column_names):
            raise OptionInvalid(
                f"route: {target.name} has a column {column!r} already", hint="Choose another shard_column"
            )
        kind = type_known(self.settings.shard_type, target.mariadb)
        added = Column(column, kind.type_text, kind.charset, False)
        return replace(
            target,
            columns=(*target.columns, added),
            primary_key=(*target.primary_key, column) if target.primary_key else (),
            unique_keys=tuple((*key, column) for key in target.unique_keys),
        )


make = RouteStep


def _grouping(pattern: str) -> re.Pattern[str]:
    """Return a table pattern as a regular expression over `database.table`, with a group for each star."""
    if len(pattern) > 2 and pattern[0] == pattern[-1] == "/":
        return re.compile(pattern[1:-1])
    text, fenced = "", False
    for character in pattern:
        if character == "`":
            fenced = not fenced
        else:
            text += "(.*)" if character == "*" and not fenced else re.escape(character)
    return re.compile(text, re.DOTALL)
