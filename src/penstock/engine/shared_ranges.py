# SPDX-License-Identifier: Apache-2.0
"""Lets the runs of several sinks in one process share decoded ranges.

Sinks at the same position plan the same ranges. The first task that opens a range starts its decoder, and the
tasks of the other sinks receive the same decoded batches. Whichever task needs the next batch first decodes
it, so each task can proceed at its own speed. A task that falls too far behind decodes its range itself.
"""

import copy
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Mapping

import structlog

from penstock.engine.joints import Ends
from penstock.engine.reading import Part, passed_over_tables, range_parts
from penstock.engine.task_plan import TaskPlan
from penstock.errors import ConnectionLost, PenstockError, TransientError
from penstock.model import TableName, TablePatterns
from penstock.narrowed_patterns import NarrowedPatterns
from penstock.pipeline.record import RangeWork
from penstock.source.reading import Batch, LoggedStatement

# The memory for decoded batches that wait for other sinks.
SHARED_BYTES_MAX = 128 << 20
# Ranges without rows take no memory, but must not accumulate forever.
_RANGES_MAX = 1024

_log = structlog.get_logger(__name__)

# A range, and the tables that are left out of it.
_Key = tuple[RangeWork, frozenset[TableName]]


class _NoLongerInMemory(Exception):
    """Raised for a reader that is so far behind that its next part has been dropped."""


class _SharedRange:
    """One range: its decoder, its parts that are in memory, and its readers."""

    def __init__(self, decoder: Generator[Part, None, None], ends: list[Ends]) -> None:
        self.decoder = decoder
        self.ends = ends
        # Held by the reader that is decoding the next part.
        self.decoding = threading.Lock()
        self.memory: deque[tuple[Part, int]] = deque()
        # The number of parts that were dropped from memory.
        self.dropped = 0
        self.has_ended = False
        self.error: PenstockError | None = None
        self.readers = 0
        # The sinks that have finished reading the range.
        self.sinks_done: set[str] = set()
        # Whether the range accepts no further readers. Its current readers keep the decoder.
        self.is_closed = False

    @property
    def decoded(self) -> int:
        """The number of parts that were decoded."""
        return self.dropped + len(self.memory)

    def drop_part(self) -> int:
        """Drop the oldest part in memory, and return its size."""
        self.dropped += 1
        _, size = self.memory.popleft()
        return size


