# SPDX-License-Identifier: Apache-2.0
"""A table as of a point in time, over HTTP: `POST /v1/instances/{instance}/as-of`. Responds with JSON or a
file.
"""

import asyncio
import functools
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any, Literal, TypeVar
from urllib.parse import quote

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from penstock.errors import OptionInvalid, QuotaReached
from penstock.limits import AS_OF_UNREAD_SECONDS_MAX
from penstock.logstore.followed_log import ServedLog
from penstock.model import TableName
from penstock.serve.access import Account, account_of
from penstock.serve.http.answers import StreamedAnswer, ending_on_disconnect
from penstock.serve.http.definitions import columns_of_definitions
from penstock.serve.http.query import log_of
from penstock.serve.masking import hiding_texts
from penstock.serve.own_log import OwnSource
from penstock.serve.served import Served
from penstock.serve.threads import Threads, run_in
from penstock.source.daemon_client import COMPLETE_SINCE_HEADER, POSITION_HEADER
from penstock.source.logged_tables import prove_table_known
from penstock.source.row_history import plain_value
from penstock.source.table_as_of import RowAsOf, TableAsOf
from penstock.source.table_export import FORMATS, export_rows

_log = structlog.get_logger(__name__)

_ROWS_MAX = 5000

_Answer = TypeVar("_Answer")


