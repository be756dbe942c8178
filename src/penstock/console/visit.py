# SPDX-License-Identifier: Apache-2.0
"""One request of a browser: the user, the language, and the permissions."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from penstock.console.comparisons import Comparisons
from penstock.console.fleet import Fleet
from penstock.console.lists import export_lists
from penstock.console.pipeline_files import PipelineFiles
from penstock.console.pipeline_states import PipelineStates
from penstock.console.rendering import Renderer
from penstock.console.streams import Stream, Streams
from penstock.console.words import LANGUAGES
from penstock.errors import AccessDenied, ConnectionLost, PenstockError, StreamError
from penstock.serve.masking import HIDDEN_TEXT, Masking

LANGUAGE_COOKIE = "penstock_language"


def client_of(request: Request) -> str:
    """Return the address of a browser, "" if the web server does not know it."""
    return "" if request.client is None else request.client.host


@dataclass(frozen=True)
class Visit:
    """A request, with the permissions of its user.

    `account` is "" without a login. Only admins without limits may see pipelines, because state stores
    contain no accounts. Pages about pipelines hide the columns in `masking`, and any text that may contain a
    value of a masked column. Unless `sees_every_row` is set, the daemons refuse all pages that show rows,
    except the live tail. `unknown_daemons` contains the daemons that have not reported yet whether they
    require credentials.
    """

    request: Request
    renderer: Renderer
    fleet: Fleet
    states: PipelineStates
    files: PipelineFiles
    comparisons: Comparisons
    streams: Streams
    identity: str
    forgery_token: str
    account: str
    is_admin: bool
    sees_pipelines: bool
    sees_every_row: bool
    masking: Masking
    unknown_daemons: tuple[str, ...]
    base_path: str

    @staticmethod
    def language_of(request: Request) -> str:
        """Return the language of the pages: the user's choice, otherwise the browser's preference."""
        accepted = request.headers.get("accept-language", "")[:2].lower()
        wanted = (request.query_params.get("lang"), request.cookies.get(LANGUAGE_COOKIE), accepted)
        return next((language for language in wanted if language in LANGUAGES), LANGUAGES[0])

    @property
    def language(self) -> str:
        """The language of the pages."""
        return self.language_of(self.request)

    @property
    def client(self) -> str:
        """The address of the browser."""
        return client_of(self.request)

    @property
    def chosen_language(self) -> bool:
        """Whether the user chooses the language with this request."""
        return self.request.query_params.get("lang") in LANGUAGES

    def query(self, name: str) -> str:
        """Return a parameter of the request, "" if it is missing."""
        return self.request.query_params.get(name, "").strip()

    @property
    def is_export(self) -> bool:
        """Whether the request asks for the page's lists as a file, which contains all of their rows."""
        return self.request.method == "GET" and "export" in self.request.query_params

    def pipeline_query(self) -> tuple[int, str, str]:
        """Return the state store, the name and the sink of the pipeline that the request names."""
        store = self.query("store")
        return int(store) if store.isdecimal() else -1, self.query("name"), self.query("sink")

    def chosen_instance(self) -> tuple[list[tuple[str, str]], dict[str, PenstockError], str, str]:
        """Return the instances by daemon, the daemons that do not answer, and the daemon and the instance
        that the form names.
        """
        statuses = self.fleet.ask_all("status")
        choices = [
            (url, status["instance"])
            for url, answer in statuses.values.items()
            for status in answer["instances"]
        ]
        url, name = self.query("daemon"), self.query("instance")
        if not (url and name) and len(choices) == 1:
            url, name = choices[0]
        return choices, statuses.problems, url, name

    def prove_admin(self) -> None:
        """Raise AccessDenied unless the user is an admin at every daemon that answers."""
        if self.unknown_daemons and self.account:
            raise AccessDenied(
                f"{self.unknown_daemons[0]} does not answer, so the rights of {self.account} are unknown",
                hint="Start this daemon, or wait until it answers: penstock status",
            )
        if self.unknown_daemons:
            raise AccessDenied(
                f"{self.unknown_daemons[0]} has not answered yet, and may ask for credentials",
                hint="Start this daemon, or start the console without it: --daemon none for pipelines only",
            )
        if not self.is_admin:
            raise AccessDenied(
                f"account {self.account or 'nobody'} may look, and change nothing",
                hint="Set admin: true for the account: access in penstock.yaml",
            )

    def prove_sees_pipelines(self) -> None:
        """Raise AccessDenied unless the user is an admin without limits at every daemon that answers."""
        self.prove_admin()
        if not self.sees_pipelines:
            raise AccessDenied(
                f"account {self.account} is an admin with limits, and pipelines may have any table",
                hint="Log in with an admin account without instances, subscriptions, tables and where:"
                " access in penstock.yaml",
            )

    def prove_reads_pipelines(self) -> None:
        """Raise AccessDenied unless, according to each daemon's last answer, the user is a full
        administrator.

        While no daemon answers, pipelines can be read for some minutes but not changed: their state stores
        may still answer.
        """
        if not self.sees_pipelines:
            self.prove_sees_pipelines()

    @property
    def silence(self) -> dict[str, PenstockError]:
        """The daemons that could not confirm the rights of the user, for a page that shows pipelines."""
        return {
            url: ConnectionLost(
                "the daemon does not answer",
                hint="Pipelines are shown with the rights that it last reported; changes wait for it",
            )
            for url in self.unknown_daemons
        }

    def without_values(self, problem: PenstockError) -> PenstockError:
        """Return an error about the data, without its text if the text may contain a masked value."""
        if (self.sees_every_row and not self.masking) or not isinstance(problem, StreamError):
            return problem
        return type(problem)(HIDDEN_TEXT, position=problem.position)

    def render(self, template: str, *, code: int = 200, **values: Any) -> Response:
        """Return a page with an HTTP status, or the file of the page's lists if the request asks for it."""
        page = self.renderer.response(template, self.language, code, self._all(values))
        if not (self.is_export and code == 200):
            return page
        path = self.request.url.path.removeprefix(self.base_path)
        return export_lists(path, bytes(page.body).decode(), self.query("export"), self.query("list"))

    def open_stream(self, read: Callable[[], Iterator[dict[str, Any]]]) -> Stream:
        """Return a stream of the parts that `read` returns, within the limits of session and account."""
        return self.streams.limited(self.identity, read, self.account)

    def stream(self, template: str, stream: Stream | None, **values: Any) -> Response:
        """Return a page that is sent while the parts of its stream are being read."""
        return self.renderer.stream(template, self.language, stream, self._all(values))

    def redirect(self, path: str, **query: str) -> Response:
        """Return a redirection to another page of the console."""
        return RedirectResponse(f"{self.base_path}{path}{'?' if query else ''}{urlencode(query)}", 303)

    def _all(self, values: dict[str, Any]) -> dict[str, Any]:
        return {
            "csrf": self.forgery_token,
            "account": self.account,
            "is_admin": self.is_admin,
            "sees_pipelines": self.sees_pipelines,
            "sees_every_row": self.sees_every_row,
            "path": self.request.url.path.removeprefix(self.base_path),
            "query": str(self.request.url.query),
            # Only a page that was requested with GET can be loaded again: the response to a form has no URL
            # of its own.
            "is_get": self.request.method == "GET",
            **values,
        }
