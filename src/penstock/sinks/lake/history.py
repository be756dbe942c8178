# SPDX-License-Identifier: Apache-2.0
"""Keeps every row version with the commits that began and ended it (SCD type 2).

A current row has no end. A change ends the current row of its key and adds a new current row. The version and
time of the change are stored as the end of the old row and the beginning of the new row.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.changes import Changes, Origin, Target
from penstock.sinks.images import puts, unrepresentable_counts
from penstock.sinks.key_hashes import key_hashes
from penstock.sinks.lake.copy_on_write import CopyOnWrite, KeyedReplacement, Rewritten
from penstock.sinks.lake.key_index import KeyIndex, plain
from penstock.sinks.lake.parquet_files import DataFile, PartFiles
from penstock.sinks.lake.rows import check_keys, stored_rows
from penstock.sinks.lake.spill_file import SpillFile
from penstock.sinks.lake.table import LakeTable, NextVersion, StagedChanges

FROM_VERSION, TO_VERSION = "_valid_from_version", "_valid_to_version"
FROM_TIME, TO_TIME = "_valid_from", "_valid_to"
_TIME = pyarrow.timestamp("us", tz="UTC")
# Stands for no end, or for an unknown time.
_OPEN = -1
# Columns beside those of the changes, and beside the key. No column of a table has these names.
_LOGGED, _VERSION, _MOMENT = "\0logged", "\0version", "\0moment"
# The part of the memory in which changes are buffered. The rest is for their copies, and for rewriting files.
_BUFFERED_FRACTION = 4
# Spilled changes are divided into this many buckets by key, a few of which are read at once.
_BUCKETS = 251
# What the end of a key's row needs in memory, including what is needed to build an index of keys.
_INDEXED_ROW_BYTES = 128


def history_fields() -> list[pyarrow.Field]:
    """Return the additional columns of a history."""
    return [
        pyarrow.field(FROM_VERSION, pyarrow.int64()),
        pyarrow.field(TO_VERSION, pyarrow.int64()),
        pyarrow.field(FROM_TIME, _TIME),
        pyarrow.field(TO_TIME, _TIME),
    ]


class HistoryTable(StagedChanges):
    """The changes of one batch to one history table.

    Uses about `memory_bytes`, of which a quarter is for buffered changes. Further changes are spilled to
    `spill_file`, divided by key, so that all changes of a key can be read back together.
    """

    def __init__(
        self,
        target: Target,
        table: LakeTable,
        output: Callable[[], PartFiles],
        *,
        bytes_max: int,
        memory_bytes: int,
        spill_file: SpillFile,
    ) -> None:
        super().__init__(table)
        self._target = target
        self._output = output
        self._bytes_max = bytes_max
        self._memory_bytes = memory_bytes
        self._spill_file = spill_file
        self._parts: list[Changes] = []
        # For each bucket of keys: the offsets and the bytes of its spilled changes.
        self._spilled: dict[int, list[tuple[int, int]]] = {}
        # The versions at which the table was emptied, in order.
        self._emptied: list[int] = []
        self.bytes = 0
        self.unrepresentable: Counter[str] = Counter()

    def add(self, changes: Changes) -> None:
        """Add changes, which follow the changes added before."""
        if not len(changes):
            return
        self._parts.append(changes)
        self.bytes += changes.rows.nbytes
        if self.bytes > self._memory_bytes // _BUFFERED_FRACTION:
            self.spill()

    def empty(self, version: int) -> None:
        """Record that the source table was emptied, which ends all current rows."""
        self._emptied.append(version)

    def abort(self) -> None:
        """Discard the buffered changes, and delete the files that belong to no version yet."""
        self._take_buffered()
        self._spilled = {}
        self._delete_staged()

    def spill(self) -> None:
        """Write the buffered changes to the spill file."""
        rows = self._take_buffered()
        if rows is None:
            return
        hashes = key_hashes(rows, self._target.primary_key, "")
        # The low bits of a hash chose the part that is written here.
        buckets = ((hashes >> numpy.uint64(32)) % numpy.uint64(_BUCKETS)).astype(numpy.int32)
        order = numpy.argsort(buckets, kind="stable")
        rows = rows.combine_chunks().take(pyarrow.array(order))
        numbers, starts = numpy.unique(buckets[order], return_index=True)
        ends = [*starts[1:].tolist(), rows.num_rows]
        for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True):
            of_bucket = rows.slice(start, end - start)
            offset = self._spill_file.write(of_bucket)
            self._spilled.setdefault(number, []).append((offset, of_bucket.nbytes))

    def stage(self) -> None:
        work = _Rewriting(self.table.files())
        writer = self._output()
        ends: list[pyarrow.Table] = []
        rows_changed = ends_rows = 0
        try:
            for rows in self._changes_by_key():
                events = _Events(self._target, rows, self.table.schema, self._emptied)
                is_written = puts(rows)
                self.unrepresentable += unrepresentable_counts(self._target, rows.filter(is_written))
                writer.write(events.periods(rows, self.table.schema).filter(is_written))
                rows_changed += rows.num_rows
                if events.first_events is not None:
                    ends.append(events.first_events)
                    ends_rows += events.first_events.num_rows
                if ends_rows > self._memory_bytes // _INDEXED_ROW_BYTES:
                    self._end_rows(work, _Ends(self._target, pyarrow.concat_tables(ends), ()))
                    ends, ends_rows = [], 0
            if ends:
                self._end_rows(work, _Ends(self._target, pyarrow.concat_tables(ends), ()))
            if self._emptied:
                # Every row ends, at the latest here. Its key may have ended it earlier.
                self._end_rows(work, _Ends(self._target, None, self._emptied))
            begun = writer.finish()
        except BaseException:
            writer.abort()
            self.table.folder.delete([file.path for file in work.created])
            raise
        self._spilled = {}
        self._version = work.version(begun, rows_changed)

    def _take_buffered(self) -> pyarrow.Table | None:
        """Return the buffered changes with their origin, and clear the buffer."""
        parts, self._parts, self.bytes = self._parts, [], 0
        if not parts:
            return None
        logged = numpy.repeat([part.origin is Origin.LOG for part in parts], [len(part) for part in parts])
        rows = pyarrow.Table.from_batches([part.rows for part in parts])
        return rows.append_column(_LOGGED, pyarrow.array(logged))

    def _changes_by_key(self) -> Iterator[pyarrow.Table]:
        """Yield all changes, those of one key together, in commit order, with load rows first within a
        version.
        """
        if not self._spilled:
            rows = self._take_buffered()
            if rows is not None:
                yield self._in_order(rows)
            return
        self.spill()
        offsets: list[int] = []
        size = 0
        for number in sorted(self._spilled):
            bucket_bytes = sum(part_bytes for _, part_bytes in self._spilled[number])
            if offsets and size + bucket_bytes > self._memory_bytes // _BUFFERED_FRACTION:
                yield self._in_order(self._read(offsets))
                offsets, size = [], 0
            offsets += [offset for offset, _ in self._spilled[number]]
            size += bucket_bytes
        yield self._in_order(self._read(offsets))

    def _read(self, offsets: Sequence[int]) -> pyarrow.Table:
        # In the order in which the changes were added.
        return pyarrow.concat_tables([self._spill_file.read(offset) for offset in sorted(offsets)])

    def _in_order(self, rows: pyarrow.Table) -> pyarrow.Table:
        logged = rows.column(_LOGGED).to_numpy()
        rows = rows.drop_columns([_LOGGED])
        order = numpy.lexsort((logged, rows.column("_commit_version").to_numpy()))
        if not (numpy.diff(order) == 1).all():
            rows = rows.take(pyarrow.array(order))
        check_keys(self._target, rows)
        return rows

    def _end_rows(self, work: "_Rewriting", ends: "_Ends") -> None:
        """Rewrite the files with rows that end in this batch."""
        if not work.files:
            return
        key, schema = self._target.primary_key, self.table.schema
        replacement = KeyedReplacement(schema, key, ends.index, ends.replace_rows)
        copy_on_write = CopyOnWrite(self.table.folder, schema, key, replacement)
        work.note(copy_on_write.rewrite(work.files, self._output, self._bytes_max, self._memory_bytes))


class _Rewriting:
    """The files of a table that are rewritten one or several times before they are committed."""

    def __init__(self, files: Sequence[DataFile]) -> None:
        self._committed = list(files)
        self.files = list(files)
        self.created: list[DataFile] = []

    def note(self, rewritten: Rewritten) -> None:
        """Replace the files that were rewritten."""
        removed = {file.path for file in rewritten.removed}
        self.files = [file for file in self.files if file.path not in removed] + rewritten.added
        self.created += rewritten.added

    def version(self, begun: Sequence[DataFile], rows: int) -> NextVersion:
        """Return the table's next version, which also has the files of the rows that begin."""
        kept = {file.path for file in self.files}
        return NextVersion(
            [*(file for file in self.created if file.path in kept), *begun],
            [file for file in self._committed if file.path not in kept],
            rows,
            [file for file in self.created if file.path not in kept],
        )


