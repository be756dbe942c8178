# SPDX-License-Identifier: Apache-2.0
"""The part of a piece that one subscriber receives: its shards, change types, rows and columns.

All operations process whole columns. Results that do not depend on the subscriber are computed once per
piece.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy
import pyarrow

from penstock.model import TableName
from penstock.predicate import Predicate
from penstock.serve.piece import TYPED
from penstock.serve.pieces import Piece, Pieces, View
from penstock.serve.row_conditions import EVERY_ROW, RowConditions
from penstock.source.reading import Batch, prove_has_columns
from penstock.source.rows_filter import (
    SLOT_COLUMN,
    Mask,
    RowsFilter,
    ShardSet,
    both,
    decoded_for,
    whole_updates,
)
from penstock.source.sharding import (
    CHANGE_TYPE,
    POSTIMAGE,
    PREIMAGE,
    ShardedRows,
    preimages_of,
    sharded,
    slots_of,
)

# The values of `kind` in messages of changes; higher values are not changes.
_MESSAGE_KINDS = {"insert": 0, PREIMAGE: 1, POSTIMAGE: 1, "delete": 2}
_NO_CHANGE = 3


@dataclass(frozen=True)
class Sifted:
    """Rows that passed a filter: typed rows of one table, or messages.

    `moved` counts those updates among them that moved a row here from another shard.
    """

    batch: Batch
    arrow: pyarrow.RecordBatch
    moved: int = 0


@dataclass(frozen=True)
class Sieve:
    """One subscriber's filter of the pieces of a view; see `sieve_of` for the view.

    An update passes with both images if either image satisfies `where`. An update that moves a row to another
    shard becomes a delete and an insert, and each is filtered by its own row. `changes` is that of
    `Selection`, where both still count as an update. The account's `conditions` apply first. So the other
    filters only evaluate rows that the account may see, and reveal nothing about other rows.
    """

    view: View
    shards: ShardSet | None = None
    where: Predicate | None = None
    changes: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None
    conditions: RowConditions = EVERY_ROW

    def __post_init__(self) -> None:
        assert self.view.is_typed or not self.conditions, "messages cannot be reduced to visible rows"

    @property
    def is_open(self) -> bool:
        """Whether everything passes unchanged."""
        filters = (self.shards, self.where, self.changes, self.columns)
        return not self.conditions and all(part is None for part in filters)

    def streams(
        self, piece: Piece, rows_max: int, *, grouped: bool
    ) -> list[tuple[Batch, int, memoryview]] | None:
        """Return the rows of a small piece that pass, as an Arrow stream for each table, and their number.

        None if the rows have to be selected by more than their shards, if they are grouped for all
        subscribers with a single shard, if an update moves a row to another shard, or if a table has more
        than `rows_max` rows. With `grouped`, the rows of each shard are adjacent. Raises OptionInvalid.
        """
        is_plain = self._keeps_rows and self.columns is None and not self.conditions
        if not (self.view.is_typed and is_plain) or self._parts_key is not None:
            return None
        shards = None if self.shards is None else (self.shards.count, sorted(self.shards.of))
        streams = []
        for batch in piece.batches:
            encoded = None
            if batch.rows <= rows_max:
                encoded = batch.stream(shards, grouped=grouped)
            if encoded is None:
                return None
            content, rows = encoded
            if rows:
                streams.append((batch, rows, content))
        return streams

    @property
    def takes_parts(self) -> bool:
        """Whether a piece may come in parts. It may not if messages are filtered by separately decoded
        rows.
        """
        return self.view.is_typed or self.where is None

    @property
    def _keeps_rows(self) -> bool:
        return self.where is None and self.changes is None

    def kept_bytes(self, piece: Piece) -> int:
        """Return the bytes that `sift` has cached with a piece for all subscribers of the same shard
        count."""
        parts = piece.derived.get(self._parts_key) if self._parts_key is not None else None
        return sum(part.rows.nbytes for part in parts) if parts is not None else 0

    @property
    def _parts_key(self) -> tuple[str, int] | None:
        """The cache key of a piece's rows grouped by shard, None if they are not needed."""
        if self.shards is None or len(self.shards.of) != 1 or not self._keeps_rows or not self.view.is_typed:
            return None
        return "parts", self.shards.count

    async def passing(self, pieces: Pieces, piece: Piece) -> dict[str, Mask]:
        """Return which changes of each table pass the filters, for `sift`. The result is empty if `sift` can
        decide from the messages alone.

        An encoded message does not expose its column values, so the same range is also decoded as typed rows.
        Propagates errors from `Pieces.at`.
        """
        if self.view.is_typed or self.where is None:
            return {}
        columns = tuple(sorted({*self.where.columns, CHANGE_TYPE}))
        view = View(TYPED, self.view.tables, columns, gtid_after=self.view.gtid_after)
        masks_by_table: dict[str, list[Mask]] = {}
        position = piece.start
        while position < piece.end:
            typed = await pieces.at(view, position, piece.end)
            assert typed is not None, "the messages were made of it"
            for index, (batch, arrow) in enumerate(zip(typed.batches, typed.arrow(), strict=True)):
                befores = _preimages(typed)[index]
                mask = whole_updates(self.where.passes(arrow), befores)
                masks_by_table.setdefault(_plain_name(batch.table), []).append(mask[~befores])
            position = typed.end
        return {table: numpy.concatenate(masks) for table, masks in masks_by_table.items()}

    def sift(self, piece: Piece, passing: dict[str, Mask]) -> list[Sifted]:
        """Return the part of a piece that passes, without empty batches. Raises OptionInvalid.

        `passing` is the result of the method `passing`. May run in any thread.
        """
        if not self.view.is_typed:
            return self._sift_messages(piece, passing)
        if self.conditions:
            self._prove_columns(piece)
            piece = _permitted(self.conditions, piece)
        if self.shards is not None and self._parts_key is not None:
            return self._sift_single_shard(self.shards, self._parts_key, piece)
        rows_filter, sifted = self._rows_filter, []
        for index, (batch, arrow) in enumerate(zip(piece.batches, piece.arrow(), strict=True)):
            preimages = partial(_preimages_at, piece, index)
            sharded_rows = None if self.shards is None else _shard_batch(piece, index, self.shards.count)
            passing_rows = rows_filter.passing(arrow, sharded_rows, preimages)
            if passing_rows is not None:
                sifted.append(Sifted(batch, *passing_rows))
        return sifted

    def _prove_columns(self, piece: Piece) -> None:
        """Raise OptionInvalid if the only requested table lacks a requested column.

        The decoder checks this for a view that leaves columns out.
        """
        if self.columns is not None and self.view.tables.single() is not None:
            for batch in piece.batches:
                if batch.columns:
                    prove_has_columns(TableName.parse(batch.table), batch.columns, self.columns)

    def _sift_single_shard(self, shards: ShardSet, key: tuple[str, int], piece: Piece) -> list[Sifted]:
        """Return the rows of a single shard. The rows of all shards are grouped once, for all subscribers."""
        (shard,) = shards.of
        parts: list[_ShardGroups] | None = piece.derived.get(key)
        if parts is None:
            parts = piece.derived[key] = [
                _group_by_shard(_shard_batch(piece, index, shards.count), shards.count)
                for index in range(len(piece.batches))
            ]
        sifted = []
        for batch, part in zip(piece.batches, parts, strict=True):
            begin, end = part.bounds[shard : shard + 2].tolist()
            if begin < end:
                rows = self._rows_filter.project(part.rows.slice(begin, end - begin))
                sifted.append(Sifted(batch, rows, int(part.moved[shard])))
        return sifted

    @property
    def _rows_filter(self) -> RowsFilter:
        return RowsFilter(self.shards, self.where, self.changes, self.columns)

    def _sift_messages(self, piece: Piece, passing: dict[str, Mask]) -> list[Sifted]:
        remaining = dict(passing)
        sifted = []
        for batch, arrow in zip(piece.batches, piece.arrow(), strict=True):
            mask = None
            kinds = arrow.column("kind").to_numpy()
            if self.shards is not None:
                mask = self.shards.mask(arrow.column("slot").to_numpy())
            if self.changes is not None:
                wanted_kinds = [_MESSAGE_KINDS[change] for change in self.changes]
                mask = both(mask, numpy.isin(kinds, wanted_kinds) | (kinds >= _NO_CHANGE))
            if self.where is not None:
                mask = both(mask, _messages_passing(arrow, kinds, remaining))
            if mask is not None and not mask.all():
                if not mask.any():
                    continue
                arrow = arrow.filter(pyarrow.array(mask))
            sifted.append(Sifted(batch, arrow))
        return sifted


