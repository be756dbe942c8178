# SPDX-License-Identifier: Apache-2.0
"""Changes over HTTP: what a subscriber asks for, streamed as frames of Arrow or JSON, decoded once for all.

An answer ends by itself: behind its credit, or when nothing has come for a while. The next request goes on
from the last position frame, here or at another daemon.
"""

import asyncio
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from penstock.errors import OptionInvalid, PenstockError
from penstock.model import Position, TablePatterns
from penstock.serve.access import Account, account_of
from penstock.serve.answers import StreamedAnswer
from penstock.serve.changes_request import ChangesRequest, start_of
from penstock.serve.openapi import description
from penstock.serve.pieces import Piece, View
from penstock.serve.predicate import Predicate
from penstock.serve.problems import problem_body
from penstock.serve.served import Served, ServedInstance
from penstock.serve.sieve import ShardSet, Sieve, Sifted, row_parts, sieve_of
from penstock.serve.subscribers import Subscriber
from penstock.serve.subscription import Cursor, resolve_start
from penstock.serve.threads import run_in
from penstock.serve.wire.change_frames import (
    MEDIA_TYPE,
    arrow_stream,
    compressed,
    frame_head,
    framed,
    message_bytes,
)

_log = structlog.get_logger(__name__)

# Everything before this position was consumed for good, in the shards that are asked for.
CONSUMED_HEADER = "Penstock-Consumed"

# Payloads up to this size are put together with what stands around them, which saves calls.
_GATHERED_BYTES_MAX = 64 * 1024

# More than this is encoded in a thread, so that others are not kept waiting.
_ENCODED_AT_ONCE_BYTES_MAX = 256 * 1024


@dataclass(frozen=True)
class _Frame:
    """A batch on its way out: the frame up to its payload, and the payload."""

    head: bytes
    payload: memoryview
    rows: int


def routes(served: Served) -> list[Route]:
    """Return the routes of subscribers."""
    return [
        Route(
            "/v1/instances/{instance}/changes",
            functools.partial(_changes, served),
            methods=["POST"],
            name="_changes",
        ),
        Route(
            "/v1/subscribers", functools.partial(_subscribers, served), methods=["GET"], name="_subscribers"
        ),
        Route("/v1/openapi.json", _openapi, methods=["GET"], name="_openapi"),
    ]


async def _openapi(request: Request) -> Response:
    return JSONResponse(description())


async def _subscribers(served: Served, request: Request) -> Response:
    account = account_of(request)
    shown = [one.to_json() for one in served.subscribers.all() if account.may_read(one.instance)]
    return JSONResponse({"subscribers": shown})


async def _changes(served: Served, request: Request) -> Response:
    """Answer with frames. What is wrong before the first of them is told as a problem."""
    name = request.path_params["instance"]
    instance = served.instance(name)
    body = await request.body()
    account = account_of(request)
    asked, tables, where = await run_in(served.threads.compiling, _read, body, account, instance)
    pieces = served.pieces(name)
    view = _view(asked, tables, served.shard_columns.get(name, {}))
    if view.shape == "canal_flat" and name in served.canal_gtid:
        view = replace(view, with_gtid_set=True)
    sieve = sieve_of(
        view,
        shards=ShardSet(asked.shards.count, frozenset(asked.shards.of)) if asked.shards else None,
        where=where,
    )
    if (consumed := request.headers.get(CONSUMED_HEADER)) is not None:
        _note_consumed(served, name, asked, account, Position.parse(consumed))
    started = await resolve_start(pieces, start_of(asked.start))
    until = None if asked.until is None else start_of(asked.until)
    cursor = Cursor(pieces, sieve.view, started, until, in_parts=sieve.takes_parts)
    first = await cursor.next(0.0)
    following = functools.partial(
        served.subscribers.following,
        "changes",
        name,
        asked.subscriber,
        account=account.name,
        shard_count=asked.shards.count if asked.shards else None,
        shards=asked.shards.of if asked.shards else (),
    )
    return ChangesAnswer(asked, cursor, sieve, first, following)


def _note_consumed(
    served: Served, instance: str, asked: ChangesRequest, account: Account, position: Position
) -> None:
    """Have a subscription hold the log from where it has consumed everything."""
    consumer, _, _ = asked.subscriber.partition("/")
    if not consumer:
        return
    count, shards = (asked.shards.count, asked.shards.of) if asked.shards is not None else (1, [0])
    served.consumers.note(instance, consumer, position, account, shard_count=count, shards=shards)


