# SPDX-License-Identifier: Apache-2.0
"""A table cut into chunks by its own key, whatever its values and however they lie.

A table is cut where the server's own index says that rows are: a range with too many is divided at a key
that it has, and each part is estimated by the dives that the optimizer makes for EXPLAIN. So a plan costs a
few index look-ups for each chunk and reads no rows, and neither gaps nor clusters of keys matter. Estimates
decide how large chunks become, never which rows they hold: ranges touch, and the outer ones have no end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from penstock.changes import Target
from penstock.errors import SchemaChanged, SchemaInvalid
from penstock.limits import CHUNK_ROWS
from penstock.model import ServerAddress, TableName, quote_name
from penstock.pipeline.load.keys import KeyColumn
from penstock.pipeline.load.session import LoadSession, open_session

# A range is left whole where it passes the wish by no more: estimates are no finer.
_SLACK = 1.5
# Where a cut is looked for: in the middle, then further out.
_SHARES = (0.5, 0.25, 0.75, 0.0625, 0.9375)
# Estimates that are wrong by so much are of no more use: statistics may be old, or never have been made.
_WRONG_BY = 3
# So many cuts for each wished-for chunk may fall where no rows are gained by them.
_CUTS_PER_CHUNK_MAX = 8
_CUTS_MIN = 64


@dataclass(frozen=True)
class Chunk:
    """Rows of a table between two keys. Pickles.

    `key` names the columns by which the table is cut, those of the index `index`; () where it has no key,
    and then there is one chunk. `low` (inclusive) and `high` (exclusive) are values of those columns as SQL
    literals, None where there is no bound. `rows` is the server's estimate, `number` counts a table's
    chunks from 0.
    """

    table: TableName
    key: tuple[str, ...] = ()
    low: tuple[str, ...] | None = None
    high: tuple[str, ...] | None = None
    index: str = ""
    rows: int = 0
    number: int = 0

    @property
    def condition(self) -> str:
        """The chunk's rows as an SQL condition, "" for all."""
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
                return cls(name, columns, bounds[0], bounds[1], index, rows, number)
        raise SchemaInvalid("a chunk has table, key, low, high, index, rows and number")


