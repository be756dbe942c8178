# SPDX-License-Identifier: Apache-2.0
"""`shard`: keep only some shards of the rows, so that several pipelines can share a table.

Rows are assigned to shards as in subscriptions.

- shard: {of: 4, keep: [0, 1]}
"""

from collections.abc import Iterable
from typing import Any

import numpy
import pyarrow
from pydantic import Field, ValidationInfo, field_validator

from penstock._native import shard_slots
from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.pipeline.pairs import filter_pairs
from penstock.pipeline.row_metadata import refuse_absent
from penstock.pipeline.step import Rejected, Slots, Step
from penstock.pipeline.step_section import StepSection, resolve_column

VERB = "shard"


class Settings(StepSection):
    """The number of shards, and which of them pass."""

    of: int = Field(ge=1, le=32_767, description="the number of shards")
    keep: tuple[int, ...] = Field(min_length=1, description="the shards to keep, counted from 0")
    columns: tuple[str, ...] = Field(
        default=(), description="the columns that determine a row's shard; default: the primary key"
    )

    @field_validator("keep", mode="before")
    @classmethod
    def _listed(cls, keep: Any) -> Any:
        return [keep] if isinstance(keep, int) else keep

    @field_validator("keep")
    @classmethod
    def _in_range(cls, keep: tuple[int, ...], validation: ValidationInfo) -> tuple[int, ...]:
        shards = validation.data.get("of")
        if shards is not None and not all(0 <= shard < shards for shard in keep):
            raise ValueError(f"of {shards} shards there are 0 to {shards - 1}")
        return keep


class ShardStep(Step):
    """Passes rows of some shards. An update that moves a row between a kept and a dropped shard becomes an
    insert or a delete.
    """

    verb = VERB
    keeps_definitions = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._wanted = numpy.array([shard in settings.keep for shard in range(settings.of)])

    def target(self, target: Target) -> Target | None:
        if self.settings.applies_to(target):
            self._columns(target)
        return target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        columns = self._columns(changes.target)
        refuse_absent(changes.rows, columns, VERB)
        slots = pyarrow.array(shard_slots(changes.rows, columns)).to_numpy()
        return [filter_pairs(changes, self._wanted[slots % self.settings.of])]

    def empties(self, target: Target) -> bool:
        # The target also has the rows of other shards, which belong to other pipelines.
        return not self.settings.applies_to(target)

    def slots_of(self, target: Target) -> Slots | None:
        settings = self.settings
        if not settings.applies_to(target):
            return None
        return Slots(tuple(self._columns(target)), settings.of, settings.keep)

    def _columns(self, target: Target) -> list[str]:
        names = self.settings.columns or target.primary_key
        if not names:
            raise OptionInvalid(
                f"shard: {target.name} has no primary key", hint="Name the columns that choose a row's shard"
            )
        return [resolve_column(name, target.column_names, VERB, target.name) for name in names]


make = ShardStep
