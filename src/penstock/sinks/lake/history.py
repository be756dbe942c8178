# SPDX-License-Identifier: Apache-2.0
"""Keeps every row that ever was, with the commits from and until which it was the source's (SCD type 2).

A row that is the source's now has no end. A change ends the row of its key and begins another; both bear the
change's version and time.
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
from penstock.sinks.lake.copy_on_write import CopyOnWrite, Rewritten
from penstock.sinks.lake.key_index import KeyIndex
from penstock.sinks.lake.parquet_files import PartFiles
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.table import LakeTable

FROM_VERSION, TO_VERSION = "_valid_from_version", "_valid_to_version"
FROM_TIME, TO_TIME = "_valid_from", "_valid_to"
_TIME = pyarrow.timestamp("us", tz="UTC")
# Stands for no end, and for a moment that is not known.
_OPEN = -1


def history_fields() -> list[pyarrow.Field]:
    """Return the columns of a history behind the table's own."""
    return [
        pyarrow.field(FROM_VERSION, pyarrow.int64()),
        pyarrow.field(TO_VERSION, pyarrow.int64()),
        pyarrow.field(FROM_TIME, _TIME),
        pyarrow.field(TO_TIME, _TIME),
    ]


class HistoryTable:
    """What one batch makes of one history. Holds the batch's changes of the table in memory."""

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
        self.unrepresentable: Counter[str] = Counter()

    def add(self, changes: Changes) -> None:
        """Take changes, which follow those taken before."""
        if len(changes):
            self._parts.append(changes)

    def empty(self, version: int) -> None:
        """Take that the source table was emptied: whatever is open there ends."""
        self._emptied.append(version)

    def abort(self) -> None:
        """Let go of what was taken."""
        self._parts = []

    def commit(self, numbers: Mapping[str, int]) -> int:
        """Make the table's next version; return how many changes it has more."""
        rows = self._ordered()
        events = _Events(self._target, rows, self._table.schema, self._emptied)
        put = puts(rows)
        self.unrepresentable += unrepresentable_counts(self._target, rows.filter(put))
        begun = events.periods(rows, self._table.schema).filter(put)
        ended = self._end(events)
        try:
            writer = self._output()
            writer.write(begun)
            ended.added += writer.finish()
        except BaseException:
            self._table.folder.delete([one.path for one in ended.added])
            raise
        # A commit whose answer is lost may have been made: the files that it names stay, whatever it raises.
        self._table.commit(ended.added, ended.removed, numbers)
        self._parts = []
        return int(rows.num_rows)

    def _ordered(self) -> pyarrow.Table:
        """Return all changes in commit order, those of a load before others of their version."""
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

    def _end(self, events: "_Events") -> Rewritten:
        """Write the files anew that hold rows which end in this batch."""
        files = self._table.files()
        if not files or not (events.count or self._emptied):
            return Rewritten()
        index = _EveryRow() if self._emptied else events.index
        key = self._target.primary_key
        work = CopyOnWrite(self._table.folder, self._table.schema, key, index, events.mend)
        return work.rewrite(files, self._output, self._bytes_max)


