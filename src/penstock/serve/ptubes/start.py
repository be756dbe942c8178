# SPDX-License-Identifier: Apache-2.0
"""Finds the position of a Ptubes checkpoint in the log, and how many events of the transaction there are
already consumed.

Three methods are tried in order: file and offset on the server that the checkpoint names, the transaction's
GTID, and the time. If a method yields a position that the log no longer contains, or does not contain yet, an
error is raised and the next method is not tried.
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
from penstock.serve.ptubes.events import Skip
from penstock.serve.ptubes.messages import CheckpointMode, PtubesCheckpoint
from penstock.serve.subscription import Start, Started, resolve_start
from penstock.source.decoding import RangeDecoding
from penstock.source.source import ByteRange

_SERVER_IDS = 1 << 32
_TIME_US_MAX = (1 << 63) - 1


@dataclass(frozen=True)
class _Transaction:
    """One transaction of the log: its start and end, GTID ("" if it has none), time and commit version."""

    start: Position
    end: Position
    gtid: str
    time_us: int
    commit_version: int


async def start_of(pieces: Pieces, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None]:
    """Return where to continue after a checkpoint.

    Raises PositionPurged if the log begins after the checkpoint. Raises PositionInvalid if the checkpoint has
    no position, or if the log has not reached its position. Raises ServerBusy while the log is empty.
    """
    if checkpoint.mode is CheckpointMode.EARLIEST:
        return await resolve_start(pieces, Start(edge="earliest")), None
    if checkpoint.mode is CheckpointMode.LATEST:
        return await resolve_start(pieces, Start(edge="latest")), None
    start = await pieces.search(_find, pieces.source, checkpoint)
    if start is not None:
        return start
    return await resolve_start(pieces, Start(time_us=min(checkpoint.timestamp * 1000, _TIME_US_MAX))), None


def _find(source: OwnSource, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None] | None:
    """Return the position that a checkpoint names by offset or GTID, None if its time has to be used."""
    if source.log.visible is None:
        raise ServerBusy(f"{source} is empty so far", hint="Try again once capture has connected")
    refused: PenstockError | None = None
    for epoch, is_named in _epochs(source, checkpoint):
        try:
            start = _by_offset(source, epoch, checkpoint, is_named)
        except (PositionPurged, PositionInvalid) as problem:
            refused = refused or (problem if is_named else None)
            continue
        if start is not None:
            return start
    if checkpoint.names_transaction:
        return _by_gtid(source, checkpoint)
    if refused is not None:
        raise refused
    if checkpoint.timestamp <= 0:
        raise PositionInvalid(
            "the checkpoint names no server that this log knows, no transaction and no time",
            hint="Subscribe with checkpointMode EARLIEST or LATEST",
        )
    if _complete_since_us(source) > checkpoint.timestamp * 1000:
        raise PositionPurged(
            "the log begins behind the checkpoint's time",
            position=str(source.earliest()),
            hint="Copy the tables in full, then subscribe with checkpointMode LATEST",
        )
    return None


def _complete_since_us(source: OwnSource) -> int:
    """Return a time before which transactions may be missing from the log, in microseconds UTC since 1970."""
    earliest = source.earliest()
    epoch = source.log.epochs.get(earliest.epoch)
    assert epoch is not None, "what the log holds belongs to an epoch"
    first_range = source.range_from(earliest)
    first = (
        None
        if first_range is None
        else next(_transactions(source, first_range[0].position, first_range[1]), None)
    )
    if earliest != epoch.position:
        # The log's epoch began earlier, but its older transactions were trimmed.
        return epoch.time_us if first is None else first.time_us
    return epoch.time_us if first is None else min(epoch.time_us, first.time_us)


def _epochs(source: OwnSource, checkpoint: PtubesCheckpoint) -> list[tuple[EpochRecord, bool]]:
    """Return the epochs that may contain a checkpoint's offset, beginning with the epochs of the server that
    the checkpoint names.

    An event names the server that originally wrote it, which may differ from the captured server.
    """
    if not checkpoint.names_offset:
        return []
    server_id = checkpoint.server_id % _SERVER_IDS
    epochs = [(epoch, epoch.server_id == server_id) for epoch in reversed(source.log.epochs.epochs)]
    return sorted(epochs, key=lambda candidate: not candidate[1])


def _by_offset(
    source: OwnSource, epoch: EpochRecord, checkpoint: PtubesCheckpoint, is_named: bool
) -> tuple[Started, Skip | None] | None:
    """Return the position in one epoch, None if it is not proved to be the checkpoint's position."""
    position = Position(
        epoch.epoch, _file_name(source, epoch, checkpoint.binlog_file), checkpoint.binlog_offset
    )
    boundary = None if position == source.log.visible else _boundary(source, position)
    if boundary is not None:
        end = replace(position, offset=boundary)
        for transaction in _transactions(source, end, position.offset + 1):
            if transaction.start <= position < transaction.end:
                return _in_transaction(transaction, checkpoint, is_named)
            end = transaction.end
        if end != position:
            raise PositionInvalid("the checkpoint names no transaction's beginning", position=str(position))
    if checkpoint.event_index >= 0:
        raise _not_reached(source, str(position))
    return (Started(position), None) if is_named else None


