# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines dead-letters` and `replay`: rows that steps could not work on."""

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
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def list_dead_letters(
    file: _File,
    rows: Annotated[bool, typer.Option("--rows", help="Also print the rows.")] = False,
    as_json: _AsJson = False,
) -> None:
    """List the rows on which a step failed: their position, the step and the error."""
    settings = load_pipeline(file)
    found = dead_letters(settings)
    if as_json:
        write_json(sys.stdout, (one.to_json() for one in found))
        return
    for one in found:
        when = datetime.fromtimestamp(one.noted_us / 1e6, UTC)
        typer.echo(f"{one.name}  {when:%Y-%m-%d %H:%M:%S}  {one.table}  {one.rows} rows")
        typer.echo(f"    {one.step} at {one.position}: {one.error}: {one.message}")
        if rows:
            _tell_rows(rows_of_letter(settings, one.name))
    total = sum(one.rows for one in found)
    typer.echo(f"{total} rows in {len(found)} entries")


def _tell_rows(changes: Changes) -> None:
    names = [*changes.target.column_names, "_change_type", "_commit_version"]
    for row in changes.rows.select(names).to_pylist():
        typer.echo(f"    {json.dumps(row, default=json_value, ensure_ascii=False)}")


def replay_dead_letters(
    file: _File,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Entries to replay. Default: all.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Replay rows from the dead letter through the current steps into the sink.

    A sink that keeps state must not receive outdated rows. For such a sink the pipeline reads the keys of
    these rows again from the source, at its next batch.
    """
    for done in replay(load_pipeline(file), names or ()):
        if as_json:
            write_json(sys.stdout, iter([vars(done)]))
        elif done.read_again:
            typer.echo(f"{done.name}: the keys of {done.read_again} rows are read again by the pipeline")
        else:
            typer.echo(f"{done.name}: {done.written} rows written, {done.rejected} put aside once more")
