# SPDX-License-Identifier: Apache-2.0
"""Where capture goes on in a log: at its end on the same server, or on another one in a new epoch."""

from collections.abc import Callable
from dataclasses import replace

import structlog

from penstock._native import GtidSet
from penstock.errors import PositionInvalid, PositionPurged, SourceMissing, StreamError
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import LoggedSet
from penstock.logstore.epochs import EpochRecord
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import Connection
from penstock.mysql.refusal import check_position, file_replaced
from penstock.mysql.start import (
    Beginning,
    Places,
    StartAt,
    begin_after,
    begin_elsewhere,
    begin_empty,
    server_behind,
)

_log = structlog.get_logger(__name__)

PlacesOf = Callable[[ServerAddress, int, str], Places]


class Resumption:
    """Finds where to receive from, over one session on the server that answers.

    `start_at` is where an empty log begins. With `accept_loss` a log goes on behind transactions that its
    server has purged.
    """

    def __init__(
        self,
        log: Log,
        connection: Connection,
        places_of: PlacesOf,
        *,
        instance: str,
        start_at: StartAt,
        accept_loss: bool,
    ) -> None:
        self._log = log
        self._connection = connection
        self._places_of = places_of
        self._instance = instance
        self._start_at = start_at
        self._accept_loss = accept_loss

    def find(self) -> Beginning:
        """Return where to go on; its epoch is a new one where the log is of another server, or of none yet.

        Raises PositionInvalid, PositionPurged, ServerBehind, LimitExceeded.
        """
        last = self._log.epoch
        if last is not None and last.server_key == self._connection.identity().key:
            return self._same_server(last)
        return self._new_epoch(last)

    def _new_epoch(self, last: EpochRecord | None) -> Beginning:
        """Return where the log's next epoch begins on this server."""
        epoch = 0 if last is None else self._log.next_epoch
        places = self._places(epoch)
        try:
            if last is None:
                return begin_empty(self._connection, self._start_at, places, epoch)
            gtid_set = end_of_log(self._log, last)
            return begin_elsewhere(self._connection, gtid_set, self._log.time_max_us, places, epoch)
        finally:
            places.close()

    def _same_server(self, last: EpochRecord) -> Beginning:
        """Go on where the log ends, if the server still knows all that the log has."""
        position = self._log.visible
        if position is None or position.epoch != last.epoch:
            note = self._complete(last)
            return Beginning(last.position, self._log.gtid_set(last.position), note)
        gtid_set = self._log.gtid_set(position)
        problem = check_position(self._connection, position)
        other = None if isinstance(problem, PositionPurged) else self._check_file(position)
        known = self._connection.executed().contains(gtid_set)
        if not known and (problem or other or not self._is_logged(position, gtid_set)):
            raise server_behind(self._connection, gtid_set, position)
        if other is not None:
            return self._another_history(last, gtid_set, other)
        if isinstance(problem, PositionInvalid):
            # It is the same file without its end: the server may give lost GTIDs to other transactions.
            raise problem
        note = self._complete(last)
        gtid_set = self._log.gtid_set(position)
        if not isinstance(problem, PositionPurged):
            return Beginning(position, gtid_set, note)
        found = self._with_nothing_lost(position, gtid_set)
        if found is None and self._accept_loss:
            return self._over_the_gap(position)
        # Where transactions are missing the server's own refusal says it, and is told as it is.
        return found or Beginning(position, gtid_set, note)

    def _check_file(self, position: Position) -> PositionInvalid | None:
        """Return why a position means nothing here: the server's file is another one of that name."""
        places = self._places(position.epoch)
        try:
            found = places.fingerprint(position.file)
        except PositionInvalid as problem:
            return problem
        finally:
            places.close()
        try:
            expected = file_fingerprint(self._log.head_bytes(position.epoch, position.file))
        except SourceMissing:
            # A log in memory may have let all of the file go.
            return None
        if found == expected:
            return None
        return file_replaced(str(self._connection.address), position, expected, found)

    def _another_history(self, last: EpochRecord, gtid_set: LoggedSet, problem: PositionInvalid) -> Beginning:
        """Go on by GTIDs, in a new epoch, on a server whose files are not those that the log was taken from.

        It was reset or restored, or another node of a cluster has the same identity. A server that was reset
        gives the same GTIDs to other transactions, so all of the log's have to lie before its oldest file.
        Raises `problem` where they do not.
        """
        places = self._places(last.epoch)
        try:
            before = places.gtid_set(places.earliest())
        finally:
            places.close()
        if not gtid_set or not GtidSet.parse(before).contains(GtidSet.parse(gtid_set)):
            raise problem
        beginning = self._new_epoch(last)
        _log.warning("another history under one identity", instance=self._instance, why=problem.message)
        note = (
            f"{problem.message}; going on by GTIDs. If it was restored, compare the tables: penstock verify"
        )
        return replace(beginning, note=f"{note}; {beginning.note}" if beginning.note else note)

    def _is_logged(self, position: Position, gtid_set: LoggedSet) -> bool:
        """Tell whether the server's own log has a set before a position, whatever it counts as executed.

        MySQL sends a transaction before it counts it; with semi-synchronous replication it first waits for
        the answer, which may have been lost with the connection.
        """
        places = self._places(position.epoch)
        try:
            return GtidSet.parse(places.gtid_set(position)).contains(GtidSet.parse(gtid_set))
        finally:
            places.close()

    def _complete(self, last: EpochRecord) -> str | None:
        """Complete the GTID set of an epoch that version 0.1 began, which may miss transactions.

        That version took the set that the server reported as executed. Where the file is gone the set stays
        as it is. Returns a note where the log skipped transactions when the epoch began, else None.
        """
        if last.is_logged_set:
            return None
        places = self._places(last.epoch)
        try:
            logged = places.gtid_set(last.position)
        except (PositionPurged, PositionInvalid, StreamError) as problem:
            _log.warning("an epoch's GTID set stays as it is", instance=self._instance, why=str(problem))
            return None
        finally:
            places.close()
        skipped = self._skipped_before(last, logged)
        self._log.complete_epoch(last.epoch, logged)
        if not skipped:
            return None
        _log.error("transactions were never received", instance=self._instance, gtids=skipped)
        return (
            f"epoch {last.epoch} began at {last.position} after transactions that were never received:"
            f" {skipped}. Compare the tables with: penstock verify"
        )

    def _skipped_before(self, last: EpochRecord, logged: LoggedSet) -> str:
        """Return the transactions before an epoch that neither it nor the epoch before it holds."""
        before = next((one for one in reversed(self._log.epochs.epochs) if one.epoch < last.epoch), None)
        if before is None or before.server_key == last.server_key:
            # The first epoch begins where it was told to, as does one that was set by hand.
            return ""
        ends = [extent.last for extent in self._log.extents() if extent.epoch == before.epoch]
        if not ends or not last.gtid_set:
            return ""
        received = GtidSet.parse(self._log.gtid_set(ends[-1])).union(GtidSet.parse(last.gtid_set))
        return str(GtidSet.parse(logged).subtract(received))

    def _with_nothing_lost(self, position: Position, gtid_set: LoggedSet) -> Beginning | None:
        """Return where to go on if of a purged file nothing is missing here, None where that is not so.

        A log that ends where a file of its server ends stands in that file until the next one is seen.
        """
        if not gtid_set:
            return None
        places = self._places(position.epoch)
        try:
            return begin_after(self._connection, gtid_set, places, position.epoch)
        except PositionPurged:
            return None
        finally:
            places.close()

    def _over_the_gap(self, position: Position) -> Beginning:
        """Go on at the first position that the server still has, and say what is lost."""
        places = self._places(position.epoch)
        try:
            earliest = places.earliest()
            gtid_set = places.gtid_set(earliest)
        finally:
            places.close()
        note = f"what the server logged between {position} and {earliest} was purged before it was received"
        _log.error("transactions are lost", instance=self._instance, after=str(position), until=str(earliest))
        return Beginning(earliest, gtid_set, note)

    def _places(self, epoch: int) -> Places:
        return self._places_of(self._connection.address, epoch, self._connection.identity().key)


def end_of_log(log: LogReader, last: EpochRecord) -> LoggedSet:
    """Return the GTIDs of everything in a log whose newest epoch is `last`."""
    position = log.visible
    if position is not None and position.epoch == last.epoch:
        return log.gtid_set(position)
    # Of an epoch without a byte, as one is that was set by hand, only its beginning is known.
    return last.gtid_set
