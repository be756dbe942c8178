# SPDX-License-Identifier: Apache-2.0
"""The pages. Each answers one question of an operator, from the daemons' and the stores' own answers."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.responses import Response

from penstock.console.ruler import Mark, draw_phases, draw_ruler
from penstock.console.tail import ROWS_MAX, tail_changes
from penstock.console.visit import Visit
from penstock.errors import PenstockError

# The overview shows the pipelines that need an operator most, and links to the others.
_PIPELINES_SHOWN_MAX = 50
# Changes of a row on one page. The newest come first.
_CHANGES_DEFAULT = 100
# What needs an operator comes first.
_TABLE_URGENCY = ("stopped", "loading", "asked", "gone", "idle", "streaming")
_URGENCY = ("stopped", "failed", "behind", "held", "retrying", "waiting", "connecting", "opening")


def overview(visit: Visit) -> Response:
    """Which captures and pipelines run, and how far is each behind?"""
    statuses, alerts = visit.fleet.ask_all("status"), visit.fleet.ask_all("alerts")
    instances = [
        {"daemon": url, **status} for url, answer in statuses.values.items() for status in answer["instances"]
    ]
    instances.sort(key=lambda instance: (_urgency(instance["state"]), instance["instance"]))
    rows, store_problems = visit.states.rows() if visit.is_admin else ([], {})
    rows.sort(key=lambda row: (_urgency(str(row.summary["state"])), row.name, row.sink))
    return visit.render(
        "overview.html",
        instances=instances,
        pipelines=rows[:_PIPELINES_SHOWN_MAX],
        pipeline_count=len(rows),
        alerts=sum(len(answer["alerts"]) for answer in alerts.values.values()),
        daemons=len(visit.fleet.urls),
        problems=statuses.problems | store_problems,
    )


def instance(visit: Visit) -> Response:
    """Where is each reader of this log, and what does the log still have?"""
    url, name = visit.query("daemon"), visit.query("instance")
    status = visit.fleet.ask_instance(url, name, "status")
    holds: list[dict[str, Any]] = []
    extents: list[dict[str, Any]] = []
    disk: dict[str, int | None] = {"free_bytes": None, "reserved_bytes": None}
    problem = None
    try:
        disk = visit.fleet.ask_instance(url, name, "disk")
        holds = visit.fleet.ask_instance(url, name, "holds")["holds"]
        extents = visit.fleet.ask_instance(url, name, "extents")["extents"]
    except PenstockError as refusal:
        # The status says most of it, also of a log that is not open.
        problem = refusal
    return visit.render(
        "instance.html",
        daemon=url,
        status=status,
        holds=holds,
        extents=extents,
        problem=problem,
        free=disk["free_bytes"],
        full_in=_full_in(disk, status.get("bytes_per_second")),
        ruler=draw_ruler(_marks(status, holds)),
    )


def _full_in(disk: dict[str, int | None], rate: float | None) -> float | None:
    """Return the seconds until capture pauses for lack of space at the current rate, without retention."""
    free, reserved = disk["free_bytes"], disk["reserved_bytes"]
    if free is None or reserved is None or not rate or rate < 1.0:
        return None
    return max(free - reserved, 0) / rate


def _marks(status: dict[str, Any], holds: list[dict[str, Any]]) -> list[Mark]:
    """Return the places on an instance's ruler. What the server has and is not received lies on the right."""
    unreceived = status.get("lag_bytes") or 0
    # Before it is measured, nobody knows where the server's log ends.
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
    """What happens if this hold is removed?"""
    url, name, reader = visit.query("daemon"), visit.query("instance"), visit.query("reader")
    visit.prove_admin()
    holds = visit.fleet.ask_instance(url, name, "holds")["holds"]
    chosen = [known for known in holds if known["reader"] == reader]
    return visit.render("hold.html", daemon=url, instance=name, reader=reader, holds=chosen)


def pipelines(visit: Visit) -> Response:
    """Which pipelines run, how far is each target behind, and what was rejected?"""
    visit.prove_admin()
    rows, problems = visit.states.rows()
    rows.sort(key=lambda row: (_urgency(str(row.summary["state"])), row.name, row.sink))
    return visit.render("pipelines.html", pipelines=rows, problems=problems, stores=visit.states.names)


def pause(visit: Visit) -> Response:
    """What happens if this pipeline is paused or resumed?"""
    visit.prove_admin()
    rows, _ = visit.states.rows()
    chosen = [
        row for row in rows if (str(row.store), row.name) == (visit.query("store"), visit.query("name"))
    ]
    return visit.render("pause.html", rows=chosen, name=visit.query("name"), store=visit.query("store"))


def tables(visit: Visit) -> Response:
    """Which tables are loading, streaming or stopped, and what takes the time?"""
    visit.prove_admin()
    store, name, sink = _pipeline_of(visit)
    rows = visit.states.tables(store, name, sink)
    rows.sort(key=lambda row: (_TABLE_URGENCY.index(row.state), row.source, row.table))
    batch = visit.states.last_batch(store, name, sink)
    phases = draw_phases(batch.get("phases", {}))
    return visit.render(
        "tables.html", rows=rows, batch=batch, phases=phases, store=store, name=name, sink=sink
    )


