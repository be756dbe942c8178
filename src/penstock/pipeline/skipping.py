# SPDX-License-Identifier: Apache-2.0
"""Passing over one transaction that a pipeline cannot follow, and saying what it was."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import PositionInvalid
from penstock.limits import OFFSET_MAX
from penstock.model import Position
from penstock.pipeline.settings import PipelineSource
from penstock.pipeline.verify.log_behind import options_at, position_of
from penstock.source.reading import read_range
from penstock.source.source import Source, open_source


@dataclass(frozen=True)
class Skipped:
    """A transaction: the offsets where it begins and ends, its GTID, and what its events are of."""

    begin: Mapping[str, Any]
    end: Mapping[str, Any]
    gtid: str
    tables: str
    statement: str


def transaction_at(source: PipelineSource, offset: Mapping[str, Any], position: Position) -> Skipped:
    """Return the transaction that has a position, of those behind a pipeline's offset.

    Reads event headers from the offset on. Raises PositionInvalid where there is none.
    """
    stands = position_of(offset)
    opened = open_source(options_at(source, stands, str(offset.get("server_key") or "")))
    try:
        head = opened.head()
        for byte_range in opened.split(stands, head, range_bytes=OFFSET_MAX):
            if byte_range.file != position.file:
                continue
            for batch in read_range(opened, byte_range, emit="transactions"):
                for row in batch.to_arrow().to_pylist():
                    if row["file"] == position.file and row["offset"] <= position.offset < row["end_offset"]:
                        return _skipped(opened, offset, row)
    finally:
        opened.close()
    raise PositionInvalid(
        f"no transaction behind {stands} has the position {position}",
        position=str(position),
        hint="Name the position of the error, as penstock pipelines show tells it",
    )


def _skipped(opened: Source, offset: Mapping[str, Any], row: Mapping[str, Any]) -> Skipped:
    epoch = int(offset.get("epoch", 0))

    def at(place: int) -> dict[str, Any]:
        position = Position(epoch, row["file"], place)
        known = {"epoch": epoch, "file": row["file"], "offset": place, "gtid_set": opened.gtid_set(position)}
        return {**known, "server_key": offset.get("server_key", "")}

    return Skipped(
        at(row["offset"]),
        at(row["end_offset"]),
        row["gtid"] or "",
        row["tables"],
        row["statement"] or "",
    )
