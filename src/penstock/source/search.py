# SPDX-License-Identifier: Apache-2.0
"""Find the position in a log that corresponds to a GTID set or a time, file by file, from the first bytes of
each file.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import replace

from penstock._native import GtidSet
from penstock.errors import PositionPurged
from penstock.gtid_sets import LoggedSet, union
from penstock.logstore.extent import Extent
from penstock.model import Position
from penstock.source.source import FIRST_EVENT_OFFSET, MAGIC, ByteRange, Source
from penstock.source.walk import TransactionWalk

_EVENT_HEADER_BYTES = 19
_TYPE_AT = 4
ROTATE_EVENT = 4
_FORMAT_DESCRIPTION_EVENT = 15
# The event types of MySQL's Previous_gtids and MariaDB's Gtid_list.
_GTID_LIST_EVENTS = (35, 163)
# The format description's timestamp is the file's creation time in seconds.
_SECOND_US = 1_000_000
_BEGUN_AT = slice(len(MAGIC), len(MAGIC) + 4)


def gtid_set_before(source: Source, position: Position) -> LoggedSet:
    """Return the GTIDs of all transactions before a position: the file's own list plus the transactions after
    it."""
    whole_file = ByteRange(position.epoch, position.file, FIRST_EVENT_OFFSET, None, aligned=True)
    # A file starts with the list of GTIDs before it, so one file is enough.
    stop = max(position.offset, _end_of_list(source, whole_file))
    return _gtid_set_in(source, replace(whole_file, stop=stop))


def gtid_set_after(
    source: Source, start: Position, gtid_set: LoggedSet, end: Position, fingerprint: str = ""
) -> LoggedSet:
    """Return the GTIDs before `end`, given those before `start`, by reading the bytes in between.

    If they are in different files, the file of `end` is read from its start. `fingerprint` belongs to a file
    that contains both.
    """
    if (start.epoch, start.file) != (end.epoch, end.file) or end.offset < start.offset:
        return source.gtid_set(end)
    since = ByteRange(end.epoch, end.file, start.offset, end.offset, aligned=True, fingerprint=fingerprint)
    return union(gtid_set, _gtid_set_in(source, since))


def find_gtid_set(source: Source, gtid_set: str) -> Position:
    """Return the start of the last file preceded only by transactions of the set. Raises PositionPurged."""
    earliest = source.earliest()
    requested = GtidSet.parse(gtid_set)
    for extent in reversed(source.extents()):
        if requested.contains(GtidSet.parse(gtid_set_before(source, extent.first))):
            return extent.first
    raise PositionPurged(
        f"{earliest.file} comes after transactions that the GTID set {gtid_set!r} does not have",
        position=str(earliest),
        hint=f"Add the files before it, or start at {earliest}",
    )


def find_time(source: Source, time_us: int) -> Position:
    """Return the start of the last file created before the time. If there is none, return the start of the
    first file.
    """
    files = source.extents()
    # File times are truncated to seconds, so the previous file may contain transactions from the rest of that
    # second.
    later = bisect_right(files, time_us, key=lambda file: (_begun_seconds(source, file) + 1) * _SECOND_US)
    return files[max(later - 1, 0)].first


def find_time_end(source: Source, time_us: int) -> Position | None:
    """Return the start of the first file created at or after the time, None if there is none."""
    files = source.extents()
    later = bisect_left(files, time_us, key=lambda file: _begun_seconds(source, file) * _SECOND_US)
    return files[later].first if later < len(files) else None


def _gtid_set_in(source: Source, byte_range: ByteRange) -> LoggedSet:
    """Return the GTIDs of a range, plus the GTIDs that the range's file lists as preceding it."""
    walk = TransactionWalk(source, byte_range)
    for _ in walk:
        continue
    return LoggedSet(walk.gtid_set)


def _begun_seconds(source: Source, file: Extent) -> int:
    return int.from_bytes(source.head_bytes(file.file, file.epoch)[_BEGUN_AT], "little")


def _end_of_list(source: Source, whole_file: ByteRange) -> int:
    """Return where a file's list of earlier GTIDs ends. If there is no list, return where the first
    transaction may begin.
    """
    offset = FIRST_EVENT_OFFSET
    for event in first_events(source.open(whole_file)):
        kind = event[_TYPE_AT]
        if kind == ROTATE_EVENT and source.live:
            # The server generates this event to name the file; it is not in the file.
            continue
        if kind not in (_FORMAT_DESCRIPTION_EVENT, *_GTID_LIST_EVENTS):
            break
        offset += len(event)
        if kind in _GTID_LIST_EVENTS:
            break
    return offset


def first_events(chunks: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield the events at the start of a dump. Suitable for a few events, not for a whole log."""
    buffered = b""
    for chunk in chunks:
        buffered += chunk
        while len(buffered) >= _EVENT_HEADER_BYTES:
            size = int.from_bytes(buffered[9:13], "little")
            if size < _EVENT_HEADER_BYTES or len(buffered) < size:
                break
            yield buffered[:size]
            buffered = buffered[size:]
