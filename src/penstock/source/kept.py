# SPDX-License-Identifier: Apache-2.0
"""A log kept by Penstock, presented as the source's own files. Base code for log folders and daemons.

Positions are those of the captured server. A log may contain several epochs, each with another server's
files, and may begin in the middle of a file. If bytes are missing between two unbroken parts of a log,
reading across the gap raises an error.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

from penstock._native import GtidSet
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
from penstock.logstore.extent import Extent
from penstock.model import Position, TableName
from penstock.schema.history import SchemaHistory
from penstock.source.opened_source import OpenedSource
from penstock.source.prepared import PreparedSearch
from penstock.source.source import (
    FIRST_EVENT_OFFSET,
    ByteRange,
    SourceOptions,
    cut,
    file_number,
    place_of,
)

# The number of an epoch and the `ServerIdentity.key` of its server.
EpochKey = tuple[int, str]

HINT_EMPTY = "The first bytes arrive once capture has connected"


class KeptLog(Protocol):
    """The interface of folder logs and daemon logs. Epochs use the log's own numbers."""

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key, in ascending order."""

    def runs(self) -> list[Extent]:
        """Return the runs of the log, in order. Raises SourceMissing if there is no log."""

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a position, "" if the source has none."""

    def locate_gtid_set(self, gtid_set: str) -> Position:
        """Return a position preceded only by transactions of the set. Raises PositionPurged."""

    def locate_time(self, time_us: int) -> Position:
        """Return a position before which no commit is at or after the time."""

    def merged_ts(self) -> int | None:
        """Return the commit timestamp up to which the log has everything from a TiDB cluster; None for other
        sources.
        """

    def head_bytes(self, epoch: int, file: str) -> bytes:
        """Return a source file's magic and format description."""

    def boundary_before(self, position: Position) -> int:
        """Return the last known transaction boundary of the same file at or before a position."""

    def read(
        self, start: Position, stop: int, resume_at: Callable[[], Position] | None
    ) -> Iterator[memoryview]:
        """Yield the bytes from a position on, past the file offset `stop` for as long as the caller requests
        more.
        """

    def schemas(self, position: Position, name: TableName | None, *, again: bool = False) -> dict[str, Any]:
        """Return the table definitions in force at a position, in the form that `SchemaHistory.from_json`
        accepts.

        If the log is being captured, wait until any doubt about a table's definition is settled. With
        `again`, have the table's definition read again.
        """

    def prepared(self, xid: str) -> ByteRange | None:
        """Return the range of an XA transaction that was prepared and had no outcome at the latest survey."""

    def close(self) -> None:
        """Release connections and files. The log can be used again."""


