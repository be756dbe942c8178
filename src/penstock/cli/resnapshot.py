# SPDX-License-Identifier: Apache-2.0
"""`penstock resnapshot`: read a table of a pipeline again while replication continues."""

import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.shared.options import PipelineFile
from penstock.cli.shared.rendering import write_json
from penstock.errors import OptionInvalid, SourceMissing
from penstock.model import TablePatterns

if TYPE_CHECKING:
    from penstock.changes import Target
    from penstock.pipeline.resnapshot import Resnapshot
    from penstock.pipeline.settings import PipelineSettings, PipelineSource
    from penstock.pipeline.state import PipelineState

_POLL_SECONDS = 0.5


def run(
    file: PipelineFile,
    tables: Annotated[
        list[str], typer.Argument(metavar="TABLES", help="Source tables: shop.orders, shop.*.")
    ],
    source: Annotated[str | None, typer.Option(help="The source, if the pipeline has several.")] = None,
    sink: Annotated[
        str | None, typer.Option(help="Read into this sink only. Default: every sink of the pipeline.")
    ] = None,
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

    A running pipeline reads the tables chunk by chunk between its batches. A stopped pipeline begins to read
    the tables at its next start. Rows that the source no longer has are deleted from the target, if the
    target can be read.
    """
    from penstock.pipeline.settings import load_pipeline

    chosen_by_part = [
        (part, _chosen(part, tables, source))
        for settings in load_pipeline(file).each_sink(sink)
        for part in settings.each_shard()
    ]
    # Leave out the sinks and shards that receive none of the tables.
    wanted = [(settings, chosen) for settings, chosen in chosen_by_part if chosen]
    if not wanted:
        raise SourceMissing(
            f"no table of the pipeline is {', '.join(tables)}",
            hint=f"penstock pipelines tables {file} lists its tables",
        )
    names = {target.name for _, chosen in wanted for _, target in chosen}
    if where is not None and len(names) > 1:
        raise OptionInvalid(
            f"--where applies to one table, and {len(names)} tables are selected",
            hint="Name one table as database.table",
        )
    with ExitStack() as states:
        requests = [
            (settings, *_request(settings, chosen, where, states, keep=keep)) for settings, chosen in wanted
        ]
        for settings, state, numbers in requests:
            if wait:
                _wait(state, numbers)
            _print(file, settings, state, numbers, wait=wait, as_json=as_json)


def _request(
    settings: "PipelineSettings",
    chosen: "list[tuple[PipelineSource, Target]]",
    where: str | None,
    states: ExitStack,
    *,
    keep: bool,
) -> "tuple[PipelineState, list[str]]":
    """Request the tables for one sink. Return the sink's state and the request numbers. `states` closes the
    state.
    """
    from penstock.pipeline.load.session import check_condition, open_session
    from penstock.pipeline.state import PipelineState
    from penstock.pipeline.verify.source_rows import address_of
    from penstock.sinks.sink import keeps_tables

    if where is not None:
        for table_source, target in chosen:
            with open_session(address_of(table_source)) as session:
                check_condition(session, target, where)
    # If the sink cannot be read back, its extra rows cannot be detected, so they stay.
    remove = not keep and keeps_tables(settings.make_sink())
    state = states.enter_context(closing(PipelineState.of(settings)))
    return state, [
        state.request_resnapshot(table_source.name, target.name, where, remove=remove, reuse=True)
        for table_source, target in chosen
    ]


def _print(
    file: Path,
    settings: "PipelineSettings",
    state: "PipelineState",
    numbers: list[str],
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """Print the requests of one sink."""
    requests = [request for request in state.requests() if request.number in numbers]
    if as_json:
        write_json(sys.stdout, (_as_json(request) for request in requests))
        return
    for request in requests:
        into = f" into {state.part}" if state.part else ""
        typer.echo(f"{request.table}{into}: {request.state}, request {request.number}")
    if not wait and state.runner() is None:
        typer.echo(f"{settings.name} does not run now; penstock run {file} begins with it")


def _chosen(
    settings: "PipelineSettings", tables: list[str], source: str | None
) -> "list[tuple[PipelineSource, Target]]":
    """Return the selected tables, each with its source."""
    from penstock.pipeline.load.targets import targets_of
    from penstock.pipeline.verify.source_rows import address_of

    names = [pipeline_source.name for pipeline_source in settings.sources]
    if source is not None and source not in names:
        raise OptionInvalid(f"the pipeline has no source {source!r}", hint=f"It has {', '.join(names)}")
    patterns = TablePatterns(tables)
    return [
        (pipeline_source, table)
        for pipeline_source in settings.sources
        if source in (None, pipeline_source.name)
        for table in targets_of(address_of(pipeline_source), pipeline_source.tables)
        if patterns.matches(table.name.database, table.name.table)
    ]


def _wait(state: "PipelineState", numbers: list[str]) -> None:
    """Wait until the requests are done. Raises OptionInvalid if a request fails."""
    pending = set(numbers)
    while pending:
        for number in list(pending):
            request = state.request(number)
            if request is None or request.state == "done":
                pending.discard(number)
            elif request.state == "failed":
                raise OptionInvalid(
                    f"{request.table} was not read again: {request.what}",
                    hint=f"penstock pipelines show {state.name}",
                )
        if pending:
            time.sleep(_POLL_SECONDS)


def _as_json(request: "Resnapshot") -> dict[str, str | None]:
    return {
        "request": request.number,
        "source": request.source,
        "table": str(request.table),
        "where": request.where,
        "state": request.state,
    }
