# SPDX-License-Identifier: Apache-2.0
"""The history of a row: every change of it in a kept log, newest first.

    index of each segment ─▶ blocks that may change the table ─▶ ranges of whole transactions, newest first
                          ─▶ search the images for the key's bytes ─▶ transactions that may have the row
                          ─▶ decode the key columns only ─▶ transactions with the key ─▶ decode all columns

The index rules out most of a log, and searching for the bytes rules out most of the rest, so that few values
are decoded.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from zlib import crc32

import numpy
import numpy.typing as npt
import pyarrow
import pyarrow.compute as compute

from penstock._native import RowSearch
from penstock.durations import duration_text
from penstock.errors import AccessDenied, OptionInvalid, SchemaUnknown, StreamError
from penstock.limits import MIB
from penstock.logstore.reader import LogReader
from penstock.logstore.records import COVERS_XA_COMMITS, Records, SegmentRecord
from penstock.model import Position, TableName, TablePatterns
from penstock.schema.proof import columns_of
from penstock.schema.statements.secrets import without_secrets
from penstock.source.key_text import key_scalar
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import Batch, LoggedStatement, Selection, read_in_order
from penstock.source.source import ByteRange, Source

# Decoding mostly releases the GIL, so two threads decode at the same time.
_THREADS = 2
# The number of ranges that are decoded ahead.
_AHEAD = 2 * _THREADS
# The sizes of the pieces into which ranges are cut for decoding. The first pieces are small, so that the
# newest changes appear soon.
_RANGE_BYTES_FIRST, _RANGE_BYTES_MAX = 2 * MIB, 32 * MIB
# Ranges with a smaller gap than this are joined: reading the gap costs less than beginning another range.
_GAP_BYTES_MAX = MIB // 2

_SYSTEM = ("_change_type", "_commit_version", "_commit_timestamp", "_metadata")
_PREIMAGE, _POSTIMAGE = "update_preimage", "update_postimage"


@dataclass(frozen=True)
class RowChange:
    """A change of the row: `before` and `after` contain its logged columns, or None where the row did not
    exist.

    With a partial `binlog_row_image`, an image contains only some of the columns. `change` is insert, update
    or delete. `position` is the position of the rows event, `time_us` the commit time in microseconds since
    1970, UTC.
    """

    change: str
    time_us: int
    commit_version: int
    position: Position
    gtid: str | None
    server_id: int
    thread_id: int | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass(frozen=True)
class TableStatement:
    """A statement that defined, renamed, dropped or emptied the table. Emptying deletes the row without
    logging it.
    """

    position: Position
    text: str
    empties: bool


@dataclass(frozen=True)
class Unreadable:
    """A part of the log that cannot be read. Changes of the row after `position` may be missing."""

    start: Position
    end: Position
    problem: StreamError


@dataclass(frozen=True)
class Progress:
    """How much of the log has been searched, in bytes. The total excludes the parts that the index ruled
    out.
    """

    searched_bytes: int
    candidate_bytes: int
    log_bytes: int


# Ranges as pairs of start and end offsets, in ascending order.
Ranges = npt.NDArray[numpy.int64]
_NO_RANGES: Ranges = numpy.empty((0, 2), numpy.int64)

HistoryPart = RowChange | TableStatement | Unreadable | Progress


@dataclass(frozen=True)
class RowKey:
    """The row to search for: a table, and the text of each value of its key.

    `columns` names the columns of these values, by default the primary key. `masked` contains lower-case
    names of columns by which rows must not be searched. `prove_columns` raises an error if the table's
    columns at a log position cannot be used.
    """

    table: TableName
    values: tuple[str, ...]
    columns: tuple[str, ...] = ()
    masked: Container[str] = frozenset()
    prove_columns: Callable[[Sequence[str]], None] | None = None

    @property
    def may_be_masked(self) -> bool:
        """Whether columns of the table are masked. Then only its definition tells whether the key may be
        searched.
        """
        return bool(self.masked) or self.prove_columns is not None

    def columns_in(self, batch: Batch) -> tuple[str, ...]:
        """Return the columns of the key in a batch. Raises OptionInvalid, AccessDenied."""
        if self.prove_columns is not None:
            self.prove_columns([column.name for column in batch.columns])
        columns = self.columns or batch.primary_key
        if not columns:
            raise OptionInvalid(
                f"{self.table} has no primary key", hint="Name the columns: --column a --column b"
            )
        hidden = [name for name in columns if name.casefold() in self.masked]
        if hidden:
            # Searching by a masked column would reveal its values.
            raise AccessDenied(
                f"the key of {self.table} has the column {hidden[0]}, which is masked for this account",
                hint="Search by other columns: --column a --column b",
            )
        if len(columns) != len(self.values):
            raise OptionInvalid(
                f"the key of {self.table} is {', '.join(columns)}, and {len(self.values)} values are given",
                hint=f"Give a value for each of {', '.join(columns)}",
            )
        return columns

    def matches(self, rows: pyarrow.RecordBatch, columns: Sequence[str]) -> pyarrow.Array:
        """Return a mask of the rows that have the key. Raises OptionInvalid for a value that is invalid for
        the type of its column.
        """
        mask = None
        for column, text in zip(columns, self.values, strict=True):
            array = rows.column(column)
            equal = compute.fill_null(compute.equal(array, key_scalar(text, column, array.type)), False)
            mask = equal if mask is None else compute.and_(mask, equal)
        return mask


@dataclass
class _RangeResult:
    """The result of one range."""

    parts: list[HistoryPart] = field(default_factory=list)
    size: int = 0


@dataclass(frozen=True)
class _Candidates:
    """The ranges of a segment that may change the table, and the transaction boundaries that the segment's
    index lists.
    """

    segment: SegmentRecord
    ranges: Ranges
    boundaries: Any


class RowHistory:
    """Searches a log for one row. Iterate over `parts` once; closing the iterator ends the search.

    `open_source` opens another source over the same log, for use by a separate thread.
    """

    def __init__(self, log: LogReader, open_source: Callable[[], Source], key: RowKey) -> None:
        self._log = log
        self._open_source = open_source
        self._key = key
        self._bit = numpy.uint64(table_bit(key.table))
        self._stopping = threading.Event()
        self._sources: list[Source] = []
        self._own = threading.local()
        # Whether the log leaves out the names of the table's columns, so that table definitions are needed.
        self._needs_definitions = False

    def parts(self) -> Iterator[HistoryPart]:
        """Yield changes, statements on the table, unreadable parts and progress, newest first.

        The last change also comes first within a transaction. Raises OptionInvalid for a key that does not
        fit the table, and propagates errors from reading the log.
        """
        candidates = [self._candidates(segment) for segment in reversed(self._log.segments)]
        candidate_bytes = sum(int((each.ranges[:, 1] - each.ranges[:, 0]).sum()) for each in candidates)
        log_bytes = sum(extent.end - extent.start for extent in self._log.extents())
        ranges = self._byte_ranges(candidates)
        searched = 0
        yield Progress(0, candidate_bytes, log_bytes)
        pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="history")
        pending: deque[Future[_RangeResult]] = deque()
        try:
            for byte_range in ranges:
                pending.append(pool.submit(self._search, byte_range))
                if len(pending) > _AHEAD:
                    searched += yield from _deliver(pending.popleft().result())
                    yield Progress(searched, candidate_bytes, log_bytes)
            while pending:
                searched += yield from _deliver(pending.popleft().result())
                yield Progress(searched, candidate_bytes, log_bytes)
        finally:
            self._stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)
            for source in self._sources:
                source.close()

    def stop(self) -> None:
        """End the search soon. Can be called from any thread."""
        self._stopping.set()

    # --- The index ----------------------------------------------------------------------------

    def _candidates(self, segment: SegmentRecord) -> _Candidates:
        """Return the ranges of whole transactions in a segment that may change the table."""
        with self._log.open_blocks(segment) as (_, blocks):
            records, end = blocks.records(), blocks.end
        boundaries = records["last_boundary"].astype(numpy.int64)
        ranges = candidate_ranges(records, self._bit, segment.base, end)
        return _Candidates(segment, ranges, boundaries[boundaries > 0])

    def _byte_ranges(self, candidates: list[_Candidates]) -> Iterator[ByteRange]:
        sizes = _growing_sizes()
        for each in candidates:
            file = self._log.file_of(each.segment)
            for start, end in cut_newest_first(each.ranges, each.boundaries, sizes):
                yield ByteRange(each.segment.epoch, file, start, end, aligned=True)

    # --- The threads ------------------------------------------------------------------------------

    def _search(self, byte_range: ByteRange) -> _RangeResult:
        """Search a range for the key. Runs in a thread."""
        assert byte_range.stop is not None, "a range of a segment has an end"
        result = _RangeResult(size=byte_range.stop - byte_range.start)
        if self._stopping.is_set():
            return result
        try:
            for start, end in self._transactions(byte_range):
                transactions = replace(byte_range, start=start, stop=min(end, byte_range.stop))
                result.parts += self._decode(transactions)
        except StreamError as problem:
            result.parts.append(_unreadable(byte_range, problem))
        result.parts.reverse()
        return result

    def _transactions(self, byte_range: ByteRange) -> list[tuple[int, int]]:
        """Return the parts of a range whose transactions may change the row."""
        definition = self._definition_at(byte_range.position) if self._needs_definitions else None
        search = self._feed(byte_range, definition)
        if search.needs_definition and not self._needs_definitions:
            self._needs_definitions = True
            return self._transactions(byte_range)
        return search.finish()

    def _feed(self, byte_range: ByteRange, definition: Any) -> RowSearch:
        """Search the bytes of a range."""
        assert byte_range.stop is not None, "a range of a segment has an end"
        source, key = self._source(), self._key
        # Finding the bytes of a masked value would reveal it, so such a key is refused before any search.
        search = RowSearch(
            key.table.database,
            key.table.table,
            head=source.head_bytes(byte_range.file, byte_range.epoch),
            offset=byte_range.start,
            columns=key.columns,
            values=() if key.may_be_masked else key.values,
            definition=definition,
            gap_bytes=_GAP_BYTES_MAX,
        )
        left = byte_range.stop - byte_range.start
        for view in source.open(byte_range):
            search.feed(view[:left])
            left -= len(view)
            if left <= 0 or self._stopping.is_set():
                break
        return search

    def _definition_at(self, position: Position) -> Any:
        """Return the columns and the primary key of the table, None if they are unknown or in doubt."""
        table = self._key.table
        try:
            history = self._source().schema_history(position, table)
        except SchemaUnknown:
            return None
        if history is None or history.doubt(table):
            return None
        schema = history.schema(table.database, table.table)
        return None if schema is None else (columns_of(schema.columns), schema.primary_key)

    def _decode(self, byte_range: ByteRange) -> list[HistoryPart]:
        """Return, in commit order, the parts of the history whose transactions may contain the row."""
        parts: list[HistoryPart] = []
        columns = (*self._key.columns, *_SYSTEM[:1])
        try:
            if not any(self._is_match(part) for part in self._read(byte_range, columns)):
                return parts
        except StreamError:
            # Do not raise the error here. The second pass, which decodes all columns, raises it after the
            # changes that precede it.
            pass
        try:
            for part in self._read(byte_range, None):
                parts += self._changes(part)
        except StreamError as problem:
            parts.append(_unreadable(byte_range, problem))
        return parts

    def _source(self) -> Source:
        """Return the source of this thread."""
        source: Source | None = getattr(self._own, "source", None)
        if source is None:
            source = self._own.source = self._open_source()
            self._sources.append(source)
        return source

    def _read(
        self, byte_range: ByteRange, columns: tuple[str, ...] | None
    ) -> Iterator[Batch | LoggedStatement]:
        source = self._source()
        selection = Selection(TablePatterns([self._key.table.sql]), columns, with_keys=True)
        for part in read_in_order(source, byte_range, selection, LoggedTables(source)):
            if self._stopping.is_set():
                return
            yield part

    def _is_match(self, part: Batch | LoggedStatement) -> bool:
        if isinstance(part, LoggedStatement):
            return True
        rows = part.to_arrow()
        return bool(compute.any(self._key.matches(rows, self._key.columns_in(part))).as_py())

    def _changes(self, part: Batch | LoggedStatement) -> list[HistoryPart]:
        """Return the changes of the row in a batch, in commit order."""
        if isinstance(part, LoggedStatement):
            return [TableStatement(part.position, part.text, self._key.table in part.emptied)]
        rows = part.to_arrow()
        matching = self._key.matches(rows, self._key.columns_in(part)).to_numpy(zero_copy_only=False)
        chosen = numpy.flatnonzero(matching).tolist()
        return [change for _, change in changes_of_rows(rows, chosen, part.position.epoch)]


def _unreadable(byte_range: ByteRange, problem: StreamError) -> Unreadable:
    assert byte_range.stop is not None, "a range of a segment has an end"
    end = Position(byte_range.epoch, byte_range.file, byte_range.stop)
    return Unreadable(byte_range.position, end, problem)


def changes_of_rows(
    rows: pyarrow.RecordBatch, chosen: Iterable[int], epoch: int
) -> Iterator[tuple[int, RowChange]]:
    """Yield the changes of some rows of a batch, each with the row's index. `chosen` contains the indexes in
    ascending order.

    An update has both images, even if only one of them is chosen.
    """
    kinds = rows.column("_change_type")
    done = -1
    for row in chosen:
        if row <= done:
            # This row is the postimage of an update that was already yielded, because its preimage was
            # selected too.
            continue
        kind = kinds[row].as_py()
        first = row - 1 if kind == _POSTIMAGE else row
        done = first + 1 if kind in (_PREIMAGE, _POSTIMAGE) else row
        yield row, _change(python_rows(rows.slice(first, done - first + 1)), epoch)


def table_bit(table: TableName) -> int:
    """Return the bit of a table in the records of blocks; see `native/kernel/src/blocks/tables.rs`."""
    return 1 << (crc32(f"{table.database}.{table.table}".encode()) & 63)


def candidate_ranges(records: Records, bit: Any, base: int, end: int) -> Ranges:
    """Return the ranges of whole transactions in [base, end) that may change a table, in order.

    A block's record has the bits of the tables that are announced in the block. Rows of these tables may
    follow in later blocks of the same transaction, so a range continues to the next transaction boundary. The
    part of the log after the last record has no bits yet and is always included.
    """
    if not len(records):
        return numpy.array([[base, end]], numpy.int64) if base < end else _NO_RANGES
    is_old = (records["flags"] & COVERS_XA_COMMITS) == 0
    hits = numpy.flatnonzero(((records["tables"] & bit) != 0) | is_old)
    boundaries = records["last_boundary"].astype(numpy.int64)
    starts = numpy.maximum(records["transaction_start"][hits].astype(numpy.int64), base)
    # A transaction that is open at the end of a block ends in the next block that has a boundary.
    ending = numpy.flatnonzero(boundaries > 0)
    ends = numpy.append(boundaries[ending], end)
    later = ends[numpy.searchsorted(ending, hits + 1)]
    is_whole = boundaries[hits] == records["source_end"][hits].astype(numpy.int64)
    stops = numpy.minimum(numpy.where(is_whole, boundaries[hits], later), end)
    if int(records["source_end"][-1]) < end:
        starts = numpy.append(starts, boundaries[ending[-1]] if len(ending) else base)
        stops = numpy.append(stops, end)
    return _merged(starts, stops)


def _merged(starts: Any, stops: Any) -> Ranges:
    """Return ranges in ascending order, joined where the gap between them is small."""
    if not len(starts):
        return _NO_RANGES
    reached = numpy.maximum.accumulate(stops)
    begins = numpy.append(True, starts[1:] > reached[:-1] + _GAP_BYTES_MAX)
    first = numpy.flatnonzero(begins)
    last = numpy.append(first[1:], len(starts)) - 1
    return numpy.stack([starts[first], reached[last]], axis=1)


def cut_newest_first(ranges: Ranges, boundaries: Any, sizes: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges from last to first, cut at boundaries into pieces of about the given sizes."""
    for start, end in ranges[::-1].tolist():
        while start < end:
            wanted = end - next(sizes)
            index = int(numpy.searchsorted(boundaries, wanted, side="right")) - 1
            cut = int(boundaries[index]) if index >= 0 and wanted > start else start
            cut = max(cut, start)
            yield cut, end
            end = cut


