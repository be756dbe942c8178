# SPDX-License-Identifier: Apache-2.0
"""The findings of `penstock check` over HTTP: `GET /v1/instances/{instance}/check`, for administrators."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import AccessDenied
from penstock.serve.access import account_of
from penstock.serve.served import Served
from penstock.serve.threads import run_in


def routes(served: Served, check: Callable[[str], list[dict[str, Any]]], threads: Executor) -> list[Route]:
    """Return the route of checks. `check` returns the findings of an instance's servers, and may block."""

    async def checked(request: Request) -> Response:
        name = request.path_params["instance"]
        account = account_of(request)
        account.prove_administers(name)
        if not account.sees_all_values:
            raise AccessDenied(
                f"account {account.name} may read a part of {name}, and findings may name all of it",
                hint="Run: penstock check URL, or leave out the account's tables, masked, columns and where:"
                " access in penstock.yaml",
            )
        served.instance(name)
        return JSONResponse({"servers": await run_in(threads, check, name)})

    return [Route("/v1/instances/{instance}/check", checked, methods=["GET"], name="_check")]
