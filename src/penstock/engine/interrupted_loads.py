# SPDX-License-Identifier: Apache-2.0
"""Handles an interrupted load of a table without a key: the sink committed the load, but the state may not
record it.

Such a load reads a new snapshot on every attempt, so it cannot be replayed. A mirror is emptied before the
load is repeated. A feed would receive every row twice, so the engine first asks the sink whether it already
has the batch.
"""

from collections.abc import Sequence
from dataclasses import replace

from penstock.changes import Target
from penstock.engine.tables import PipelineTables
from penstock.errors import OptionInvalid
from penstock.pipeline.record import BatchRecord, ChunkWork
from penstock.pipeline.state import PipelineState, split_key, table_key
from penstock.pipeline.step import Step
from penstock.pipeline.verify.merges import targets_of_table
from penstock.sinks.sink import BatchMark, Receipt, Sink
from penstock.source.offsets import Offset


def committed_floors(
    sink: Sink,
    tables: PipelineTables,
    steps: Sequence[Step],
    mark: BatchMark,
    record: BatchRecord,
    begin: Offset,
) -> dict[str, int] | None:
    """Return the floor of each table in an exact load, or None if the feed has no rows from the load.

    A table's floor is the lowest commit version whose changes are not included in its load. `begin` is the
    position that the pipeline had applied before the load. Raises OptionInvalid if the feed has the load, but
    the load's position in the log is unknown, because another source writes to the same target.
    """
    floors: dict[str, int] = {}
    for chunk in record.chunks:
        key = table_key(chunk.source, chunk.table)
        table = tables.source_target(key)
        if table is None:
            continue
        names = {target.name for target in targets_of_table(steps, table, tables.targets)}
        targets = [
            tables.targets[name]
            for name in sorted(names & tables.targets.keys())
            # Other targets received no rows, so they do not have the batch number.
            if record.written is None or str(name) in record.written
        ]
        version = sink.settle_load(mark, targets)
        if version is None or version < _lowest_version(chunk, begin):
            # The load was empty: the newest row in the target is a change from before the load.
            continue
        _refuse_shared(tables, key, targets)
        floors[key] = version + 1
    return floors or None


def record_written(state: PipelineState, record: BatchRecord, receipts: Sequence[Receipt]) -> BatchRecord:
    """Record the targets that an exact load wrote, before the sink commits the load. Raises LeaseLost."""
    if record.is_exact:
        names = {name for receipt in receipts for name, rows in receipt.tables.items() if rows}
        record = replace(record, written=tuple(sorted(names)))
        state.begin(record)
    return record


def _lowest_version(chunk: ChunkWork, begin: Offset) -> int:
    """Return the lowest `_commit_version` that rows of a chunk can have.

    A TiDB cluster is read as of the timestamp at which the load was planned, or later.
    """
    planned_ts: int | None = chunk.chunk.get("commit_ts")
    return begin.position.commit_version - 1 if planned_ts is None else planned_ts


def _refuse_shared(tables: PipelineTables, key: str, targets: Sequence[Target]) -> None:
    source = split_key(key)[0]
    others = {
        other
        for target in targets
        for other in tables.shared.sharing(key, target.name)
        if split_key(other)[0] != source
    }
    if others:
        raise OptionInvalid(
            f"a load of {key} was written before the run was interrupted, and its position in the log is not"
            f" known: its target also has rows of {', '.join(sorted(others))}",
            hint="Empty the target, then start over: penstock pipelines reset FILE --yes",
        )
