# SPDX-License-Identifier: Apache-2.0
"""Cuts a table into chunks by its key, regardless of the key's type and distribution.

Cuts are made at existing keys: a range with too many rows is divided at a key from the server's index, and
the size of each part is estimated by the optimizer's index dives (EXPLAIN). A plan costs a few index lookups
per chunk and reads no rows, so neither gaps nor clusters of keys matter. Estimates only affect the size of
chunks. No row can be missed, because the ranges are contiguous and the outermost ranges are unbounded.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.changes import Target
from penstock.errors import SchemaChanged, SchemaInvalid, ServerUnsupported
from penstock.limits import CHUNK_ROWS
from penstock.model import ServerAddress, TableName, quote_name
from penstock.pipeline.load.keys import KeyColumn, order_of
from penstock.pipeline.load.session import LoadSession, open_session

# A range is not divided if it exceeds the wanted size by at most this factor; estimates are no more precise
# than that.
_SLACK = 1.5
# Positions at which to look for a cut: in the middle first, then further out.
_SHARES = (0.5, 0.25, 0.75, 0.0625, 0.9375)
# Estimates wrong by this factor are not usable. Statistics may be outdated or missing.
_WRONG_BY = 3
# The maximum number of cuts per wanted chunk. Cuts count even if they separate no rows, so the division ends.
_CUTS_PER_CHUNK_MAX = 8
_CUTS_MIN = 64


@dataclass(frozen=True)
class Chunk:
    """A chunk of a load: the rows of a table between two keys. Can be pickled.

    `key` contains the columns of the index `index`, by which the table is divided. It is () for a table
    without a key, which forms a single chunk. `low` (inclusive) and `high` (exclusive) are values of those
    columns as SQL literals, None if unbounded. `rows` is the server's estimate. `number` is the chunk's
    number within its table, from 0. `commit_ts` is when the load was planned on a TiDB cluster; all chunks of
    the load are read as of that time. `order` describes how the key orders rows. If the order changed, rows
    would belong to different chunks. It is "" without a key, and in plans written by earlier versions of
    Penstock.
    """

    table: TableName
    key: tuple[str, ...] = ()
    low: tuple[str, ...] | None = None
    high: tuple[str, ...] | None = None
    index: str = ""
    rows: int = 0
    number: int = 0
    commit_ts: int | None = None
    order: str = ""

    @property
    def condition(self) -> str:
        """The chunk's rows as an SQL condition, "" for all rows."""
        return within([quote_name(name) for name in self.key], self.low, self.high)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "table": [self.table.database, self.table.table],
            "key": list(self.key),
            "low": None if self.low is None else list(self.low),
            "high": None if self.high is None else list(self.high),
            "index": self.index,
            "rows": self.rows,
            "number": self.number,
            "order": self.order,
            **({} if self.commit_ts is None else {"commit_ts": self.commit_ts}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` wrote. Raises SchemaInvalid."""
        match value:
            case {
                "table": [str(database), str(table)],
                "key": list(key),
                "low": list() | None as low,
                "high": list() | None as high,
                "index": str(index),
                "rows": int(rows),
                "number": int(number),
            }:
                bounds = [None if bound is None else tuple(map(str, bound)) for bound in (low, high)]
                name, columns = TableName(database, table), tuple(map(str, key))
                timed_and_ordered = value.get("commit_ts"), value.get("order", "")
                return cls(name, columns, bounds[0], bounds[1], index, rows, number, *timed_and_ordered)
        raise SchemaInvalid("a chunk has table, key, low, high, index, rows and number")


def at_or_after(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the condition that a key is not before these values; the names are quoted, and the values are
    literals.
    """
    return _comparison(">", ">=", names, values)


def after(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the condition that a key is after these values."""
    return _comparison(">", ">", names, values)


def before(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the condition that a key is before these values."""
    return _comparison("<", "<", names, values)


def _comparison(sign: str, last_sign: str, names: Sequence[str], values: Sequence[str]) -> str:
    """Return a comparison column by column, in a form that every optimizer turns into index ranges."""
    name, value = names[0], values[0]
    if len(values) == 1:
        return f"{name} {last_sign} {value}"
    rest = _comparison(sign, last_sign, names[1:], values[1:])
    return f"{name} {sign} {value} OR ({name} = {value} AND ({rest}))"


def within(names: Sequence[str], low: Sequence[str] | None, high: Sequence[str] | None) -> str:
    """Return the condition for keys from `low` (inclusive) to `high` (exclusive), "" without bounds."""
    front = 0
    if low is not None and high is not None:
        # The common prefix becomes an equation, which narrows the index range at once.
        while front < min(len(low), len(high)) - 1 and low[front] == high[front]:
            front += 1
    parts = [f"{name} = {value}" for name, value in zip(names[:front], (low or ())[:front], strict=True)]
    if low is not None:
        parts.append(at_or_after(names[front:], low[front:]))
    if high is not None:
        parts.append(before(names[front:], high[front:]))
    return " AND ".join(f"({part})" for part in parts)


def bound_values(target: Target, chunk: Chunk) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return a chunk's bounds as Python values by column: low (inclusive) and high (exclusive).

    None if unbounded.
    """
    columns = [KeyColumn(target.column(name)) for name in chunk.key]

    def values(bound: tuple[str, ...] | None) -> dict[str, Any] | None:
        if bound is None:
            return None
        return {column.column.name: column.value(text) for column, text in zip(columns, bound, strict=True)}

    return values(chunk.low), values(chunk.high)


def plan_chunks(address: ServerAddress, target: Target, *, rows: int = CHUNK_ROWS) -> list[Chunk]:
    """Cut a table into chunks of about `rows` rows, in the order of its key; at least one chunk.

    The key is the primary key, else a unique key without nulls. A table without either is one chunk, because
    nothing identifies its rows. Costs a few index lookups per chunk. Raises SchemaChanged if the table was
    dropped or its key changed, and propagates errors from `connect`.
    """
    with open_session(address) as session:
        return plan_over(session, target, rows=rows)


def plan_over(
    session: LoadSession, target: Target, *, rows: int = CHUNK_ROWS, is_keyless: bool = False
) -> list[Chunk]:
    """Cut a table into chunks like `plan_chunks`, over an open session. A keyless table is one
    chunk."""
    index, parts = ("", []) if is_keyless else _chunk_key(session, target)
    columns = [KeyColumn(target.column(str(part["COLUMN_NAME"]))) for part in parts]
    if not columns or not all(column.is_ordered for column in columns):
        return [Chunk(target.name, rows=_table_rows(session, target.name))]
    planner = _Planner(session, target.name, index, columns, rows)
    order = _order(parts)
    return [replace(chunk, number=number, order=order) for number, chunk in enumerate(planner.chunks())]


def hold_order(session: LoadSession, chunk: Chunk) -> None:
    """Keep a table's definition unchanged until the session ends. The session must not have a transaction.

    Raises SchemaChanged if the table's key now orders rows differently than when the chunk was planned.
    """
    if not chunk.order:
        return
    if not session.tidb:
        session.begin()
        # Run an arbitrary statement on the table, because that takes a metadata lock. The read that follows
        # reports any problem with the table.
        with suppress(ServerUnsupported):
            session.query(f"SELECT 1 FROM {chunk.table.sql} LIMIT 0")
    order = _current_order(session, chunk)
    if order != chunk.order:
        raise SchemaChanged(
            f"{chunk.table} was altered while it was read: its rows were divided by {chunk.order}, and are"
            f" ordered by {order or 'no key'}",
            hint="Run the command again",
        )


def is_reordered(address: ServerAddress, chunk: Chunk) -> bool:
    """Return whether a table's key orders rows differently than when a chunk was planned."""
    with open_session(address) as session:
        return chunk.order not in ("", _current_order(session, chunk))


def _current_order(session: LoadSession, chunk: Chunk) -> str:
    """Return the order of a chunk's index as it is now, "" if the index is gone or cannot be used."""
    parts = _indexes(session, chunk.table).get(chunk.index, [])
    return _order(parts) if all(map(_is_whole, parts)) else ""


def _order(parts: Sequence[dict[str, Any]]) -> str:
    """Return how an index orders rows: its columns, and the properties that determine the order of each
    column's values.
    """
    return ", ".join(
        f"{quote_name(str(part['COLUMN_NAME']))} {order_of(str(part['COLUMN_TYPE']), part['COLLATION_NAME'])}"
        for part in parts
    )


_INDEXES = """
SELECT s.*, c.COLUMN_TYPE, c.COLLATION_NAME FROM information_schema.STATISTICS s
LEFT JOIN information_schema.COLUMNS c
ON c.TABLE_SCHEMA = %s AND c.TABLE_NAME = %s AND c.COLUMN_NAME = s.COLUMN_NAME
WHERE s.TABLE_SCHEMA = %s AND s.TABLE_NAME = %s AND s.NON_UNIQUE = 0 AND s.INDEX_TYPE = 'BTREE'
ORDER BY s.INDEX_NAME <> 'PRIMARY', s.INDEX_NAME, s.SEQ_IN_INDEX"""


def _indexes(session: LoadSession, table: TableName) -> dict[str, list[dict[str, Any]]]:
    """Return the parts of a table's unique indexes by name, the primary key first."""
    indexes: dict[str, list[dict[str, Any]]] = {}
    for row in session.query(_INDEXES, *(table.database, table.table) * 2):
        indexes.setdefault(str(row["INDEX_NAME"]), []).append(row)
    return indexes


def _chunk_key(session: LoadSession, target: Target) -> tuple[str, list[dict[str, Any]]]:
    """Return the name and the parts of the index to cut by; "" and [] if there is none."""
    for name, parts in _indexes(session, target.name).items():
        if not all(map(_is_whole, parts)):
            continue
        columns = [str(part["COLUMN_NAME"]) for part in parts]
        if not set(columns) <= set(target.column_names):
            raise SchemaChanged(
                f"the key {name} of {target.name} has other columns than before: {', '.join(columns)}",
                hint="The table was altered since its load was planned. Run: penstock resnapshot",
            )
        return name, parts
    return "", []


def _is_whole(part: dict[str, Any]) -> bool:
    """Return whether an index part is a whole column that is never null and usable by the optimizer."""
    # MySQL has invisible indexes, MariaDB has ignored indexes. Older servers have neither.
    usable = part.get("IS_VISIBLE", "YES") == "YES" and part.get("IGNORED", "NO") == "NO"
    return usable and part["COLUMN_NAME"] is not None and not part["SUB_PART"] and part["NULLABLE"] != "YES"


def _table_rows(session: LoadSession, name: TableName) -> int:
    rows = session.query(
        "SELECT TABLE_ROWS AS rows_estimated FROM information_schema.TABLES"
        " WHERE TABLE_SCHEMA = %s AND TABLE_NAME = %s",
        name.database,
        name.table,
    )
    return int(rows[0]["rows_estimated"] or 0) if rows else 0


@dataclass(frozen=True)
class _Range:
    """The keys from `low` to `last`, both of which exist in the table. Rows inserted later belong to the
    range if their keys are before `high`.
    """

    low: tuple[str, ...]
    last: tuple[str, ...]
    high: tuple[str, ...] | None
    rows: int


class _Planner:
    def __init__(
        self, session: LoadSession, table: TableName, index: str, columns: Sequence[KeyColumn], rows: int
    ) -> None:
        self._session = session
        self._table = table
        self._index = index
        self._columns = columns
        self._names = [column.sql for column in columns]
        self._wanted_rows = max(rows, 1)
        self._cuts = 0

    def chunks(self) -> list[Chunk]:
        whole = Chunk(self._table, tuple(column.column.name for column in self._columns), index=self._index)
        if (rows := self._rows_of_one_chunk()) is not None:
            return [replace(whole, rows=rows)]
        low, last = self._key("", "ASC"), self._key("", "DESC")
        if low is None or last is None:
            return [whole]
        ranges = self._estimated_ranges(low, last) or list(self._scan_ranges(low, last))
        chunks = [replace(whole, low=part.low, high=part.high, rows=part.rows) for part in ranges]
        # Leave the first chunk without a lower bound, because rows may be inserted before it.
        chunks[0] = replace(chunks[0], low=None)
        return chunks

    def _rows_of_one_chunk(self) -> int | None:
        """Return the estimated number of rows if, by this estimate, the table fits into one chunk; else None.
        Costs two statements.
        """
        if self._session.tidb or (rows := self._rows(None, None)) > self._wanted_rows * _SLACK:
            return None
        return rows if self._has_at_most("", rows) else None

    def _estimated_ranges(self, low: tuple[str, ...], last: tuple[str, ...]) -> list[_Range] | None:
        """Return ranges according to the optimizer's estimates; None if they are not usable."""
        if self._session.tidb:
            # Before a table is analyzed, TiDB estimates every range alike.
            return None
        rows = self._rows(None, None)
        self._cuts = _CUTS_MIN + _CUTS_PER_CHUNK_MAX * (rows // self._wanted_rows)
        ranges = list(self._merge_small(self._divide(_Range(low, last, None, rows))))
        return ranges if self._is_believable(ranges) else None

    def _is_believable(self, ranges: Sequence[_Range]) -> bool:
        """Check the estimated size of the middle range by reading as many index entries."""
        middle = ranges[len(ranges) // 2]
        return self._has_at_most(within(self._names, middle.low, middle.high), middle.rows)

    def _has_at_most(self, condition: str, estimate: int) -> bool:
        """Return whether a range has at most about as many rows as estimated, or at most as many as one chunk
        should have.
        """
        rows = int(max(self._wanted_rows * _SLACK, estimate) * _WRONG_BY)
        return self._key(condition, "ASC", offset=rows) is None

    def _scan_ranges(self, low: tuple[str, ...], last: tuple[str, ...]) -> Iterator[_Range]:
        """Yield ranges by scanning the whole index. Used if the estimates are not usable."""
        while True:
            high = self._key(at_or_after(self._names, low), "ASC", offset=self._wanted_rows)
            yield _Range(low, last, high, self._wanted_rows)
            if high is None or high == low:
                return
            low = high

    def _divide(self, whole: _Range) -> Iterator[_Range]:
        """Yield ranges of about the wanted size, in order."""
        waiting = [whole]
        while waiting:
            candidate = waiting.pop()
            parts = (
                self._halves(candidate)
                if candidate.rows > self._wanted_rows * _SLACK and self._cuts > 0
                else None
            )
            if parts is None:
                yield candidate
            else:
                waiting += reversed(parts)

    def _merge_small(self, ranges: Iterator[_Range]) -> Iterator[_Range]:
        """Join small adjacent ranges, which remain between clusters."""
        pending: _Range | None = None
        for key_range in ranges:
            if pending is not None and pending.rows + key_range.rows <= self._wanted_rows:
                pending = _Range(pending.low, key_range.last, key_range.high, pending.rows + key_range.rows)
                continue
            if pending is not None:
                yield pending
            pending = key_range
        if pending is not None:
            yield pending

    def _halves(self, key_range: _Range) -> tuple[_Range, _Range] | None:
        """Cut a range at one of its keys; None if no cut is found."""
        cut = self._cut(key_range)
        if cut is None:
            return None
        last = self._key(within(self._names, key_range.low, cut), "DESC")
        if last is None:
            # The rows were deleted in the meantime.
            last = key_range.low
        return (
            _Range(key_range.low, last, cut, self._rows(key_range.low, cut)),
            _Range(cut, key_range.last, key_range.high, self._rows(cut, key_range.high)),
        )

    def _cut(self, key_range: _Range) -> tuple[str, ...] | None:
        """Return a key at which to cut the range, after its first key."""
        differing = next(
            (
                index
                for index, pair in enumerate(zip(key_range.low, key_range.last, strict=True))
                if len({*pair}) > 1
            ),
            None,
        )
        if differing is None:
            return None
        first, last = key_range.low[differing], key_range.last[differing]
        for share in _SHARES:
            self._cuts -= 1
            probe = self._columns[differing].between(first, last, share)
            if probe is None:
                continue
            bounds = within(self._names, (*key_range.low[:differing], probe), key_range.high)
            cut = self._key(f"({at_or_after(self._names, key_range.low)}) AND {bounds}", "ASC")
            if cut is not None and cut != key_range.low:
                return cut
        # The server's sort order is unknown, so count rows instead of interpolating keys.
        cut = self._key(within(self._names, key_range.low, key_range.high), "ASC", offset=self._wanted_rows)
        return cut if cut != key_range.low else None

    def _key(self, condition: str, direction: str, offset: int = 0) -> tuple[str, ...] | None:
        """Return the first or last key of a range as literals, `offset` rows from its end."""
        expressions = ", ".join(
            f"{column.select_expression} AS k{index}" for index, column in enumerate(self._columns)
        )
        order = ", ".join(f"{name} {direction}" for name in self._names)
        rows = self._session.query(
            f"SELECT {expressions} FROM {self._from()}{_where(condition)} ORDER BY {order} LIMIT {offset}, 1"
        )
        if not rows:
            return None
        return tuple(column.literal(rows[0][f"k{index}"]) for index, column in enumerate(self._columns))

    def _rows(self, low: tuple[str, ...] | None, high: tuple[str, ...] | None) -> int:
        """Return the optimizer's estimate for a range.

        Uses USE INDEX, because the optimizer makes no index dives for a forced index.
        """
        condition = within(self._names, low, high)
        query = f"SELECT {', '.join(self._names)} FROM {self._from('USE')}{_where(condition)}"
        rows = self._session.query(f"EXPLAIN FORMAT=TRADITIONAL {query}")
        return sum(int(row["rows"] or 0) for row in rows)

    def _from(self, verb: str = "FORCE") -> str:
        return f"{self._table.sql} {verb} INDEX ({quote_name(self._index)})"


def _where(condition: str) -> str:
    return f" WHERE {condition}" if condition else ""
