# SPDX-License-Identifier: Apache-2.0
"""Repairs a target: writes missing and changed rows, and deletes extra rows.

If the pipeline does not run, its own sink writes the rows as they were at the pipeline's position, in a batch
under a separate name. Later changes then find the rows that they expect. If the pipeline is running, its
runner is asked to read the affected rows again (a resnapshot), because a second writer could overwrite the
runner's newer rows.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes
from penstock.commit_versions import are_positional
from penstock.errors import LeaseLost, OptionInvalid
from penstock.model import Position, quote_name
from penstock.pipeline.condition_text import condition_text
from penstock.pipeline.state import Checkpoint, PipelineState
from penstock.pipeline.verify.comparison import TableResult
from penstock.pipeline.verify.differences import Difference, Kind, hashes_of
from penstock.pipeline.verify.hashed import Hashes, hashes, is_among
from penstock.pipeline.verify.kept_values import TEXTS
from penstock.pipeline.verify.log_reader import position_of
from penstock.pipeline.verify.scope import scopes_of
from penstock.pipeline.verify.selection import keeps_keys
from penstock.pipeline.verify.system_columns import as_changes, with_version
from penstock.sinks.sink import BatchMark

# A condition on more rows costs a server more than reading the whole table.
_KEYS_MAX = 500
_REPAIRABLE = (Kind.MISSING, Kind.EXTRA, Kind.CHANGED)


def repair(results: Sequence[TableResult], state: PipelineState) -> int:
    """Repair the target of a stopped pipeline, and return the number of repaired rows.

    Holds the pipeline's lease during the repair, so that no process starts the pipeline. Raises LeaseLost if
    the pipeline runs or has advanced since the comparison, OptionInvalid for a TiDB cluster, and propagates
    errors from the sink.
    """
    before = state.checkpoint()
    if before is not None:
        _refuse_clusters(before, state.name)
    checkpoint = state.take()
    if before is None or before.number != checkpoint.number:
        raise LeaseLost(
            f"the pipeline {state.name} has moved since it was compared",
            hint="Compare again: penstock verify --repair",
        )
    return sum(_repair_table(result, checkpoint, state.name) for result in results if result.found)


def _refuse_clusters(checkpoint: Checkpoint, pipeline: str) -> None:
    """Raise OptionInvalid if a source is a TiDB cluster, whose commit versions do not follow from positions.

    A target that keeps the row of the latest version would drop the repaired rows.
    """
    for name, offset in checkpoint.offsets.items():
        if not are_positional(position_of(offset).file):
            raise OptionInvalid(
                f"the source {name} is a TiDB cluster, whose rows only a running pipeline can repair",
                hint=f"Start the pipeline {pipeline}, and run penstock verify --repair again",
            )


def repairable(result: TableResult) -> list[Difference]:
    """Return the differences that a repair corrects."""
    return [difference for difference in result.found if difference.kind in _REPAIRABLE]


def rows_condition(result: TableResult) -> str | None:
    """Return the condition for the source rows that differ.

    Return None, which stands for all rows of the table, if too many rows differ, if not all differing rows
    are known, or if the rows have other keys in the source.
    """
    table, repairs = result.table, repairable(result)
    if len(repairs) > _KEYS_MAX or result.beyond or not table.target.primary_key or not keeps_keys(table):
        return None
    key = table.target.primary_key
    rows = pyarrow.RecordBatch.from_pylist(
        [difference.row for difference in repairs], schema=table.target.arrow()
    )
    # The position does not matter, because only the keys are used.
    changes = as_changes(table.target, rows, "delete", Position(0, "log.000001", 0), instance="")
    before = [f"{' AND ' if index else '('}{quote_name(name)}=" for index, name in enumerate(key)]
    ((_, text),) = _native.sql_values(
        changes.rows.select([*key, "_metadata"]), list(key), before=before, between=" OR "
    )
    return condition_text(text)


def _repair_table(result: TableResult, checkpoint: Checkpoint, pipeline: str) -> int:
    table, repairs = result.table, repairable(result)
    if not repairs:
        return 0
    sink = table.sink.make()
    mark = BatchMark(pipeline, f"{checkpoint.generation}/repair-{uuid.uuid4().hex[:12]}", 1)
    try:
        writer = sink.open(mark, 0)
        try:
            # Delete rows before writing, so that they do not conflict.
            (scope,) = scopes_of([table.sources[0].table], table.steps)
            extra = [difference.target for difference in repairs if difference.kind is Kind.EXTRA]
            for changes in _rows_as(result, extra, "delete", checkpoint.offsets):
                writer.write(scope.deleted(changes))
            outdated = [difference.target for difference in repairs if difference.kind is not Kind.EXTRA]
            for changes in _rows_as(result, outdated, "delete", checkpoint.offsets):
                writer.write(changes)
            if table.target.primary_key:
                writes = _rows_to_write(result, hashes_of(repairs), checkpoint.offsets)
            else:
                # If several rows are equal, write only as many of them as are missing.
                writes = _rows_as(
                    result, [difference.source for difference in repairs], "insert", checkpoint.offsets
                )
            for changes in writes:
                writer.write(changes)
            receipt = writer.finish()
        except BaseException:
            writer.abort()
            raise
        sink.commit(mark, [receipt])
    finally:
        sink.close()
    return len(repairs)


def _rows_as(
    result: TableResult,
    differing: Sequence[dict[str, Any] | None],
    kind: str,
    offsets: Mapping[str, Mapping[str, Any]],
) -> list[Changes]:
    """Return the differing rows of one side as changes of one kind, without missing rows."""
    target = result.table.target
    rows_present = [row for row in differing if row is not None]
    if not rows_present:
        return []
    rows = pyarrow.RecordBatch.from_pylist(rows_present, schema=target.arrow())
    # The source of each row is unknown, so use the latest position of all sources.
    position = max(
        (position_of(offsets[source_table.source.name]) for source_table in result.table.sources),
        key=lambda position: position.commit_version,
    )
    instance, texts = (
        result.table.sources[0].source.name,
        [row.get(TEXTS) for row in rows_present],
    )
    return [as_changes(target, rows, kind, position, instance=instance, texts=texts)]


def _rows_to_write(
    result: TableResult, keys: Hashes, offsets: Mapping[str, Mapping[str, Any]]
) -> list[Changes]:
    """Return the expected rows for keys that differ."""
    key = result.table.target.primary_key or result.table.columns
    writes = []
    for changes in result.expected:
        kept = changes.rows.filter(pyarrow.array(is_among(hashes(changes.rows, key), keys)))
        if kept.num_rows:
            instance = pc.struct_field(kept.column("_metadata"), "instance")[0].as_py()
            version = position_of(offsets[instance]).commit_version - 1
            writes.append(with_version(changes.with_rows(kept), version))
    return writes