def _growing_sizes() -> Iterator[int]:
    size = _RANGE_BYTES_FIRST
    while True:
        yield size
        size = min(size * 2, _RANGE_BYTES_MAX)


def _deliver(result: _RangeResult) -> Generator[HistoryPart, None, int]:
    """Yield the parts that were found in a range, and return the size of the range."""
    yield from result.parts
    return result.size


def _change(images: list[dict[str, Any]], epoch: int) -> RowChange:
    """Return the change of one or two adjacent rows of a batch."""
    last = images[-1]
    kind, metadata = last["_change_type"], last["_metadata"]
    values = [logged_values(image) for image in images]
    is_update = kind in (_PREIMAGE, _POSTIMAGE)
    return RowChange(
        "update" if is_update else kind,
        int(last["_commit_timestamp"].timestamp() * 1_000_000),
        last["_commit_version"],
        Position(epoch, metadata["file"], metadata["offset"]),
        metadata["gtid"],
        metadata["server_id"],
        metadata["thread_id"],
        before=values[0] if is_update or kind == "delete" else None,
        after=values[-1] if is_update or kind == "insert" else None,
    )


def python_rows(rows: pyarrow.RecordBatch) -> list[dict[str, Any]]:
    """Return rows as values of Python. A FLOAT has its shortest digits: 1.1, not 1.100000023841858."""
    for index, column in enumerate(rows.schema):
        wide = _widened(column.type)
        if wide is not None:
            texts = rows.column(index).cast(_widened(column.type, pyarrow.string()))
            rows = rows.set_column(index, column.name, texts.cast(wide))
    values: list[dict[str, Any]] = rows.to_pylist()
    return values


