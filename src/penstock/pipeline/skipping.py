# SPDX-License-Identifier: Apache-2.0
"""Skips one transaction that a pipeline cannot process, and reports its content."""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from penstock.errors import PositionInvalid
from penstock.limits import OFFSET_MAX
from penstock.model import Position
from penstock.pipeline.settings import PipelineSource
from penstock.pipeline.verify.log_reader import options_at, position_of
from penstock.schema.statements.secrets import without_secrets
from penstock.source.reading import read_range
from penstock.source.source import Source, open_source


@dataclass(frozen=True)
class Skipped:
    """A transaction to skip: the offsets where it begins and ends, its GTID, its tables and its statement."""

    begin: Mapping[str, Any]
    end: Mapping[str, Any]
    gtid: str
    tables: str
    statement: str


def transaction_at(source: PipelineSource, offset: Mapping[str, Any], position: Position) -> Skipped:
    """Return the transaction at a position after a pipeline's offset.

    Reads event headers from the offset on. Raises PositionInvalid if there is none.
    """
    current = position_of(offset)
    with closing(open_source(options_at(source, current, str(offset.get("server_key") or "")))) as opened:
        head = opened.head()
        for byte_range in opened.split(current, head, range_bytes=OFFSET_MAX):
            if byte_range.file != position.file:
                continue
            for batch in read_range(opened, byte_range, emit="transactions"):
                for row in batch.to_arrow().to_pylist():
                    if row["file"] == position.file and row["offset"] <= position.offset < row["end_offset"]:
                        return _describe_transaction(opened, offset, row)
    raise PositionInvalid(
        f"no transaction behind {current} has the position {position}",
        position=str(position),
        hint="Name the position of the error, as penstock pipelines show tells it",
    )


def _describe_transaction(opened: Source, offset: Mapping[str, Any], row: Mapping[str, Any]) -> Skipped:
    epoch = int(offset.get("epoch", 0))

    def offset_at(log_offset: int) -> dict[str, Any]:
        position = Position(epoch, row["file"], log_offset)
        known = {
            "epoch": epoch,
            "file": row["file"],
            "offset": log_offset,
            "gtid_set": opened.gtid_set(position),
        }
        return {**known, "server_key": offset.get("server_key", "")}

    return Skipped(
        offset_at(row["offset"]),
        offset_at(row["end_offset"]),
        row["gtid"] or "",
        row["tables"],
        without_secrets(row["statement"] or ""),
    )
