# SPDX-License-Identifier: Apache-2.0
"""Instances that are added, changed and removed over HTTP, for full administrators.

    PUT /v1/instances/{instance}       {"settings": {"source": "mysql://repl@db1", "password_file": ...}}
    DELETE /v1/instances/{instance}

Both are stored in the coordination store, for all members of a fleet, and take effect a moment later. The log
of an instance that is removed stays.
"""

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.settings.documents import InstanceDocument, instance_document

# Stores an instance, None to remove it, and returns its version.
Want = Callable[[str, InstanceDocument | None], int]


def routes(served: Served, want: Want) -> list[Route]:
    """Return the routes of changes of instances."""

    async def change(request: Request) -> Response:
        name, account = request.path_params["instance"], account_of(request)
        account.prove_administers_all([*served.instances, name], "the settings")
        document: InstanceDocument | None = None
        if request.method == "PUT":
            document = instance_document({"instance": name, **_parse(await request.body())})
        else:
            served.instance(name)
        version = await run_in(served.threads.searching, want, name, document)
        record_action(account, "remove instance" if document is None else "set instance", instance=name)
        return JSONResponse({"instance": name, "version": version})

    return [Route("/v1/instances/{instance}", change, methods=["PUT", "DELETE"], name="_change_instance")]


def _parse(body: bytes) -> dict[str, Any]:
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as problem:
        raise OptionInvalid("the body of the request is no JSON", hint=_HINT) from problem
    if not isinstance(values, dict) or "instance" in values:
        raise OptionInvalid("the body of the request has no settings", hint=_HINT)
    return values


_HINT = 'Send {"settings": {"source": "mysql://repl@db1", "password_file": "/run/secrets/repl"}}'
