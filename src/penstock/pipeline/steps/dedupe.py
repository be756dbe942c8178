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
from penstock.pipeline.pairs import Mask, firsts_of_pairs, kinds_of, seconds_of_pairs, split_lone_images
from penstock.pipeline.step import Rejected, Step
from penstock.pipeline.step_section import StepSection, resolve_column
from penstock.sinks.images import last_images


class Settings(StepSection):
    """Which changes are redundant."""

    SHORTHAND: ClassVar[str] = "ignore"

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


class DedupeStep(Step):
    """Drops redundant changes."""

    verb = "dedupe"
    keeps_definitions = True

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def target(self, target: Target) -> Target | None:
        if self.settings.applies_to(target):
            ignored = self._ignored_columns(target)
            if self.settings.last and not target.primary_key:
                raise OptionInvalid(
                    f"dedupe: {target.name} has no primary key to tell the last change of",
                    hint="Leave the table out with exclude, or give it a key by a map step before",
                )
            # The target may still have an outdated value in an ignored column, while another row already has
            # that value, so the column is not unique there.
            unique = tuple(key for key in target.unique_keys if not ignored & set(key))
            return target if unique == target.unique_keys else replace(target, unique_keys=unique)
        return target

    def apply(self, changes: Changes) -> Iterable[Changes | Rejected]:
        if not self.settings.applies_to(changes.target):
            return [changes]
        target, rows = self.target(changes.target), changes.rows
        assert target is not None, "rows of every table pass"
        changes = replace(changes, target=target)
        first = firsts_of_pairs(rows, kinds_of(rows))
        idle = first & ~self._differs(changes) if first.any() else first
        if idle.any():
            idle |= seconds_of_pairs(idle)
            changes = changes.with_rows(rows.filter(pyarrow.array(~idle)))
        if self.settings.last and len(changes):
            kept = last_images(changes.target, [changes]).combine_chunks().to_batches()
            changes = split_lone_images(changes.with_rows(kept[0]))
        return [changes]

    def _ignored_columns(self, target: Target) -> set[str]:
        ignored = {
            resolve_column(name, target.column_names, self.verb, target.name) for name in self.settings.ignore
        }
        if ignored & set(target.primary_key):
            raise OptionInvalid(
                f"dedupe: {', '.join(sorted(ignored & set(target.primary_key)))} is of the primary key",
                hint="Changes of a key always count",
            )
        return ignored

    def _differs(self, changes: Changes) -> Mask:
        """Return a mask of the rows that differ from the next row in a column that is not ignored."""
        rows, ignored = changes.rows, self._ignored_columns(changes.target)
        differs = numpy.zeros(rows.num_rows, dtype=bool)
        for name in changes.target.column_names:
            if name not in ignored:
                differs[:-1] |= _next_differs(rows.column(name))
        # Unrepresentable values, and images with missing columns, count as changed without a comparison.
        metadata = rows.column("_metadata")
        for field_name in ("absent", "unrepresentable"):
            values = compute.struct_field(metadata, field_name)
            if values.null_count < len(values):
                differs |= compute.is_valid(values).to_numpy(zero_copy_only=False)
        return differs


make = DedupeStep


def _next_differs(column: pyarrow.Array) -> Any:
    current, following = column.slice(0, len(column) - 1), column.slice(1)
    if pyarrow.types.is_nested(column.type):
        # Arrow cannot compare lists. Vectors are rare, so Python compares them.
        return numpy.array(
            [a != b for a, b in zip(current.to_pylist(), following.to_pylist(), strict=True)], bool
        )
    if pyarrow.types.is_duration(column.type):
        current, following = current.cast(pyarrow.int64()), following.cast(pyarrow.int64())
    differs = compute.fill_null(compute.not_equal(current, following), False)
    lone = compute.not_equal(compute.is_null(current), compute.is_null(following))
    return compute.or_(differs, lone).to_numpy(zero_copy_only=False)
