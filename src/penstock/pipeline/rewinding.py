# SPDX-License-Identifier: Apache-2.0
"""Finding an earlier place in a source's log, from where a pipeline reads its changes again."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow

from penstock._native import GtidSet
from penstock.errors import OptionInvalid, PositionInvalid
from penstock.limits import OFFSET_MAX
from penstock.model import Position
from penstock.pipeline.settings import PipelineSource
from penstock.pipeline.verify.log_behind import options_at, position_of
from penstock.source.bounds import Bound
from penstock.source.source import ByteRange, Source, open_source, place_of
from penstock.source.walk import TransactionWalk


@dataclass(frozen=True)
class Rewound:
    """Where a source goes on: its offset, and how many bytes of its log are read again."""

    offset: Mapping[str, Any]
    bytes: int

    @property
    def position(self) -> Position:
        """The position of the offset."""
        return position_of(self.offset)


def earlier_offset(source: PipelineSource, offset: Mapping[str, Any], wanted: Bound) -> Rewound:
    """Return the offset of a place before the one a pipeline has reached, in the same epoch of the log.

    Raises PositionPurged where the log no longer has it, PositionInvalid where no transaction begins or ends
    there, and OptionInvalid for a place that the pipeline has not reached: what lies between would be missed.
    """
    stands, key = position_of(offset), str(offset.get("server_key") or "")
    opened = open_source(options_at(source, stands, key))
    try:
        if wanted.gtid_set is not None:
            known = str(offset.get("gtid_set") or "")
            if not GtidSet.parse(known).contains(GtidSet.parse(wanted.gtid_set)):
                raise _not_reached(wanted, stands)
            position = opened.find_gtid_set(wanted.gtid_set)
            found = {"gtid_set": wanted.gtid_set, "by_set": True}
        else:
            if wanted.position is not None:
                position = replace(wanted.position, epoch=stands.epoch)
            else:
                assert wanted.time_us is not None, "a bound has one field"
                position = _first_from(opened, wanted.time_us, stands)
            if place_of(position) > place_of(stands):
                raise _not_reached(wanted, stands)
            if wanted.position is not None:
                _prove_boundary(opened, position)
            found = {"gtid_set": opened.gtid_set(position), "fingerprint": opened.fingerprint(position.file)}
        if position.epoch != stands.epoch:
            raise _not_reached(wanted, stands)
        extents = opened.extents(position, stands)
        size = sum(extent.bytes for extent in extents[:-1]) + stands.offset - position.offset
    finally:
        opened.close()
    place = {"epoch": position.epoch, "file": position.file, "offset": position.offset}
    return Rewound({**place, "server_key": key, **found}, size)


def _not_reached(wanted: Bound, stands: Position) -> OptionInvalid:
    return OptionInvalid(
        f"the pipeline has not reached {wanted}, it is at {stands}",
        hint="A pipeline goes forward by itself; to pass over a transaction: penstock pipelines skip",
    )


def _first_from(opened: Source, time_us: int, stands: Position) -> Position:
    """Return where the first transaction committed at or after a time begins, at the latest where the
    pipeline stands."""
    first = opened.find_time(time_us)
    if place_of(first) >= place_of(stands):
        return stands
    for byte_range in opened.split(first, stands, range_bytes=OFFSET_MAX):
        for batch in TransactionWalk(opened, byte_range):
            times = batch["commit_timestamp"].cast(pyarrow.int64()).to_pylist()
            for offset, committed_us in zip(batch["offset"].to_pylist(), times, strict=True):
                if committed_us >= time_us:
                    return replace(byte_range.position, offset=offset)
    return stands


def _prove_boundary(opened: Source, position: Position) -> None:
    """Raise PositionInvalid where a position is inside a transaction, or in none of its file."""
    extent = next((one for one in opened.extents() if one.file == position.file), None)
    if extent is not None and extent.start <= position.offset:
        if position.offset == extent.start:
            return
        whole_file = ByteRange(position.epoch, position.file, extent.start, None, aligned=True)
        for batch in TransactionWalk(opened, whole_file):
            for row in batch.select(["offset", "end_offset"]).to_pylist():
                if position.offset in (row["offset"], row["end_offset"]):
                    return
                if row["offset"] > position.offset:
                    break
    raise PositionInvalid(
        f"no transaction begins at {position}",
        position=str(position),
        hint="penstock inspect lists the transactions of a file; or name a time: --time",
    )
