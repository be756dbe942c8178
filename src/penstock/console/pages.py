# SPDX-License-Identifier: Apache-2.0
"""The pages. Each page answers one question of an operator, from the answers of daemons and stores."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from penstock.console import (
    as_of_pages,
    comparison_pages,
    dead_letter_pages,
    event_pages,
    fleet_pages,
    log_pages,
    operations,
    server_pages,
    subscription_pages,
)
from penstock.console.change_files import export_changes
from penstock.console.changed_cells import changed_cells
from penstock.console.charts import Chart, draw_chart
from penstock.console.log_pages import full_in
from penstock.console.pipeline_states import PipelineRow
from penstock.console.ruler import Mark, draw_phases, draw_ruler
from penstock.console.tail import ROWS_MAX, tail_changes
from penstock.console.visit import Visit
from penstock.errors import PenstockError, SourceMissing
from penstock.pipeline.table_states import STATES
from penstock.serve.masking import HIDDEN_TEXT

# The overview shows the pipelines that need an operator most urgently, and links to the others.
_PIPELINES_SHOWN_MAX = 50
# The maximum number of pipelines of a page. More rows would take too long to render, send and draw every 5
# seconds.
_PIPELINES_PAGE_MAX = 200
# The number of changes of a row on one page. The newest changes come first.
_CHANGES_DEFAULT = 100
# The metrics of an instance that are drawn as charts, each with its title and the unit of its values.
_CHARTS = {
    "lag_seconds": ("Lag", "span"),
    "rows_per_second": ("Rows/s", "number"),
    "bytes_per_second": ("Received per second", "size"),
    "log_bytes": ("Size of the log", "size"),
}
_CHART_POINTS = 120
_HOURS = ("1", "6", "24")
_SPARK_SECONDS, _SPARK_POINTS = 3600, 48
# The states by urgency: entries that need an operator come first.
_URGENCY = ("lost", "stopped", "failed", "behind", "held", "retrying", "waiting", "connecting", "opening")


def overview(visit: Visit) -> Response:
    """Show which captures and pipelines run, and how far each is behind."""
    statuses, alerts = visit.fleet.ask_all("status"), visit.fleet.ask_all("alerts")
    charts = visit.fleet.ask_all(f"charts?span={_SPARK_SECONDS}&points={_SPARK_POINTS}").values
    instances = [
        {"daemon": url, **status, "sparks": _sparks(charts.get(url), status["instance"])}
        for url, answer in statuses.values.items()
        for status in answer["instances"]
    ]
    instances.sort(key=lambda instance: (_urgency(instance["state"]), instance["instance"]))
    rows, store_problems = _pipeline_rows(visit) if visit.sees_pipelines else ([], {})
    return visit.render(
        "overview.html",
        instances=instances,
        pipelines=rows if visit.is_export else rows[:_PIPELINES_SHOWN_MAX],
        pipeline_count=len(rows),
        alerts=sum(len(answer["alerts"]) for answer in alerts.values.values()),
        daemons=len(visit.fleet.urls),
        problems=statuses.problems | store_problems,
    )


def _sparks(answer: dict[str, Any] | None, instance: str) -> dict[str, Chart]:
    """Return small charts by series; none for a daemon that keeps no samples."""
    if answer is None or instance not in answer["instances"]:
        return {}
    series = answer["instances"][instance].items()
    return {
        kind: draw_chart(values, answer["seconds"], answer["until_us"], is_small=True)
        for kind, values in series
    }


def _charts(visit: Visit, url: str, name: str, seconds: int) -> list[tuple[str, str, Chart]]:
    """Return the title, unit and chart of each series; nothing for a daemon that keeps no samples."""
    try:
        answer = visit.fleet.ask_instance(url, name, "charts", span=seconds, points=_CHART_POINTS)
    except PenstockError:
        return []
    return [
        (
            title,
            unit,
            draw_chart(
                answer["series"][series], answer["seconds"], answer["until_us"], is_bytes=unit == "size"
            ),
        )
        for series, (title, unit) in _CHARTS.items()
    ]


def instance(visit: Visit) -> Response:
    """Show the position of each reader of a log, and what the log still contains."""
    url, name = visit.query("daemon"), visit.query("instance")
    status = visit.fleet.ask_instance(url, name, "status")
    holds: list[dict[str, Any]] = []
    disk: dict[str, int | None] = {"free_bytes": None, "reserved_bytes": None}
    problem = None
    try:
        disk = visit.fleet.ask_instance(url, name, "disk")
        holds = visit.fleet.ask_instance(url, name, "holds")["holds"]
    except PenstockError as refusal:
        # Show the page even if the log is not open, because the status contains most of the information.
        problem = refusal
    hours = visit.query("hours")
    span = int(hours) if hours in _HOURS else 1
    return visit.render(
        "instance.html",
        charts=_charts(visit, url, name, span * 3600),
        hours=span,
        daemon=url,
        status=status,
        holds=holds,
        problem=problem,
        free=disk["free_bytes"],
        full_in=full_in(disk, status.get("bytes_per_second")),
        ruler=draw_ruler(_marks(status, holds)),
    )


def _marks(status: dict[str, Any], holds: list[dict[str, Any]]) -> list[Mark]:
    """Return the marks on an instance's ruler. Data that the server has but the capture has not received is
    on the right.
    """
    unreceived = status.get("lag_bytes") or 0
    # Leave out the server's mark until the end of the server's log is measured.
    marks = [] if status.get("lag_bytes") is None else [Mark("server", "", "", 0)]
    if status["position"] is not None:
        marks.append(Mark("received", "", status["position"], unreceived))
    if status.get("earliest") is not None and status.get("log_bytes") is not None:
        marks.append(Mark("earliest", "", status["earliest"], unreceived + status["log_bytes"]))
    marks += [
        Mark("reader", hold["reader"], hold["position"], unreceived + hold["behind_bytes"]) for hold in holds
    ]
    return marks


def hold(visit: Visit) -> Response:
    """Show what happens if this hold is removed."""
    url, name, reader = visit.query("daemon"), visit.query("instance"), visit.query("reader")
    visit.prove_admin()
    holds = visit.fleet.ask_instance(url, name, "holds")["holds"]
    chosen = [known for known in holds if known["reader"] == reader]
    return visit.render("hold.html", daemon=url, instance=name, reader=reader, holds=chosen)


def resume_capture(visit: Visit) -> Response:
    """Show what happens if this capture is started again."""
    url, name = visit.query("daemon"), visit.query("instance")
    visit.prove_admin()
    return visit.render("resume.html", daemon=url, status=visit.fleet.ask_instance(url, name, "status"))


def pipelines(visit: Visit) -> Response:
    """Show which pipelines run, how far each target is behind, and what was rejected."""
    visit.prove_reads_pipelines()
    rows, problems = _pipeline_rows(visit)
    find = visit.query("find")
    selected = [row for row in rows if any(find in text for text in (row.name, row.sink, row.state))]
    return visit.render(
        "pipelines.html",
        pipelines=selected if visit.is_export else selected[:_PIPELINES_PAGE_MAX],
        count=len(selected),
        find=find,
        problems=visit.silence | problems,
        stores=visit.states.names,
    )


def _pipeline_rows(visit: Visit) -> tuple[list[PipelineRow], dict[str, PenstockError]]:
    """Return the pipelines, the most urgent first, and the errors of stores that do not answer."""
    rows, problems = visit.states.rows(hides_texts=bool(visit.masking))
    rows.sort(key=lambda row: (_urgency(row.state), row.name, row.sink))
    return rows, problems


def pause(visit: Visit) -> Response:
    """Show what happens if this pipeline is paused or resumed."""
    visit.prove_sees_pipelines()
    store, name, _ = visit.pipeline_query()
    try:
        rows = visit.states.rows_of(store, name, hides_texts=bool(visit.masking))
    except SourceMissing:
        rows = []
    return visit.render("pause.html", rows=rows, name=name, store=store)


def tables(visit: Visit) -> Response:
    """Show which tables are loading, streaming or stopped, and what takes the time."""
    visit.prove_reads_pipelines()
    store, name, sink = visit.pipeline_query()
    rows = visit.states.tables(store, name, sink)
    rows.sort(key=lambda row: (STATES.index(row.state), row.source, row.table))
    if visit.masking:
        rows = [replace(row, why=HIDDEN_TEXT if row.why else "") for row in rows]
    batch = visit.states.last_batch(store, name, sink)
    phases = draw_phases(batch.get("phases", {}))
    parts = visit.states.rows_of(store, name, hides_texts=bool(visit.masking))
    return visit.render(
        "tables.html",
        problems=visit.silence,
        rows=rows,
        pipeline=next((part for part in parts if part.sink == sink), None),
        batch=batch,
        phases=phases,
        store=store,
        name=name,
        sink=sink,
    )


def alerts(visit: Visit) -> Response:
    """Show the current alerts."""
    answers = visit.fleet.ask_all("alerts")
    firing = [
        {"daemon": url, **alert} for url, answer in answers.values.items() for alert in answer["alerts"]
    ]
    firing.sort(key=lambda alert: alert["since_us"])
    silent = [url for url, answer in answers.values.items() if answer["channel"] is None]
    sending = [url for url in answers.values if url not in silent]
    return visit.render(
        "alerts.html", alerts=firing, silent=silent, sending=sending, problems=answers.problems
    )


def tail(visit: Visit) -> Response:
    """Show changes as they arrive."""
    choices, problems, url, name = visit.chosen_instance()
    table, where, change = visit.query("tables"), visit.query("where"), visit.query("change")
    wanted: dict[str, Any] = {"tables": table.split() or None, "where": where or None}
    wanted["changes"] = [change] if change else None
    is_asked = bool(url and visit.query("follow"))
    follow = partial(tail_changes, visit.fleet, url, name, wanted)
    stream = visit.open_stream(follow) if is_asked else None
    return visit.stream(
        "tail.html",
        stream,
        choices=choices,
        daemon=url,
        instance=name,
        tables=table,
        where=where,
        change=change,
        is_asked=is_asked,
        problems=problems,
        rows_max=ROWS_MAX,
        changes=map(_with_cells, stream or ()),
    )


def _with_cells(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "cells": changed_cells(part)} if part["kind"] in ("row", "change") else part


def history(visit: Visit) -> Response:
    """Show what happened to a row, and which readers have confirmed it."""
    choices, problems, url, name = visit.chosen_instance()
    table, key = visit.query("table"), visit.query("key")
    limit = visit.query("limit")
    row = {
        "table": table,
        "key": key.splitlines() or [key],
        "columns": visit.query("columns").split(),
        "limit": int(limit) if limit.isdecimal() and int(limit) else _CHANGES_DEFAULT,
    }
    is_asked = bool(table and key and url)
    stream = visit.open_stream(partial(visit.fleet.history, url, name, row)) if is_asked else None
    if visit.is_export and stream is not None:
        return export_changes("history", _changes(stream), visit.query("export"), stream)
    return visit.stream(
        "history.html",
        stream,
        choices=choices,
        daemon=url,
        instance=name,
        table=table,
        key=key,
        columns=visit.query("columns"),
        limit=row["limit"],
        is_asked=is_asked,
        problems=problems,
        changes=map(_with_cells, _changes(stream or (), with_progress=True)),
    )


def _changes(parts: Iterable[dict[str, Any]], *, with_progress: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the parts of a history that a file contains. Only the page shows the progress of the search
    too.
    """
    readers = 0
    for part in parts:
        if part["kind"] == "readers":
            readers = len(part["readers"])
        elif part["kind"] == "change":
            yield {**part, "readers": readers}
        elif with_progress or part["kind"] != "progress":
            yield part


def _urgency(state: str) -> int:
    return _URGENCY.index(state) if state in _URGENCY else len(_URGENCY)


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/": overview,
    "/instance": instance,
    "/instance/resume": resume_capture,
    "/hold": hold,
    "/pipelines": pipelines,
    "/pipelines/pause": pause,
    "/alerts": alerts,
    "/history": history,
    "/tail": tail,
    "/tables": tables,
    **dead_letter_pages.PAGES,
    **comparison_pages.PAGES,
    **log_pages.PAGES,
    **server_pages.PAGES,
    **subscription_pages.PAGES,
    **event_pages.PAGES,
    **as_of_pages.PAGES,
    **fleet_pages.PAGES,
    **operations.PAGES,
}
FILES: dict[str, Callable[[Visit], Response]] = as_of_pages.FILES | comparison_pages.FILES
