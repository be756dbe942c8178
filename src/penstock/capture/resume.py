# SPDX-License-Identifier: Apache-2.0
"""Where capture resumes: at the end of the log on the same server, or in a new epoch on another server.

If hosts share an instance and another host has captured more than this log contains, the log continues at
that host's position.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import structlog

from penstock._native import GtidSet
from penstock.capture.lease import Handover
from penstock.commit_versions import next_epoch
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
    LogLookup,
    StartAt,
    begin_after,
    begin_elsewhere,
    begin_empty,
    server_behind,
)

_log = structlog.get_logger(__name__)

OpenLookup = Callable[[ServerAddress, int, str], LogLookup]


class Resumption:
    """Determines where to resume receiving, over one session with the server.

    `start_at` is where an empty log starts. With `accept_loss`, receiving resumes even if the server has
    purged the transactions after the log's end. `handover` is the last host's position, if several hosts
    share the instance.
    """

    def __init__(
        self,
        log: Log,
        connection: Connection,
        open_lookup: OpenLookup,
        *,
        instance: str,
        start_at: StartAt,
        accept_loss: bool,
        handover: Handover | None = None,
    ) -> None:
        self._log = log
        self._connection = connection
        self._open_lookup = open_lookup
        self._instance = instance
        self._start_at = start_at
        self._accept_loss = accept_loss
        self._handover = handover

    def find(self) -> Beginning:
        """Return where to resume, in a new epoch if the log is empty or comes from another server.

        Raises PositionInvalid, PositionPurged, ServerBehind, LimitExceeded.
        """
        last, handover = self._log.epoch, self._handover
        key = self._connection.identity().key
        if handover is not None and last is None and handover.server_key == key:
            return self._take_over(handover)
        if handover is not None and not _is_agreed(last, handover):
            return self._new_epoch(last)
        if last is not None and last.server_key == key:
            return self._same_server(last)
        return self._new_epoch(last)

    def _take_over(self, handover: Handover) -> Beginning:
        """Return where an empty log begins on the server that the last host captured."""
        position = handover.position
        problem = check_position(self._connection, position) or self._check_handed_over(handover)
        if problem is None:
            return Beginning(position, handover.gtid_set)
        beginning = (
            self._resume_without_loss(position, handover.gtid_set)
            if isinstance(problem, PositionPurged)
            else None
        )
        if beginning is None and isinstance(problem, PositionPurged) and self._accept_loss:
            return self._resume_after_gap(position)
        if beginning is None:
            raise problem
        return beginning

    def _check_handed_over(self, handover: Handover) -> PositionInvalid | None:
        """Return an error if the server has a different file under the name that the last host recorded."""
        position = handover.position
        lookup = self._lookup(position.epoch)
        try:
            actual = lookup.fingerprint(position.file)
        except PositionInvalid as problem:
            return problem
        finally:
            lookup.close()
        if handover.fingerprint in ("", actual):
            return None
        return file_replaced(str(self._connection.address), position, handover.fingerprint, actual)

    def _next_epoch(self, last: EpochRecord | None) -> int:
        """Return the number of an epoch that begins now on this server.

        Epochs have the same numbers on all hosts: an epoch that another host began on this server keeps its
        number.
        """
        handover = self._handover
        if handover is None or (last is not None and last.epoch > handover.position.epoch):
            return 0 if last is None else self._log.next_epoch
        agreed, visible = handover.position.epoch, self._log.visible
        is_behind = last is None or last.epoch < agreed
        if is_behind and handover.server_key == self._connection.identity().key:
            return agreed
        file_number = handover.reached.file_number
        if visible is not None and visible.epoch == agreed:
            file_number = max(file_number, visible.file_number)
        return next_epoch(agreed, file_number)

    def _new_epoch(self, last: EpochRecord | None) -> Beginning:
        """Return where the log's next epoch starts on this server."""
        epoch = self._next_epoch(last)
        with closing(self._lookup(epoch)) as lookup:
            if last is None and self._handover is not None:
                handover = self._handover
                return begin_elsewhere(self._connection, handover.gtid_set, handover.time_us, lookup, epoch)
            if last is None:
                return begin_empty(self._connection, self._start_at, lookup, epoch)
            gtid_set = end_of_log(self._log, last)
            return begin_elsewhere(self._connection, gtid_set, self._log.time_max_us, lookup, epoch)

    def _same_server(self, last: EpochRecord) -> Beginning:
        """Resume at the end of the log, if the server still has everything that the log has."""
        position = self._log.visible
        if position is None or position.epoch != last.epoch:
            note = self._complete_gtid_set(last)
            return Beginning(last.position, self._log.gtid_set(last.position), note)
        gtid_set = self._log.gtid_set(position)
        problem = check_position(self._connection, position)
        file_problem = None if isinstance(problem, PositionPurged) else self._check_file(position)
        executed = self._connection.executed().contains(gtid_set)
        if not executed and (problem or file_problem or not self._is_logged(position, gtid_set)):
            raise server_behind(self._connection, gtid_set, position)
        if file_problem is not None:
            return self._resume_by_gtids(last, gtid_set, file_problem)
        if isinstance(problem, PositionInvalid):
            # The file is the same, but its end is missing. The server may assign the lost GTIDs to other
            # transactions.
            raise problem
        note = self._complete_gtid_set(last)
        gtid_set = self._log.gtid_set(position)
        if not isinstance(problem, PositionPurged):
            return Beginning(position, gtid_set, note)
        beginning = self._resume_without_loss(position, gtid_set) or self._resume_after_host(position)
        if beginning is None and self._accept_loss:
            return self._resume_after_gap(position)
        # If transactions are missing, the server refuses the dump with its own error, which is passed on.
        return beginning or Beginning(position, gtid_set, note)

    def _check_file(self, position: Position) -> PositionInvalid | None:
        """Return an error if the server has a different file under the position's file name."""
        lookup = self._lookup(position.epoch)
        try:
            actual = lookup.fingerprint(position.file)
        except PositionInvalid as problem:
            return problem
        finally:
            lookup.close()
        try:
            expected = file_fingerprint(self._log.head_bytes(position.epoch, position.file))
        except SourceMissing:
            # A log in memory may have dropped the whole file. Then there is nothing to compare.
            return None
        if actual == expected:
            return None
        return file_replaced(str(self._connection.address), position, expected, actual)

    def _resume_by_gtids(self, last: EpochRecord, gtid_set: LoggedSet, problem: PositionInvalid) -> Beginning:
        """Resume by GTIDs in a new epoch, on a server whose files differ from those captured before.

        Possible causes are a reset, a restore, or another cluster node with the same identity. A server that
        was reset assigns the same GTIDs to other transactions, so it must have executed all of the log's
        GTIDs before its oldest file begins. Otherwise raises `problem`.
        """
        with closing(self._lookup(last.epoch)) as lookup:
            before = lookup.gtid_set(lookup.earliest())
        if not gtid_set or not GtidSet.parse(before).contains(GtidSet.parse(gtid_set)):
            raise problem
        beginning = self._new_epoch(last)
        _log.warning("another history under one identity", instance=self._instance, why=problem.message)
        note = (
            f"{problem.message}; going on by GTIDs. If it was restored, compare the tables: penstock verify"
        )
        return replace(beginning, note=f"{note}; {beginning.note}" if beginning.note else note)

    def _is_logged(self, position: Position, gtid_set: LoggedSet) -> bool:
        """Return whether the server's log contains the transactions of a GTID set before a position, even if
        the server does not count them as executed yet.

        MySQL sends a transaction before counting it as executed. With semi-synchronous replication, MySQL
        first waits for the acknowledgement, which may have been lost with the connection.
        """
        with closing(self._lookup(position.epoch)) as lookup:
            return GtidSet.parse(lookup.gtid_set(position)).contains(GtidSet.parse(gtid_set))

    def _complete_gtid_set(self, last: EpochRecord) -> str | None:
        """Complete the GTID set of an epoch that version 0.1 began.

        The set may be missing transactions, because version 0.1 stored the set that the server reported as
        executed. If the file is gone, the set is left unchanged. Returns a note if the log skipped
        transactions at the start of the epoch, else None.
        """
        if last.is_logged_set:
            return None
        lookup = self._lookup(last.epoch)
        try:
            logged = lookup.gtid_set(last.position)
        except (PositionPurged, PositionInvalid, StreamError) as problem:
            _log.warning("an epoch's GTID set stays as it is", instance=self._instance, why=str(problem))
            return None
        finally:
            lookup.close()
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
        """Return the transactions before an epoch that neither its start nor the previous epoch includes."""
        before = next(
            (epoch for epoch in reversed(self._log.epochs.epochs) if epoch.epoch < last.epoch), None
        )
        if before is None or before.server_key == last.server_key:
            # The first epoch starts at a configured position. So does an epoch that an operator set.
            return ""
        ends = [extent.last for extent in self._log.extents() if extent.epoch == before.epoch]
        if not ends or not last.gtid_set:
            return ""
        received = GtidSet.parse(self._log.gtid_set(ends[-1])).union(GtidSet.parse(last.gtid_set))
        return str(GtidSet.parse(logged).subtract(received))

    def _resume_without_loss(self, position: Position, gtid_set: LoggedSet) -> Beginning | None:
        """Return where to resume if the log has all transactions of the purged files, else None.

        When a log ends at the end of a server's file, the log's position names that file until the next file
        arrives.
        """
        if not gtid_set:
            return None
        lookup = self._lookup(position.epoch)
        try:
            return begin_after(self._connection, gtid_set, lookup, position.epoch)
        except PositionPurged:
            return None
        finally:
            lookup.close()

    def _resume_after_host(self, position: Position) -> Beginning | None:
        """Return where to resume if the server purged transactions that another host has captured, else None.

        The log then has a gap, and its readers stop there.
        """
        handover = self._handover
        if handover is None or handover.position <= position or handover.position.epoch != position.epoch:
            return None
        if check_position(self._connection, handover.position) or self._check_handed_over(handover):
            return None
        note = f"what another host captured between {position} and {handover.position} is not in this log"
        _log.warning("the log has a gap", instance=self._instance, why=note)
        return Beginning(handover.position, handover.gtid_set, note)

    def _resume_after_gap(self, position: Position) -> Beginning:
        """Resume at the first position that the server still has, and report the loss."""
        with closing(self._lookup(position.epoch)) as lookup:
            earliest = lookup.earliest()
            gtid_set = lookup.gtid_set(earliest)
        note = f"what the server logged between {position} and {earliest} was purged before it was received"
        _log.error("transactions are lost", instance=self._instance, after=str(position), until=str(earliest))
        return Beginning(earliest, gtid_set, note)

    def _lookup(self, epoch: int) -> LogLookup:
        return self._open_lookup(self._connection.address, epoch, self._connection.identity().key)


def _is_agreed(last: EpochRecord | None, handover: Handover) -> bool:
    """Return whether a log's newest epoch is the one that all hosts agreed on last, or a later one."""
    agreed = handover.position.epoch
    return last is not None and (
        last.epoch > agreed or (last.epoch == agreed and last.server_key == handover.server_key)
    )


def end_of_log(log: LogReader, last: EpochRecord) -> LoggedSet:
    """Return the GTIDs of all transactions in a log whose newest epoch is `last`."""
    position = log.visible
    if position is not None and position.epoch == last.epoch:
        return log.gtid_set(position)
    # For an epoch without data, such as an epoch that an operator set, only the start is known.
    return last.gtid_set
