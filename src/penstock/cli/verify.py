# SPDX-License-Identifier: Apache-2.0
"""`penstock verify`: compare a pipeline's target with its source."""

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.options import PipelineFile
from penstock.cli.shared.rendering import write_json
from penstock.errors import DependencyMissing
from penstock.limits import VERIFY_SHARE_ROWS_DEFAULT

if TYPE_CHECKING:
    from penstock.pipeline.settings import PipelineSettings
    from penstock.pipeline.verify.comparison import Spreading
    from penstock.pipeline.verify.verify import Verification

EXIT_DIFFERENCES = 1
EXIT_INCOMPLETE = 5

_Tables = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TABLES", help="Only these tables of the target or the source: shop.orders, shop.*."
    ),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        help="Write every difference to this file: JSON lines for .json or .jsonl, otherwise Arrow."
    ),
]


def run(
    file: PipelineFile,
    tables: _Tables = None,
    sink: Annotated[
        str | None, typer.Option(help="The sink to compare, if the pipeline has several.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Write missing and differing rows to the target, and delete extra rows."
        ),
    ] = False,
    output: _Output = None,
    leave_out: Annotated[str | None, typer.Option(help="Columns to ignore, separated by commas.")] = None,
    limit: Annotated[
        int, typer.Option(min=1, help="Read at most this many differing keys of a table in full.")
    ] = 10_000,
    shown: Annotated[int, typer.Option(min=0, help="Print at most this many differences of a table.")] = 10,
    share_rows: Annotated[
        int, typer.Option(min=1, help="Approximate rows compared at once.")
    ] = VERIFY_SHARE_ROWS_DEFAULT,
    master: Annotated[
        str | None,
        typer.Option(help="Compare large tables on Spark: local[*], spark://host:7077, sc://host:15002."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print one JSON object per table, and with --repair one more of the repair."
        ),
    ] = False,
) -> None:
    """Compare a pipeline's target with its source, row by row, at one position of the log.

    A stopped pipeline is compared exactly at its position, whatever the source did since. A running pipeline
    is compared while it continues. Exits with 1 if rows differ and were not repaired, and with 5 if no
    difference was found but not everything could be compared.
    """
    from penstock.pipeline.settings import load_pipeline
    from penstock.pipeline.verify.report import lines, store
    from penstock.pipeline.verify.verify import verify_shards

    settings = load_pipeline(file).of_sink(sink)
    verification = verify_shards(
        settings.each_shard(),
        tables or (),
        mend=repair,
        columns_left_out=[name.strip() for name in (leave_out or "").split(",") if name.strip()],
        spreading=_spreading(settings, master),
        limit=limit,
        share_rows=share_rows,
    )
    if output is not None:
        store(verification.results, output)
    if as_json:
        write_json(sys.stdout, _json_lines(verification, repair=repair))
    else:
        for result in verification.results:
            for line in lines(result, shown):
                typer.echo(line)
        _print_outcome(verification, repair=repair)
    if not (tables or leave_out):
        _record(settings, verification)
    if verification.differs:
        raise typer.Exit(EXIT_DIFFERENCES)
    if not verification.whole:
        raise typer.Exit(EXIT_INCOMPLETE)


def _record(settings: "PipelineSettings", verification: "Verification") -> None:
    """Record a comparison of the whole sink, for `pipelines show`, alerts and metrics."""
    from penstock.pipeline.state import PipelineState
    from penstock.pipeline.verification_record import record_verification

    with closing(PipelineState.open(settings.state, settings.name, settings.sink.name)) as state:
        record_verification(state, verification)


def _json_lines(verification: "Verification", *, repair: bool) -> Iterator[dict[str, Any]]:
    """Yield the counts of each table, and then what a repair did."""
    from penstock.pipeline.verify.report import counts

    yield from map(counts, verification.results)
    if repair:
        yield {"repaired": verification.repaired, "requests": verification.requests}


def _print_outcome(verification: "Verification", *, repair: bool) -> None:
    positions = ", ".join(
        f"{name} {offset['file']}:{offset['offset']}" for name, offset in sorted(verification.offsets.items())
    )
    state = "running, compared as it went on" if verification.running else f"stopped, compared at {positions}"
    typer.echo(f"the pipeline is {state}")
    if verification.repaired:
        typer.echo(f"repaired: {verification.repaired:,} rows")
    if verification.requests:
        typer.echo(f"the runner was asked to read again: requests {', '.join(verification.requests)}")
    if verification.differs and not repair:
        typer.echo("to correct the target, repeat the command with --repair")
    if not verification.whole:
        typer.echo("not everything was compared")


def _spreading(settings: "PipelineSettings", master: str | None) -> "Spreading":
    from penstock.pipeline.verify.comparison import in_this_process

    if master is None:
        return in_this_process
    try:
        from penstock.spark.session import session_for
        from penstock.spark.verifying import SparkSpreading
    except ModuleNotFoundError as problem:
        raise DependencyMissing(
            f"{problem.name} is not installed", hint="Run: pip install 'penstock[spark]'"
        ) from problem
    return SparkSpreading(session_for(settings.name, master, settings.spark))
