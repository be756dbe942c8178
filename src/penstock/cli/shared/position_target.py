# SPDX-License-Identifier: Apache-2.0
"""Determines the new position for `penstock position set`, from the log and from the server."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import pyarrow.compute

from penstock.cli.shared.log_folder import (
    LogFolder,
    commit_times,
    committed_from,
    first_from,
    first_in,
    outside,
)
from penstock.errors import OptionInvalid, PenstockError, PositionInvalid, ServerChanged
from penstock.gtid_sets import LoggedSet
from penstock.limits import MIB
from penstock.logstore.position_set import Gap, Stretch, held_position
from penstock.logstore.reader import LogReader
from penstock.model import Position, ServerAddress
from penstock.mysql.connection import Connection, connect
from penstock.mysql.refusal import check_position
from penstock.mysql.start import begin_after
from penstock.source.bounds import Bound
from penstock.source.server import ServerSource
from penstock.source.source import FIRST_EVENT_OFFSET, ByteRange, SourceOptions
from penstock.source.walk import TransactionWalk

# If more data than this was lost, it is not read just to count its transactions.
_COUNTED_BYTES_MAX = 256 * MIB

_HINT_ASK = "Let the server be asked: penstock position set --config penstock.yaml INSTANCE"


@dataclass(frozen=True)
class Target:
    """The position at which capture is to resume. `note` is a warning for the user."""

    position: Position
    gtid_set: LoggedSet
    note: str | None = None


class AskedServer:
    """The server that a log is captured from, and one session with it."""

    def __init__(self, connection: Connection, source: ServerSource) -> None:
        self._connection = connection
        self._source = source
        self.files = [(log_file.file, log_file.bytes) for log_file in connection.binary_logs()]

    def find(self, reader: LogReader, bound: Bound) -> Target:
        """Return the position of a bound. Raises PositionPurged, PositionInvalid, ServerBehind."""
        epoch = self._source.options.epoch
        if bound.gtid_set is not None:
            beginning = begin_after(self._connection, bound.gtid_set, self._source, epoch)
            return Target(beginning.position, beginning.gtid_set, beginning.note)
        if bound.time_us is not None:
            position = self._at_time(bound.time_us)
        else:
            assert bound.position is not None, "a bound has one field"
            position = replace(
                bound.position, epoch=epoch, offset=max(bound.position.offset, FIRST_EVENT_OFFSET)
            )
            problem = check_position(self._connection, position)
            if problem is not None:
                raise problem
            if held_position(reader, position) is None:
                self._check_boundary(position)
        return Target(position, self._source.gtid_set(position))

    def count(self, gaps: tuple[Gap, ...]) -> Stretch:
        """Count the contents of gaps; for large gaps, only the bytes."""
        total = Stretch()
        for gap in gaps:
            total = total.plus(Stretch(None if gap.end is None else gap.end - gap.start))
        if total.bytes is None or total.bytes > _COUNTED_BYTES_MAX:
            return Stretch(total.bytes, None, None)
        for gap in gaps:
            start = Position(self._source.options.epoch, gap.file, gap.start)
            for batch in TransactionWalk(self._source, _range_of(start, gap.end)):
                if not batch.num_rows:
                    continue
                times = commit_times(batch)
                total = total.plus(
                    Stretch(
                        0,
                        batch.num_rows,
                        pyarrow.compute.sum(batch["rows"]).as_py() or 0,
                        int(times.min()),
                        int(times.max()),
                    )
                )
        return total

    def _at_time(self, time_us: int) -> Position:
        """Return the first transaction committed at or after a time, or the end of the server's log if there
        is none.
        """
        start = self._source.find_time(time_us)
        for extent in self._source.extents(start):
            position = first_in(self._source, _range_of(extent.first, None), committed_from(time_us))
            if position is not None:
                return position
        return self._source.head()

    def _check_boundary(self, position: Position) -> None:
        """Raise PositionInvalid if a position is inside a transaction."""
        start = replace(position, offset=FIRST_EVENT_OFFSET)
        if position.offset == FIRST_EVENT_OFFSET:
            return
        for batch in TransactionWalk(self._source, _range_of(start, position.offset)):
            if batch.num_rows and batch["end_offset"][-1].as_py() > position.offset:
                raise PositionInvalid(
                    "no transaction begins or ends here",
                    position=str(position),
                    hint=f"The one around it begins at {position.file}:{batch['offset'][-1].as_py()}",
                )


@contextmanager
def asked_server(chosen: LogFolder, reader: LogReader) -> Iterator[AskedServer | None]:
    """Connect to the server that the log follows; return None if the settings name no server.

    Raises ServerChanged if the log follows none of the instance's servers, or an error if the session fails.
    """
    latest = reader.epochs.latest
    if chosen.instance_settings is None or latest is None:
        yield None
        return
    address = _address_of(chosen.servers(), latest.server_key)
    options = SourceOptions(
        address=replace(address, server_id=None),
        instance=chosen.name,
        epoch=latest.epoch,
        server_key=latest.server_key,
    )
    with closing(ServerSource(options)) as source, connect(address) as connection:
        yield AskedServer(connection, source)


def find_in_log(chosen: LogFolder, reader: LogReader, bound: Bound) -> Target:
    """Return the position of a bound from the log alone. Raises OptionInvalid if the log does not contain the
    position.
    """
    if bound.position is not None:
        position = held_position(reader, bound.position)
        if position is None:
            raise OptionInvalid("the log does not have this", position=str(bound.position), hint=_HINT_ASK)
    elif bound.gtid_set is not None:
        start = reader.locate_gtid_set(bound.gtid_set).position
        position = first_from(reader, chosen.source(), start, outside(bound.gtid_set, reader.gtid_set(start)))
    else:
        assert bound.time_us is not None, "a bound has one field"
        start = reader.locate_time(bound.time_us).position
        position = first_from(reader, chosen.source(), start, committed_from(bound.time_us))
    latest, epoch = reader.epochs.latest, reader.epochs.get(position.epoch)
    if latest is None or epoch is None or epoch.server_key != latest.server_key:
        raise ServerChanged("this is in the log as another server's", position=str(position), hint=_HINT_ASK)
    return Target(position, reader.gtid_set(position))


def _address_of(addresses: list[ServerAddress], server_key: str) -> ServerAddress:
    failure: PenstockError | None = None
    server_keys = []
    for address in addresses:
        try:
            with connect(address) as connection:
                server_keys.append(connection.identity().key)
        except PenstockError as problem:
            failure = failure or problem
            continue
        if server_keys[-1] == server_key:
            return address
    if failure is not None:
        raise failure
    raise ServerChanged(
        f"the log is of {server_key}, the instance's servers are {', '.join(server_keys)}",
        hint="Start the capture once, so that the log knows its new server: penstock serve",
    )


def _range_of(start: Position, stop: int | None) -> ByteRange:
    return ByteRange(start.epoch, start.file, start.offset, stop, aligned=True)
