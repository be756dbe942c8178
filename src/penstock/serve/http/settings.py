# SPDX-License-Identifier: Apache-2.0
"""The effective settings, without secrets, over HTTP: `GET /v1/settings`, for full administrators."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.serve.access import account_of
from penstock.serve.served import Served


def routes(served: Served, describe: Callable[[], dict[str, Any]]) -> list[Route]:
    """Return the route of the settings; `describe` returns them as plain JSON values."""

    async def settings(request: Request) -> Response:
        account_of(request).prove_administers_all(served.instances, "the settings")
        return JSONResponse({"settings": describe()})

    return [Route("/v1/settings", settings, methods=["GET"], name="_settings")]
