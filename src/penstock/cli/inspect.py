# SPDX-License-Identifier: Apache-2.0
"""`penstock inspect`: show the contents of a log."""

import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from penstock.cli.shared.progress import ReadingProgress
from penstock.cli.shared.rendering import Field, LineWriter, cell_text, write_json
from penstock.errors import OptionInvalid, PenstockError
from penstock.limits import OFFSET_MAX
from penstock.model import TableName, TablePatterns

if TYPE_CHECKING:
    import pyarrow.compute

    from penstock.source.reading import Batch, Selection
    from penstock.source.source import Source

# The default number of lines of table output. JSON output has no limit.
_LINES_DEFAULT = 1000
# Batches are small, so that the first lines appear immediately.
_BATCH_ROWS_MAX = 4096


class View(StrEnum):
    """What each line shows."""

    EVENTS = "events"
    TRANSACTIONS = "transactions"
    ROWS = "rows"


# The columns with statements, which may contain passwords.
_STATEMENTS = {View.EVENTS: "text", View.TRANSACTIONS: "statement"}


def run(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="FILE|mysql://HOST", help="Binlog files, a folder, a glob, or a server."),
    ],
    events: Annotated[
        bool, typer.Option("--events", help="Print a line for each event (the default).")
    ] = False,
    transactions: Annotated[
        bool, typer.Option("--transactions", help="Print a line for each transaction.")
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print a line for each decoded row.")] = False,
    tables: Annotated[
        str | None, typer.Option(help="Only these tables: patterns such as shop.orders,shop.* or /regex/.")
    ] = None,
    start: Annotated[
        str | None, typer.Option(help="Start at this position or time, or after this GTID set.")
    ] = None,
    end: Annotated[str | None, typer.Option(help="Stop at this position, GTID set or time.")] = None,
    schemas: Annotated[
        str | None,
        typer.Option(help="Table definitions (a .sql or JSON file) for logs without column names."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line instead of a table.")
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0, help=f"Maximum number of lines; 0 for all. Default for tables: {_LINES_DEFAULT}."
        ),
    ] = None,
    user: Annotated[str | None, typer.Option(help="The account on the server.")] = None,
    password_file: Annotated[
        str | None, typer.Option(help="A file with the password. PENSTOCK_PASSWORD also works.")
    ] = None,
) -> None:
    """Show events, transactions or rows of binlog files, or of a live server up to its current end."""
    from penstock.binlog import load_schemas, schemas_of_server
    from penstock.source.bounds import locate, parse_bound
    from penstock.source.reading import Selection
    from penstock.source.source import SourceOptions, open_source
    from penstock.source.spelling import spelling_of

    view = _view(events, transactions, rows)
    options = SourceOptions.parse(
        sources if len(sources) > 1 else sources[0], user=user, password_file=password_file
    )
    patterns = TablePatterns(tables)
    start_bound = parse_bound(start) if start is not None else None
    end_bound = parse_bound(end) if end is not None else None
    source = open_source(options)
    history = load_schemas(schemas, spelling_of(source)) if schemas is not None else None
    selection = Selection(patterns, bounds=locate(source, start_bound, end_bound))
    lines_max = (0 if json else _LINES_DEFAULT) if limit is None else limit
    show = _Shown(sys.stdout, view, json, lines_max)
    try:
        for group in _closed_together(
            _batches(source, view, selection, history or schemas_of_server(source))
        ):
            lines = [row for batch in group for row in _rows_of(batch, patterns, view)]
            if len(group) > 1:
                lines.sort(key=_commit_order)
            if not show.rows(lines):
                break
    finally:
        source.close()
    if show.was_cut and limit is None:
        typer.echo(f"The first {lines_max} lines are shown; --limit 0 shows all.", err=True)


def _view(events: bool, transactions: bool, rows: bool) -> View:
    requested = {View.EVENTS: events, View.TRANSACTIONS: transactions, View.ROWS: rows}
    chosen = [view for view, wanted in requested.items() if wanted]
    if len(chosen) > 1:
        raise OptionInvalid("one view at a time", hint="Give --events, --transactions or --rows")
    return chosen[0] if chosen else View.EVENTS


def _batches(source: "Source", view: View, selection: "Selection", schemas: Any) -> "Iterator[Batch]":
    """Read everything selected, and show the progress."""
    from penstock.source.reading import read_range

    ranges = source.split(selection.bounds.start, selection.bounds.end, range_bytes=OFFSET_MAX)
    sizes = {
        extent.file: extent.end for extent in source.extents(selection.bounds.start, selection.bounds.end)
    }
    emit = "typed" if view is View.ROWS else view.value
    bytes_before = 0
    with ReadingProgress(f"inspect {source.instance}", sum(sizes.values())) as progress:
        for byte_range in ranges:
            for batch in read_range(
                source, byte_range, selection, schemas, emit=emit, batch_rows_max=_BATCH_ROWS_MAX
            ):
                progress.reach(bytes_before + batch.position.offset)
                yield batch
            bytes_before += sizes[byte_range.file]


