# SPDX-License-Identifier: Apache-2.0
"""Keeps every row version with the commits that began and ended it (SCD type 2).

A current row has no end. A change ends the current row of its key and adds a new current row. The version and
time of the change are stored as the end of the old row and the beginning of the new row.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes, Origin, Target
from penstock.sinks.images import puts, unrepresentable_counts
from penstock.sinks.lake.copy_on_write import CopyOnWrite, KeyedReplacement, Rewritten
from penstock.sinks.lake.key_index import KeyIndex
from penstock.sinks.lake.parquet_files import PartFiles
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.table import LakeTable, NextVersion

FROM_VERSION, TO_VERSION = "_valid_from_version", "_valid_to_version"
FROM_TIME, TO_TIME = "_valid_from", "_valid_to"
_TIME = pyarrow.timestamp("us", tz="UTC")
# Stands for no end, or for an unknown time.
_OPEN = -1


def history_fields() -> list[pyarrow.Field]:
    """Return the additional columns of a history."""
    return [
        pyarrow.field(FROM_VERSION, pyarrow.int64()),
        pyarrow.field(TO_VERSION, pyarrow.int64()),
        pyarrow.field(FROM_TIME, _TIME),
        pyarrow.field(TO_TIME, _TIME),
    ]


class HistoryTable:
    """The changes of one batch to one history table, buffered in memory."""

    def __init__(
        self, target: Target, table: LakeTable, output: Callable[[], PartFiles], *, bytes_max: int
    ) -> None:
        self._target = target
        self._table = table
        self._output = output
        self._bytes_max = bytes_max
        self._parts: list[Changes] = []
        # The versions at which the table was emptied, in order.
        self._emptied: list[int] = []
        self._version: NextVersion | None = None
        self.unrepresentable: Counter[str] = Counter()

    def add(self, changes: Changes) -> None:
        """Add changes, which follow the changes added before."""
        if len(changes):
            self._parts.append(changes)

    def empty(self, version: int) -> None:
        """Record that the source table was emptied, which ends all current rows."""
        self._emptied.append(version)

    def abort(self) -> None:
        """Discard the buffered changes, and delete the files that belong to no version yet."""
        self._parts = []
        version, self._version = self._version, None
        if version is not None:
            self._table.folder.delete([file.path for file in version.added])

    @property
    def bytes(self) -> int:
        """The memory used by buffered rows, none of which can be spilled."""
        return 0

    def spill(self) -> None:
        """Keep the rows: a history needs all of them at once."""

    def stage(self) -> None:
        """Write the files of the table's next version, which `commit` adds to the table."""
        rows = self._changes_in_order()
        events = _Events(self._target, rows, self._table.schema, self._emptied)
        is_written = puts(rows)
        self.unrepresentable += unrepresentable_counts(self._target, rows.filter(is_written))
        begun = events.periods(rows, self._table.schema).filter(is_written)
        ended = self._end_rows(events)
        try:
            writer = self._output()
            writer.write(begun)
            ended.added += writer.finish()
        except BaseException:
            self._table.folder.delete([file.path for file in ended.added])
            raise
        self._parts = []
        self._version = NextVersion(ended.added, ended.removed, int(rows.num_rows))

    def commit(self, numbers: Mapping[str, int]) -> int:
        """Commit the table's next version, and return the number of changes added.

        Stages the version first if `stage` was not called.
        """
        if self._version is None:
            self.stage()
        assert self._version is not None, "it is staged"
        # If the commit's answer is lost, the commit may exist. Keep its files whatever it raises.
        version, self._version = self._version, None
        self._table.commit(version.added, version.removed, numbers)
        return version.rows

    def _changes_in_order(self) -> pyarrow.Table:
        """Return all changes in commit order, with load rows first within a version."""
        if not self._parts:
            return pyarrow.Table.from_batches([], schema=_changes_schema(self._target))
        rows = pyarrow.Table.from_batches([part.rows for part in self._parts])
        logged = numpy.repeat(
            [part.origin is Origin.LOG for part in self._parts], [len(part) for part in self._parts]
        )
        order = numpy.lexsort((logged, rows.column("_commit_version").to_numpy()))
        if not (numpy.diff(order) == 1).all():
            rows = rows.take(pyarrow.array(order))
        check_keys(self._target, rows)
        return rows

    def _end_rows(self, events: "_Events") -> Rewritten:
        """Rewrite the files with rows that end in this batch."""
        files = self._table.files()
        if not files or not (events.count or self._emptied):
            return Rewritten()
        index = _EveryRow() if self._emptied else events.index
        key = self._target.primary_key
        replacement = KeyedReplacement(self._table.schema, key, index, events.replace_rows)
        work = CopyOnWrite(self._table.folder, self._table.schema, key, replacement)
        return work.rewrite(files, self._output, self._bytes_max, 128 << 20)


