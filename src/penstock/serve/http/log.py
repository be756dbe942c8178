# SPDX-License-Identifier: Apache-2.0
"""The log over HTTP: JSON for requests, raw bytes for ranges. `docs/guides/serve.md` shows each call.

Positions are text, `mysql-bin.000003:1542`, with the prefix `2/` in epoch 2. All positions refer to the
source's own files and offsets.
"""

import functools
import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from penstock.capture.kept_schemas import give_definition, kept_schemas, settled_schemas
from penstock.errors import OptionInvalid, PenstockError
from penstock.gtid_sets import LoggedSet
from penstock.logstore.disk import Buffer, FileRange
from penstock.logstore.extent import Extent
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.memory_log import MemoryLog
from penstock.model import Position, TableName
from penstock.serve.access import Account, account_of
from penstock.serve.http.answers import StreamedAnswer, ending_on_disconnect
from penstock.serve.http.audit import record_action
from penstock.serve.http.newest_bytes import GTID_SET_CHARACTERS_MAX, followed_bytes, newest_bytes
from penstock.serve.http.query import Query, instance_of, log_of, whole_log_of
from penstock.serve.served import Served, ServedInstance
from penstock.serve.threads import run_in
from penstock.source.daemon_client import GTID_SET_HEADER, POSITION_HEADER
from penstock.source.followed_bytes import SERVER_HEADER

# The offset where the bytes of a response end, possibly before the requested stop.
STOP_HEADER = "Penstock-Stop"
_BYTES_TYPE = "application/octet-stream"
# A disconnect of the client is noticed only after the wait, so the wait is short.
_BYTES_WAIT_SECONDS_MAX = 1.0

# A log has its newest bytes in memory, in the pieces in which they arrived: a transaction or less.
_SENT_BYTES_MIN = 64 * 1024

_PREFIX = "/v1/instances"

_Piece = memoryview | FileRange


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
        ("GET", f"{_PREFIX}/{{instance}}/disk", _disk),
        ("GET", f"{_PREFIX}/{{instance}}/locate", _locate),
        ("GET", f"{_PREFIX}/{{instance}}/gtid_set", _gtid_set),
        ("GET", f"{_PREFIX}/{{instance}}/head_bytes", _head_bytes),
        ("GET", f"{_PREFIX}/{{instance}}/bytes", _bytes),
        ("GET", f"{_PREFIX}/{{instance}}/schema", _schema),
        ("POST", f"{_PREFIX}/{{instance}}/schema", _give_schema),
    ]
    handlers = {call: functools.partial(call, served) for _, _, call in calls}
    return [
        Route(
            path,
            # A read that has begun is closed at the end of its response.
            handlers[call] if call in (_bytes, _give_schema) else ending_on_disconnect(handlers[call]),
            methods=[method],
            name=call.__name__,
        )
        for method, path, call in calls
    ]


# --- State ----------------------------------------------------------------------------------


async def _instances(served: Served, request: Request) -> Response:
    shown = [
        {"instance": instance.name, "state": instance.status()["state"]}
        for instance in _readable_instances(served, request)
    ]
    return JSONResponse({"instances": shown})


async def _all_status(served: Served, request: Request) -> Response:
    return JSONResponse(
        {
            "instances": [
                _shown(served, request, instance) for instance in _readable_instances(served, request)
            ]
        }
    )


async def _status(served: Served, request: Request) -> Response:
    return JSONResponse(_shown(served, request, instance_of(served, request)))


def _shown(served: Served, request: Request, instance: ServedInstance) -> dict[str, Any]:
    """Return an instance's status, limited to the tables that the account may read."""
    account, status = account_of(request), dict(instance.status())
    if "process" in status and not account.admin:
        # The output of the process may name any table, and other instances that run in the same process.
        exits = [{**process_exit, "lines": []} for process_exit in status["process"]["exits"]]
        status["process"] = {**status["process"], "exits": exits}
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
    """Return the holds broken by a limit, limited to those that the account may see."""
    try:
        broken = instance.log().broken_holds
    except PenstockError:
        # There is no log, and the status already says why.
        return []
    return [
        {"reader": broken_hold.hold.name, "position": str(broken_hold.hold.position), "why": broken_hold.why}
        for broken_hold in broken
        if account.admin or broken_hold.hold.account == account.name
    ]


