# SPDX-License-Identifier: Apache-2.0
"""The operations of a daemon: the channel of its alerts, and definitions of tables in doubt."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from penstock.console.operation import Fields, Input, Operation, Sentence, say
from penstock.console.visit import Visit


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


OPERATIONS = (
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
