# SPDX-License-Identifier: Apache-2.0
"""The log over HTTP: plain JSON for questions, raw bytes for ranges. `docs/guides/serve.md` shows each call.

Positions are text, `mysql-bin.000003:1542`, with `2/` before it in epoch 2. All are the source's own.
"""

import functools
import threading
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from penstock.capture.kept_schemas import give_definition, kept_schemas, settled_schemas
from penstock.errors import OptionInvalid, PenstockError
from penstock.logstore.log import Log
from penstock.model import Position, TableName
from penstock.serve.access import Account, account_of
from penstock.serve.answers import StreamedAnswer
from penstock.serve.query import Query, instance_of, log_of
from penstock.serve.served import Served, ServedInstance
from penstock.serve.threads import run_in

# Where the bytes of an answer end: it may be before the stop that was asked for.
STOP_HEADER = "Penstock-Stop"

_PREFIX = "/v1/instances"


def routes(served: Served) -> list[Route]:
    """Return the routes of the log's REST interface."""
    calls: list[tuple[str, str, Callable[[Served, Request], Awaitable[Response]]]] = [
        ("GET", "/v1/status", _all_status),
        ("GET", _PREFIX, _instances),
        ("GET", f"{_PREFIX}/{{instance}}/status", _status),
        ("GET", f"{_PREFIX}/{{instance}}/epochs", _epochs),
        ("GET", f"{_PREFIX}/{{instance}}/extents", _extents),
        ("GET", f"{_PREFIX}/{{instance}}/head", _head),
        ("GET", f"{_PREFIX}/{{instance}}/earliest", _earliest),
        ("GET", f"{_PREFIX}/{{instance}}/locate", _locate),
        ("GET", f"{_PREFIX}/{{instance}}/gtid_set", _gtid_set),
        ("GET", f"{_PREFIX}/{{instance}}/head_bytes", _head_bytes),
        ("GET", f"{_PREFIX}/{{instance}}/bytes", _bytes),
        ("GET", f"{_PREFIX}/{{instance}}/schema", _schema),
        ("POST", f"{_PREFIX}/{{instance}}/schema", _give_schema),
    ]
    return [
        Route(path, functools.partial(call, served), methods=[method], name=call.__name__)
        for method, path, call in calls
    ]


# --- What there is --------------------------------------------------------------------------


async def _instances(served: Served, request: Request) -> Response:
    named = [{"instance": one.name, "state": one.status()["state"]} for one in _seen(served, request)]
    return JSONResponse({"instances": named})


async def _all_status(served: Served, request: Request) -> Response:
    return JSONResponse({"instances": [_shown(served, request, one) for one in _seen(served, request)]})


async def _status(served: Served, request: Request) -> Response:
    return JSONResponse(_shown(served, request, instance_of(served, request)))


def _shown(served: Served, request: Request, instance: ServedInstance) -> dict[str, Any]:
    """Return an instance's status, of its tables those that the account may read."""
    account, status = account_of(request), instance.status()
    doubts = [(TableName.parse(doubt["table"]), doubt) for doubt in status.get("tables_in_doubt", ())]
    return {
        **status,
        "tables_in_doubt": [
            doubt for name, doubt in doubts if account.may_read_table(name.database, name.table)
        ],
        "broken_holds": _broken_holds(account, instance),
        "subscribers": served.subscribers.count(instance.name),
    }


def _broken_holds(account: Account, instance: ServedInstance) -> list[dict[str, str]]:
    """Return the holds that a bound has broken, of those that the account may see."""
    try:
        broken = instance.log().broken_holds
    except PenstockError:
        # The status says itself why there is no log now.
        return []
    return [
        {"reader": one.hold.name, "position": str(one.hold.position), "why": one.why}
        for one in broken
        if account.admin or one.hold.account == account.name
    ]


async def _epochs(served: Served, request: Request) -> Response:
    epochs = log_of(served, request).epochs.epochs
    return JSONResponse({"epochs": [{"epoch": one.epoch, "server_key": one.server_key} for one in epochs]})


async def _extents(served: Served, request: Request) -> Response:
    log = log_of(served, request)
    extents = await run_in(served.threads.searching, log.extents)
    return JSONResponse(
        {
            "extents": [
                {"epoch": one.epoch, "file": one.file, "start": one.start, "end": one.end} for one in extents
            ]
        }
    )


async def _head(served: Served, request: Request) -> Response:
    asked, instance = Query(request), instance_of(served, request)
    after, seconds = asked.position("after"), asked.seconds("timeout")
    head = await served.wait_behind(instance.name, after, seconds)
    return JSONResponse({"position": _text(head)})


async def _earliest(served: Served, request: Request) -> Response:
    return JSONResponse({"position": _text(log_of(served, request).earliest())})


async def _locate(served: Served, request: Request) -> Response:
    log, asked = log_of(served, request), Query(request)
    # The empty GTID set is one as well: before the first transaction.
    given = [name for name in ("time_us", "gtid_set", "position") if name in request.query_params]
    if len(given) != 1:
        raise OptionInvalid(
            "name one of time_us, gtid_set and position", hint="locate?time_us=1700000000000000"
        )
    search = functools.partial(run_in, served.threads.searching)
    if given == ["time_us"]:
        located = await search(log.locate_time, asked.number("time_us"))
    elif given == ["gtid_set"]:
        located = await search(log.locate_gtid_set, asked.text("gtid_set"))
    else:
        located = await search(log.locate_position, asked.needed_position("position"))
        boundary = await search(log.boundary_before, located.position)
        return JSONResponse(
            {"position": str(located.position), "boundary": str(replace(located.position, offset=boundary))}
        )
    return JSONResponse({"position": str(located.position)})