async def _epochs(served: Served, request: Request) -> Response:
    return JSONResponse(_epochs_of(log_of(served, request)))


def _epochs_of(log: ServedLog) -> dict[str, Any]:
    epochs = [{"epoch": epoch.epoch, "server_key": epoch.server_key} for epoch in log.epochs.epochs]
    return {"epochs": epochs}


async def _extents(served: Served, request: Request) -> Response:
    log = log_of(served, request)
    return JSONResponse(_extents_of(await served.threads.search(log.extents)))


def _extents_of(extents: Iterable[Extent]) -> dict[str, Any]:
    return {"extents": [extent.to_json() for extent in extents]}


async def _disk(served: Served, request: Request) -> Response:
    """Return the space on the log's disk; null for a log in memory."""
    log = log_of(served, request)
    on_disk = not isinstance(log, MemoryLog)
    free = await served.threads.search(log.disk.free_bytes, log.folder) if on_disk else None
    return JSONResponse(
        {"free_bytes": free, "reserved_bytes": log.settings.free_bytes_min if on_disk else None}
    )


async def _head(served: Served, request: Request) -> Response:
    query, instance = Query(request), instance_of(served, request)
    after, seconds = query.position("after"), query.seconds("timeout")
    head = await served.wait_behind(instance.name, after, seconds)
    if not query.has("listing"):
        return JSONResponse({"position": _text(head)})
    return JSONResponse(await served.threads.search(_listing, instance.log()))


def _listing(log: ServedLog) -> dict[str, Any]:
    """Return what a reader needs for planning: the extents, the end of the log with its GTID set, and the
    epochs.
    """
    extents = log.extents()
    head = extents[-1].last if extents else None
    gtid_set = "" if head is None else log.gtid_set(head)
    # List the epochs before the extents: an epoch that begins now must not appear after its first extent.
    return {"position": _text(head), "gtid_set": gtid_set} | _extents_of(extents) | _epochs_of(log)


async def _earliest(served: Served, request: Request) -> Response:
    return JSONResponse({"position": _text(log_of(served, request).earliest())})


async def _locate(served: Served, request: Request) -> Response:
    log, query = log_of(served, request), Query(request)
    # The empty GTID set is valid too: it means before the first transaction.
    names = [name for name in ("time_us", "gtid_set", "position") if name in request.query_params]
    if len(names) != 1:
        raise OptionInvalid(
            "name one of time_us, gtid_set and position", hint="locate?time_us=1700000000000000"
        )
    search = served.threads.search
    if names == ["time_us"]:
        located = await search(log.locate_time, query.number("time_us"))
    elif names == ["gtid_set"]:
        located = await search(log.locate_gtid_set, query.text("gtid_set"))
    else:
        located = await search(log.locate_position, query.needed_position("position"))
        boundary = await search(log.boundary_before, located.position)
        return JSONResponse(
            {"position": str(located.position), "boundary": str(replace(located.position, offset=boundary))}
        )
    return JSONResponse({"position": str(located.position)})


async def _gtid_set(served: Served, request: Request) -> Response:
    log, position = log_of(served, request), Query(request).needed_position("position")
    return JSONResponse({"gtid_set": await served.threads.search(log.gtid_set, position)})


# --- Bytes ----------------------------------------------------------------------------------


async def _head_bytes(served: Served, request: Request) -> Response:
    log, query = whole_log_of(served, request), Query(request)
    content = await run_in(
        served.threads.reading, log.head_bytes, query.number("epoch", 0), query.text("file")
    )
    return Response(content, media_type="application/octet-stream")


