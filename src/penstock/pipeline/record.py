# SPDX-License-Identifier: Apache-2.0
"""The content of a batch: byte ranges of logs and chunks of tables, recorded before it runs.

A batch that is recorded but unfinished is run again unchanged, by any process, because the sink may already
have stored a part of the batch under its batch number.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Self

from penstock.coordinate.store import reading_record
from penstock.model import TableName
from penstock.source.bounds import Bounds
from penstock.source.source import ByteRange


@dataclass(frozen=True)
class RangeWork:
    """A byte range of one source, and the filters on its transactions.

    `epoch`, `server_key` and `epochs` are the fields that `SourceOptions` needs to interpret the range's
    positions. `content` contains the first bytes of the range, if planning has already read them; it is not
    recorded.
    """

    source: str
    byte_range: ByteRange
    bounds: Bounds = field(default_factory=Bounds)
    epoch: int = 0
    server_key: str | None = None
    epochs: tuple[tuple[int, str], ...] = ()
    content: bytes = field(default=b"", compare=False, repr=False)

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
            "epochs": [list(epoch) for epoch in self.epochs],
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
    """A chunk of a source's table, to be read from the table itself.

    `chunk` is `load.chunks.Chunk` as JSON. With `remove` (a resnapshot), rows of the chunk's key range that
    only the target has are deleted. `request` is the number of the resnapshot that the chunk belongs to, ""
    for the pipeline's own full load. With `exact`, the chunk is a whole table without a key, read at one log
    position in a batch of its own. That position differs on each attempt, so a failed batch is retried under
    another number, and rows that an earlier attempt wrote are deleted first. In a history, row versions that
    began before version `ends_before` are ended; 0 ends none.
    """

    source: str
    table: TableName
    chunk: Mapping[str, Any]
    where: str | None = None
    remove: bool = False
    request: str = ""
    exact: bool = False
    ends_before: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        # `asdict` would copy the chunk value by value, of each table of a batch.
        return {**vars(self), "table": [self.table.database, self.table.table], "chunk": dict(self.chunk)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        return cls(**{**value, "table": TableName(*value["table"])})


@dataclass(frozen=True)
class BatchRecord:
    """One batch: the ranges and chunks that it covers, and the number of parts of its output.

    `begin` and `end` map sources to offsets (`source.offsets.Offset` as JSON) and contain only sources that
    advance. `loads` maps `source/table` to the number of chunks that are done after the batch. `finished`
    contains the resnapshot requests that are complete after the batch. Rows of the targets in `divided` are
    assigned to parts by their key; rows of any other target stay together. `divided` is recorded, so that a
    retry divides rows the same way even if different keys are known by then. `written` contains the targets
    that received rows in an exact load. It is recorded before the sink commits the load, and None until then.
    `groups` is the number of consecutive chunks that each task reads; () means one chunk per task, as in
    earlier versions of Penstock. `groups` is recorded too, because a sink identifies the parts of a retry by
    their numbers.
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
    written: tuple[str, ...] | None = None
    groups: tuple[int, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the batch reads a table at one log position.

        Such a batch can be retried only as a new batch.
        """
        return any(chunk.exact for chunk in self.chunks)

    @property
    def sources(self) -> frozenset[str]:
        """The sources that the batch reads."""
        return frozenset(work.source for work in self.works) | self.end.keys()

    @cached_property
    def works(self) -> tuple[RangeWork | ChunkWork, ...]:
        """The works of the tasks, in the order in which their rows are applied: log ranges first, then
        tables.
        """
        return (*self.ranges, *self.chunks)

    @cached_property
    def tasks(self) -> tuple[range, ...]:
        """The numbers of the works of each task."""
        ends = [*range(len(self.ranges)), len(self.ranges)]
        for count in self.groups or [1] * len(self.chunks):
            ends.append(ends[-1] + count)
        assert ends[-1] == len(self.works), "each work belongs to one task"
        return tuple(map(range, ends, ends[1:]))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "number": self.number,
            "begin": dict(self.begin),
            "end": dict(self.end),
            "ranges": [work.to_json() for work in self.ranges],
            "chunks": [work.to_json() for work in self.chunks],
            "parts": self.parts,
            "loads": dict(self.loads),
            "finished": list(self.finished),
            "divided": list(self.divided),
            **({} if self.written is None else {"written": list(self.written)}),
            **({"groups": list(self.groups)} if self.groups else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Read what `to_json` wrote. Raises SchemaInvalid for a record of another version of Penstock."""
        with reading_record(
            "the batch that was begun",
            "Finish it with the version that began it, or: penstock pipelines reset",
        ):
            return cls(
                int(value["number"]),
                value["begin"],
                value["end"],
                tuple(RangeWork.from_json(work) for work in value["ranges"]),
                tuple(ChunkWork.from_json(work) for work in value["chunks"]),
                int(value["parts"]),
                value["loads"],
                tuple(value["finished"]),
                tuple(value["divided"]),
                tuple(value["written"]) if "written" in value else None,
                tuple(map(int, value.get("groups", ()))),
            )
