# SPDX-License-Identifier: Apache-2.0
"""Where a Ptubes checkpoint lies in the log, and which events of the transaction there are done.

Tried in this order, the first that names a place here counts: file and offset on the server that the
checkpoint names, the transaction by its GTID, the time. A place that the log had, or does not have yet, is an
error and never the next best one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow

from penstock._native import GtidSet
from penstock.errors import PenstockError, PositionInvalid, PositionPurged, ServerBusy
from penstock.logstore.epochs import EpochRecord
from penstock.model import Position
from penstock.serve.own_log import OwnSource
from penstock.serve.pieces import Pieces
from penstock.serve.protocols.ptubes_events import Skip
from penstock.serve.subscription import Start, Started, resolve_start
from penstock.serve.wire.ptubes_messages import CheckpointMode, PtubesCheckpoint
from penstock.source.decoding import RangeDecoding
from penstock.source.source import ByteRange

_SERVER_IDS = 1 << 32
_TIME_US_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class _Transaction:
    """One transaction of the log: where it begins and ends, its GTID, "" where it has none, and its time."""

    start: Position
    end: Position
    gtid: str
    time_us: int


async def start_of(pieces: Pieces, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None]:
    """Return where to go on behind a checkpoint.

    Raises PositionPurged where the log begins behind it, PositionInvalid where it names no place or one that
    the log has not reached, ServerBusy while the log is empty.
    """
    if checkpoint.mode is CheckpointMode.EARLIEST:
        return await resolve_start(pieces, Start(edge="earliest")), None
    if checkpoint.mode is CheckpointMode.LATEST:
        return await resolve_start(pieces, Start(edge="latest")), None
    found = await pieces.search(_find, pieces.source, checkpoint)
    if found is not None:
        return found
    return await resolve_start(pieces, Start(time_us=min(checkpoint.timestamp * 1000, _TIME_US_MAX))), None


def _find(source: OwnSource, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None] | None:
    """Return the place that a checkpoint names by offset or GTID, None where its time has to serve."""
    if source.log.visible is None:
        raise ServerBusy(f"{source} holds nothing yet", hint="Come again once capture has connected")
    refused: PenstockError | None = None
    for epoch, is_named in _epochs(source, checkpoint):
        try:
            found = _by_offset(source, epoch, checkpoint, is_named)
        except (PositionPurged, PositionInvalid) as problem:
            refused = refused or (problem if is_named else None)
            continue
        if found is not None:
            return found
    if checkpoint.names_transaction:
        return _by_gtid(source, checkpoint)
    if refused is not None:
        raise refused
    if checkpoint.timestamp <= 0:
        raise PositionInvalid(
            "the checkpoint names no server that this log knows, no transaction and no time",
            hint="Subscribe with checkpointMode EARLIEST or LATEST",
        )
    if _begun_us(source) > checkpoint.timestamp * 1000:
        raise PositionPurged(
            "the log begins behind the checkpoint's time",
            position=str(source.earliest()),
            hint="Copy the tables in full, then subscribe with checkpointMode LATEST",
        )
    return None


def _begun_us(source: OwnSource) -> int:
    """Return a time before which the log may lack transactions, microseconds UTC since 1970."""
    earliest = source.earliest()
    epoch = source.log.epochs.get(earliest.epoch)
    assert epoch is not None, "what the log holds belongs to an epoch"
    found = source.range_from(earliest)
    first = None if found is None else next(_transactions(source, found[0].position, found[1]), None)
    if earliest != epoch.position:
        # Older ones were trimmed.
        return epoch.time_us if first is None else first.time_us
    return epoch.time_us if first is None else min(epoch.time_us, first.time_us)


def _epochs(source: OwnSource, checkpoint: PtubesCheckpoint) -> list[tuple[EpochRecord, bool]]:
    """Return the epochs in which a checkpoint's offset may lie, those of the server that it names first.

    Events name the server that they were written on first, which need not be the one that was captured.
    """
    if not checkpoint.names_offset:
        return []
    server_id = checkpoint.server_id % _SERVER_IDS
    found = [(one, one.server_id == server_id) for one in reversed(source.log.epochs.epochs)]
    return sorted(found, key=lambda one: not one[1])


def _by_offset(
    source: OwnSource, epoch: EpochRecord, checkpoint: PtubesCheckpoint, is_named: bool
) -> tuple[Started, Skip | None] | None:
    """Return the place in one epoch, None where it is not proved to be the one that is meant."""
    place = Position(epoch.epoch, _file_name(source, epoch, checkpoint.binlog_file), checkpoint.binlog_offset)
    boundary = None if place == source.log.visible else _boundary(source, place)
    if boundary is not None:
        end = replace(place, offset=boundary)
        for one in _transactions(source, end, place.offset + 1):
            if one.start <= place < one.end:
                return _in_transaction(one, checkpoint, is_named)
            end = one.end
        if end != place:
            raise PositionInvalid("the checkpoint names no transaction's beginning", position=str(place))
    if checkpoint.event_index >= 0:
        raise _not_reached(source, str(place))
    return (Started(place), None) if is_named else None


def _in_transaction(
    found: _Transaction, checkpoint: PtubesCheckpoint, is_named: bool
) -> tuple[Started, Skip | None] | None:
    """Return the place behind an event of a transaction that is proved to be the checkpoint's."""
    if checkpoint.event_index < 0:
        return (Started(found.start), None) if is_named else None
    if checkpoint.names_transaction and found.gtid:
        is_named = found.gtid.lower() == _gtid_of(checkpoint)
    else:
        is_named = is_named or found.time_us // 1000 == checkpoint.timestamp
    return _behind(found, checkpoint) if is_named else None