async def _bytes(served: Served, request: Request) -> Response:
    """Stream a range of one source file, from memory if it is still there.

    With `timeout` it first waits for a transaction after `start`, and reports where the log ends, so that a
    reader at the head needs one request. With `follow`, a log whose newest bytes are in memory sends the
    transactions after `start` as they arrive, for up to so many seconds. The first piece is read before the
    response starts, so that errors are reported as problem documents.
    """
    log, query = whole_log_of(served, request), Query(request)
    epoch, file = query.number("epoch", 0), query.text("file")
    start, stop = query.number("start"), query.number("stop", None)
    head: Position | None = None
    if query.has("follow"):
        name, position = request.path_params["instance"], Position(epoch, file, start)
        key = {SERVER_HEADER: _server_key(log, epoch)}
        seconds, account = query.seconds("follow"), account_of(request)
        return followed_bytes(served, name, log, position, seconds, key, account)
    if query.has("timeout"):
        seconds = min(query.seconds("timeout"), _BYTES_WAIT_SECONDS_MAX)
        position = Position(epoch, file, start)
        head = await served.wait_behind(request.path_params["instance"], position, seconds, log)
        if stop is None and (newest := newest_bytes(log, position)) is not None:
            content, head, head_set = newest
            headers = _bytes_headers(log, epoch, head.offset, len(content), head, head_set)
            return Response(content, headers=headers, media_type=_BYTES_TYPE)
    # Only a response to GET has a body.
    sends_files = request.state.connection.send_file is not None and request.method == "GET"
    end, gtid_set, reading, first = await run_in(
        served.threads.reading, _open_range, log, epoch, file, start, stop, sends_files, head is not None
    )
    headers = _bytes_headers(log, epoch, end, end - start, head, gtid_set)
    return _BytesAnswer(first, end - start, reading, served.threads.reading, headers)


def _bytes_headers(
    log: ServedLog, epoch: int, end: int, length: int, head: Position | None, gtid_set: LoggedSet | None
) -> dict[str, str]:
    """Return the headers of a range that ends at an offset."""
    headers = {"Content-Length": str(length), STOP_HEADER: str(end), SERVER_HEADER: _server_key(log, epoch)}
    if head is not None:
        headers[POSITION_HEADER] = str(head)
        if gtid_set is not None and len(gtid_set) <= GTID_SET_CHARACTERS_MAX:
            headers[GTID_SET_HEADER] = gtid_set
    return headers


def _server_key(log: ServedLog, epoch: int) -> str:
    return next((known.server_key for known in log.epochs.epochs if known.epoch == epoch), "")


class _Reading:
    """A read of the log. It may continue in any thread, but only in one thread at a time, and another thread
    may close it.
    """

    def __init__(self, pieces: Iterator[_Piece]) -> None:
        self._pieces = pieces
        self._lock = threading.Lock()

    def next(self) -> _Piece | None:
        """Return the next bytes, None at the end. Small pieces are joined, because each call needs a switch
        to another thread.
        """
        with self._lock:
            piece = next(self._pieces, None)
            if piece is None or len(piece) >= _SENT_BYTES_MIN:
                if isinstance(piece, FileRange):
                    piece.load()
                return piece
            joined = bytearray(_content_of(piece))
            while len(joined) < _SENT_BYTES_MIN and (piece := next(self._pieces, None)) is not None:
                joined += _content_of(piece)
            return memoryview(joined)

    def close(self) -> None:
        """Close the open segment."""
        with self._lock:
            if isinstance(self._pieces, Generator):
                self._pieces.close()
            self._pieces = iter(())


