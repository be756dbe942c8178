# SPDX-License-Identifier: Apache-2.0
"""A log that Penstock keeps, seen as the source's own files: what a folder and a daemon have in common.

Positions are those of the server that the log was captured from. A log may hold several epochs, each another
server's files, and may begin in the middle of a file; where bytes are missing between two runs, reading
across them is refused by name.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from penstock._native import GtidSet
from penstock.capture.schema_history import SchemaHistory
from penstock.commit_versions import epoch_base, shifted_epoch
from penstock.errors import (
    PenstockError,
    PositionInvalid,
    PositionPurged,
    SequenceGap,
    ServerChanged,
    SourceMissing,
)
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import LoggedSet
from penstock.limits import RANGE_BYTES_DEFAULT
from penstock.model import Position, TableName
from penstock.source.prepared import PreparedSearch
from penstock.source.source import (
    FIRST_EVENT_OFFSET,
    ByteRange,
    Extent,
    SourceOptions,
    cut,
    file_number,
    place_of,
)
from penstock.source.walk import walk

# Which server an epoch belongs to: its number and `ServerIdentity.key`.
EpochKey = tuple[int, str]


@dataclass(frozen=True)
class KeptRun:
    """Unbroken bytes [start, end) of one source file, `end` behind the last whole transaction."""

    epoch: int
    file: str
    start: int
    end: int

    @property
    def first(self) -> Position:
        """Where its first event begins."""
        return Position(self.epoch, self.file, self.start)

    @property
    def last(self) -> Position:
        """Where its bytes end."""
        return Position(self.epoch, self.file, self.end)

    def shifted(self, shift: int) -> "KeptRun":
        """Return the same run in a log whose epochs have bases that are `shift` higher."""
        return replace(self, epoch=shifted_epoch(self.epoch, shift))


class KeptLog(Protocol):
    """What a folder and a daemon answer. Epochs are numbered as the log numbers them."""

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key, rising."""

    def runs(self) -> list[KeptRun]:
        """Return what the log holds, in order. Raises SourceMissing where there is no log."""

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a position, "" where the source has none."""

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a position with nothing but the set before it. Raises PositionPurged."""

    def locate_time(self, time_us: int) -> Position:
        """Return a position before which nothing was committed at or after the time."""

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description."""

    def boundary_before(self, position: Position) -> int:
        """Return the last transaction boundary of the same file at or before a position that is known."""

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, past the file's offset `stop` as far as the caller asks."""

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the definitions in force at a position, as `SchemaHistory.from_json` takes them.

        Where the log is being captured, a table in doubt is waited for; with `again` it is read again.
        """

    def prepared(self, xid: str) -> ByteRange | None:
        """Return where an XA transaction was prepared that had no outcome when the log was surveyed last."""

    def close(self) -> None:
        """Let go of what is held. The log can be asked again."""


class KeptSource:
    """A kept log as a source; see `penstock.source.source.Source`.

    With `options.epochs` its epochs are numbered so that these keep their numbers, whatever the log calls
    them.
    """

    live = False

    def __init__(self, options: SourceOptions, log: KeptLog) -> None:
        self.options = options
        self._log = log
        self._shift: int | None = None
        self._heads: dict[tuple[int, str], bytes] = {}
        self._file_starts = {FIRST_EVENT_OFFSET}
        self._joined: set[tuple[Position, Position]] = set()
        self._repeats: dict[int, str] = {}
        self._prepared = PreparedSearch(self, self._noted)

    @property
    def instance(self) -> str:
        """The name that rows of this source carry."""
        return self.options.instance

    def close(self) -> None:
        """Let go of connections and files."""
        self._log.close()

    # --- Epochs -------------------------------------------------------------------------------

    @property
    def shift(self) -> int:
        """What is added to the bases of the log's own epochs; see `epoch_shift`. Raises ServerChanged."""
        if self._shift is None:
            wanted = self.options.epochs
            self._shift = epoch_shift(wanted, self._log.epochs(), str(self))
        return self._shift

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key, as this source numbers them."""
        return [(shifted_epoch(epoch, self.shift), key) for epoch, key in self._log.epochs()]

    def server_key(self, epoch: int) -> str:
        """Return the key of an epoch's server, "" for an epoch that the log does not know."""
        return dict(self.epochs()).get(epoch, "")

    def _here(self, position: Position) -> Position:
        """Return a position of the log under the number that its epoch has here."""
        return position.shifted(self.shift)

    def _there(self, position: Position) -> Position:
        """Return a position as the log itself numbers it.

        Raises PositionPurged for an epoch before its own.
        """
        there = position.shifted(-self.shift)
        if there.epoch < 0:
            first = shifted_epoch(0, self.shift)
            raise PositionPurged(f"{self} begins with epoch {first}", position=str(position))
        return there

    # --- What there is ------------------------------------------------------------------------

    def earliest(self) -> Position:
        """Return where the log begins. Raises SourceMissing for a log without a byte."""
        return self._runs()[0].first

    def head(self) -> Position:
        """Return the end of the last whole transaction."""
        return self._runs()[-1].last

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of every transaction before a position, "" where the source has none."""
        return self._log.gtid_set(self._there(position))

    def fingerprint(self, file: str, epoch: int | None = None) -> str:
        """Return the fingerprint of a file, by default of the newest epoch that has it."""
        return file_fingerprint(self.head_bytes(file, epoch))

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return where to read from to get everything after the set. Raises PositionPurged."""
        return self._here(self._log.locate_gtid_set(gtid_set))

    def find_time(self, time_us: int) -> Position:
        """Return where to read from to get everything committed at or after the time."""
        return self._here(self._log.locate_time(time_us))

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the source's files that [start, end) touches.

        Raises SequenceGap, PositionPurged, PositionInvalid.
        """
        runs = self._runs()
        if start is not None:
            runs = self._from(runs, start)
        if end is not None:
            if start is not None and place_of(end) < place_of(start):
                raise PositionInvalid(f"the end lies before the start {start}", position=str(end))
            if place_of(end) > place_of(runs[-1].last):
                raise self.behind(f"{self} ends at {runs[-1].last}", end)
            runs = [one for one in runs if place_of(one.first) <= place_of(end)]
        for one, other in itertools.pairwise(runs):
            self._check_joined(one, other)
        return [Extent(one.file, one.end, True, one.epoch, one.start) for one in runs]

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Cut [start, end) into ranges that all have a stop: what arrives later belongs to a later plan."""
        extents = self.extents(start, end)
        ends = {(one.epoch, one.file): one.bytes for one in extents}
        first = start or extents[0].position
        ranges = cut(extents, first, end, ranges_min, range_bytes, self.boundary_before)
        stopped = [one if one.stop else replace(one, stop=ends[one.epoch, one.file]) for one in ranges]
        return [
            replace(one, gtid_after=self._repeated(one.epoch))
            for one in stopped
            if one.stop is not None and one.start < one.stop
        ]

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes from the range's start on, to where the log's part of the file ends."""

        def resumed() -> Position:
            assert resume_at is not None, "it is asked only where it was given"
            return self._there(resume_at())

        start = self._there(byte_range.position)
        stop = byte_range.start if byte_range.stop is None else byte_range.stop
        yield from self._log.read(start, stop, resumed if resume_at is not None else None)

    def boundary_before(self, position: Position) -> int:
        """Return the last transaction boundary at or before a position that the log's index has.

        Raises PositionPurged, PositionInvalid.
        """
        return self._log.boundary_before(self._there(position))

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Return a range from a transaction boundary at or before its start on; see `Source.align`."""
        return replace(byte_range, start=self.boundary_before(byte_range.position), aligned=True)

    def joint(self, byte_range: ByteRange) -> int | None:
        """Return the stop of a range where another one goes on: a log is cut at boundaries."""
        return byte_range.stop if byte_range.is_cut else None

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description, by default of the newest epoch that has it."""
        if epoch is None:
            epoch = next((one.epoch for one in reversed(self._runs()) if one.file == file), 0)
        if (epoch, file) not in self._heads:
            there = self._there(Position(epoch, file, FIRST_EVENT_OFFSET))
            self._heads[epoch, file] = self._log.head_bytes(there.epoch, file)
        return self._heads[epoch, file]

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> SchemaHistory:
        """Return the definitions in force at a position. Raises SchemaUnknown where the log has none.

        With `again` a table is read again by the daemon that captures the log, if there is one.
        """
        return SchemaHistory.from_json(self._log.schemas(self._there(position), name, again=again))

    def find_prepared(self, xid: str, before: Position) -> ByteRange | None:
        """Return where an XA transaction was prepared that commits at a position."""
        return self._prepared.find(xid, before)

    def walk(
        self,
        start: Position,
        end: Position,
        rows_max: int | None = None,
        bytes_max: int | None = None,
    ) -> Position:
        """Return the last transaction end within the limits, at least one transaction on."""
        return walk(self, start, end, rows_max, bytes_max)

    # --- Inside -------------------------------------------------------------------------------

    def _noted(self, xid: str, before: Position) -> ByteRange | None:
        """Return where the log notes an XA transaction as prepared before a position."""
        noted = self._log.prepared(xid)
        if noted is None:
            return None
        here = replace(noted, epoch=shifted_epoch(noted.epoch, self.shift))
        # A transaction that was prepared later may have the same id.
        return here if place_of(here.position) < place_of(before) else None

    def _runs(self) -> list[KeptRun]:
        runs = [run.shifted(self.shift) for run in _unbroken(self._log.runs())]
        if not runs:
            raise SourceMissing(
                f"{self} holds nothing yet", hint="The first bytes come once capture has connected"
            )
        return runs

    def _from(self, runs: list[KeptRun], start: Position) -> list[KeptRun]:
        """Return the runs from a position on. Raises PositionPurged, PositionInvalid, SequenceGap."""
        place = place_of(start)
        if place < place_of(runs[0].first):
            if start.offset == FIRST_EVENT_OFFSET and _is_file_start(
                runs[0], start, len(self._head_of(runs[0]))
            ):
                # A file's first position, before its own format description, which the log keeps apart.
                return runs
            raise PositionPurged(
                f"{self} begins with {runs[0].first}",
                position=str(start),
                hint=f"Start at {runs[0].first}, or take a new snapshot",
            )
        if place > place_of(runs[-1].last):
            raise PositionInvalid(
                f"{self} ends at {runs[-1].last}",
                position=str(start),
                hint="Is this the log that the position was taken from?",
            )
        behind = [run for run in runs if place_of(run.last) >= place]
        first = behind[0]
        if (first.epoch, first.file) == (start.epoch, start.file):
            if start.offset >= first.start or start.offset == FIRST_EVENT_OFFSET:
                return behind
            before = [run for run in runs if place_of(run.last) < place][-1:]
            raise _gap(before[0].last if before else start, first.first, str(self))
        raise PositionInvalid(
            f"{self} has no file {start.file} in epoch {start.epoch}",
            position=str(start),
            hint=f"What it has there begins at {first.first}",
        )

    def _head_of(self, run: KeptRun) -> bytes:
        return self.head_bytes(run.file, run.epoch)

    def _check_joined(self, one: KeptRun, other: KeptRun) -> None:
        """Raise SequenceGap where transactions are missing between two runs."""
        joint = one.last, other.first
        if joint in self._joined:
            return
        # A server without GTIDs tells no more than its files; one that has them tells of every transaction.
        upto, before = (GtidSet.parse(self.gtid_set(position)) for position in joint)
        follows = file_number(other.file) == file_number(one.file) + 1 and self._begins_file(other)
        known = bool(upto) and before.contains(upto)
        if not upto.contains(before) or not (follows or known or one.epoch != other.epoch):
            raise _gap(one.last, other.first, str(self))
        self._joined.add(joint)

    def _repeated(self, epoch: int) -> str:
        """Return the GTIDs that an epoch may hold once more, since the one before has them; "" for none.

        Another server of the same cluster may have committed in another order.
        """
        if epoch not in self._repeats:
            runs = self._runs()
            earlier = [run for run in runs if run.epoch < epoch]
            first = next(run for run in runs if run.epoch == epoch)
            # An epoch of the same server begins where somebody set its position: to read again was asked for.
            other = bool(earlier) and self.server_key(earlier[-1].epoch) != self.server_key(epoch)
            upto = self.gtid_set(earlier[-1].last) if other else ""
            before = GtidSet.parse(self.gtid_set(first.first) if upto else "")
            self._repeats[epoch] = "" if before.contains(GtidSet.parse(upto)) else upto
        return self._repeats[epoch]

    def _begins_file(self, run: KeptRun) -> bool:
        """Tell whether a run holds its file from the first event on."""
        if run.start not in self._file_starts:
            self._file_starts.add(len(self._head_of(run)))
        return run.start in self._file_starts

    def behind(self, what: str, position: Position) -> PenstockError:
        """Return the error for a place that the log has not reached."""
        return PositionInvalid(what, position=str(position), hint="See how far it is: penstock log list")

    def __str__(self) -> str:
        return f"the log {self.instance}"


def epoch_shift(wanted: Sequence[EpochKey], found: Sequence[EpochKey], log: str) -> int:
    """Return what to add to the bases of the epochs found so that each wanted one has its number and its
    server's key.

    One shift for all epochs keeps commit versions rising. Of several answers the one nearest to 0, which it
    is where none is wanted. Raises ServerChanged where there is none.
    """
    if not wanted:
        return 0
    numbered = dict(wanted)
    shifts = {
        epoch_base(number) - epoch_base(epoch)
        for number, key in wanted
        for epoch, other in found
        if other == key
    }
    fitting = [
        shift
        for shift in shifts
        if all(numbered.get(shifted_epoch(epoch, shift), key) == key for epoch, key in found)
    ]
    if not fitting:
        asked = ", ".join(f"{key} as epoch {number}" for number, key in wanted)
        raise ServerChanged(
            f"{log} was captured from {', '.join(key for _, key in found) or 'nobody yet'}, not from {asked}",
            hint="A file position means nothing on another server: start by GTID set, or from a new snapshot",
        )
    # Of two equally near ones the one under which commit versions are higher.
    return min(fitting, key=lambda shift: (abs(shift), -shift))


def _unbroken(runs: Sequence[KeptRun]) -> list[KeptRun]:
    """Join runs of one file where one goes on as the other ends."""
    joined: list[KeptRun] = []
    for run in runs:
        if joined and joined[-1].last == run.first:
            joined[-1] = replace(joined[-1], end=run.end)
        else:
            joined.append(run)
    return joined


def _is_file_start(run: KeptRun, start: Position, head_bytes: int) -> bool:
    return (start.epoch, start.file) == (run.epoch, run.file) and run.start <= head_bytes


def _gap(last: Position, first: Position, log: str) -> SequenceGap:
    return SequenceGap(
        f"{log} has nothing between {last} and {first}",
        position=str(last),
        hint=f"Read the missing part from the server, and go on with --start {first}",
    )
