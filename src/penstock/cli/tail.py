# SPDX-License-Identifier: Apache-2.0
"""`penstock tail`: follow changes in the terminal, or as JSON lines for another program."""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer

from penstock.cli.shared.options import Ca, DaemonConfig
from penstock.errors import OptionInvalid, PenstockError, TransientError
from penstock.limits import (
    RECONNECT_PAUSE_SECONDS_FIRST,
    RECONNECT_TRIES_MAX,
)
from penstock.model import TablePatterns
from penstock.retry import Retry

if TYPE_CHECKING:
    from penstock.cli.shared.change_lines import ChangeLine, ChangeWriter
    from penstock.client.daemons import Daemons
    from penstock.client.fetch import BatchFrame
    from penstock.source.daemon_address import DaemonAddress

_log = structlog.get_logger(__name__)

# A response without changes ends after this time and is requested again. A longer silence means a lost
# connection.
_WAIT_SECONDS = 25.0
_SILENCE_SECONDS = 40.0

# Batches are small, so that the first lines appear immediately.
_BATCH_ROWS = 4096

_LATEST = "latest"

# The statement field in a message about a statement. Quotes inside a value are escaped.
_STATEMENT = re.compile(rb'"sql":"[^"]')


class Format(StrEnum):
    """The format in which changes are printed."""

    TABLE = "table"
    DEBEZIUM = "debezium"
    DEBEZIUM_SCHEMA = "debezium-schema"
    MAXWELL = "maxwell"
    CANAL_FLAT = "canal-flat"


def run(
    instance: Annotated[str, typer.Argument(help="The daemon's instance, or penstock://host/instance.")],
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="TABLES", help="Table patterns: shop.orders shop.* or /regex/."),
    ] = None,
    first: Annotated[
        str,
        typer.Option("--from", help="Where to start: earliest, latest, a position, a GTID set or a time."),
    ] = _LATEST,
    until: Annotated[
        str | None, typer.Option(help="Where to stop: latest, a position, a GTID set or a time.")
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Only shard I of N, from 0; 0,2/4 selects shards 0 and 2 of 4."),
    ] = None,
    shard_columns: Annotated[
        list[str] | None,
        typer.Option(metavar="TABLE=COLUMN,...", help="Columns that determine a row's shard."),
    ] = None,
    form: Annotated[Format, typer.Option("--format", help="Print text or JSON lines.")] = Format.TABLE,
    where: Annotated[str | None, typer.Option(help="Only rows that match this SQL condition.")] = None,
    changes: Annotated[
        str | None, typer.Option(help="Only these change types: insert,update,delete.")
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Only these columns (with --format table).")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many lines.")] = None,
    url: Annotated[
        str | None,
        typer.Option(help="One or more daemons: a:7070,b:7070. Default: 127.0.0.1:7070."),
    ] = None,
    config: DaemonConfig = None,
    ca: Ca = None,
) -> None:
    """Print the changes of an instance as they are committed, until interrupted.

    If the daemon goes down, the command continues at the same place once the daemon is back, or with the next
    daemon in --url.
    """
    from penstock.client.daemons import Daemons

    address = _address(instance, url, config, ca)
    patterns = list(TablePatterns(",".join(tables or ())).include)
    body = {
        "subscriber": f"tail/{socket.gethostname()}-{os.getpid()}",
        "tables": patterns or None,
        "changes": _listed(changes),
        "where": where,
        "columns": _columns(columns, form),
        "format": "arrow" if form is Format.TABLE else form.value.replace("-", "_"),
        "shards": _shards(shard, shard_columns),
        "batch_rows": _BATCH_ROWS,
        "wait_seconds": _WAIT_SECONDS,
    }
    _note_unmatched(address, patterns)
    shown = _Shown(form, count)
    daemons = Daemons(address)
    try:
        _Following(daemons, body, first, until).run(shown)
    except KeyboardInterrupt:
        # Ctrl-C is the normal way to end the command, not an error.
        return
    except BrokenPipeError:
        # The reader has closed the pipe, so nothing may be flushed to it when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        daemons.close()


