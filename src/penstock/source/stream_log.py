# SPDX-License-Identifier: Apache-2.0
"""The log of a stream as its driver sees it: the current server, the end of the log, and the extent of a
batch.

Queries only list files or run status statements. Event headers are scanned only if the stream has a limit per
batch.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import structlog

from penstock._native import GtidSet
from penstock.commit_versions import next_epoch
from penstock.errors import PenstockError, PositionInvalid, PositionPurged, ServerChanged
from penstock.gtid_sets import NO_GTIDS, LoggedSet
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import Connection, connect
from penstock.mysql.refusal import file_replaced
from penstock.mysql.start import server_behind
from penstock.source.asking import STREAM_TRIES, ask_again
from penstock.source.bounds import Bound, Bounds
from penstock.source.offsets import EARLIEST, LATEST, Offset
from penstock.source.read_settings import ReadSettings
from penstock.source.search import gtid_set_after
from penstock.source.source import ByteRange, Source, file_number, open_source, place_of

_Answer = TypeVar("_Answer")
_log = structlog.get_logger(__name__)


class StreamLog:
    """The log of one stream, as the stream's driver uses it.

    Holds a session until `close`. A query is retried up to `tries` times while the server is unreachable.
    """

    def __init__(self, settings: ReadSettings, tries: int = STREAM_TRIES) -> None:
        self._settings = settings
        self._tries = tries
        self._session: Connection | None = None
        self._sources: dict[tuple[int, str], Source] = {}
        # The files whose fingerprints were checked since the log was opened, and the offset that was
        # completed last.
        self._proved: set[tuple[str, str]] = set()
        self._last_completed: tuple[Offset, Offset] | None = None

    def close(self) -> None:
        """End the sessions. The next query opens new ones."""
        self._hang_up()
        for source in self._sources.values():
            source.close()
        self._sources.clear()

    def first(self) -> Offset:
        """Return where a stream without a checkpoint starts: at the head of a server's log, or at the first
        file.
        """
        start = self._settings.start or (LATEST if self._settings.is_live else EARLIEST)
        if start == LATEST:
            return self._completed(self.head(0))
        key = self.server_key()
        if start == EARLIEST:
            return Offset(self._ask(self.source(0, key).earliest), server_key=key)
        if isinstance(start, Offset):
            return start if start.server_key else replace(start, server_key=key)
        assert isinstance(start, Bound), "options are earliest, latest, an offset or a bound"
        if start.position is not None:
            return Offset(start.position, server_key=key)
        source = self.source(0, key)
        if start.gtid_set is not None:
            gtid_set = start.gtid_set
            found = self._ask(lambda: source.find_gtid_set(gtid_set))
            return Offset(found, LoggedSet(gtid_set), key, by_set=True)
        assert start.time_us is not None, "a bound has one field"
        time_us = start.time_us
        return Offset(self._ask(lambda: source.find_time(time_us)), server_key=key)

    def head(self, epoch: int) -> Offset:
        """Return the current end of the log as an offset in an epoch, without its GTID set."""
        address = self._settings.source.address
        if address is None:
            return Offset(self._ask(self.source(epoch, "").head))

        def ask() -> Offset:
            session = self._connected(address)
            head = session.head()
            return Offset(Position(epoch, head.file, head.offset), server_key=session.identity().key)

        return self._ask(ask)

    def after_loss(self, begin: Offset) -> Offset:
        """Return the current end of the log, in an epoch after the epoch of a purged offset."""
        return self._completed(self.head(epoch_after(begin.position)))

    def listed(self, here: Offset, listing: Any = None) -> AbstractContextManager[None]:
        """Return a context manager in which queries may be answered from one listing of the offset's log."""
        return nullcontext()

    def head_behind(self, here: Offset) -> Offset:
        """Return the current end of the log, in the epoch of another offset."""
        return self.head(here.position.epoch)

    def target(self) -> Offset:
        """Return the current end of the log, at which a run that catches up will end."""
        return self.head(0)

    def has(self, target: Offset, here: Offset) -> bool:
        """Return whether a target belongs to the log of the same server as `here`."""
        return target.server_key == here.server_key

    def up_to(self, head: Offset, target: Offset, here: Offset) -> Offset:
        """Return the earlier of the head and the target; `here` is the current position of the run."""
        if target.server_key != head.server_key:
            return head
        target = replace(target, position=replace(target.position, epoch=here.position.epoch))
        return min(head, target, key=lambda one: place_of(one.position))

    def server_key(self) -> str:
        """Return the identity of the current server, "" for files."""
        address = self._settings.source.address
        return "" if address is None else self._ask(lambda: self._connected(address).identity().key)

    def source(self, epoch: int, key: str) -> Source:
        """Return the source that reads one server's log in one epoch."""
        found = self._sources.get((epoch, key))
        if found is None:
            options = replace(self._settings.source, epoch=epoch, server_key=key or None)
            found = self._sources[epoch, key] = open_source(options)
        return found

    def resume(self, begin: Offset) -> Offset:
        """Return where to continue from an offset: at the offset itself, or at the same point in another
        server's log.

        Another server starts a new epoch. Raises ServerChanged if the offset has no GTID set to locate it by,
        and PositionInvalid if the log ends before it. If `failOnDataLoss` is off, returns the first available
        offset instead of raising PositionInvalid.
        """
        key = self.server_key()
        if begin.server_key not in ("", key):
            return self._relocate(begin, key)
        begin = begin if begin.server_key else replace(begin, server_key=key)
        head = self.head(begin.position.epoch)
        if place_of(head.position) >= place_of(begin.position):
            replaced = self._check_file(begin)
            if replaced is None:
                return self._complete_once(begin)
            problem = replaced
        else:
            problem = PositionInvalid(
                f"the log ends at {head.position}, before the stream's own position",
                position=str(begin.position),
                hint="Was the server reset, or restored? Start from a new snapshot with a new checkpoint",
            )
        if self._is_before_log(begin, key):
            return self._relocate(begin, key)
        # A log that was reset counts from the start again, so its positions need a new epoch.
        return self._after_loss(begin, key, epoch_after(begin.position), problem)

    def limited(self, begin: Offset, head: Offset) -> Offset:
        """Return the end of the last transaction that is in the log and within the stream's limits, with the
        GTID set up to it.

        Raises PositionPurged. If `failOnDataLoss` is off, counts from the first available position instead.
        """
        settings = self._settings
        if settings.rows_max is None and settings.bytes_max is None:
            return self.unlimited(begin, head)
        source = self.source(begin.position.epoch, head.server_key)

        def walk(start: Position) -> Position:
            return self._ask(lambda: source.walk(start, head.position, settings.rows_max, settings.bytes_max))

        try:
            end = walk(begin.position)
        except PositionPurged as problem:
            begin = self._after_loss(begin, head.server_key, begin.position.epoch, problem)
            end = walk(begin.position)
        reached = place_of(end) >= place_of(head.position)
        return self._completed(head if reached else Offset(end, server_key=head.server_key), begin)

    def unlimited(self, begin: Offset, head: Offset) -> Offset:
        """Return the head with its GTID set, as the end of a batch without limits."""
        return self._completed(head, begin)

    def plan(self, begin: Offset, end: Offset) -> tuple[Source, list[ByteRange], Bounds]:
        """Return what a batch reads: ranges of a source, and the filters on its transactions.

        Depends only on the offsets, so that planning a batch again gives the same result. Propagates errors
        from `resume`.
        """
        key = self.server_key()
        if end.server_key not in ("", key):
            return self._plan_elsewhere(begin, end, key)
        bounds = Bounds(gtid_after=begin.gtid_set if begin.by_set else None)
        if begin.position.epoch != end.position.epoch:
            begin, bounds = self._origin(begin, end, key)
        source = self.source(end.position.epoch, key)
        try:
            ranges = self._split(source, begin.position, end.position)
            ranges = [_with_fingerprint(one, begin, end) for one in ranges]
        except (PositionPurged, PositionInvalid) as problem:
            begin = self._after_loss(begin, key, end.position.epoch, problem)
            ranges = self._split(source, begin.position, end.position)
        return source, ranges, bounds

    def _completed(self, end: Offset, begin: Offset | None = None) -> Offset:
        """Return an offset with the GTIDs before it, so that the stream can continue on another server.

        The GTIDs are read from the log, beginning at `begin` if the GTID set at `begin` is known, and
        otherwise at the start of the file.
        """
        if not end.server_key or end.fingerprint:
            return end
        source = self.source(end.position.epoch, end.server_key)
        same_file = begin is not None and begin.position.file == end.position.file
        known = begin.fingerprint if begin is not None and same_file else ""

        def ask() -> LoggedSet:
            if begin is None or begin.by_set or not begin.gtid_set:
                return source.gtid_set(end.position)
            return gtid_set_after(source, begin.position, begin.gtid_set, end.position, known)

        gtid_set = self._ask(ask)
        return replace(end, gtid_set=gtid_set, fingerprint=known or self._fingerprint(source, end))

    def _complete_once(self, begin: Offset) -> Offset:
        """Complete an offset that version 0.1 wrote: return it with its fingerprint and with the GTID set of
        the log.
        """
        if begin.fingerprint or begin.by_set or not begin.server_key:
            return begin
        if self._last_completed is None or self._last_completed[0] != begin:
            try:
                self._last_completed = begin, self._completed(replace(begin, gtid_set=NO_GTIDS))
            except PositionPurged:
                # The log no longer has the offset, and reading from it raises the error.
                return begin
        return self._last_completed[1]

    def _fingerprint(self, source: Source, offset: Offset) -> str:
        return self._ask(lambda: source.fingerprint(offset.position.file))

    def _check_file(self, begin: Offset) -> PositionInvalid | None:
        """Return the error if the offset's file has been replaced by another file of the same name."""
        file, expected = begin.position.file, begin.fingerprint
        if not expected or (file, expected) in self._proved:
            return None
        source = self.source(begin.position.epoch, begin.server_key)
        try:
            found = self._fingerprint(source, begin)
        except PositionInvalid as problem:
            return problem
        except PositionPurged:
            # The log no longer has the offset, and reading from it raises the error.
            return None
        if found != expected:
            return file_replaced(str(self._settings.source.address), begin.position, expected, found)
        self._proved.add((file, expected))
        return None

    def _is_before_log(self, begin: Offset, key: str) -> bool:
        """Return whether all transactions before an offset are also before the server's oldest file.

        A server that was reset reuses GTIDs, so a GTID in its current files may denote a different
        transaction.
        """
        if not begin.gtid_set or not key:
            return False
        source = self.source(epoch_after(begin.position), key)
        before = self._ask(lambda: source.gtid_set(source.earliest()))
        return GtidSet.parse(before).contains(GtidSet.parse(begin.gtid_set))

    def _origin(self, begin: Offset, end: Offset, key: str) -> tuple[Offset, Bounds]:
        """Return the start of a batch that ends in a new epoch, as a position in the new epoch."""
        source = self.source(end.position.epoch, key)
        if begin.server_key == key and not self._is_before_log(begin, key):
            # The same server reset its log, so everything in the log is newer than the start of the batch.
            return Offset(self._ask(source.earliest), server_key=key), Bounds()
        found = self._ask(lambda: source.find_gtid_set(begin.gtid_set))
        return Offset(found, begin.gtid_set, key, by_set=True), Bounds(gtid_after=begin.gtid_set)

    def _plan_elsewhere(self, begin: Offset, end: Offset, key: str) -> tuple[Source, list[ByteRange], Bounds]:
        """Plan a batch whose server was replaced: the same transactions, by GTID, on the current server."""
        if not (begin.gtid_set and end.gtid_set):
            raise self._server_changed(end, key)
        self._prove_executed(begin)
        epoch = epoch_after(end.position)
        source = self.source(epoch, key)
        first = self._ask(lambda: source.find_gtid_set(begin.gtid_set))
        ranges = self._split(source, first, self.head(epoch).position)
        return source, ranges, Bounds(gtid_after=begin.gtid_set, gtid_until=end.gtid_set)

    def _split(self, source: Source, start: Position, end: Position) -> list[ByteRange]:
        settings = self._settings
        return self._ask(lambda: source.split(start, end, settings.ranges_min, settings.range_bytes))

    def _relocate(self, begin: Offset, key: str) -> Offset:
        if not begin.gtid_set:
            raise self._server_changed(begin, key)
        self._prove_executed(begin)
        epoch = epoch_after(begin.position)
        source = self.source(epoch, key)
        _log.warning("another server answers, going on by GTID", was=begin.server_key, now=key, epoch=epoch)
        found = self._ask(lambda: source.find_gtid_set(begin.gtid_set))
        return Offset(found, begin.gtid_set, key, by_set=True)

    def _prove_executed(self, begin: Offset) -> None:
        """Raise ServerBehind if the current server is missing transactions that were already read.

        It may be a replica that has not caught up, or a former primary.
        """
        address = self._settings.source.address
        assert address is not None, "only a server can be replaced by another"

        def ask() -> None:
            session = self._connected(address)
            if not session.executed().contains(begin.gtid_set):
                raise server_behind(session, begin.gtid_set, begin.position)

        self._ask(ask)

    def _after_loss(
        self, begin: Offset, key: str, epoch: int, problem: PositionPurged | PositionInvalid
    ) -> Offset:
        if self._settings.fail_on_data_loss:
            raise problem
        found = Offset(self._ask(self.source(epoch, key).earliest), server_key=key)
        self._tell_loss(begin, found, problem)
        return found

    def _tell_loss(self, begin: Offset, found: Offset, problem: PenstockError) -> None:
        _log.error(
            "changes are lost: the stream goes on at the first position there is (failOnDataLoss=false)",
            instance=self._settings.source.instance,
            lost_from=str(begin.position),
            goes_on_at=str(found.position),
            why=str(problem),
        )

    def _server_changed(self, offset: Offset, key: str) -> ServerChanged:
        return ServerChanged(
            f"{self._settings.source.address} is now {key}, the checkpoint belongs to {offset.server_key}",
            position=str(offset.position),
            hint="Its offset has no GTID set to go on by: set gtid_mode=ON, or start from a new snapshot",
        )

    def _connected(self, address: ServerAddress) -> Connection:
        if self._session is None:
            self._session = connect(address)
        return self._session

    def _hang_up(self) -> None:
        self._proved.clear()
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _ask(self, question: Callable[[], _Answer]) -> _Answer:
        """Run a query, and retry it while the server is unreachable."""
        return ask_again(question, self._hang_up, self._tries)


def epoch_after(position: Position) -> int:
    """Return the number of the epoch in which a stream continues on another server after a position."""
    return next_epoch(position.epoch, file_number(position.file))


def _with_fingerprint(byte_range: ByteRange, begin: Offset, end: Offset) -> ByteRange:
    """Return a range. If the batch begins or ends in the range's file, the range includes the file's
    fingerprint.
    """
    for offset in (begin, end):
        place = offset.position
        if offset.fingerprint and (place.epoch, place.file) == (byte_range.epoch, byte_range.file):
            return replace(byte_range, fingerprint=offset.fingerprint)
    return byte_range
