# SPDX-License-Identifier: Apache-2.0
"""Target rows that a comparison cannot judge, because a step rejected their source row.

The expected target row is then unknown. The existing target row was written before the step failed. It counts
neither as correct nor as extra.
"""

from collections.abc import Sequence

import numpy
import numpy.typing as npt
import pyarrow

from penstock.changes import Target
from penstock.pipeline.settings import StepSettings
from penstock.pipeline.step import Rejected
from penstock.pipeline.verify.hashed import Hashes, concatenate_hashes, hashes, is_among
from penstock.pipeline.verify.kept_keys import keeps_column


class Unjudged:
    """The rejected source rows of a target table, by the key columns whose target values are known.

    The value of a key column is known if neither the failed step nor a later step changes the column. If none
    of a rejected row's key values is known, every row of the target may come from that row.
    """

    def __init__(self, target: Target, steps: Sequence[StepSettings]) -> None:
        self._target = target
        self._steps = tuple(steps)
        self._keys: dict[tuple[str, ...], list[Hashes]] = {}

    def __bool__(self) -> bool:
        """Whether any row was rejected."""
        return bool(self._keys)

    def add(self, rejected: Rejected) -> None:
        """Add rows that a step rejected."""
        if not len(rejected.changes):
            return
        rows, steps = rejected.changes.rows, self._steps[len(self._steps) - rejected.steps_left :]
        known = tuple(
            name
            for name in self._target.primary_key
            if _has(rows, self._target.arrow().field(name)) and keeps_column(steps, name)
        )
        keys = self._keys.setdefault(known, [])
        if known:
            keys.append(numpy.unique(hashes(rows, known)))

    def among(self, rows: pyarrow.RecordBatch) -> npt.NDArray[numpy.bool_]:
        """Return a mask of the target rows that may come from a rejected row."""
        mask = numpy.zeros(rows.num_rows, numpy.bool_)
        for columns, keys in self._keys.items():
            if not columns:
                return ~numpy.zeros(rows.num_rows, numpy.bool_)
            mask |= is_among(hashes(rows, columns), numpy.unique(concatenate_hashes(keys)))
        return mask


def _has(rows: pyarrow.RecordBatch, field: pyarrow.Field) -> bool:
    index = rows.schema.get_field_index(field.name)
    return index >= 0 and bool(rows.schema.field(index).type == field.type)