class _Following:
    """One run over the changes that continues across responses, daemons and lost connections."""

    def __init__(self, daemons: "Daemons", body: dict[str, Any], first: str, until: str | None) -> None:
        self._daemons = daemons
        self._body = {**body, "start": self._part(first)}
        self._body["until"] = None if until is None else self._part(until)
        self._current = 0
        self._retry = Retry("asking again", peers=len(daemons))
        self._has_answered = False

    def run(self, shown: "_Shown") -> None:
        """Print until the end, or until the limit is reached."""
        while True:
            try:
                if self._answer(shown):
                    return
            except TransientError as problem:
                self._switch_daemon(problem)

    def _answer(self, shown: "_Shown") -> bool:
        """Read one response; return True if it was the last."""
        from penstock.client.fetch import BatchFrame, EndFrame, PositionFrame

        answer = self._daemons.changes(self._current, self._body, _SILENCE_SECONDS)
        # Print complete transactions only. Changes are held back until the position after them arrives, so
        # that no change is printed twice.
        batches: list[BatchFrame] = []
        with closing(answer.frames()) as frames:
            for frame in frames:
                if isinstance(frame, BatchFrame):
                    batches.append(frame)
                elif isinstance(frame, PositionFrame):
                    self._retry.succeeded()
                    self._has_answered = True
                    if not shown.show(batches):
                        return True
                    batches = []
                    self._body["start"] = {"position": str(frame.position), "server_key": frame.server_key}
                elif isinstance(frame, EndFrame):
                    self._has_answered = True
                    if frame.why == "closing":
                        self._current = (self._current + 1) % len(self._daemons)
                        time.sleep(RECONNECT_PAUSE_SECONDS_FIRST)
                    return frame.why == "until"
        return False

    def _switch_daemon(self, problem: TransientError) -> None:
        """Switch to the next daemon. Raises `problem` once every daemon has been tried the maximum number of
        times.
        """
        self._retry.tries = RECONNECT_TRIES_MAX if self._has_answered else 0
        self._current = (self._current + 1) % len(self._daemons)
        self._retry.wait(problem, next=self._daemons.url(self._current))

    def _part(self, text: str) -> Any:
        """Return a start or an end in the form that the API expects. Raises OptionInvalid.

        For `latest`, return the current position: in a later request, `latest` would mean another position.
        """
        from penstock.client.daemons import Start

        start = Start.parse(text)
        if start.end == _LATEST:
            position = self._daemons.locate_start(start)
            return {"position": str(position.position), "server_key": position.server_key}
        if start.end is not None:
            return start.end
        bound = start.bound
        assert bound is not None, "a start has one field"
        if bound.position is not None:
            return {"position": str(bound.position)}
        return {"gtid_set": bound.gtid_set} if bound.gtid_set is not None else {"time": bound.time_us}


class _Shown:
    """Prints changes and counts lines."""

    def __init__(self, form: Format, count: int | None) -> None:
        from penstock.cli.shared.change_lines import ChangeWriter

        self._remaining = count
        self._has_statements = form in (Format.MAXWELL, Format.CANAL_FLAT)
        self._lines = ChangeWriter(sys.stdout) if form is Format.TABLE else None

    def show(self, batches: "list[BatchFrame]") -> bool:
        """Print the changes of complete transactions; return False once the limit is reached."""
        if self._lines is not None:
            self._show_lines(batches, self._lines)
        else:
            self._show_json(batches)
        sys.stdout.flush()
        return self._remaining is None or self._remaining > 0

    def _show_lines(self, batches: "list[BatchFrame]", writer: "ChangeWriter") -> None:
        from penstock.cli.shared.change_lines import lines_of

        lines: list[ChangeLine] = [
            line for batch in batches for line in lines_of(batch.to_arrow(), batch.key or ())
        ]
        # Each batch holds rows of one table, so sort the lines into commit order.
        lines.sort(key=lambda line: line.order)
        if self._remaining is not None:
            lines = lines[: self._remaining]
            self._remaining -= len(lines)
        writer.write(lines)

    def _show_json(self, batches: "list[BatchFrame]") -> None:
        for batch in batches:
            content: bytes | memoryview = batch.content
            if self._remaining is not None:
                lines = list(_lines(bytes(content)))[: self._remaining]
                self._remaining -= len(lines)
                content = b"".join(lines)
            if self._has_statements and _STATEMENT.search(content):
                content = b"".join(map(_hide_secrets, _lines(bytes(content))))
            sys.stdout.buffer.write(content)


