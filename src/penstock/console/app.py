# SPDX-License-Identifier: Apache-2.0
"""The console's HTTP application: its routes, sessions, security headers, and protection against forged
requests.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import structlog
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.console import actions, pages
from penstock.console.comparisons import Comparisons
from penstock.console.entrance import Entrance
from penstock.console.fleet import Fleet
from penstock.console.pipeline_files import PipelineFiles
from penstock.console.pipeline_states import PipelineStates
from penstock.console.rendering import Renderer
from penstock.console.sessions import COOKIE, Sessions
from penstock.console.streams import Streams
from penstock.console.visit import LANGUAGE_COOKIE, Visit, client_of
from penstock.errors import AccessDenied, AuthenticationFailed, LimitExceeded, PenstockError
from penstock.model import Secret, is_loopback
from penstock.serve.guard import names_this_machine
from penstock.serve.masking import Masking
from penstock.serve.problems import status_of
from penstock.settings.console import IDLE_SECONDS_DEFAULT
from penstock.source.daemon_address import DaemonAddress
from penstock.source.silent_daemons import SilentDaemons

_log = structlog.get_logger(__name__)

_FORM_BYTES_MAX = 64 * 1024
# How long a page waits for a daemon that did not answer an earlier page.
_SILENT_SECONDS_MAX = 3.0
_STATIC = Path(__file__).parent / "static"
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    # Do not use no-referrer, because browsers then send the Origin of a form as null.
    "Referrer-Policy": "same-origin",
}

Page = Callable[[Visit], Response]
Action = Callable[[Visit, Mapping[str, str]], Response]


@dataclass(frozen=True)
class ConsoleSettings:
    """Determines what the console shows and where it listens.

    `stores` contains the URLs of the pipelines' state stores. `pipeline_files` contains the pipeline files,
    which provide what the state stores do not contain: dead letters, and the settings for comparisons.
    `base_path` is the path behind a reverse proxy, "" or "/penstock". `hosts` contains the names under which
    browsers reach the console, if they differ from `host`. A session ends after `idle_seconds` without
    activity. `command` is the command line for child processes, which end when the console ends. Without it,
    the console cannot run comparisons.
    """

    daemons: tuple[DaemonAddress, ...]
    stores: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 7080
    base_path: str = ""
    hosts: tuple[str, ...] = ()
    pipeline_files: tuple[Path, ...] = ()
    command: tuple[str, ...] = ()
    idle_seconds: float = IDLE_SECONDS_DEFAULT

    @property
    def is_private(self) -> bool:
        """Whether only this machine can reach the console."""
        return is_loopback(self.host) and not self.hosts


class Console:
    """The console's web application. If the daemons have no credentials, it serves only this machine."""

    def __init__(self, settings: ConsoleSettings) -> None:
        self._settings = settings
        self._states = PipelineStates(settings.stores)
        self._files = PipelineFiles(settings.pipeline_files, self._states)
        self._comparisons = Comparisons(settings.command)
        self._renderer = Renderer(settings.base_path)
        self._silent = SilentDaemons(seconds_max=_SILENT_SECONDS_MAX)
        self._entrance = Entrance(settings.daemons, self._silent)
        self.sessions = Sessions(settings.idle_seconds)
        self.streams = Streams()
        routes = [
            *(
                Route(path, self._page(page), methods=["GET"])
                for path, page in (pages.PAGES | pages.FILES).items()
            ),
            *(Route(path, self._action(act), methods=["POST"]) for path, act in actions.ACTIONS.items()),
            Route("/login", self._show_login, methods=["GET"]),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/logout", self._action(self._log_out), methods=["POST"]),
            Mount("/static", StaticFiles(directory=_STATIC)),
        ]
        mounted = [Mount(settings.base_path, routes=routes)] if settings.base_path else routes
        self.app = Starlette(
            routes=mounted,
            middleware=[Middleware(_Guard, settings)],
            exception_handlers={LimitExceeded: _refuse_size},
        )

    # --- Visits -----------------------------------------------------------------------------

    def _visit(self, request: Request) -> Visit:
        """Return a visit with the rights of its user. Raises AuthenticationFailed without a login."""
        identity = request.cookies.get(COOKIE, "")
        # An open page refreshes itself, which does not count as activity of the user.
        is_use = "hx-request" not in request.headers
        session = self.sessions.get(identity, is_use=is_use) if identity else None
        if session is None:
            # Check the login before asking a daemon, so that unauthenticated clients cannot occupy threads
            # and daemons.
            if not self._settings.is_private:
                raise AuthenticationFailed("log in with the token of an account")
            accounts = self._entrance.ask()
            self._entrance.prove_open()
            fleet, unknown = Fleet(self._settings.daemons, None, self._silent), self._entrance.unknown
            answered = list(accounts.values.values())
            is_admin = was_admin = not unknown and all(account["admin"] for account in answered)
        else:
            fleet = Fleet(self._settings.daemons, session.token, self._silent)
            accounts = fleet.ask_all("account")
            # It is enough that one daemon accepts the token.
            unknown = () if accounts.values else tuple(fleet.urls)
            if any(isinstance(problem, AuthenticationFailed) for problem in accounts.problems.values()):
                raise AuthenticationFailed("log in with the token of an account")
            # A daemon that is down is assumed to have the same limits and masks as when it last answered.
            session.accounts |= accounts.values
            answered = list(session.accounts.values())
            is_recent = self.sessions.is_confirmed(session, is_accepted=bool(accounts.values))
            was_admin = is_recent and bool(answered) and all(account["admin"] for account in answered)
            is_admin = bool(accounts.values) and was_admin
        identity = identity or self.sessions.new_id()
        return Visit(
            request=request,
            renderer=self._renderer,
            fleet=fleet,
            states=self._states,
            files=self._files,
            comparisons=self._comparisons,
            streams=self.streams,
            identity=identity,
            forgery_token=self.sessions.forgery_token(identity),
            account="" if session is None else session.account,
            is_admin=is_admin,
            sees_pipelines=was_admin and all(_is_unlimited(account) for account in answered),
            sees_every_row=all(_sees_every_row(account) for account in answered),
            masking=_masking_of(answered),
            unknown_daemons=unknown,
            base_path=self._settings.base_path,
        )

    def _page(self, page: Page) -> Callable[[Request], object]:
        async def respond(request: Request) -> Response:
            return await self._answer(request, page)

        return respond

    def _action(self, action: Action) -> Callable[[Request], object]:
        async def respond(request: Request) -> Response:
            form = await _read_form(request)
            identity = request.cookies.get(COOKIE, "")
            if not _is_from_here(request) or not self.sessions.proves(identity, form.get("csrf", "")):
                _log.warning("a forged request is refused", path=request.url.path)
                return PlainTextResponse("This form does not come from a page of the console.", 403)
            return await self._answer(request, functools.partial(self._act, action, form))

        return respond

    def _act(self, action: Action, form: Mapping[str, str], visit: Visit) -> Response:
        return action(visit, form)

    async def _answer(self, request: Request, page: Page) -> Response:
        try:
            visit = await run_in_threadpool(self._visit, request)
        except AuthenticationFailed:
            if request.method == "GET" and "hx-request" not in request.headers:
                back = quote(f"{request.url.path}?{request.url.query}", safe="")
                return RedirectResponse(f"{self._settings.base_path}/login?next={back}", 303)
            return PlainTextResponse("Log in again.", 401)
        try:
            response = await run_in_threadpool(page, visit)
        except PenstockError as problem:
            shown = visit.without_values(problem)
            response = visit.render("problem.html", code=status_of(problem), problem=shown)
        if COOKIE not in request.cookies:
            _set_cookie(response, request, COOKIE, visit.identity, self._settings.base_path)
        if visit.chosen_language:
            _set_cookie(response, request, LANGUAGE_COOKIE, visit.language, self._settings.base_path)
        return response

    # --- Login ------------------------------------------------------------------------------

    async def _show_login(self, request: Request) -> Response:
        return self._login_page(request, request.query_params.get("next", ""), "", 200)

    async def _log_in(self, request: Request) -> Response:
        form = await _read_form(request)
        back = form.get("next", "")
        if not _is_from_here(request):
            return PlainTextResponse("This form does not come from a page of the console.", 403)
        try:
            identity = await run_in_threadpool(self._open_session, form.get("token", ""), client_of(request))
        except PenstockError as problem:
            _log.warning("a login is refused", why=problem.message)
            return self._login_page(request, back, problem.message, status_of(problem))
        response = RedirectResponse(_own_path(back, self._settings.base_path), 303)
        _set_cookie(response, request, COOKIE, identity, self._settings.base_path)
        return response

    def _open_session(self, text: str, client: str) -> str:
        """Return the identity of a new session. Raises AuthenticationFailed, AccessDenied, QuotaReached."""
        self.sessions.prove_may_try(client)
        anonymous = self._entrance.ask()
        if anonymous.values:
            # A daemon without credentials would accept any token.
            raise AccessDenied(
                f"{next(iter(anonymous.values))} asks for no credentials: set access in penstock.yaml, or"
                " let the console listen on this machine only"
            )
        if not text:
            self.sessions.count_failure(client)
            raise AuthenticationFailed("enter a token")
        answers = Fleet(self._settings.daemons, Secret(text)).ask_all("account")
        # Every page queries all daemons, so each daemon that answers must accept the token.
        refusals = {
            url: problem
            for url, problem in answers.problems.items()
            if isinstance(problem, AuthenticationFailed) or not answers.values
        }
        if refusals:
            self.sessions.count_failure(client)
            raise _refused_login(refusals, answers.values)
        account = str(next(iter(answers.values.values()))["account"])
        _log.info("audit", action="login", account=account, client=client)
        return self.sessions.begin(account, Secret(text))

    def _log_out(self, visit: Visit, form: Mapping[str, str]) -> Response:
        self.sessions.end(visit.identity)
        _log.info("audit", action="logout", account=visit.account, client=visit.client)
        return RedirectResponse(f"{self._settings.base_path}/login", 303)

    def _login_page(self, request: Request, back: str, problem: str, status: int) -> Response:
        return self._renderer.response(
            "login.html", Visit.language_of(request), status, {"next": back, "problem": problem}
        )