class SharedRanges:
    """The ranges of a pipeline's sources, each decoded once for several `sinks`. Thread-safe.

    A range is decoded for all tables of the pipeline, and each sink receives the rows of its own tables.
    `bytes_max` limits the memory for batches that some sinks have not read yet.
    """

    def __init__(
        self, tables: Mapping[str, TablePatterns], sinks: int, bytes_max: int = SHARED_BYTES_MAX
    ) -> None:
        self._tables = tables
        self._sinks = sinks
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._bytes = 0
        self._ranges: OrderedDict[_Key, _SharedRange] = OrderedDict()
        # Ranges that a sink decodes by itself, because the shared decoding failed with an error that may
        # concern only tables of other sinks. A sink is identified by the generation of its state.
        self._alone: set[tuple[str, _Key]] = set()

    def parts(
        self, plan: TaskPlan, work: RangeWork, number: int, ends: Callable[[Ends], None]
    ) -> Iterator[Part]:
        """Yield the parts of a range as `range_parts` does, decoded once for all sinks at this position.

        Raises any error from `range_parts`, and ConnectionLost if the batch has to be run again.
        """
        key = work, passed_over_tables(plan, work.source)
        alone = plan.mark.generation, key
        if alone in self._alone:
            yield from range_parts(plan, work, number, ends)
            self._alone.discard(alone)
            return
        patterns = plan.sources[work.source].tables
        shared = self._join(key, plan, number)
        count, last, is_done = 0, "", False
        try:
            while (part := self._next(shared, count)) is not None:
                count, last = count + 1, _identity(part)
                if _concerns(part, patterns):
                    yield part
            is_done = True
            ends(shared.ends[0])
            return
        except _NoLongerInMemory:
            _log.debug("a range is decoded again for a slow sink", range=str(work.byte_range))
        except PenstockError as problem:
            if isinstance(problem, TransientError) or not _is_narrowed(patterns):
                raise
            self._alone.add(alone)
            raise ConnectionLost(
                f"{work.byte_range} of {work.source} cannot be decoded for all sinks: {problem}",
                hint="The batch is run again, and decoded for the tables of this sink alone",
            ) from problem
        finally:
            self._leave(key, shared, plan.mark.generation if is_done else None)
        parts = range_parts(plan, work, number, ends, self._tables[work.source])
        yield from (part for part in _after(parts, count, last) if _concerns(part, patterns))

    def _join(self, key: _Key, plan: TaskPlan, number: int) -> _SharedRange:
        work, _ = key
        with self._lock:
            shared = self._ranges.get(key)
            # A new reader cannot use a range whose first parts were dropped.
            if shared is None or shared.dropped:
                ends: list[Ends] = []
                decoder = range_parts(plan, work, number, ends.append, self._tables[work.source])
                if shared is not None:
                    self._forget(key, shared)
                shared = self._ranges[key] = _SharedRange(decoder, ends)
            shared.readers += 1
            return shared

    def _leave(self, key: _Key, shared: _SharedRange, sink_done: str | None) -> None:
        with self._lock:
            shared.readers -= 1
            if sink_done is not None:
                shared.sinks_done.add(sink_done)
            is_unused = shared.readers == 0 and not shared.has_ended
            if is_unused or shared.error is not None or len(shared.sinks_done) >= self._sinks:
                self._forget(key, shared)
            for oldest_key, oldest in list(self._ranges.items())[:-_RANGES_MAX]:
                self._forget(oldest_key, oldest)
        if is_unused:
            # No reader needs the decoder any more, so close its connection.
            shared.decoder.close()

    def _forget(self, key: _Key, shared: _SharedRange) -> None:
        """Accept no further readers of a range, and drop its parts: readers that need them decode the range
        again.
        """
        shared.is_closed = True
        if self._ranges.get(key) is shared:
            del self._ranges[key]
        while shared.memory:
            self._bytes -= shared.drop_part()

    def _next(self, shared: _SharedRange, count: int) -> Part | None:
        """Return the part after the first `count` parts, None at the end. Raises _NoLongerInMemory, or the
        decoder's error.
        """
        while True:
            with self._lock:
                if count < shared.dropped:
                    raise _NoLongerInMemory
                if count < shared.decoded:
                    return shared.memory[count - shared.dropped][0]
                if shared.error is not None:
                    raise copy.copy(shared.error)
                if shared.has_ended:
                    return None
            with shared.decoding:
                if shared.decoded == count and not shared.has_ended:
                    return self._decode(shared)

    def _decode(self, shared: _SharedRange) -> Part | None:
        try:
            part = next(shared.decoder, None)
        except PenstockError as problem:
            with self._lock:
                shared.error, shared.has_ended = problem, True
            raise
        except BaseException as bug:
            # The decoder's generator has finished by raising. Other readers must not mistake that for the end
            # of the range.
            unread = ConnectionLost(
                f"the decoding of a range ended in another sink: {bug!r}", hint="The batch is run again"
            )
            with self._lock:
                shared.error, shared.has_ended = unread, True
            raise
        with self._lock:
            if part is None:
                shared.has_ended = True
                return None
            if shared.is_closed:
                shared.dropped += 1
                return part
            size = part.bytes if isinstance(part, Batch) else 0
            shared.memory.append((part, size))
            self._bytes += size
            for oldest in self._ranges.values():
                while self._bytes > self._bytes_max and oldest.memory:
                    self._bytes -= oldest.drop_part()
        return part


def _identity(part: Part) -> str:
    """Return a text that identifies a part when its range is decoded again."""
    return f"{part!r} {part.schema_version}" if isinstance(part, Batch) else repr(part)


def _after(parts: Iterator[Part], count: int, last: str) -> Iterator[Part]:
    """Yield the parts after the first `count` parts. `last` identifies the last of those `count` parts: if a
    different part is decoded, raises ConnectionLost.
    """
    for number in range(1, count + 1):
        part = next(parts, None)
        if number == count and (part is None or _identity(part) != last):
            raise ConnectionLost(
                f"a range was decoded differently when it was read again: {last} is now {part!r}",
                hint="The batch is run again",
            )
    yield from parts


def _is_narrowed(patterns: TablePatterns) -> bool:
    """Return whether a sink receives fewer tables than the pipeline reads."""
    return isinstance(patterns, NarrowedPatterns) and not patterns.narrower.selects_all


def _concerns(part: Part, patterns: TablePatterns) -> bool:
    """Return whether a part contains changes or statements of a sink's tables."""
    if isinstance(part, Batch):
        name = TableName.parse(part.table)
        return patterns.matches(name.database, name.table)
    if isinstance(part, LoggedStatement):
        return any(patterns.matches(name.database, name.table) for name in part.tables) or any(
            patterns.may_match_in(database) for database in part.databases
        )
    return True
