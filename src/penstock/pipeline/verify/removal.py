# SPDX-License-Identifier: Apache-2.0
"""Which rows a target has that its sources have not: what goes when a table is read again."""

from collections.abc import Iterator, Sequence

import numpy
import pyarrow
import structlog

from penstock.changes import Changes, Target
from penstock.errors import OptionInvalid, SchemaChanged, SchemaPending
from penstock.pipeline.load.chunks import Chunk, bound_values
from penstock.pipeline.load.watermark import take_watermark
from penstock.pipeline.settings import SinkSettings, StepSettings
from penstock.pipeline.step import Rejected, ShardValue
from penstock.pipeline.verify.hashed import NONE, Hashes, hashes, is_among, joined
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
    """Yield deletes of the rows of a chunk's range that the target has and that no source has.

    The first of `sources` is whose table is read again, `target` what the steps make of it, and the others
    are further tables whose rows come into it. With `shard` only the rows of that shard go, with the step
    `shard` only those that it lets pass, and none where a step keeps deletes or loads from the target.
    Deletes are for the target as it is: they go through no step, and mark rows where `soft_delete` does.
    They carry the version of a place in the log that is taken here, so what is logged from then on comes
    after them. Where ranges of the source's keys are none of the target's, all rows are looked at with the
    first chunk of the table, and none with the others. Rows that may be those of rejected source rows stay.
    Raises OptionInvalid of a sink that keeps no table,
    and where rows of other pipelines cannot be told from its own,
    SchemaPending where another source's table was altered while it was read.
    """
    if not target.primary_key:
        return
    scopes = scopes_of([one.table for one in sources], steps)
    if not scopes[0].removes:
        return
    slots = joint_slots(scopes)
    made = sink.make()
    columns = target.column_names
    if not made.keeps_types and not scopes[0].marks:
        # Values of columns that had another type cannot be read, and a row goes by its key.
        columns = (*target.primary_key, *([shard.column] if shard is not None else []))
    table = ComparedTable(target, tuple(sources), steps, sink, columns, slots=slots)
    first = sources[0]
    watermark = take_watermark(address_of(first.source), epoch=epoch)
    if made.reads_ranges and keeps_keys(table) and is_range(first.table, chunk):
        ranges = [SourceChunk(first, chunk, watermark, *bound_values(first.table, chunk))]
    elif chunk.number == 0:
        # Each server's rows are those of a place in its own log.
        places = {first.source.name: watermark}
        for one in sources:
            if one.source.name not in places:
                places[one.source.name] = take_watermark(address_of(one.source))
        ranges = [SourceChunk(one, Chunk(one.table.name), places[one.source.name]) for one in sources]
    else:
        return
    share = Share(table, tuple(ranges))
    unjudged = Unjudged(target, steps)
    ascending = _kept_keys(share, unjudged)
    left = 0
    for rows in _rows_there(share):
        lacking = ~is_among(hashes(rows, target.primary_key), ascending)
        if shard is not None:
            lacking &= in_shard(rows, shard)
        unsure = lacking & unjudged.among(rows)
        left += int(unsure.sum())
        gone = _in_columns(target, rows.filter(pyarrow.array(lacking & ~unsure)))
        if gone.num_rows:
            deletes = as_changes(target, gone, "delete", watermark.position, instance=first.source.name)
            yield scopes[0].deleted(deletes)
    if left:
        _log.warning("rows that may be those of rejected rows are kept", table=str(target.name), rows=left)


def _kept_keys(share: Share, unjudged: Unjudged) -> Hashes:
    """Return the keys, ascending, that the sources have; the rows that a step rejected go to `unjudged`."""
    first = share.chunks[0].table
    kept = [NONE]
    for chunk in share.chunks:
        try:
            for made in expected_rows(Share(share.table, (chunk,)), {}):
                if isinstance(made, Rejected):
                    unjudged.add(made)
                else:
                    kept.append(hashes(made.rows, share.table.target.primary_key))
        except SchemaChanged as problem:
            if chunk.table == first:
                raise
            raise SchemaPending(
                f"{chunk.table.table.name} was altered while the rows of {first.table.name} were compared"
            ) from problem
    return numpy.unique(joined(kept))


def _in_columns(target: Target, rows: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return rows of a target in all of its columns: null where they were not read."""
    arrays = [
        rows.column(field.name)
        if field.name in rows.schema.names
        else pyarrow.nulls(rows.num_rows, field.type)
        for field in target.arrow()
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=target.arrow())


def _rows_there(share: Share) -> Iterator[pyarrow.RecordBatch]:
    """Yield the target's rows. Raises OptionInvalid where its table is another one: to whoever reads tables
    again, SchemaChanged tells of the source."""
    try:
        yield from target_rows(share)
    except SchemaChanged as problem:
        raise OptionInvalid(problem.message, position=problem.position, hint=HINT_GONE) from problem
