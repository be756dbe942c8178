# SPDX-License-Identifier: Apache-2.0
"""Guards all HTTP routes: authentication, request size, and sending rate."""

import asyncio
import ipaddress
import time
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.errors import AuthenticationFailed, LimitExceeded, PenstockError, QuotaReached
from penstock.limits import REQUEST_BODY_BYTES_MAX
from penstock.serve.access import WHOLE, Access, Account
from penstock.serve.connections import RateLimitedLog, Traffic
from penstock.serve.problems import problem_response
from penstock.settings.daemon import Listening, is_loopback

# Probes of the daemon's health carry no credentials, and learn only whether it works.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/startupz"})


class Guard:
    """Authenticates clients and passes their account to the routes.

    On loopback without authentication, a request is accepted only if its host is a name of this machine. This
    prevents a web page in a browser from reaching the daemon under the page's own host name (DNS rebinding).
    """

    def __init__(
        self, app: ASGIApp, access: Access, listener: Listening, own_host: str, traffic: Traffic
    ) -> None:
        self._app = app
        self._access = access
        self._listener = listener
        self._own_host = own_host
        self._traffic = traffic
        self._log = RateLimitedLog()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._listener == "http" and scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        account = None
        try:
            account = self._account(headers)
            _prove_size(headers)
            account.prove_may_be_sent(time.monotonic())
            with account.request():
                scope.setdefault("state", {})["account"] = account
                await self._app(scope, _bounded(receive), _paced(send, account))
        except (AuthenticationFailed, LimitExceeded, QuotaReached) as refusal:
            self._log_refusal(refusal, scope)
            retry_seconds = 1 if account is None else account.retry_seconds(time.monotonic())
            await problem_response(refusal, retry_seconds)(scope, receive, send)

    def _account(self, headers: dict[str, str]) -> Account:
        if self._access.asks(self._listener):
            authorization = headers.get("authorization", "")
            account = self._access.of_authorization(authorization)
            if account is not None:
                return account
            raise AuthenticationFailed(
                "this daemon requires credentials" if not authorization else "the credentials are wrong",
                hint="Commands: --config penstock.yaml, or the environment variable PENSTOCK_TOKEN. HTTP: the"
                " header Authorization: Bearer TOKEN, with listen.token or the token of an account",
            )
        if is_loopback(self._own_host) and not comes_from_this_machine(headers):
            raise AuthenticationFailed(
                "without a token this daemon answers to 127.0.0.1 and localhost only",
                hint="Use http://127.0.0.1:PORT, or set listen.token",
            )
        return WHOLE

    def _log_refusal(self, refusal: PenstockError, scope: Scope) -> None:
        peer = (scope.get("client") or ("?",))[0]
        error = type(refusal).__name__
        self._traffic.rejected.add(self._listener, error)
        self._log.tell("a request is refused", self._listener, peer, error=error, why=refusal.message)


def _prove_size(headers: dict[str, str]) -> None:
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > REQUEST_BODY_BYTES_MAX:
        raise _too_large()


def _too_large() -> LimitExceeded:
    return LimitExceeded(f"a request has at most {REQUEST_BODY_BYTES_MAX} bytes")


def _bounded(receive: Receive) -> Receive:
    """Return `receive` with a limit on the total size, for bodies without a declared length."""
    size = 0

    async def bounded() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > REQUEST_BODY_BYTES_MAX:
            raise _too_large()
        return message

    return bounded


def _paced(send: Send, account: Account) -> Send:
    """Return `send` throttled to an account's quota."""
    if account.quota.bytes_per_second is None:
        return send

    async def paced(message: Message) -> None:
        await send(message)
        wait = account.spend(len(message.get("body", b"")), time.monotonic())
        if wait and message.get("more_body"):
            await asyncio.sleep(wait)

    return paced


class Measured:
    """Counts the requests of a listener by status, and measures the time until the first byte of each
    response.
    """

    def __init__(self, app: ASGIApp, listener: Listening, traffic: Traffic) -> None:
        self._app = app
        self._listener = listener
        self._traffic = traffic

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._traffic.requests.add(self._listener, str(message["status"]))
                self._traffic.seconds[self._listener].observe(time.monotonic() - began)
            await send(message)

        await self._app(scope, receive, counted)


def comes_from_this_machine(headers: Mapping[str, str]) -> bool:
    """Return whether a request used a name of this machine and does not come from another site's page."""
    _, _, page = headers.get("origin", "http://localhost").partition("://")
    return names_this_machine(headers.get("host", "")) and names_this_machine(page)


def names_this_machine(host_header: str) -> bool:
    """Return whether a Host header is localhost or a loopback address."""
    host = host_header.rpartition(":")[0] if ":" in host_header.rpartition("]")[2] else host_header
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
