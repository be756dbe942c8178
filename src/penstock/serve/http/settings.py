# SPDX-License-Identifier: Apache-2.0
"""The settings in force over HTTP: `GET /v1/settings`, without secrets, for full administrators."""

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import AccessDenied
from penstock.serve.access import account_of
from penstock.serve.served import Served


def routes(served: Served, describe: Callable[[], dict[str, Any]]) -> list[Route]:
    """Return the route of the settings; `describe` returns them as plain JSON values."""

    async def settings(request: Request) -> Response:
        account = account_of(request)
        hidden = [name for name in served.instances if not account.may_administer(name)]
        if hidden:
            raise AccessDenied(
                f"account {account.name} may not see the settings, which are those of {hidden[0]} too",
                hint="Set admin: true for the account, without instances: access in penstock.yaml",
            )
        return JSONResponse({"settings": describe()})

    return [Route("/v1/settings", settings, methods=["GET"], name="_settings")]
