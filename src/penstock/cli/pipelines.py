# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines`: show, pause, resume, reset and repair pipelines."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.dead_letters import list_dead_letters, purge_dead_letters, replay_dead_letters
from penstock.cli.shared.options import AsJson, EachSink, PipelineFile
from penstock.cli.shared.rendering import Field, LineWriter, write_json
from penstock.errors import OptionInvalid
from penstock.model import Position, TableName

if TYPE_CHECKING:
    from penstock.pipeline.settings import PipelineSettings
    from penstock.pipeline.state import Checkpoint, PipelineState
    from penstock.pipeline.table_states import TableState
    from penstock.source.bounds import Bound

HELP = "Show, pause, resume, reset and repair pipelines."


@contextmanager
def _opened_state(file: Path) -> "Iterator[PipelineState]":
    """Open the state of a pipeline inside the block, without the secrets that the runner has."""
    from penstock.pipeline.settings import place_of_state
    from penstock.pipeline.state import PipelineState

    location = place_of_state(file)
    with closing(PipelineState.open(location.state, location.name)) as state:
        yield state


def list_(
    state: Annotated[
        str, typer.Argument(metavar="STATE", help="sqlite:///path/penstock-pipelines.db, or a pipeline.yaml.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the pipelines in a state store."""
    from penstock.coordinate.store import open_store
    from penstock.pipeline.settings import place_of_state
    from penstock.pipeline.summary import summaries_by_part, summarize_pipelines

    url = place_of_state(Path(state)).state if state.endswith((".yaml", ".yml")) else state
    store = open_store(url)
    try:
        summaries = summarize_pipelines(store)
    finally:
        store.close()
    if as_json:
        write_json(sys.stdout, iter(summaries))
        return
    for summary in summaries:
        for part, status in summaries_by_part(summary).items():
            name = f"{status['pipeline']}/{part}" if part else status["pipeline"]
            typer.echo(f"{name:<24}{status['state']:<20}{status['runner'] or '-'}")


def show(file: PipelineFile, as_json: AsJson = False) -> None:
    """Show a pipeline's status: batches, positions, loads, rates and what it is waiting for."""
    from penstock.pipeline.summary import summaries_by_part, summarize_pipeline

    with _opened_state(file) as state:
        summary = summarize_pipeline(state)
    if as_json:
        write_json(sys.stdout, iter([summary]))
        return
    _print_summary({name: value for name, value in summary.items() if name not in ("sinks", "shards")})
    for part, status in summaries_by_part(summary).items():
        if part:
            typer.echo("")
            _print_summary(status)


def tables(file: PipelineFile, sink: EachSink = None, as_json: AsJson = False) -> None:
    """Show the state of each table: loading, streaming, or why the pipeline continues without it."""
    from penstock.pipeline.table_states import STATES, table_states

    with _opened_state(file) as state:
        if sink is not None:
            _refuse_unknown_sink(state, sink)
        parts = [part for part in state.parts() if sink in (None, part.sink)]
        rows = [(part.part, row) for part in parts for row in table_states(part)]
    if as_json:
        write_json(sys.stdout, ({"part": part, **row.to_json()} for part, row in rows))
        return
    if not rows:
        typer.echo(f"{state.name} has no tables yet: penstock run {file}")
        return
    fields = [Field("table", 40), Field("state", 10), Field("load", 16), Field("rows", 12, right=True)]
    lines = LineWriter(sys.stdout, [*fields, Field("why", 0)])
    # What needs an operator comes first.
    for part, row in sorted(rows, key=lambda each: (STATES.index(each[1].state), each[0], each[1].table)):
        name = "/".join(filter(None, (part, row.source, row.table)))
        lines.write([name, row.state, _load_text(row), f"{row.rows:,}" if row.chunks else "", row.why])


def _load_text(row: "TableState") -> str:
    if not row.chunks:
        return ""
    return "done" if row.chunks_done >= row.chunks else f"{row.chunks_done} of {row.chunks} chunks"


def _print_summary(summary: Mapping[str, Any]) -> None:
    for name, value in summary.items():
        if isinstance(value, dict) and value:
            typer.echo(f"{name}:")
            for key, inner in value.items():
                typer.echo(f"    {key:<32}{inner if not isinstance(inner, dict) else json.dumps(inner)}")
        elif value not in (None, [], {}, ""):
            typer.echo(f"{name:<22} {value}")


def pause(
    file: PipelineFile, why: Annotated[str, typer.Option(help="The reason to show in the status.")] = ""
) -> None:
    """Stop a pipeline after its current batch, and prevent it from starting."""
    with _opened_state(file) as state:
        state.pause(why)
    typer.echo(f"{state.name} is paused; penstock pipelines resume {file}")


def resume(file: PipelineFile) -> None:
    """Allow a paused pipeline to start again."""
    with _opened_state(file) as state:
        state.resume()
    typer.echo(f"{state.name} may run; penstock run {file}")


def reset(
    file: PipelineFile,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the reset.")] = False,
    position: Annotated[
        str | None, typer.Option(help="Rewind to this position, file:offset, instead of resetting.")
    ] = None,
    gtid_set: Annotated[
        str | None, typer.Option(help="Rewind to the end of this GTID set instead of resetting.")
    ] = None,
    time_: Annotated[
        str | None, typer.Option("--time", help="Rewind to this time (UTC) instead of resetting.")
    ] = None,
    source: Annotated[str | None, typer.Option(help="The source, if the pipeline has several.")] = None,
    sink: EachSink = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the old and the new position; change nothing.")
    ] = False,
) -> None:
    """Reset a pipeline's state, or rewind the pipeline to an earlier position. Stop the pipeline first.

    Without a position, the next run loads every table again into the existing target. The load deletes rows
    that only the target has, if the target can be read back. With a position, nothing is deleted: the changes
    from there on are applied again, and only tables without a key are read again. In both cases a feed
    receives the changes twice.
    """
    from penstock.pipeline.settings import load_pipeline, place_of_state
    from penstock.pipeline.state import PipelineState
    from penstock.source.bounds import parse_bound

    bounds = [bound_text for bound_text in (position, gtid_set, time_) if bound_text is not None]
    if len(bounds) > 1:
        raise OptionInvalid("one place at a time", hint="Give one of --position, --gtid-set, --time")
    if bounds:
        bound = parse_bound(bounds[0] if gtid_set is None else f"gtid:{gtid_set}")
        with ExitStack() as states:
            # Nothing is rewound if one of several sinks or shards refuses.
            plans = [
                _plan_rewind(file, settings, bound, source, states)
                for settings in _each_part(load_pipeline(file), sink)
            ]
            if not (dry_run or yes):
                raise OptionInvalid("; ".join(effect for effect, _ in plans), hint="Give --yes to do it")
            for effect, rewind in plans:
                if not dry_run:
                    rewind()
                typer.echo(effect)
        return
    location = place_of_state(file)
    name = f"{location.name}/{sink}" if sink else location.name
    if dry_run or not yes:
        raise OptionInvalid(
            f"the state of {name} would be forgotten, and its next run begin with a full load",
            hint=f"penstock pipelines reset {file} --yes; to read single tables again: penstock resnapshot",
        )
    with closing(PipelineState.open(location.state, location.name)) as state:
        _reset(state, sink)
    typer.echo(
        f"{name} begins with a full load: rows that only the target has are deleted,"
        " a feed receives every row again"
    )


def _reset(state: "PipelineState", sink: str | None) -> None:
    """Forget the progress of one sink, or of all. Raises OptionInvalid for an unknown sink."""
    if sink is not None:
        _refuse_unknown_sink(state, sink)
    for part in state.parts():
        if part.part and sink in (None, part.sink):
            part.reset()
    if sink is None:
        state.reset()


def _refuse_unknown_sink(state: "PipelineState", sink: str) -> None:
    if sink not in (known := state.sinks()):
        raise OptionInvalid(
            f"the pipeline {state.name} has no state of a sink {sink!r}",
            hint=f"It has {', '.join(known) or 'one sink without a name'}",
        )


def _plan_rewind(
    file: Path, settings: "PipelineSettings", bound: "Bound", source: str | None, states: ExitStack
) -> tuple[str, Callable[[], None]]:
    """Return what a rewind of one sink or shard will do, and the rewind. `states` closes its state."""
    from penstock.changes import Target
    from penstock.pipeline.rewinding import earlier_offset
    from penstock.pipeline.state import PipelineState, split_key, table_key
    from penstock.pipeline.verify.merges import may_have_other_rows

    name = _name_of_source(settings, source)
    state = states.enter_context(closing(PipelineState.of(settings)))
    progress = _load_progress(state, name, file)
    target = earlier_offset(settings.source(name), progress.offsets[name], bound)
    old_offset = progress.offsets[name]
    into = f"{state.part}, " if state.part else ""
    message = (
        f"{into}{name}: from {old_offset['file']}:{old_offset['offset']} back to {target.position},"
        f" {target.bytes} bytes of its log are read again"
    )
    table_states = (state.get_large("tables") or {"tables": {}})["tables"]
    tables = {
        key: Target.from_json(table_state["current"])
        for key, table_state in table_states.items()
        if not table_state["gone"]
    }

    def keyless(table: TableName) -> None:
        if may_have_other_rows(settings.make_steps(), tables, table_key(name, table)):
            raise OptionInvalid(
                f"{table} has no key: its rows would be in the target twice, and the target may have rows"
                " of others, so that it cannot be emptied and read again",
                hint="Give the table a primary key, or a target of its own",
            )
        if settings.source(name).server is None:
            raise OptionInvalid(
                f"{table} has no key: its rows would be in the target twice, and no server is named"
                " from which it could be read again",
                hint="Name the server the log is of (source.server)",
            )

    is_mirror = settings.sink.make().keeps_state
    read_again = [
        table.name for key, table in sorted(tables.items()) if split_key(key)[0] == name and not table.row_key
    ]
    if not is_mirror:
        message += f"; {settings.sink.kind} receives their changes twice"
    elif read_again:
        for table in read_again:
            keyless(table)
        names = ", ".join(map(str, read_again))
        message += f"; tables without a key are read again into emptied targets: {names}"
    return message, partial(state.rewind, name, target.offset, progress, keyless if is_mirror else None)


def skip(
    file: PipelineFile,
    position: Annotated[
        str, typer.Argument(metavar="POSITION", help="A position inside the transaction, file:offset.")
    ],
    source: Annotated[str | None, typer.Option(help="The source, if the pipeline has several.")] = None,
    sink: EachSink = None,
) -> None:
    """Skip one transaction that the pipeline cannot apply, such as one that was prepared and rolled back.

    Stop the pipeline first. The next run applies everything before the transaction and resumes after it.
    """
    from penstock.pipeline.settings import load_pipeline
    from penstock.pipeline.skipping import transaction_at
    from penstock.pipeline.state import PipelineState

    pipeline = load_pipeline(file)
    name = _name_of_source(pipeline, source)
    for settings in _each_part(pipeline, sink):
        with closing(PipelineState.of(settings)) as state:
            progress = _load_progress(state, name, file)
            transaction = transaction_at(
                settings.source(name), progress.offsets[name], Position.parse(position)
            )
            state.skip(name, transaction.begin, transaction.end)
        description = transaction.tables or transaction.statement or "no table"
        typer.echo(
            f"passed over: {transaction.gtid or position},"
            f" {transaction.begin['file']}:{transaction.begin['offset']} to"
            f" {transaction.end['offset']}: {description}"
        )
        chosen = f" --sink {settings.sink.name}" if settings.sink.name else ""
        typer.echo(f"once it has caught up: penstock verify {file}{chosen} --repair")


def adopt(
    file: PipelineFile,
    sink: Annotated[str, typer.Option(help="The name of the sink, below `sinks` in the file.")],
) -> None:
    """Give the progress of a pipeline with `sink` to one of its `sinks`. Stop the pipeline first.

    Use it after you have moved `sink` below `sinks`. The named sink continues at the position and the batch
    of the former sink; the other sinks begin with a full load.
    """
    from penstock.pipeline.handover import adopt as adopt_progress
    from penstock.pipeline.settings import load_pipeline
    from penstock.pipeline.state import PipelineState

    settings = load_pipeline(file).of_sink(sink)
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        adopt_progress(state, sink)
    typer.echo(f"{settings.name}/{sink} continues where {settings.name} stopped; penstock run {file}")


def _each_part(settings: "PipelineSettings", sink: str | None) -> "list[PipelineSettings]":
    """Return the settings of each shard of a sink, or of every sink."""
    return [part for each in settings.each_sink(sink) for part in each.each_shard()]


def _name_of_source(settings: "PipelineSettings", source: str | None) -> str:
    """Return the name of the selected source. Raises OptionInvalid if the selection is ambiguous."""
    names = [pipeline_source.name for pipeline_source in settings.sources]
    name = source or names[0]
    if name not in names or (source is None and len(names) > 1):
        raise OptionInvalid(
            "the pipeline has several sources; choose one with --source",
            hint=f"--source {' or '.join(names)}",
        )
    return name


def _load_progress(state: "PipelineState", source: str, file: Path) -> "Checkpoint":
    """Return the pipeline's progress. Raises OptionInvalid if a source has none."""
    progress = state.checkpoint()
    if progress is None or source not in progress.offsets:
        raise OptionInvalid(f"the pipeline {state.name} never ran", hint=f"penstock run {file}")
    return progress


VERBS = {
    "list": list_,
    "show": show,
    "tables": tables,
    "pause": pause,
    "resume": resume,
    "reset": reset,
    "adopt": adopt,
    "skip": skip,
    "dead-letters": list_dead_letters,
    "replay": replay_dead_letters,
    "purge": purge_dead_letters,
}