def sieve_of(
    view: View,
    *,
    shards: ShardSet | None = None,
    where: Predicate | None = None,
    conditions: RowConditions = EVERY_ROW,
) -> Sieve:
    """Return a sieve for a requested view. The sieve has its own view, which decodes what the filter
    needs.
    """
    if conditions:
        # An account's conditions need both images of updates, and may need any column.
        shared = replace(view, changes=None, columns=None)
        return Sieve(shared, shards, where, view.changes, view.columns, conditions)
    if shards is None and where is None:
        if view.is_typed or view.changes is None:
            return Sieve(view)
        return Sieve(replace(view, changes=None), changes=view.changes)
    changes, columns = view.changes, view.columns
    if not view.is_typed:
        shared = replace(view, changes=None, message_per_row=True)
        return Sieve(shared, shards, where, changes)
    decoded = decoded_for(columns, changes, is_sharded=shards is not None, where=where)
    shared = replace(view, changes=decoded.changes, columns=decoded.columns, with_keys=shards is not None)
    return Sieve(shared, shards, where, decoded.left_changes, columns)


def _permitted(conditions: RowConditions, piece: Piece) -> Piece:
    """Return a piece of typed rows with the visible rows only. Raises AccessDenied if a condition cannot be
    evaluated.

    The returned piece has its own cache for derived results, so that results computed from all rows and from
    visible rows are never mixed.
    """
    permitted = [
        (batch, rows)
        for batch, arrow in zip(piece.batches, piece.arrow(), strict=True)
        if (rows := conditions.permit_rows(TableName.parse(batch.table), arrow)).num_rows
    ]
    arrow = tuple(_renumbered([rows for _, rows in permitted], continues=piece.part > 0))
    return replace(piece, batches=tuple(batch for batch, _ in permitted), derived={"arrow": arrow})


