# SPDX-License-Identifier: Apache-2.0
"""A range of a log as a binlog file: `GET /v1/instances/{instance}/export`, like `penstock log export`.

The range goes from the transaction boundary `from` to the boundary `to`; by default it is the whole log. The
response is one file, so a range of several source files is refused. With `dry_run=1` the response is the list
of the files.
"""

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.errors import OptionInvalid
from penstock.logstore.export import exported_files, file_head
from penstock.logstore.extent import Extent
from penstock.serve.access import account_of
from penstock.serve.http.audit import record_action
from penstock.serve.http.query import Query, whole_log_of
from penstock.serve.served import Served
from penstock.serve.threads import run_in

# Files are read in threads, and each switch to a thread costs more than copying this much.
_SENT_BYTES_MIN = 256 * 1024


def routes(served: Served) -> list[Route]:
    """Return the route of exports."""
    path = "/v1/instances/{instance}/export"
    return [Route(path, functools.partial(_export, served), methods=["GET"], name="_export")]


async def _export(served: Served, request: Request) -> Response:
    log, query = whole_log_of(served, request), Query(request)
    start, end = query.position("from"), query.position("to")
    if start is not None and end is not None and end < start:
        raise OptionInvalid(f"{end} is before {start}", position=str(end), hint="Swap from and to")
    run = functools.partial(run_in, served.threads.reading)
    files = await served.threads.search(exported_files, log, start, end)
    if query.number("dry_run", 0):
        return JSONResponse({"files": [_shown(name, piece) for name, piece in files.items()]})
    if len(files) > 1:
        raise OptionInvalid(
            f"the range has {len(files)} files: {', '.join(files)}", hint="Export each of them by itself"
        )
    ((name, piece),) = files.items()
    head = await served.threads.search(file_head, log, piece)
    record_action(
        account_of(request),
        "export log",
        instance=request.path_params["instance"],
        start=str(piece.first),
        end=str(piece.last),
    )
    length = len(head) + piece.end - piece.start
    return StreamingResponse(
        _content(run, head, _joined(log.read(piece.epoch, piece.file, piece.start, piece.end))),
        media_type="application/octet-stream",
        headers={"Content-Length": str(length), "Content-Disposition": f'attachment; filename="{name}"'},
    )


def _shown(name: str, piece: Extent) -> dict[str, Any]:
    return {"name": name, "from": str(piece.first), "to": str(piece.last), "bytes": piece.end - piece.start}


def _joined(views: Iterator[memoryview]) -> Iterator[bytes]:
    """Join small pieces of a log."""
    joined = bytearray()
    for view in views:
        joined += view
        if len(joined) >= _SENT_BYTES_MIN:
            yield bytes(joined)
            joined.clear()
    if joined:
        yield bytes(joined)


async def _content(run: Callable[..., Any], head: bytes, pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    yield head
    while (piece := await run(next, pieces, None)) is not None:
        yield piece
