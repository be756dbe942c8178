# SPDX-License-Identifier: Apache-2.0
"""Restarts, over HTTP, a capture that was set aside: `POST /v1/instances/NAME/resume`."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.query import instance_of
from penstock.serve.served import Served


def routes(served: Served, start: Callable[[str], None] | None) -> list[Route]:
    """Return the route. `start` starts the capture of an instance; it is None if this process captures
    nothing.
    """

    async def resume(request: Request) -> Response:
        instance = instance_of(served, request)
        account_of(request).prove_administers(instance.name)
        if start is None:
            raise OptionInvalid(f"{instance.name} is not set aside")
        start(instance.name)
        record_action(account_of(request), "resume capture", instance=instance.name)
        return JSONResponse({"instance": instance.name})

    return [Route("/v1/instances/{instance}/resume", resume, methods=["POST"], name="_resume")]