def at_or_after(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the condition that a key is not before these values; names are quoted, values literals."""
    return _beside(">", ">=", names, values)


def after(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the condition that a key is behind these values."""
    return _beside(">", ">", names, values)


def before(names: Sequence[str], values: Sequence[str]) -> str:
    """Return the condition that a key is before these values."""
    return _beside("<", "<", names, values)


def _beside(sign: str, last_sign: str, names: Sequence[str], values: Sequence[str]) -> str:
    """Compare column by column, in words of which every optimizer makes ranges of an index."""
    name, value = names[0], values[0]
    if len(values) == 1:
        return f"{name} {last_sign} {value}"
    rest = _beside(sign, last_sign, names[1:], values[1:])
    return f"{name} {sign} {value} OR ({name} = {value} AND ({rest}))"


def within(names: Sequence[str], low: Sequence[str] | None, high: Sequence[str] | None) -> str:
    """Return the condition of keys from `low` on and before `high`, "" without either bound."""
    front = 0
    if low is not None and high is not None:
        # What both share is an equation, which narrows the index at once.
        while front < min(len(low), len(high)) - 1 and low[front] == high[front]:
            front += 1
    parts = [f"{name} = {value}" for name, value in zip(names[:front], (low or ())[:front], strict=True)]
    if low is not None:
        parts.append(at_or_after(names[front:], low[front:]))
    if high is not None:
        parts.append(before(names[front:], high[front:]))
    return " AND ".join(f"({part})" for part in parts)


def bound_values(target: Target, chunk: Chunk) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return a chunk's bounds as Python values by column: low (inclusive) and high (exclusive), None for
    none."""
    columns = [KeyColumn(target.column(name)) for name in chunk.key]

    def values(bound: tuple[str, ...] | None) -> dict[str, Any] | None:
        if bound is None:
            return None
        return {one.column.name: one.value(text) for one, text in zip(columns, bound, strict=True)}

    return values(chunk.low), values(chunk.high)


def plan_chunks(address: ServerAddress, target: Target, *, rows: int = CHUNK_ROWS) -> list[Chunk]:
    """Cut a table into chunks of about `rows` rows, in the order of its key; at least one.

    The key is the primary one, else a unique one without nulls; a table without either is one chunk, whose
    rows nothing tells apart. Costs a few index look-ups for each chunk. Raises SchemaChanged where the
    table is gone or its key another one, and what `connect` raises.
    """
    with open_session(address) as session:
        return plan_over(session, target, rows=rows)


def plan_over(session: LoadSession, target: Target, *, rows: int = CHUNK_ROWS) -> list[Chunk]:
    """The same over a session at hand."""
    index, key = _chunk_key(session, target)
    columns = [KeyColumn(target.column(name)) for name in key]
    if not key or not all(column.is_ordered for column in columns):
        return [Chunk(target.name, rows=_table_rows(session, target.name))]
    planner = _Planner(session, target.name, index, columns, rows)
    return [replace(chunk, number=number) for number, chunk in enumerate(planner.chunks())]


_INDEXES = """
SELECT s.* FROM information_schema.STATISTICS s
WHERE s.TABLE_SCHEMA = %s AND s.TABLE_NAME = %s AND s.NON_UNIQUE = 0 AND s.INDEX_TYPE = 'BTREE'
ORDER BY s.INDEX_NAME <> 'PRIMARY', s.INDEX_NAME, s.SEQ_IN_INDEX"""


def _chunk_key(session: LoadSession, target: Target) -> tuple[str, tuple[str, ...]]:
    """Return the name and the columns of the index to cut by; "" and () where there is none."""
    indexes: dict[str, list[dict[str, Any]]] = {}
    for row in session.query(_INDEXES, target.name.database, target.name.table):
        indexes.setdefault(str(row["INDEX_NAME"]), []).append(row)
    for name, parts in indexes.items():
        if not all(_is_whole(part) for part in parts):
            continue
        columns = tuple(str(part["COLUMN_NAME"]) for part in parts)
        if not set(columns) <= set(target.column_names):
            raise SchemaChanged(
                f"the key {name} of {target.name} has other columns than before: {', '.join(columns)}",
                hint="The table was altered since its load was planned. Run: penstock resnapshot",
            )
        return name, columns
    return "", ()


def _is_whole(part: dict[str, Any]) -> bool:
    """Tell whether a part of an index is a whole column that is never null, and the optimizer may use it."""
    # MySQL calls an index invisible, MariaDB ignored; older ones have neither.
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
    """Keys from `low`, which is one of the table's, to `last`, which is one as well, before `high`."""

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
        self._wish = max(rows, 1)
        self._cuts = 0

    def chunks(self) -> list[Chunk]:
        whole = Chunk(self._table, tuple(one.column.name for one in self._columns), index=self._index)
        low, last = self._key("", "ASC"), self._key("", "DESC")
        if low is None or last is None:
            return [whole]
        rows = self._rows(None, None)
        self._cuts = _CUTS_MIN + _CUTS_PER_CHUNK_MAX * (rows // self._wish)
        ranges = list(self._merged(self._divided(_Range(low, last, None, rows))))
        if not self._is_believable(ranges):
            ranges = list(self._walked(low, last))
        found = [replace(whole, low=one.low, high=one.high, rows=one.rows) for one in ranges]
        # Rows may appear in front of the first.
        found[0] = replace(found[0], low=None)
        return found

    def _is_believable(self, ranges: Sequence[_Range]) -> bool:
        """Tell whether the range in the middle has no more rows than it may, by going through that many."""
        one = ranges[len(ranges) // 2]
        rows = int(max(self._wish * _SLACK, one.rows) * _WRONG_BY)
        return self._key(within(self._names, one.low, one.high), "ASC", offset=rows) is None

    def _walked(self, low: tuple[str, ...], last: tuple[str, ...]) -> Iterator[_Range]:
        """Yield ranges by going through the index from end to end, where nothing else tells how it lies."""
        while True:
            high = self._key(at_or_after(self._names, low), "ASC", offset=self._wish)
            yield _Range(low, last, high, self._wish)
            if high is None or high == low:
                return
            low = high

    def _divided(self, whole: _Range) -> Iterator[_Range]:
        """Yield ranges of about the wished-for size, in order."""
        waiting = [whole]
        while waiting:
            one = waiting.pop()
            parts = self._halves(one) if one.rows > self._wish * _SLACK and self._cuts > 0 else None
            if parts is None:
                yield one
            else:
                waiting += reversed(parts)

    def _merged(self, ranges: Iterator[_Range]) -> Iterator[_Range]:
        """Join neighbours that are small: clusters leave crumbs between them."""
        held: _Range | None = None
        for one in ranges:
            if held is not None and held.rows + one.rows <= self._wish:
                held = _Range(held.low, one.last, one.high, held.rows + one.rows)
                continue
            if held is not None:
                yield held
            held = one
        if held is not None:
            yield held

    def _halves(self, one: _Range) -> tuple[_Range, _Range] | None:
        """Cut a range at one of its keys; None where none is found."""
        cut = self._cut(one)
        if cut is None:
            return None
        last = self._key(within(self._names, one.low, cut), "DESC")
        if last is None:
            # Its rows were deleted meanwhile.
            last = one.low
        return (
            _Range(one.low, last, cut, self._rows(one.low, cut)),
            _Range(cut, one.last, one.high, self._rows(cut, one.high)),
        )

    def _cut(self, one: _Range) -> tuple[str, ...] | None:
        """Return a key of the range behind its first one."""
        place = next(
            (at for at, pair in enumerate(zip(one.low, one.last, strict=True)) if len({*pair}) > 1), None
        )
        if place is None:
            return None
        first, last = one.low[place], one.last[place]
        for share in _SHARES:
            self._cuts -= 1
            probe = self._columns[place].between(first, last, share)
            if probe is None:
                continue
            bounds = within(self._names, (*one.low[:place], probe), one.high)
            found = self._key(f"({at_or_after(self._names, one.low)}) AND {bounds}", "ASC")
            if found is not None and found != one.low:
                return found
        # Nobody knows how the server orders these: a chunk's rows are counted.
        found = self._key(within(self._names, one.low, one.high), "ASC", offset=self._wish)
        return found if found != one.low else None

    def _key(self, condition: str, direction: str, offset: int = 0) -> tuple[str, ...] | None:
        """Return the first or last key of a range as literals, `offset` rows from its end."""
        asked = ", ".join(f"{column.asked} AS k{at}" for at, column in enumerate(self._columns))
        order = ", ".join(f"{name} {direction}" for name in self._names)
        rows = self._session.query(
            f"SELECT {asked} FROM {self._from()}{_where(condition)} ORDER BY {order} LIMIT {offset}, 1"
        )
        if not rows:
            return None
        return tuple(column.literal(rows[0][f"k{at}"]) for at, column in enumerate(self._columns))

    def _rows(self, low: tuple[str, ...] | None, high: tuple[str, ...] | None) -> int:
        """Return the optimizer's estimate of a range. An index that is forced is not looked into."""
        condition = within(self._names, low, high)
        query = f"SELECT {', '.join(self._names)} FROM {self._from('USE')}{_where(condition)}"
        rows = self._session.query(f"EXPLAIN FORMAT=TRADITIONAL {query}")
        return sum(int(row["rows"] or 0) for row in rows)

    def _from(self, verb: str = "FORCE") -> str:
        return f"{self._table.sql} {verb} INDEX ({quote_name(self._index)})"


def _where(condition: str) -> str:
    return f" WHERE {condition}" if condition else ""
