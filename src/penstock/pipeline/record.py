# SPDX-License-Identifier: Apache-2.0
"""What a batch is: byte ranges of logs and chunks of tables, written down before it runs.

A batch that was written down and is not done is run again exactly so, whoever runs it, as its sink may have
part of it under its number.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from penstock.coordinate.store import reading_record
from penstock.model import TableName
from penstock.source.bounds import Bounds
from penstock.source.source import ByteRange


@dataclass(frozen=True)
class RangeWork:
    """A byte range of one source, and the filters on its transactions.

    `epoch`, `server_key` and `epochs` are what `SourceOptions` needs to read the range's positions.
    """

    source: str
    byte_range: ByteRange
    bounds: Bounds = field(default_factory=Bounds)
    epoch: int = 0
    server_key: str | None = None
    epochs: tuple[tuple[int, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        bounds = {
            name: value
            for name, value in asdict(self.bounds).items()
            if value is not None and name not in ("start", "end")
        }
        return {
            "source": self.source,
            "range": asdict(self.byte_range),
            "bounds": bounds,
            "epoch": self.epoch,
            "server_key": self.server_key,
            "epochs": [list(one) for one in self.epochs],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(
            value["source"],
            ByteRange(**value["range"]),
            Bounds(**value["bounds"]),
            value["epoch"],
            value["server_key"],
            tuple((number, key) for number, key in value["epochs"]),
        )


@dataclass(frozen=True)
class ChunkWork:
    """A chunk of a table of one source, read from the table itself.

    `chunk` is `load.chunks.Chunk` as JSON. With `remove` the rows of the chunk's key range that the target
    has and the source has not are deleted from the target besides (a resnapshot). `request` is the number of
    the resnapshot it belongs to, "" for the pipeline's own full load. An `exact` one is a table without a
    key, read as it was at one place of the log, in a batch of its own: such a place is another one each
    time, so what an earlier attempt has written goes first, and a batch that failed gets another number.
    """

    source: str
    table: TableName
    chunk: Mapping[str, Any]
    where: str | None = None
    remove: bool = False
    request: str = ""
    exact: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"table": [self.table.database, self.table.table], "chunk": dict(self.chunk)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(**{**value, "table": TableName(*value["table"])})


@dataclass(frozen=True)
class BatchRecord:
    """One batch: what it covers, and into how many parts what it writes is cut.

    `begin` and `end` are offsets (`spark.offsets.Offset` as JSON) by source; only sources that move are in
    them. `loads` tells how many chunks of each table, as `source/table`, are done once the batch is, and
    `finished` the resnapshot requests that end with it. Rows of the targets in `divided` go to parts by their
    key, those of all others stay together: the same whenever the batch runs, whatever keys are known by then.
    """

    number: int
    begin: Mapping[str, Mapping[str, Any]]
    end: Mapping[str, Mapping[str, Any]]
    ranges: tuple[RangeWork, ...]
    chunks: tuple[ChunkWork, ...]
    parts: int
    loads: Mapping[str, int] = field(default_factory=dict)
    finished: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the batch reads a table at one place of the log, and so can be begun anew, but not run
        again."""
        return any(one.exact for one in self.chunks)

    @property
    def works(self) -> tuple[RangeWork | ChunkWork, ...]:
        """What tasks do, in the order in which their rows count: those of the log, then of the tables."""
        return (*self.ranges, *self.chunks)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "number": self.number,
            "begin": dict(self.begin),
            "end": dict(self.end),
            "ranges": [one.to_json() for one in self.ranges],
            "chunks": [one.to_json() for one in self.chunks],
            "parts": self.parts,
            "loads": dict(self.loads),
            "finished": list(self.finished),
            "divided": list(self.divided),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` wrote. Raises SchemaInvalid for what another version of Penstock wrote."""
        with reading_record(
            "the batch that was begun",
            "Finish it with the version that began it, or: penstock pipelines reset",
        ):
            return cls(
                int(value["number"]),
                value["begin"],
                value["end"],
                tuple(RangeWork.from_json(one) for one in value["ranges"]),
                tuple(ChunkWork.from_json(one) for one in value["chunks"]),
                int(value["parts"]),
                value["loads"],
                tuple(value["finished"]),
                tuple(value["divided"]),
            )
