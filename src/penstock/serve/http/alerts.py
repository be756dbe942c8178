# SPDX-License-Identifier: Apache-2.0
"""Alerts over HTTP.

    GET  /v1/alerts         the conditions that are true now
    POST /v1/alerts/test    send an alert and its resolution to the channel, for full administrators

With `dry_run`, the default, the test only says where the alert would be sent.
"""

from collections.abc import Callable
from dataclasses import asdict

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.json_request import ChangeRequest
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.telemetry.alerts import Alert
from penstock.telemetry.channel import Channel


class AlertTestRequest(ChangeRequest):
    """A request to send a test message to the channel of alerts."""


def routes(served: Served, firing: Callable[[], list[Alert]], channel: Channel | None) -> list[Route]:
    """Return the routes of alerts. `channel` is where alerts are sent, None if the setting `alerts` is
    missing.
    """
    address = None if channel is None else channel.address

    async def alerts(request: Request) -> Response:
        account = account_of(request)
        # State stores have no accounts, so the pipelines in them are shown only to accounts that see
        # everything.
        sees_all = account.may_read_metrics()
        visible = [
            asdict(alert)
            for alert in firing()
            if (sees_all if alert.is_pipeline else account.may_read(alert.instance))
        ]
        # The addresses to which alerts are sent are confidential.
        shown = address if address is None or sees_all else True
        return JSONResponse({"channel": shown, "alerts": visible})

    async def test(request: Request) -> Response:
        account = account_of(request)
        account.prove_administers_all(served.instances, "where alerts are sent")
        wanted = await AlertTestRequest.read(request, '{"dry_run": true}')
        if channel is None:
            raise OptionInvalid("this daemon sends no alerts", hint="Set alerts.webhook or alerts.mail")
        if not wanted.dry_run:
            await run_in(served.threads.delivering, channel.send_test, account.name)
            record_action(account, "test alerts")
        return JSONResponse({"channel": address, "dry_run": wanted.dry_run})

    return [
        Route("/v1/alerts", alerts, name="_alerts"),
        Route("/v1/alerts/test", test, methods=["POST"], name="_test_alerts"),
    ]
