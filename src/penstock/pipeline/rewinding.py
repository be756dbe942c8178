# SPDX-License-Identifier: Apache-2.0
"""Finds an earlier position in a source's log, from which a pipeline reads changes again."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow

from penstock._native import GtidSet
from penstock.errors import OptionInvalid, PositionInvalid
from penstock.limits import OFFSET_MAX
from penstock.model import Position
from penstock.pipeline.settings import PipelineSource
from penstock.pipeline.verify.log_reader import options_at, position_of
from penstock.source.bounds import Bound
from penstock.source.source import ByteRange, Source, open_source, place_of
from penstock.source.walk import TransactionWalk


@dataclass(frozen=True)
class Rewound:
    """Where a source resumes: its offset, and how many bytes of its log are read again."""

    offset: Mapping[str, Any]
    bytes: int

    @property
    def position(self) -> Position:
        """The position at this offset."""
        return position_of(self.offset)


def earlier_offset(source: PipelineSource, offset: Mapping[str, Any], bound: Bound) -> Rewound:
    """Return the offset for a position that is before the pipeline's current position and in the same epoch.

    Raises PositionPurged if the log no longer has the position, PositionInvalid if no transaction begins or
    ends there, and OptionInvalid if the pipeline has not reached it, because the changes in between would be
    missed.
    """
    current, key = position_of(offset), str(offset.get("server_key") or "")
    with closing(open_source(options_at(source, current, key))) as opened:
        if bound.gtid_set is not None:
            known = str(offset.get("gtid_set") or "")
            if not GtidSet.parse(known).contains(GtidSet.parse(bound.gtid_set)):
                raise _not_reached(bound, current)
            position = opened.find_gtid_set(bound.gtid_set)
            details = {"gtid_set": bound.gtid_set, "by_set": True}
        else:
            if bound.position is not None:
                position = replace(bound.position, epoch=current.epoch)
            else:
                assert bound.time_us is not None, "a bound has one field"
                position = _first_from(opened, bound.time_us, current)
            if place_of(position) > place_of(current):
                raise _not_reached(bound, current)
            if bound.position is not None:
                _prove_boundary(opened, position)
            details = {
                "gtid_set": opened.gtid_set(position),
                "fingerprint": opened.fingerprint(position.file),
            }
        if position.epoch != current.epoch:
            raise _not_reached(bound, current)
        extents = opened.extents(position, current)
        size = sum(extent.end for extent in extents[:-1]) + current.offset - position.offset
    location = {"epoch": position.epoch, "file": position.file, "offset": position.offset}
    return Rewound({**location, "server_key": key, **details}, size)


def _not_reached(bound: Bound, current: Position) -> OptionInvalid:
    return OptionInvalid(
        f"the pipeline has not reached {bound}, it is at {current}",
        hint="A pipeline goes forward by itself; to pass over a transaction: penstock pipelines skip",
    )


def _first_from(opened: Source, time_us: int, current: Position) -> Position:
    """Find the first transaction that was committed at or after a time, and return where it begins.

    Returns the current position if there is no such transaction before it.
    """
    first = opened.find_time(time_us)
    if place_of(first) >= place_of(current):
        return current
    for byte_range in opened.split(first, current, range_bytes=OFFSET_MAX):
        for batch in TransactionWalk(opened, byte_range):
            times = batch["commit_timestamp"].cast(pyarrow.int64()).to_pylist()
            for offset, committed_us in zip(batch["offset"].to_pylist(), times, strict=True):
                if committed_us >= time_us:
                    return replace(byte_range.position, offset=offset)
    return current


def _prove_boundary(opened: Source, position: Position) -> None:
    """Raise PositionInvalid unless a position is a transaction boundary of its file."""
    extent = next((candidate for candidate in opened.extents() if candidate.file == position.file), None)
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