class _Guard:
    """Adds the security headers to every response, and refuses host names that are not the console's.

    This keeps a web page in a browser from reaching the console under the page's own host name (DNS
    rebinding). A console without configured names accepts every name if it listens on an address other than
    loopback.
    """

    def __init__(self, app: ASGIApp, settings: ConsoleSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                extra = dict(_HEADERS)
                if b"cache-control" not in present and not scope["path"].startswith(
                    f"{self._settings.base_path}/static/"
                ):
                    extra["Cache-Control"] = "no-store"
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in extra.items()),
                ]
            await send(message)

        if not self._is_named(host):
            names = " and ".join((*self._settings.hosts, "127.0.0.1", "localhost"))
            refusal = PlainTextResponse(f"This console answers to {names} only.", 403)
            await refusal(scope, receive, guarded)
            return
        await self._app(scope, receive, guarded)

    def _is_named(self, host_header: str) -> bool:
        """Return whether a Host header names the console."""
        settings = self._settings
        if names_this_machine(host_header) or not (settings.is_private or settings.hosts):
            return True
        try:
            name = urlsplit(f"//{host_header}").hostname
        except ValueError:
            return False
        return name in {known.lower() for known in (*settings.hosts, settings.host)}


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises LimitExceeded."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _FORM_BYTES_MAX:
            raise LimitExceeded(f"a form has at most {_FORM_BYTES_MAX} bytes")
    fields = parse_qs(body.decode(errors="replace"), keep_blank_values=True)
    return {name: values[-1] for name, values in fields.items()}


