# SPDX-License-Identifier: Apache-2.0
"""The Pumps of a daemon over HTTP, and decisions about transactions that they cannot decide.

    GET  /v1/pumps                     the status of each Pump, as `penstock pump status` shows it
    POST /v1/pumps/{instance}/decide   {"start_ts": 470639218043387904, "commit_ts": 470639218044174336}

With a `commit_ts` of 0 the transaction was rolled back. With `dry_run`, the default, nothing is decided.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import SourceMissing
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.json_request import ChangeRequest
from penstock.serve.served import Served
from penstock.serve.threads import run_in


class RunningPump(Protocol):
    """A Pump as an operator sees it."""

    def status(self) -> dict[str, Any]:
        """Return its state as plain JSON values."""

    def decide(self, start_ts: int, commit_ts: int, *, dry_run: bool) -> None:
        """Decide a transaction, or only check the decision. Raises OptionInvalid, DiskFailed."""


class DecisionRequest(ChangeRequest):
    """The outcome of a transaction, found out by an operator."""

    start_ts: int = Field(gt=0, lt=1 << 63, description="The transaction's start timestamp, as reported")
    commit_ts: int = Field(
        ge=0, lt=1 << 63, description="Its commit timestamp; 0 if the transaction was rolled back"
    )


def routes(served: Served, pumps: Mapping[str, RunningPump]) -> list[Route]:
    """Return the routes of Pumps, by instance."""

    async def show(request: Request) -> Response:
        account = account_of(request)
        names = [name for name in pumps if account.may_administer(name)]
        return JSONResponse({"pumps": [{"instance": name, **pumps[name].status()} for name in names]})

    async def decide(request: Request) -> Response:
        account, name = account_of(request), request.path_params["instance"]
        account.prove_administers(name)
        wanted = await DecisionRequest.read(request, '{"start_ts": 470639218043387904, "commit_ts": 0}')
        if name not in pumps:
            raise SourceMissing(f"the instance {name} has no Pump here", hint="GET /v1/pumps lists them")
        pump = pumps[name]

        def write() -> None:
            pump.decide(wanted.start_ts, wanted.commit_ts, dry_run=wanted.dry_run)

        await run_in(served.threads.definitions, write)
        values = {"start_ts": wanted.start_ts, "commit_ts": wanted.commit_ts}
        if not wanted.dry_run:
            record_action(account, "decide transaction", instance=name, **values)
        stalled_by = pump.status().get("stalled_by")
        return JSONResponse({"instance": name, **values, "stalled_by": stalled_by, "dry_run": wanted.dry_run})

    return [
        Route("/v1/pumps", show, methods=["GET"], name="_pumps"),
        Route("/v1/pumps/{instance}/decide", decide, methods=["POST"], name="_decide"),
    ]
