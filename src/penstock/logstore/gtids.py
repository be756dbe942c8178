# SPDX-License-Identifier: Apache-2.0
"""Which GTIDs come before an offset of a segment: its head says what came before it, its blocks the rest."""

from collections.abc import Iterator
from uuid import UUID

from penstock._native import GtidSet
from penstock.gtid_sets import LoggedSet
from penstock.logstore.index import BlockIndex, scan
from penstock.logstore.records import GTIDS_IN_SEQUENCE, Records
from penstock.logstore.segment import SegmentReader

# Timestamp 4, type 1, server id 4, length 4, end position 4, flags 2.
_EVENT_HEADER_BYTES = 19
_LENGTH_AT = slice(9, 13)


def gtid_set_before(reader: SegmentReader, blocks: BlockIndex, offset: int) -> LoggedSet:
    """Return every transaction before a transaction boundary, as text; "" where the source has no GTIDs.

    Of a block whose GTIDs are numbers that follow one another the record is enough; the others are read,
    as is what lies between the last block and the offset. Raises StreamError where those bytes do not
    hold.
    """
    head, place = reader.head, reader.head.base
    found = GtidSet.parse(head.gtid_set)
    if place == len(head.file_head) and place < offset:
        # The file's own first event says what came before it, also to who did not know when the log began.
        length = int.from_bytes(reader.read_bytes(place, place + _EVENT_HEADER_BYTES)[_LENGTH_AT], "little")
        found = found.union(_read(reader, place, min(place + length, offset)))
    records = blocks.records(0, _blocks_before(blocks, offset))
    for start, stop in _stretches(records):
        known = records[start:stop]
        if known[0]["flags"] & GTIDS_IN_SEQUENCE:
            # A transaction that is open at the end of these blocks is not among those that ended.
            place = max(place, int(known["last_boundary"].max()))
            for text in _numbered(known):
                found = found.union(GtidSet.parse(text))
        elif (end := int(known["last_boundary"].max())) > place:
            found = found.union(_read(reader, place, end))
            place = end
    if place < offset:
        found = found.union(_read(reader, place, offset))
    return LoggedSet(str(found))


def _blocks_before(blocks: BlockIndex, offset: int) -> int:
    """Return how many blocks end at or before an offset."""
    at = blocks.find_offset(offset)
    return min(max(at, 0), len(blocks))


def _stretches(records: Records) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of the runs of blocks whose GTIDs are told alike."""
    start = 0
    for at in range(1, len(records) + 1):
        if at == len(records) or _kind(records[at]) != _kind(records[start]):
            yield start, at
            start = at


def _kind(record: Records) -> tuple[bool, bytes]:
    in_sequence = bool(record["flags"] & GTIDS_IN_SEQUENCE)
    return in_sequence, bytes(record["gtid_source"]) if in_sequence else b""


def _numbered(records: Records) -> Iterator[str]:
    """Yield the sets of blocks that are of one source, and in sequence each."""
    source = bytes(records[0]["gtid_source"])
    for first, count in zip(records["gtid_number"].tolist(), records["transactions"].tolist(), strict=True):
        if not count or not first:
            continue
        if any(source[8:]):
            yield f"{UUID(bytes=source)}:{first}-{first + count - 1}"
        else:
            domain, server = int.from_bytes(source[:4], "little"), int.from_bytes(source[4:8], "little")
            yield f"{domain}-{server}-{first + count - 1}"


def _read(reader: SegmentReader, start: int, stop: int) -> GtidSet:
    found = scan(reader, start, stop)
    if found.problem is not None:
        raise found.problem
    return GtidSet.parse(found.gtid_set)
