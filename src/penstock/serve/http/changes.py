# SPDX-License-Identifier: Apache-2.0
"""Serves changes over HTTP. A response is a stream of Arrow or JSON frames. Changes are decoded once for all
followers of a log.

A response ends by itself: once its credit is used up, after a while without changes, or, to a named consumer,
after `CONSUMER_RESPONSE_SECONDS`. The next request continues from the last position frame, at this or another
daemon, and reports the consumer's checkpoint, at which its hold on the log is placed.
"""

import asyncio
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow
import structlog
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Send

from penstock.errors import AccessDenied, OptionInvalid, PenstockError
from penstock.limits import CONSUMER_RESPONSE_SECONDS, MIB, PIECE_BYTES_AT_ONCE
from penstock.model import Position, TableName, TablePatterns
from penstock.predicate import Predicate
from penstock.serve.access import Account, account_of
from penstock.serve.http.answers import StreamedAnswer, ending_on_disconnect
from penstock.serve.http.change_frames import (
    MEDIA_TYPE,
    arrow_stream,
    compact_json,
    compressed,
    frame_head,
    framed,
    message_bytes,
)
from penstock.serve.http.changes_request import ChangesRequest, start_of
from penstock.serve.http.openapi import description
from penstock.serve.masking import hide_problem, hiding_texts, without_masked
from penstock.serve.pieces import Piece, View
from penstock.serve.problems import problem_body
from penstock.serve.served import Served, ServedInstance
from penstock.serve.sieve import Sieve, Sifted, sieve_of
from penstock.serve.subscribers import Subscriber
from penstock.serve.subscription import Cursor, resolve_start
from penstock.serve.threads import run_in
from penstock.source.reading import Batch
from penstock.source.rows_filter import ShardSet, row_parts

_log = structlog.get_logger(__name__)

# Everything before this position is permanently consumed in the requested shards.
CONSUMED_HEADER = "Penstock-Consumed"

# Whether the rows of a batch may be ordered by shard. The rows of each shard always keep the commit order.
ROW_ORDER_HEADER, ROWS_BY_SHARD = "Penstock-Row-Order", "shard"

# Ordering fewer rows by shard takes longer than the subscriber needs for a few more parts of a batch.
_GROUPED_ROWS_MIN = 5

# Payloads up to this size are joined with the surrounding bytes, which saves calls.
_GATHERED_BYTES_MAX = 64 * 1024

# How many of the latest warnings about masks are remembered, so that they are not repeated.
_WARNINGS_MAX = 256

# Larger pieces are encoded in a thread, so that other clients do not wait.
_ENCODED_AT_ONCE_BYTES_MAX = 256 * 1024
# A piece that spans few bytes of the log is encoded at once up to this size. Its batches may have slices of
# constant columns that are as long as the longest batch before them, and count their whole memory.
_SHORT_BYTES_MAX = 8 * MIB


@dataclass(frozen=True)
class _Frame:
    """An encoded batch: the frame up to its payload, and the payload."""

    head: bytes
    payload: memoryview
    rows: int


