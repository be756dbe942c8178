# SPDX-License-Identifier: Apache-2.0
"""The rows of a table at a position of a kept log, read from the log alone.

    up to the position     the last change of each key: its image after, or the row is gone
    after the position     the first change of each other key: its image before, if the row was there

Rows without any change in the kept log are unknown and are not shown. If a statement emptied the table before
the position, no row is unknown, because the log contains all later inserts. Changes that the server does not
log, such as foreign key actions, remain unknown. A statement that may move rows without logging them makes
all earlier rows unknown.
"""

import functools
import sys
import threading
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy
import pyarrow

from penstock.errors import AccessDenied, LimitExceeded, OptionInvalid
from penstock.limits import AS_OF_BYTES_MAX
from penstock.logstore.reader import LogReader
from penstock.model import Position, TableName, TablePatterns
from penstock.source.bounds import parse_bound
from penstock.source.kept import KeptSource
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, LoggedStatement, Selection, read_in_order
from penstock.source.row_history import candidate_ranges, logged_values, python_rows, table_bit
from penstock.source.source import ByteRange
from penstock.source.transaction import find_by_gtid, prove_boundary
from penstock.source.walk import TransactionWalk

_SYSTEM = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")
_BEFORE = frozenset({"delete", "update_preimage"})

_Key = tuple[Any, ...]

# A slot is the location of a row: the number of its batch in the upper bits, the number of the row in the
# lower 32 bits.
_ROW_BITS, _ROW_MASK = 32, (1 << 32) - 1
_ABSENT = -1
# The approximate memory of a known row: a dictionary entry, a tuple and an integer.
_ROW_BYTES = 256
# The approximate overhead of a batch, and of each of its columns.
_BATCH_BYTES, _COLUMN_BYTES = 1024, 512
# Small batches are merged into batches of up to this many rows.
_MERGED_ROWS_MAX = 65_536
# Images are converted to Python values this many rows at a time.
_IMAGES_AT_ONCE = 1024


@dataclass(frozen=True)
class RowAsOf:
    """A row at one moment: its known `values` by column, and the columns whose values the log does not
    contain.

    `position` and `time_us` (commit time in microseconds since 1970, UTC) belong to the change that the
    values come from. This is the last change before the moment or, with `is_later`, the first change after
    it.
    """

    values: dict[str, Any]
    missing: tuple[str, ...]
    position: Position
    time_us: int
    is_later: bool


