# SPDX-License-Identifier: Apache-2.0
"""The part of the binary log that is still on a captured server, and how many of its bytes precede the
capture's position.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.model import Position, ServerAddress
from penstock.mysql.connection import Connection, LogFile
from penstock.mysql.replica import FIRST_EVENT_OFFSET, DumpStart, open_stream

# Timestamp, type and size in an event's header.
_HEADER = struct.Struct("<IB4xI")
_FORMAT_DESCRIPTION = 15

_DAY_SECONDS = 86_400


@dataclass(frozen=True)
class ServerLog:
    """The binary log of a server at one moment.

    `before_bytes` is the number of bytes in the server's files before the capture's position, None if the
    position is not in these files because it is purged or belongs to another epoch. `earliest_seconds` is the
    creation time of the oldest file in seconds since 1970. `retention_seconds` is 0 if the server purges
    nothing by age, None if unknown.
    """

    file_number: int
    file_bytes: int
    bytes: int
    earliest_file: str
    earliest_seconds: int
    before_bytes: int | None
    remaining_bytes: int | None
    retention_seconds: float | None

    @property
    def is_purged(self) -> bool:
        """Whether the server no longer has the data after the capture's position."""
        return self.before_bytes is None


def read_server_log(
    connection: Connection, address: ServerAddress, position: Position | None, previous: ServerLog | None
) -> ServerLog | None:
    """Query a server for its log; return None if it lists no file.

    `position` is None if the capture's position does not belong to this server. The oldest file's creation
    time is read again only if another file is now the oldest. Raises an error if the session fails.
    """
    files = connection.binary_logs()
    if not files:
        return None
    before, remaining = (None, None) if position is None else _split(files, position)
    earliest = files[0].file
    earliest_seconds = (
        previous.earliest_seconds
        if previous is not None and previous.earliest_file == earliest
        else _created_seconds(address, earliest)
    )
    return ServerLog(
        file_number=_number(files[-1]),
        file_bytes=files[-1].bytes,
        bytes=sum(file.bytes for file in files),
        earliest_file=earliest,
        earliest_seconds=earliest_seconds,
        before_bytes=before,
        remaining_bytes=remaining,
        retention_seconds=_retention_seconds(connection),
    )


def bytes_after(files: Iterable[LogFile], position: Position) -> int:
    """Return how many bytes of a server's files follow a position."""
    remaining = 0
    for file in files:
        number = _number(file)
        if number == position.file_number:
            remaining += max(file.bytes - position.offset, 0)
        elif number > position.file_number:
            remaining += file.bytes
    return remaining


def _split(files: list[LogFile], position: Position) -> tuple[int | None, int | None]:
    """Return how many bytes of the files are before a position (None if it is purged), and how many are after
    it.
    """
    numbers = [_number(file) for file in files]
    before = sum(
        file.bytes for file, number in zip(files, numbers, strict=True) if number < position.file_number
    )
    # The position may be the end of a file whose successor is now the server's oldest file.
    if position.file_number in numbers:
        before += position.offset
    elif position.file_number != numbers[0] - 1:
        return None, bytes_after(files, position)
    return before, bytes_after(files, position)


def _number(file: LogFile) -> int:
    return Position(0, file.file, 0).file_number


def _retention_seconds(connection: Connection) -> float | None:
    """Return the server's retention by age; see `binlog_expire_logs_seconds` in its manual."""
    variables = connection.variables("binlog_expire_logs_seconds", "expire_logs_days")
    seconds = variables.get("binlog_expire_logs_seconds")
    if seconds is not None and float(seconds):
        return float(seconds)
    days = variables.get("expire_logs_days")
    if days is not None:
        return float(days) * _DAY_SECONDS
    return None if seconds is None else 0.0


def _created_seconds(address: ServerAddress, file: str) -> int:
    """Return when a file was created, which is the time of its first event, the format description."""
    # With the capture's own server id, this connection would make the server end the capture's stream.
    start = DumpStart(Position(0, file, FIRST_EVENT_OFFSET))
    events = b""
    with open_stream(replace(address, server_id=None), start, bounded=True) as stream:
        for chunk in stream.event_chunks():
            events += chunk
            while len(events) >= _HEADER.size:
                seconds, kind, size = _HEADER.unpack_from(events)
                if kind == _FORMAT_DESCRIPTION:
                    return int(seconds)
                if len(events) < size:
                    break
                events = events[size:]
    return 0
