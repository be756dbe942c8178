# SPDX-License-Identifier: Apache-2.0
"""`penstock compare`: read a Canal server and Penstock side by side, before clients are switched."""

import os
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.rendering import write_json
from penstock.errors import OptionInvalid, TransientError
from penstock.model import PASSWORD_VARIABLE, Secret, TablePatterns
from penstock.source.daemon_address import is_daemon_url

if TYPE_CHECKING:
    from penstock.migrate.compare.comparing import Outcome

EXIT_DIFFERENCES = 1
EXIT_INCOMPLETE = 5


def run(
    canal: Annotated[
        str,
        typer.Argument(
            metavar="canal://...",
            help="A destination that nobody else consumes: canal://user@host:11111/destination.",
        ),
    ],
    penstock: Annotated[
        str,
        typer.Argument(metavar="penstock://...", help="The same server here: penstock://host:7070/instance."),
    ],
    seconds: Annotated[float, typer.Option(min=1, help="How long to compare.")] = 60.0,
    tables: Annotated[
        str | None, typer.Option(help="Only these tables, on both sides: shop.orders,shop.*.")
    ] = None,
    zone: Annotated[
        str, typer.Option(help="The time zone of Canal's JVM, in which it shows TIMESTAMP: +08:00.")
    ] = "+00:00",
    lag: Annotated[
        float, typer.Option(min=0, help="How many seconds Penstock may be behind what Canal delivers.")
    ] = 30.0,
    shown: Annotated[int, typer.Option(min=0, help="How many differences to print.")] = 20,
    client_id: Annotated[str | None, typer.Option(help="The client id at Canal. Default: 1001.")] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(help="A file with the password at Canal. PENSTOCK_PASSWORD also works."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each difference, and the counts.")
    ] = False,
) -> None:
    """Compare, message by message, what a Canal server delivers with what Penstock reads from the same log.

    The entries are consumed and acknowledged at Canal, so use a Canal destination that nothing else reads.
    Exits with 1 if entries differ, and with 5 if none could be compared or Penstock fell behind.
    """
    from penstock.migrate.compare.canal_client import CLIENT_ID_DEFAULT, CanalAddress, CanalClient
    from penstock.migrate.compare.comparing import Comparison
    from penstock.source.source import SourceOptions, open_source

    if not is_daemon_url(penstock):
        raise OptionInvalid(
            f"{penstock!r} is no instance of a daemon", hint="Write penstock://host:7070/instance"
        )
    address = CanalAddress.parse(canal, _password(password_file))
    patterns = TablePatterns(tables)
    source = open_source(SourceOptions.parse(penstock))
    with closing(source), closing(CanalClient(address, client_id or CLIENT_ID_DEFAULT)) as client:
        comparison = Comparison(
            source, patterns, shown=shown, lag_seconds=lag, zone_seconds=_zone_seconds(zone)
        )
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline and comparison.add(client.fetch()):
                continue
        except KeyboardInterrupt:
            # Ctrl-C ends the comparison. Report what was compared until then.
            pass
        except TransientError:
            _print(comparison.outcome, as_json=json)
            raise
    _print(comparison.outcome, as_json=json)
    if comparison.outcome.different:
        raise typer.Exit(EXIT_DIFFERENCES)
    if not comparison.outcome.is_whole:
        raise typer.Exit(EXIT_INCOMPLETE)


def _print(outcome: "Outcome", *, as_json: bool) -> None:
    ends = {
        name: None if position is None else str(position)
        for name, position in (("start", outcome.start), ("end", outcome.end), ("behind", outcome.behind))
    }
    if as_json:
        counts: dict[str, Any] = {
            "entries": outcome.entries,
            "rows": outcome.rows,
            "different": outcome.different,
            **ends,
        }
        write_json(sys.stdout, [*map(asdict, outcome.differences), counts])
        return
    for difference in outcome.differences:
        typer.echo(str(difference))
    if outcome.different > len(outcome.differences):
        typer.echo(f".. and {outcome.different - len(outcome.differences):,} more differences")
    if outcome.start is None:
        typer.echo("Canal delivered no whole transaction: nothing was compared")
        return
    typer.echo(
        f"{outcome.entries:,} entries with {outcome.rows:,} rows compared, from {outcome.start} to"
        f" {outcome.end}: {outcome.different:,} differences"
    )
    if outcome.behind is not None:
        typer.echo(f"not compared further: Penstock has not reached {outcome.behind}")


def _password(file: Path | None) -> Secret:
    if file is None:
        return Secret(os.environ.get(PASSWORD_VARIABLE, ""))
    try:
        return Secret(file.read_text(encoding="utf-8").rstrip("\r\n"))
    except OSError as problem:
        raise OptionInvalid(f"password file {file} cannot be read: {problem.strerror}") from problem


def _zone_seconds(zone: str) -> int:
    from penstock.settings.listen import zone_seconds_of

    try:
        return zone_seconds_of(zone)
    except ValueError as problem:
        raise OptionInvalid(f"--zone: {problem}", hint="Write --zone +08:00") from problem
