# SPDX-License-Identifier: Apache-2.0
"""What every step may be told: which tables it is for; and columns found by names in any case."""

import difflib
from collections.abc import Iterable
from functools import cached_property
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import TablePatterns
from penstock.settings.values import Section, TablePatternTexts

# What follows rows that a step cannot work on; None leaves it to the pipeline's `errors.rows`.
OnError = Literal["stop", "skip", "dead_letter"] | None


class StepSection(Section):
    """The part that all steps share. Tables are told by the names they have when they reach the step."""

    # The one setting that may be written alone: `filter: "total > 5"`.
    PLAIN: ClassVar[str] = ""

    tables: TablePatternTexts = Field(
        default=(), description="patterns of the tables that the step is for; else all"
    )
    exclude: TablePatternTexts = Field(default=(), description="patterns of tables that pass unchanged")

    @model_validator(mode="before")
    @classmethod
    def _written_alone(cls, value: Any) -> Any:
        return {cls.PLAIN: value} if cls.PLAIN and not isinstance(value, dict) else value

    def concerns(self, target: Target) -> bool:
        """Tell whether the step is for a table."""
        return self._patterns.matches(target.name.database, target.name.table)

    @cached_property
    def _patterns(self) -> TablePatterns:
        return TablePatterns(list(self.tables), list(self.exclude))


def column_named(name: str, known: Iterable[str], step: str, of: object) -> str:
    """Return a column as its table spells it; names know no case. Raises OptionInvalid."""
    names = list(known)
    if name in names:
        return name
    wanted = name.casefold()
    for one in names:
        if one.casefold() == wanted:
            return one
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    raise OptionInvalid(
        f"{step}: {of} has no column {name!r}",
        hint=f"Did you mean {near[0]}?" if near else f"It has {', '.join(names)}",
    )