def _read(
    body: bytes, account: Account, instance: ServedInstance
) -> tuple[ChangesRequest, TablePatterns, Predicate | None]:
    """Return a request, the tables that it may see, and its condition. Runs in a thread: it may take a while.

    Raises OptionInvalid, AccessDenied.
    """
    asked = ChangesRequest.parse(body)
    include, exclude = asked.tables, asked.exclude
    if not (include or exclude):
        shown = instance.status()
        include, exclude = list(shown["tables"]), list(shown["exclude_tables"])
    subscription = asked.subscriber.partition("/")[0] or None
    tables = account.readable(instance.name, subscription, TablePatterns(include, exclude))
    return asked, tables, None if asked.where is None else Predicate.compile(asked.where)


def _view(asked: ChangesRequest, tables: TablePatterns, shard_columns: Mapping[str, Sequence[str]]) -> View:
    changes = None
    if asked.changes is not None:
        wanted = set(asked.changes)
        if "update" in wanted:
            wanted = (wanted - {"update"}) | {"update_preimage", "update_postimage"}
        changes = tuple(sorted(wanted))
    columns = None if asked.columns is None else tuple(asked.columns)
    if asked.format != "arrow" and columns is not None:
        raise OptionInvalid(
            f"columns are for format arrow: a message of {asked.format} shows whole rows",
            hint="Leave columns out, or take format arrow",
        )
    # What a subscriber says of a table goes before what the instance's settings say.
    own: Mapping[str, Sequence[str]] = asked.shards.columns if asked.shards else {}
    keys = {**own, **{pattern: names for pattern, names in shard_columns.items() if pattern not in own}}
    return View(
        "typed" if asked.format == "arrow" else asked.format,
        tables,
        columns,
        changes,
        tuple((pattern, tuple(names)) for pattern, names in keys.items()),
    )