class _Events:
    """The changes of some keys as events per key, which determine the ends of rows."""

    def __init__(
        self, target: Target, rows: pyarrow.Table, schema: pyarrow.Schema, emptied: Sequence[int]
    ) -> None:
        key = list(target.primary_key)
        self._emptied = numpy.array(sorted(emptied), numpy.int64)
        keys = _with_single_zero(stored_rows(rows, schema).select(key))
        self._count = rows.num_rows
        self._versions = rows.column("_commit_version").to_numpy()
        self._times = rows.column("_commit_timestamp").cast(_TIME).cast(pyarrow.int64()).to_numpy()
        # The first event of each key, which ends the key's row in the table: the key, version and time.
        self.first_events: pyarrow.Table | None = None
        if not self._count:
            return
        numbered = keys.append_column("_at", pyarrow.array(numpy.arange(self._count)))
        first_events = numbered.group_by(key, use_threads=False).aggregate([("_at", "min")])
        first = first_events.column("_at_min").to_numpy()
        first_keys = first_events.select(key)
        self._codes = KeyIndex(first_keys).find(keys.columns)
        self.first_events = first_keys.append_column(
            _VERSION, pyarrow.array(self._versions[first])
        ).append_column(_MOMENT, pyarrow.array(self._times[first]))

    def periods(self, rows: pyarrow.Table, schema: pyarrow.Schema) -> pyarrow.Table:
        """Return rows in history form: each begins with its change and ends with the key's next change."""
        stored = stored_rows(rows, schema)
        following = numpy.full(self._count, -1, numpy.int64)
        if self._count:
            order = numpy.argsort(self._codes, kind="stable")
            same = self._codes[order][1:] == self._codes[order][:-1]
            following[order[:-1][same]] = order[1:][same]
        ends, times = _at(following, self._versions, self._times)
        ends, times = _end_at_emptying(self._emptied, self._versions, ends, times)
        columns = {FROM_VERSION: pyarrow.array(self._versions), FROM_TIME: _moments(self._times)}
        columns |= {TO_VERSION: _or_null(ends), TO_TIME: _moments(times)}
        return _with(stored, columns)


