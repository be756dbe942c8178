# SPDX-License-Identifier: Apache-2.0
"""Health over HTTP: `/livez`, `/readyz` and `/startupz`, without credentials.

The response names the checks but no instance, so that unauthenticated clients learn only whether the daemon
works.
"""

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from penstock.serve.health import Health

_UNAVAILABLE = 503
_HEADERS = {"Cache-Control": "no-store"}


def routes(health: Health) -> list[Route]:
    """Return the routes of health."""

    async def alive(request: Request) -> Response:
        return _answer({"alive": True})

    async def ready(request: Request) -> Response:
        return _answer(await health.checks())

    async def started(request: Request) -> Response:
        return _answer({"started": health.is_started()})

    return [
        Route("/livez", alive, name="_alive"),
        Route("/readyz", ready, name="_ready"),
        Route("/startupz", started, name="_started"),
    ]


def _answer(checks: dict[str, bool]) -> Response:
    text = "".join(f"{name}: {'ok' if passed else 'failed'}\n" for name, passed in checks.items())
    return PlainTextResponse(text, 200 if all(checks.values()) else _UNAVAILABLE, _HEADERS)