def resnapshot(visit: Visit) -> Response:
    """What happens if this table is read again?"""
    visit.prove_admin()
    store, name, sink = _pipeline_of(visit)
    source, table = visit.query("source"), visit.query("table")
    rows = [
        row for row in visit.states.tables(store, name, sink) if (row.source, row.table) == (source, table)
    ]
    return visit.render("resnapshot.html", rows=rows, store=store, name=name, sink=sink, table=table)


def _pipeline_of(visit: Visit) -> tuple[int, str, str]:
    store = visit.query("store")
    return int(store) if store.isdecimal() else -1, visit.query("name"), visit.query("sink")


def subscriptions(visit: Visit) -> Response:
    """Which member has which shard, and how far is each shard behind?"""
    answers = visit.fleet.ask_all("subscriptions")
    shown: dict[tuple[str, str], dict[str, Any]] = {}
    for url, answer in answers.values.items():
        for subscription in answer["subscriptions"]:
            # Daemons that share a coordination store all name it.
            key = subscription["instance"], subscription["subscription"]
            shown.setdefault(key, {"daemon": url, **subscription})
    known = any(answer["coordination"] for answer in answers.values.values())
    return visit.render(
        "subscriptions.html",
        subscriptions=[shown[key] for key in sorted(shown)],
        problems=answers.problems,
        has_coordination=known,
    )


def alerts(visit: Visit) -> Response:
    """What is wrong now?"""
    answers = visit.fleet.ask_all("alerts")
    firing = [
        {"daemon": url, **alert} for url, answer in answers.values.items() for alert in answer["alerts"]
    ]
    firing.sort(key=lambda alert: alert["since_us"])
    silent = [url for url, answer in answers.values.items() if answer["channel"] is None]
    return visit.render("alerts.html", alerts=firing, silent=silent, problems=answers.problems)


def tail(visit: Visit) -> Response:
    """What changes right now?"""
    choices, problems, url, name = _chosen_instance(visit)
    table, where, change = visit.query("tables"), visit.query("where"), visit.query("change")
    wanted: dict[str, Any] = {"tables": table.split() or None, "where": where or None}
    wanted["changes"] = [change] if change else None
    is_asked = bool(url and visit.query("follow"))
    follow = partial(tail_changes, visit.fleet, url, name, wanted)
    return visit.stream(
        "tail.html",
        choices=choices,
        daemon=url,
        instance=name,
        tables=table,
        where=where,
        change=change,
        is_asked=is_asked,
        problems=problems,
        rows_max=ROWS_MAX,
        changes=map(_with_cells, visit.streams.limited(follow)) if is_asked else iter(()),
    )


def _with_cells(part: dict[str, Any]) -> dict[str, Any]:
    return {**part, "cells": _cells(part)} if part["kind"] == "row" else part


def _chosen_instance(visit: Visit) -> tuple[list[tuple[str, str]], dict[str, PenstockError], str, str]:
    """Return the instances by daemon, daemons that do not answer, and the daemon and instance of a form."""
    statuses = visit.fleet.ask_all("status")
    choices = [
        (url, status["instance"]) for url, answer in statuses.values.items() for status in answer["instances"]
    ]
    url, name = visit.query("daemon"), visit.query("instance")
    if not (url and name) and len(choices) == 1:
        url, name = choices[0]
    return choices, statuses.problems, url, name


def history(visit: Visit) -> Response:
    """What happened to this row, and who has confirmed it?"""
    choices, problems, url, name = _chosen_instance(visit)
    table, key = visit.query("table"), visit.query("key")
    limit = visit.query("limit")
    row = {
        "table": table,
        "key": key.splitlines() or [key],
        "columns": visit.query("columns").split(),
        "limit": int(limit) if limit.isdecimal() and int(limit) else _CHANGES_DEFAULT,
    }
    changes = (
        visit.streams.limited(partial(_parts, visit, url, name, row)) if table and key and url else iter(())
    )
    return visit.stream(
        "history.html",
        choices=choices,
        daemon=url,
        instance=name,
        table=table,
        key=key,
        columns=visit.query("columns"),
        limit=row["limit"],
        is_asked=bool(table and key and url),
        problems=problems,
        changes=changes,
    )


def _parts(visit: Visit, url: str, name: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a history that the page shows. Raises the daemon's errors."""
    readers = 0
    for part in visit.fleet.history(url, name, row):
        if part["kind"] == "readers":
            readers = len(part["readers"])
        elif part["kind"] == "change":
            yield {**part, "cells": _cells(part), "readers": readers}
        elif part["kind"] != "progress":
            yield part


def _cells(part: dict[str, Any]) -> list[tuple[str, str | None, str | None, bool]]:
    """Return name, value before and after of each column, None if not logged, and whether it changed."""
    before, after = part["before"] or {}, part["after"] or {}
    return [
        (name, _cell(before, name), _cell(after, name), before.get(name) != after.get(name))
        for name in {**before, **after}
    ]


def _cell(values: dict[str, Any], name: str) -> str | None:
    if name not in values:
        return None
    return "NULL" if values[name] is None else str(values[name])


def _urgency(state: str) -> int:
    return _URGENCY.index(state) if state in _URGENCY else len(_URGENCY)


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/": overview,
    "/instance": instance,
    "/hold": hold,
    "/pipelines": pipelines,
    "/pipelines/pause": pause,
    "/subscriptions": subscriptions,
    "/alerts": alerts,
    "/history": history,
    "/tail": tail,
    "/tables": tables,
    "/tables/resnapshot": resnapshot,
}