def _behind(found: _Transaction, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None]:
    return Started(found.start), Skip(found.start.commit_version, checkpoint.event_index)


def _by_gtid(source: OwnSource, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None]:
    """Return the place behind an event of a transaction that is named by its GTID."""
    wanted = _gtid_of(checkpoint)
    log = source.log
    if not GtidSet.parse(log.gtid_set(log.head())).contains(GtidSet.parse(wanted)):
        raise _not_reached(source, wanted)
    place = log.locate_gtid(wanted).position
    while (found := source.range_from(place)) is not None:
        byte_range, end = found
        for one in _transactions(source, byte_range.position, end):
            if one.gtid.lower() == wanted:
                if checkpoint.event_index < 0:
                    return Started(one.end), None
                return _behind(one, checkpoint)
        place = Position(byte_range.epoch, byte_range.file, end)
    raise PositionPurged(
        f"{source} knows the transaction {wanted}, and does not hold it",
        position=str(source.earliest()),
        hint="Copy the tables in full, then subscribe with checkpointMode LATEST",
    )


def _transactions(source: OwnSource, start: Position, stop: int) -> Iterator[_Transaction]:
    """Yield the transactions that start in [start, stop) of one file."""
    byte_range = ByteRange(start.epoch, start.file, start.offset, stop, True)
    decoding = RangeDecoding(source, byte_range, emit="transactions", batch_rows_max=64)
    for state in decoding.states(drop_open=True):
        if state != "batch":
            decoding.decoder.take_statement()
            continue
        batch = pyarrow.record_batch(decoding.take_batch())
        names = batch.select(["offset", "end_offset", "gtid"]).to_pylist()
        times = batch["commit_timestamp"].cast(pyarrow.int64()).to_pylist()
        for row, time_us in zip(names, times, strict=True):
            yield _Transaction(
                replace(start, offset=row["offset"]),
                replace(start, offset=row["end_offset"]),
                row["gtid"] or "",
                time_us,
            )


def _boundary(source: OwnSource, place: Position) -> int | None:
    """Return a transaction boundary at or before a place, in its file; None where nothing follows in it.

    Raises PositionPurged, PositionInvalid.
    """
    located = source.log.locate_position(place)
    if located.position != place:
        return None
    record = located.record
    if record is not None and record.begins_at_boundary:
        return record.source_start
    if record is not None and record.transaction_start:
        return record.transaction_start
    # What was written last has no record yet.
    with source.log.open_blocks(located.segment) as (_, blocks):
        return blocks.boundary_before(place.offset)


def _file_name(source: OwnSource, epoch: EpochRecord, number: int) -> str:
    """Return the name of a server's file: the log's own where it has it, else as the server writes them."""
    for one in source.log.extents():
        if one.epoch == epoch.epoch and Position(one.epoch, one.file, 0).file_number == number:
            return one.file
    name, _, digits = epoch.file.rpartition(".")
    return f"{name}.{number:0{len(digits)}d}"


def _gtid_of(checkpoint: PtubesCheckpoint) -> str:
    return f"{checkpoint.uuid.lower()}:{checkpoint.transaction_id}"


def _not_reached(source: OwnSource, what: str) -> PositionInvalid:
    return PositionInvalid(
        f"{source} has not reached {what}", hint="It may be behind another daemon: penstock status"
    )
