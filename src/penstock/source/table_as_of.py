# SPDX-License-Identifier: Apache-2.0
"""The rows of a table as they stood at a position, from a kept log alone.

    up to the position     the last change of each key: its image after, or the row is gone
    after the position     the first change of each other key: its image before, if the row was there

Rows that the kept log never changed are not in it and are not shown, unless a statement emptied the table
before the position: from there on, the log has them all. Changes that the server does not log, such as those
of foreign keys' actions, stay unknown. A statement that may move rows without logging them forgets what was
known.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
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
from penstock.source.row_history import candidate_ranges, logged_values, table_bit
from penstock.source.source import ByteRange
from penstock.source.transaction import find_by_gtid, prove_boundary
from penstock.source.walk import TransactionWalk

_SYSTEM = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")
_BEFORE = frozenset({"delete", "update_preimage"})

_Key = tuple[Any, ...]


@dataclass(frozen=True)
class RowAsOf:
    """A row: its known `values` by column, and the columns whose values the log does not have.

    `position` and `time_us` (commit time in microseconds UTC since 1970) are those of the change that shows
    it: the last one before the moment, or with `is_later` the first one after it.
    """

    values: dict[str, Any]
    missing: tuple[str, ...]
    position: Position
    time_us: int
    is_later: bool


@dataclass(frozen=True)
class _Reference:
    """A row of a batch that is kept, and values of earlier images that this one lacks."""

    batch: int
    row: int
    earlier: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Known:
    """What is known of the rows: those that are there, and the keys of those that are gone."""

    batches: list[tuple[pyarrow.RecordBatch, int]] = field(default_factory=list)
    rows: dict[_Key, _Reference | None] = field(default_factory=dict)
    bytes: int = 0

    def forget(self) -> None:
        """Forget every row."""
        self.batches.clear()
        self.rows.clear()
        self.bytes = 0

    def keep(self, rows: pyarrow.RecordBatch, epoch: int, table: TableName) -> int:
        """Keep a batch, and return its number. Raises LimitExceeded."""
        if self.bytes + rows.nbytes > AS_OF_BYTES_MAX:
            self._compact()
        self.bytes += rows.nbytes
        if self.bytes > AS_OF_BYTES_MAX:
            raise LimitExceeded(
                f"the rows of {table} that the log has changed need more than {AS_OF_BYTES_MAX} bytes",
                hint="Read the changes up to the position instead: a pipeline with a sink, or read_binlog",
            )
        self.batches.append((rows, epoch))
        return len(self.batches) - 1

    def _compact(self) -> None:
        """Keep only the rows that are still referred to."""
        wanted: dict[int, list[tuple[_Key, _Reference]]] = {}
        for key, reference in self.rows.items():
            if reference is not None:
                wanted.setdefault(reference.batch, []).append((key, reference))
        kept: list[tuple[pyarrow.RecordBatch, int]] = []
        for number, references in wanted.items():
            batch, epoch = self.batches[number]
            indices = pyarrow.array([reference.row for _, reference in references], pyarrow.int64())
            for row, (key, reference) in enumerate(references):
                self.rows[key] = replace(reference, batch=len(kept), row=row)
            kept.append((batch.take(indices), epoch))
        self.batches = kept
        self.bytes = sum(batch.nbytes for batch, _ in kept)


class TableAsOf:
    """Reads a log for one table at one moment. Call `read` once, then the other members.

    `is_complete` says whether the log has every logged row of the table, since it was emptied at
    `complete_since`.
    `columns` are those of the newest logged row at the moment, and `key` is the primary key.
    """

    def __init__(
        self, log: LogReader, source: KeptSource, table: TableName, masked: frozenset[str] = frozenset()
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

    @property
    def is_complete(self) -> bool:
        """Whether every row of the table at the moment is among the rows."""
        return self.complete_since is not None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows."""
        return () if self.schema is None else tuple(self.schema.names)

    def stop(self) -> None:
        """End the reading soon, from any thread."""
        self._stopping.set()

    def read(self, moment: str) -> None:
        """Read the log for a moment: a position, a GTID (after its transaction), or a time (before it).

        Raises OptionInvalid for a table without a primary key, AccessDenied if its key is masked,
        PositionInvalid inside a transaction, LimitExceeded, and the errors of the log.
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
            # What comes after a statement may be of another table with this name.
            if isinstance(part, LoggedStatement):
                break
            self._apply_later(part)

    def rows(self) -> Iterator[RowAsOf]:
        """Yield the rows, in the order of the changes that show them; those of later changes come last."""
        for known, is_later in ((self._known, False), (self._later, True)):
            wanted: dict[int, list[_Reference]] = {}
            for reference in known.rows.values():
                if reference is not None:
                    wanted.setdefault(reference.batch, []).append(reference)
            for number, references in sorted(wanted.items()):
                rows, epoch = known.batches[number]
                indices = pyarrow.array([reference.row for reference in references], pyarrow.int64())
                images = rows.take(indices).to_pylist()
                for reference, image in zip(references, images, strict=True):
                    yield self._row(image, epoch, reference.earlier, is_later=is_later)

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
        """Yield the ranges that may change the table, as the index knows them. Raises SequenceGap."""
        if start is not None and start == self._source.head():
            return
        if end is not None and end == self._source.earliest():
            return
        candidates = self._candidates()
        for byte_range in self._source.split(start, end):
            assert byte_range.stop is not None, "a range of a kept log has an end"
            for first, last in candidates.get((byte_range.epoch, byte_range.file), ()):
                begin, stop = max(first, byte_range.start), min(last, byte_range.stop)
                if begin < stop:
                    yield replace(byte_range, start=begin, stop=stop, aligned=True)

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
        if self._table in statement.emptied and self._table not in statement.unlogged:
            self._known.forget()
            self.complete_since = statement.end
        elif self._table in statement.unlogged or statement.tables - {self._table} or statement.databases:
            # It may have moved or renamed rows from or to another table.
            self._known.forget()
            self.complete_since = None

    def _apply(self, batch: Batch) -> None:
        rows, keys = self._keyed(batch)
        number = self._known.keep(rows, batch.position.epoch, self._table)
        absent = rows.column("_metadata").field("absent")
        is_partial = absent.null_count < len(absent)
        replaced: _Reference | None = None
        for row, (kind, key) in enumerate(zip(rows.column("_change_type").to_pylist(), keys, strict=True)):
            if kind in _BEFORE:
                replaced, self._known.rows[key] = self._known.rows.get(key), None
                continue
            earlier: dict[str, Any] = {}
            if is_partial and kind == "update_postimage":
                # The image after may lack columns, those of the key too; the image before is one row above.
                earlier = self._values(self._known, replaced) if replaced is not None else {}
                earlier |= self._values(self._known, _Reference(number, row - 1))
                logged = self._values(self._known, _Reference(number, row, earlier))
                key = tuple(logged[name] for name in self.key)
            self._known.rows[key] = _Reference(number, row, earlier)
        self.schema = self._shown_schema(rows)

    def _apply_later(self, batch: Batch) -> None:
        rows, keys = self._keyed(batch)
        number = self._later.keep(rows, batch.position.epoch, self._table)
        for row, (kind, key) in enumerate(zip(rows.column("_change_type").to_pylist(), keys, strict=True)):
            if key not in self._known.rows and key not in self._later.rows:
                self._later.rows[key] = _Reference(number, row) if kind in _BEFORE else None
        if self.schema is None:
            self.schema = self._shown_schema(rows)

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
        self._follow_key(batch.primary_key, rows.schema)
        columns = [rows.column(name).to_pylist() for name in self.key]
        unrepresentable = rows.column("_metadata").field("unrepresentable")
        if unrepresentable.null_count < len(unrepresentable):
            # Arrow has null for such values, so the server's text tells their rows apart.
            for row, texts in enumerate(unrepresentable.to_pylist()):
                for name, text in texts or ():
                    if name in self.key:
                        columns[self.key.index(name)][row] = text
        return rows, list(zip(*columns, strict=True))

    def _follow_key(self, key: tuple[str, ...], schema: pyarrow.Schema) -> None:
        """Take the primary key of the next rows. Once it was changed, known rows go by the new one.

        If one of them lacks a column of the new key, or has it with another type, all are forgotten.
        """
        types = tuple(schema.field(name).type for name in key)
        was_changed = self.key and (self.key, self._key_types) != (key, types)
        self.key, self._key_types = key, types
        if was_changed and not self._rekey():
            self._known.forget()
            self.complete_since = None

    def _rekey(self) -> bool:
        """Give the known rows the keys of the current primary key; return whether all have one."""
        rekeyed: dict[_Key, _Reference | None] = {}
        for reference in self._known.rows.values():
            if reference is None:
                continue
            schema = self._known.batches[reference.batch][0].schema
            values = self._values(self._known, reference)
            for name, kind in zip(self.key, self._key_types, strict=True):
                if values.get(name) is None or not _has_same_values(schema.field(name).type, kind):
                    return False
            rekeyed[tuple(values[name] for name in self.key)] = reference
        self._known.rows = rekeyed
        return True

    def _shown_schema(self, rows: pyarrow.RecordBatch) -> pyarrow.Schema:
        shown = [
            column
            for column in rows.schema
            if column.name not in _SYSTEM and column.name.casefold() not in self._masked
        ]
        return pyarrow.schema([column.remove_metadata() for column in shown])

    def _values(self, known: _Known, reference: _Reference) -> dict[str, Any]:
        (image,) = known.batches[reference.batch][0].slice(reference.row, 1).to_pylist()
        return {**reference.earlier, **logged_values(image)}

    def _row(self, image: dict[str, Any], epoch: int, earlier: dict[str, Any], *, is_later: bool) -> RowAsOf:
        values = {**earlier, **logged_values(image)}
        return RowAsOf(
            {name: values[name] for name in self.columns if name in values},
            tuple(name for name in self.columns if name not in values),
            Position(epoch, image["_metadata"]["file"], image["_metadata"]["offset"]),
            int(image["_commit_timestamp"].timestamp() * 1_000_000),
            is_later,
        )


def _has_same_values(kind: pyarrow.DataType, other: pyarrow.DataType) -> bool:
    """Return whether a value of one type equals the same value of the other."""
    return bool(kind == other or (pyarrow.types.is_integer(kind) and pyarrow.types.is_integer(other)))