def _renumbered(batches: Sequence[pyarrow.RecordBatch], *, continues: bool) -> list[pyarrow.RecordBatch]:
    """Return rows with the numbers in `_metadata.row` that a log of these rows alone would have: gaps would
    reveal how many hidden changes a transaction has.

    If the first transaction `continues` from an earlier part of the piece, its first row keeps its number,
    because the number of visible rows in the earlier parts is not known here.
    """
    if not batches:
        return []
    versions = numpy.concatenate([rows.column("_commit_version").to_numpy() for rows in batches])
    numbers = numpy.concatenate([rows.column("_metadata").field("row").to_numpy() for rows in batches])
    order = numpy.lexsort((numbers, versions))
    sorted_versions, sorted_numbers = versions[order], numbers[order]
    begins = numpy.diff(sorted_versions, prepend=sorted_versions[0] - 1) != 0
    # Both images of an update have the same number.
    ranks = numpy.cumsum(begins | (numpy.diff(sorted_numbers, prepend=-1) != 0))
    renumbered = numpy.empty(len(numbers), numpy.int32)
    renumbered[order] = ranks - ranks[begins][numpy.cumsum(begins) - 1]
    if continues:
        renumbered[versions == sorted_versions[0]] += sorted_numbers[0]
    ends = numpy.cumsum([rows.num_rows for rows in batches])[:-1]
    parts = numpy.split(renumbered, ends)
    return [_with_row_numbers(rows, part) for rows, part in zip(batches, parts, strict=True)]


