# SPDX-License-Identifier: Apache-2.0
"""Serves the metadata that another member of the fleet needs to copy a log, in addition to the bytes.

GET copy/listing     the epochs, and the extents that end at or after a position; waits as `head` does;
                     `synced` confirms what the copy has made durable
GET copy/metadata    the holds, and the files of table definitions
GET copy/definitions one of these files
"""

import functools
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.logstore.followed_log import ServedLog
from penstock.logstore.generations import GenerationFiles
from penstock.logstore.holds import Holds
from penstock.logstore.prepared import HOLD_NAME
from penstock.model import Position
from penstock.serve.durable import DurableInstance
from penstock.serve.http.query import Query, instance_of, member_of, whole_log_of
from penstock.serve.served import Served
from penstock.serve.threads import run_in

_PREFIX = "/v1/instances/{instance}/copy"


def routes(served: Served) -> list[Route]:
    """Return the routes for copies. They are for accounts that may read the whole log."""
    calls = [("listing", _listing), ("metadata", _metadata), ("definitions", _definitions)]
    return [
        Route(f"{_PREFIX}/{name}", functools.partial(call, served), methods=["GET"], name=call.__name__)
        for name, call in calls
    ]


async def _listing(served: Served, request: Request) -> Response:
    query, instance = Query(request), instance_of(served, request)
    log, after = whole_log_of(served, request), query.position("after")
    member, synced, readable = member_of(request), query.position("synced"), None
    if isinstance(instance, DurableInstance):
        if member is not None and synced is not None:
            await served.threads.search(instance.confirm, member, synced)
        readable = instance.readable_end()
    await served.wait_behind(instance.name, after, query.seconds("timeout"), log)
    return JSONResponse(await served.threads.search(_list, log, after, readable))


def _list(log: ServedLog, after: Position | None, readable: Position | None) -> dict[str, Any]:
    extents = log.extents()
    return {
        "readable": None if readable is None else str(readable),
        "position": None if not extents else str(extents[-1].last),
        "extents": [extent.to_json() for extent in extents if after is None or extent.last >= after],
        # List the epochs before the extents: an epoch that begins now must not appear after its first extent.
        "epochs": [asdict(epoch) for epoch in log.epochs.epochs],
    }


async def _metadata(served: Served, request: Request) -> Response:
    return JSONResponse(await run_in(served.threads.definitions, _describe, whole_log_of(served, request)))


def _describe(log: ServedLog) -> dict[str, Any]:
    # Statements are stored in the files before their bytes are in the log, so read the end of the log first.
    visible = log.visible
    files = GenerationFiles(log.disk, log.layout)
    holds = Holds(log.disk, log.layout).all()
    return {
        "position": None if visible is None else str(visible),
        "definitions": [asdict(generation) for generation in files.list()],
        "holds": [
            {**asdict(hold), "position": str(hold.position)} for hold in holds if hold.name != HOLD_NAME
        ],
    }


async def _definitions(served: Served, request: Request) -> Response:
    log, version = whole_log_of(served, request), Query(request).number("version")
    files = GenerationFiles(log.disk, log.layout)
    content = await run_in(served.threads.definitions, files.read, version)
    return Response(content, media_type="application/octet-stream")
