# SPDX-License-Identifier: Apache-2.0
"""Proves that a position given by an operator is a transaction boundary of the log."""

from penstock.errors import PositionInvalid
from penstock.logstore.index import scan
from penstock.logstore.reader import LogReader
from penstock.model import Position


def prove_boundary(reader: LogReader, position: Position) -> None:
    """Raise PositionInvalid if a position in the log is inside a transaction or an event."""
    located = reader.locate_position(position)
    record, start = located.record, located.segment.base
    if record is not None:
        start = record.source_start if record.begins_at_boundary else record.transaction_start or start
    if located.segment.file_number != position.file_number:
        # The position is the end of a file's last segment; the next segment begins a different file.
        return
    with reader.open_segment(located.segment) as data:
        boundary = scan(data, start, min(position.offset, data.end)).boundary
    if boundary != position.offset:
        raise PositionInvalid(
            "no transaction begins or ends here",
            position=str(position),
            hint=f"The one around it begins at {position.file}:{boundary}",
        )
