# SPDX-License-Identifier: Apache-2.0
"""Selects the events of a piece that a Ptubes session receives, and determines their order and their shards.

The rules are the same as in Ptubes. A row goes to the shard of its key. Commits, heartbeats and definitions
go to all shards of the session. Of consecutive commits, only one is sent. Events of the heartbeat table are
not sent. All operations process whole columns, not single events.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import pyarrow

from penstock.model import TableName
from penstock.serve.ptubes.messages import (
    PtubesCheckpoint,
    ShardMessages,
    checkpoint_in,
    defined_in,
    envelope,
    framed_bytes,
    payload_bytes,
)

# Writers use these tables to measure the delay of all followers.
HEARTBEAT_TABLES = (TableName("buffalo_heartbeat", "heartbeat"), TableName("ptubes_heartbeat", "heartbeat"))

# The names by which definitions refer to the heartbeat tables: databases, and tables with their databases.
_HEARTBEAT_NAMES = {
    name for table in HEARTBEAT_TABLES for name in (table.database, f"{table.database}.{table.table}")
}

_STATEMENT, _END, _HEARTBEAT = 3, 5, 6


@dataclass(frozen=True)
class EventRules:
    """Which event types and shards a session receives."""

    shard_count: int
    shards: tuple[int, ...]
    need_end: bool
    need_ddl: bool


@dataclass(frozen=True)
class Skip:
    """The events of one transaction that the client has already consumed.

    `commit_version` identifies the transaction, and `event_index` is the index of the last consumed event.
    """

    commit_version: int
    event_index: int


class Events:
    """The events of one batch for a session. `left` is the number of events that have not been taken yet."""

    def __init__(self, batch: pyarrow.RecordBatch, rules: EventRules, skip: Skip | None) -> None:
        self._values: pyarrow.LargeBinaryArray = batch["value"]
        kinds = batch["kind"].to_numpy(zero_copy_only=False)
        slots = batch["slot"].to_numpy(zero_copy_only=False).astype(numpy.int32)
        lengths = framed_bytes(self._values)
        # Shard -1 stands for every shard.
        shards = numpy.where((kinds < _STATEMENT) & (slots >= 0), slots % rules.shard_count, -1)
        wanted = numpy.isin(shards, rules.shards)
        if rules.shards:
            wanted |= shards < 0
        # The end of a transaction with only heartbeats has length 0 and is not sent.
        wanted &= lengths > 0
        for at in numpy.flatnonzero(kinds == _STATEMENT):
            # Definitions of the heartbeat tables are never sent. There are few definitions, so a loop is
            # fine.
            wanted[at] &= rules.need_ddl and not _is_of_heartbeats(self._values[int(at)].as_py())
        if not rules.need_end:
            wanted &= kinds != _END
        if skip is not None:
            versions = batch["commit_version"].to_numpy(zero_copy_only=False)
            wanted[: _consumed(skip, self._values, versions, lengths)] = False
        order = numpy.flatnonzero(wanted)
        self.order = order[_not_repeated(kinds[order])]
        self.kinds = kinds[self.order]
        self._shards = shards[self.order]
        copies = numpy.where(self._shards < 0, len(rules.shards), 1)
        sizes = payload_bytes(lengths)[self.order]
        self._count_before = numpy.concatenate(([0], numpy.cumsum(copies)))
        self._bytes_before = numpy.concatenate(([0], numpy.cumsum(copies * sizes)))
        self._at = 0

    @property
    def left(self) -> int:
        """The number of events that were not taken yet."""
        return len(self.order) - self._at

    def take(self, count: int, size: int) -> "Taken":
        """Take the next events, up to `count` events or `size` bytes, at least one.

        An event for several shards counts once for each.
        """
        at = self._at
        by_count = numpy.searchsorted(self._count_before, self._count_before[at] + count)
        by_size = numpy.searchsorted(self._bytes_before, self._bytes_before[at] + size)
        stop = max(min(int(by_count), int(by_size), len(self.order)), min(at + 1, len(self.order)))
        self._at = stop
        return Taken(
            self._values,
            self.order[at:stop],
            self._shards[at:stop],
            self.kinds[at:stop],
            int(self._count_before[stop] - self._count_before[at]),
            int(self._bytes_before[stop] - self._bytes_before[at]),
        )


@dataclass(frozen=True)
class Taken:
    """Events for one response. An event that belongs to several shards is counted in `count` and `size` once
    per shard.
    """

    values: pyarrow.LargeBinaryArray
    order: Any
    shards: Any
    kinds: Any
    count: int
    size: int

    def of_shard(self, shard: int) -> pyarrow.LargeBinaryArray:
        """Return the framed events of a shard, contiguous and in order."""
        order = self.order[(self.shards == shard) | (self.shards < 0)]
        if len(order) and int(order[-1]) - int(order[0]) + 1 == len(order):
            return self.values.slice(int(order[0]), len(order))
        return self.values.take(pyarrow.array(order))

    def last_checkpoint(self) -> bytes:
        """Return the encoded checkpoint of the last event."""
        return checkpoint_in(self.values[int(self.order[-1])].as_py())

    def without_last_end(self, shards: int) -> "Taken":
        """Return the events without a commit at their end, because another commit follows."""
        if not len(self.kinds) or self.kinds[-1] != _END:
            return self
        size = int(payload_bytes(framed_bytes(self.values.slice(int(self.order[-1]), 1)))[0])
        return Taken(
            self.values,
            self.order[:-1],
            self.shards[:-1],
            self.kinds[:-1],
            self.count - shards,
            self.size - size * shards,
        )

    @property
    def begins_with_end(self) -> bool:
        """Whether the first event is a commit."""
        return bool(len(self.kinds)) and self.kinds[0] == _END


def answer(parts: Sequence[Taken], rules: EventRules, latest: bytes | None) -> bytes:
    """Return the envelope with all taken events."""
    messages: list[tuple[int, ShardMessages]] = []
    for shard in rules.shards:
        shard_messages = ShardMessages()
        for part in parts:
            shard_messages.add(part.of_shard(shard))
        if shard_messages.count:
            messages.append((shard, shard_messages))
    return envelope(messages, latest)


def _is_of_heartbeats(framed_definition: bytes) -> bool:
    return defined_in(framed_definition) in _HEARTBEAT_NAMES


def _not_repeated(kinds: Any) -> Any:
    """Return a mask that leaves out commits followed directly by another commit; heartbeats in between are
    ignored.
    """
    kept = numpy.ones(len(kinds), bool)
    (sent,) = numpy.nonzero(kinds != _HEARTBEAT)
    ends = kinds[sent] == _END
    kept[sent[:-1]] = ~(ends[:-1] & ends[1:])
    return kept


def _consumed(skip: Skip, values: pyarrow.LargeBinaryArray, versions: Any, lengths: Any) -> int:
    """Return the number of leading events that were consumed, using the index that each event carries."""
    first, stop = (int(numpy.searchsorted(versions, skip.commit_version, side)) for side in ("left", "right"))
    sent = first + numpy.flatnonzero(lengths[first:stop])
    # The indexes increase, so a binary search works for a transaction of any size.
    first_new = bisect_right(
        sent, skip.event_index, key=lambda index: _event_index(values[int(index)].as_py())
    )
    return int(sent[first_new]) if first_new < len(sent) else stop


def _event_index(framed_event: bytes) -> int:
    return PtubesCheckpoint.decode(checkpoint_in(framed_event)).event_index