def _widened(kind: pyarrow.DataType, single: pyarrow.DataType | None = None) -> pyarrow.DataType | None:
    """Return a type with 32-bit floats replaced by another type; None if the type has no 32-bit floats."""
    single = single or pyarrow.float64()
    if kind == pyarrow.float32():
        return single
    is_vector = pyarrow.types.is_list(kind) and kind.value_type == pyarrow.float32()
    return pyarrow.list_(single) if is_vector else None


def logged_values(image: dict[str, Any]) -> dict[str, Any]:
    """Return the logged columns of a row, with the server's text for values that Arrow cannot represent."""
    unrepresentable = dict(image["_metadata"]["unrepresentable"] or ())
    unlogged = {*_SYSTEM, *(image["_metadata"]["absent"] or ())}
    return {
        column: unrepresentable.get(column, value)
        for column, value in image.items()
        if column not in unlogged
    }


# --- As JSON -----------------------------------------------------------------------------------------


def part_to_json(part: HistoryPart) -> dict[str, Any]:
    """Return a part of a history as plain JSON values; `kind` is its type."""
    match part:
        case RowChange():
            return {
                "kind": "change",
                "change": part.change,
                "time_us": part.time_us,
                "commit_version": part.commit_version,
                "position": str(part.position),
                "gtid": part.gtid,
                "server_id": part.server_id,
                "thread_id": part.thread_id,
                "before": plain_value(part.before),
                "after": plain_value(part.after),
            }
        case TableStatement():
            return {
                "kind": "statement",
                "position": str(part.position),
                "text": without_secrets(part.text),
                "empties": part.empties,
            }
        case Unreadable():
            return {
                "kind": "unreadable",
                "start": str(part.start),
                "end": str(part.end),
                "error": type(part.problem).__name__,
                "why": part.problem.message,
                "position": part.problem.position,
                "hint": part.problem.hint,
            }
        case Progress():
            return {
                "kind": "progress",
                "searched_bytes": part.searched_bytes,
                "candidate_bytes": part.candidate_bytes,
                "log_bytes": part.log_bytes,
            }


def plain_value(values: Any) -> Any:
    """Return values in JSON types: bytes as 0x and hexadecimal digits, times and decimals as text."""
    match values:
        case None | bool() | int() | str():
            return values
        case float():
            return values if math.isfinite(values) else str(values)
        case bytes():
            return f"0x{values.hex()}"
        case dict():
            return {name: plain_value(value) for name, value in values.items()}
        case list():
            return [plain_value(value) for value in values]
        case datetime():
            return values.isoformat(sep=" ")
        case timedelta():
            return duration_text(values)
        case _:
            return str(values)
