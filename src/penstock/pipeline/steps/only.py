# SPDX-License-Identifier: Apache-2.0
"""`only`: keep only some types of change.

- only: [insert, update]
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy
from pydantic import Field, field_validator

from penstock.changes import Changes, Origin, Target
from penstock.pipeline.pairs import KINDS, kinds_of
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import StepSection

_IMAGES = {
    "insert": ("insert",),
    "update": ("update_preimage", "update_postimage"),
    "delete": ("delete",),
}


class Settings(StepSection):
    """Which kinds of change pass."""

    SHORTHAND: ClassVar[str] = "kinds"

    kinds: tuple[Literal["insert", "update", "delete"], ...] = Field(
        min_length=1, description="the change types to keep: insert, update, delete"
    )
    load: bool = Field(default=True, description="whether rows of a full load pass; they are not changes")

    @field_validator("kinds", mode="before")
    @classmethod
    def _listed(cls, kinds: Any) -> Any:
        return [kinds] if isinstance(kinds, str) else kinds


class OnlyStep(Step):
    """Passes only the selected kinds of change."""

    verb = "only"
    keeps_definitions = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        wanted = {image for kind in settings.kinds for image in _IMAGES[kind]}
        self._wanted = numpy.array([kind in wanted for kind in KINDS])

    def target(self, target: Target) -> Target | None:
        if not self.settings.applies_to(target) or self._wanted.all():
            return target
        # A row whose updates are dropped keeps its old values, and the source may now have these values in
        # another row. So only the primary key stays unique.
        return replace(target, unique_keys=())

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        target = self.target(changes.target)
        assert target is not None, "rows of every table pass"
        changes = replace(changes, target=target)
        if changes.origin is Origin.LOAD:
            return [changes] if self.settings.load else []
        passes = self._wanted[kinds_of(changes.rows)]
        return [changes.with_rows(changes.rows.filter(passes))]

    def removes(self, target: Target) -> bool:
        # If the step drops the rows of full loads, no load confirms the target's rows, so no row can be
        # considered missing.
        return self.empties(target) and (not self.settings.applies_to(target) or self.settings.load)

    def empties(self, target: Target) -> bool:
        return not self.settings.applies_to(target) or "delete" in self.settings.kinds


make = OnlyStep
