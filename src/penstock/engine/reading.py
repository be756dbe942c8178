# SPDX-License-Identifier: Apache-2.0
"""Reads the input of a task: a byte range of a source's log, or a chunk of a table."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from penstock.changes import Changes, Target
from penstock.closing import Closing
from penstock.engine.joints import Ends
from penstock.engine.task_plan import TaskPlan
from penstock.engine.task_resources import CLOSED_AFTER_USE, TaskResources
from penstock.errors import OptionInvalid
from penstock.limits import SMALL_TABLE_ROWS
from penstock.model import TableName, TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.reads_ahead import ReadsAhead, TableRead
from penstock.pipeline.load.session_pool import SessionPool
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.load.watermark import Watermark
from penstock.pipeline.loops import marked_versions
from penstock.pipeline.record import ChunkWork, RangeWork
from penstock.pipeline.state import table_key
from penstock.pipeline.step import ShardValue, Step
from penstock.pipeline.verify.merges import may_share_rows, shard_of, targets_of_table
from penstock.pipeline.verify.removal import removals
from penstock.pipeline.verify.source_rows import SourceTable, address_of
from penstock.source.kept import KeptSource
from penstock.source.reading import Batch, LoggedStatement, Selection, read_in_order
from penstock.source.source import open_source
from penstock.source.tracking import known_schemas

# A wave of batches has one Arrow batch per table. These bounds let several waves fit into memory at once. The
# bytes are a fraction of the memory for buffered rows.
_BATCH_FRACTION = 8
_BATCH_ROWS_MAX = 1 << 18
# A task retries for about three seconds and then fails. The driver reports the error and retries the batch.
_RECONNECT_TRIES_MAX = 6
# If the source has several servers, the driver decides how long to wait for a hung server.
_RECONNECT_TRIES_MAX_OF_SEVERAL = 2
_PATTERNS_KEPT = 64


# One part of a range: a batch or a statement. The first part may instead be the versions of transactions that
# a pipeline itself wrote.
Part = Batch | LoggedStatement | frozenset[int]
# Opens the byte range of a work. Its arguments include the plan and the work's number in it.
RangeParts = Callable[[TaskPlan, RangeWork, int, Callable[[Ends], None]], Iterator[Part]]


def range_parts(
    plan: TaskPlan,
    work: RangeWork,
    number: int,
    ends: Callable[[Ends], None],
    tables: TablePatterns | None = None,
    resources: TaskResources = CLOSED_AFTER_USE,
) -> Generator[Part, None, None]:
    """Yield the typed batches and statements of a range, in order.

    If transactions are marked, the first part holds the versions of transactions that a pipeline itself
    wrote. `ends` is called with the positions where the range was opened and where the next range begins.
    `tables` replaces the plan's own tables. Connections to a daemon come from `resources`.
    """
    pipeline_source = plan.sources[work.source]
    options = replace(
        pipeline_source.options,
        epoch=work.epoch,
        server_key=work.server_key,
        epochs=work.epochs,
        reconnect_tries=_RECONNECT_TRIES_MAX
        if len(pipeline_source.servers) < 2
        else _RECONNECT_TRIES_MAX_OF_SEVERAL,
    )
    source = resources.take(options, partial(open_source, options))
    is_read = False
    try:
        if isinstance(source, KeptSource):
            if work.content:
                source.give_bytes(work.byte_range.position, work.content)
            else:
                source.renumber()
        ends(Ends.of(source, work))
        history = plan.histories.get(number)
        known = known_schemas(options, history, source)
        if plan.loops.has_marks:
            before = known_schemas(options, history, source)
            yield marked_versions(plan.loops, source, work.byte_range, work.bounds, before)
        yield from read_in_order(
            source,
            work.byte_range,
            Selection(
                _patterns(tables or pipeline_source.tables, passed_over_tables(plan, work.source)),
                bounds=work.bounds,
            ),
            known,
            batch_bytes_max=plan.buffered_bytes_max // _BATCH_FRACTION,
            batch_rows_max=_BATCH_ROWS_MAX,
        )
        is_read = True
    finally:
        # Only connections to a daemon are reused. A connection to a server belongs to one range.
        resources.give_back(options, source, is_intact=is_read and options.daemon is not None)


@lru_cache(_PATTERNS_KEPT)
def _patterns(tables: TablePatterns, left_out: frozenset[TableName]) -> PipelinePatterns:
    """Return the patterns of a range, which are mostly those of the range before."""
    return PipelinePatterns(tables, left_out)


def passed_over_tables(plan: TaskPlan, source: str) -> frozenset[TableName]:
    """Return the source's tables that the pipeline continues without."""
    keys = [key.partition("/") for key in plan.passed_over]
    return frozenset(TableName.parse(table) for name, _, table in keys if name == source)