async def _gtid_set(served: Served, request: Request) -> Response:
    log, position = log_of(served, request), Query(request).needed_position("position")
    return JSONResponse({"gtid_set": await run_in(served.threads.searching, log.gtid_set, position)})


# --- Bytes ----------------------------------------------------------------------------------


async def _head_bytes(served: Served, request: Request) -> Response:
    log, asked = _whole_log_of(served, request), Query(request)
    content = await run_in(
        served.threads.reading, log.head_bytes, asked.number("epoch", 0), asked.text("file")
    )
    return Response(content, media_type="application/octet-stream")


async def _bytes(served: Served, request: Request) -> Response:
    """Stream a range of one source file, from memory where it is still there.

    The first piece is read before the answer begins, so what is wrong is told as a problem.
    """
    log, asked = _whole_log_of(served, request), Query(request)
    epoch, file = asked.number("epoch", 0), asked.text("file")
    start, stop = asked.number("start"), asked.number("stop", None)
    end = await run_in(served.threads.reading, _readable_end, log, epoch, file, start, stop)
    reading = _Reading(log.read(epoch, file, start, end) if end > start else iter(()))
    first = await run_in(served.threads.reading, reading.next)
    headers = {"Content-Length": str(end - start), STOP_HEADER: str(end)}
    return _BytesAnswer(first, reading, served.threads.reading, headers)


class _Reading:
    """A read of the log that goes on in any thread, one at a time, and may be closed by another."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def next(self) -> memoryview | None:
        """Return the next bytes, None behind the last."""
        with self._lock:
            return next(self._pieces, None)

    def close(self) -> None:
        """Let go of the segment that is open."""
        with self._lock:
            if isinstance(self._pieces, Generator):
                self._pieces.close()
            self._pieces = iter(())


class _BytesAnswer(StreamedAnswer):
    """The bytes of a range, read as the client takes them; the segment is closed however the answer ends."""

    def __init__(
        self, first: memoryview | None, reading: _Reading, threads: Executor, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=headers, media_type="application/octet-stream")
        self._first = first
        self._reading = reading
        self._threads = threads

    async def stream(self, send: Send) -> None:
        """Send the range, piece by piece."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            piece, self._first = self._first, None
            while piece is not None:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                piece = await run_in(self._threads, self._reading.next)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            # Nobody waits for it: a read of a store may be under way.
            self._threads.submit(self._reading.close)


def _readable_end(log: Log, epoch: int, file: str, start: int, stop: int | None) -> int:
    """Return where the bytes of a file that can be read without a break from `start` on end, `stop` at most.

    `start` where the log goes no further yet. Raises PositionPurged and PositionInvalid.
    """
    end = start
    for one in log.extents():
        if (one.epoch, one.file) == (epoch, file) and one.start <= end <= one.end:
            end = one.end
    if end == start:
        # Nothing lies here: unless this is where it goes on, the log says why.
        log.locate_position(Position(epoch, file, start))
    return end if stop is None else min(end, max(stop, start))


# --- Schemas --------------------------------------------------------------------------------


async def _schema(served: Served, request: Request) -> Response:
    log, asked = log_of(served, request), Query(request)
    position = asked.needed_position("position")
    name = TableName.parse(asked.text("table")) if asked.given("table") else None
    account = account_of(request)
    if name is not None:
        account.prove_reads_table(request.path_params["instance"], name)
    again = asked.given("again")
    settled = functools.partial(settled_schemas, log, kept_schemas(log), position, name, again=again)
    schema = await run_in(served.threads.definitions, settled)
    named = [(TableName.parse(one["name"]), one) for one in schema["tables"]]
    schema["tables"] = [one for known, one in named if account.may_read_table(known.database, known.table)]
    return JSONResponse({"schema": schema})


async def _give_schema(served: Served, request: Request) -> Response:
    """Take a table's definition that an operator gives, from a position on."""
    log, asked = log_of(served, request), Query(request)
    name, position = TableName.parse(asked.text("table")), asked.needed_position("position")
    account_of(request).prove_administers(request.path_params["instance"])
    try:
        definition = await request.json()
    except ValueError as problem:
        raise OptionInvalid("the body is no JSON", hint="Send a table's definition") from problem
    await run_in(served.threads.definitions, give_definition, log, name, position, definition)
    return JSONResponse({"table": str(name), "position": str(position)})


# --- Instances -----------------------------------------------------------------------------


def _seen(served: Served, request: Request) -> list[ServedInstance]:
    """Return the instances that the account may read."""
    account = account_of(request)
    return [one for name, one in served.instances.items() if account.may_read(name)]


def _whole_log_of(served: Served, request: Request) -> Log:
    """Return the log for reading its bytes, which hold every table. Raises AccessDenied."""
    account_of(request).prove_reads_whole_log(request.path_params["instance"])
    return log_of(served, request)


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)
