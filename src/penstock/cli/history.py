# SPDX-License-Identifier: Apache-2.0
"""`penstock history`: show every change of one row in a kept log, newest first."""

import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli.shared.options import Ca, DaemonConfig, Json, Url
from penstock.cli.shared.progress import ReadingProgress
from penstock.cli.shared.rendering import counted, write_json
from penstock.cli.shared.whole_daemon import WholeDaemon
from penstock.model import TableName
from penstock.source.shown_values import shown_text

EXIT_FINDINGS = 1

_STYLES = {"insert": "green", "update": "yellow", "delete": "red"}


def run(
    table: Annotated[str, typer.Argument(help="The table, such as shop.orders.")],
    key: Annotated[list[str], typer.Argument(help="The values of the row's primary key.")],
    column: Annotated[
        list[str] | None,
        typer.Option(help="A column of the key, if not the primary key; repeat it for each value."),
    ] = None,
    instance: Annotated[
        str | None, typer.Option(help="The daemon's instance. Default: the only one.")
    ] = None,
    url: Url = None,
    config: DaemonConfig = None,
    ca: Ca = None,
    log: Annotated[Path | None, typer.Option(help="The log's folder, instead of a daemon.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after this many changes.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to a row: every change in the kept log, newest first, with before and after.

    Also shows statements that defined or emptied the table, and which pipelines, subscriptions and other
    readers of the daemon have confirmed each change. Ctrl-C ends the search. Exits with 1 if a part of the
    log could not be read.
    """
    name, columns = TableName.parse(table), tuple(column or ())
    if log is not None:
        parts = _of_folder(log, name, tuple(key), columns)
    else:
        row = {"table": name.sql, "key": key, "columns": list(columns), "limit": limit}
        parts = _of_daemon(row, instance, url, config, ca)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    shown, unreadable, readers = 0, False, 0
    with ReadingProgress("searching", 0) as progress:
        for part in parts:
            if part["kind"] == "progress":
                progress.reach_of(part["searched_bytes"], part["candidate_bytes"])
                continue
            unreadable |= part["kind"] == "unreadable"
            with progress.aside():
                if json:
                    write_json(sys.stdout, [part])
                elif part["kind"] != "readers":
                    _show(console, part, readers)
            if part["kind"] == "readers":
                readers = len(part["readers"])
                continue
            shown += 1
            if limit is not None and shown >= limit:
                break
    if not shown and not json:
        typer.echo(f"the log has no change of {table} {' '.join(key)}", err=True)
    if unreadable:
        raise typer.Exit(EXIT_FINDINGS)


def _of_folder(
    folder: Path, table: TableName, key: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    from penstock.logstore.reader import LogReader
    from penstock.source.log import LogSource
    from penstock.source.logged_tables import prove_table_known
    from penstock.source.row_history import Progress, RowHistory, RowKey, part_to_json
    from penstock.source.source import SourceOptions

    def open_source() -> LogSource:
        return LogSource(SourceOptions.parse(str(folder)))

    is_empty = True
    row = RowKey(table, key, columns)
    for part in RowHistory(LogReader.open(folder), open_source, row).parts():
        is_empty &= isinstance(part, Progress)
        yield part_to_json(part)
    if is_empty:
        with closing(open_source()) as source:
            prove_table_known(source, table)


def _of_daemon(
    row: dict[str, Any], instance: str | None, url: str | None, config: Path | None, ca: Path | None
) -> Iterator[dict[str, Any]]:
    # The daemon searches, so nothing that reads a log is loaded here: the answer would be later.
    from penstock.cli.shared.chosen_daemon import daemon_address
    from penstock.source.daemon_client import SEARCH_SILENCE_SECONDS_MAX, DaemonClient

    instance = instance or WholeDaemon.find(url, config, ca).only_instance()
    address = daemon_address(instance, url, config, ca)
    with closing(DaemonClient(address, address.base_urls[0])) as client:
        yield from client.lines("history", row, SEARCH_SILENCE_SECONDS_MAX)


def _show(console: Console, part: dict[str, Any], readers: int) -> None:
    """Print a change as a table of columns before and after; for an update, only the columns that differ.

    `readers` is the number of readers that hold the log. The change names the readers that have not confirmed
    it yet.
    """
    if part["kind"] == "statement":
        emptied = "  (the row is gone, if it was there)" if part["empties"] else ""
        console.print(Text.assemble((f"statement{emptied}", "bold magenta"), f"  {part['position']}"))
        console.print(Text(f"  {part['text']}"))
        return
    if part["kind"] == "unreadable":
        where = f"{part['start']} to {part['end']}"
        console.print(Text.assemble(("unreadable", "bold red"), f"  {where}: {part['error']}: {part['why']}"))
        console.print(Text(f"  changes after {part['position']} may be missing. {part['hint'] or ''}"))
        return
    time = datetime.fromtimestamp(part["time_us"] / 1e6, UTC).isoformat(sep=" ", timespec="microseconds")
    head: list[str | tuple[str, str]] = [
        (part["change"], f"bold {_STYLES[part['change']]}"),
        f"  {time}  {part['position']}",
    ]
    if part["gtid"]:
        head.append(f"  gtid {part['gtid']}")
    head.append(f"  server {part['server_id']}")
    if part["thread_id"] is not None:
        head.append(f"  thread {part['thread_id']}")
    console.print(Text.assemble(*head))
    if pending := part.get("pending"):
        console.print(Text.assemble(("  not confirmed by ", "yellow"), ", ".join(pending)))
    elif readers:
        console.print(Text(f"  confirmed by {counted(readers, 'reader')}", "dim"))
    before, after = part["before"], part["after"]
    table = Table(box=None, padding=(0, 2), show_header=True, header_style="dim")
    for title in ("column", "before", "after"):
        table.add_column(title, overflow="fold")
    for name in {**(before or {}), **(after or {})}:
        old, new = _cell(before, name), _cell(after, name)
        if before is None or after is None or old != new:
            table.add_row(Text(name), Text(old), Text(new))
    console.print(table)


def _cell(values: dict[str, Any] | None, name: str) -> str:
    if values is None:
        return "-"
    if name not in values:
        return "(not logged)"
    return shown_text(values[name])