async def _refuse_size(request: Request, problem: Exception) -> Response:
    return PlainTextResponse(str(problem), 413)


def _is_from_here(request: Request) -> bool:
    """Return whether a request comes from a page of this host, according to the browser."""
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("host", "")


def _refused_login(refusals: Mapping[str, PenstockError], accepting: Mapping[str, Any]) -> PenstockError:
    """Return why a login is refused: a daemon's error, or a difference between the daemons' accounts."""
    url, problem = next(iter(refusals.items()))
    if not accepting:
        return problem
    return AuthenticationFailed(
        f"{url} refuses the token that {next(iter(accepting))} accepts",
        hint="Set the same account under access in each penstock.yaml, or start one console for each daemon",
    )


def _masking_of(accounts: Sequence[Mapping[str, Any]]) -> Masking:
    """Return an account's masks at all daemons."""
    masks = [
        Masking.of_settings(masked, account.get("columns"))
        for account in accounts
        if isinstance(masked := account.get("masked"), dict)
    ]
    return Masking(
        tuple(rule for mask in masks for rule in mask.rules),
        tuple(rule for mask in masks for rule in mask.shown_rules),
    )


def _is_unlimited(account: Mapping[str, Any]) -> bool:
    """Return whether an account may read every row of a daemon's tables, under any subscription."""
    return (
        "*" in account["instances"]
        and "*" in account["subscriptions"]
        and not account["tables"]
        and not account["exclude_tables"]
        # A daemon of an earlier version does not report which columns are masked.
        and account.get("masked") is not True
        and _sees_every_row(account)
    )


def _sees_every_row(account: Mapping[str, Any]) -> bool:
    """Return whether no row of a daemon's tables is hidden. A daemon of an earlier version hides no rows."""
    return not account.get("where")


def _own_path(path: str, base_path: str) -> str:
    """Return a path of this console. Addresses of other sites are not allowed."""
    parts = urlsplit(path)
    is_own = not parts.scheme and not parts.netloc and path.startswith(f"{base_path}/")
    return path if is_own and not path.startswith(("//", "/\\")) else f"{base_path}/"


def _set_cookie(response: Response, request: Request, name: str, value: str, base_path: str) -> None:
    is_encrypted = "https" in (request.url.scheme, request.headers.get("x-forwarded-proto", ""))
    response.set_cookie(
        name, value, path=base_path or "/", secure=is_encrypted, httponly=True, samesite="strict"
    )
