# SPDX-License-Identifier: Apache-2.0
"""`map`: compute, select, drop, rename and cast columns.

- map:
    tables: shop.orders
    add: {total: price * quantity, month: "date_format(created, 'yyyy-MM')"}
    drop: [note]
    rename: {id: order_id}
    cast: {total: "decimal(12,2)"}

The settings apply in this order: `columns`, `add`, `cast`, `keep`, `drop`, `rename`, `key`. If a key column
is renamed, the key uses the new name.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import pyarrow
from pydantic import Field, model_validator

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Column
from penstock.pipeline.expressions import Expressions, rows_schema
from penstock.pipeline.pairs import try_splitting
from penstock.pipeline.row_metadata import refuse_absent, rename_metadata
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection, resolve_column
from penstock.settings.values import validate_option

VERB = "map"
# The type of a computed text in a key. MySQL requires a length limit in a key.
_KEY_TEXT = "varchar(255)"


class Settings(StepSection):
    """The output columns. Expressions are Spark SQL, evaluated over the row as it arrives at the step."""

    columns: dict[str, str | None] | None = Field(
        default=None,
        description="output exactly these columns: name to expression, or to null for the column itself",
    )
    add: dict[str, str] = Field(
        default_factory=dict,
        description="add columns, or replace the values of existing ones: name to expression",
    )
    cast: dict[str, str] = Field(default_factory=dict, description="name to SQL type, in MySQL's syntax")
    keep: tuple[str, ...] = Field(default=(), description="keep only these columns")
    drop: tuple[str, ...] = Field(default=(), description="drop these columns")
    rename: dict[str, str] = Field(default_factory=dict, description="name to new name")
    key: tuple[str, ...] | None = Field(
        default=None, description="the primary key of the output, by the new names; [] for none"
    )
    on_error: OnError = Field(default=None, description="what to do with rows for which an expression fails")

    @model_validator(mode="after")
    def _readable(self) -> "Settings":
        explicit = {name: text for name, text in (self.columns or {}).items() if text is not None}
        validate_option(lambda: Expressions(explicit | self.add, VERB))
        if self.columns is not None and not self.columns:
            raise ValueError("columns: a table without a column is none")
        if self.keep and self.drop:
            raise ValueError("keep and drop are one too many")
        return self


@dataclass
class _OutputColumn:
    """An output column: its definition, and its source, a column of the row or an expression."""

    name: str
    column: Column | None
    source: str | None = None


@dataclass
class _Plan:
    """What the step does with rows of one table."""

    target: Target
    columns: tuple[_OutputColumn, ...]
    expressions: Expressions | None
    # Columns that pass, with their new names.
    names: Mapping[str, Sequence[str]]


class MapStep(Step):
    """Replaces the columns of rows by computed columns."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plans: dict[Target, _Plan] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_plans": {}}

    def target(self, target: Target) -> Target | None:
        return self._plan(target).target if self.settings.applies_to(target) else target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        return try_splitting(changes, self._map_rows, self.settings.on_error, VERB)

    def _map_rows(self, changes: Changes) -> Changes:
        plan, rows = self._plan(changes.target), changes.rows
        computed: dict[str, pyarrow.Array] = {}
        if plan.expressions is not None:
            mariadb = changes.target.mariadb
            refuse_absent(rows, plan.expressions.reads(rows.schema, mariadb), VERB)
            computed = plan.expressions.values(rows, mariadb)
        with_metadata = rename_metadata(rows, plan.names)
        arrays = [
            computed[output.name] if output.source is None else rows.column(output.source)
            for output in plan.columns
        ]
        arrays += [with_metadata.column(name) for name in SYSTEM_COLUMNS]
        system = [rows.schema.field(name) for name in SYSTEM_COLUMNS]
        schema = pyarrow.schema([*plan.target.arrow(), *system])
        mapped = pyarrow.RecordBatch.from_arrays(arrays, schema=schema)
        return replace(changes, target=plan.target, rows=mapped)

    # --- Planning ---------------------------------------------------------------------------

    def _plan(self, target: Target) -> _Plan:
        if target not in self._plans:
            self._plans[target] = self._make_plan(target)
        return self._plans[target]

    def _make_plan(self, target: Target) -> _Plan:
        columns, texts = self._select_columns(target)
        casts = {}
        for name, type_text in self.settings.cast.items():
            output = self._find_column(name, columns, target)
            casts[output.name] = type_text
            if output.source is not None:
                texts[output.name], output.source = f"`{output.source}`", None
        kept = self._filter_columns(columns, target)
        new = {self._find_column(old, kept, target).name: to for old, to in self.settings.rename.items()}
        final = {output.name: new.get(output.name, output.name) for output in kept}
        expressions = self._expressions(kept, texts, casts, final)
        for output in kept:
            output.name = final[output.name]
        _refuse_doubles(kept, target)
        primary_key, unique_keys = self._keys(target, kept)
        computed = expressions.columns(rows_schema(target), target.mariadb) if expressions is not None else {}
        output_columns = []
        for kept_column in kept:
            if kept_column.column is not None and kept_column.source is not None:
                output_columns.append(replace(kept_column.column, name=kept_column.name))
                continue
            kind = computed[kept_column.name]
            in_key = kind.type_text == "longtext" and kept_column.name in primary_key
            output_columns.append(
                Column(kept_column.name, _KEY_TEXT if in_key else kind.type_text, kind.charset, True)
            )
        output_target = replace(
            target, columns=tuple(output_columns), primary_key=primary_key, unique_keys=unique_keys
        )
        names: dict[str, list[str]] = {}
        for output in kept:
            if output.source is not None:
                names.setdefault(output.source, []).append(output.name)
        return _Plan(output_target, tuple(kept), expressions, names)

    def _select_columns(self, target: Target) -> tuple[list[_OutputColumn], dict[str, str]]:
        """Return the columns from `columns` and `add`, and the expressions by column name."""
        known, texts = target.column_names, {}
        if self.settings.columns is None:
            outputs = [_OutputColumn(column.name, column, column.name) for column in target.columns]
        else:
            outputs = []
            for name, text in self.settings.columns.items():
                plain = (
                    resolve_column(name, known, VERB, target.name) if text is None else _plain(text, known)
                )
                outputs.append(_OutputColumn(name, target.column(plain) if plain else None, plain))
                if plain is None and text is not None:
                    texts[name] = text
        for name, text in self.settings.add.items():
            plain = _plain(text, known)
            existing = next((output for output in outputs if output.name.casefold() == name.casefold()), None)
            if existing is None:
                existing = _OutputColumn(name, None)
                outputs.append(existing)
            texts.pop(existing.name, None)
            existing.column, existing.source = (target.column(plain), plain) if plain else (None, None)
            if plain is None:
                texts[existing.name] = text
        return outputs, texts

    def _find_column(self, name: str, columns: list[_OutputColumn], target: Target) -> _OutputColumn:
        resolved = resolve_column(name, [output.name for output in columns], VERB, target.name)
        return next(output for output in columns if output.name == resolved)

    def _filter_columns(self, columns: list[_OutputColumn], target: Target) -> list[_OutputColumn]:
        if self.settings.keep:
            kept_names = {self._find_column(name, columns, target).name for name in self.settings.keep}
            return [output for output in columns if output.name in kept_names]
        dropped = {self._find_column(name, columns, target).name for name in self.settings.drop}
        return [output for output in columns if output.name not in dropped]

    def _expressions(
        self,
        kept: list[_OutputColumn],
        texts: Mapping[str, str],
        casts: Mapping[str, str],
        final: Mapping[str, str],
    ) -> Expressions | None:
        needed = {final[output.name]: texts[output.name] for output in kept if output.source is None}
        if not needed:
            return None
        return Expressions(needed, VERB, {final[name]: kind for name, kind in casts.items() if name in final})

    def _keys(
        self, target: Target, kept: list[_OutputColumn]
    ) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Return the primary key and the unique keys of the output."""
        passed_through = {output.source: output.name for output in kept if output.source is not None}
        # A unique key no longer holds if one of its columns was recomputed.
        unique = tuple(
            tuple(passed_through[name] for name in key)
            for key in target.unique_keys
            if all(name in passed_through for name in key)
        )
        if self.settings.key is not None:
            known = [output.name for output in kept]
            return tuple(resolve_column(name, known, VERB, target.name) for name in self.settings.key), unique
        # A recomputed key column keeps its place in the key, under its own name.
        computed = {output.name.casefold(): output.name for output in kept if output.source is None}
        key = []
        for name in target.primary_key:
            output_name = passed_through.get(name) or computed.get(
                self.settings.rename.get(name, name).casefold()
            )
            if output_name is None:
                raise OptionInvalid(
                    f"map: {name!r}, a column of the primary key of {target.name}, is removed",
                    hint="Keep the column, or set key to the columns that identify a row; key: [] for none",
                )
            key.append(output_name)
        return tuple(key), unique


make = MapStep


def _plain(text: str, known: Iterable[str]) -> str | None:
    """Return the column if an expression is only a column name, None for any other expression."""
    name = text.strip()
    if len(name) > 2 and name[0] == name[-1] == "`":
        name = name[1:-1].replace("``", "`")
    return next((column for column in known if column.casefold() == name.casefold()), None)


def _refuse_doubles(columns: Iterable[_OutputColumn], target: Target) -> None:
    seen: set[str] = set()
    for output in columns:
        if output.name.casefold() in seen or output.name in SYSTEM_COLUMNS:
            raise OptionInvalid(
                f"map: {target.name} would have {output.name!r} twice", hint="Choose other names"
            )
        seen.add(output.name.casefold())
