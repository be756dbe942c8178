# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines`: show, pause, resume, reset and repair pipelines."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.dead_letters import list_dead_letters, purge_dead_letters, replay_dead_letters
from penstock.cli.shared.options import AsJson, EachSink, PipelineFile
from penstock.cli.shared.rendering import Field, LineWriter, time_text, write_json
from penstock.errors import OptionInvalid
from penstock.model import Position

if TYPE_CHECKING:
    from penstock.pipeline.moving import PlannedRewind
    from penstock.pipeline.state import PipelineState
    from penstock.pipeline.table_states import TableState

HELP = "Show, pause, resume, reset and repair pipelines."


@contextmanager
def _opened_state(file: Path) -> "Iterator[PipelineState]":
    """Open the state of a pipeline inside the block, without the pipeline's secrets, which only its runner
    has.
    """
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
            remark = status["why"] if status["state"] == "lost" else None
            typer.echo(f"{name:<24}{status['state']:<20}{status['runner'] or remark or '-'}")


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
    from penstock.pipeline.moving import parts_of_sink
    from penstock.pipeline.table_states import STATES, table_states

    with _opened_state(file) as state:
        rows = [(part.part, row) for part in parts_of_sink(state, sink) for row in table_states(part)]
    if as_json:
        write_json(sys.stdout, ({"part": part, **row.to_json()} for part, row in rows))
        return
    if not rows:
        typer.echo(f"{state.name} has no tables yet: penstock run {file}")
        return
    fields = [Field("table", 40), Field("state", 10), Field("load", 16), Field("rows", 12, right=True)]
    lines = LineWriter(sys.stdout, [*fields, Field("why", 0)])
    # Tables that need an operator come first.
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
                typer.echo(f"    {key.removesuffix('_us'):<32}{_value_text(key, inner)}")
        elif value not in (None, [], {}, ""):
            typer.echo(f"{name:<22} {value}")


def _value_text(name: str, value: Any) -> str:
    if name.endswith("_us"):
        return time_text(datetime.fromtimestamp(value // 1_000_000, UTC)) if value else "never"
    return json.dumps(value) if isinstance(value, dict) else str(value)


def pause(
    file: PipelineFile, why: Annotated[str, typer.Option(help="The reason to show in the status.")] = ""
) -> None:
    """Stop a pipeline after its current batch, and prevent it from starting again."""
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
    that only the target has, if the target can be read back. With `load: none`, the next run begins at the
    start of its sources instead. With a position, nothing is deleted: the changes
    from there on are applied again, and only tables without a key are read again. In both cases a feed
    receives the changes twice.
    """
    from penstock.pipeline.moving import plan_rewinds, reset_progress
    from penstock.pipeline.settings import load_pipeline, place_of_state
    from penstock.pipeline.state import PipelineState
    from penstock.source.bounds import parse_bound

    bounds = [bound_text for bound_text in (position, gtid_set, time_) if bound_text is not None]
    if len(bounds) > 1:
        raise OptionInvalid("one place at a time", hint="Give one of --position, --gtid-set, --time")
    if bounds:
        bound = parse_bound(bounds[0] if gtid_set is None else f"gtid:{gtid_set}")
        with ExitStack() as states:
            # Plan all rewinds first: if any of several sinks or shards refuses, nothing is rewound.
            plans = plan_rewinds(load_pipeline(file), bound, source, sink, states)
            if not (dry_run or yes):
                raise OptionInvalid("; ".join(map(_rewind_text, plans)), hint="Give --yes to do it")
            for plan in plans:
                if not dry_run:
                    plan.run()
                typer.echo(_rewind_text(plan))
        return
    location = place_of_state(file)
    name = f"{location.name}/{sink}" if sink else location.name
    if dry_run or not yes:
        beginning = "with a full load" if location.loads else "without a load, at the start of its sources"
        raise OptionInvalid(
            f"the state of {name} would be forgotten, and its next run begin {beginning}",
            hint=f"penstock pipelines reset {file} --yes; to read single tables again: penstock resnapshot",
        )
    with closing(PipelineState.open(location.state, location.name)) as state:
        reset_progress(state, sink)
    typer.echo(
        f"{name} begins with a full load: rows that only the target has are deleted,"
        " a feed receives every row again"
        if location.loads
        else f"{name} begins without a load, at the `start` of its sources (default: latest for a server,"
        " earliest for files): the target gets no changes from before it"
    )


def _rewind_text(plan: "PlannedRewind") -> str:
    into = f"{plan.part}, " if plan.part else ""
    message = (
        f"{into}{plan.source}: from {plan.before.file}:{plan.before.offset} back to {plan.after},"
        f" {plan.bytes} bytes of its log are read again"
    )
    if plan.feed:
        message += f"; {plan.feed} receives their changes twice"
    elif plan.keyless:
        names = ", ".join(map(str, plan.keyless))
        message += f"; tables without a key are read again into emptied targets: {names}"
    return message


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
    from penstock.pipeline.moving import plan_skips
    from penstock.pipeline.settings import load_pipeline

    with ExitStack() as states:
        for plan in plan_skips(load_pipeline(file), Position.parse(position), source, sink, states):
            plan.run()
            transaction = plan.transaction
            description = transaction.tables or transaction.statement or "no table"
            typer.echo(
                f"passed over: {transaction.gtid or position},"
                f" {transaction.begin['file']}:{transaction.begin['offset']} to"
                f" {transaction.end['offset']}: {description}"
            )
            chosen = f" --sink {plan.sink}" if plan.sink else ""
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
