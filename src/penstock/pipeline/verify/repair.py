# SPDX-License-Identifier: Apache-2.0
"""Makes a target right where it differs: what is missing or changed is written, what is there besides goes.

Where the pipeline does not run, its own sink writes the rows as they were at the pipeline's position, in a
batch under a name of its own: so changes from there on find what they expect. Where it runs, the runner is
asked to read those rows again (a resnapshot), as two writers of one row would know nothing of each other.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow
import pyarrow.compute as pc

from penstock import _native
from penstock.changes import Changes
from penstock.errors import LeaseLost
from penstock.model import Position, quote_name
from penstock.pipeline.state import PipelineState, Standing
from penstock.pipeline.verify.comparison import TableResult
from penstock.pipeline.verify.differences import Difference, Kind, hashes_of
from penstock.pipeline.verify.hashed import Hashes, hashes, is_among
from penstock.pipeline.verify.kept_values import TEXTS
from penstock.pipeline.verify.log_behind import position_of
from penstock.pipeline.verify.scope import scopes_of
from penstock.pipeline.verify.selection import keeps_keys
from penstock.pipeline.verify.system_columns import as_changes, with_version
from penstock.sinks.sink import BatchMark

# Conditions on more rows than these cost a server more than the table does.
_KEYS_MAX = 500
_MENDED = (Kind.MISSING, Kind.EXTRA, Kind.CHANGED)


def repair(results: Sequence[TableResult], state: PipelineState) -> int:
    """Make the target of a stopped pipeline right where rows differ; return how many rows were mended.

    Holds the pipeline's lease meanwhile, so that nobody starts it. Raises LeaseLost where it runs, or where
    it has moved since the comparison, and what the sink raises.
    """
    before = state.standing()
    standing = state.take()
    if before is None or before.number != standing.number:
        raise LeaseLost(
            f"the pipeline {state.name} has moved since it was compared",
            hint="Compare again: penstock verify --repair",
        )
    return sum(_mend(one, standing, state.name) for one in results if one.found)


def mended(result: TableResult) -> list[Difference]:
    """Return the differences that a repair makes right."""
    return [one for one in result.found if one.kind in _MENDED]


def rows_condition(result: TableResult) -> str | None:
    """Return the condition by which a source has the rows that differ, None for all rows of the table: where
    they are many, not all known, or have other keys in the source."""
    table, found = result.table, mended(result)
    if len(found) > _KEYS_MAX or result.beyond or not table.target.primary_key or not keeps_keys(table):
        return None
    key = table.target.primary_key
    rows = pyarrow.RecordBatch.from_pylist([one.row for one in found], schema=table.target.arrow())
    # The place does not matter: only the keys are read.
    changes = as_changes(table.target, rows, "delete", Position(0, "log.000001", 0), instance="")
    before = [f"{' AND ' if place else '('}{quote_name(name)}=" for place, name in enumerate(key)]
    ((_, text),) = _native.sql_values(
        changes.rows.select([*key, "_metadata"]), list(key), before=before, between=" OR "
    )
    return text.decode()


def _mend(result: TableResult, standing: Standing, pipeline: str) -> int:
    table, found = result.table, mended(result)
    if not found:
        return 0
    sink = table.sink.make()
    mark = BatchMark(pipeline, f"{standing.generation}/repair-{uuid.uuid4().hex[:12]}", 1)
    try:
        writer = sink.open(mark, 0)
        try:
            # What stands in the way goes first.
            (scope,) = scopes_of([table.sources[0].table], table.steps)
            extra = [one.target for one in found if one.kind is Kind.EXTRA]
            for changes in _rows_as(result, extra, "delete", standing.offsets):
                writer.write(scope.deleted(changes))
            others = [one.target for one in found if one.kind is not Kind.EXTRA]
            for changes in _rows_as(result, others, "delete", standing.offsets):
                writer.write(changes)
            if table.target.primary_key:
                put = _put(result, hashes_of(found), standing.offsets)
            else:
                # Of equal rows only those that are missing come.
                put = _rows_as(result, [one.source for one in found], "insert", standing.offsets)
            for changes in put:
                writer.write(changes)
            receipt = writer.finish()
        except BaseException:
            writer.abort()
            raise
        sink.commit(mark, [receipt])
    finally:
        sink.close()
    return len(found)


def _rows_as(
    result: TableResult,
    differing: Sequence[dict[str, Any] | None],
    kind: str,
    offsets: Mapping[str, Mapping[str, Any]],
) -> list[Changes]:
    """Return the rows of one side that differ, where it has them, as changes of one kind."""
    target = result.table.target
    there = [row for row in differing if row is not None]
    if not there:
        return []
    rows = pyarrow.RecordBatch.from_pylist(there, schema=target.arrow())
    # Whose rows they were nobody knows; so they go as of the latest of all.
    position = max(
        (position_of(offsets[one.source.name]) for one in result.table.sources),
        key=lambda one: one.commit_version,
    )
    instance, texts = result.table.sources[0].source.name, [one.get(TEXTS) for one in there]
    return [as_changes(target, rows, kind, position, instance=instance, texts=texts)]


def _put(result: TableResult, keys: Hashes, offsets: Mapping[str, Mapping[str, Any]]) -> list[Changes]:
    """Return the rows that have to be there, of keys that differ."""
    key = result.table.target.primary_key or result.table.columns
    made = []
    for changes in result.expected:
        kept = changes.rows.filter(pyarrow.array(is_among(hashes(changes.rows, key), keys)))
        if kept.num_rows:
            instance = pc.struct_field(kept.column("_metadata"), "instance")[0].as_py()
            version = position_of(offsets[instance]).commit_version - 1
            made.append(with_version(changes.with_rows(kept), version))
    return made
