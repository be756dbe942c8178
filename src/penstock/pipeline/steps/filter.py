# SPDX-License-Identifier: Apache-2.0
"""`filter`: keep only the rows for which an SQL condition is true.

- filter: {tables: shop.orders, where: "status <> 'draft' AND total > 0"}

If only one image of an update passes, the update becomes a delete or an insert, so that a stateful target
stays correct. Conditions have the same syntax as a subscription's `where`: see
[conditions](../guides/subscriptions.md#conditions). To filter by another expression, compute a column in a
`map` before it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from pydantic import Field, field_validator

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.pipeline.expressions import rows_schema
from penstock.pipeline.pairs import filter_pairs
from penstock.pipeline.row_metadata import refuse_absent
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection
from penstock.predicate import Predicate
from penstock.settings.values import validate_option

VERB = "filter"


class Settings(StepSection):
    """Which rows pass."""

    SHORTHAND: ClassVar[str] = "where"

    where: str = Field(description="a condition, over the row's columns, _commit_timestamp and _metadata.*")
    on_error: OnError = Field(
        default=None, description="has no effect: a condition that fits a table's types fails for no row"
    )

    @field_validator("where")
    @classmethod
    def _read(cls, text: str) -> str:
        validate_option(lambda: _compile(text))
        return text


class FilterStep(Step):
    """Drops rows for which the condition is not true."""

    verb = VERB
    keeps_definitions = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._condition = _compile(settings.where)

    def target(self, target: Target) -> Target | None:
        if self.settings.applies_to(target):
            with _refusing():
                self._condition.check(rows_schema(target))
        return target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        rows = changes.rows
        with _refusing():
            refuse_absent(rows, self._condition.reads(rows.schema), VERB)
            return [filter_pairs(changes, self._condition.passes(rows))]


make = FilterStep


def _compile(text: str) -> Predicate:
    with _refusing("; compute any other value as a column, in a map before this step"):
        return Predicate.compile(text)


@contextmanager
def _refusing(advice: str = "") -> Iterator[None]:
    """Add the step's name to an error about the step's condition."""
    try:
        yield
    except OptionInvalid as problem:
        raise OptionInvalid(f"{VERB}: {problem.message}", hint=f"{problem.hint}{advice}") from problem
