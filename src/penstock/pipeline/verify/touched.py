# SPDX-License-Identifier: Apache-2.0
"""Records how the log changed a table's rows after a position, to derive the rows as they were at that
position.

Only the first event of each key after the position is needed. If that event deletes or updates a row, the
event's preimage is the row at the position. If it inserts a row, there was no row with this key at the
position. A key without an event is unchanged. The table may therefore be read at any time, if the log is then
read up to a position after that read.
"""

from collections.abc import Iterator, Sequence

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import TAKES, Changes, Origin
from penstock.errors import LimitExceeded, ServerUnsupported
from penstock.model import Column
from penstock.pipeline.verify.hashed import NONE, Hashes, hashes, is_among

# The memory limit for the earlier states of touched rows. A pipeline that needs more is too far behind, and
# should catch up first.
HELD_BYTES_MAX = 1 << 30

_HINT_IMAGES = "SET GLOBAL binlog_row_image = FULL on the server; the log before that cannot be undone"
_HINT_CATCH_UP = "Let the pipeline catch up first: penstock run PIPELINE --until caught-up"


class Touched:
    """The keys of one source table for which the log contains changes, and the earlier images of their rows.

    `key` contains the columns of the primary key. For a table without a primary key, only `events` is
    counted. `columns` are the current columns. The reader of the log excludes changes made under a different
    definition.
    """

    def __init__(self, key: Sequence[str]) -> None:
        self.key = tuple(key)
        self.columns: tuple[Column, ...] | None = None
        self.events = 0
        self.keys: Hashes = NONE
        self._before: list[Changes] = []
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """The memory used, in bytes."""
        return self._bytes + self.keys.nbytes

    def add(self, changes: Changes) -> None:
        """Add changes that come after the changes added so far. Raises ServerUnsupported, LimitExceeded."""
        rows = changes.rows
        self.events += rows.num_rows
        _refuse_partial(changes)
        if not self.key or not rows.num_rows:
            return
        hashed = hashes(rows, self.key)
        keys, firsts = numpy.unique(hashed, return_index=True)
        new = ~is_among(keys, self.keys)
        self.keys = numpy.union1d(self.keys, keys[new])
        first = rows.take(pyarrow.array(numpy.sort(firsts[new])))
        taken = first.filter(pc.is_in(first.column("_change_type"), value_set=pyarrow.array(TAKES)))
        if taken.num_rows:
            self._before.append(changes.with_rows(as_inserts(taken)))
            self._bytes += taken.nbytes
        if self._bytes > HELD_BYTES_MAX:
            raise LimitExceeded(
                f"the log changed more than {HELD_BYTES_MAX >> 20} MiB of rows of {changes.source}"
                " behind the pipeline's position",
                hint=_HINT_CATCH_UP,
            )

    def untouched(self, changes: Changes) -> Changes:
        """Return the rows that the log did not touch."""
        if not len(self.keys) or not len(changes):
            return changes
        untouched = ~is_among(hashes(changes.rows, self.key), self.keys)
        return (
            changes if untouched.all() else changes.with_rows(changes.rows.filter(pyarrow.array(untouched)))
        )

    def before(self) -> Iterator[Changes]:
        """Yield the touched rows as they were at the position, as rows of a load."""
        for changes in self._before:
            yield Changes(changes.target, changes.rows, changes.source, Origin.LOAD)


def as_inserts(rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return row images as rows of a load, each an insert."""
    index = rows.schema.get_field_index("_change_type")
    field = rows.schema.field(index)
    kinds = pyarrow.repeat(pyarrow.scalar("insert", field.type), rows.num_rows)
    return rows.set_column(index, field, kinds)


def _refuse_partial(changes: Changes) -> None:
    absent = pc.struct_field(changes.rows.column("_metadata"), "absent")
    if absent.null_count < len(absent):
        raise ServerUnsupported(
            f"the log has partial row images of {changes.source}, so no earlier state can be restored",
            hint=_HINT_IMAGES,
        )
