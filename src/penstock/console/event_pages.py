# SPDX-License-Identifier: Apache-2.0
"""The pages about activity at the daemons: their listeners and sessions, and recent events."""

from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from penstock.console.fleet import Answers
from penstock.console.visit import Visit
from penstock.telemetry.recent_events import RECENT_EVENTS

_EVENTS_SHOWN_MAX = 300
_KINDS = ("", "audit", "other")
# The console's own events are listed under this name.
_CONSOLE = "console"


def list_sessions(visit: Visit) -> Response:
    """Show the connected clients, their protocols, and how far each reader has come."""
    listeners, readers = visit.fleet.ask_all("listeners"), visit.fleet.ask_all("subscribers")
    connections = visit.fleet.ask_all("connections") if visit.is_admin else Answers({}, {})
    shown = [
        {"daemon": url, **reader}
        for url, answer in readers.values.items()
        for reader in answer["subscribers"]
    ]
    shown.sort(key=lambda reader: (reader["instance"], reader["protocol"], reader["subscriber"]))
    return visit.render(
        "sessions.html",
        listeners=[
            {"daemon": url, **listener}
            for url, answer in listeners.values.items()
            for listener in _listeners(answer, connections.values.get(url))
        ],
        readers=shown,
        connections=[
            {"daemon": url, **connection}
            for url, answer in connections.values.items()
            for connection in answer["connections"]
        ],
        sees_connections=bool(connections.values),
        problems=listeners.problems | readers.problems | connections.problems,
    )


def _listeners(answer: dict[str, Any], counted: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the listeners of a daemon, with their traffic if the account may see it."""
    if counted is not None:
        return list(counted["listeners"])
    return [
        {"listener": name, "address": address, "open": None, "requests": {}, "rejected": {}}
        for name, address in answer["listeners"].items()
    ]


def list_events(visit: Visit) -> Response:
    """Show recent events, and who changed what."""
    visit.prove_admin()
    kind = visit.query("kind") if visit.query("kind") in _KINDS else ""
    answers = visit.fleet.ask_all(f"events?limit={_EVENTS_SHOWN_MAX}&kind={kind}")
    events = [
        {"daemon": url, **event} for url, answer in answers.values.items() for event in answer["events"]
    ]
    # Add the console's own log lines only for users without masks, because a line may contain a value of a
    # pipeline's tables.
    if visit.sees_pipelines and not visit.masking:
        audit = {"audit": True, "other": False}.get(kind)
        own = RECENT_EVENTS.newest(_EVENTS_SHOWN_MAX, audit=audit)
        events += [{"daemon": _CONSOLE, **event} for event in own]
    events.sort(key=lambda event: event["time_us"], reverse=True)
    return visit.render(
        "events.html",
        events=[_with_action(event) for event in events[:_EVENTS_SHOWN_MAX]],
        kinds=_KINDS,
        kind=kind,
        problems=answers.problems,
    )


def _with_action(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event with the user and the action, for an audit record."""
    fields = dict(event["fields"])
    account = fields.pop("account", "") if event["what"] == "audit" else ""
    what = fields.pop("action", event["what"]) if event["what"] == "audit" else event["what"]
    return {**event, "what": what, "account": account, "fields": fields}


PAGES: dict[str, Callable[[Visit], Response]] = {"/sessions": list_sessions, "/events": list_events}