class _Events:
    """The changes of a batch as events of their keys: what ends which row."""

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
        found = first.group_by(self._key, use_threads=False).aggregate([("_at", "min")])
        self.index = KeyIndex(found.select(self._key))
        # Of each key, its first event in the batch: what ends its row in the table.
        self._first = found.column("_at_min").to_numpy()
        self._codes = self.index.find(keys.columns)

    def periods(self, rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
        """Return the rows as the history holds them: each begins with its change, and ends with the next
        one of its key."""
        stored = stored_rows(rows, schema)
        following = numpy.full(self.count, -1, numpy.int64)
        if self.count:
            order = numpy.argsort(self._codes, kind="stable")
            same = self._codes[order][1:] == self._codes[order][:-1]
            following[order[:-1][same]] = order[1:][same]
        ends, times = self._sooner_emptied(self._versions, *self._told(following))
        made = {FROM_VERSION: pyarrow.array(self._versions), FROM_TIME: _moments(self._times)}
        made |= {TO_VERSION: _or_null(ends), TO_TIME: _moments(times)}
        return _with(stored, made)

    def mend(self, group: pyarrow.Table, _: numpy.ndarray, __: int) -> pyarrow.Table:
        """Return rows of the table, each with the end that the first event of its key gives it.

        A row that was read ahead of the log ended the one before it at its own version; the log's next change
        of that key is earlier, and moves that end. The row itself would end before it begins: the log has all
        of its time, so it is left out.
        """
        ends = numpy.full(group.num_rows, _OPEN, numpy.int64)
        times = ends.copy()
        if self.count:
            codes = self.index.find(group.select(self._key).columns)
            events = numpy.where(codes >= 0, self._first[codes], -1)
            ends, times = self._told(events)
        begun = group.column(FROM_VERSION).to_numpy()
        ends, times = self._sooner_emptied(begun, ends, times)
        stored = group.column(TO_VERSION)
        is_open = pc.is_null(stored).to_numpy()
        later = pc.fill_null(stored, _OPEN).to_numpy() > ends
        # An end that is later than the log's own was made by rows that were read ahead of it.
        moved = (ends != _OPEN) & (is_open | (later & (ends >= begun)))
        mask = pyarrow.array(moved)
        made = {
            TO_VERSION: pc.if_else(mask, _or_null(ends), stored),
            TO_TIME: pc.if_else(mask, _moments(times), group.column(TO_TIME)),
        }
        told_anew = is_open & (ends != _OPEN) & (ends < begun)
        return _with(group, made).filter(pyarrow.array(~told_anew))

    def _sooner_emptied(
        self, begun: numpy.ndarray, ends: numpy.ndarray, times: numpy.ndarray
    ) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return ends of rows that begin at versions, with their times: where the table was emptied between
        the two, it is that version, whose time is not known."""
        if not len(self._emptied):
            return ends, times
        place = numpy.searchsorted(self._emptied, begun)
        known = place < len(self._emptied)
        emptied = self._emptied[numpy.where(known, place, 0)]
        sooner = known & ((ends < 0) | (ends > emptied))
        return numpy.where(sooner, emptied, ends), numpy.where(sooner, _OPEN, times)

    def _told(self, events: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
        """Return versions and times of events by their numbers; -1 is none."""
        known = events >= 0
        if not self.count:
            return numpy.full(len(events), _OPEN), numpy.full(len(events), _OPEN)
        return numpy.where(known, self._versions[events], _OPEN), numpy.where(
            known, self._times[events], _OPEN
        )


class _EveryRow(KeyIndex):
    """Finds every row of every file: where a table was emptied, all that is open ends."""

    def __init__(self) -> None:
        self.count = 1

    def find(self, columns: Sequence[pyarrow.ChunkedArray]) -> numpy.ndarray:
        return numpy.zeros(len(columns[0]), numpy.int64)

    def may_have(self, bounds: Sequence[tuple[Any, Any, bool] | None]) -> bool:
        return True


def _changes_schema(target: Target) -> pyarrow.Schema:
    columns = [(one.name, one.type_text, one.charset, one.nullable) for one in target.columns]
    return pyarrow.schema(_native.arrow_schema(columns, mariadb=target.mariadb))


def _with(rows: pyarrow.Table, made: Mapping[str, Any]) -> pyarrow.Table:
    """Return rows with other values in some columns."""
    for name, values in made.items():
        number = rows.schema.get_field_index(name)
        rows = rows.set_column(number, rows.schema.field(number), values)
    return rows


def _or_null(values: numpy.ndarray) -> pyarrow.Array:
    return pyarrow.array(values, pyarrow.int64(), mask=values == _OPEN)


def _moments(values: numpy.ndarray) -> pyarrow.Array:
    return _or_null(values).cast(_TIME)