class AsOfRequest(BaseModel):
    """A request for a table at one moment: the table, the moment, and the format of the response."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    table: str = Field(description="The table: shop.orders")
    at: str = Field(description="A position, a GTID (after its transaction), or a time (before it)")
    format: Literal["json", "jsonl", "csv", "parquet"] = Field(
        default="json", description="json: an object with the first rows; the others: a file with all of them"
    )
    limit: int = Field(default=200, ge=0, le=_ROWS_MAX, description="The rows of the object")


def routes(served: Served) -> list[Route]:
    """Return the route of tables as of a moment."""
    path = "/v1/instances/{instance}/as-of"
    handler = ending_on_disconnect(functools.partial(_as_of, served, _Turn()))
    return [Route(path, handler, methods=["POST"], name="_as_of")]


class _TurnLost(Exception):
    """Raised when another client has taken the turn."""


class _Turn:
    """The turn to read a table. Only one request reads at a time, because the table's rows are in memory.
    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._limit: asyncio.Timeout | None = None
        # How long the client has left rows unread in total, and the start of the current wait.
        self._unread_seconds = 0.0
        self._unread_since: float | None = None

    @asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold the turn while the block runs. If a client that reads too slowly has the turn, take it from
        that client.

        Raises QuotaReached if another client has the turn and reads fast enough, and _TurnLost once the turn
        is taken from this client.
        """
        if self._lock.locked():
            if self._limit is None or self.unread_seconds() < AS_OF_UNREAD_SECONDS_MAX:
                raise QuotaReached(
                    "a table is being read as of a moment, and this daemon reads one at a time",
                    hint="Try again in a moment; or read the log's folder: penstock as-of --log",
                )
            self._limit.reschedule(asyncio.get_running_loop().time())
            self._limit = None
        async with self._lock:
            limit = asyncio.timeout(None)
            self._unread_seconds, self._unread_since = 0.0, None
            try:
                async with limit:
                    self._limit = limit
                    yield
            except TimeoutError as problem:
                raise _TurnLost if limit.expired() else problem from None
            finally:
                self._limit = None

    def unread_seconds(self) -> float:
        """Return for how long the rows have waited for the client."""
        waiting = 0.0 if self._unread_since is None else time.monotonic() - self._unread_since
        return self._unread_seconds + waiting

    async def send(self, send: Send, piece: bytes) -> None:
        """Send a piece, and count the time until the client has read enough to receive it."""
        self._unread_since = time.monotonic()
        try:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        finally:
            self._unread_seconds, self._unread_since = self.unread_seconds(), None


async def _as_of(served: Served, turn: _Turn, request: Request) -> Response:
    try:
        wanted = AsOfRequest.model_validate_json(await request.body())
    except ValidationError as problem:
        details = "; ".join(error["msg"] for error in problem.errors(include_url=False, include_input=False))
        raise OptionInvalid(
            f"the body of the request cannot be used: {details}",
            hint='Send {"table": "shop.orders", "at": "2026-11-21T08:00:00Z"}',
        ) from problem
    table, instance, account = (
        TableName.parse(wanted.table),
        request.path_params["instance"],
        account_of(request),
    )
    account.prove_reads_table(instance, table)
    account.prove_reads_every_row("tables as of a moment")
    begin = functools.partial(_Reading, log_of(served, request), instance, table, account, wanted)
    return _AsOfAnswer(begin, FORMATS.get(wanted.format, "application/json"), served.threads, turn)


class _AsOfAnswer(StreamedAnswer):
    """The rows, read and encoded at the client's pace, while the client has the turn."""

    def __init__(
        self,
        begin: "Callable[[], _Reading]",
        media_type: str,
        threads: Threads,
        turn: _Turn,
    ) -> None:
        super().__init__(media_type=media_type)
        # The length is not known before the last row.
        del self.headers["content-length"]
        self._begin = begin
        self._threads = threads
        self._turn = turn

    async def stream(self, send: Send) -> None:
        """Send the rows. Before the first row, raises QuotaReached, or an error from reading the log.

        If a later error occurs, the response is left incomplete, so the client notices that rows are missing.
        """
        try:
            async with self._turn.taken():
                reading = self._begin()
                pieces = await self._run(reading, reading.read)
                self.headers.update(reading.headers())
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                while (piece := await self._run(reading, next, pieces, None)) is not None:
                    await self._turn.send(send, piece)
        except _TurnLost:
            _log.warning("a client reads a table as of a moment too slowly, and gives way to another one")
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _run(self, reading: "_Reading", work: Callable[..., _Answer], *arguments: Any) -> _Answer:
        """Run work in a thread. If the client disconnects, wait for the work to end, because it uses memory
        until then.
        """
        running = asyncio.ensure_future(run_in(self._threads.searching, work, *arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            reading.stop()
            await asyncio.gather(running, return_exceptions=True)
            raise


class _Reading:
    """The read of one request, which runs in threads, one at a time."""

    def __init__(
        self, log: ServedLog, instance: str, table: TableName, account: Account, wanted: AsOfRequest
    ) -> None:
        self._log = log
        self._table = table
        self._account = account
        self._masked = account.masking.columns(table)
        self._wanted = wanted
        self._source = OwnSource(instance, log)
        self._as_of = TableAsOf(log, self._source, table, self._masked)

    def stop(self) -> None:
        """End the reading soon."""
        self._as_of.stop()

    def read(self) -> Iterator[bytes]:
        """Read the log, and return the pieces of the response.

        Raises AccessDenied for a mask that hides no column, OptionInvalid for an unknown table.
        """
        as_of = self._as_of
        with closing(self._source), hiding_texts(hides=bool(self._masked)):
            as_of.read(self._wanted.at)
            if as_of.schema is None:
                prove_table_known(self._source, self._table, self._account.may_read_table)
            else:
                masking = self._account.masking
                definitions = columns_of_definitions(self._log, self._table, masking)
                masking.prove_all_apply(self._table, as_of.logged_columns, definitions)
        if self._wanted.format in FORMATS:
            return export_rows(as_of.rows, as_of.schema, self._wanted.format)
        return self._object()

    def headers(self) -> dict[str, str]:
        """Return headers with the details that a file itself does not contain."""
        since = self._as_of.complete_since
        return {
            POSITION_HEADER: quote(str(self._as_of.position)),
            **({} if since is None else {COMPLETE_SINCE_HEADER: quote(str(since))}),
        }

    def _object(self) -> Iterator[bytes]:
        as_of = self._as_of
        since = as_of.complete_since
        shown = {
            "table": str(self._table),
            "position": str(as_of.position),
            "complete_since": None if since is None else str(since),
            "key": list(as_of.key),
            "columns": list(as_of.columns),
            "rows": [_row_to_json(row) for row in itertools.islice(as_of.rows(), self._wanted.limit)],
            "count": as_of.count,
        }
        yield json.dumps(shown, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _row_to_json(row: RowAsOf) -> dict[str, Any]:
    return {
        "values": plain_value(row.values),
        "missing": list(row.missing),
        "position": str(row.position),
        "time_us": row.time_us,
        "is_later": row.is_later,
    }