def routes(served: Served) -> list[Route]:
    """Return the routes of subscribers."""
    return [
        Route(
            "/v1/instances/{instance}/changes",
            ending_on_disconnect(functools.partial(_changes, served)),
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
    shown = [
        subscriber.to_json()
        for subscriber in served.subscribers.all()
        if account.may_read(subscriber.instance)
    ]
    return JSONResponse({"subscribers": shown})


async def _changes(served: Served, request: Request) -> Response:
    """Respond with frames. Errors before the first frame are reported as problem documents."""
    name = request.path_params["instance"]
    instance = served.instance(name)
    body = await request.body()
    account = account_of(request)
    changes_request, tables, where = await run_in(served.threads.compiling, _read, body, account, instance)
    pieces = served.pieces(name)
    view = _view(changes_request, tables, served.shard_columns.get(name, {}))
    if view.shape == "canal_flat" and name in served.canal_gtid:
        view = replace(view, with_gtid_set=True)
    sieve = sieve_of(
        view,
        shards=ShardSet(changes_request.shards.count, frozenset(changes_request.shards.of))
        if changes_request.shards
        else None,
        where=where,
        conditions=account.row_conditions,
    )
    if (consumed := request.headers.get(CONSUMED_HEADER)) is not None:
        _note_consumed(served, name, changes_request, account, Position.parse(consumed))
    # Errors in the first piece are reported as problem documents, before anything is streamed.
    with hiding_texts(hides=not account.sees_whole_rows):
        started = await resolve_start(pieces, start_of(changes_request.start))
        until = None if changes_request.until is None else start_of(changes_request.until)
        cursor = Cursor(pieces, sieve.view, started, until, in_parts=sieve.takes_parts)
        first = await cursor.next(0.0)
    following = functools.partial(
        served.subscribers.following,
        "changes",
        name,
        changes_request.subscriber,
        account=account.name,
        shard_count=changes_request.shards.count if changes_request.shards else None,
        shards=changes_request.shards.of if changes_request.shards else (),
    )
    groups_shards = request.headers.get(ROW_ORDER_HEADER) == ROWS_BY_SHARD
    return ChangesAnswer(
        changes_request, cursor, sieve, first, following, account, groups_shards=groups_shards
    )


def _note_consumed(
    served: Served, instance: str, changes_request: ChangesRequest, account: Account, position: Position
) -> None:
    """Make a subscription hold the log from its consumed position on."""
    consumer, _, _ = changes_request.subscriber.partition("/")
    if not consumer:
        return
    count, shards = (
        (changes_request.shards.count, changes_request.shards.of)
        if changes_request.shards is not None
        else (1, [0])
    )
    served.consumers.note(instance, consumer, position, account, shard_count=count, shards=shards)


def _read(
    body: bytes, account: Account, instance: ServedInstance
) -> tuple[ChangesRequest, TablePatterns, Predicate | None]:
    """Parse a request; return it with the tables that it may see, and its condition.

    Runs in a thread, because this may take a while. Raises OptionInvalid, AccessDenied.
    """
    changes_request = ChangesRequest.parse(body)
    include, exclude = changes_request.tables, changes_request.exclude
    if not (include or exclude):
        shown = instance.status()
        include, exclude = list(shown["tables"]), list(shown["exclude_tables"])
    subscription = changes_request.subscriber.partition("/")[0] or None
    tables = account.readable(instance.name, subscription, TablePatterns(include, exclude))
    where = None if changes_request.where is None else Predicate.compile(changes_request.where)
    _prove_permitted(changes_request, account, tables, where)
    return changes_request, tables, where


def _prove_permitted(
    changes_request: ChangesRequest, account: Account, tables: TablePatterns, where: Predicate | None
) -> None:
    """Raise AccessDenied if a request shows hidden values, or filters or shards rows by masked values."""
    if changes_request.format != "arrow":
        account.prove_reads_whole_rows(f"messages of the format {changes_request.format}")
    account.prove_sees_columns(changes_request.columns or (), tables, "columns")
    account.prove_sees_columns(where.columns if where is not None else (), tables, "where")
    if changes_request.shards is not None:
        for pattern, names in changes_request.shards.columns.items():
            account.prove_sees_columns(names, TablePatterns([pattern]), "shards")


def _view(
    changes_request: ChangesRequest, tables: TablePatterns, shard_columns: Mapping[str, Sequence[str]]
) -> View:
    changes = None
    if changes_request.changes is not None:
        wanted = set(changes_request.changes)
        if "update" in wanted:
            wanted = (wanted - {"update"}) | {"update_preimage", "update_postimage"}
        changes = tuple(sorted(wanted))
    columns = None if changes_request.columns is None else tuple(changes_request.columns)
    if changes_request.format != "arrow" and columns is not None:
        raise OptionInvalid(
            f"columns are for format arrow: a message of {changes_request.format} shows whole rows",
            hint="Leave columns out, or take format arrow",
        )
    # The subscriber's shard columns take precedence over those of the instance's settings.
    own: Mapping[str, Sequence[str]] = changes_request.shards.columns if changes_request.shards else {}
    keys = {**own, **{pattern: names for pattern, names in shard_columns.items() if pattern not in own}}
    return View(
        "typed" if changes_request.format == "arrow" else changes_request.format,
        tables,
        columns,
        changes,
        tuple((pattern, tuple(names)) for pattern, names in keys.items()),
    )


class ChangesAnswer(StreamedAnswer):
    """Streams the frames of one response, as fast as the client reads them."""

    def __init__(
        self,
        changes_request: ChangesRequest,
        cursor: Cursor,
        sieve: Sieve,
        first: Piece | None,
        following: Callable[[], AbstractContextManager[Subscriber]],
        account: Account,
        *,
        groups_shards: bool = False,
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        del self.headers["content-length"]
        self._request = changes_request
        self._cursor = cursor
        self._sieve = sieve
        self._first = first
        self._following = following
        self._groups_shards = groups_shards
        self._masking = account.masking
        self._hides_texts = not account.sees_whole_rows
        self._codec = None if changes_request.compression == "none" else changes_request.compression
        # The number of updates in the current piece that moved a row from another shard.
        self._moved = 0

    async def stream(self, send: Send) -> None:
        """Send frames until the credit is used up, or no changes arrive for a while."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        with self._following() as subscriber:
            try:
                why = await self._send_pieces(send, subscriber)
                last = {"kind": "end", "why": why, "bytes": 0}
            except PenstockError as problem:
                body = {"kind": "problem", **problem_body(problem)}
                last = {**(hide_problem(body) if self._hides_texts else body), "bytes": 0}
        await send({"type": "http.response.body", "body": frame_head(last), "more_body": False})

    async def _send_pieces(self, send: Send, subscriber: Subscriber) -> str:
        changes_request, cursor = self._request, self._cursor
        credit = changes_request.credit_bytes
        ends_at = time.monotonic() + CONSUMER_RESPONSE_SECONDS if changes_request.subscriber else math.inf
        piece, self._first = self._first, None
        may_end = False
        while True:
            if piece is None:
                seconds = changes_request.wait_seconds
                if may_end:
                    seconds = max(0.0, min(seconds, ends_at - time.monotonic()))
                piece = await cursor.next(seconds)
            if piece is None:
                if cursor.ended:
                    return "until"
                return "closing" if cursor.pieces.arrivals.closing else "wait"
            cursor.prefetch()
            size, rows = await self._send_piece(send, piece)
            subscriber.sent(size, rows, piece.end, piece.time_us)
            subscriber.moved += self._moved
            credit -= size
            # A response must not end inside a transaction, where no position exists from which to continue.
            may_end, piece = piece.is_whole, None
            if credit <= 0 and may_end:
                return "credit"
            if time.monotonic() >= ends_at and may_end:
                return "time"

    async def _send_piece(self, send: Send, piece: Piece) -> tuple[int, int]:
        """Send a piece's batches and its position; return the number of bytes and rows sent."""
        size = rows = 0
        buffered = bytearray()
        for frame in await self._frames(piece):
            rows += frame.rows
            size += len(frame.head) + frame.payload.nbytes
            buffered += frame.head
            if frame.payload.nbytes < _GATHERED_BYTES_MAX:
                buffered += frame.payload
                continue
            # Large payloads are sent as separate chunks without copying.
            await _send_body(send, bytes(buffered))
            buffered.clear()
            await _send_body(send, frame.payload)
        position_frame = self._position(piece) if piece.is_whole else b""
        await _send_body(send, bytes(buffered + position_frame))
        return size + len(position_frame), rows

    async def _frames(self, piece: Piece) -> list[_Frame]:
        """Return the frames of a piece's batches, shared by all subscribers without filters."""
        if self._masking or not self._sieve.is_open:
            return await self._encode(piece)
        key = "frames", self._codec, self._request.batch_rows
        frames: list[_Frame] | asyncio.Future[list[_Frame]] | None = piece.derived.get(key)
        if frames is None:
            if _is_short(piece):
                return await self._encode_for_all(piece, key)
            # Many subscribers request a piece at the same moment. The first subscriber encodes it, and the
            # others wait for the result.
            frames = piece.derived[key] = asyncio.ensure_future(self._encode_for_all(piece, key))
        return await asyncio.shield(frames) if isinstance(frames, asyncio.Future) else frames

    async def _encode_for_all(self, piece: Piece, key: Any) -> list[_Frame]:
        """Encode a piece, and cache the frames with it if other subscribers may use them."""
        pieces = self._cursor.pieces
        try:
            frames = await self._encode(piece)
        finally:
            piece.derived.pop(key, None)
        if pieces.is_shared(self._sieve.view, piece):
            piece.derived[key] = frames
            grown = sum(len(frame.head) + frame.payload.nbytes for frame in frames)
            pieces.keep(self._sieve.view, piece, grown)
        return frames

    async def _encode(self, piece: Piece) -> list[_Frame]:
        pieces = self._cursor.pieces
        passing = await self._sieve.passing(pieces, piece)
        kept = self._sieve.kept_bytes(piece)
        if not _is_short(piece):
            frames = await pieces.in_thread(self._encoded, piece, passing)
        else:
            frames = self._encoded(piece, passing)
        # Each number of shards has its own copies of the rows, which count toward the cache size.
        pieces.keep(self._sieve.view, piece, self._sieve.kept_bytes(piece) - kept)
        return frames

    def _encoded(self, piece: Piece, passing: Any) -> list[_Frame]:
        self._prove_shards_unmasked(piece)
        if _is_short(piece) and not (self._masking or self._codec):
            grouped = self._groups_shards and piece.rows >= _GROUPED_ROWS_MIN
            streams = self._sieve.streams(piece, self._request.batch_rows, grouped=grouped)
            if streams is not None:
                self._moved = 0
                return [_frame(batch, rows, content) for batch, rows, content in streams]
        sifted = self._sieve.sift(piece, passing)
        self._moved = sum(sifted_rows.moved for sifted_rows in sifted)
        if not self._sieve.view.is_typed:
            return [frame for sifted_rows in sifted for frame in self._encoded_messages(sifted_rows)]
        return [
            _frame(sifted_rows.batch, part.num_rows, arrow_stream(part, self._codec))
            for sifted_rows in sifted
            for part in row_parts(self._masked(sifted_rows), self._request.batch_rows)
        ]

    def _prove_shards_unmasked(self, piece: Piece) -> None:
        """Raise AccessDenied if a masked column determines the shards of a piece's rows, whichever shards are
        requested.

        The shard of a row reveals a part of the value, and so does a response without the row.
        """
        if not self._masking or self._request.shards is None:
            return
        for batch in piece.batches:
            masked = self._masking.columns(TableName.parse(batch.table))
            if any(name.casefold() in masked for name in batch.key):
                raise AccessDenied(
                    f"the shards of {batch.table} are made of a column that is masked for this account",
                    hint="Name other columns for the shards: shard_columns",
                )

    def _masked(self, sifted_rows: Sifted) -> pyarrow.RecordBatch:
        """Return the rows without masked columns. Raises AccessDenied for a mask that hides no column."""
        if not self._masking:
            return sifted_rows.arrow
        table = TableName.parse(sifted_rows.batch.table)
        columns = [column.name for column in sifted_rows.batch.columns]
        self._masking.prove_applies(table, columns)
        if idle := self._masking.idle_names(table, columns):
            _warn_of_idle_mask(table, idle)
        return without_masked(sifted_rows.arrow, self._masking.columns(table))

    def _encoded_messages(self, sifted_rows: Sifted) -> Iterator[_Frame]:
        for at in range(0, sifted_rows.arrow.num_rows, self._request.batch_rows):
            part = sifted_rows.arrow.slice(at, self._request.batch_rows)
            content = message_bytes(part.column("value"))
            if content.nbytes:
                rows = int(part.column("rows").to_numpy().sum())
                plain = content.nbytes
                content = content if self._codec is None else compressed(content, self._codec)
                yield _frame(sifted_rows.batch, rows, content, plain_bytes=plain)

    def _position(self, piece: Piece) -> bytes:
        cursor = self._cursor
        shared: str | None = piece.derived.get("position")
        if shared is None:
            epoch = cursor.pieces.log.epochs.get(piece.end.epoch)
            header = {
                "kind": "position",
                "position": str(piece.end),
                "gtid_set": piece.gtid_set,
                "server_key": "" if epoch is None else epoch.server_key,
                "time_us": piece.time_us,
            }
            # The part of the position frame that is the same for all subscribers is encoded once.
            shared = piece.derived["position"] = compact_json(header)[:-1]
        return framed(f'{shared},"behind_bytes":{cursor.behind_bytes()},"bytes":0}}'.encode())


@functools.lru_cache(_WARNINGS_MAX)
def _warn_of_idle_mask(table: TableName, columns: tuple[str, ...]) -> None:
    """Log, once for each table, the masked columns that the table does not have: mistyped names, or earlier
    names.
    """
    _log.warning(
        "a mask names columns that the table does not have",
        table=str(table),
        columns=", ".join(columns),
        hint="Check masked of the accounts: access in penstock.yaml",
    )


def _is_short(piece: Piece) -> bool:
    """Return whether encoding a piece takes less time than passing it to a thread."""
    if piece.bytes <= _ENCODED_AT_ONCE_BYTES_MAX:
        return True
    start, end = piece.start, piece.end
    is_in_file = piece.is_whole and (start.epoch, start.file) == (end.epoch, end.file)
    is_of_few_bytes = is_in_file and end.offset - start.offset <= PIECE_BYTES_AT_ONCE
    return is_of_few_bytes and piece.bytes <= _SHORT_BYTES_MAX


def _frame(batch: Batch, rows: int, payload: memoryview, **more: Any) -> _Frame:
    head = {
        "kind": "batch",
        "table": batch.table,
        "rows": rows,
        "bytes": payload.nbytes,
        "schema_version": batch.schema_version,
        "key": list(batch.primary_key),
        **more,
    }
    return _Frame(frame_head(head), payload, rows)


async def _send_body(send: Send, content: bytes | memoryview) -> None:
    """Send a part of a response once the client has room for it."""
    if len(content):
        await send({"type": "http.response.body", "body": content, "more_body": True})
