# SPDX-License-Identifier: Apache-2.0
"""The pages about servers and daemons: what hides changes on a server, and which settings are in force."""

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import Response

from penstock.console.visit import Visit
from penstock.errors import PenstockError


def check_server(visit: Visit) -> Response:
    """Show which server settings break or hide changes, and how to fix them."""
    visit.prove_admin()
    url, name = visit.query("daemon"), visit.query("instance")
    servers: list[dict[str, Any]] = []
    problem = None
    try:
        servers = visit.fleet.ask_instance(url, name, "check")["servers"]
    except PenstockError as refusal:
        problem = refusal
    return visit.render("check.html", daemon=url, instance=name, servers=servers, problem=problem)


def show_settings(visit: Visit) -> Response:
    """Show the settings in force, and what each account may do."""
    visit.prove_admin()
    answers = visit.fleet.ask_all("settings")
    shown = [
        {
            "daemon": url,
            "accounts": answer["settings"].get("access", []),
            "text": json.dumps(_without_empty(answer["settings"]), indent=2, ensure_ascii=False),
        }
        for url, answer in answers.values.items()
    ]
    return visit.render("settings.html", shown=shown, problems=answers.problems)


def _without_empty(value: Any) -> Any:
    """Return settings without unset values, which would clutter the page."""
    if isinstance(value, dict):
        parts = {name: _without_empty(part) for name, part in value.items() if name != "access"}
        return {name: part for name, part in parts.items() if part not in (None, [], {})}
    return [_without_empty(part) for part in value] if isinstance(value, list) else value


PAGES: dict[str, Callable[[Visit], Response]] = {
    "/check": check_server,
    "/settings": show_settings,
}
