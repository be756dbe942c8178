# SPDX-License-Identifier: Apache-2.0
"""The settings that all steps share, and the case-insensitive lookup of columns."""

import difflib
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import TableName, TablePatterns
from penstock.settings.values import Section, TablePatternTexts

# What to do with rows that a step rejects. None means the pipeline's `errors.rows`.
OnError = Literal["stop", "skip", "dead_letter"] | None


class StepSection(Section):
    """The settings that all steps share. A step matches tables by the names that they have when their rows
    reach the step.
    """

    # The setting that may be written without its key: `filter: "total > 5"`.
    SHORTHAND: ClassVar[str] = ""

    tables: TablePatternTexts = Field(
        default=(), description="patterns of the tables that the step is for; else all"
    )
    exclude: TablePatternTexts = Field(default=(), description="patterns of tables that pass unchanged")

    @model_validator(mode="before")
    @classmethod
    def _expand_shorthand(cls, value: Any) -> Any:
        return {cls.SHORTHAND: value} if cls.SHORTHAND and not isinstance(value, dict) else value

    def applies_to(self, target: Target) -> bool:
        """Return whether the step applies to a table."""
        return self.selects(target.name)

    def selects(self, name: TableName) -> bool:
        """Return whether the step applies to a table of that name."""
        return self._patterns.matches(name.database, name.table)

    def target_name(self, name: TableName) -> TableName:
        """Return the name that a table has after the step."""
        return name

    @property
    def is_named_by_rows(self) -> bool:
        """Whether the name after the step may depend on values of rows."""
        return False

    @cached_property
    def _patterns(self) -> TablePatterns:
        return TablePatterns(list(self.tables), list(self.exclude))


def resolve_column(name: str, known: Iterable[str], step: str, of: object) -> str:
    """Return a column's name as its table spells it, ignoring case. Raises OptionInvalid."""
    names = list(known)
    if name in names:
        return name
    wanted = name.casefold()
    for column in names:
        if column.casefold() == wanted:
            return column
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    raise OptionInvalid(
        f"{step}: {of} has no column {name!r}",
        hint=f"Did you mean {near[0]}?" if near else f"It has {', '.join(names)}",
    )
