# SPDX-License-Identifier: Apache-2.0
"""Messages without hidden rows and columns: the limits of a view, and the decoders that apply them.

Two decoders read the same bytes. The first decodes the columns of the conditions, which are evaluated for
each image. The second writes the messages of the visible images. It refuses a row without an outcome, so an
error stops the messages and never shows a row.
"""

import difflib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pyarrow.compute as compute
import structlog

from penstock.errors import AccessDenied
from penstock.limits import PIECE_PART_BYTES
from penstock.model import Column, Position, TableName, TablePatterns
from penstock.serve.masking import Masking, matches_in_any_case
from penstock.serve.own_log import OwnSource
from penstock.serve.row_conditions import RowConditions
from penstock.source.bounds import Bounds
from penstock.source.logged_tables import LoggedTables
from penstock.source.reading import SYSTEM_COLUMNS, Batch, RangeFollower, Selection
from penstock.source.sharding import CHANGE_TYPE, preimages_of
from penstock.source.source import ByteRange

_log = structlog.get_logger(__name__)

_VERSION, _METADATA = "_commit_version", "_metadata"
# The bits of visible images that the kernel expects.
_BEFORE, _AFTER = 1, 2

# After each slice of this size, decoding stops if no consumer waits any more.
_SLICE_BYTES = 256 * 1024

# The maximum number of remembered warnings and of compiled limits.
_WARNINGS_MAX, _COMPILED_MAX = 1024, 256


@dataclass(frozen=True)
class Limits:
    """The visible rows and columns of a Canal destination.

    `where` are (table pattern, condition), and `columns` are (table pattern, columns). All patterns that
    match a table apply to it, in any case of their letters.
    """

    destination: str = ""
    where: tuple[tuple[str, str], ...] = ()
    columns: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def of_settings(
        cls, destination: str, where: Mapping[str, str], columns: Mapping[str, Sequence[str]]
    ) -> "Limits":
        """Return the limits of `canal_where` and `canal_columns`, NO_LIMITS without either."""
        if not where and not columns:
            return NO_LIMITS
        return cls(
            destination,
            tuple(where.items()),
            tuple((pattern, tuple(names)) for pattern, names in columns.items()),
        )

    def __bool__(self) -> bool:
        return bool(self.where or self.columns)


NO_LIMITS = Limits()


@functools.lru_cache(_COMPILED_MAX)
def conditions_of(limits: Limits) -> RowConditions:
    """Return the conditions of limits, compiled once. Raises OptionInvalid."""
    return RowConditions.of_settings(
        dict(limits.where),
        reader=f"destination {limits.destination} shows",
        setting=f"canal_where of instance {limits.destination} in penstock.yaml",
    )


@functools.lru_cache(_COMPILED_MAX)
def _masking_of(limits: Limits) -> Masking:
    return Masking.of_settings({}, dict(limits.columns))


