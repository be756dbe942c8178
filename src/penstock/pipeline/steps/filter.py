# SPDX-License-Identifier: Apache-2.0
"""`filter`: keep only the rows for which an SQL condition is true.

- filter: {tables: shop.orders, where: "status <> 'draft' AND total > 0"}

If only one image of an update passes, the update becomes a delete or an insert, so that a stateful target
stays correct. Text is compared exactly, regardless of the column's collation. Null is neither true nor
false.
"""

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field, field_validator

from penstock.changes import Changes, Target
from penstock.pipeline.expressions import Condition, rows_schema
from penstock.pipeline.pairs import filter_pairs, try_splitting
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import OnError, StepSection
from penstock.pipeline.told_values import refuse_absent
from penstock.settings.values import validate_option

VERB = "filter"


class Settings(StepSection):
    """Which rows pass."""

    SHORTHAND: ClassVar[str] = "where"

    where: str = Field(
        description="a condition in Spark's SQL, over the row's columns, _commit_timestamp and _metadata.*"
    )
    on_error: OnError = Field(
        default=None, description="what to do with rows for which the condition fails to evaluate"
    )

    @field_validator("where")
    @classmethod
    def _read(cls, text: str) -> str:
        validate_option(lambda: Condition(text, VERB))
        return text


def make(settings: Settings) -> Step:
    """Create the step."""
    return FilterStep(settings)


class FilterStep(Step):
    """Drops rows for which the condition is not true."""

    verb = VERB

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._condition = Condition(settings.where, VERB)

    def target(self, target: Target) -> Target | None:
        if self.settings.applies_to(target):
            self._condition.reads(rows_schema(target), target.mariadb)
        return target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        return try_splitting(changes, self._passing, self.settings.on_error, VERB)

    def _passing(self, changes: Changes) -> Changes:
        rows, mariadb = changes.rows, changes.target.mariadb
        refuse_absent(rows, self._condition.reads(rows.schema, mariadb), VERB)
        return filter_pairs(changes, self._condition.passes(rows, mariadb))
