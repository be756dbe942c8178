# SPDX-License-Identifier: Apache-2.0
"""A table as of a moment over HTTP: `POST /v1/instances/{instance}/as-of`, as JSON or as a file."""

import asyncio
import functools
import itertools
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from penstock.errors import OptionInvalid, QuotaReached
from penstock.logstore.followed_log import ServedLog
from penstock.model import TableName
from penstock.serve.access import account_of
from penstock.serve.http.answers import ending_on_disconnect
from penstock.serve.http.query import log_of
from penstock.serve.masking import hiding_texts
from penstock.serve.own_log import OwnSource
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.source.row_history import plain_value
from penstock.source.table_as_of import RowAsOf, TableAsOf
from penstock.source.table_export import FORMATS, export_rows

_ROWS_MAX = 5000


class AsOfRequest(BaseModel):
    """The table, the moment, and the shape of the response."""

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
    handler = ending_on_disconnect(functools.partial(_as_of, served, asyncio.Semaphore(1)))
    return [Route(path, handler, methods=["POST"], name="_as_of")]


async def _as_of(served: Served, running: asyncio.Semaphore, request: Request) -> Response:
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
    log = log_of(served, request)
    if running.locked():
        raise QuotaReached(
            "a table is being read as of a moment, and this daemon reads one at a time",
            hint="Try again in a moment; or read the log's folder: penstock as-of --log",
        )
    async with running:
        reading = _Reading(log, instance, table, account.masking.columns(table))
        try:
            return await run_in(served.threads.searching, reading.respond, wanted)
        finally:
            # If the client has left, the thread ends soon.
            reading.stop()


class _Reading:
    """One request, in a thread."""

    def __init__(self, log: ServedLog, instance: str, table: TableName, masked: frozenset[str]) -> None:
        self._table = table
        self._masked = masked
        self._source = OwnSource(instance, log)
        self._as_of = TableAsOf(log, self._source, table, masked)

    def stop(self) -> None:
        self._as_of.stop()

    def respond(self, wanted: AsOfRequest) -> Response:
        """Read the log, and return the response."""
        as_of = self._as_of
        try:
            with hiding_texts(self._masked):
                as_of.read(wanted.at)
        finally:
            self._source.close()
        if wanted.format in FORMATS:
            content = export_rows(as_of.rows(), as_of.schema, wanted.format)
            return Response(content, media_type=FORMATS[wanted.format])
        rows = as_of.rows()
        first = [_row_to_json(row) for row in itertools.islice(rows, wanted.limit)]
        return JSONResponse(
            {
                "table": str(self._table),
                "position": str(as_of.position),
                "complete_since": None if as_of.complete_since is None else str(as_of.complete_since),
                "key": list(as_of.key),
                "columns": list(as_of.columns),
                "rows": first,
                "count": len(first) + sum(1 for _ in rows),
            }
        )


def _row_to_json(row: RowAsOf) -> dict[str, Any]:
    return {
        "values": plain_value(row.values),
        "missing": list(row.missing),
        "position": str(row.position),
        "time_us": row.time_us,
        "is_later": row.is_later,
    }