class ChunkReads(Closing):
    """Reads the chunks of one task, whose works are given by number. Sessions come from `sessions`."""

    def __init__(self, plan: TaskPlan, numbers: Sequence[int], sessions: SessionPool) -> None:
        self._plan = plan
        self._sessions = sessions
        self._reads_ahead = ReadsAhead(
            {
                number: self._table_read(work)
                for number in numbers
                if isinstance(work := plan.record.works[number], ChunkWork) and self._is_small(work)
            },
            sessions,
            _RECONNECT_TRIES_MAX,
        )

    def close(self) -> None:
        """Close the session that is in use."""
        self._reads_ahead.close()

    def changes(
        self, number: int, on_watermark: Callable[[Watermark], None]
    ) -> Generator[Changes, None, None]:
        """Yield the rows of a chunk. Passes the log position of the read to `on_watermark` before reading."""
        plan, work = self._plan, self._plan.record.works[number]
        assert isinstance(work, ChunkWork), "a range has no chunk"
        if self._is_small(work):
            yield from self._reads_ahead.changes(number, on_watermark)
            return
        tasks = len(plan.record.tasks) - len(plan.record.ranges)
        rate = None if plan.rate_rows is None else plan.rate_rows / max(1, tasks)
        yield from self._table_read(work).changes(
            self._sessions, on_watermark, _RECONNECT_TRIES_MAX, rate=rate, exact=work.exact
        )

    def _is_small(self, work: ChunkWork) -> bool:
        """Return whether a chunk is a whole table of few rows, without an order that must be checked."""
        key = table_key(work.source, work.table)
        chunk = work.chunk
        return (
            self._plan.rate_rows is None
            and not work.exact
            and not chunk["key"]
            and chunk["rows"] <= SMALL_TABLE_ROWS
            and key not in self._plan.unread
            and key not in self._plan.passed_over
        )

    def _table_read(self, work: ChunkWork) -> TableRead:
        source = self._plan.sources[work.source]
        assert source.server is not None, "only tables of a server are cut into chunks"
        return TableRead(
            source.server,
            self._plan.tables[table_key(work.source, work.table)].current,
            Chunk.from_json(work.chunk),
            source.name,
            self._plan.epochs.get(work.source, 0),
            work.where,
        )


def removed_changes(plan: TaskPlan, work: ChunkWork, steps: Sequence[Step]) -> Iterator[Changes]:
    """Yield deletes for the rows in a chunk's range that the target has but no source has. Callers must not
    apply steps to these deletes.

    Raises OptionInvalid if the target may have rows of a table that the pipeline continues without.
    """
    key = table_key(work.source, work.table)
    own = SourceTable(plan.sources[work.source], plan.tables[key].current)
    shard = shard_of(steps, plan.steps, own.table, own.source.name)
    for target in targets_of_table(steps, own.table, plan.targets):
        yield from removals(
            [own, *_others(plan, steps, own, target, shard)],
            Chunk.from_json(work.chunk),
            target=target,
            steps=plan.steps,
            sink=plan.sink,
            shard=shard,
            epoch=plan.epochs.get(work.source, 0),
        )


def _others(
    plan: TaskPlan, steps: Sequence[Step], own: SourceTable, target: Target, shard: ShardValue | None
) -> list[SourceTable]:
    """Return the other tables that may share the target. A row that exists in any of these tables must not be
    removed from the target.

    Their definitions are read from their servers. A dropped table has no rows that could stay.
    """
    known: dict[str, list[TableName]] = {}
    for key, table in plan.tables.items():
        name = key.partition("/")[0]
        if (
            key != table_key(own.source.name, own.table.name)
            and target.name
            in {known_target.name for known_target in targets_of_table(steps, table.current, [target.name])}
            and may_share_rows(shard, shard_of(steps, plan.steps, table.current, name))
        ):
            known.setdefault(name, []).append(table.current.name)
    others = [
        SourceTable(plan.sources[name], table)
        for name, tables in known.items()
        for table in targets_of(
            address_of(plan.sources[name]), TablePatterns([table_name.sql for table_name in tables])
        )
    ]
    for other in others:
        if table_key(other.source.name, other.table.name) in plan.passed_over:
            raise OptionInvalid(
                f"{target.name} also has rows of {other.table.name}, which the pipeline skips, so the"
                f" rows that were deleted from {own.table.name} cannot be identified",
                hint=f"Read both again at once: penstock resnapshot FILE {own.table.name} {other.table.name}",
            )
    return others
