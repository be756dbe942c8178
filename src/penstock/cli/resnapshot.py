# SPDX-License-Identifier: Apache-2.0
"""`penstock resnapshot`: a table of a pipeline is read again while its changes go on."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from penstock.changes import Target
from penstock.cli.shared.rendering import write_json
from penstock.errors import OptionInvalid, SourceMissing
from penstock.model import TablePatterns
from penstock.pipeline.load.session import check_condition, open_session
from penstock.pipeline.load.targets import targets_of
from penstock.pipeline.resnapshot import Resnapshot
from penstock.pipeline.settings import PipelineSettings, PipelineSource, load_pipeline
from penstock.pipeline.state import PipelineState
from penstock.pipeline.verify.source_rows import address_of
from penstock.sinks.sink import keeps_tables

_POLL_SECONDS = 0.5


def run(
    file: Annotated[Path, typer.Argument(metavar="pipeline.yaml", help="The pipeline file.")],
    tables: Annotated[
        list[str], typer.Argument(metavar="TABLES", help="Source tables: shop.orders, shop.*.")
    ],
    source: Annotated[str | None, typer.Option(help="The source, if the pipeline has several.")] = None,
    where: Annotated[
        str | None,
        typer.Option(
            help="Read only these rows: a condition in the server's SQL, such as created > '2026-01-01'."
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Do not delete target rows that are missing from the source.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until all tables are read.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per table.")] = False,
) -> None:
    """Read tables again into a pipeline's target while replication continues.

    A running pipeline reads the tables chunk by chunk between its batches. A stopped pipeline begins at its
    next start. Rows that the source no longer has are deleted from the target, if the target can be read.
    """
    settings = load_pipeline(file)
    chosen = _chosen(settings, tables, source)
    if where is not None and len(chosen) > 1:
        raise OptionInvalid(
            f"--where is for one table, and {len(chosen)} are meant", hint="Name one table as database.table"
        )
    if where is not None:
        ((of, target),) = chosen
        with open_session(address_of(of)) as session:
            check_condition(session, target, where)
    # What a sink cannot read back nobody can tell to be too much.
    remove = not keep and keeps_tables(settings.make_sink())
    state = PipelineState.open(settings.state, settings.name)
    try:
        numbers = [
            state.request_resnapshot(one.name, target.name, where, remove=remove) for one, target in chosen
        ]
        if wait:
            _wait(state, numbers)
        found = [one for one in state.requests() if one.number in numbers]
        if as_json:
            write_json(sys.stdout, (_as_json(one) for one in found))
        else:
            for one in found:
                typer.echo(f"{one.table}: {one.state}, request {one.number}")
            if not wait and state.runner() is None:
                typer.echo(f"{settings.name} does not run now; penstock run {file} begins with it")
    finally:
        state.close()


def _chosen(
    settings: PipelineSettings, tables: list[str], source: str | None
) -> list[tuple[PipelineSource, Target]]:
    """Return the tables that are meant, each with its source. Raises SourceMissing where there is none."""
    names = [one.name for one in settings.sources]
    if source is not None and source not in names:
        raise OptionInvalid(f"the pipeline has no source {source!r}", hint=f"It has {', '.join(names)}")
    meant = TablePatterns(tables)
    found = [
        (one, table)
        for one in settings.sources
        if source in (None, one.name)
        for table in targets_of(address_of(one), one.tables)
        if meant.matches(table.name.database, table.name.table)
    ]
    if not found:
        raise SourceMissing(
            f"no table of the pipeline is {', '.join(tables)}",
            hint=f"penstock pipelines show {settings.name} tells its tables",
        )
    return found


def _wait(state: PipelineState, numbers: list[str]) -> None:
    """Wait until requests are done. Raises OptionInvalid where one cannot be."""
    waiting = set(numbers)
    while waiting:
        for number in list(waiting):
            found = state.request(number)
            if found is None or found.state == "done":
                waiting.discard(number)
            elif found.state == "failed":
                raise OptionInvalid(
                    f"{found.table} was not read again: {found.what}",
                    hint=f"penstock pipelines show {state.name}",
                )
        if waiting:
            time.sleep(_POLL_SECONDS)


def _as_json(one: Resnapshot) -> dict[str, str | None]:
    return {
        "request": one.number,
        "source": one.source,
        "table": str(one.table),
        "where": one.where,
        "state": one.state,
    }
