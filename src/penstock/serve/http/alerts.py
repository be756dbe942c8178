# SPDX-License-Identifier: Apache-2.0
"""Alerts over HTTP: `GET /v1/alerts`, the conditions that are true now."""

from collections.abc import Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.serve.access import account_of
from penstock.telemetry.alerts import Alert


def routes(firing: Callable[[], list[Alert]], channel: str | None) -> list[Route]:
    """Return the route of alerts. `channel` is where they are sent, None if `alerts` is not set."""

    async def alerts(request: Request) -> Response:
        account = account_of(request)
        visible = [asdict(alert) for alert in firing() if account.may_read(alert.instance)]
        # Whom the operators alert is their own business.
        shown = channel if channel is None or account.may_read_metrics() else True
        return JSONResponse({"channel": shown, "alerts": visible})

    return [Route("/v1/alerts", alerts, name="_alerts")]
