# SPDX-License-Identifier: Apache-2.0
"""Rows of a target that cannot be judged, because a step could not work on their row of the source.

Of such a row nobody knows what the target ought to have. What the target has of it was written before the
step failed, and is neither right nor extra.
"""

from collections.abc import Sequence

import numpy
import numpy.typing as npt
import pyarrow

from penstock.changes import Target
from penstock.pipeline.settings import StepSettings
from penstock.pipeline.step import Rejected
from penstock.pipeline.verify.hashed import Hashes, hashes, is_among, joined
from penstock.pipeline.verify.kept_keys import keeps_column


class Unjudged:
    """The rejected rows of a table's sources, by as much of their key in the target as is known.

    A column of the key is known where no step from the one that failed on changes it. Rows of which no column
    is known may be any row of the target.
    """

    def __init__(self, target: Target, steps: Sequence[StepSettings]) -> None:
        self._target = target
        self._steps = tuple(steps)
        self._keys: dict[tuple[str, ...], list[Hashes]] = {}

    def __bool__(self) -> bool:
        """Whether any row was rejected."""
        return bool(self._keys)

    def add(self, rejected: Rejected) -> None:
        """Take rows that a step could not work on."""
        if not len(rejected.changes):
            return
        rows, steps = rejected.changes.rows, self._steps[len(self._steps) - rejected.left :]
        known = tuple(
            name
            for name in self._target.primary_key
            if _has(rows, self._target.arrow().field(name)) and keeps_column(steps, name)
        )
        keys = self._keys.setdefault(known, [])
        if known:
            keys.append(numpy.unique(hashes(rows, known)))

    def among(self, rows: pyarrow.RecordBatch) -> npt.NDArray[numpy.bool_]:
        """Tell of each row of the target whether it may be the row of a rejected one."""
        found = numpy.zeros(rows.num_rows, numpy.bool_)
        for columns, keys in self._keys.items():
            if not columns:
                return ~numpy.zeros(rows.num_rows, numpy.bool_)
            found |= is_among(hashes(rows, columns), numpy.unique(joined(keys)))
        return found


def _has(rows: pyarrow.RecordBatch, field: pyarrow.Field) -> bool:
    place = rows.schema.get_field_index(field.name)
    return place >= 0 and bool(rows.schema.field(place).type == field.type)
