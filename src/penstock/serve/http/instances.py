# SPDX-License-Identifier: Apache-2.0
"""Adds, changes and removes instances over HTTP, for full administrators.

    GET /v1/stored-instances
    PUT /v1/instances/{instance}       {"settings": {"source": "mysql://repl@db1", "password_file": ...}}
    DELETE /v1/instances/{instance}
    POST /v1/instances/{instance}/forget    {"dry_run": true}

These instances are stored in the coordination store for all members of a fleet. A change takes effect a
moment later. The log of a removed instance is kept. With `dry_run` in the body of PUT, or `?dry_run=1` in
DELETE, nothing is changed: the response says which instances of this daemon would be added, changed and
removed.
"""

import functools
import json
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.json_request import ChangeRequest
from penstock.serve.http.query import Query
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.settings.documents import InstanceDocument, instance_document

_WHAT = "the settings"


class ForgetRequest(ChangeRequest):
    """A request to delete the stored settings of an instance, so that the settings files apply again."""


class Instances(Protocol):
    """The instances stored in the coordination store. Every method may wait for the store."""

    def want(self, name: str, document: InstanceDocument | None, *, dry_run: bool) -> dict[str, Any]:
        """Store the document of an instance, or remove the instance if the document is None. Return the
        stored version and the resulting changes.
        """

    def forget(self, name: str, *, dry_run: bool) -> dict[str, Any]:
        """Delete the stored settings of an instance; return the resulting changes."""

    def stored(self) -> list[dict[str, Any]] | None:
        """Return the stored instances, None without a store."""


def routes(served: Served, instances: Instances) -> list[Route]:
    """Return the routes of stored instances."""
    path = "/v1/instances/{instance}"

    async def change(request: Request) -> Response:
        name, account = request.path_params["instance"], account_of(request)
        account.prove_administers_all([*served.instances, name], _WHAT)
        document: InstanceDocument | None = None
        if request.method == "PUT":
            values = _parse(await request.body())
            dry_run = values.pop("dry_run", False) is not False
            document = instance_document({"instance": name, **values})
        else:
            dry_run = bool(Query(request).number("dry_run", 0))
            served.instance(name)
        work = functools.partial(instances.want, name, document, dry_run=dry_run)
        outcome = await run_in(served.threads.searching, work)
        if not dry_run:
            record_action(account, "remove instance" if document is None else "set instance", instance=name)
        return JSONResponse({"instance": name, **outcome, "dry_run": dry_run})

    async def forget(request: Request) -> Response:
        name, account = request.path_params["instance"], account_of(request)
        account.prove_administers_all([*served.instances, name], _WHAT)
        wanted = await ForgetRequest.read(request, '{"dry_run": true}')
        work = functools.partial(instances.forget, name, dry_run=wanted.dry_run)
        outcome = await run_in(served.threads.searching, work)
        if not wanted.dry_run:
            record_action(account, "forget instance", instance=name)
        return JSONResponse({"instance": name, **outcome, "dry_run": wanted.dry_run})

    async def stored(request: Request) -> Response:
        account_of(request).prove_administers_all(served.instances, _WHAT)
        known = await run_in(served.threads.searching, instances.stored)
        return JSONResponse({"coordination": known is not None, "instances": known or []})

    return [
        Route(path, change, methods=["PUT", "DELETE"], name="_change_instance"),
        Route(f"{path}/forget", forget, methods=["POST"], name="_forget_instance"),
        Route("/v1/stored-instances", stored, methods=["GET"], name="_stored_instances"),
    ]


def _parse(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise OptionInvalid("the body of the request is no JSON", hint=_HINT) from problem
    if not isinstance(values, dict) or "instance" in values:
        raise OptionInvalid("the body of the request has no settings", hint=_HINT)
    return values


_HINT = 'Send {"settings": {"source": "mysql://repl@db1", "password_file": "/run/secrets/repl"}}'
