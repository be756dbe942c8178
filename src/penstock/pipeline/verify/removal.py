# SPDX-License-Identifier: Apache-2.0
"""Finds rows that a target has but its sources do not, to delete them when a table is read again."""

from collections.abc import Iterator, Sequence

import numpy
import pyarrow
import structlog

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, SchemaChanged, SchemaPending
from penstock.pipeline.load.chunks import Chunk, bound_values
from penstock.pipeline.load.watermark import Watermark, take_watermark
from penstock.pipeline.settings import SinkSettings, StepSettings
from penstock.pipeline.step import Rejected, ShardValue
from penstock.pipeline.verify.hashed import NONE, Hashes, concatenate_hashes, hashes, is_among
from penstock.pipeline.verify.merges import in_shard
from penstock.pipeline.verify.scope import joint_slots, scopes_of
from penstock.pipeline.verify.selection import keeps_keys
from penstock.pipeline.verify.shares import ComparedTable, Share, expected_rows, target_rows
from penstock.pipeline.verify.source_rows import SourceChunk, SourceTable, address_of, is_range
from penstock.pipeline.verify.system_columns import as_changes
from penstock.pipeline.verify.unjudged import Unjudged
from penstock.sinks.sink import HINT_GONE

_log = structlog.get_logger(__name__)


def removals(
    sources: Sequence[SourceTable],
    chunk: Chunk,
    *,
    target: Target,
    steps: tuple[StepSettings, ...],
    sink: SinkSettings,
    shard: ShardValue | None = None,
    epoch: int = 0,
) -> Iterator[Changes]:
    """Yield deletes for rows of a chunk's range that the target has but no source has.

    The first of `sources` is the table that is read again. `target` is its target after the steps, and the
    other sources are further tables whose rows go to that target. With `shard`, only the rows of that shard
    are deleted. With the step `shard`, only rows that the step passes are deleted. No rows are deleted if a
    step withholds deletes or loads from the target. The deletes do not pass through the steps, but they only
    mark rows as deleted if the step `soft_delete` is used. They carry the version of a log position that this
    function takes, so later changes win. If a range of source keys does not correspond to a range of target
    keys, all rows are checked with the first chunk of the table, and none with the others. Rows that may
    belong to rejected source rows are kept.

    Raises OptionInvalid if the sink keeps no table or if rows of other pipelines cannot be distinguished,
    SchemaPending if another source table was altered during the read.
    """
    # A mirror identifies the rows of a table without a primary key by a unique key.
    key = target.row_key
    if not key:
        return
    scopes = scopes_of([source.table for source in sources], steps)
    if not scopes[0].removes:
        return
    slots = joint_slots(scopes)
    open_sink = sink.make()
    columns = target.column_names
    if not open_sink.keeps_types and not scopes[0].marks:
        # Values of columns that had another type may be unreadable, and deletes only need the key.
        columns = (*key, *([shard.column] if shard is not None else []))
    table = ComparedTable(target, tuple(sources), steps, sink, columns, slots=slots)
    first = sources[0]
    watermark = take_watermark(address_of(first.source), epoch=epoch)
    if open_sink.reads_ranges and keeps_keys(table) and is_range(first.table, chunk):
        ranges = [SourceChunk(first, chunk, watermark, *bound_values(first.table, chunk))]
    elif chunk.number == 0:
        ranges = _whole_tables(sources, watermark)
    else:
        return
    share = Share(table, tuple(ranges))
    unjudged = Unjudged(target.keyed, steps)
    ascending = _kept_keys(share, unjudged)
    kept = 0
    for rows in _existing_rows(share):
        missing = ~is_among(hashes(rows, key), ascending)
        if shard is not None:
            missing &= in_shard(rows, shard)
        unsure = missing & unjudged.among(rows)
        kept += int(unsure.sum())
        extra = _in_columns(target, rows.filter(pyarrow.array(missing & ~unsure)))
        if extra.num_rows:
            deletes = as_changes(
                target,
                extra,
                "delete",
                watermark.position,
                instance=first.source.name,
                version=watermark.version,
            )
            yield scopes[0].deleted(deletes)
    if kept:
        _log.warning("rows that may be those of rejected rows are kept", table=str(target.name), rows=kept)


def _whole_tables(sources: Sequence[SourceTable], watermark: Watermark) -> list[SourceChunk]:
    """Return all rows of every source; `watermark` is that of the first source."""
    # Each server's rows refer to a position in its own log.
    watermarks = {sources[0].source.name: watermark}
    for source in sources:
        if source.source.name not in watermarks:
            watermarks[source.source.name] = take_watermark(address_of(source.source))
    return [
        SourceChunk(source, Chunk(source.table.name), watermarks[source.source.name]) for source in sources
    ]


def _kept_keys(share: Share, unjudged: Unjudged) -> Hashes:
    """Return the sources' keys, ascending. Rows that a step rejected are added to `unjudged`."""
    first = share.chunks[0].table
    kept = [NONE]
    for chunk in share.chunks:
        try:
            for stepped in expected_rows(Share(share.table, (chunk,)), {}):
                if isinstance(stepped, Rejected):
                    unjudged.add(stepped)
                else:
                    kept.append(hashes(stepped.rows, share.table.target.row_key))
        except SchemaChanged as problem:
            if chunk.table == first:
                raise
            raise SchemaPending(
                f"{chunk.table.table.name} was altered while the rows of {first.table.name} were compared"
            ) from problem
    return numpy.unique(concatenate_hashes(kept))


def _in_columns(target: Target, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return rows of a target with all of its columns, null for columns that were not read."""
    arrays = [
        rows.column(field.name)
        if field.name in rows.schema.names
        else pyarrow.nulls(rows.num_rows, field.type)
        for field in target.arrow()
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=target.arrow())


def _existing_rows(share: Share) -> Iterator[pyarrow.RecordBatch]:
    """Yield the target's rows.

    If the target's table has changed, raises OptionInvalid. It does not raise SchemaChanged, because that
    would tell the caller that the source's table has changed.
    """
    try:
        yield from target_rows(share)
    except SchemaChanged as problem:
        raise OptionInvalid(problem.message, position=problem.position, hint=HINT_GONE) from problem
