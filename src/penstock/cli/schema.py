# SPDX-License-Identifier: Apache-2.0
"""`penstock schema`: show or set the definition of a table at a position of a log."""

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.shared.rendering import Field, LineWriter, write_json
from penstock.errors import OptionInvalid, PositionInvalid, SchemaUnknown
from penstock.model import Position, TableName, TableSchema

if TYPE_CHECKING:
    from penstock.source.source import Source, SourceOptions

HELP = "Show and set the table definitions that a log keeps."

_FIELDS = [Field("column", 32), Field("type", 40), Field("charset", 10), Field("null", 4), Field("key", 3)]


def show(
    table: Annotated[str, typer.Argument(help="The table: shop.orders.")],
    at: Annotated[
        str | None,
        typer.Option(help="A position, mysql-bin.000003:1542. Default: the current end of the log."),
    ] = None,
    log: Annotated[str | None, typer.Option(help="The log's folder or URL.")] = None,
    url: Annotated[
        str | None, typer.Option(help="A daemon's instance: penstock://host:7070/instance.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="A file with the daemon's token. PENSTOCK_TOKEN also works.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Show a table's definition at a position of a log."""
    from penstock.source.source import open_source

    with closing(open_source(_options(log, url, token_file))) as source:
        position = Position.parse(at) if at is not None else source.head()
        schema = _in_force(source, TableName.parse(table), position)
    if json:
        write_json(sys.stdout, [_as_json(schema, position)])
    else:
        _show(schema)


def set_by_hand(
    table: Annotated[str, typer.Argument(help="The table: shop.orders.")],
    at: Annotated[
        str, typer.Option(help="The position from which the definition applies, as shown by the status.")
    ],
    ddl: Annotated[
        Path,
        typer.Option(help="A .sql file with the table's CREATE TABLE at that position, or its JSON form."),
    ],
    log: Annotated[str | None, typer.Option(help="The log's folder. Stop its daemon first.")] = None,
    url: Annotated[
        str | None, typer.Option(help="A daemon's instance: penstock://host:7070/instance.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="A file with the daemon's token. PENSTOCK_TOKEN also works.")
    ] = None,
) -> None:
    """Set the definition of a table in doubt. It applies until the next DDL on the table."""
    from penstock.source.daemon import DaemonSource
    from penstock.source.source import open_source

    name, position = TableName.parse(table), Position.parse(at)
    with closing(open_source(_options(log, url, token_file))) as source:
        history = source.schema_history(position)
        assert history is not None, "a kept log answers or raises"
        definition = history.define(name, ddl).to_json()
        if isinstance(source, DaemonSource):
            source.give_definition(name, position, definition)
        else:
            _set_in_folder(Path(str(log)), position, definition)
    typer.echo(f"set: {name} is read with this definition from {position} on")


def _set_in_folder(folder: Path, position: Position, definition: dict[str, Any]) -> None:
    from penstock.cli.shared.log_folder import LogFolder
    from penstock.logstore.schemas import SchemaLog, definition_line
    from penstock.schema.history import SchemaHistory

    with LogFolder(folder).open_for_writing() as log:
        if log.visible is None or position > log.visible:
            raise PositionInvalid(f"the log ends at {log.visible}", position=str(position))
        schema_log = SchemaLog(log.folder, SchemaHistory.from_json, log.disk)
        schema_log.settle(position, [definition_line(definition)])
        schema_log.close()


def _options(log: str | None, url: str | None, token_file: str | None) -> "SourceOptions":
    """Return the options of the selected log. Raises OptionInvalid."""
    from penstock.source.source import SourceOptions

    if (log is None) == (url is None):
        raise OptionInvalid(
            "one log is needed", hint="Give --log /var/lib/penstock/shop, or --url penstock://host/shop"
        )
    options = SourceOptions.parse(log if log is not None else str(url), token_file=token_file)
    if not options.is_kept:
        raise OptionInvalid(
            f"{log or url} is no log that Penstock keeps", hint="A log's folder has epochs.json"
        )
    return options


def _in_force(source: "Source", name: TableName, position: Position) -> TableSchema:
    """Return the definition in force at a position. Raises SchemaUnknown."""
    history = source.schema_history(position, name)
    schema = history.schema(name.database, name.table) if history is not None else None
    doubt = history.doubt(name) if history is not None else None
    if doubt is not None:
        raise SchemaUnknown(
            f"the definition of {name} is in doubt since {doubt.since}: {doubt.refusal or doubt.reason}",
            position=str(position),
            hint=f"Give it by hand: penstock schema set {name} {source.options.log_option}"
            f" --at {doubt.since or position} --ddl FILE",
        )
    if schema is None:
        raise SchemaUnknown(
            f"there was no table {name}",
            position=str(position),
            hint="See the statements before: penstock inspect LOG --end POSITION",
        )
    return schema


def _as_json(schema: TableSchema, position: Position) -> dict[str, object]:
    return {
        "database": schema.database,
        "table": schema.table,
        "position": str(position),
        "version": schema.version,
        "columns": [
            {
                "name": column.name,
                "type": column.type_text,
                "charset": column.charset,
                "nullable": column.nullable,
            }
            for column in schema.columns
        ],
        "primary_key": list(schema.primary_key),
    }


def _show(schema: TableSchema) -> None:
    lines = LineWriter(sys.stdout, _FIELDS)
    for column in schema.columns:
        key = schema.primary_key.index(column.name) + 1 if column.name in schema.primary_key else None
        lines.write(
            [column.name, column.type_text, column.charset or "", "yes" if column.nullable else "no", key]
        )


VERBS = {"show": show, "set": set_by_hand}
