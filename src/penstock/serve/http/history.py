# SPDX-License-Identifier: Apache-2.0
"""The history of a row over HTTP: `POST /v1/instances/{instance}/history`, as lines of JSON, newest first.

The first line lists the readers with a hold on the log: pipelines, subscriptions, other named consumers. Each
change names the readers that had not confirmed it when the search began. If the client disconnects, the
search ends.
"""

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Send

from penstock.errors import PenstockError, QuotaReached
from penstock.limits import HISTORIES_MAX
from penstock.logstore.followed_log import ServedLog
from penstock.logstore.holds import Hold
from penstock.model import TableName
from penstock.serve.access import Account, account_of
from penstock.serve.http.answers import StreamedAnswer, ending_on_disconnect
from penstock.serve.http.definitions import columns_of_definitions
from penstock.serve.http.holds import visible_holds
from penstock.serve.http.json_request import JsonRequest
from penstock.serve.http.query import log_of
from penstock.serve.masking import MaskedColumns, mask_part
from penstock.serve.own_log import OwnSource
from penstock.serve.problems import problem_body
from penstock.serve.served import Served
from penstock.serve.threads import Threads, run_in
from penstock.source.logged_tables import prove_table_known
from penstock.source.row_history import HistoryPart, Progress, RowChange, RowHistory, RowKey, part_to_json

MEDIA_TYPE = "application/x-ndjson"

_KEY_VALUES_MAX = 64


class HistoryRequest(JsonRequest):
    """A request for the history of a row: the row, and how many of its changes to return."""

    table: str = Field(description="The table: shop.orders")
    key: list[str] = Field(
        min_length=1, max_length=_KEY_VALUES_MAX, description="The values of the key, as text"
    )
    columns: list[str] = Field(
        default_factory=list,
        max_length=_KEY_VALUES_MAX,
        description="Their columns; default: the primary key",
    )
    limit: int | None = Field(default=None, ge=1, description="Stop after this many changes")


def routes(served: Served) -> list[Route]:
    """Return the route of histories."""
    histories = _Histories()
    path = "/v1/instances/{instance}/history"
    handler = ending_on_disconnect(functools.partial(_history, served, histories))
    return [Route(path, handler, methods=["POST"], name="_history")]


class _Histories:
    """The running searches. Belongs to the event loop."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def searching(self) -> Iterator[None]:
        """Count a search inside the block. Raises QuotaReached."""
        if self._count >= HISTORIES_MAX:
            raise QuotaReached(
                f"{HISTORIES_MAX} histories are being searched, which is all this daemon does at once",
                hint="Try again in a moment; or search the log's folder: penstock history --log",
            )
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


async def _history(served: Served, histories: _Histories, request: Request) -> Response:
    instance = request.path_params["instance"]
    wanted = await HistoryRequest.read(request, '{"table": "shop.orders", "key": ["7"]}')
    table = TableName.parse(wanted.table)
    account = account_of(request)
    account.prove_reads_table(instance, table)
    account.prove_reads_every_row("histories")
    log = log_of(served, request)
    masked = account.masking.columns(table)
    definitions = await run_in(
        served.threads.definitions, columns_of_definitions, log, table, account.masking
    )
    key = RowKey(
        table,
        tuple(wanted.key),
        tuple(wanted.columns),
        masked,
        (lambda columns: account.masking.prove_all_apply(table, columns, definitions)) if masked else None,
    )
    history = RowHistory(log, lambda: OwnSource(instance, log), key)
    readers = await served.threads.search(visible_holds, account, log)
    prove_known = functools.partial(_prove_known, log, instance, table, account)
    return _HistoryAnswer(history, wanted.limit, readers, served.threads, histories, masked, prove_known)


def _prove_known(log: ServedLog, instance: str, table: TableName, account: Account) -> None:
    with closing(OwnSource(instance, log)) as source:
        prove_table_known(source, table, account.may_read_table)


class _HistoryAnswer(StreamedAnswer):
    """The parts of a history as lines of JSON. The last line is `end` or `problem`.

    `prove_known` is called before the end of an empty history, and may raise instead.
    """

    def __init__(
        self,
        history: RowHistory,
        limit: int | None,
        readers: Sequence[Hold],
        threads: Threads,
        histories: _Histories,
        masked: MaskedColumns,
        prove_known: Callable[[], None],
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        # The length is not known before the search ends.
        del self.headers["content-length"]
        self._history = history
        self._limit = limit
        self._readers = readers
        self._threads = threads
        self._histories = histories
        self._masked = masked
        self._prove_known = prove_known

    async def stream(self, send: Send) -> None:
        """Send the history as it is searched. Raises QuotaReached before the start."""
        parts = self._history.parts()
        with self._histories.searching():
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                last = await self._send_parts(send, parts)
            except PenstockError as problem:
                last = mask_part({"kind": "problem", **problem_body(problem)}, self._masked)
            finally:
                # The range that is being decoded has to finish first, so close the search outside of the
                # event loop.
                self._history.stop()
                self._threads.reading.submit(_close, parts)
        await send({"type": "http.response.body", "body": _line(last), "more_body": False})

    async def _send_parts(self, send: Send, parts: Iterator[HistoryPart]) -> dict[str, Any]:
        stands = [{"reader": reader.name, "position": str(reader.position)} for reader in self._readers]
        await send(
            {
                "type": "http.response.body",
                "body": _line({"kind": "readers", "readers": stands}),
                "more_body": True,
            }
        )
        changes = 0
        while (part := await run_in(self._threads.reading, next, parts, None)) is not None:
            line = mask_part(part_to_json(part), self._masked)
            if isinstance(part, RowChange):
                line["pending"] = [
                    reader.name for reader in self._readers if reader.position <= part.position
                ]
            await send({"type": "http.response.body", "body": _line(line), "more_body": True})
            changes += not isinstance(part, Progress)
            if self._limit is not None and changes >= self._limit:
                return {"kind": "end", "why": "limit"}
        if not changes:
            await run_in(self._threads.definitions, self._prove_known)
        return {"kind": "end", "why": "whole"}


def _close(parts: Any) -> None:
    try:
        parts.close()
    except ValueError:
        # A thread is still running the search, and will notice that the search is stopped.
        return


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
