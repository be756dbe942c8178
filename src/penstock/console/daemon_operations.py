# SPDX-License-Identifier: Apache-2.0
"""The operations of a daemon: the channel of its alerts, and definitions of tables in doubt."""

import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.responses import Response, StreamingResponse

from penstock.console.operation import Fields, Input, Operation, Sentence, say
from penstock.console.visit import Visit
from penstock.errors import OptionInvalid


def _test_alerts(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    answer = visit.fleet.change(fields["daemon"], "alerts/test", {"dry_run": dry_run})
    return [say("An alert and its end are sent to {channel}.", channel=answer["channel"])]


def _define(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    names = ("table", "position", "create_table")
    body = {**{name: fields[name] for name in names}, "dry_run": dry_run}
    call = f"instances/{quote(fields['instance'], safe='')}/definitions"
    answer = visit.fleet.change(fields["daemon"], call, body)
    return [
        say(
            "From {position} on {table} is read with these columns, up to the next DDL on it: {columns}",
            position=answer["position"],
            table=answer["table"],
            columns=_columns_text(answer["after"]),
        ),
        say("The log has no definition of it there.")
        if answer["before"] is None
        else say("The log has these columns there now: {columns}", columns=_columns_text(answer["before"])),
    ]


def _columns_text(columns: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        " ".join(filter(None, (each["name"], each["type"], each["charset"]))) for each in columns
    )


def _list_files(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    """Return the events of an export. Raises OptionInvalid if they need several files, because a download is
    one file.
    """
    query: dict[str, str | int | None] = {"from": fields["start"], "to": fields["end"], "dry_run": 1}
    files = visit.fleet.ask_instance(fields["daemon"], fields["instance"], "export", **query)["files"]
    if len(files) > 1:
        ranges = "; ".join(f"{file['from']} to {file['to']}" for file in files)
        raise OptionInvalid(f"the range has {len(files)} files: {ranges}", hint="Export one of these ranges")
    return [
        say(
            "{name} has the events from {start} to {end}: {size} bytes, for mysqlbinlog or mariadb-binlog.",
            name=file["name"],
            start=file["from"],
            end=file["to"],
            size=f"{file['bytes']:,}",
        )
        for file in files
    ]


def _export_file(visit: Visit, fields: Fields) -> Response:
    """Return a range of a log as a binlog file."""
    size, pieces = visit.fleet.log_file(fields["daemon"], fields["instance"], fields["start"], fields["end"])
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{fields['instance']}-{fields['start'] or 'log'}.binlog")
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    if size is not None:
        headers["Content-Length"] = str(size)
    return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)


OPERATIONS = (
    Operation(
        "/log/export",
        "Export as a binlog file",
        "Which events does the file have?",
        "export log",
        ("daemon", "instance"),
        _list_files,
        "/log",
        (
            Input("start", "From this position on", example="mysql-bin.000003:1542"),
            Input("end", "Up to this position", example="mysql-bin.000003:9000"),
        ),
        ("daemon", "instance"),
        is_harmless=True,
        respond=_export_file,
    ),
    Operation(
        "/alerts/test",
        "Test the alerts",
        "Who gets a test of the alerts?",
        "test alerts",
        ("daemon",),
        _test_alerts,
        "/alerts",
        is_harmless=True,
    ),
    Operation(
        "/definitions/set",
        "Set the definition",
        "How is this table read if its definition is set here?",
        "set definition",
        ("daemon", "instance", "table"),
        _define,
        "/definitions",
        (
            Input("position", "From this position on", is_needed=True, example="mysql-bin.000003:1542"),
            Input(
                "create_table",
                "Its CREATE TABLE at that position",
                kind="area",
                is_needed=True,
                example="CREATE TABLE orders (id BIGINT PRIMARY KEY, note VARCHAR(80)) CHARACTER SET utf8mb4",
            ),
        ),
        ("daemon", "instance", "table"),
        is_posted=True,
    ),
)
