# SPDX-License-Identifier: Apache-2.0
"""Builds what the tasks of a batch receive: the mark that identifies the batch, its tables, and how its rows
are distributed across parts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.changes import Target
from penstock.engine.source_log import SourceLog
from penstock.engine.tables import PipelineTables
from penstock.engine.task_plan import BUFFERED_BYTES_MAX, TaskPlan
from penstock.engine.tracked_table import Learned
from penstock.limits import MIB, SMALL_TABLE_ROWS
from penstock.pipeline.record import BatchRecord, ChunkWork, RangeWork
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.state import Checkpoint, table_key
from penstock.sinks.sink import BatchMark, Sink, Spread
from penstock.source.offsets import Offset

# A single task writes this much log in less time than it takes to spread the log over several tasks.
_SPREAD_BYTES_MIN = MIB
# The rows of a batch that a task buffers, beside the batch's bytes of log.
_DECODED_FACTOR, _BUFFERED_BYTES_MIN = 2, 32 * MIB
# Small chunks are divided into this many groups per core. A group has at most _GROUP_MAX chunks, so that no
# core waits long for another core's last group.
_GROUPS_PER_CORE, _GROUP_MAX = 4, 256


def task_plan(
    settings: PipelineSettings,
    sink: Sink,
    tables: PipelineTables,
    parents: Mapping[str, frozenset[str]],
    logs: Mapping[str, SourceLog],
    checkpoint: Checkpoint,
    record: BatchRecord,
    learned: Learned,
) -> TaskPlan:
    """Plan the tasks of a batch, and tell the sink that the batch begins. `parents` is stored in the plan."""
    spread = sink.spread
    mark = mark_of(settings, tables, checkpoint, record)
    mark = replace(mark, shared=sink.begin(tables.targets.values()))
    if mark.loads and sink.load_spread is not None:
        spread = sink.load_spread
    if settings.apply == "serial" and not record.chunks:
        spread = Spread.WHOLE
    return TaskPlan(
        mark=mark,
        record=record,
        steps=settings.steps,
        sink=settings.sink,
        spread=spread,
        keeps_state=sink.keeps_state,
        shares_columns=sink.shares_columns,
        schema_changes=settings.schema_changes,
        parents=parents,
        metadata_read=sink.metadata_read,
        in_driver=sink.in_driver,
        takes_statements=sink.takes_statements and spread is Spread.WHOLE,
        sources={source.name: source for source in settings.sources},
        tables=tables.known(floors_of(checkpoint)),
        targets=tables.targets,
        statements=learned.statements,
        together=frozenset(learned.together),
        passed_over=frozenset(tables.stopped),
        unread=frozenset(learned.unread),
        histories=_histories(logs, record),
        loops=settings.loops,
        dead_letter=settings.dead_letter,
        rate_rows=settings.load.rate,
        epochs={name: Offset.from_json(offset).position.epoch for name, offset in checkpoint.offsets.items()},
        buffered_bytes_max=buffered_bytes_max(settings),
    )


def buffered_bytes_max(settings: PipelineSettings) -> int:
    """Return how many bytes of rows a task may buffer: as decoded rows, a log takes more than its size."""
    return max(_BUFFERED_BYTES_MIN, min(BUFFERED_BYTES_MAX, _DECODED_FACTOR * settings.batch.bytes))


def planned_again(logs: Mapping[str, SourceLog], record: BatchRecord) -> BatchRecord:
    """Return a batch with the same changes, at their positions in the logs of the servers in use now."""
    ranges: list[RangeWork] = []
    for name in record.begin:
        begin, end = Offset.from_json(record.begin[name]), Offset.from_json(record.end[name])
        ranges += logs[name].works(begin, end)
    return replace(record, ranges=tuple(ranges))


def parts_for(ranges: Sequence[RangeWork], chunks: Sequence[ChunkWork], cores: int) -> int:
    """Return how many tasks write a batch: a single task if spreading the rows would take longer."""
    stretches = [(work.byte_range.start, work.byte_range.stop) for work in ranges]
    is_small = not chunks and all(stop is not None for _, stop in stretches)
    log_bytes = sum((stop or 0) - start for start, stop in stretches)
    return 1 if is_small and log_bytes < _SPREAD_BYTES_MIN else cores


def divided_of(targets: Iterable[Target]) -> tuple[str, ...]:
    """Return the names of the targets whose rows are divided among parts by primary key."""
    return tuple(str(target.name) for target in targets if target.primary_key and not target.unique_keys)


def groups_for(chunks: Sequence[ChunkWork], cores: int) -> tuple[int, ...]:
    """Return how many consecutive chunks each task reads. Chunks of few rows share a task."""
    are_small = [chunk.chunk["rows"] <= SMALL_TABLE_ROWS and not chunk.exact for chunk in chunks]
    size_max = max(1, min(_GROUP_MAX, math.ceil(sum(are_small) / (cores * _GROUPS_PER_CORE))))
    groups: list[int] = []
    is_open = False
    for is_small in are_small:
        if is_small and is_open and groups[-1] < size_max:
            groups[-1] += 1
        else:
            groups.append(1)
        is_open = is_small
    return tuple(groups)


def _histories(logs: Mapping[str, SourceLog], record: BatchRecord) -> dict[int, Any]:
    """Return the schema histories of the ranges whose logs do not name columns, by work number."""
    histories: dict[int, Any] = {}
    for name, log in logs.items():
        numbers = [number for number, work in enumerate(record.ranges) if work.source == name]
        of_ranges = log.histories([record.ranges[number] for number in numbers])
        known = zip(numbers, of_ranges, strict=True)
        histories |= {number: history for number, history in known if history is not None}
    return histories


def mark_of(
    settings: PipelineSettings, tables: PipelineTables, checkpoint: Checkpoint, record: BatchRecord
) -> BatchMark:
    """Return the mark under which a batch is written."""
    is_load = not record.ranges and not any(
        chunk.request or chunk.exact or chunk.remove for chunk in record.chunks
    )
    keys = {table_key(chunk.source, chunk.table) for chunk in record.chunks}
    is_load = is_load and not tables.shared.may_meet(keys)
    return BatchMark(
        settings.name,
        checkpoint.generation,
        record.number,
        is_load,
        buffered_bytes_max=buffered_bytes_max(settings),
    )


def floors_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Return, for each table, the commit version below which changes are already in the table's load."""
    return {key: load.floor for key, load in checkpoint.loads.items() if load.floor}
