# SPDX-License-Identifier: Apache-2.0
"""The log of a stream that reads a daemon or a log folder, from the point of view of the stream's driver.

An offset names the server of its epoch, so a stream can continue on another daemon. If that daemon has the
same server's files, positions remain valid. Otherwise the stream continues by GTID set, in a new epoch.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import structlog

from penstock.errors import PositionInvalid, PositionPurged, ServerChanged, SourceMissing
from penstock.gtid_sets import LoggedSet
from penstock.model import Position
from penstock.mysql.refusal import file_replaced
from penstock.source.bounds import Bound, Bounds
from penstock.source.kept import KeptSource
from penstock.source.offsets import EARLIEST, LATEST, Offset
from penstock.source.source import ByteRange, Source, open_source, place_of
from penstock.source.stream_log import StreamLog, epoch_after

_log = structlog.get_logger(__name__)


class KeptStreamLog(StreamLog):
    """The kept log of one stream, as the stream's driver uses it; see `StreamLog`."""

    def first(self) -> Offset:
        """Return where a stream without a checkpoint starts: at the head of a daemon's log, or at the first
        position of a folder.
        """
        source = self._kept(None)
        start = self._settings.start or (LATEST if self._settings.is_live else EARLIEST)
        if start == LATEST:
            return self._at_head(source)
        if start == EARLIEST:
            return self._offset(source, self._ask(source.earliest))
        if isinstance(start, Offset):
            return start if start.server_key else replace(start, server_key=self._key(source, start))
        assert isinstance(start, Bound), "options are earliest, latest, an offset or a bound"
        if start.position is not None:
            offset = Offset(start.position)
            return replace(offset, server_key=self._key(source, offset))
        if start.gtid_set is not None:
            return self._by_set(source, start.gtid_set)
        assert start.time_us is not None, "a bound has one field"
        time_us = start.time_us
        return self._offset(source, self._ask(lambda: source.find_time(time_us)))

    def listed(self, here: Offset, listing: Any = None) -> AbstractContextManager[None]:
        """Return a context manager in which queries may be answered from one listing of the log.

        See `DaemonSource.listed`.
        """
        return self._kept(here).listed(listing)

    def head_behind(self, here: Offset) -> Offset:
        """Return the current end of the log, with epochs numbered like those of another offset."""
        return self._at_head(self._kept(here))

    def after_loss(self, begin: Offset) -> Offset:
        """Return the current end of the log, with epochs numbered like those of an offset that was purged."""
        return self.head_behind(begin)

    def target(self) -> Offset:
        """Return the current end of the log, with the log's own epoch numbers."""
        return self._at_head(self._kept(None))

    def has(self, target: Offset, here: Offset) -> bool:
        """Return whether a target, with the epoch numbers of its log, belongs to the same log as `here`."""
        source = self._kept(here)
        return source.server_key(target.position.shifted(source.shift).epoch) == target.server_key

    def up_to(self, head: Offset, target: Offset, here: Offset) -> Offset:
        """Return the earlier of the head and the target. The target has the log's own epoch numbers."""
        if not self.has(target, here):
            return head
        target = replace(target, position=target.position.shifted(self._kept(here).shift))
        return min(head, target, key=lambda one: place_of(one.position))

    def source(self, epoch: int, key: str) -> Source:
        """Return a source in which the epoch with the given number belongs to the server with the given key.

        With an empty key, epochs have the log's own numbers.
        """
        found = self._sources.get((epoch, key))
        if found is None:
            options = replace(self._settings.source, epochs=((epoch, key),) if key else ())
            found = self._sources[epoch, key] = open_source(options)
        return found

    def hold(self, reader: Sequence[str], offset: Offset, seconds: int) -> None:
        """Make a daemon keep the log after an offset; see `KeptSource.hold`."""
        self._kept(offset).hold(reader, offset.position, seconds)

    def resume(self, begin: Offset) -> Offset:
        """Return where to continue from an offset: at the offset itself, or at the same point in a log of
        other servers.

        A log that ends before the offset lags behind another daemon, and will catch up. Raises ServerChanged
        if the offset has no GTID set to locate it by.
        """
        try:
            source = self._kept(begin)
            begin = begin if begin.server_key else replace(begin, server_key=self._key(source, begin))
            self._ask(lambda: source.shift)
            self._check_file_in_log(source, begin)
            return begin
        except ServerChanged:
            return self._relocate_in_log(begin)

    def limited(self, begin: Offset, head: Offset) -> Offset:
        """Return the last transaction end that is within the stream's limits and not after the head."""
        settings, source = self._settings, self._kept(begin)
        if settings.rows_max is None and settings.bytes_max is None:
            return head

        def walk() -> Offset:
            start = begin.position
            end = self._ask(lambda: source.walk(start, head.position, settings.rows_max, settings.bytes_max))
            return head if place_of(end) >= place_of(head.position) else self._offset(source, end)

        try:
            return walk()
        except PositionPurged as problem:
            begin = self._after_loss_in_log(source, begin, problem)
            return walk()

    def unlimited(self, begin: Offset, head: Offset) -> Offset:
        """Return the head, which already includes its GTID set."""
        return head

    def plan(self, begin: Offset, end: Offset) -> tuple[Source, list[ByteRange], Bounds]:
        """Return what a batch reads: ranges of a source, and the filters on its transactions.

        Depends only on the offsets, so that planning a batch again gives the same result.
        """
        source = self._kept(end)
        try:
            known = dict(self._ask(source.epochs))
        except ServerChanged:
            return self._plan_in_log(begin, end)
        bounds = Bounds(gtid_after=begin.gtid_set if begin.by_set else None)
        start = begin.position
        self._check_file_in_log(source, begin)
        if begin.server_key and known.get(start.epoch) != begin.server_key:
            # The stream has read another daemon's log so far.
            start = self._ask(lambda: source.find_gtid_set(begin.gtid_set))
            bounds = Bounds(gtid_after=begin.gtid_set)
        try:
            return source, self._split(source, start, end.position), bounds
        except (PositionPurged, PositionInvalid) as problem:
            found = self._after_loss_in_log(source, begin, problem)
            return source, self._split(source, found.position, end.position), bounds

    # --- Inside -------------------------------------------------------------------------------

    def _kept(self, offset: Offset | None) -> KeptSource:
        source = self.source(offset.position.epoch, offset.server_key) if offset else self.source(0, "")
        assert isinstance(source, KeptSource), "the options say that the log is kept"
        return source

    def _offset(self, source: KeptSource, position: Position) -> Offset:
        """Return a position as an offset that is also valid in other logs."""
        gtid_set = self._ask(lambda: source.gtid_set(position))
        key = self._ask(lambda: source.server_key(position.epoch))
        return Offset(position, gtid_set, key, fingerprint=self._fingerprint_of(source, position))

    def _fingerprint_of(self, source: KeptSource, position: Position) -> str:
        """Return the fingerprint of a position's file, "" if the log contains no part of the file."""
        try:
            return self._ask(lambda: source.fingerprint(position.file, position.epoch))
        except SourceMissing:
            return ""

    def _check_file_in_log(self, source: KeptSource, offset: Offset) -> None:
        """Raise PositionInvalid if the offset's file has been replaced by another file of the same name."""
        if not offset.fingerprint or source.server_key(offset.position.epoch) != offset.server_key:
            return
        found = self._fingerprint_of(source, offset.position)
        if found not in ("", offset.fingerprint):
            raise file_replaced(str(source), offset.position, offset.fingerprint, found)

    def _at_head(self, source: KeptSource) -> Offset:
        return self._offset(source, self._ask(source.head))

    def _key(self, source: KeptSource, offset: Offset) -> str:
        return self._ask(lambda: source.server_key(offset.position.epoch))

    def _by_set(self, source: KeptSource, gtid_set: str) -> Offset:
        found = self._ask(lambda: source.find_gtid_set(gtid_set))
        key = self._ask(lambda: source.server_key(found.epoch))
        return Offset(found, LoggedSet(gtid_set), key, by_set=True)

    def _relocate_in_log(self, begin: Offset) -> Offset:
        """Return the same point in a log of other servers, in an epoch after the offset's own."""
        if not begin.gtid_set:
            raise self._unknown(begin)
        found = self._by_set(self._kept(None), begin.gtid_set)
        epoch = epoch_after(begin.position)
        _log.warning(
            "another daemon's log has no such server, going on by GTID",
            was=begin.server_key,
            now=found.server_key,
            epoch=epoch,
        )
        return replace(found, position=replace(found.position, epoch=epoch))

    def _plan_in_log(self, begin: Offset, end: Offset) -> tuple[Source, list[ByteRange], Bounds]:
        """Plan a batch whose log is gone: the same transactions, by GTID, in the current log."""
        if not (begin.gtid_set and end.gtid_set):
            raise self._unknown(end)
        found = self._relocate_in_log(replace(begin, position=end.position))
        source = self._kept(found)
        ranges = self._split(source, found.position, self._ask(source.head))
        return source, ranges, Bounds(gtid_after=begin.gtid_set, gtid_until=end.gtid_set)

    def _after_loss_in_log(
        self, source: KeptSource, begin: Offset, problem: PositionPurged | PositionInvalid
    ) -> Offset:
        if self._settings.fail_on_data_loss or not isinstance(problem, PositionPurged):
            raise problem
        found = self._offset(source, self._ask(source.earliest))
        self._tell_loss(begin, found, problem)
        return found

    def _unknown(self, offset: Offset) -> ServerChanged:
        return ServerChanged(
            f"the log of {self._settings.source.instance} has nothing of {offset.server_key}",
            position=str(offset.position),
            hint="Its offset has no GTID set to go on by: set gtid_mode=ON, or start from a new snapshot",
        )
