# SPDX-License-Identifier: Apache-2.0
"""`dedupe`: drop updates that change nothing; with `last`, keep only the last change of each key.

- dedupe: {ignore: [updated_at]}

After a `map` that removes columns, this step drops updates that changed only the removed columns.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import numpy
import pyarrow
import pyarrow.compute as compute
from pydantic import Field, field_validator

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid
from penstock.pipeline.pairs import Mask, firsts_of_pairs, kinds_of, seconds_of_pairs, settled
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import StepSection, column_named
from penstock.sinks.images import last_images


class Settings(StepSection):
    """Which changes say nothing new."""

    PLAIN: ClassVar[str] = "ignore"

    ignore: tuple[str, ...] = Field(
        default=(),
        description="columns whose changes are ignored; their latest value may not reach the target",
    )
    last: bool = Field(
        default=False,
        description="keep only the last change of each primary key in a batch: for caches and mirrors,"
        " whose readers do not need intermediate changes",
    )

    @field_validator("ignore", mode="before")
    @classmethod
    def _listed(cls, ignore: Any) -> Any:
        return [ignore] if isinstance(ignore, str) else ignore or ()


def make(settings: Settings) -> Step:
    """Make the step."""
    return DedupeStep(settings)


class DedupeStep(Step):
    """Leaves out changes that say nothing new."""

    verb = "dedupe"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def target(self, target: Target) -> Target | None:
        if self.settings.concerns(target):
            ignored = self._ignored(target)
            if self.settings.last and not target.primary_key:
                raise OptionInvalid(
                    f"dedupe: {target.name} has no primary key to tell the last change of",
                    hint="Leave the table out with exclude, or give it a key by a map step before",
                )
            # A value that was not followed may be another row's by now.
            unique = tuple(key for key in target.unique_keys if not ignored & set(key))
            return target if unique == target.unique_keys else replace(target, unique_keys=unique)
        return target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.concerns(changes.target):
            return [changes]
        made, rows = self.target(changes.target), changes.rows
        assert made is not None, "rows of every table pass"
        changes = replace(changes, target=made)
        first = firsts_of_pairs(rows, kinds_of(rows))
        idle = first & ~self._differs(changes) if first.any() else first
        if idle.any():
            idle |= seconds_of_pairs(idle)
            changes = changes.with_rows(rows.filter(pyarrow.array(~idle)))
        if self.settings.last and len(changes):
            kept = last_images(changes.target, [changes]).combine_chunks().to_batches()
            changes = settled(changes.with_rows(kept[0]))
        return [changes]

    def _ignored(self, target: Target) -> set[str]:
        found = {
            column_named(name, target.column_names, self.verb, target.name) for name in self.settings.ignore
        }
        if found & set(target.primary_key):
            raise OptionInvalid(
                f"dedupe: {', '.join(sorted(found & set(target.primary_key)))} is of the primary key",
                hint="Changes of a key always count",
            )
        return found

    def _differs(self, changes: Changes) -> Mask:
        """Tell of each row whether the next one differs from it, in any column that counts."""
        rows, ignored = changes.rows, self._ignored(changes.target)
        differs = numpy.zeros(rows.num_rows, dtype=bool)
        for name in changes.target.column_names:
            if name not in ignored:
                differs[:-1] |= _next_differs(rows.column(name))
        # Values that no type can hold, and images that lack columns, count as changed: they are not compared.
        metadata = rows.column("_metadata")
        for told in ("absent", "unrepresentable"):
            values = compute.struct_field(metadata, told)
            if values.null_count < len(values):
                differs |= compute.is_valid(values).to_numpy(zero_copy_only=False)
        return differs


def _next_differs(column: pyarrow.Array) -> Any:
    one, other = column.slice(0, len(column) - 1), column.slice(1)
    if pyarrow.types.is_nested(column.type):
        # Lists have no comparison of their own; vectors are few.
        return numpy.array([a != b for a, b in zip(one.to_pylist(), other.to_pylist(), strict=True)], bool)
    if pyarrow.types.is_duration(column.type):
        one, other = one.cast(pyarrow.int64()), other.cast(pyarrow.int64())
    differs = compute.fill_null(compute.not_equal(one, other), False)
    lone = compute.not_equal(compute.is_null(one), compute.is_null(other))
    return compute.or_(differs, lone).to_numpy(zero_copy_only=False)