def _lines(content: bytes) -> Iterator[bytes]:
    # A JSON line contains no line break except at its end.
    return iter(content.splitlines(keepends=True))


def _hide_secrets(line: bytes) -> bytes:
    """Return a message with '***' in place of the passwords in its statement. Messages about rows have no
    statement.
    """
    from penstock.schema.statements.secrets import without_secrets

    if not _STATEMENT.search(line):
        return line
    message = json.loads(line)
    # The line may also describe a row with a column `sql`, which may be NULL.
    statement = message.get("sql") or ""
    shown = without_secrets(statement)
    if shown == statement:
        return line
    return json.dumps(message | {"sql": shown}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


# --- Options --------------------------------------------------------------------------------


def _address(instance: str, url: str | None, config: Path | None, ca: Path | None) -> "DaemonAddress":
    from penstock.cli.shared.asked_daemon import AskedDaemon
    from penstock.source.daemon_address import DaemonAddress, is_daemon_url

    if not is_daemon_url(instance):
        return AskedDaemon.find(instance, url, config, ca).address
    if url is not None:
        raise OptionInvalid("the daemon is named twice", hint="Leave --url out, or name the instance alone")
    if ca is not None:
        raise OptionInvalid("--ca is for --url and --config", hint=f"Write {instance}?ssl_ca={ca}")
    return DaemonAddress.parse(instance)


def _note_unmatched(address: "DaemonAddress", patterns: Sequence[str]) -> None:
    """Report on standard error the patterns that match no table in the log yet, because they may be
    mistyped.
    """
    from penstock.cli.shared.asked_daemon import AskedDaemon
    from penstock.narrowed_patterns import nearest_table

    if not patterns:
        return
    try:
        with closing(AskedDaemon(address)) as daemon:
            tables = daemon.tables()
    except PenstockError:
        # Ignore the error: either the next request reports it, or another daemon answers that request.
        return
    for pattern in patterns if tables else ():
        selected = TablePatterns([pattern])
        if not any(selected.matches(table.database, table.table) for table in tables):
            hint = nearest_table(pattern, tables)
            typer.echo(f"no table that you may read matches {pattern} yet. {hint}", err=True)


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


def _columns(text: str | None, form: Format) -> list[str] | None:
    from penstock.source.reading import SYSTEM_COLUMNS

    if text is None:
        return None
    if form is not Format.TABLE:
        raise OptionInvalid(
            f"--columns is for --format table: a message of {form.value} shows whole rows",
            hint="Leave --columns out",
        )
    return [*(_listed(text) or ()), *SYSTEM_COLUMNS]


def _shards(text: str | None, columns: list[str] | None) -> dict[str, Any] | None:
    if text is None:
        if columns:
            raise OptionInvalid("--shard-columns is without --shard", hint="Add --shard 0/4")
        return None
    selection, slash, count = text.partition("/")
    numbers = [*selection.split(","), count]
    if not slash or not all(number.strip().isdecimal() for number in numbers):
        raise OptionInvalid(f"--shard {text!r} is no shard", hint="Write 0/4, or 0,2/4 for two of them")
    selected, total = [int(number) for number in selection.split(",")], int(count)
    if not all(number < total for number in selected):
        raise OptionInvalid(f"--shard {text}: shards are counted from 0", hint=f"Use 0 to {total - 1}")
    return {"count": total, "of": selected, "columns": dict(_table_columns(text) for text in columns or ())}


def _table_columns(text: str) -> tuple[str, list[str]]:
    table, equals, names = text.rpartition("=")
    columns = _listed(names)
    if not equals or not table.strip() or not columns:
        raise OptionInvalid(
            f"--shard-columns {text!r} names no columns of a table",
            hint="Write --shard-columns shop.orders=customer_id",
        )
    return table.strip(), columns
