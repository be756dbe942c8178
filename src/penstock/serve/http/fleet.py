# SPDX-License-Identifier: Apache-2.0
"""The fleet over HTTP: `GET /v1/fleet`. Every member gives the same response."""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import SourceMissing
from penstock.serve.access import account_of
from penstock.serve.threads import run_in


def routes(status: Callable[[], Mapping[str, Any]] | None, threads: Executor) -> list[Route]:
    """Return the route of the fleet's state. `status` may block, and is None if this daemon is not in a
    fleet.
    """

    async def fleet(request: Request) -> Response:
        account = account_of(request)
        if status is None:
            raise SourceMissing("this daemon is in no fleet", hint="Add the section fleet to penstock.yaml")
        shown = dict(await run_in(threads, status))
        shown["instances"] = [row for row in shown["instances"] if account.may_read(row["instance"])]
        return JSONResponse(shown)

    return [Route("/v1/fleet", fleet, methods=["GET"], name="_fleet")]
