# SPDX-License-Identifier: Apache-2.0
"""Pairs the entries of two systems by their positions in the log, and reports every value that differs.

The comparison begins at the end of the first transaction that Canal delivers. Penstock's entries for the same
part of the log are read through the same code as for any other reader, and encoded as they would be for a
Canal client of the daemon.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from penstock.binlog import schemas_of_server
from penstock.errors import LimitExceeded, PositionInvalid
from penstock.limits import MIB
from penstock.migrate.compare.entries import Entry, entries_of
from penstock.model import Position, TablePatterns
from penstock.protobuf import Message
from penstock.source.reading import Selection, read_range
from penstock.source.source import Source, place_of

# The maximum size of a transaction of Canal, which is held in memory until its end.
_HELD_BYTES_MAX = 256 * MIB
_POLL_SECONDS = 0.2
ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """A value that differs between the two systems. If `path` is empty, only one of the systems has the
    entry.
    """

    entry: str
    path: str
    canal: str
    penstock: str

    def __str__(self) -> str:
        at = f"{self.entry} {self.path}".strip()
        return f"{at}: Canal {self.canal}, Penstock {self.penstock}"


@dataclass
class Outcome:
    """The result of a comparison. `behind` is a position that Penstock's log did not reach in time, None if
    there was none.
    """

    start: Position | None = None
    end: Position | None = None
    entries: int = 0
    rows: int = 0
    different: int = 0
    differences: list[Difference] = field(default_factory=list)
    behind: Position | None = None

    @property
    def is_whole(self) -> bool:
        """Whether at least one entry was compared, and Penstock's log reached the positions of all
        entries.
        """
        return self.entries > 0 and self.behind is None


class Comparison:
    """Compares the batches of a Canal client, one after the other.

    All differences are counted, and the first `shown` are kept. `lag_seconds` is how long to wait for
    Penstock to reach the position up to which Canal has delivered.
    """

    def __init__(
        self, source: Source, tables: TablePatterns, *, shown: int, lag_seconds: float, zone_seconds: int = 0
    ) -> None:
        self._source = source
        self._tables = tables
        self._shown = shown
        self._lag_seconds = lag_seconds
        self._zone_seconds = zone_seconds
        self._held: list[Entry] = []
        self._held_bytes = 0
        self._at: Position | None = None
        self.outcome = Outcome()

    def add(self, contents: Sequence[memoryview]) -> bool:
        """Compare the transactions that a batch completes; return False if Penstock is behind.

        Raises PositionInvalid if Penstock does not have the file, LimitExceeded for a transaction above the
        limit, and propagates errors from reading.
        """
        entries = list(entries_of(contents, self._tables))
        self._held += entries
        self._held_bytes += sum(map(len, contents))
        ends = [number for number, entry in enumerate(self._held, 1) if entry.ends_transaction]
        if not ends:
            if self._held_bytes > _HELD_BYTES_MAX:
                raise LimitExceeded(
                    f"Canal delivered {self._held_bytes} bytes of a transaction without its end",
                    hint="Compare while the source has smaller transactions",
                )
            return True
        complete, self._held, self._held_bytes = self._held[: ends[-1]], self._held[ends[-1] :], 0
        if self._at is None:
            self._at = self.outcome.start = self.outcome.end = self._position(complete[ends[0] - 1])
            complete = complete[ends[0] :]
        return not complete or self._compare(complete, self._at)

    def _compare(self, canal: Sequence[Entry], start: Position) -> bool:
        end = self._position(canal[-1])
        if not self._reaches(end):
            self.outcome.behind = end
            return False
        self._pair(
            (entry for entry in canal if entry.is_compared),
            (entry for entry in self._own(start, end) if entry.is_compared),
        )
        self._at = self.outcome.end = end
        return True

    def _own(self, start: Position, end: Position) -> Iterator[Entry]:
        selection = Selection(self._tables)
        for byte_range in self._source.split(start, end):
            batches = read_range(
                self._source,
                byte_range,
                selection,
                schemas_of_server(self._source),
                emit="messages",
                dialect="canal",
                server_zone_seconds=self._zone_seconds,
            )
            for batch in batches:
                fields = chain.from_iterable(
                    Message(value).views(2) for value in batch.to_arrow().column("value").to_pylist()
                )
                yield from entries_of(fields, self._tables)

    def _pair(self, canal: Iterable[Entry], penstock: Iterable[Entry]) -> None:
        """Merge two sequences in log order. Several entries at one position are paired in order."""
        ours = iter(penstock)
        own = next(ours, None)
        for entry in canal:
            while own is not None and own.at < entry.at:
                self._note(Difference(str(own), "", ABSENT, "present"))
                own = next(ours, None)
            if own is None or own.at > entry.at:
                self._note(Difference(str(entry), "", "present", ABSENT))
                continue
            self._compare_entries(entry, own)
            own = next(ours, None)
        while own is not None:
            self._note(Difference(str(own), "", ABSENT, "present"))
            own = next(ours, None)

    def _compare_entries(self, canal: Entry, own: Entry) -> None:
        outcome = self.outcome
        outcome.entries += 1
        outcome.rows += own.rows
        if (canal.kind, canal.table) != (own.kind, own.table):
            self._note(Difference(str(canal), "", f"{canal.kind} {canal.table}", f"{own.kind} {own.table}"))
            return
        for path in dict.fromkeys(chain(canal.fields, own.fields)):
            left, right = canal.fields.get(path, _MISSING), own.fields.get(path, _MISSING)
            if left != right:
                self._note(Difference(str(canal), path, _text(left), _text(right)))

    def _note(self, difference: Difference) -> None:
        self.outcome.different += 1
        if len(self.outcome.differences) < self._shown:
            self.outcome.differences.append(difference)

    def _position(self, entry: Entry) -> Position:
        """Return the end of an entry in Penstock's log. Raises PositionInvalid if the log does not have the
        file.
        """
        deadline = time.monotonic() + self._lag_seconds
        while True:
            epochs = [extent.epoch for extent in self._source.extents() if extent.file == entry.file]
            if epochs:
                return Position(epochs[-1], entry.file, entry.end)
            if time.monotonic() > deadline:
                raise PositionInvalid(
                    f"Canal delivers {entry.file}, which {self._source.instance} does not have",
                    hint="Both must read the same server; Penstock's log must begin before Canal's cursor",
                )
            time.sleep(_POLL_SECONDS)

    def _reaches(self, end: Position) -> bool:
        deadline = time.monotonic() + self._lag_seconds
        while place_of(self._source.head()) < place_of(end):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


class _Missing:
    def __repr__(self) -> str:
        return ABSENT


_MISSING = _Missing()


def _text(value: Any) -> str:
    return repr(value)[:200]