def _closed_together(batches: "Iterator[Batch]") -> "Iterator[list[Batch]]":
    """Group batches that were closed at the same moment. A group contains each table at most once."""
    group: list[Batch] = []
    try:
        for batch in batches:
            if group and (
                batch.position != group[0].position
                or any(
                    (batch.table, batch.schema_version) == (other.table, other.schema_version)
                    for other in group
                )
            ):
                yield group
                group = []
            group.append(batch)
    except PenstockError:
        # Yield the rows that were read before the error, and then raise it.
        yield group
        raise
    yield group


def _rows_of(batch: "Batch", patterns: TablePatterns, view: View) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _of_tables(batch.to_arrow(), patterns, view).to_pylist()
    column = _STATEMENTS.get(view)
    if column is not None:
        from penstock.schema.statements.secrets import without_secrets

        for row in rows:
            if row[column]:
                row[column] = without_secrets(row[column])
    return rows


def _commit_order(row: dict[str, Any]) -> tuple[int, int]:
    # Both images of an update have the same number, and the stable sort keeps their order.
    return row["_commit_version"], row["_metadata"]["row"]


def _of_tables(record: "pyarrow.RecordBatch", patterns: TablePatterns, view: View) -> "pyarrow.RecordBatch":
    """Keep the lines that concern selected tables. Rows are already selected during decoding."""
    import pyarrow.compute

    if view is View.ROWS or not (patterns.include or patterns.exclude):
        return record
    if view is View.TRANSACTIONS:
        names = record["tables"]
        selected = {text: _any_matches(text, patterns) for text in names.unique().to_pylist()}
        matching = [text for text, keep in selected.items() if keep]
        return record.filter(pyarrow.compute.is_in(names, pyarrow.array(matching, pyarrow.string())))
    pairs = pyarrow.compute.binary_join_element_wise(record["database"], record["table"], "\0")
    pair_texts = [text for text in pairs.unique().to_pylist() if text is not None]
    matching = [text for text in pair_texts if patterns.matches(*text.split("\0"))]
    return record.filter(pyarrow.compute.is_in(pairs, pyarrow.array(matching, pyarrow.string())))


def _any_matches(tables: str, patterns: TablePatterns) -> bool:
    names = [text.split(".", 1) for text in tables.split(",") if "." in text]
    return any(patterns.matches(database, table) for database, table in names)


class _Shown:
    """Prints rows and counts lines."""

    def __init__(self, out: TextIO, view: View, as_json: bool, lines_max: int) -> None:
        self._out = out
        self._as_json = as_json
        self._remaining = lines_max or None
        self._cells = _CELLS[view]
        self._lines = LineWriter(out, _FIELDS[view])
        self.was_cut = False

    def rows(self, rows: list[dict[str, Any]]) -> bool:
        """Print rows; return False once the limit is exceeded."""
        if self._remaining is not None and len(rows) > self._remaining:
            self.was_cut = True
            rows = rows[: self._remaining]
        if self._as_json:
            write_json(self._out, rows)
        else:
            for row in rows:
                self._lines.write(self._cells(row))
        if self._remaining is not None:
            self._remaining -= len(rows)
        return not self.was_cut


def _position_text(row: dict[str, Any]) -> str:
    return f"{row['file']}:{row['offset']}"


def _event_cells(row: dict[str, Any]) -> list[Any]:
    table = f"{row['database']}.{row['table']}" if row["table"] else row["database"]
    parts = [table, f"{row['rows']} rows" if row["rows"] is not None else None, row["text"]]
    return [
        _position_text(row),
        row["timestamp"],
        row["type"],
        row["server_id"],
        row["size"],
        " ".join(cell_text(part) for part in parts if part),
    ]


def _transaction_cells(row: dict[str, Any]) -> list[Any]:
    return [
        _position_text(row),
        row["commit_timestamp"],
        row["gtid"] or "-",
        row["end_offset"] - row["offset"],
        row["events"],
        row["rows"],
        row["tables"] or row["statement"] or "",
    ]


def _row_cells(row: dict[str, Any]) -> list[Any]:
    from penstock.source.reading import SYSTEM_COLUMNS

    metadata = row["_metadata"]
    table = TableName(metadata["database"], metadata["table"])
    values = ", ".join(
        f"{name}={'NULL' if value is None else cell_text(value)}"
        for name, value in row.items()
        if name not in SYSTEM_COLUMNS
    )
    return [_position_text(metadata), row["_commit_timestamp"], row["_change_type"], table, values]


_POSITION = Field("position", 27)
_TIME = Field("time", 27)
_FIELDS: dict[View, list[Field]] = {
    View.EVENTS: [
        _POSITION,
        _TIME,
        Field("type", 18),
        Field("server", 10, right=True),
        Field("bytes", 9, right=True),
        Field("about", 0),
    ],
    View.TRANSACTIONS: [
        _POSITION,
        _TIME,
        Field("gtid", 44),
        Field("bytes", 10, right=True),
        Field("events", 7, right=True),
        Field("rows", 8, right=True),
        Field("tables or statement", 0),
    ],
    View.ROWS: [_POSITION, _TIME, Field("change", 16), Field("table", 20), Field("values", 0)],
}
_CELLS: dict[View, Callable[[dict[str, Any]], list[Any]]] = {
    View.EVENTS: _event_cells,
    View.TRANSACTIONS: _transaction_cells,
    View.ROWS: _row_cells,
}
