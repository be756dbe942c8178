# SPDX-License-Identifier: Apache-2.0
"""The HTTP protocol of Meituan Ptubes, for unmodified clients.

`docs/guides/ptubes.md` explains how to redirect clients to this port, and how the behaviour differs from
Ptubes.

    POST /v1/getServerInfo      can this client be served from its position?  JSON
    POST /v1/subscribe          start, or start over                          success | fail
    POST /v1/fetchMessages      the next events                               RdsEnvelope | fail
    POST /v1/adjustDumpPoint    use `penstock position set` instead           JSON
    /monitor/alive              OK

Every response has status 200; the outcome is in its body. A session lives as long as its connection. A
connection's requests are answered one after the other.
"""

import asyncio
import gzip
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from penstock.errors import (
    AuthenticationFailed,
    OptionInvalid,
    PenstockError,
    StreamError,
    TransientError,
)
from penstock.limits import PTUBES_BODY_BYTES_READ_MAX, REQUEST_BODY_BYTES_MAX
from penstock.serve.access import WHOLE, Access, Account
from penstock.serve.connections import Connection
from penstock.serve.guard import comes_from_this_machine
from penstock.serve.pieces import View
from penstock.serve.ptubes.messages import FetchRequest, PtubesSubscription, error_envelope
from penstock.serve.ptubes.session import Client, Session, clients_of, tables_for
from penstock.serve.ptubes.start import start_of
from penstock.serve.served import Served
from penstock.serve.threads import run_in
from penstock.settings.daemon import Listening, is_loopback

_log = structlog.get_logger(__name__)

_LISTENER: Listening = "ptubes"
_PROTOBUF = "PROTOCOL_BUFFER"
_SUCCESS, _FAIL = b"success", b"fail"

# Responses smaller than this are not compressed.
_GZIP_BYTES_MIN = 4096

# A client gives up on a response after two seconds, so a quota delays a response for less than that.
_THROTTLE_SECONDS_MAX = 1.0

# `error_code` tells who has to act, like the exit status of the command line.
_OPERATOR_CODE, _STREAM_CODE = 2, 3


def ptubes_app(served: Served, access: Access, zone_seconds: int = 0) -> Starlette:
    """Return the application of the port for Ptubes clients.

    `zone_seconds` is the offset east of UTC used to convert times without a zone.
    """
    return Starlette(routes=[Mount("/", app=_Ptubes(served, access, zone_seconds))])