def _in_transaction(
    transaction: _Transaction, checkpoint: PtubesCheckpoint, is_named: bool
) -> tuple[Started, Skip | None] | None:
    """Return the position after an event of a transaction, if the transaction is proved to be the
    checkpoint's.
    """
    if checkpoint.event_index < 0:
        return (Started(transaction.start), None) if is_named else None
    if checkpoint.names_transaction and transaction.gtid:
        is_named = transaction.gtid.lower() == _gtid_of(checkpoint)
    else:
        is_named = is_named or transaction.time_us // 1000 == checkpoint.timestamp
    return _start_after_event(transaction, checkpoint) if is_named else None


def _start_after_event(
    transaction: _Transaction, checkpoint: PtubesCheckpoint
) -> tuple[Started, Skip | None]:
    return Started(transaction.start), Skip(transaction.commit_version, checkpoint.event_index)


def _by_gtid(source: OwnSource, checkpoint: PtubesCheckpoint) -> tuple[Started, Skip | None]:
    """Return the position after an event of a transaction named by its GTID."""
    gtid = _gtid_of(checkpoint)
    log = source.log
    if not GtidSet.parse(log.gtid_set(log.head())).contains(GtidSet.parse(gtid)):
        raise _not_reached(source, gtid)
    position = log.locate_gtid(gtid).position
    while (next_range := source.range_from(position)) is not None:
        byte_range, end = next_range
        for transaction in _transactions(source, byte_range.position, end):
            if transaction.gtid.lower() == gtid:
                if checkpoint.event_index < 0:
                    return Started(transaction.end), None
                return _start_after_event(transaction, checkpoint)
        position = Position(byte_range.epoch, byte_range.file, end)
    raise PositionPurged(
        f"{source} knows the transaction {gtid}, and does not hold it",
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
        names = batch.select(["offset", "end_offset", "gtid", "commit_version"]).to_pylist()
        times = batch["commit_timestamp"].cast(pyarrow.int64()).to_pylist()
        for row, time_us in zip(names, times, strict=True):
            yield _Transaction(
                replace(start, offset=row["offset"]),
                replace(start, offset=row["end_offset"]),
                row["gtid"] or "",
                time_us,
                row["commit_version"],
            )


def _boundary(source: OwnSource, position: Position) -> int | None:
    """Return a transaction boundary at or before a position, in its file; None if nothing follows in the
    file.

    Raises PositionPurged, PositionInvalid.
    """
    located = source.log.locate_position(position)
    if located.position != position:
        return None
    record = located.record
    if record is not None and record.begins_at_boundary:
        return record.source_start
    if record is not None and record.transaction_start:
        return record.transaction_start
    # The newest block has no record yet.
    with source.log.open_blocks(located.segment) as (_, blocks):
        return blocks.boundary_before(position.offset)


def _file_name(source: OwnSource, epoch: EpochRecord, number: int) -> str:
    """Return the name of a server's file. If the log does not have the file, derive the name in the same way
    as the server.
    """
    for extent in source.log.extents():
        if extent.epoch == epoch.epoch and Position(extent.epoch, extent.file, 0).file_number == number:
            return extent.file
    name, _, digits = epoch.file.rpartition(".")
    return f"{name}.{number:0{len(digits)}d}"


def _gtid_of(checkpoint: PtubesCheckpoint) -> str:
    return f"{checkpoint.uuid.lower()}:{checkpoint.transaction_id}"


def _not_reached(source: OwnSource, what: str) -> PositionInvalid:
    return PositionInvalid(
        f"{source} has not reached {what}", hint="This daemon may lag behind another one: penstock status"
    )
