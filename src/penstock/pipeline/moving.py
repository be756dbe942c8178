# SPDX-License-Identifier: Apache-2.0
"""Moves a stopped pipeline by hand: to the beginning, back to an earlier position, or past one transaction.

Each move is first planned for every sink and shard. If any of them cannot be moved, none is.
"""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

from penstock.changes import Target
from penstock.errors import OptionInvalid
from penstock.model import Position, TableName
from penstock.pipeline.rewinding import earlier_offset
from penstock.pipeline.settings import PipelineSettings
from penstock.pipeline.skipping import Skipped, transaction_at
from penstock.pipeline.state import Checkpoint, PipelineState, split_key, table_key
from penstock.pipeline.verify.log_reader import position_of
from penstock.pipeline.verify.merges import may_have_other_rows
from penstock.source.bounds import Bound


@dataclass(frozen=True)
class PlannedRewind:
    """A rewind of one source in one sink or shard.

    `bytes` of the log are read again. `keyless` contains the tables without a key; their targets are emptied,
    and the tables are read again. If the sink cannot replace rows and therefore receives changes twice,
    `feed` is its kind, otherwise "".
    """

    part: str
    source: str
    before: Position
    after: Position
    bytes: int
    keyless: tuple[TableName, ...]
    feed: str
    state: PipelineState
    run: Callable[[], None]


@dataclass(frozen=True)
class PlannedSkip:
    """A transaction to be skipped by one sink or shard."""

    sink: str
    transaction: Skipped
    state: PipelineState
    run: Callable[[], None]


def plan_rewinds(
    pipeline: PipelineSettings, bound: Bound, source: str | None, sink: str | None, states: ExitStack
) -> list[PlannedRewind]:
    """Return the planned effects of rewinding one sink, or all sinks.

    The states that are opened for this are closed by `states`. Propagates errors from `earlier_offset`, and
    raises OptionInvalid if a table without a key cannot be read again.
    """
    return [_plan_rewind(settings, bound, source, states) for settings in _each_part(pipeline, sink)]


def plan_skips(
    pipeline: PipelineSettings, position: Position, source: str | None, sink: str | None, states: ExitStack
) -> list[PlannedSkip]:
    """Return, for one sink or for all sinks, the transaction at a position that will be skipped.

    The states that are opened for this are closed by `states`. Raises PositionInvalid if no transaction ahead
    begins at the position, and OptionInvalid.
    """
    name = _name_of_source(pipeline, source)
    plans = []
    for settings in _each_part(pipeline, sink):
        state = states.enter_context(closing(PipelineState.of(settings)))
        offset = _load_progress(state, name).offsets[name]
        transaction = transaction_at(settings.source(name), offset, position)
        run = partial(state.skip, name, transaction.begin, transaction.end)
        plans.append(PlannedSkip(settings.sink.name, transaction, state, run))
    return plans


def reset_progress(state: PipelineState, sink: str | None) -> None:
    """Forget the progress of one sink, or of all. Raises OptionInvalid for an unknown sink, LeaseLost."""
    for part in parts_of_sink(state, sink):
        if part.part:
            part.reset()
    if sink is None:
        state.reset()


def parts_of_sink(state: PipelineState, sink: str | None) -> list[PipelineState]:
    """Return the states of the shards of one sink, or of all sinks. Raises OptionInvalid for an unknown
    sink.
    """
    if sink is not None and sink not in (known := state.sinks()):
        raise OptionInvalid(
            f"the pipeline {state.name} has no state of a sink {sink!r}",
            hint=f"It has {', '.join(known) or 'one sink without a name'}",
        )
    return [part for part in state.parts() if sink in (None, part.sink)]


def _plan_rewind(
    settings: PipelineSettings, bound: Bound, source: str | None, states: ExitStack
) -> PlannedRewind:
    name = _name_of_source(settings, source)
    state = states.enter_context(closing(PipelineState.of(settings)))
    progress = _load_progress(state, name)
    rewound = earlier_offset(settings.source(name), progress.offsets[name], bound)
    known = (state.get_large("tables") or {"tables": {}})["tables"]
    tables = {
        key: Target.from_json(table_state["current"])
        for key, table_state in known.items()
        if not table_state["gone"]
    }
    is_mirror = settings.sink.make().keeps_state
    keyless = tuple(
        table.name
        for key, table in sorted(tables.items())
        if is_mirror and split_key(key)[0] == name and not table.row_key
    )
    prove = partial(_prove_readable, settings, name, tables)
    for table in keyless:
        prove(table)
    return PlannedRewind(
        state.part,
        name,
        position_of(progress.offsets[name]),
        rewound.position,
        rewound.bytes,
        keyless,
        "" if is_mirror else settings.sink.kind,
        state,
        partial(state.rewind, name, rewound.offset, progress, prove if is_mirror else None),
    )


def _prove_readable(
    settings: PipelineSettings, source: str, tables: dict[str, Target], table: TableName
) -> None:
    """Raise OptionInvalid if a table without a key cannot be read again into an emptied target."""
    if may_have_other_rows(settings.make_steps(), tables, table_key(source, table)):
        raise OptionInvalid(
            f"{table} has no key: its rows would be in the target twice, and the target may have rows"
            " of others, so that it cannot be emptied and read again",
            hint="Give the table a primary key, or a target of its own",
        )
    if settings.source(source).server is None:
        raise OptionInvalid(
            f"{table} has no key: its rows would be in the target twice, and no server is named"
            " from which it could be read again",
            hint="Name the server the log is of (source.server)",
        )


def _each_part(settings: PipelineSettings, sink: str | None) -> list[PipelineSettings]:
    """Return the settings of each shard of a sink, or of every sink."""
    return [part for each in settings.each_sink(sink) for part in each.each_shard()]


def _name_of_source(settings: PipelineSettings, source: str | None) -> str:
    """Return the name of the selected source. Raises OptionInvalid if the selection is ambiguous."""
    names = [pipeline_source.name for pipeline_source in settings.sources]
    name = source or names[0]
    if name not in names or (source is None and len(names) > 1):
        raise OptionInvalid(
            "the pipeline has several sources; choose one with --source",
            hint=f"--source {' or '.join(names)}",
        )
    return name


def _load_progress(state: PipelineState, source: str) -> Checkpoint:
    """Return the pipeline's progress. Raises OptionInvalid if a source has no progress."""
    progress = state.checkpoint()
    if progress is None or source not in progress.offsets:
        raise OptionInvalid(f"the pipeline {state.name} never ran", hint="Run it: penstock run pipeline.yaml")
    return progress