class ChangesAnswer(StreamedAnswer):
    """The frames of one answer, sent as the client takes them."""

    def __init__(
        self,
        asked: ChangesRequest,
        cursor: Cursor,
        sieve: Sieve,
        first: Piece | None,
        following: Callable[[], AbstractContextManager[Subscriber]],
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._asked = asked
        self._cursor = cursor
        self._sieve = sieve
        self._first = first
        self._following = following
        self._codec = None if asked.compression == "none" else asked.compression
        # Updates of the piece in hand that moved a row from another shard.
        self._moved = 0

    async def stream(self, send: Send) -> None:
        """Send frames until the credit is used up, or nothing has come for a while."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with self._following() as subscriber:
            try:
                why = await self._send_pieces(send, subscriber)
                last = {"kind": "end", "why": why, "bytes": 0}
            except PenstockError as problem:
                last = {"kind": "problem", **problem_body(problem), "bytes": 0}
        await send({"type": "http.response.body", "body": frame_head(last), "more_body": False})

    async def _send_pieces(self, send: Send, subscriber: Subscriber) -> str:
        asked, cursor = self._asked, self._cursor
        credit = asked.credit_bytes
        piece, self._first = self._first, None
        while True:
            if piece is None:
                piece = await cursor.next(asked.wait_seconds)
            if piece is None:
                if cursor.ended:
                    return "until"
                return "closing" if cursor.pieces.arrivals.closing else "wait"
            cursor.prefetch()
            size, rows = await self._send_piece(send, piece)
            subscriber.sent(size, rows, piece.end)
            subscriber.moved += self._moved
            credit -= size
            # Inside a transaction there is no place to go on from.
            may_end, piece = piece.is_whole, None
            if credit <= 0 and may_end:
                return "credit"

    async def _send_piece(self, send: Send, piece: Piece) -> tuple[int, int]:
        """Send a piece's batches and its position; return how many bytes and rows that was."""
        size = rows = 0
        held = bytearray()
        for frame in await self._frames(piece):
            rows += frame.rows
            size += len(frame.head) + frame.payload.nbytes
            held += frame.head
            if frame.payload.nbytes < _GATHERED_BYTES_MAX:
                held += frame.payload
                continue
            # Large ones are not copied, and begin a chunk of their own.
            await _send_body(send, bytes(held))
            held.clear()
            await _send_body(send, frame.payload)
        last = self._position(piece) if piece.is_whole else b""
        await _send_body(send, bytes(held + last))
        return size + len(last), rows

    async def _frames(self, piece: Piece) -> list[_Frame]:
        """Return the frames of a piece's batches, the same ones for all who want everything as it is."""
        if not self._sieve.is_open:
            return await self._encode(piece)
        key = "frames", self._codec, self._asked.batch_rows
        found: list[_Frame] | asyncio.Future[list[_Frame]] | None = piece.derived.get(key)
        if found is None:
            if piece.bytes <= _ENCODED_AT_ONCE_BYTES_MAX:
                return await self._encode_for_all(piece, key)
            # Many get a piece at the same moment: the first has it encoded, and the others wait for that.
            found = piece.derived[key] = asyncio.ensure_future(self._encode_for_all(piece, key))
        return await asyncio.shield(found) if isinstance(found, asyncio.Future) else found

    async def _encode_for_all(self, piece: Piece, key: Any) -> list[_Frame]:
        """Encode a piece, and keep the frames with it where others may want them."""
        pieces = self._cursor.pieces
        try:
            frames = await self._encode(piece)
        finally:
            piece.derived.pop(key, None)
        if pieces.is_shared(self._sieve.view, piece):
            piece.derived[key] = frames
            grown = sum(len(one.head) + one.payload.nbytes for one in frames)
            pieces.keep(self._sieve.view, piece, grown)
        return frames

    async def _encode(self, piece: Piece) -> list[_Frame]:
        pieces = self._cursor.pieces
        passing = await self._sieve.passing(pieces, piece)
        kept = self._sieve.kept_bytes(piece)
        if piece.bytes > _ENCODED_AT_ONCE_BYTES_MAX:
            frames = await pieces.in_thread(self._encoded, piece, passing)
        else:
            frames = self._encoded(piece, passing)
        # Each number of shards has copies of its own, which memory has to count.
        pieces.keep(self._sieve.view, piece, self._sieve.kept_bytes(piece) - kept)
        return frames

    def _encoded(self, piece: Piece, passing: Any) -> list[_Frame]:
        sifted = self._sieve.sift(piece, passing)
        self._moved = sum(one.moved for one in sifted)
        if not self._sieve.view.is_typed:
            return [frame for one in sifted for frame in self._encoded_messages(one)]
        return [
            _frame(one, part.num_rows, arrow_stream(part, self._codec))
            for one in sifted
            for part in row_parts(one.arrow, self._asked.batch_rows)
        ]

    def _encoded_messages(self, one: Sifted) -> Iterator[_Frame]:
        for at in range(0, one.arrow.num_rows, self._asked.batch_rows):
            part = one.arrow.slice(at, self._asked.batch_rows)
            content = message_bytes(part.column("value"))
            if content.nbytes:
                rows = int(part.column("rows").to_numpy().sum())
                plain = content.nbytes
                content = content if self._codec is None else compressed(content, self._codec)
                yield _frame(one, rows, content, plain_bytes=plain)

    def _position(self, piece: Piece) -> bytes:
        cursor = self._cursor
        shared: str | None = piece.derived.get("position")
        if shared is None:
            begun = cursor.pieces.log.epochs.get(piece.end.epoch)
            told = {
                "kind": "position",
                "position": str(piece.end),
                "gtid_set": piece.gtid_set,
                "server_key": "" if begun is None else begun.server_key,
                "time_us": piece.time_us,
            }
            # What is the same for all is written once; the rest follows.
            shared = piece.derived["position"] = json.dumps(told, separators=(",", ":"))[:-1]
        return framed(f'{shared},"behind_bytes":{cursor.behind_bytes()},"bytes":0}}'.encode())


def _frame(one: Sifted, rows: int, payload: memoryview, **more: Any) -> _Frame:
    head = {
        "kind": "batch",
        "table": one.batch.table,
        "rows": rows,
        "bytes": payload.nbytes,
        "schema_version": one.batch.schema_version,
        "key": list(one.batch.primary_key),
        **more,
    }
    return _Frame(frame_head(head), payload, rows)


async def _send_body(send: Send, content: bytes | memoryview) -> None:
    """Send a part of an answer once the client has room for it."""
    if len(content):
        await send({"type": "http.response.body", "body": content, "more_body": True})
