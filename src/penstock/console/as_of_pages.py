# SPDX-License-Identifier: Apache-2.0
"""The time machine: a table's rows as of a point in time, and their export."""

import re
from collections.abc import Callable
from typing import Any

from starlette.responses import Response, StreamingResponse

from penstock.console.visit import Visit
from penstock.errors import OptionInvalid, PenstockError
from penstock.model import TableName
from penstock.source.table_export import FORMATS

_ROWS_DEFAULT, _ROWS_MAX = 200, 5000


def show_rows(visit: Visit) -> Response:
    """Show the rows of a table at the chosen moment, according to the changes in the log."""
    choices, problems, url, name = visit.chosen_instance()
    table, moment = visit.query("table"), visit.query("at")
    limit = visit.query("limit")
    rows = min(int(limit), _ROWS_MAX) if limit.isdecimal() and int(limit) else _ROWS_DEFAULT
    answer: dict[str, Any] | None = None
    problem = None
    if table and moment and url:
        try:
            answer = visit.fleet.as_of(url, name, table, moment, rows)
        except PenstockError as refusal:
            # Keep the form, so that the table and the moment can be corrected.
            problem = refusal
    return visit.render(
        "as_of.html",
        choices=choices,
        daemon=url,
        instance=name,
        table=table,
        at=moment,
        limit=rows,
        formats=tuple(FORMATS),
        answer=answer,
        problem=problem,
        problems=problems,
    )


def export_rows(visit: Visit) -> Response:
    """Return a file of the rows."""
    _, _, url, name = visit.chosen_instance()
    table, moment, file_format = visit.query("table"), visit.query("at"), visit.query("format")
    if file_format not in FORMATS:
        raise OptionInvalid(f"there is no format {file_format[:64]!r}", hint=f"Use {', '.join(FORMATS)}")
    return StreamingResponse(
        visit.fleet.as_of_file(url, name, table, moment, file_format),
        media_type=FORMATS[file_format],
        headers={"Content-Disposition": f'attachment; filename="{_file_name(table)}.{file_format}"'},
    )


def _file_name(table: str) -> str:
    """Return a name that is safe in a header and on every disk."""
    name = TableName.parse(table)
    return re.sub(r"[^A-Za-z0-9._-]", "_", f"{name.database}.{name.table}")


PAGES: dict[str, Callable[[Visit], Response]] = {"/as-of": show_rows}
FILES: dict[str, Callable[[Visit], Response]] = {"/as-of/export": export_rows}