class _Known:
    """The known rows: a map from each row's key to the location of the row's image.

    A slot combines the number of a kept batch and a row in it into one integer: see `slot_of`. A row that was
    inserted after the moment has the slot `_ABSENT`.
    """

    def __init__(self) -> None:
        self._batches: dict[int, tuple[pyarrow.RecordBatch, int]] = {}
        self._batch_count = 0
        self._slots: dict[_Key, int] = {}
        # Values from earlier images, for columns that the kept image does not have.
        self._earlier: dict[_Key, dict[str, Any]] = {}
        self._batch_bytes = 0
        self._row_bytes = 0

    @property
    def bytes(self) -> int:
        """The approximate memory of the batches, the keys and the values."""
        return self._batch_bytes + self._row_bytes

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(slot != _ABSENT for slot in self._slots.values())

    def __contains__(self, key: _Key) -> bool:
        return key in self._slots

    def add(self, rows: pyarrow.RecordBatch, epoch: int) -> int:
        """Keep a batch, and return its number."""
        self._batch_count += 1
        self._batches[self._batch_count] = rows, epoch
        self._batch_bytes += batch_bytes(rows)
        return self._batch_count

    def put(self, key: _Key, slot: int, earlier: dict[str, Any] | None = None) -> None:
        """Set the slot of a row, and the values from earlier images."""
        self.take(key)
        self._slots[key] = slot
        if earlier:
            self._earlier[key] = earlier
        self._row_bytes += _size_of(key, earlier)

    def take(self, key: _Key) -> tuple[int, dict[str, Any]] | None:
        """Remove a row; return its slot, and the values from earlier images."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return None
        earlier = self._earlier.pop(key, {})
        self._row_bytes -= _size_of(key, earlier)
        return slot, earlier

    def is_absent(self, key: _Key) -> bool:
        """Return whether a row is known to have been inserted after the moment."""
        return self._slots.get(key) == _ABSENT

    def values(self, slot: int, earlier: dict[str, Any]) -> dict[str, Any]:
        """Return the known values of a row."""
        rows, _ = self._batches[slot >> _ROW_BITS]
        (image,) = python_rows(rows.slice(slot & _ROW_MASK, 1))
        return {**earlier, **logged_values(image)}

    def items(self) -> Iterator[tuple[_Key, dict[str, Any], pyarrow.Schema]]:
        """Yield the key and the values of each row, and the schema of its image."""
        for key, slot in self._slots.items():
            values = self.values(slot, self._earlier.get(key, {}))
            yield key, values, self._batches[slot >> _ROW_BITS][0].schema

    def rekey(self, keys: dict[_Key, _Key]) -> None:
        """Change the keys of rows. `keys` maps old keys to new keys."""
        taken = {new: self.take(old) for old, new in keys.items()}
        for new, row in taken.items():
            assert row is not None, "every row has a slot"
            self.put(new, *row)

    def images(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], int]]:
        """Yield in log order the image of each row, the values from earlier images, and the epoch."""
        slots = self._sorted_slots()
        earlier = {self._slots[key]: values for key, values in self._earlier.items()}
        for begin in range(0, len(slots), _IMAGES_AT_ONCE):
            some = slots[begin : begin + _IMAGES_AT_ONCE]
            for number in numpy.unique(some >> _ROW_BITS).tolist():
                rows, epoch = self._batches[number]
                of_batch = some[some >> _ROW_BITS == number]
                taken = rows.take(pyarrow.array(of_batch & _ROW_MASK))
                for slot, image in zip(of_batch.tolist(), python_rows(taken), strict=True):
                    yield image, earlier.get(slot, {}), epoch

    def _sorted_slots(self) -> Any:
        slots = numpy.fromiter(self._slots.values(), numpy.int64, len(self._slots))
        return numpy.sort(slots[slots != _ABSENT])

    def compact(self) -> None:
        """Keep only the rows that are still wanted, in fewer batches.

        Batches are replaced a few at a time, so only a few are in memory twice.
        """
        before = self._sorted_slots()
        after = numpy.empty_like(before)
        numbers = before >> _ROW_BITS
        pieces: list[tuple[pyarrow.RecordBatch, int]] = []
        done = 0
        for number in list(self._batches):
            rows, epoch = self._batches.pop(number)
            self._batch_bytes -= batch_bytes(rows)
            first, end = numpy.searchsorted(numbers, (number, number + 1)).tolist()
            if first == end:
                continue
            if pieces and not (_join(pieces[0], (rows, epoch)) and first - done < _MERGED_ROWS_MAX):
                after[done:first] = self._merge(pieces)
                pieces, done = [], first
            pieces.append((rows.take(pyarrow.array(before[first:end] & _ROW_MASK)), epoch))
        if pieces:
            after[done:] = self._merge(pieces)
        slots = numpy.fromiter(self._slots.values(), numpy.int64, len(self._slots))
        is_row = slots != _ABSENT
        slots[is_row] = after[numpy.searchsorted(before, slots[is_row])]
        for key, slot in zip(self._slots, slots.tolist(), strict=True):
            # Only the values of existing keys change, so this does not disturb the iteration.
            self._slots[key] = slot

    def _merge(self, pieces: list[tuple[pyarrow.RecordBatch, int]]) -> Any:
        """Merge batches into one, and return the slots of its rows."""
        table = pyarrow.Table.from_batches([rows for rows, _ in pieces]).combine_chunks()
        (merged,) = table.to_batches()
        return slot_of(self.add(merged, pieces[0][1]), 0) + numpy.arange(merged.num_rows)


def _join(piece: tuple[pyarrow.RecordBatch, int], other: tuple[pyarrow.RecordBatch, int]) -> bool:
    """Return whether two batches can be merged."""
    return bool(piece[1] == other[1] and piece[0].schema.equals(other[0].schema, check_metadata=True))


def batch_bytes(rows: pyarrow.RecordBatch) -> int:
    """Return the approximate memory of a batch."""
    return _BATCH_BYTES + int(rows.nbytes + rows.num_columns * _COLUMN_BYTES)


def slot_of(batch: int, row: int) -> int:
    """Return the slot of a row of a kept batch."""
    return batch << _ROW_BITS | row


def _size_of(key: _Key, earlier: dict[str, Any] | None) -> int:
    """Return the approximate memory that a known row needs in addition to its image."""
    values = sys.getsizeof(earlier) + sum(map(sys.getsizeof, earlier.values())) if earlier else 0
    return _ROW_BYTES + sum(map(sys.getsizeof, key)) + values


class TableAsOf:
    """Reads a log for one table at one moment. Call `read` once, then use the other members.

    `is_complete` says whether the log contains every row of the table. If so, the table was empty at
    `complete_since`. `columns` are the columns of the newest logged row at that moment, and `key` is the
    primary key. `logged_columns` also includes masked columns.
    """

    def __init__(
        self, log: LogReader, source: KeptSource, table: TableName, masked: Container[str] = frozenset()
    ) -> None:
        """`masked` are columns, in lower case, that are left out of every row."""
        self._log = log
        self._source = source
        self._table = table
        self._masked = masked
        self._bit = numpy.uint64(table_bit(table))
        self._stopping = threading.Event()
        self._known = _Known()
        self._later = _Known()
        self.position: Position | None = None
        self.complete_since: Position | None = None
        self.key: tuple[str, ...] = ()
        self._key_types: tuple[pyarrow.DataType, ...] = ()
        self.schema: pyarrow.Schema | None = None
        self.logged_columns: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the rows include every row that the table had at the moment."""
        return self.complete_since is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows."""
        return () if self.schema is None else tuple(self.schema.names)

    def stop(self) -> None:
        """End the read soon. Can be called from any thread."""
        self._stopping.set()

    def read(self, moment: str) -> None:
        """Read the log to determine the table's rows as of `moment`: a position, a GTID (after its
        transaction), or a time (before it).

        Raises OptionInvalid for a table without a primary key, AccessDenied if its key is masked,
        PositionInvalid inside a transaction, LimitExceeded, and propagates errors from reading the log.
        """
        self.position = self._locate(moment)
        for part in self._parts(None, self.position):
            if isinstance(part, LoggedStatement):
                self._apply_statement(part)
            else:
                self._apply(part)
        if self.is_complete:
            return
        for part in self._parts(self.position, None):
            # After a statement, the table's name may refer to another table.
            if isinstance(part, LoggedStatement):
                break
            self._apply_later(part)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self._known.count + self._later.count

    def rows(self) -> Iterator[RowAsOf]:
        """Yield the rows in the order of the changes that their values come from, later changes last."""
        for known, is_later in ((self._known, False), (self._later, True)):
            for image, earlier, epoch in known.images():
                yield self._row(image, epoch, earlier, is_later=is_later)

    # --- Where ------------------------------------------------------------------------------------

    def _locate(self, moment: str) -> Position:
        bound = parse_bound(moment)
        if bound.position is not None:
            prove_boundary(self._log, self._source, bound.position)
            return bound.position
        if bound.gtid_set is not None:
            return find_by_gtid(self._log, self._source, bound.gtid_set).end
        assert bound.time_us is not None, "a bound has one field"
        start, head = self._source.find_time(bound.time_us), self._source.head()
        for byte_range in self._source.split(start, None) if start < head else ():
            for batch in TransactionWalk(self._source, byte_range):
                committed_us = batch.column("commit_timestamp").cast(pyarrow.int64()).to_numpy()
                (late,) = numpy.nonzero(committed_us >= bound.time_us)
                if late.size:
                    offset = batch.column("offset")[int(late[0])].as_py()
                    return Position(byte_range.epoch, byte_range.file, offset)
        return head

    def _parts(self, start: Position | None, end: Position | None) -> Iterator[Batch | LoggedStatement]:
        selection = Selection(TablePatterns([self._table.sql]))
        for byte_range in self._ranges(start, end):
            for part in read_in_order(self._source, byte_range, selection, LoggedTables(self._source)):
                if self._stopping.is_set():
                    return
                yield part

    def _ranges(self, start: Position | None, end: Position | None) -> Iterator[ByteRange]:
        """Yield the ranges that may change the table, according to the index. Raises SequenceGap."""
        if start is not None and start == self._source.head():
            return
        if end is not None and end == self._source.earliest():
            return
        for byte_range in self._source.split(start, end):
            assert byte_range.stop is not None, "a range of a kept log has an end"
            for first, last in self._candidates.get((byte_range.epoch, byte_range.file), ()):
                begin, stop = max(first, byte_range.start), min(last, byte_range.stop)
                if begin < stop:
                    yield replace(byte_range, start=begin, stop=stop, aligned=True)

    @functools.cached_property
    def _candidates(self) -> dict[tuple[int, str], list[tuple[int, int]]]:
        ranges_by_file: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for segment in self._log.segments:
            with self._log.open_blocks(segment) as (_, blocks):
                ranges = candidate_ranges(blocks.records(), self._bit, segment.base, blocks.end)
            file_ranges = ranges_by_file.setdefault((segment.epoch, self._log.file_of(segment)), [])
            file_ranges += [(first, last) for first, last in ranges.tolist()]
        return ranges_by_file

    # --- What -------------------------------------------------------------------------------------

    def _apply_statement(self, statement: LoggedStatement) -> None:
        if self._table in statement.emptied | statement.created and self._table not in statement.unlogged:
            self._known = _Known()
            self.complete_since = statement.end
        elif self._table in statement.unlogged or statement.tables - {self._table} or statement.databases:
            # The statement may have moved or renamed rows from or to another table.
            self._known = _Known()
            self.complete_since = None

    def _apply(self, batch: Batch) -> None:
        rows, keys = self._keyed(batch)
        number = self._keep(self._known, rows, batch)
        absent = rows.column("_metadata").field("absent").to_pylist() if _is_partial(rows) else None
        replaced: tuple[int, dict[str, Any]] | None = None
        for row, (kind, key) in enumerate(zip(rows.column("_change_type").to_pylist(), keys, strict=True)):
            if kind in _BEFORE:
                # A deleted row needs no memory: its next change is an insert.
                replaced = self._known.take(key)
                continue
            earlier: dict[str, Any] = {}
            if absent is not None and kind == "update_postimage":
                # The postimage may lack columns, including columns of the key. Its preimage is in the
                # previous row.
                earlier = self._known.values(*replaced) if replaced is not None else {}
                earlier |= self._known.values(slot_of(number, row - 1), {})
                if absent[row] == absent[row - 1]:
                    # Columns that are missing in both images are never logged by the server, for example
                    # generated columns on MariaDB 11.8.9.
                    unlogged = set(absent[row] or ())
                    earlier = {name: value for name, value in earlier.items() if name not in unlogged}
                logged = self._known.values(slot_of(number, row), earlier)
                key = tuple(logged[name] for name in self.key)
            self._known.put(key, slot_of(number, row), earlier)
        self._show(rows.schema)
        self._prove_fits()

    def _apply_later(self, batch: Batch) -> None:
        rows, keys = self._keyed(batch)
        number = self._keep(self._later, rows, batch)
        before: _Key = ()
        for row, (kind, key) in enumerate(zip(rows.column("_change_type").to_pylist(), keys, strict=True)):
            if kind in _BEFORE:
                before = key
                if self._later.is_absent(key):
                    # The row was inserted after the moment. Once it is deleted, its next change is an insert
                    # again.
                    self._later.take(key)
                elif key not in self._known and key not in self._later:
                    self._later.put(key, slot_of(number, row))
                continue
            if kind == "update_postimage":
                # A key column that was not logged has its previous value.
                key = tuple(old if new is None else new for old, new in zip(before, key, strict=True))
            if key not in self._known and key not in self._later:
                self._later.put(key, _ABSENT)
        if self.schema is None:
            self._show(rows.schema)
        self._prove_fits()

    def _keep(self, known: _Known, rows: pyarrow.RecordBatch, batch: Batch) -> int:
        """Keep a batch, and return its number. Raises LimitExceeded."""
        if self._known.bytes + self._later.bytes + batch_bytes(rows) > AS_OF_BYTES_MAX:
            self._known.compact()
            self._later.compact()
            # Without this margin, every further batch would cause another compaction.
            self._prove_fits(AS_OF_BYTES_MAX - AS_OF_BYTES_MAX // 8)
        number = known.add(rows, batch.position.epoch)
        self._prove_fits()
        return number

    def _prove_fits(self, bytes_max: int | None = None) -> None:
        """Raise LimitExceeded if the rows need more memory than one request may use."""
        if self._known.bytes + self._later.bytes > (bytes_max or AS_OF_BYTES_MAX):
            raise LimitExceeded(
                f"the rows of {self._table} that the log has changed need more than {AS_OF_BYTES_MAX} bytes",
                hint="Read the changes up to the position instead: a pipeline with a sink, or read_binlog",
            )

    def _keyed(self, batch: Batch) -> tuple[pyarrow.RecordBatch, list[_Key]]:
        """Return the rows of a batch, and the key of each."""
        if not batch.primary_key:
            raise OptionInvalid(
                f"{self._table} has no primary key, so its rows cannot be told apart",
                hint="Read its changes instead: penstock inspect",
            )
        masked = [name for name in batch.primary_key if name.casefold() in self._masked]
        if masked:
            raise AccessDenied(f"the key of {self._table} has the column {masked[0]}, which is masked")
        rows = batch.to_arrow()
        reserved = [column.name for column in batch.columns if column.name in _SYSTEM]
        if reserved:
            raise OptionInvalid(
                f"{self._table} has a column {reserved[0]}, and so have its changes",
                hint="Rename the column: no name of a system column can be read as one of the table",
            )
        self._follow_key(batch.primary_key, rows.schema)
        keys = python_rows(rows.select(list(self.key)))
        columns = [[key[name] for key in keys] for name in self.key]
        unrepresentable = rows.column("_metadata").field("unrepresentable")
        if unrepresentable.null_count < len(unrepresentable):
            # Arrow cannot represent these key values and has null for them, so the server's text
            # distinguishes their rows.
            for row, texts in enumerate(unrepresentable.to_pylist()):
                for name, text in texts or ():
                    if name in self.key:
                        columns[self.key.index(name)][row] = text
        return rows, list(zip(*columns, strict=True))

    def _follow_key(self, key: tuple[str, ...], schema: pyarrow.Schema) -> None:
        """Adopt the primary key of the next rows.

        If the primary key changed, known rows are stored under the new key. If a known row is missing a
        column of the new key, or has the column with a different type, all known rows are discarded.
        """
        types = tuple(schema.field(name).type for name in key)
        was_changed = self.key and (self.key, self._key_types) != (key, types)
        self.key, self._key_types = key, types
        if was_changed and not self._rekey():
            self._known = _Known()
            self.complete_since = None

    def _rekey(self) -> bool:
        """Store the known rows under the current primary key; return whether all have a key."""
        keys: dict[_Key, _Key] = {}
        for old, values, schema in self._known.items():
            for name, kind in zip(self.key, self._key_types, strict=True):
                if values.get(name) is None or not _has_same_values(schema.field(name).type, kind):
                    return False
            keys[old] = tuple(values[name] for name in self.key)
        self._known.rekey(keys)
        return True

    def _show(self, schema: pyarrow.Schema) -> None:
        """Set the columns of the result to those of a batch."""
        logged = [column for column in schema if column.name not in _SYSTEM]
        self.logged_columns = tuple(column.name for column in logged)
        self.schema = pyarrow.schema(
            [column.remove_metadata() for column in logged if column.name.casefold() not in self._masked]
        )

    def _row(self, image: dict[str, Any], epoch: int, earlier: dict[str, Any], *, is_later: bool) -> RowAsOf:
        values = {**earlier, **logged_values(image)}
        return RowAsOf(
            {name: values[name] for name in self.columns if name in values},
            tuple(name for name in self.columns if name not in values),
            Position(epoch, image["_metadata"]["file"], image["_metadata"]["offset"]),
            int(image["_commit_timestamp"].timestamp() * 1_000_000),
            is_later,
        )


def _is_partial(rows: pyarrow.RecordBatch) -> bool:
    """Return whether columns of some images were not logged."""
    absent = rows.column("_metadata").field("absent")
    return bool(absent.null_count < len(absent))


def _has_same_values(kind: pyarrow.DataType, other: pyarrow.DataType) -> bool:
    """Return whether a value has the same Python form when its column has the other type."""
    return bool(kind == other or (pyarrow.types.is_integer(kind) and pyarrow.types.is_integer(other)))