class _Ends:
    """The ends of rows of the table: by the first events of some keys, or by the emptying of the table."""

    def __init__(self, target: Target, events: pyarrow.Table | None, emptied: Sequence[int]) -> None:
        self._key = list(target.primary_key)
        self._emptied = numpy.array(sorted(emptied), numpy.int64)
        self._versions = self._times = numpy.empty(0, numpy.int64)
        self.index: KeyIndex = _EveryRow()
        if events is not None:
            self.index = KeyIndex(events.select(self._key))
            self._versions, self._times = (events.column(name).to_numpy() for name in (_VERSION, _MOMENT))

    def replace_rows(self, group: pyarrow.Table, key_numbers: numpy.ndarray, _: int) -> pyarrow.Table:
        """Return rows of the table, each ended at the first event of its key.

        A full load may read a row ahead of the log. That row ended the key's previous row at its own version.
        If the log then has an earlier change of the key, the previous row ends at that change instead. The
        row that was read ahead would end before it begins, so it is dropped: the log contains its whole
        lifetime.
        """
        events = key_numbers if len(self._versions) else numpy.full(group.num_rows, -1, numpy.int64)
        ends, times = _at(events, self._versions, self._times)
        begun = group.column(FROM_VERSION).to_numpy()
        ends, times = _end_at_emptying(self._emptied, begun, ends, times)
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


def _with_single_zero(keys: pyarrow.Table) -> pyarrow.Table:
    """Return keys in which negative zero is zero, because both are the same key."""
    columns = [plain(column) if pyarrow.types.is_floating(column.type) else column for column in keys.columns]
    return pyarrow.Table.from_arrays(columns, schema=keys.schema)


def _at(
    events: numpy.ndarray, versions: numpy.ndarray, times: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the versions and times of events by index; -1 means no event."""
    if not len(versions):
        return numpy.full(len(events), _OPEN), numpy.full(len(events), _OPEN)
    known = events >= 0
    return numpy.where(known, versions[events], _OPEN), numpy.where(known, times[events], _OPEN)


def _end_at_emptying(
    emptied: numpy.ndarray, begun: numpy.ndarray, ends: numpy.ndarray, times: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the ends of rows, and the times of these ends. A row ends at the latest when its table is first
    emptied (TRUNCATE) after the row begins.

    The time at which a table was emptied is unknown.
    """
    if not len(emptied):
        return ends, times
    index = numpy.searchsorted(emptied, begun)
    known = index < len(emptied)
    versions = emptied[numpy.where(known, index, 0)]
    ends_earlier = known & ((ends < 0) | (ends > versions))
    return numpy.where(ends_earlier, versions, ends), numpy.where(ends_earlier, _OPEN, times)


class _EveryRow(KeyIndex):
    """Matches every row of every file. Used if a table was emptied, which ends all current rows."""

    def __init__(self) -> None:
        self.count = 1

    def find(self, columns: Sequence[pyarrow.ChunkedArray]) -> numpy.ndarray:
        return numpy.zeros(len(columns[0]), numpy.int64)

    def may_have(self, bounds: Sequence[tuple[Any, Any, bool] | None]) -> bool:
        return True


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