class LimitedMessages(RangeFollower):
    """Writes the messages of the visible images and columns.

    The outcomes of `Judge` must be added before the rows are fed.
    """

    def __init__(self, limits: Limits, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = limits

    def add_outcomes(self, outcomes: "Outcomes") -> None:
        """Add the visible images of rows that are fed later. Raises LimitExceeded."""
        self._decoding.decoder.judge(
            (outcomes.table.database, outcomes.table.table),
            outcomes.versions.data,
            outcomes.offsets.data,
            outcomes.codes.data,
        )

    def _is_judged(self, name: TableName) -> bool:
        return conditions_of(self._limits).apply_to(name)

    def _wanted_columns(
        self, name: TableName, columns: Sequence[Column], primary_key: Sequence[str], key: Sequence[str]
    ) -> tuple[str, ...] | None:
        """Return the visible columns.

        Raises AccessDenied if a list for this table alone has none of its columns.
        """
        masking = _masking_of(self._limits)
        masked = masking.columns(name)
        if not masked:
            return None
        known = {column.name.casefold() for column in columns}
        for tables, shown in masking.shown_rules:
            if tables.single() is None or not matches_in_any_case(tables, name) or shown <= known:
                continue
            unknown = tuple(sorted(shown - known))
            if not shown & known:
                raise AccessDenied(
                    f"destination {self._limits.destination} shows {', '.join(unknown)} of {name}, which has"
                    " no such column here",
                    hint=f"It has {', '.join(column.name for column in columns)}: correct canal_columns of"
                    f" instance {self._limits.destination} in penstock.yaml",
                )
            _warn_of_unknown_columns(self._limits.destination, name, unknown)
        # A client cannot apply a change without the key.
        return tuple(
            column.name
            for column in columns
            if column.name in primary_key or column.name.casefold() not in masked
        )


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The visible images of a table's changes, in log order.

    `codes` is 1 if the image before a change is visible, plus 2 if the image after it is visible.
    """

    table: TableName
    versions: numpy.ndarray
    offsets: numpy.ndarray
    codes: numpy.ndarray


class Judge:
    """Evaluates the conditions of limits ahead of the messages.

    Not thread-safe. It cannot be used after an error.
    """

    def __init__(
        self,
        source: OwnSource,
        byte_range: ByteRange,
        limits: Limits,
        tables: TablePatterns,
        gtid_after: str,
        note: Callable[["Outcomes"], None],
    ) -> None:
        """`note` takes the outcomes."""
        self._note = note
        self._conditions = conditions_of(limits)
        self._log = source.log
        self._position = byte_range.position
        self._at = self._position.offset
        self._range = _ConditionColumns(
            self._conditions,
            source,
            byte_range,
            Selection(
                _TablesWithConditions(tables, self._conditions), bounds=Bounds(gtid_after=gtid_after or None)
            ),
            LoggedTables(source),
            held_bytes_max=PIECE_PART_BYTES // 2,
        )

    @property
    def boundary(self) -> Position:
        """The end of the last whole transaction read."""
        return self._range.position

    def read_past(self, end: int, stop: int, stopping: threading.Event) -> None:
        """Note the outcomes of all transactions that begin before the offset `end`, of bytes up to `stop`.

        Ends early once `stopping` is set. Raises AccessDenied if a condition cannot be evaluated,
        LimitExceeded, and errors of decoding.
        """
        if self._range.at_boundary and self._at >= end:
            return
        for view in self._log.read(self._position.epoch, self._position.file, self._at, stop):
            while view.nbytes:
                if stopping.is_set():
                    return
                take = end - self._at if self._at < end else self._range.bytes_to_event_end(view)
                piece = view[: min(take, _SLICE_BYTES)]
                for batch in self._range.feed(piece):
                    self._note(self._outcomes_of(batch))
                self._at += piece.nbytes
                view = view[piece.nbytes :]
                if self._range.at_boundary and self._at >= end:
                    self._close()
                    return
        self._close()

    def _close(self) -> None:
        for batch in self._range.close_batches():
            self._note(self._outcomes_of(batch))

    def _outcomes_of(self, batch: Batch) -> Outcomes:
        table, rows = TableName.parse(batch.table), batch.to_arrow()
        preimages = preimages_of(rows)
        visible = self._conditions.visible(table, rows, preimages)
        assert visible is not None, "only tables with conditions are read"
        is_delete = compute.equal(rows.column(CHANGE_TYPE), "delete").to_numpy(zero_copy_only=False)
        codes = numpy.where(visible, numpy.where(is_delete | preimages, _BEFORE, _AFTER), 0).astype(
            numpy.uint8
        )
        (updates,) = preimages.nonzero()
        codes[updates] |= codes[updates + 1]
        is_change = numpy.ones(rows.num_rows, numpy.bool_)
        is_change[updates + 1] = False
        offsets = rows.column(_METADATA).field("offset").to_numpy()
        versions = rows.column(_VERSION).to_numpy()
        return Outcomes(table, versions[is_change], offsets[is_change], codes[is_change])


class _ConditionColumns(RangeFollower):
    """Decodes the columns that conditions read."""

    def __init__(self, conditions: RowConditions, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._conditions = conditions

    def _wanted_columns(
        self, name: TableName, columns: Sequence[Column], primary_key: Sequence[str], key: Sequence[str]
    ) -> tuple[str, ...] | None:
        read = self._conditions.columns_of(name)
        known = {column.name.casefold(): column.name for column in columns}
        if unknown := sorted(read - known.keys() - set(SYSTEM_COLUMNS)):
            near = difflib.get_close_matches(unknown[0], list(known), 1)
            suggestion = f"Did you mean {known[near[0]]}? " if near else ""
            raise AccessDenied(
                f"the rows of {name} that {self._conditions.reader} depend on column {unknown[0]}, which the"
                " table does not have here",
                hint=f"{suggestion}It may have had another name: correct {self._conditions.setting}",
            )
        return (*(known[name] for name in sorted(read & known.keys())), *SYSTEM_COLUMNS)

    def _report_definition(self, statement: Any, position: Any) -> None:
        """The decoder of the messages reports definitions."""


class _TablesWithConditions(TablePatterns):
    """The tables of a selection whose rows have conditions."""

    def __init__(self, tables: TablePatterns, conditions: RowConditions) -> None:
        super().__init__()
        self._tables = tables
        self._conditions = conditions

    def matches(self, database: str, table: str) -> bool:
        """Return whether the table is selected and its rows have conditions."""
        return self._tables.matches(database, table) and self._conditions.apply_to(TableName(database, table))

    @property
    def selects_all(self) -> bool:
        """Never: only tables with conditions are selected."""
        return False

    def may_match_in(self, database: str) -> bool:
        """Return whether tables of that database may be selected."""
        return self._tables.may_match_in(database)


@functools.lru_cache(_WARNINGS_MAX)
def _warn_of_unknown_columns(destination: str, table: TableName, columns: tuple[str, ...]) -> None:
    """Log, once for each table, the listed columns that it does not have: mistyped ones, or later names."""
    _log.warning(
        "canal_columns names columns that the table does not have",
        destination=destination,
        table=str(table),
        columns=", ".join(columns),
    )
