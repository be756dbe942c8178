# SPDX-License-Identifier: Apache-2.0
"""`map`: compute, select, drop, rename and cast columns.

- map:
    tables: shop.orders
    add: {total: price * quantity, month: "date_format(created, 'yyyy-MM')"}
    drop: [note]
    rename: {id: order_id}
    cast: {total: "decimal(12,2)"}

The settings apply in this order: `columns`, `add`, `cast`, `keep`, `drop`, `rename`, `key`. Keys follow
renamed columns.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import pyarrow
from pydantic import Field, model_validator

from penstock.changes import SYSTEM_COLUMNS, Changes, Target
from penstock.errors import OptionInvalid
from penstock.model import Column
from penstock.pipeline.expressions import Expressions, rows_schema
from penstock.pipeline.pairs import tried
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection, column_named
from penstock.pipeline.told_values import refuse_absent, renamed
from penstock.settings.values import validate_option

VERB = "map"
# What a text that was worked out is kept as in a key, which MySQL wants bounded.
_KEY_TEXT = "varchar(255)"


class Settings(StepSection):
    """What becomes of columns. Expressions are Spark's SQL over the row as it reaches the step."""

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
        given = {name: text for name, text in (self.columns or {}).items() if text is not None}
        validate_option(lambda: Expressions(given | self.add, VERB))
        if self.columns is not None and not self.columns:
            raise ValueError("columns: a table without a column is none")
        if self.keep and self.drop:
            raise ValueError("keep and drop are one too many")
        return self


def make(settings: Settings) -> Step:
    """Make the step."""
    return MapStep(settings)


@dataclass
class _Made:
    """One column on its way: what it is, and whence: a column of the row, or an expression's result."""

    name: str
    column: Column | None
    of: str | None = None


@dataclass
class _Plan:
    """What the step does with rows of one table."""

    target: Target
    columns: tuple[_Made, ...]
    expressions: Expressions | None
    # The columns that pass under their new names.
    names: Mapping[str, str]


