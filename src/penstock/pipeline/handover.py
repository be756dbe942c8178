# SPDX-License-Identifier: Apache-2.0
"""Hands recorded progress over when `sink` becomes one of `sinks`, or when the number of shards changes.

Each shard has its own position. Before the number of shards changes, all shards therefore apply their changes
up to a common position, the barrier. The barrier is the furthest position to which any shard has begun to
apply changes. At the barrier, each table is assigned to its new shard.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import Position, TableName
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.shard_records import Offsets
from penstock.pipeline.sink_positions import place_of_offset
from penstock.pipeline.state import Checkpoint, PipelineState, split_key
from penstock.source.offsets import Offset


def adopt(state: PipelineState, sink: str) -> None:
    """Give the progress that was recorded with `sink` to one of `sinks`.

    An interrupted call can be repeated. Raises LeaseLost while the pipeline runs, OptionInvalid if there is
    no progress to give, or if the sink already has its own progress.
    """
    adopted = refuse_adopting(state, sink)
    state.copy_to(adopted)
    state.forget()


def refuse_adopting(state: PipelineState, sink: str) -> PipelineState:
    """Return the state of the sink that would receive the progress. Propagates errors from `adopt`."""
    checkpoint, adopted = state.checkpoint(), PipelineState(state.store, state.name, sink)
    if checkpoint is None:
        raise OptionInvalid(
            f"the pipeline {state.name} has no progress that was recorded with `sink`",
            hint=f"penstock pipelines show FILE lists its sinks: {', '.join(state.sinks()) or 'none'}",
        )
    known = adopted.checkpoint()
    if known is not None and known.generation != checkpoint.generation:
        raise OptionInvalid(
            f"the sink {sink} of the pipeline {state.name} has progress of its own",
            hint=f"penstock pipelines reset FILE --sink {sink} --yes forgets it",
        )
    state.refuse_while_run()
    return adopted


# --- Shards ---------------------------------------------------------------------------------


def barrier_of(states: Sequence[PipelineState]) -> Offsets | None:
    """Return the furthest offset that any shard has reached in each source, including batches that have begun
    but are not finished; None before the first start.

    Raises OptionInvalid if a shard still loads tables or has not begun.
    """
    furthest: dict[str, Mapping[str, Any]] = {}
    checkpoints = [state.checkpoint() for state in states]
    if not any(checkpoints):
        return None
    for state, checkpoint in zip(states, checkpoints, strict=True):
        if checkpoint is None or not checkpoint.offsets:
            raise _unfinished(state, len(states), "has not begun")
        if checkpoint.loading or any(not request.ended_us for request in state.requests()):
            raise _unfinished(state, len(states), "has not read all of its tables")
        begun = state.begun(checkpoint)
        for source, offset in {**checkpoint.offsets, **(begun.end if begun is not None else {})}.items():
            known = furthest.get(source)
            if known is None or place_of_offset(known) < place_of_offset(offset):
                furthest[source] = offset
    return furthest


def is_at(state: PipelineState, checkpoint: Checkpoint, barrier: Offsets) -> bool:
    """Return whether a shard has applied everything up to the barrier, and nothing after it."""
    return state.begun(checkpoint) is None and _places(checkpoint.offsets) == _places(barrier)


def hand_over(before: Sequence[PipelineState], after: Sequence[PipelineSettings]) -> None:
    """Give the progress of all shards to other shards: `after` are their settings.

    An interrupted call can be repeated: a single record decides which shards are valid. Raises LeaseLost
    while a shard runs, OptionInvalid if the shards are not at one position.
    """
    store = before[0].store
    states = [PipelineState(store, part.name, part.sink.name, part.shard) for part in after]
    with ExitStack() as leases:
        barrier = barrier_of(before)
        checkpoints = []
        if barrier is not None:
            for state in before:
                # A shard that starts concurrently waits for the lease, and then finds that it is no longer
                # needed.
                leases.callback(state.release)
                checkpoints.append(state.take())
                if not is_at(state, checkpoints[-1], barrier):
                    raise _unfinished(state, len(before), "is not at the position of the others")
        tables = _merge_tables([state.get_large("tables") or {} for state in before])
        earlier = {
            source: offset for state in before for source, offset in (state.get_large("reset") or {}).items()
        }
        for part, state in zip(after, states, strict=True):
            state.forget()
            state.put_large("tables", _tables_of(part, tables))
            if barrier is not None:
                state.write_first(_checkpoint_of(part, checkpoints, barrier))
            elif earlier:
                state.put_large("reset", earlier)
        states[0].shards.write_count(len(after))
        for state in before:
            state.forget()


def _places(offsets: Offsets) -> dict[str, tuple[str, Position]]:
    read = {source: Offset.from_json(offset) for source, offset in offsets.items()}
    return {source: (offset.server_key, offset.position) for source, offset in read.items()}


def _unfinished(state: PipelineState, count: int, what: str) -> OptionInvalid:
    shard = f"shard {state.shard} of the pipeline" if state.shard is not None else "the pipeline"
    return OptionInvalid(
        f"{shard} {state.name} {what}, so its number of shards cannot change",
        hint=f"Set shards: {count}, and let it catch up: penstock run --local FILE --until caught-up",
    )


def _merge_tables(values: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tables known to all shards, in the form of `PipelineTables`."""
    return {
        "tables": {key: table for value in values for key, table in value.get("tables", {}).items()},
        "targets": [target for value in values for target in value.get("targets", ())],
        "written": sorted({name for value in values for name in value.get("written", ())}),
    }


def _tables_of(part: PipelineSettings, tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables that a shard has to know."""
    return {
        "tables": {key: table for key, table in tables["tables"].items() if _has_table(part, key)},
        "targets": [
            target for target in tables["targets"] if _has_target(part, Target.from_json(target).name)
        ],
        "written": [name for name in tables["written"] if _has_target(part, TableName.parse(name))],
    }


def _checkpoint_of(part: PipelineSettings, before: Sequence[Checkpoint], barrier: Offsets) -> Checkpoint:
    """Return the progress of a shard that begins at the barrier, under its own generation."""
    return Checkpoint(
        Checkpoint.new().generation,
        offsets=barrier,
        loads={key: load for each in before for key, load in each.loads.items() if _has_table(part, key)},
        stopped={key: why for each in before for key, why in each.stopped.items() if _has_table(part, key)},
        planned=True,
        skips={source: skips for each in before for source, skips in each.skips.items()},
    )


def _has_table(part: PipelineSettings, key: str) -> bool:
    source, table = split_key(key)
    sources = {each.name: each for each in part.sources}
    return source in sources and sources[source].tables.matches(table.database, table.table)


def _has_target(part: PipelineSettings, target: TableName) -> bool:
    return part.shard is None or part.shard.owns(target)


def remove_leftovers(state: PipelineState, shards: Sequence[PipelineState]) -> None:
    """Delete what an interrupted handover of a pipeline left behind. `shards` are the states to keep."""
    state.shards.set_barrier(None)
    kept = {str(shard.shard) for shard in shards}
    for shard in state.shards.known():
        if str(shard) not in kept:
            PipelineState(state.store, state.name, state.sink, shard).forget()
    if state.shard is None and shards[0].shard is not None:
        state.forget()