class _Ptubes:
    """The calls by path. A `closing` response is the last of its connection."""

    def __init__(self, served: Served, access: Access, zone_seconds: int) -> None:
        self._served = served
        self._access = access
        self._zone_seconds = zone_seconds
        self._clients = clients_of(served)
        self._calls: dict[str, Callable[[Client, Request, bytes], Awaitable[Response | None]]] = {
            "/v1/getServerInfo": self._server_info,
            "/v1/subscribe": self._subscribe,
            "/v1/fetchMessages": self._fetch,
            "/v1/adjustDumpPoint": self._adjust,
            "/monitor/alive": self._alive,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        client = self._clients.of(request.state.connection)
        try:
            response = await self._answer(client, request)
        except ClientDisconnect:
            return
        if response is None:
            client.connection.close()
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        client.figures.outbound_bytes += len(response.body)
        await response(scope, receive, send)

    async def _answer(self, client: Client, request: Request) -> Response | None:
        call = self._calls.get(request.url.path)
        if call is None:
            return _text(b"Bye", closing=True)
        body = await _body(request)
        if body is None or not self._came_by_own_name(request):
            _log_warning("a request is refused", client, request.url.path, None)
            return _text(_FAIL, closing=True)
        client.figures.inbound_bytes += len(body)
        return await call(client, request, body)

    def _came_by_own_name(self, request: Request) -> bool:
        """Return whether it is certain that no web page in a browser sent the request (see DNS rebinding in
        `guard`).
        """
        host, _ = request.scope.get("server") or ("", 0)
        if self._access.asks(_LISTENER) or not is_loopback(str(host)):
            return True
        return comes_from_this_machine(request.headers)

    def _account(self, request: Request, token: str) -> Account:
        """Return the account of a request, by a header or by the token in a subscription.

        Raises AuthenticationFailed.
        """
        account: Account | None = WHOLE
        if self._access.asks(_LISTENER):
            account = self._access.of_authorization(request.headers.get("authorization", ""))
            account = account or self._access.of_token(token)
        if account is None:
            raise AuthenticationFailed(
                "this daemon requires credentials",
                hint="Send the header Authorization: Bearer TOKEN, or token in the subscription",
            )
        return account

    # --- Calls ------------------------------------------------------------------------------

    async def _server_info(self, client: Client, request: Request, body: bytes) -> Response:
        """Report whether a client could be served from its position."""
        try:
            subscription = PtubesSubscription.parse(body)
            account = self._account(request, subscription.token)
            await run_in(self._served.threads.compiling, tables_for, account, subscription)
            await start_of(self._served.pieces(subscription.instance), subscription.checkpoint)
        except PenstockError as problem:
            _log_warning("a client cannot be served", client, "/v1/getServerInfo", problem)
            return _json(_server_info_body("UNAVAILABLE", [], 0), closing=True)
        load = len(self._clients.sessions())
        return _json(_server_info_body("AVAILABLE", self._clients.tasks(account), load))

    async def _subscribe(self, client: Client, request: Request, body: bytes) -> Response:
        """Start a session, or start it over at the client's position."""
        figures, started = client.figures, time.monotonic()
        figures.subscribes += 1
        figures.last_subscribe_ms = time.time_ns() // 1_000_000
        client.leave()
        try:
            client.session = await self._open(client, request, PtubesSubscription.parse(body))
        except PenstockError as problem:
            client.leave()
            figures.failed_subscribes += 1
            _log_warning("a subscription is refused", client, "/v1/subscribe", problem)
            return _text(_FAIL, closing=True)
        figures.subscribe_ms = round((time.monotonic() - started) * 1000)
        return _text(_SUCCESS)

    async def _open(self, client: Client, request: Request, subscription: PtubesSubscription) -> Session:
        if subscription.codec != _PROTOBUF:
            raise OptionInvalid(f"codec {subscription.codec} is not served", hint=f"Use {_PROTOBUF}")
        account = self._account(request, subscription.token)
        tables = await run_in(self._served.threads.compiling, tables_for, account, subscription)
        shown = client.shown.enter_context(
            self._served.subscribers.following(
                "ptubes",
                subscription.instance,
                subscription.task,
                account=account.name,
                shard_count=subscription.shard_count,
                shards=subscription.shards,
            )
        )
        shard_columns = self._served.shard_columns.get(subscription.instance, {})
        view = View(
            "ptubes",
            tables,
            shard_columns=tuple(shard_columns.items()),
            server_zone_seconds=self._zone_seconds,
        )
        return await Session.open(
            self._served.pieces(subscription.instance), subscription, account, view, shown
        )

    async def _fetch(self, client: Client, request: Request, body: bytes) -> Response | None:
        """Respond with the next events. A client without a subscription gets no response."""
        session, figures, started = client.session, client.figures, time.monotonic()
        if session is None:
            return None
        figures.fetches += 1
        figures.last_fetch_ms = time.time_ns() // 1_000_000
        try:
            with session.account.request():
                content = await self._next(session, FetchRequest.parse(body), client.connection)
        except PenstockError as problem:
            figures.failed_fetches += 1
            _log_warning("no events for a client", client, "/v1/fetchMessages", problem)
            if isinstance(problem, (TransientError, OptionInvalid)):
                return _text(_FAIL)
            client.leave()
            code = _STREAM_CODE if isinstance(problem, StreamError) else _OPERATOR_CODE
            return _binary(error_envelope(code, f"{type(problem).__name__}: {problem}"), closing=True)
        self._note_consumed(session)
        figures.fetch_ms = round((time.monotonic() - started) * 1000)
        figures.last_checkpoint = session.last_checkpoint
        if len(content) >= _GZIP_BYTES_MIN and "gzip" in request.headers.get("accept-encoding", ""):
            packed = await run_in_threadpool(gzip.compress, content, 1)
            return _binary(packed, {"Content-Encoding": "gzip"})
        return _binary(content)

    def _note_consumed(self, session: Session) -> None:
        subscription = session.subscription
        if subscription.task:
            self._served.consumers.note(
                subscription.instance,
                f"ptubes-{subscription.task}",
                session.consumed,
                session.account,
                shard_count=subscription.shard_count,
                shards=subscription.shards,
            )

    async def _next(self, session: Session, request: FetchRequest, connection: Connection) -> bytes:
        """Return the next envelope, throttled by the account's quota; an empty envelope while the quota is
        exhausted.
        """
        account = session.account
        wait_seconds = account.spend(0, time.monotonic())
        if wait_seconds:
            await asyncio.sleep(min(wait_seconds, _THROTTLE_SECONDS_MAX))
        if wait_seconds > _THROTTLE_SECONDS_MAX:
            return session.no_events()
        content = await session.fetch(request, connection.asked_again)
        account.spend(len(content), time.monotonic())
        return content

    async def _adjust(self, client: Client, request: Request, body: bytes) -> Response:
        """Refuse: this port is not authenticated, and its clients must not move a running capture."""
        message = "stop the daemon, then run: penstock position set INSTANCE POSITION|TIME|GTID"
        return _json({"code": "FAIL", "msg": message}, closing=True)

    async def _alive(self, client: Client, request: Request, body: bytes) -> Response:
        return _text(b"OK")


# --- Answers --------------------------------------------------------------------------------


async def _body(request: Request) -> bytes | None:
    """Return a request's body, None if it is too large.

    A large body is still read up to a limit, because a client that is cut off while sending does not read the
    response.
    """
    content = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= REQUEST_BODY_BYTES_MAX:
            content += chunk
        elif size > PTUBES_BODY_BYTES_READ_MAX:
            break
    return bytes(content) if size <= REQUEST_BODY_BYTES_MAX else None


def _server_info_body(status: str, tasks: list[str], load: int) -> dict[str, Any]:
    return {
        "serverStatus": status,
        "address": None,
        "writerTaskList": tasks,
        "inboundBytes": 0,
        "outboundBytes": 0,
        "loadFactor": load,
    }


def _json(value: dict[str, Any], *, closing: bool = False) -> Response:
    return _response(json.dumps(value).encode(), "application/json", closing=closing)


def _text(content: bytes, *, closing: bool = False) -> Response:
    return _response(content, "text/plain", closing=closing)


def _binary(content: bytes, headers: dict[str, str] | None = None, *, closing: bool = False) -> Response:
    return _response(content, "application/x-protobuf", headers, closing=closing)


def _response(
    content: bytes, kind: str, headers: dict[str, str] | None = None, *, closing: bool = False
) -> Response:
    return Response(
        content, headers={**(headers or {}), **({"Connection": "close"} if closing else {})}, media_type=kind
    )


def _log_warning(what: str, client: Client, path: str, problem: PenstockError | None) -> None:
    _log.warning(
        what,
        peer=f"{client.connection.peer}:{client.connection.port}",
        path=path,
        error=None if problem is None else type(problem).__name__,
        why=None if problem is None else str(problem),
    )
