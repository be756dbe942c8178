# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines dead-letters` and `replay`: rows on which a step failed."""

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from penstock.changes import Changes
from penstock.cli.shared.rendering import json_value, write_json
from penstock.pipeline.dead_letter import dead_letters, replay, rows_of_letter
from penstock.pipeline.settings import load_pipeline

_File = Annotated[Path, typer.Argument(metavar="pipeline.yaml", help="The pipeline file.")]
_Sink = Annotated[str | None, typer.Option(help="The sink, if the pipeline has several. Default: all.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_dead_letters(
    file: _File,
    sink: _Sink = None,
    rows: Annotated[bool, typer.Option("--rows", help="Also print the rows.")] = False,
    as_json: _AsJson = False,
) -> None:
    """List the rows on which a step failed: their position, the step and the error."""
    letters = [
        (settings, letter)
        for settings in load_pipeline(file).each_sink(sink)
        for letter in dead_letters(settings)
    ]
    if as_json:
        write_json(sys.stdout, (letter.to_json() for _, letter in letters))
        return
    for settings, letter in letters:
        when = datetime.fromtimestamp(letter.noted_us / 1e6, UTC)
        typer.echo(f"{letter.name}  {when:%Y-%m-%d %H:%M:%S}  {letter.table}  {letter.rows} rows")
        typer.echo(f"    {letter.step} at {letter.position}: {letter.error}: {letter.message}")
        if rows:
            _print_rows(rows_of_letter(settings, letter.name))
    total = sum(letter.rows for _, letter in letters)
    typer.echo(f"{total} rows in {len(letters)} entries")


def _print_rows(changes: Changes) -> None:
    names = [*changes.target.column_names, "_change_type", "_commit_version"]
    for row in changes.rows.select(names).to_pylist():
        typer.echo(f"    {json.dumps(row, default=json_value, ensure_ascii=False)}")


def replay_dead_letters(
    file: _File,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Entries to replay. Default: all.")
    ] = None,
    sink: _Sink = None,
    as_json: _AsJson = False,
) -> None:
    """Replay rows from the dead letter through the current steps into the sink.

    A sink that keeps state must not receive outdated rows. For such a sink the pipeline reads the keys of
    these rows again from the source, at its next batch.
    """
    pipeline = load_pipeline(file)
    if names and sink is None and len(pipeline.sinks) > 1:
        pipeline.of_sink(None)
    outcomes = (
        replayed for settings in pipeline.each_sink(sink) for replayed in replay(settings, names or ())
    )
    for replayed in outcomes:
        if as_json:
            write_json(sys.stdout, iter([vars(replayed)]))
        elif replayed.read_again:
            typer.echo(
                f"{replayed.name}: the keys of {replayed.read_again} rows are read again by the pipeline"
            )
        else:
            typer.echo(
                f"{replayed.name}: {replayed.written} rows written, {replayed.rejected} put aside once more"
            )
