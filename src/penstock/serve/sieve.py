# SPDX-License-Identifier: Apache-2.0
"""What of a piece one subscriber gets: its shards, the kinds of change and the rows it wants, its columns.

All of it works on whole columns; what does not depend on the subscriber is worked out once for a piece.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import pyarrow
import pyarrow.compute as compute

from penstock.errors import OptionInvalid
from penstock.limits import SLOTS
from penstock.model import TableName
from penstock.serve.piece import TYPED
from penstock.serve.pieces import Piece, Pieces, View
from penstock.serve.predicate import Predicate
from penstock.source.reading import Batch
from penstock.source.sharding import (
    CHANGE_TYPE,
    POSTIMAGE,
    PREIMAGE,
    ShardedRows,
    preimages_of,
    sharded,
    slots_of,
)

SLOT_COLUMN = "_shard_slot"

# What `kind` of a message says of a change; from here on it is none.
_MESSAGE_KINDS = {"insert": 0, PREIMAGE: 1, POSTIMAGE: 1, "delete": 2}
_NO_CHANGE = 3

# Of each row or message, whether it passes.
_Mask = Any


@dataclass(frozen=True)
class ShardSet:
    """Some of a number of shards: a row belongs to shard `slot % count`."""

    count: int
    of: frozenset[int]
    _has: _Mask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.count < 1 or not self.of or not all(0 <= one < self.count for one in self.of):
            raise OptionInvalid(
                f"shards {sorted(self.of)} of {self.count} are none",
                hint="Name at least one shard, from 0 up to the count less one",
            )
        has = numpy.isin(numpy.arange(SLOTS + 1) % self.count, list(self.of))
        # Slot -1, the last one by its index, belongs to every shard.
        has[-1] = True
        object.__setattr__(self, "_has", has)

    def mask(self, slots: numpy.ndarray) -> _Mask:
        """Tell of each slot whether it is in one of the shards."""
        return self._has[slots]


@dataclass(frozen=True)
class Sifted:
    """Rows that passed: of one table in its own types, or messages.

    `moved` counts the updates among them that brought a row from another shard.
    """

    batch: Batch
    arrow: pyarrow.RecordBatch
    moved: int = 0


@dataclass(frozen=True)
class Sieve:
    """What one subscriber wants of the pieces of a view, which decodes enough for it: see `sieve_of`.

    An update passes whole, both images, where one of them passes `where`. One that moves a row to another
    shard is a delete and an insert, each of which passes by its own row. `changes` are those of `Selection`:
    there such an update is still one.
    """

    view: View
    shards: ShardSet | None = None
    where: Predicate | None = None
    changes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None

    @property
    def is_open(self) -> bool:
        """Whether everything passes as it is."""
        return self.shards is None and self.where is None and self.changes is None and self.columns is None

    @property
    def takes_parts(self) -> bool:
        """Whether a piece may come in parts: not where messages are sifted by rows decoded beside them."""
        return self.view.is_typed or self.where is None

    @property
    def _keeps_rows(self) -> bool:
        return self.where is None and self.changes is None

    def kept_bytes(self, piece: Piece) -> int:
        """Return how many bytes `sift` has made of a piece that stay with it, for all of the same shards."""
        parts = piece.derived.get(self._parts_key) if self._parts_key is not None else None
        return sum(part.rows.nbytes for part in parts) if parts is not None else 0

    @property
    def _parts_key(self) -> tuple[str, int] | None:
        """Under which name a piece keeps its rows part by part, None where they are not wanted so."""
        if self.shards is None or len(self.shards.of) != 1 or not self._keeps_rows or not self.view.is_typed:
            return None
        return "parts", self.shards.count

    async def passing(self, pieces: Pieces, piece: Piece) -> dict[str, _Mask]:
        """Return which changes of each table pass, for `sift`, where messages do not show it; else nothing.

        A message does not show its values, so the same stretch is decoded typed as well. Raises what
        `Pieces.at` raises.
        """
        if self.view.is_typed or self.where is None:
            return {}
        columns = tuple(sorted({*self.where.columns, CHANGE_TYPE}))
        view = View(TYPED, self.view.tables, columns, gtid_after=self.view.gtid_after)
        found: dict[str, list[_Mask]] = {}
        place = piece.start
        while place < piece.end:
            typed = await pieces.at(view, place, piece.end)
            assert typed is not None, "the messages were made of it"
            for at, (batch, arrow) in enumerate(zip(typed.batches, typed.arrow(), strict=True)):
                befores = _befores(typed)[at]
                mask = _whole_updates(self.where.passes(arrow), befores)
                found.setdefault(_plain_name(batch.table), []).append(mask[~befores])
            place = typed.end
        return {table: numpy.concatenate(masks) for table, masks in found.items()}

    def sift(self, piece: Piece, passing: dict[str, _Mask]) -> list[Sifted]:
        """Return what passes of a piece, without batches of which nothing does. Raises OptionInvalid.

        `passing` is what the method of that name returned. May be called in any thread.
        """
        if not self.view.is_typed:
            return self._sift_messages(piece, passing)
        if self.shards is not None and self._parts_key is not None:
            return self._own_parts(self.shards, self._parts_key, piece)
        found = []
        for at, (batch, arrow) in enumerate(zip(piece.batches, piece.arrow(), strict=True)):
            mask, dealt = None, None
            if self.changes is not None:
                wanted = pyarrow.array(self.changes)
                mask = compute.is_in(arrow.column(CHANGE_TYPE), wanted).to_numpy(False)
            if self.shards is not None:
                dealt = _sharded(piece, at, self.shards.count)
                arrow = dealt.rows
                mask = _both(mask, self.shards.mask(dealt.slots))
            if self.where is not None:
                befores = _befores(piece)[at] if dealt is None else dealt.preimages
                mask = _both(mask, _whole_updates(self.where.passes(arrow), befores))
            if mask is not None and not mask.any():
                continue
            moved = 0
            if dealt is not None:
                arrow = arrow.append_column(SLOT_COLUMN, pyarrow.array(dealt.slots))
                moved = len(dealt.moved) if mask is None else int(mask[dealt.moved].sum())
            if mask is not None and not mask.all():
                arrow = arrow.filter(pyarrow.array(mask))
            found.append(Sifted(batch, self._projected(arrow), moved))
        return found

    def _own_parts(self, shards: ShardSet, key: tuple[str, int], piece: Piece) -> list[Sifted]:
        """Return the rows of one shard: those of every shard are put side by side once, for all of them."""
        (shard,) = shards.of
        parts: list[_Parted] | None = piece.derived.get(key)
        if parts is None:
            parts = piece.derived[key] = [
                _parted(_sharded(piece, at, shards.count), shards.count) for at in range(len(piece.batches))
            ]
        found = []
        for batch, part in zip(piece.batches, parts, strict=True):
            begin, end = part.bounds[shard : shard + 2].tolist()
            if begin < end:
                rows = self._projected(part.rows.slice(begin, end - begin))
                found.append(Sifted(batch, rows, int(part.moved[shard])))
        return found

    def _projected(self, arrow: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
        if self.columns is None:
            return arrow
        shown = {*self.columns, SLOT_COLUMN}
        return arrow.select([name for name in arrow.schema.names if name in shown])

    def _sift_messages(self, piece: Piece, passing: dict[str, _Mask]) -> list[Sifted]:
        left = dict(passing)
        found = []
        for batch, arrow in zip(piece.batches, piece.arrow(), strict=True):
            mask = None
            kinds = arrow.column("kind").to_numpy()
            if self.shards is not None:
                mask = self.shards.mask(arrow.column("slot").to_numpy())
            if self.changes is not None:
                wanted = [_MESSAGE_KINDS[one] for one in self.changes]
                mask = _both(mask, numpy.isin(kinds, wanted) | (kinds >= _NO_CHANGE))
            if self.where is not None:
                mask = _both(mask, _messages_passing(arrow, kinds, left))
            if mask is not None and not mask.all():
                if not mask.any():
                    continue
                arrow = arrow.filter(pyarrow.array(mask))
            found.append(Sifted(batch, arrow))
        return found


def sieve_of(view: View, *, shards: ShardSet | None = None, where: Predicate | None = None) -> Sieve:
    """Return a sieve for what `view` asks for, with a view of its own that decodes what sifting needs."""
    if shards is None and where is None:
        if view.is_typed or view.changes is None:
            return Sieve(view)
        return Sieve(replace(view, changes=None), changes=view.changes)
    changes, columns = view.changes, view.columns
    if not view.is_typed:
        shared = replace(view, changes=None, message_per_row=True)
        return Sieve(shared, shards, where, changes)
    decoded_changes, left_changes = changes, None
    if changes is not None and (PREIMAGE in changes) != (POSTIMAGE in changes):
        # Which shard an update is in, and whether it passes, both images tell.
        decoded_changes, left_changes = tuple(sorted({*changes, PREIMAGE, POSTIMAGE})), changes
    decoded_columns = columns
    if columns is not None:
        needed = {CHANGE_TYPE, *(where.columns if where is not None else ())}
        if shards is not None:
            # It tells which columns an image in part lacks.
            needed.add("_metadata")
        decoded_columns = tuple(dict.fromkeys([*columns, *sorted(needed)]))
    shared = replace(view, changes=decoded_changes, columns=decoded_columns, with_keys=shards is not None)
    return Sieve(shared, shards, where, left_changes, columns)


def row_parts(arrow: pyarrow.RecordBatch, rows_max: int) -> Iterator[pyarrow.RecordBatch]:
    """Yield rows in parts of at most so many, none of which ends between an update's images: those are at
    least two.
    """
    befores = None
    if arrow.num_rows > rows_max and CHANGE_TYPE in arrow.schema.names:
        befores = preimages_of(arrow)
    begin = 0
    while begin < arrow.num_rows:
        end = min(begin + rows_max, arrow.num_rows)
        if befores is not None and end < arrow.num_rows and befores[end - 1] and not befores[end]:
            end += -1 if end - begin > 1 else 1
        yield arrow.slice(begin, end - begin)
        begin = end


def _both(one: _Mask | None, other: _Mask) -> _Mask:
    return other if one is None else one & other


def _befores(piece: Piece) -> Sequence[_Mask]:
    """Return for each batch which rows are the image before an update; the image after it follows."""
    found: Sequence[_Mask] | None = piece.derived.get("befores")
    if found is None:
        found = piece.derived["befores"] = [preimages_of(arrow) for arrow in piece.arrow()]
    return found


def _whole_updates(mask: _Mask, befores: _Mask) -> _Mask:
    """Return a mask in which both images of an update pass where one does."""
    (places,) = befores.nonzero()
    if not places.size:
        return mask
    whole = mask.copy()
    either = mask[places] | mask[places + 1]
    whole[places] = whole[places + 1] = either
    return whole


def _slots(piece: Piece) -> Sequence[numpy.ndarray]:
    """Return the slots of each batch's rows, by each row's own values."""
    found: list[numpy.ndarray] | None = piece.derived.get("slots")
    if found is None:
        found = piece.derived["slots"] = [
            slots_of(arrow, batch.key, _plain_name(batch.table), befores)
            for batch, arrow, befores in zip(piece.batches, piece.arrow(), _befores(piece), strict=True)
        ]
    return found


def _sharded(piece: Piece, at: int, count: int) -> ShardedRows:
    """Return the rows of one batch of a piece as so many shards get them."""
    return sharded(piece.arrow()[at], _slots(piece)[at], _befores(piece)[at], count)


@dataclass(frozen=True)
class _Parted:
    """Rows in the order of their shards, else as they were.

    `bounds` is where each shard begins, and `moved` how many updates brought a row to it.
    """

    rows: pyarrow.RecordBatch
    bounds: numpy.ndarray
    moved: numpy.ndarray


def _parted(dealt: ShardedRows, count: int) -> _Parted:
    shards = dealt.slots % count
    order = numpy.argsort(shards, kind="stable")
    arrow = dealt.rows.append_column(SLOT_COLUMN, pyarrow.array(dealt.slots))
    if (order[1:] < order[:-1]).any():
        arrow = arrow.take(pyarrow.array(order))
    bounds = numpy.searchsorted(shards[order], numpy.arange(count + 1))
    return _Parted(arrow, bounds, numpy.bincount(shards[dealt.moved], minlength=count))


def _plain_name(table: str) -> str:
    """Return a table's name as messages have it: without quotes."""
    if "`" not in table:
        return table
    name = TableName.parse(table)
    return f"{name.database}.{name.table}"


def _messages_passing(arrow: pyarrow.RecordBatch, kinds: numpy.ndarray, passing: dict[str, _Mask]) -> _Mask:
    """Tell which messages pass; takes what it used of `passing`, for the next batch goes on there."""
    mask = kinds >= _NO_CHANGE
    tables = arrow.column("table")
    codes = tables.indices.to_numpy()
    for code, table in enumerate(tables.dictionary.to_pylist()):
        (places,) = ((codes == code) & (kinds < _NO_CHANGE)).nonzero()
        if places.size:
            known = passing[table]
            mask[places] = known[: places.size]
            passing[table] = known[places.size :]
    return mask