class KeptSource(OpenedSource):
    """A source that reads a kept log; see `penstock.source.source.Source`.

    With `options.epochs`, the log's epochs are renumbered so that the listed epochs keep their numbers.
    """

    live = False

    def __init__(self, options: SourceOptions, log: KeptLog) -> None:
        self.options = options
        self._log = log
        self._shift: int | None = None
        self._heads: dict[tuple[int, str], bytes] = {}
        self._given: tuple[Position, bytes] | None = None
        self._file_starts = {FIRST_EVENT_OFFSET}
        self._joined: set[tuple[Position, Position]] = set()
        self._repeats: dict[int, tuple[str, str]] = {}
        self._prepared = PreparedSearch(self, self._find_recorded)

    def close(self) -> None:
        """Close connections and files."""
        self._log.close()

    def hold(self, reader: Sequence[str], position: Position, seconds: int) -> None:
        """Make the log keep everything after a position for a reader, whose name is built from the given
        parts.

        Does nothing if the log is a folder that is read directly, because the folder's writer does not know
        about its readers.
        """

    # --- Epochs -------------------------------------------------------------------------------

    @property
    def shift(self) -> int:
        """The shift from the log's epoch bases to this source's; see `epoch_shift`. Raises ServerChanged."""
        if self._shift is None:
            required = self.options.epochs
            self._shift = epoch_shift(required, self._log.epochs(), str(self))
        return self._shift

    def renumber(self) -> None:
        """Compare the log's epochs with `options.epochs` again: another log may answer by now.

        Raises ServerChanged.
        """
        self._shift = None
        self._shift = self.shift

    def epochs(self) -> list[EpochKey]:
        """Return every epoch with its server's key, in this source's numbering."""
        return [(shifted_epoch(epoch, self.shift), key) for epoch, key in self._log.epochs()]

    def server_key(self, epoch: int) -> str:
        """Return the key of an epoch's server, "" if the log does not know the epoch."""
        return dict(self.epochs()).get(epoch, "")

    def _from_log(self, position: Position) -> Position:
        """Convert a position of the log to this source's epoch numbering."""
        return position.shifted(self.shift)

    def _to_log(self, position: Position) -> Position:
        """Convert a position to the log's own epoch numbering.

        Raises PositionPurged for an epoch before the log's first.
        """
        log_position = position.shifted(-self.shift)
        if log_position.epoch < 0:
            first = shifted_epoch(0, self.shift)
            raise PositionPurged(f"{self} begins with epoch {first}", position=str(position))
        return log_position

    def listed(self, listing: Any = None) -> AbstractContextManager[None]:
        """Return a context manager in which queries of the log may all be answered as of the same time."""
        return nullcontext()

    # --- Lookups ------------------------------------------------------------------------------

    def earliest(self) -> Position:
        """Return where the log begins. Raises the error of `empty` for an empty log."""
        return self._runs()[0].first

    def head(self) -> Position:
        """Return the end of the last whole transaction."""
        return self._runs()[-1].last

    def merged_ts(self) -> int | None:
        """Return the commit timestamp up to which the log has everything from a TiDB cluster; None for other
        sources.
        """
        return self._log.merged_ts()

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a position, "" if the source has none."""
        return self._log.gtid_set(self._to_log(position))

    def fingerprint(self, file: str, epoch: int | None = None) -> str:
        """Return the fingerprint of a file, by default in the newest epoch that has it."""
        return file_fingerprint(self.head_bytes(file, epoch))

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return where to start reading to get everything after the set. Raises PositionPurged."""
        return self._from_log(self._log.locate_gtid_set(gtid_set))

    def find_time(self, time_us: int) -> Position:
        """Return where to start reading to get everything committed at or after the time."""
        return self._from_log(self._log.locate_time(time_us))

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the source's files that overlap [start, end).

        Raises SequenceGap, PositionPurged, PositionInvalid.
        """
        runs = self._runs()
        if start is not None:
            runs = self._from(runs, start)
        if end is not None:
            if start is not None and place_of(end) < place_of(start):
                raise PositionInvalid(f"the end is before the start {start}", position=str(end))
            if place_of(end) > place_of(runs[-1].last):
                raise self.behind(f"{self} ends at {runs[-1].last}", end)
            runs = [run for run in runs if place_of(run.first) <= place_of(end)]
        for run, next_run in itertools.pairwise(runs):
            self._check_joined(run, next_run)
        return runs

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Split [start, end) into ranges that all have a stop: later bytes belong to a later plan."""
        extents = self.extents(start, end)
        ends = {(extent.epoch, extent.file): extent.end for extent in extents}
        first = start or extents[0].first
        ranges = cut(extents, first, end, ranges_min, range_bytes, self.boundary_before)
        stopped = [
            byte_range
            if byte_range.stop
            else replace(byte_range, stop=ends[byte_range.epoch, byte_range.file])
            for byte_range in ranges
        ]
        return [
            self._with_earlier_gtids(byte_range)
            for byte_range in stopped
            if byte_range.stop is not None and byte_range.start < byte_range.stop
        ]

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes from the start of the range up to the end of what the log has of the file."""

        def resumed() -> Position:
            assert resume_at is not None, "it is asked only where it was given"
            return self._to_log(resume_at())

        given, self._given = self._given, None
        if given is not None and given[0] == byte_range.position:
            yield memoryview(given[1])
            byte_range = replace(byte_range, start=byte_range.start + len(given[1]))
        start = self._to_log(byte_range.position)
        stop = byte_range.start if byte_range.stop is None else byte_range.stop
        yield from self._log.read(start, stop, resumed if resume_at is not None else None)

    def give_bytes(self, position: Position, content: bytes) -> None:
        """Keep bytes that were already read, for the next range that is opened at this position."""
        self._given = position, content

    def boundary_before(self, position: Position) -> int:
        """Return the last indexed transaction boundary at or before a position.

        Raises PositionPurged, PositionInvalid.
        """
        return self._log.boundary_before(self._to_log(position))

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Return the range extended back to a transaction boundary; see `Source.align`."""
        return replace(byte_range, start=self.boundary_before(byte_range.position), aligned=True)

    def joint(self, byte_range: ByteRange) -> int | None:
        """Return the stop of a range if another range continues there, else None. Logs are cut at transaction
        boundaries, so an event starts at the stop.
        """
        return byte_range.stop if byte_range.is_cut else None

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description, by default in the newest epoch that has it."""
        if epoch is None:
            epoch = next((run.epoch for run in reversed(self._runs()) if run.file == file), 0)
        if (epoch, file) not in self._heads:
            log_position = self._to_log(Position(epoch, file, FIRST_EVENT_OFFSET))
            self._heads[epoch, file] = self._log.head_bytes(log_position.epoch, file)
        return self._heads[epoch, file]

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> SchemaHistory:
        """Return the table definitions in force at a position. Raises SchemaUnknown if the log has no
        definitions.

        With `again`, the daemon that captures the log reads the table again, if there is one.
        """
        return SchemaHistory.from_json(self._log.schemas(self._to_log(position), name, again=again))

    # --- Inside -------------------------------------------------------------------------------

    def _find_recorded(self, xid: str, before: Position) -> ByteRange | None:
        """Return the range of an XA transaction that the log recorded as prepared before a position."""
        prepared = self._log.prepared(xid)
        if prepared is None:
            return None
        byte_range = replace(prepared, epoch=shifted_epoch(prepared.epoch, self.shift))
        # A transaction that was prepared later may have the same id, so check the position too.
        return byte_range if place_of(byte_range.position) < place_of(before) else None

    def _runs(self) -> list[Extent]:
        runs = [run.shifted(self.shift) for run in _unbroken(self._log.runs())]
        if not runs:
            raise self.empty()
        return runs

    def _from(self, runs: list[Extent], start: Position) -> list[Extent]:
        """Return the runs from a position on. Raises PositionPurged, PositionInvalid, SequenceGap."""
        start_key = place_of(start)
        if start_key < place_of(runs[0].first):
            if start.offset == FIRST_EVENT_OFFSET and _is_file_start(
                runs[0], start, len(self._head_of(runs[0]))
            ):
                # The position is the start of a file, before the format description, which the log stores
                # separately.
                return runs
            raise PositionPurged(
                f"{self} begins with {runs[0].first}",
                position=str(start),
                hint=f"Start at {runs[0].first}, or take a new snapshot",
            )
        if start_key > place_of(runs[-1].last):
            raise PositionInvalid(
                f"{self} ends at {runs[-1].last}",
                position=str(start),
                hint="Is this the log that the position was taken from?",
            )
        following = [run for run in runs if place_of(run.last) >= start_key]
        first = following[0]
        if (first.epoch, first.file) == (start.epoch, start.file):
            if start.offset >= first.start or start.offset == FIRST_EVENT_OFFSET:
                return following
            before = [run for run in runs if place_of(run.last) < start_key][-1:]
            raise _gap(before[0].last if before else start, first.first, str(self))
        raise PositionInvalid(
            f"{self} has no file {start.file} in epoch {start.epoch}",
            position=str(start),
            hint=f"What it has there begins at {first.first}",
        )

    def _head_of(self, run: Extent) -> bytes:
        return self.head_bytes(run.file, run.epoch)

    def _check_joined(self, run: Extent, next_run: Extent) -> None:
        """Raise SequenceGap if transactions are missing between two runs."""
        joint = run.last, next_run.first
        if joint in self._joined:
            return
        # Without GTIDs, only the file names show whether bytes are missing. With GTIDs, every transaction
        # counts.
        upto, before = (GtidSet.parse(self.gtid_set(position)) for position in joint)
        follows = file_number(next_run.file) == file_number(run.file) + 1 and self._begins_file(next_run)
        has_all = bool(upto) and before.contains(upto)
        if not upto.contains(before) or not (follows or has_all or run.epoch != next_run.epoch):
            raise _gap(run.last, next_run.first, str(self))
        self._joined.add(joint)

    def _with_earlier_gtids(self, byte_range: ByteRange) -> ByteRange:
        """Return a copy of a range that also has the GTIDs of the previous epoch and the GTIDs that the
        range's epoch may repeat.

        Transactions may be repeated because another server of the same cluster may have committed them in a
        different order.
        """
        repeated, before = self._earlier_gtids(byte_range.epoch)
        return replace(byte_range, gtid_after=repeated, gtid_before=before)

    def _earlier_gtids(self, epoch: int) -> tuple[str, str]:
        if epoch not in self._repeats:
            runs = self._runs()
            earlier = [run for run in runs if run.epoch < epoch]
            first = next(run for run in runs if run.epoch == epoch)
            # A new epoch of the same server has a position that an operator has set, so that readers receive
            # the bytes from there again.
            is_other_server = bool(earlier) and self.server_key(earlier[-1].epoch) != self.server_key(epoch)
            upto = self.gtid_set(earlier[-1].last) if is_other_server else ""
            before = GtidSet.parse(self.gtid_set(first.first) if upto else "")
            self._repeats[epoch] = "" if before.contains(GtidSet.parse(upto)) else upto, upto
        return self._repeats[epoch]

    def _begins_file(self, run: Extent) -> bool:
        """Return whether a run contains its file from the first event on."""
        if run.start not in self._file_starts:
            self._file_starts.add(len(self._head_of(run)))
        return run.start in self._file_starts

    def empty(self) -> PenstockError:
        """Return the error for a log without bytes."""
        return SourceMissing(f"{self} is empty so far", hint=HINT_EMPTY)

    def behind(self, what: str, position: Position) -> PenstockError:
        """Return the error for a position that the log has not reached."""
        return PositionInvalid(what, position=str(position), hint="See how far it is: penstock log list")

    def __str__(self) -> str:
        return f"the log {self.instance}"


def epoch_shift(required: Sequence[EpochKey], log_epochs: Sequence[EpochKey], log: str) -> int:
    """Return the shift of the log's epoch bases that gives each required epoch its number and server key.

    A single shift for all epochs keeps commit versions ascending. If several shifts fit, the one nearest to 0
    is returned. Without required epochs, the shift is 0. Raises ServerChanged if none fits.
    """
    if not required:
        return 0
    numbered = dict(required)
    shifts = {
        epoch_base(number) - epoch_base(epoch)
        for number, key in required
        for epoch, log_key in log_epochs
        if log_key == key
    }
    fitting = [
        shift
        for shift in shifts
        if all(numbered.get(shifted_epoch(epoch, shift), key) == key for epoch, key in log_epochs)
    ]
    if not fitting:
        asked_epochs = ", ".join(f"{key} as epoch {number}" for number, key in required)
        raise ServerChanged(
            f"{log} was captured from {', '.join(key for _, key in log_epochs) or 'nobody yet'}, not from"
            f" {asked_epochs}",
            hint="A file position means nothing on another server: start by GTID set, or from a new snapshot",
        )
    # Of two equally near shifts, prefer the shift with higher commit versions.
    return min(fitting, key=lambda shift: (abs(shift), -shift))


def _unbroken(runs: Sequence[Extent]) -> list[Extent]:
    """Join consecutive runs of one file without a gap."""
    joined: list[Extent] = []
    for run in runs:
        if joined and joined[-1].last == run.first:
            joined[-1] = replace(joined[-1], end=run.end)
        else:
            joined.append(run)
    return joined


def _is_file_start(run: Extent, start: Position, head_bytes: int) -> bool:
    return (start.epoch, start.file) == (run.epoch, run.file) and run.start <= head_bytes


def _gap(last: Position, first: Position, log: str) -> SequenceGap:
    return SequenceGap(
        f"{log} has nothing between {last} and {first}",
        position=str(last),
        hint=f"Read the missing part from the server, and go on with --start {first}",
    )
