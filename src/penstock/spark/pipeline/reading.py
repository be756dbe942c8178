# SPDX-License-Identifier: Apache-2.0
"""What a task reads: a byte range of a source's log, or a chunk of a table."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from penstock.changes import Changes
from penstock.model import TableName, TablePatterns
from penstock.pipeline.ghosts import PipelinePatterns
from penstock.pipeline.load.chunks import Chunk
from penstock.pipeline.load.reader import read_chunk
from penstock.pipeline.load.watermark import Watermark
from penstock.pipeline.loops import marked_versions
from penstock.pipeline.record import ChunkWork, RangeWork
from penstock.pipeline.state import table_key
from penstock.pipeline.step import Step, target_through
from penstock.pipeline.verify.removal import removals
from penstock.pipeline.verify.source_rows import SourceTable
from penstock.source.reading import Batch, LoggedStatement, Selection, read_in_order
from penstock.source.source import open_source
from penstock.spark.pipeline.joints import Ends
from penstock.spark.pipeline.task_plan import TaskPlan
from penstock.spark.tracking import known_schemas

# A wave of batches is one Arrow batch of each table; small enough that several are held at once.
_BATCH_BYTES_MAX = 32 << 20
_BATCH_ROWS_MAX = 1 << 18


def range_parts(
    plan: TaskPlan, work: RangeWork, number: int, ends: Callable[[Ends], None]
) -> Iterator[Batch | LoggedStatement | frozenset[int]]:
    """Yield the typed batches and statements of a range, in order.

    First of all come the versions of the transactions that a pipeline itself wrote, where they have a mark.
    `ends` is told where the range is opened and where the next one begins.
    """
    told = plan.sources[work.source]
    options = replace(told.options, epoch=work.epoch, server_key=work.server_key, epochs=work.epochs)
    source = open_source(options)
    try:
        ends(Ends.of(source, work))
        known = known_schemas(options, plan.histories.get(number))
        if plan.loops.mark_table is not None:
            before = known_schemas(options, plan.histories.get(number))
            yield marked_versions(plan.loops, source, work.byte_range, work.bounds, before)
        yield from read_in_order(
            source,
            work.byte_range,
            Selection(_selected(plan, work.source, told.tables), bounds=work.bounds),
            known,
            batch_bytes_max=_BATCH_BYTES_MAX,
            batch_rows_max=_BATCH_ROWS_MAX,
        )
    finally:
        source.close()


def _selected(plan: TaskPlan, source: str, tables: TablePatterns) -> TablePatterns:
    passed_over = {
        TableName.parse(key.partition("/")[2]) for key in plan.passed_over if key.partition("/")[0] == source
    }
    return PipelinePatterns(tables, frozenset(passed_over))


def chunk_changes(plan: TaskPlan, work: ChunkWork, told: Callable[[Watermark], None]) -> Iterator[Changes]:
    """Yield the rows of a chunk, as of a place in the log that is taken just before they are read, and
    told."""
    source = plan.sources[work.source]
    known = plan.tables[table_key(work.source, work.table)]
    assert source.server is not None, "only tables of a server are cut into chunks"
    rate = None if plan.rate_rows is None else plan.rate_rows / max(1, len(plan.record.chunks))
    yield from read_chunk(
        source.server,
        known.current,
        Chunk.from_json(work.chunk),
        instance=source.name,
        epoch=plan.epochs.get(work.source, 0),
        where=work.where,
        rate=rate,
        exact=work.exact,
        told=told,
    )


def removed_changes(plan: TaskPlan, work: ChunkWork, steps: Sequence[Step]) -> Iterator[Changes]:
    """Yield deletes of the target's rows in a chunk's range that no source has; they go through no step."""
    key = table_key(work.source, work.table)
    target = target_through(steps, plan.tables[key].current)
    if target is None:
        return
    # Several tables may have become this one: a row that any of them has stays.
    others = [
        other
        for other in plan.tables
        if other != key and _name_of(plan, steps, other) == target.name and other not in plan.passed_over
    ]
    tables = [
        SourceTable(plan.sources[one.partition("/")[0]], plan.tables[one].current) for one in (key, *others)
    ]
    yield from removals(
        tables,
        Chunk.from_json(work.chunk),
        target=target,
        steps=plan.steps,
        sink=plan.sink,
        epoch=plan.epochs.get(work.source, 0),
    )


def _name_of(plan: TaskPlan, steps: Sequence[Step], key: str) -> TableName | None:
    made = target_through(steps, plan.tables[key].current)
    return None if made is None else made.name
