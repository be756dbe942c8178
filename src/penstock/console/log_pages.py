# SPDX-License-Identifier: Apache-2.0
"""The pages about one log: its segments, one of its transactions, and the definitions of a table."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from penstock.console.change_files import export_changes
from penstock.console.changed_cells import changed_cells
from penstock.console.visit import Visit
from penstock.errors import PenstockError

# A GTID: with MySQL's UUID and perhaps a tag, or with MariaDB's domain and server.
_GTID = re.compile(r"[0-9A-Fa-f]{8}-[0-9A-Fa-f-]{27}:[\w:]+|\d+-\d+-\d+")
# The longest forecast. A disk that will be full later needs no action yet.
_FORECAST_SECONDS_MAX = 365 * 86_400.0
_ROWS_DEFAULT, _ROWS_MAX = 200, 5000


def explore_log(visit: Visit) -> Response:
    """Show what the log keeps, why, and when the disk will be full."""
    url, name = visit.query("daemon"), visit.query("instance")
    listed = visit.fleet.ask_instance(url, name, "segments")
    disk = visit.fleet.ask_instance(url, name, "disk")
    status = visit.fleet.ask_instance(url, name, "status")
    holds = visit.fleet.ask_instance(url, name, "holds")["holds"]
    return visit.render(
        "log.html",
        daemon=url,
        instance=name,
        segments=listed["segments"],
        count=listed["count"],
        totals={state: total for state, total in listed["totals"].items() if total["segments"]},
        retention=listed["retention"],
        earliest=status.get("earliest"),
        log_bytes=status.get("log_bytes"),
        rate=status.get("bytes_per_second"),
        disk=disk,
        full_in=full_in(disk, status.get("bytes_per_second")),
        holds=holds,
    )


def verify_log(visit: Visit) -> Response:
    """Show whether every byte of the log is intact."""
    visit.prove_admin()
    url, name = visit.query("daemon"), visit.query("instance")
    is_asked = bool(visit.query("run"))
    status = visit.fleet.ask_instance(url, name, "status")
    lines = visit.open_stream(partial(_verified, visit, url, name)) if is_asked else None
    return visit.stream(
        "log_verify.html",
        lines,
        daemon=url,
        instance=name,
        log_bytes=status.get("log_bytes"),
        is_asked=is_asked,
        lines=lines or (),
    )


def _verified(visit: Visit, url: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a verification, and its outcome. Raises the daemon's errors."""
    damaged = 0
    for line in visit.fleet.verify(url, name):
        damaged += line["kind"] == "finding" and not line["finding"]["harmless"]
        yield line
    yield {"kind": "damaged", "count": damaged} if damaged else {"kind": "sound"}


def full_in(disk: Mapping[str, int | None], rate: float | None) -> float | None:
    """Return the seconds until capture pauses for lack of space at the current rate, if nothing is trimmed.

    Return None if that is more than a year away.
    """
    free, reserved = disk["free_bytes"], disk["reserved_bytes"]
    if free is None or reserved is None or not rate or rate < 1.0:
        return None
    seconds = max(free - reserved, 0) / rate
    return seconds if seconds <= _FORECAST_SECONDS_MAX else None


def inspect_transaction(visit: Visit) -> Response:
    """Show what a transaction changed, and which readers have confirmed it."""
    choices, problems, url, name = visit.chosen_instance()
    location, limit = visit.query("place"), visit.query("limit")
    rows_max = min(int(limit), _ROWS_MAX) if limit.isdecimal() and int(limit) else _ROWS_DEFAULT
    answer, problem = None, None
    if url and name and location:
        field = "gtid" if _GTID.fullmatch(location) else "position"
        query: dict[str, str | int | None] = {field: location, "limit": rows_max}
        try:
            answer = visit.fleet.ask_instance(url, name, "transaction", **query)
        except PenstockError as refusal:
            # Show the form again, so that the user can correct the position.
            problem = refusal
    if visit.is_export and answer:
        parts = [_part_of(answer["transaction"], change) for change in answer["changes"]]
        if answer["more"]:
            more = f"the transaction has more than {rows_max} rows"
            parts.append({"kind": "problem", "detail": more, "hint": "Export it with a higher limit"})
        return export_changes("transaction", [*answer["statements"], *parts], visit.query("export"))
    return visit.render(
        "transaction.html",
        choices=choices,
        daemon=url,
        instance=name,
        place=location,
        limit=rows_max,
        problems=problems,
        problem=problem,
        answer=answer,
        changes=[{**part, "cells": changed_cells(part)} for part in answer["changes"]] if answer else [],
    )


def _part_of(transaction: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a change with the fields that it takes from its transaction."""
    return {name: transaction[name] for name in ("gtid", "time_us", "server_id", "thread_id")} | {**change}


@dataclass(frozen=True)
class ColumnChange:
    """A column in a table definition. `mark` is "", added, removed or changed. `before` is the column's
    previous definition.
    """

    mark: str
    name: str
    text: str
    before: str = ""


def compare_definitions(visit: Visit) -> Response:
    """Show how a table was defined over time, and which statements changed its definition."""
    choices, problems, url, name = visit.chosen_instance()
    table = visit.query("table")
    tables: list[str] = []
    versions: list[dict[str, Any]] = []
    problem = None
    if url and name:
        try:
            if table:
                query: dict[str, str | int | None] = {"table": table}
                versions = visit.fleet.ask_instance(url, name, "definitions", **query)["versions"]
            else:
                tables = visit.fleet.ask_instance(url, name, "definitions")["tables"]
        except PenstockError as refusal:
            problem = refusal
    return visit.render(
        "definitions.html",
        choices=choices,
        daemon=url,
        instance=name,
        table=table,
        tables=tables,
        problems=problems,
        problem=problem,
        versions=_with_differences(versions),
    )


def _with_differences(versions: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table definitions, newest first, each with its differences from the previous one."""
    shown = []
    earlier: dict[str, Any] | None = None
    for version in versions:
        shown.append({**version, "differences": _differences(earlier, version)})
        earlier = version
    shown.reverse()
    return shown


def _differences(earlier: Mapping[str, Any] | None, version: Mapping[str, Any]) -> list[ColumnChange]:
    texts = {column["name"]: _column_text(column) for column in version["columns"]}
    if earlier is None or earlier["dropped"]:
        return [ColumnChange("", name, text) for name, text in texts.items()]
    before = {column["name"]: _column_text(column) for column in earlier["columns"]}
    changes = [_column_change(name, text, before.get(name)) for name, text in texts.items()]
    return changes + [
        ColumnChange("removed", name, "", text) for name, text in before.items() if name not in texts
    ]


def _column_change(name: str, text: str, before: str | None) -> ColumnChange:
    if before is None:
        return ColumnChange("added", name, text)
    return ColumnChange("" if before == text else "changed", name, text, before)


def _column_text(column: Mapping[str, Any]) -> str:
    charset = f" {column['charset']}" if column["charset"] else ""
    return f"{column['type']}{charset}{'' if column['nullable'] else ' NOT NULL'}"


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/log": explore_log,
    "/log/verify": verify_log,
    "/transaction": inspect_transaction,
    "/definitions": compare_definitions,
}
