# SPDX-License-Identifier: Apache-2.0
"""The newest events of the daemon over HTTP: `GET /v1/events`, for full administrators.

The events are the last few hundred log lines since the daemon started. The same number of audit records is
kept separately. Older lines are in the log of the service.
"""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.serve.access import account_of
from penstock.serve.http.query import Query
from penstock.serve.served import Served
from penstock.telemetry.recent_events import RecentEvents

_LIMIT_DEFAULT = 200
_KINDS: dict[str, bool | None] = {"": None, "audit": True, "other": False}


def routes(served: Served, recent: RecentEvents) -> list[Route]:
    """Return the route of events."""

    async def events(request: Request) -> Response:
        account_of(request).prove_administers_all(served.instances, "the events")
        query = Query(request)
        kind = query.text("kind") if query.has("kind") else ""
        if kind not in _KINDS:
            raise OptionInvalid(f"there is no kind of events {kind[:64]!r}", hint="Ask for audit or other")
        limit = query.number("limit", _LIMIT_DEFAULT)
        return JSONResponse({"events": recent.newest(limit, audit=_KINDS[kind])})

    return [Route("/v1/events", events, methods=["GET"], name="_events")]