def _with_row_numbers(rows: pyarrow.RecordBatch, numbers: numpy.ndarray) -> pyarrow.RecordBatch:
    at = rows.schema.get_field_index("_metadata")
    metadata = rows.column(at)
    fields = [metadata.field(index) for index in range(metadata.type.num_fields)]
    fields[metadata.type.get_field_index("row")] = pyarrow.array(numbers)
    changed = pyarrow.StructArray.from_arrays(fields, fields=list(metadata.type))
    return rows.set_column(at, rows.schema.field(at), changed)


def _preimages(piece: Piece) -> Sequence[Mask]:
    """Return for each batch a mask of its preimages that are followed by their postimage."""
    masks: Sequence[Mask] | None = piece.derived.get("befores")
    if masks is None:
        masks = piece.derived["befores"] = [preimages_of(arrow) for arrow in piece.arrow()]
    return masks


def _preimages_at(piece: Piece, index: int) -> Mask:
    return _preimages(piece)[index]


def _slots(piece: Piece) -> Sequence[numpy.ndarray]:
    """Return the slots of each batch's rows, computed from each row's own values."""
    slots: list[numpy.ndarray] | None = piece.derived.get("slots")
    if slots is None:
        slots = piece.derived["slots"] = [
            slots_of(arrow, batch.key, _plain_name(batch.table), befores)
            for batch, arrow, befores in zip(piece.batches, piece.arrow(), _preimages(piece), strict=True)
        ]
    return slots


def _shard_batch(piece: Piece, index: int, count: int) -> ShardedRows:
    """Return the rows of one batch of a piece, assigned to `count` shards."""
    return sharded(piece.arrow()[index], _slots(piece)[index], _preimages(piece)[index], count)


@dataclass(frozen=True)
class _ShardGroups:
    """Rows grouped by shard, otherwise in their original order.

    `bounds` is the start of each shard, and `moved` the number of updates that moved a row to the shard.
    """

    rows: pyarrow.RecordBatch
    bounds: numpy.ndarray
    moved: numpy.ndarray


def _group_by_shard(sharded_rows: ShardedRows, count: int) -> _ShardGroups:
    shards = sharded_rows.slots % count
    order = numpy.argsort(shards, kind="stable")
    arrow = sharded_rows.rows.append_column(SLOT_COLUMN, pyarrow.array(sharded_rows.slots))
    if (order[1:] < order[:-1]).any():
        arrow = arrow.take(pyarrow.array(order))
    bounds = numpy.searchsorted(shards[order], numpy.arange(count + 1))
    return _ShardGroups(arrow, bounds, numpy.bincount(shards[sharded_rows.moved], minlength=count))


def _plain_name(table: str) -> str:
    """Return a table's name as in messages: without quotes."""
    if "`" not in table:
        return table
    name = TableName.parse(table)
    return f"{name.database}.{name.table}"


def _messages_passing(arrow: pyarrow.RecordBatch, kinds: numpy.ndarray, passing: dict[str, Mask]) -> Mask:
    """Return a mask of the messages that pass, and remove the used entries from `passing`, so that it
    continues with the next batch.
    """
    mask = kinds >= _NO_CHANGE
    tables = arrow.column("table")
    codes = tables.indices.to_numpy()
    for code, table in enumerate(tables.dictionary.to_pylist()):
        (messages,) = ((codes == code) & (kinds < _NO_CHANGE)).nonzero()
        if messages.size:
            mask_of_table = passing[table]
            mask[messages] = mask_of_table[: messages.size]
            passing[table] = mask_of_table[messages.size :]
    return mask