class _Events:
    """The changes of a batch as events per key, which determine the ends of rows."""

    def __init__(
        self, target: Target, rows: pyarrow.Table, schema: pyarrow.Schema, emptied: Sequence[int]
    ) -> None:
        self._key = list(target.primary_key)
        self._emptied = numpy.array(sorted(emptied), numpy.int64)
        keys = stored_rows(rows, schema).select(self._key)
        self.count = rows.num_rows
        self._versions = rows.column("_commit_version").to_numpy()
        self._times = rows.column("_commit_timestamp").cast(_TIME).cast(pyarrow.int64()).to_numpy()
        if not self.count:
            return
        first = keys.append_column("_at", pyarrow.array(numpy.arange(self.count)))
        first_events = first.group_by(self._key, use_threads=False).aggregate([("_at", "min")])
        self.index = KeyIndex(first_events.select(self._key))
        # The first event of each key in the batch, which ends the key's row in the table.
        self._first = first_events.column("_at_min").to_numpy()
        self._codes = self.index.find(keys.columns)

    def periods(self, rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
        """Return rows in history form: each begins with its change and ends with the key's next change."""
        stored = stored_rows(rows, schema)
        following = numpy.full(self.count, -1, numpy.int64)
        if self.count:
            order = numpy.argsort(self._codes, kind="stable")
            same = self._codes[order][1:] == self._codes[order][:-1]
            following[order[:-1][same]] = order[1:][same]
        ends, times = self._end_at_emptying(self._versions, *self._versions_and_times(following))
        columns = {FROM_VERSION: pyarrow.array(self._versions), FROM_TIME: _moments(self._times)}
        columns |= {TO_VERSION: _or_null(ends), TO_TIME: _moments(times)}
        return _with(stored, columns)

    def replace_rows(self, group: pyarrow.Table, _: numpy.ndarray, __: int) -> pyarrow.Table:
        """Return rows of the table, each ended at the first event of its key.

        A full load may read a row ahead of the log. That row ended the key's previous row at its own version.
        If the log then has an earlier change of the key, the previous row ends at that change instead. The
        row that was read ahead would end before it begins, so it is dropped: the log contains its whole
        lifetime.
        """
        ends = numpy.full(group.num_rows, _OPEN, numpy.int64)
        times = ends.copy()
        if self.count:
            codes = self.index.find(group.select(self._key).columns)
            events = numpy.where(codes >= 0, self._first[codes], -1)
            ends, times = self._versions_and_times(events)
        begun = group.column(FROM_VERSION).to_numpy()
        ends, times = self._end_at_emptying(begun, ends, times)
        stored = group.column(TO_VERSION)
        is_open = pc.is_null(stored).to_numpy()
        later = pc.fill_null(stored, _OPEN).to_numpy() > ends
        # If the stored end is later than the end in the log, it was set by rows that were read ahead of the
        # log. Replace it.
        moved = (ends != _OPEN) & (is_open | (later & (ends >= begun)))
        mask = pyarrow.array(moved)
        columns = {
            TO_VERSION: pc.if_else(mask, _or_null(ends), stored),
            TO_TIME: pc.if_else(mask, _moments(times), group.column(TO_TIME)),
        }
        covered_by_log = is_open & (ends != _OPEN) & (ends < begun)
        return _with(group, columns).filter(pyarrow.array(~covered_by_log))

    def _end_at_emptying(
        self, begun: numpy.ndarray, ends: numpy.ndarray, times: numpy.ndarray
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the ends of rows, and the times of these ends. A row ends at the latest when its table is
        first emptied (TRUNCATE) after the row begins.

        The time at which a table was emptied is unknown.
        """
        if not len(self._emptied):
            return ends, times
        index = numpy.searchsorted(self._emptied, begun)
        known = index < len(self._emptied)
        emptied = self._emptied[numpy.where(known, index, 0)]
        ends_earlier = known & ((ends < 0) | (ends > emptied))
        return numpy.where(ends_earlier, emptied, ends), numpy.where(ends_earlier, _OPEN, times)

    def _versions_and_times(self, events: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return the versions and times of events by index; -1 means no event."""
        known = events >= 0
        if not self.count:
            return numpy.full(len(events), _OPEN), numpy.full(len(events), _OPEN)
        return numpy.where(known, self._versions[events], _OPEN), numpy.where(
            known, self._times[events], _OPEN
        )


class _EveryRow(KeyIndex):
    """Matches every row of every file. Used if a table was emptied, which ends all current rows."""

    def __init__(self) -> None:
        self.count = 1

    def find(self, columns: Sequence[pyarrow.ChunkedArray]) -> numpy.ndarray:
        return numpy.zeros(len(columns[0]), numpy.int64)

    def may_have(self, bounds: Sequence[tuple[Any, Any, bool] | None]) -> bool:
        return True


def _changes_schema(target: Target) -> pyarrow.Schema:
    columns = [(column.name, column.type_text, column.charset, column.nullable) for column in target.columns]
    return pyarrow.schema(_native.arrow_schema(columns, mariadb=target.mariadb))


def _with(rows: pyarrow.Table, columns: Mapping[str, Any]) -> pyarrow.Table:
    """Return rows with other values in some columns."""
    for name, values in columns.items():
        number = rows.schema.get_field_index(name)
        rows = rows.set_column(number, rows.schema.field(number), values)
    return rows


def _or_null(values: numpy.ndarray) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.int64(), mask=values == _OPEN)


def _moments(values: numpy.ndarray) -> pyarrow.Array:
    return _or_null(values).cast(_TIME)
