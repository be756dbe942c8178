# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines`: show, pause, resume, reset and repair pipelines."""

import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.changes import Target
from penstock.cli.shared.dead_letters import list_dead_letters, replay_dead_letters
from penstock.cli.shared.rendering import write_json
from penstock.coordinate.store import open_store
from penstock.errors import OptionInvalid
from penstock.model import Position, TableName
from penstock.pipeline.rewinding import earlier_offset
from penstock.pipeline.settings import PipelineSettings, load_pipeline, place_of_state
from penstock.pipeline.skipping import transaction_at
from penstock.pipeline.state import PipelineState, Standing, table_key
from penstock.pipeline.verify.merges import may_have_other_rows
from penstock.source.bounds import Bound, parse_bound

HELP = "Show, pause, resume, reset and repair pipelines."

_File = Annotated[Path, typer.Argument(metavar="pipeline.yaml", help="The pipeline file.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_(
    state: Annotated[
        str, typer.Argument(metavar="STATE", help="sqlite:///path/penstock-pipelines.db, or a pipeline.yaml.")
    ],
    as_json: _AsJson = False,
) -> None:
    """List the pipelines in a state store."""
    url = place_of_state(Path(state)).state if state.endswith((".yaml", ".yml")) else state
    store = open_store(url)
    try:
        found = [_told(PipelineState(store, name)) for name in PipelineState.names(store)]
    finally:
        store.close()
    if as_json:
        write_json(sys.stdout, iter(found))
        return
    for one in found:
        typer.echo(f"{one['pipeline']:<24}{one['state']:<20}{one['runner'] or '-'}")


def show(file: _File, as_json: _AsJson = False) -> None:
    """Show a pipeline's status: batches, positions, loads, rates and what it is waiting for."""
    place = place_of_state(file)
    state = PipelineState.open(place.state, place.name)
    try:
        told = _told(state)
    finally:
        state.close()
    if as_json:
        write_json(sys.stdout, iter([told]))
        return
    for name, value in told.items():
        if isinstance(value, dict):
            typer.echo(f"{name}:")
            for key, inner in value.items():
                typer.echo(f"    {key:<32}{inner if not isinstance(inner, dict) else json.dumps(inner)}")
        elif value not in (None, [], ""):
            typer.echo(f"{name:<22} {value}")


def pause(
    file: _File, why: Annotated[str, typer.Option(help="The reason to show in the status.")] = ""
) -> None:
    """Stop a pipeline after its current batch, and prevent it from starting."""
    place = place_of_state(file)
    state = PipelineState.open(place.state, place.name)
    try:
        state.pause(why)
    finally:
        state.close()
    typer.echo(f"{place.name} is paused; penstock pipelines resume {file}")


def resume(file: _File) -> None:
    """Allow a paused pipeline to start again."""
    place = place_of_state(file)
    state = PipelineState.open(place.state, place.name)
    try:
        state.resume()
    finally:
        state.close()
    typer.echo(f"{place.name} may run; penstock run {file}")


def reset(
    file: _File,
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
    places = [place for place in (position, gtid_set, time_) if place is not None]
    if len(places) > 1:
        raise OptionInvalid("one place at a time", hint="Give one of --position, --gtid-set, --time")
    if places:
        bound = parse_bound(places[0] if gtid_set is None else f"gtid:{gtid_set}")
        _rewind(file, bound, source, yes=yes, dry_run=dry_run)
        return
    place = place_of_state(file)
    if dry_run or not yes:
        raise OptionInvalid(
            f"the state of {place.name} would be forgotten, and its next run begin with a full load",
            hint=f"penstock pipelines reset {file} --yes; to read single tables again: penstock resnapshot",
        )
    with closing(PipelineState.open(place.state, place.name)) as state:
        state.reset()
    typer.echo(
        f"{place.name} begins with a full load: rows that only the target has are deleted,"
        " a feed receives every row again"
    )


def _rewind(file: Path, bound: Bound, source: str | None, *, yes: bool, dry_run: bool) -> None:
    settings = load_pipeline(file)
    name = _name_of_source(settings, source)
    with closing(PipelineState.open(settings.state, settings.name)) as state:
        standing = _standing_of(state, name, file)
        found = earlier_offset(settings.source(name), standing.offsets[name], bound)
        before = standing.offsets[name]
        told = (
            f"{name}: from {before['file']}:{before['offset']} back to {found.position},"
            f" {found.bytes} bytes of its log are read again"
        )
        is_mirror = settings.sink.make().keeps_state
        if not is_mirror:
            told += f"; {settings.sink.kind} receives their changes twice"
        else:
            told += "; tables without a key are read anew"
        if dry_run:
            typer.echo(told)
            return
        if not yes:
            raise OptionInvalid(told, hint="Give --yes to do it")

        known = (state.get_large("tables") or {"tables": {}})["tables"]
        tables = {key: Target.from_json(one["current"]) for key, one in known.items() if not one["gone"]}

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

        state.rewind(name, found.offset, standing, keyless if is_mirror else None)
    typer.echo(told)


def skip(
    file: _File,
    position: Annotated[
        str, typer.Argument(metavar="POSITION", help="A position inside the transaction, file:offset.")
    ],
    source: Annotated[str | None, typer.Option(help="The source, if the pipeline has several.")] = None,
) -> None:
    """Skip one transaction that the pipeline cannot apply, such as one that was prepared and rolled back.

    Stop the pipeline first. The next run applies everything before the transaction and resumes after it.
    """
    settings = load_pipeline(file)
    name = _name_of_source(settings, source)
    state = PipelineState.open(settings.state, settings.name)
    try:
        standing = _standing_of(state, name, file)
        found = transaction_at(settings.source(name), standing.offsets[name], Position.parse(position))
        state.skip(name, found.begin, found.end)
    finally:
        state.close()
    what = found.tables or found.statement or "no table"
    typer.echo(
        f"passed over: {found.gtid or position}, {found.begin['file']}:{found.begin['offset']} to"
        f" {found.end['offset']}: {what}"
    )
    typer.echo(f"once it has caught up: penstock verify {file} --repair")


def _name_of_source(settings: PipelineSettings, source: str | None) -> str:
    """Return the source that is meant. Raises OptionInvalid where that is not said."""
    names = [one.name for one in settings.sources]
    name = source or names[0]
    if name not in names or (source is None and len(names) > 1):
        raise OptionInvalid(
            "the pipeline has several sources; choose one with --source",
            hint=f"--source {' or '.join(names)}",
        )
    return name


def _standing_of(state: PipelineState, source: str, file: Path) -> Standing:
    """Return what is done. Raises OptionInvalid where nothing of a source is."""
    standing = state.standing()
    if standing is None or source not in standing.offsets:
        raise OptionInvalid(f"the pipeline {state.name} never ran", hint=f"penstock run {file}")
    return standing


def _told(state: PipelineState) -> dict[str, Any]:
    standing, runner, shown = state.standing(), state.runner(), state.shown()
    found: dict[str, Any] = {
        "pipeline": state.name,
        "state": _state(state, standing, runner is not None, shown),
        "runner": runner.name if runner is not None else None,
    }
    if standing is None:
        return found
    found |= {
        "generation": standing.generation,
        "batches": standing.number,
        "positions": {name: f"{one['file']}:{one['offset']}" for name, one in standing.offsets.items()},
        "loads": {
            key: f"{load.done} of {load.chunks} chunks"
            for key, load in standing.loads.items()
            if not load.finished
        },
        "tables_loaded": sum(load.finished for load in standing.loads.values()),
        "stopped": dict(standing.stopped),
        "resnapshots": _open_requests(state),
    }
    if "updated_us" in shown:
        found["seconds_since_update"] = round(time.time() - shown["updated_us"] / 1e6, 1)
    found["progress"] = {
        name: value for name, value in shown.items() if name not in ("pipeline", "state", "updated_us")
    }
    return found


def _open_requests(state: PipelineState) -> dict[str, str]:
    """Return the resnapshots that wait, run, or failed and were not followed by one that is done."""
    found: dict[str, str] = {}
    for one in state.requests():
        key = f"{one.source}/{one.table}"
        if one.state == "done":
            found.pop(key, None)
        else:
            found[key] = f"{one.state}: {one.what}" if one.what else one.state
    return found


def _state(state: PipelineState, standing: Standing | None, is_run: bool, shown: dict[str, Any]) -> str:
    if state.paused:
        return "pausing" if is_run else "paused"
    if is_run:
        return str(shown.get("state", "starting"))
    if standing is None:
        return "never ran"
    return "failed" if shown.get("state") == "failed" else "stopped"


VERBS = {
    "list": list_,
    "show": show,
    "pause": pause,
    "resume": resume,
    "reset": reset,
    "skip": skip,
    "dead-letters": list_dead_letters,
    "replay": replay_dead_letters,
}