class _BytesAnswer(StreamedAnswer):
    """The bytes of a range, read at the client's pace. The segment is always closed at the end."""

    def __init__(
        self,
        first: _Piece | None,
        length: int,
        reading: _Reading,
        threads: Executor,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers=headers, media_type=_BYTES_TYPE)
        self._first = first
        self._length = length
        self._reading = reading
        self._threads = threads

    async def stream(self, send: Send) -> None:
        """Send the range, piece by piece."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            piece, self._first = self._first, None
            left = self._length
            while piece is not None:
                left -= len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
                piece = await run_in(self._threads, self._reading.next) if left > 0 else None
            if left > 0 or not self._length:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            # Close in the background: a read from a store may still be running.
            self._threads.submit(self._reading.close)


def _content_of(piece: _Piece) -> Buffer:
    return piece.read() if isinstance(piece, FileRange) else piece


def _open_range(
    log: ServedLog,
    epoch: int,
    file: str,
    start: int,
    stop: int | None,
    sends_files: bool,
    with_gtid_set: bool,
) -> tuple[int, LoggedSet | None, "_Reading", _Piece | None]:
    """Return the end of the readable bytes, the GTID set there if wanted, the read, and its first piece."""
    end = _readable_end(log, epoch, file, start, stop)
    # Only the end of a transaction has a GTID set.
    gtid_set = (
        log.gtid_set(Position(epoch, file, end)) if with_gtid_set and end not in (start, stop) else None
    )
    read = log.pieces if sends_files else log.read
    reading = _Reading(read(epoch, file, start, end) if end > start else iter(()))
    return end, gtid_set, reading, reading.next()


def _readable_end(log: ServedLog, epoch: int, file: str, start: int, stop: int | None) -> int:
    """Return the end of the contiguous bytes of a file from `start` on, at most `stop`.

    Returns `start` if the log does not go further yet. Raises PositionPurged and PositionInvalid.
    """
    end = start
    for extent in log.extents():
        if (extent.epoch, extent.file) == (epoch, file) and extent.start <= end <= extent.end:
            end = extent.end
    if end == start:
        # The log has no bytes from this position on. If the position is not the end of the log, the lookup
        # raises an error that explains why.
        log.locate_position(Position(epoch, file, start))
    return end if stop is None else min(end, max(stop, start))


# --- Schemas --------------------------------------------------------------------------------


async def _schema(served: Served, request: Request) -> Response:
    log, query = log_of(served, request), Query(request)
    position = query.needed_position("position")
    name = TableName.parse(query.text("table")) if query.has("table") else None
    account = account_of(request)
    if name is not None:
        account.prove_reads_table(request.path_params["instance"], name)
    again = query.has("again")
    settled = functools.partial(settled_schemas, log, kept_schemas(log), position, name, again=again)
    schema = await run_in(served.threads.definitions, settled)
    tables_by_name = [(TableName.parse(table["name"]), table) for table in schema["tables"]]
    schema["tables"] = [
        table for name, table in tables_by_name if account.may_read_table(name.database, name.table)
    ]
    return JSONResponse({"schema": schema})


async def _give_schema(served: Served, request: Request) -> Response:
    """Store a table definition that an operator supplied, valid from a position on."""
    log, query = log_of(served, request), Query(request)
    name, position = TableName.parse(query.text("table")), query.needed_position("position")
    account, instance = account_of(request), request.path_params["instance"]
    account.prove_defines(instance)
    account.prove_reads_table(instance, name)
    try:
        definition = await request.json()
    except (ValueError, RecursionError) as problem:
        raise OptionInvalid("the body is no JSON", hint="Send a table's definition") from problem
    await run_in(served.threads.definitions, give_definition, log, name, position, definition)
    record_action(account, "set definition", instance=instance, table=str(name), position=str(position))
    return JSONResponse({"table": str(name), "position": str(position)})


# --- Instances -----------------------------------------------------------------------------


def _readable_instances(served: Served, request: Request) -> list[ServedInstance]:
    """Return the instances that the account may read."""
    account = account_of(request)
    return [instance for name, instance in served.instances.items() if account.may_read(name)]


def _text(position: Position | None) -> str | None:
    return None if position is None else str(position)
