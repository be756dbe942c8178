# SPDX-License-Identifier: Apache-2.0
"""Computes the GTIDs before an offset of a segment: the GTIDs in the segment's head plus those in its blocks
up to the offset.
"""

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
    """Return all transactions before a transaction boundary, as text; "" if the source has no GTIDs.

    For a block whose GTIDs are consecutive numbers, the index record is enough. Other blocks are read, and so
    are the bytes between the last block and the boundary. Raises StreamError if those bytes are invalid.
    """
    head, covered_end = reader.head, reader.head.base
    gtids = GtidSet.parse(head.gtid_set)
    if covered_end == len(head.file_head) and covered_end < offset:
        # A file's first event lists the GTIDs before the file. If the log started at this file, the segment's
        # head does not include them.
        length = int.from_bytes(
            reader.read_bytes(covered_end, covered_end + _EVENT_HEADER_BYTES)[_LENGTH_AT], "little"
        )
        gtids = gtids.union(_read(reader, covered_end, min(covered_end + length, offset)))
    records = blocks.records(0, _blocks_before(blocks, offset))
    for start, stop in _runs(records):
        run = records[start:stop]
        if run[0]["flags"] & GTIDS_IN_SEQUENCE:
            # A transaction that is still open at the end of these blocks does not count as ended.
            covered_end = max(covered_end, int(run["last_boundary"].max()))
            for text in _numbered_gtids(run):
                gtids = gtids.union(GtidSet.parse(text))
        elif (end := int(run["last_boundary"].max())) > covered_end:
            gtids = gtids.union(_read(reader, covered_end, end))
            covered_end = end
    if covered_end < offset:
        gtids = gtids.union(_read(reader, covered_end, offset))
    return LoggedSet(str(gtids))


def _blocks_before(blocks: BlockIndex, offset: int) -> int:
    """Return the number of blocks that end at or before an offset."""
    at = blocks.find_offset(offset)
    return min(max(at, 0), len(blocks))


def _runs(records: Records) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) of each run of blocks that store their GTIDs in the same way."""
    start = 0
    for at in range(1, len(records) + 1):
        if at == len(records) or _kind(records[at]) != _kind(records[start]):
            yield start, at
            start = at


def _kind(record: Records) -> tuple[bool, bytes]:
    in_sequence = bool(record["flags"] & GTIDS_IN_SEQUENCE)
    return in_sequence, bytes(record["gtid_source"]) if in_sequence else b""


def _numbered_gtids(records: Records) -> Iterator[str]:
    """Yield the GTIDs of consecutive blocks that share one source and number their GTIDs in sequence."""
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
    scanned = scan(reader, start, stop)
    if scanned.problem is not None:
        raise scanned.problem
    return GtidSet.parse(scanned.gtid_set)
