# SPDX-License-Identifier: Apache-2.0
"""`penstock as-of`: export the rows of a table as of a point in time, from a kept log."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import typer

from penstock.cli.shared.options import Ca, DaemonConfig, Url
from penstock.cli.shared.whole_daemon import WholeDaemon
from penstock.cli.shared.whole_file import write_whole
from penstock.errors import OptionInvalid
from penstock.model import TableName

# The pieces of a file, the position that its rows reflect, and the time from which the log has all changes.
# The time is set only if the rows are complete.
_File = tuple[Iterator[bytes], str, str | None]


def run(
    table: Annotated[str, typer.Argument(help="The table, such as shop.orders.")],
    moment: Annotated[
        str,
        typer.Argument(
            help="Before a time (2026-11-21T08:00:00Z), at a position, or after the transaction of a GTID."
        ),
    ],
    instance: Annotated[
        str | None, typer.Option(help="The daemon's instance. Default: the only one.")
    ] = None,
    url: Url = None,
    config: DaemonConfig = None,
    ca: Ca = None,
    log: Annotated[Path | None, typer.Option(help="The log's folder, instead of a daemon.")] = None,
    file_format: Annotated[str, typer.Option("--format", help="jsonl, csv or parquet.")] = "jsonl",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file. Default: the terminal.")
    ] = None,
) -> None:
    """Export the rows that a table had at a moment, as far as the kept log shows them.

    A row that changed before the moment has the values that its last such change gave it. A row that changed
    only after the moment has the values from before its first change. Rows without a change in the kept log
    are missing. The export is complete only if the log shows that the table was created or emptied before the
    moment. A message on standard error says whether it is complete.
    """
    from penstock.source.table_export import FORMATS

    if file_format not in FORMATS:
        raise OptionInvalid(f"there is no format {file_format!r}", hint=f"Use {', '.join(FORMATS)}")
    if file_format == "parquet" and output is None:
        raise OptionInvalid("Parquet is no text", hint="Name a file: --output orders.parquet")
    name = TableName.parse(table)
    if log is not None:
        reading = _of_folder(log, name, moment, file_format)
    else:
        reading = _of_daemon(instance, (url, config, ca), name, moment, file_format)
    with reading as (pieces, position, complete_since):
        if output is not None:
            write_whole(output, pieces)
        else:
            sys.stdout.buffer.writelines(pieces)
            sys.stdout.buffer.flush()
    note = (
        f"all rows of the table that the log shows since it was created or emptied at {complete_since};"
        " changes that the server does not log, such as those of foreign keys' actions, are not in it"
        if complete_since
        else "only rows that the kept log has changed, before this moment or after it"
    )
    typer.echo(f"{name} at {position}: {note}", err=True)


@contextmanager
def _of_folder(folder: Path, table: TableName, moment: str, file_format: str) -> Iterator[_File]:
    from penstock.logstore.reader import LogReader
    from penstock.source.log import LogSource
    from penstock.source.logged_tables import prove_table_known
    from penstock.source.source import SourceOptions
    from penstock.source.table_as_of import TableAsOf
    from penstock.source.table_export import export_rows

    source = LogSource(SourceOptions.parse(str(folder)))
    with closing(source):
        as_of = TableAsOf(LogReader.open(folder), source, table)
        as_of.read(moment)
        if as_of.schema is None:
            prove_table_known(source, table)
    complete_since = None if as_of.complete_since is None else str(as_of.complete_since)
    yield export_rows(as_of.rows, as_of.schema, file_format), str(as_of.position), complete_since


@contextmanager
def _of_daemon(
    instance: str | None,
    address: tuple[str | None, Path | None, Path | None],
    table: TableName,
    moment: str,
    file_format: str,
) -> Iterator[_File]:
    from penstock.cli.shared.asked_daemon import AskedDaemon
    from penstock.source.daemon_client import COMPLETE_SINCE_HEADER, POSITION_HEADER

    instance = instance or WholeDaemon.find(*address).only_instance()
    with closing(AskedDaemon.find(instance, *address)) as daemon:
        headers, pieces = daemon.as_of_file({"table": table.sql, "at": moment, "format": file_format})
        position = unquote(headers[POSITION_HEADER])
        yield pieces, position, unquote(headers.get(COMPLETE_SINCE_HEADER, "")) or None