class MapStep(Step):
    """Makes rows with other columns."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._plans: dict[Target, _Plan] = {}

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_plans": {}}

    def target(self, target: Target) -> Target | None:
        return self._plan(target).target if self.settings.concerns(target) else target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.concerns(changes.target):
            return [changes]
        return tried(changes, self._mapped, self.settings.on_error, VERB)

    def _mapped(self, changes: Changes) -> Changes:
        plan, rows = self._plan(changes.target), changes.rows
        found: dict[str, pyarrow.Array] = {}
        if plan.expressions is not None:
            mariadb = changes.target.mariadb
            refuse_absent(rows, plan.expressions.reads(rows.schema, mariadb), VERB)
            found = plan.expressions.values(rows, mariadb)
        told = renamed(rows, plan.names)
        arrays = [found[one.name] if one.of is None else rows.column(one.of) for one in plan.columns]
        arrays += [told.column(name) for name in SYSTEM_COLUMNS]
        system = [rows.schema.field(name) for name in SYSTEM_COLUMNS]
        schema = pyarrow.schema([*plan.target.arrow(), *system])
        made = pyarrow.RecordBatch.from_arrays(arrays, schema=schema)
        return replace(changes, target=plan.target, rows=made)

    # --- Planning ---------------------------------------------------------------------------

    def _plan(self, target: Target) -> _Plan:
        if target not in self._plans:
            self._plans[target] = self._planned(target)
        return self._plans[target]

    def _planned(self, target: Target) -> _Plan:
        columns, texts = self._chosen(target)
        casts = {}
        for name, type_text in self.settings.cast.items():
            one = self._named(name, columns, target)
            casts[one.name] = type_text
            if one.of is not None:
                texts[one.name], one.of = f"`{one.of}`", None
        kept = self._kept(columns, target)
        new = {self._named(old, kept, target).name: to for old, to in self.settings.rename.items()}
        final = {one.name: new.get(one.name, one.name) for one in kept}
        expressions = self._expressions(kept, texts, casts, final)
        for one in kept:
            one.name = final[one.name]
        _refuse_doubles(kept, target)
        primary_key, unique_keys = self._keys(target, kept)
        found = expressions.columns(rows_schema(target), target.mariadb) if expressions is not None else {}
        made = []
        for each in kept:
            if each.column is not None and each.of is not None:
                made.append(replace(each.column, name=each.name))
                continue
            kind = found[each.name]
            in_key = kind.type_text == "longtext" and each.name in primary_key
            made.append(Column(each.name, _KEY_TEXT if in_key else kind.type_text, kind.charset, True))
        out = replace(target, columns=tuple(made), primary_key=primary_key, unique_keys=unique_keys)
        names = {one.of: one.name for one in kept if one.of is not None}
        return _Plan(out, tuple(kept), expressions, names)

    def _chosen(self, target: Target) -> tuple[list[_Made], dict[str, str]]:
        """Return the columns that `columns` and `add` make, and the expressions by their names."""
        known, texts = target.column_names, {}
        if self.settings.columns is None:
            made = [_Made(one.name, one, one.name) for one in target.columns]
        else:
            made = []
            for name, text in self.settings.columns.items():
                plain = column_named(name, known, VERB, target.name) if text is None else _plain(text, known)
                made.append(_Made(name, target.column(plain) if plain else None, plain))
                if plain is None and text is not None:
                    texts[name] = text
        for name, text in self.settings.add.items():
            plain = _plain(text, known)
            at = next((one for one in made if one.name.casefold() == name.casefold()), None)
            if at is None:
                at = _Made(name, None)
                made.append(at)
            texts.pop(at.name, None)
            at.column, at.of = (target.column(plain), plain) if plain else (None, None)
            if plain is None:
                texts[at.name] = text
        return made, texts

    def _named(self, name: str, columns: list[_Made], target: Target) -> _Made:
        found = column_named(name, [one.name for one in columns], VERB, target.name)
        return next(one for one in columns if one.name == found)

    def _kept(self, columns: list[_Made], target: Target) -> list[_Made]:
        if self.settings.keep:
            wanted = {self._named(name, columns, target).name for name in self.settings.keep}
            return [one for one in columns if one.name in wanted]
        dropped = {self._named(name, columns, target).name for name in self.settings.drop}
        return [one for one in columns if one.name not in dropped]

    def _expressions(
        self, kept: list[_Made], texts: Mapping[str, str], casts: Mapping[str, str], final: Mapping[str, str]
    ) -> Expressions | None:
        wanted = {final[one.name]: texts[one.name] for one in kept if one.of is None}
        if not wanted:
            return None
        return Expressions(wanted, VERB, {final[name]: kind for name, kind in casts.items() if name in final})

    def _keys(self, target: Target, kept: list[_Made]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Return the keys of what comes out."""
        same = {one.of: one.name for one in kept if one.of is not None}
        # A unique key holds no longer where one of its columns is another value now.
        unique = tuple(
            tuple(same[name] for name in key)
            for key in target.unique_keys
            if all(name in same for name in key)
        )
        if self.settings.key is not None:
            known = [one.name for one in kept]
            return tuple(column_named(name, known, VERB, target.name) for name in self.settings.key), unique
        # A key column whose value is worked out anew keeps its place in the key under its own name.
        worked_out = {one.name.casefold(): one.name for one in kept if one.of is None}
        key = []
        for name in target.primary_key:
            found = same.get(name) or worked_out.get(self.settings.rename.get(name, name).casefold())
            if found is None:
                raise OptionInvalid(
                    f"map: {target.name} loses {name!r} of its primary key",
                    hint="Keep the column, or say with key which columns tell rows apart; key: [] for none",
                )
            key.append(found)
        return tuple(key), unique


def _plain(text: str, known: Iterable[str]) -> str | None:
    """Return the column that an expression is nothing but, None for any other expression."""
    name = text.strip()
    if len(name) > 2 and name[0] == name[-1] == "`":
        name = name[1:-1].replace("``", "`")
    return next((one for one in known if one.casefold() == name.casefold()), None)


def _refuse_doubles(columns: Iterable[_Made], target: Target) -> None:
    seen: set[str] = set()
    for one in columns:
        if one.name.casefold() in seen or one.name in SYSTEM_COLUMNS:
            raise OptionInvalid(
                f"map: {target.name} would have {one.name!r} twice", hint="Choose other names"
            )
        seen.add(one.name.casefold())
