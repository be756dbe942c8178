# SPDX-License-Identifier: Apache-2.0
"""Reads a live server's log as byte ranges, with one bounded binlog dump per file of a range."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from penstock.errors import (
    EventMalformed,
    PositionInvalid,
    PositionPurged,
    ServerChanged,
    SourceMissing,
)
from penstock.fingerprint import file_fingerprint
from penstock.gtid_sets import NO_GTIDS, LoggedSet, union
from penstock.limits import RANGE_BYTES_DEFAULT
from penstock.logstore.extent import Extent
from penstock.model import Position, ServerAddress, TableName
from penstock.mysql.connection import Connection, LogFile, connect
from penstock.mysql.follow import follow
from penstock.mysql.refusal import check_position, file_replaced
from penstock.mysql.replica import DumpStart, open_stream
from penstock.mysql.start import server_behind
from penstock.source.asking import ask_again
from penstock.source.opened_source import OpenedSource
from penstock.source.prepared import PreparedSearch
from penstock.source.search import ROTATE_EVENT, find_time, first_events, gtid_set_before
from penstock.source.source import (
    FIRST_EVENT_OFFSET,
    MAGIC,
    ByteRange,
    SourceOptions,
    cut,
    file_number,
    place_of,
)

_FORMAT_DESCRIPTION_EVENT = 15
_EVENT_HEADER_BYTES = 19
_TYPE_AT = 4
# A rotate event: the header, the position of the next event (8 bytes), the file's name, and possibly a
# checksum.
_ROTATE_NAME_AT = _EVENT_HEADER_BYTES + 8

_Answer = TypeVar("_Answer")


class ServerSource(OpenedSource):
    """The binlog files on a server; see `penstock.source.source.Source`.

    Queries share one session, which is reopened if the connection is lost. Every dump has its own connection.
    """

    live = True

    def __init__(self, options: SourceOptions) -> None:
        assert options.address is not None, "a server source has an address"
        self.options = options
        self.address: ServerAddress = options.address
        self._session: Connection | None = None
        self._heads: dict[str, bytes] = {}
        self._prepared = PreparedSearch(self)

    def close(self) -> None:
        """Close the session, if there is one."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def server_key(self) -> str:
        """Return the identity of the server that answers."""
        return self._ask(Connection.identity).key

    def prove_position(self, position: Position) -> None:
        """Raise PositionPurged or PositionInvalid if the server does not have a position."""
        problem = self._ask(lambda session: check_position(session, position))
        if problem is not None:
            raise problem

    def prove_executed(self, gtid_set: str) -> None:
        """Raise ServerBehind if the server lacks transactions of a set."""

        def prove(session: Connection) -> None:
            if not session.executed().contains(gtid_set):
                raise server_behind(session, gtid_set)

        self._ask(prove)

    def prove_file(self, position: Position, fingerprint: str) -> None:
        """Raise PositionInvalid if the server has another file under the name of a position's file."""
        actual = self.fingerprint(position.file)
        if actual != fingerprint:
            raise file_replaced(str(self.address), position, fingerprint, actual)

    def earliest(self) -> Position:
        """Return the first position that the server still has."""
        return self._position(self._logs()[0].file)

    def head(self) -> Position:
        """Return the current end of the server's log."""
        head = self._ask(Connection.head)
        return self._position(head.file, head.offset)

    def gtid_set(self, position: Position) -> LoggedSet:
        """Return the GTIDs of all transactions before a position, according to the position's file; "" if the
        log has no GTIDs.

        Includes transactions that the server has logged but not committed yet, and transactions before the
        server's oldest file.
        """
        if self._ask(Connection.identity).gtid_mode.upper() == "OFF":
            return NO_GTIDS
        # Query the purged set first: if a file were purged in between, its GTIDs could include transactions
        # after the position.
        purged = self._ask(Connection.purged)
        logged = gtid_set_before(self, position)
        return union(purged, logged) if purged else logged

    def find_gtid_set(self, gtid_set: str) -> Position:
        """Return where the server itself would start to send after the set. Raises PositionPurged."""
        with open_stream(self.address, DumpStart(gtid_set=gtid_set), bounded=True) as stream:
            for event in first_events(stream.event_chunks()):
                if event[_TYPE_AT] == ROTATE_EVENT:
                    # A checksum may follow the name, so look the name up in the server's own list.
                    name_and_checksum = event[_ROTATE_NAME_AT:]
                    matching = [
                        log.file for log in self._logs() if name_and_checksum.startswith(log.file.encode())
                    ]
                    return self._position(max(matching, key=len))
        raise EventMalformed(f"{self.address}: the dump does not begin with the name of a file")

    def find_time(self, time_us: int) -> Position:
        """Return where to start reading to get everything committed at or after the time."""
        return find_time(self, time_us)

    def extents(self, start: Position | None = None, end: Position | None = None) -> list[Extent]:
        """Return the files that overlap [start, end), as SHOW BINARY LOGS lists them.

        No file is splittable: a server opens a file at event boundaries only, and a plan does not know these
        boundaries.
        """
        logs = self._logs()
        epoch = self.options.epoch if start is None else start.epoch
        if start is not None:
            number = file_number(start.file)
            if number < file_number(logs[0].file):
                raise PositionPurged(
                    f"{self.address} has purged {start.file}, its oldest file is {logs[0].file}",
                    position=str(start),
                    hint=f"Take a new snapshot, or start at {logs[0].file}:{FIRST_EVENT_OFFSET}",
                )
            logs = [log for log in logs if file_number(log.file) >= number]
            if not logs or logs[0].file != start.file:
                raise PositionInvalid(
                    f"{self.address} has no file {start.file}",
                    position=str(start),
                    hint="Is this the server the position was taken from? Has it been reset or restored?",
                )
        if end is not None:
            if start is not None and place_of(end) < place_of(start):
                raise PositionInvalid(f"the end is before the start {start}", position=str(end))
            logs = [log for log in logs if file_number(log.file) <= file_number(end.file)]
        return [Extent(epoch, log.file, FIRST_EVENT_OFFSET, log.bytes, splittable=False) for log in logs]

    def split(
        self,
        start: Position | None = None,
        end: Position | None = None,
        ranges_min: int = 1,
        range_bytes: int = RANGE_BYTES_DEFAULT,
    ) -> list[ByteRange]:
        """Split [start, end) at file boundaries. Without an end, split up to the server's current head."""
        end = end or self.head()
        extents = self.extents(start, end)
        first = start or self._position(extents[0].file)
        # A server has no epochs, so both ends belong to the epoch of the start.
        return cut(extents, first, replace(end, epoch=first.epoch), ranges_min, range_bytes)

    def open(
        self, byte_range: ByteRange, resume_at: Callable[[], Position] | None = None
    ) -> Iterator[memoryview]:
        """Yield the bytes that the server sends from the range's start to the end of its log.

        Propagates errors from `follow`: PositionPurged, ServerChanged, and ConnectionLost once the retries
        are used up. Raises PositionInvalid if the file is not the one that the range was planned for.
        """
        stretches = follow(
            self.address,
            DumpStart(position=byte_range.position),
            lambda: DumpStart(position=resume_at()) if resume_at else None,
            bounded=True,
            server_key=self.options.server_key,
            tries_max=self.options.reconnect_tries,
        )
        for stretch in stretches:
            yield from self._check_fingerprint(stretch, byte_range)
            if stretch.failure is not None and resume_at is None:
                raise stretch.failure

    def _check_fingerprint(self, chunks: Iterable[memoryview], byte_range: ByteRange) -> Iterator[memoryview]:
        """Yield a dump once its format description proves that it comes from the range's file."""
        if not byte_range.fingerprint:
            yield from chunks
            return
        buffered, is_proved = b"", False
        for chunk in chunks:
            if is_proved:
                yield chunk
                continue
            buffered += chunk
            head = next(
                (event for event in first_events([memoryview(buffered)]) if _is_format_description(event)),
                None,
            )
            if head is not None:
                fingerprint = file_fingerprint(head)
                if fingerprint != byte_range.fingerprint:
                    raise file_replaced(
                        str(self.address), byte_range.position, byte_range.fingerprint, fingerprint
                    )
                is_proved = True
                yield memoryview(buffered)
        if not is_proved:
            yield memoryview(buffered)

    def fingerprint(self, file: str) -> str:
        """Return the fingerprint of a file as the server sends it now. Raises PositionPurged."""
        self._heads.pop(file, None)
        return file_fingerprint(self.head_bytes(file))

    def align(self, byte_range: ByteRange) -> ByteRange:
        """Return the range extended to the start of its file, because a server's file is never split."""
        return replace(byte_range, start=FIRST_EVENT_OFFSET, aligned=True)

    def joint(self, byte_range: ByteRange) -> None:
        """Return None: a server's files are never split."""

    def schema_history(
        self, position: Position, name: TableName | None = None, *, again: bool = False
    ) -> None:
        """Return None: a server knows only its current tables; `ServerTables` derives earlier definitions."""

    def head_bytes(self, file: str, epoch: int | None = None) -> bytes:
        """Return the file's magic and format description."""
        if file not in self._heads:
            start = DumpStart(position=self._position(file))
            with open_stream(self.address, start, bounded=True) as stream:
                for event in first_events(stream.event_chunks()):
                    if _is_format_description(event):
                        self._heads[file] = MAGIC + event
                        break
        return self._heads[file]

    def _position(self, file: str, offset: int = FIRST_EVENT_OFFSET) -> Position:
        return Position(self.options.epoch, file, offset)

    def _logs(self) -> list[LogFile]:
        logs = self._ask(Connection.binary_logs)
        if not logs:
            raise SourceMissing(f"{self.address} lists no binlog file", hint="Run: penstock check")
        return logs

    def _ask(self, query: Callable[[Connection], _Answer]) -> _Answer:
        """Run a query over the session; reconnect and retry a few times if the session is lost."""
        return ask_again(lambda: query(self._connected()), self.close)

    def _connected(self) -> Connection:
        """Return the open session, else a new one. Raises ServerChanged if another server answers."""
        if self._session is None:
            session = connect(self.address)
            # Store the session before the first query, so that it is closed if the query fails.
            self._session = session
            server_key = session.identity().key
            if self.options.server_key not in (None, server_key):
                self.close()
                raise ServerChanged(
                    f"{self.address} is now {server_key}, the positions belong to {self.options.server_key}",
                    hint="A file position means nothing on another server: start by GTID set",
                )
        return self._session


def _is_format_description(event: bytes) -> bool:
    return event[_TYPE_AT] == _FORMAT_DESCRIPTION_EVENT
