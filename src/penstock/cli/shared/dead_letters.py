# SPDX-License-Identifier: Apache-2.0
"""`penstock pipelines dead-letters`, `replay` and `purge`: rows on which a step failed."""

import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.shared.options import AsJson, EachSink, PipelineFile
from penstock.cli.shared.rendering import counted, json_value, write_json
from penstock.errors import OptionInvalid

if TYPE_CHECKING:
    from penstock.changes import Changes


def list_dead_letters(
    file: PipelineFile,
    sink: EachSink = None,
    rows: Annotated[bool, typer.Option("--rows", help="Also print the rows.")] = False,
    replayed: Annotated[
        bool, typer.Option("--replayed", help="List the entries that were replayed, not the others.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the rows on which a step failed: their position, the step and the error."""
    from penstock.pipeline.dead_letter import dead_letters, rows_of_letter
    from penstock.pipeline.settings import load_pipeline

    letters = [
        (settings, letter)
        for settings in load_pipeline(file).each_sink(sink)
        for letter in dead_letters(settings, replayed=replayed)
    ]
    if as_json:
        write_json(sys.stdout, (letter.to_json() for _, letter in letters))
        return
    for settings, letter in letters:
        when = datetime.fromtimestamp(letter.noted_us / 1e6, UTC)
        typer.echo(f"{letter.name}  {when:%Y-%m-%d %H:%M:%S}  {letter.table}  {letter.rows} rows")
        typer.echo(f"    {letter.step} at {letter.position}: {letter.error}: {letter.message}")
        if rows:
            _print_rows(rows_of_letter(settings, letter.name, replayed=replayed))
    total = sum(letter.rows for _, letter in letters)
    typer.echo(f"{total} rows in {len(letters)} entries")


def _print_rows(changes: "Changes") -> None:
    names = [*changes.target.column_names, "_change_type", "_commit_version"]
    for row in changes.rows.select(names).to_pylist():
        typer.echo(f"    {json.dumps(row, default=json_value, ensure_ascii=False)}")


def replay_dead_letters(
    file: PipelineFile,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Entries to replay. Default: all.")
    ] = None,
    sink: EachSink = None,
    as_json: AsJson = False,
) -> None:
    """Replay rows from the dead letter through the current steps into the sink.

    A sink that keeps state must not receive outdated rows. For such a sink the pipeline's next batch reads
    the current rows with the same keys from the source instead.
    """
    from penstock.pipeline.dead_letter import replay
    from penstock.pipeline.settings import load_pipeline

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


def purge_dead_letters(
    file: PipelineFile,
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Entries to delete.")] = None,
    before: Annotated[
        str | None, typer.Option(help="Delete entries that were written before this time (UTC).")
    ] = None,
    replayed: Annotated[
        bool, typer.Option("--replayed", help="Delete entries that were replayed, not the others.")
    ] = False,
    sink: EachSink = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted; change nothing.")
    ] = False,
    reason: Annotated[str, typer.Option(help="The reason to record in the folder purged.")] = "",
    as_json: AsJson = False,
) -> None:
    """Delete entries of the dead letter and their rows for good. Rows that were not replayed are lost.

    The folder `purged` of the dead letter records who deleted which entries, and when.
    """
    from penstock.cli.shared.log_folder import user_name
    from penstock.pipeline.dead_letter import purge, purgeable_letters
    from penstock.pipeline.settings import load_pipeline
    from penstock.source.bounds import parse_bound

    if not names and before is None and not replayed:
        raise OptionInvalid(
            "nothing says which entries are to go",
            hint="Name them, or add --before TIME or --replayed; see them first with --dry-run",
        )
    bound = None if before is None else parse_bound(before)
    if bound is not None and bound.time_us is None:
        raise OptionInvalid(f"--before {before} is no time", hint="Write --before 2026-11-21T08:00:00Z")
    pipeline = load_pipeline(file)
    if names and sink is None and len(pipeline.sinks) > 1:
        pipeline.of_sink(None)
    before_us = None if bound is None else bound.time_us
    for settings in pipeline.each_sink(sink):
        letters = purgeable_letters(settings, names or (), before_us=before_us, replayed=replayed)
        if not dry_run:
            purge(settings, letters, replayed=replayed, user=user_name(), reason=reason)
        if as_json:
            write_json(sys.stdout, ({**letter.to_json(), "dry_run": dry_run} for letter in letters))
            continue
        for letter in letters:
            typer.echo(f"{letter.name}  {letter.table}  {counted(letter.rows, 'row')}")
        rows = counted(sum(letter.rows for letter in letters), "row")
        entries = f"{len(letters)} {'entry' if len(letters) == 1 else 'entries'}"
        typer.echo(f"{'would go' if dry_run else 'gone'}: {rows} in {entries} of {settings.dead_letter}")
