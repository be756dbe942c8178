# SPDX-License-Identifier: Apache-2.0
"""The client for one daemon's HTTP interface: JSON requests, byte ranges as streams, and errors raised by
class.

Only this module uses urllib3.
"""

import json
import ssl
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import structlog
import urllib3
from urllib3.exceptions import HTTPError, MaxRetryError, ProtocolError, SSLError
from urllib3.exceptions import TimeoutError as HTTPTimeout
from urllib3.util import Timeout

import penstock.errors
from penstock.errors import (
    AuthenticationFailed,
    CapturedElsewhere,
    ConnectionLost,
    PenstockError,
    ServerBusy,
    ServerChanged,
    SourceMissing,
    StreamError,
)
from penstock.gtid_sets import LoggedSet
from penstock.limits import READ_BYTES, SILENCE_SECONDS_MAX
from penstock.model import Position, Secret, Tls
from penstock.source.daemon_address import DaemonAddress, is_host_port
from penstock.source.direct_connection import DirectConnection, DirectResponse
from penstock.source.followed_bytes import SERVER_HEADER, ArrivedBytes, ByteStreams
from penstock.source.silent_daemons import SilentDaemons

_CONNECT_SECONDS_MAX = 5.0
# The timeout of a search, which reads the whole log of an instance, possibly from a slow disk.
SEARCH_SILENCE_SECONDS_MAX = 120.0
# A reader makes one request at a time, possibly while a byte stream is open.
_CONNECTIONS_KEPT = 2

# The header with the source file offset where the bytes of a response end.
_STOP_HEADER = "Penstock-Stop"
# The header with the GTID set before the end of the bytes. It is sent if the request has a `timeout`.
GTID_SET_HEADER = "Penstock-Gtid-Set"
# The header with the name of the fleet member that copies the log.
MEMBER_HEADER = "Penstock-Member"
# Two response headers. The first contains the position as of which a table's rows are shown. The second
# contains the position from which on the log has every change to the table.
POSITION_HEADER, COMPLETE_SINCE_HEADER = "Penstock-Position", "Penstock-Complete-Since"
_PROBLEM_TYPE = "application/problem+json"
_PROBLEM_BYTES_MAX = 64 * 1024

_REFUSED = (401, 403)
_NOT_FOUND = 404
# Statuses that a proxy returns for a daemon that is down or slow.
_AWAY = (502, 503, 504)
_FAILED = 500

# While an instance moves from one fleet member to another, each of the two may refer requests to the other
# one.
_MEMBERS_FOLLOWED_MAX = 3

Query = Mapping[str, str | int | None]

_log = structlog.get_logger(__name__)


class DaemonClient:
    """A client of one daemon and one instance. Keeps connections open; thread-safe.

    All methods raise ConnectionLost if the daemon does not answer, and re-raise the errors that the daemon
    reports. If a fleet member does not capture the instance, it names the member that does. Requests then go
    to the named member, with the same token and TLS settings, until it stops answering.
    """

    def __init__(
        self,
        address: DaemonAddress,
        base_url: str,
        silence_seconds: float = SILENCE_SECONDS_MAX,
        member: str = "",
        silent: SilentDaemons | None = None,
    ) -> None:
        """A daemon that sends nothing for `silence_seconds` counts as lost.

        If the client is a fleet member that copies the log, `member` is that member's name. `silent` shortens
        the timeout for a daemon that did not answer before.
        """
        self._silence_seconds = silence_seconds
        self._silent = silent
        # The daemon that currently receives the requests, and the configured daemon.
        self.url = base_url
        self._configured_url = base_url
        self._followed_url = base_url
        self._path = f"/v1/instances/{quote(address.instance, safe='')}"
        self._pool = urllib3.PoolManager(
            num_pools=2,
            maxsize=_CONNECTIONS_KEPT,
            headers=_headers(address.token) | ({MEMBER_HEADER: member} if member else {}),
            timeout=Timeout(connect=_CONNECT_SECONDS_MAX, read=silence_seconds),
            # The caller retries, because only the caller knows where to resume.
            retries=False,
            **_tls_arguments(address.tls),
        )
        self._tls = None if address.tls is None else tls_context(address.tls)
        self._sent_headers = {str(name): str(value) for name, value in self._pool.headers.items()}
        self._direct: DirectConnection | None = None
        self._streams = ByteStreams(self._tls, self._sent_headers)
        # Whether the daemon is known to send its server's key with the bytes.
        self.names_servers = False

    def ask(self, call: str, **query: str | int | None) -> dict[str, Any]:
        """Return the JSON object of a response."""
        response = self._get(call, query, stream=False)
        try:
            value = json.loads(response.data)
        except ValueError as problem:
            raise self._foreign(f"{call} answered no JSON") from problem
        if not isinstance(value, dict):
            raise self._foreign(f"{call} answered {type(value).__name__}")
        return value

    def ask_daemon(self, call: str) -> dict[str, Any]:
        """Return the JSON object of a response about the whole daemon, not about the instance."""
        response = self._request("GET", call, path="/v1")
        try:
            return _object(response.data)
        except (HTTPError, OSError) as problem:
            raise self._lost(problem) from problem

    def send_daemon(
        self, method: str, call: str, body: Mapping[str, Any], silence_seconds: float
    ) -> dict[str, Any]:
        """Send a JSON body about the whole daemon, and return the JSON object of the response."""
        timeout = Timeout(connect=_CONNECT_SECONDS_MAX, read=silence_seconds)
        headers = dict(self._pool.headers)
        response = self._request(method, call, path="/v1", json=dict(body), headers=headers, timeout=timeout)
        return _object(b"".join(self.pieces(response)))

    def content(self, call: str, **query: str | int | None) -> bytes:
        """Return the bytes of a response."""
        return bytes(self._get(call, query, stream=False).data)

    def download(self, call: str, **query: str | int | None) -> tuple[int | None, Iterator[bytes]]:
        """Return the size of a response, and its bytes in pieces. The size is None if a proxy removed it.

        The pieces raise ConnectionLost if the response breaks off.
        """
        response = self._get(call, query, stream=True)
        size = response.headers.get("Content-Length")
        return None if size is None else int(size), self.pieces(response)

    def stream(
        self, epoch: int, file: str, start: int, stop: int, server_key: str = ""
    ) -> Generator[bytes, None, None]:
        """Yield the bytes of [start, stop) of a file. If the log ends before `stop`, yield the bytes up to
        its end.

        Raises ConnectionLost if the stream breaks off, and ServerChanged if the bytes come from a server with
        a different key.
        """
        response = self._get(
            "bytes", {"epoch": epoch, "file": file, "start": start, "stop": stop}, stream=True
        )
        end = -1
        try:
            self._check_server(response.headers.get(SERVER_HEADER), server_key, f"{file}:{start}")
            end = int(response.headers.get(_STOP_HEADER, -1))
            while piece := response.read(READ_BYTES):
                start += len(piece)
                yield piece
        except (HTTPError, OSError) as problem:
            raise self._lost(problem) from problem
        finally:
            # An unfinished stream leaves unread bytes in its connection, so the connection is closed instead
            # of reused.
            if start == end:
                response.release_conn()
            else:
                response.close()
        if start != end:
            raise self._foreign(f"bytes ended at {start}, they were to end at {end}")

    def bytes_behind(
        self, epoch: int, file: str, start: int, server_key: str, seconds: float, bytes_max: int
    ) -> ArrivedBytes | None:
        """Wait up to `seconds` for transactions after an offset of a file, and return them.

        Return None if they are larger than `bytes_max`, or if the daemon cannot tell where they end.
        Under load, the daemon sends them without further requests. Propagates errors from `stream`.
        """
        position = Position(epoch, file, start)
        arrived = self._streams.take(self.url, position, seconds, bytes_max)
        if arrived is None:
            arrived = self._request_bytes(position, server_key, seconds, bytes_max)
            if arrived is not None and arrived.content and not seconds:
                self._streams.open(self.url, self._path, replace(position, offset=arrived.end), server_key)
        return arrived

    def _request_bytes(
        self, position: Position, server_key: str, seconds: float, bytes_max: int
    ) -> ArrivedBytes | None:
        epoch, file, start = position.epoch, position.file, position.offset
        query: Query = {"epoch": epoch, "file": file, "start": start, "timeout": str(seconds)}
        response = self._get_directly("bytes", query, bytes_max)
        if response is None:
            response = self._get_small("bytes", query, bytes_max)
        self._check_server(response.headers.get(SERVER_HEADER.lower()), server_key, f"{file}:{start}")
        head = response.headers.get(POSITION_HEADER.lower())
        end = int(response.headers.get(_STOP_HEADER.lower(), -1))
        gtid_set = response.headers.get(GTID_SET_HEADER.lower())
        if head is None or (end > start and gtid_set is None) or response.content is None:
            return None
        if start + len(response.content) != end:
            what = f"bytes ended at {start + len(response.content)}, they were to end at {end}"
            raise self._foreign(what)
        return ArrivedBytes(response.content, end, Position.parse(head), LoggedSet(gtid_set or ""))

    def _get_directly(self, call: str, query: Query, bytes_max: int) -> DirectResponse | None:
        """Return the response to a request over a `DirectConnection`.

        Return None if urllib3 must repeat the request. Raises ConnectionLost if the daemon is silent.
        """
        # Another thread must not use the connection at the same time.
        connection, self._direct = self._direct, None
        seconds = self._silence_seconds
        if self._silent is not None:
            seconds = self._silent.seconds(self.url, seconds)
        response = None
        try:
            if connection is not None and connection.url != self.url:
                connection.close()
                connection = None
            if connection is None:
                connection = self._connect_directly(seconds)
            path = f"{self._path}/{call}?{urlencode(query)}"
            response = connection.get(path, seconds, bytes_max)
        except TimeoutError as problem:
            if connection is not None:
                connection.close()
            raise self._lost(HTTPTimeout(f"no answer for {seconds:g} s")) from problem
        except OSError as problem:
            # The daemon may have closed the idle connection. If it is down, urllib3 reports it.
            _log.debug("a connection to a daemon is opened again", url=self.url, why=str(problem))
        if response is not None:
            self._direct = connection
            if self._silent is not None:
                self._silent.answered(self.url)
        elif connection is not None:
            connection.close()
        return response

    def _connect_directly(self, seconds: float) -> DirectConnection:
        connect_seconds = min(seconds, _CONNECT_SECONDS_MAX)
        return DirectConnection.open(self.url, self._tls, self._sent_headers, connect_seconds)

    def _get_small(self, call: str, query: Query, bytes_max: int) -> DirectResponse:
        """Return the response to a request through urllib3, without its content if it is too long."""
        response = self._get(call, query, stream=True)
        headers = {name.lower(): value for name, value in response.headers.items()}
        content = None
        try:
            if int(headers.get("content-length", 0)) <= bytes_max:
                content = response.read()
                # Only a connection without unread bytes can be used again.
                response.release_conn()
        except (HTTPError, OSError) as problem:
            raise self._lost(problem) from problem
        finally:
            response.close()
        return DirectResponse(headers, content)

    def _check_server(self, named_key: str | None, server_key: str, position: str) -> None:
        self.names_servers = named_key is not None
        if named_key and server_key and named_key != server_key:
            raise ServerChanged(
                f"{self.url} has the log of {named_key} now, not of {server_key}",
                position=position,
                hint="Was the daemon's log folder replaced? The position is looked up again by GTID",
            )

    def post(
        self,
        call: str,
        body: Mapping[str, Any],
        silence_seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send a JSON body and return the response, unread, for streaming. The caller closes it.

        No data for `silence_seconds` counts as a lost connection. `lost` converts the errors raised while
        reading.
        """
        return self._request(
            "POST",
            call,
            json=dict(body),
            headers={**self._pool.headers, **(headers or {})},
            timeout=Timeout(connect=_CONNECT_SECONDS_MAX, read=silence_seconds),
        )

    def send(self, call: str, body: Mapping[str, Any], silence_seconds: float) -> dict[str, Any]:
        """Send a JSON body and return the JSON object of the response."""
        return _object(self.read(call, body, silence_seconds))

    def read(self, call: str, body: Mapping[str, Any], silence_seconds: float) -> bytes:
        """Send a JSON body and return the response. Raises ConnectionLost if it breaks off."""
        return b"".join(self.pieces(self.post(call, body, silence_seconds)))

    def pieces(self, response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
        """Yield the body of a response of `post`, and close it. Raises ConnectionLost if it breaks off."""
        try:
            while piece := response.read1(READ_BYTES):
                yield piece
        except (HTTPError, OSError) as problem:
            raise self._lost(problem) from problem
        finally:
            response.close()

    def lines(self, call: str, body: Mapping[str, Any], silence_seconds: float) -> Iterator[dict[str, Any]]:
        """Yield the lines of a response as JSON objects, up to a line of the kind `end`.

        A line of the kind `problem` describes an error, which is raised. Raises ConnectionLost if the
        response ends before either line.
        """
        response = self.post(call, body, silence_seconds)
        rest = b""
        try:
            while piece := response.read1(READ_BYTES):
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    value = _object(line)
                    if value.get("kind") == "end":
                        return
                    if value.get("kind") == "problem":
                        raise self.problem(value)
                    yield value
        except (HTTPError, OSError) as problem:
            raise self._lost(problem) from problem
        finally:
            response.close()
        raise self._lost(ProtocolError("the answer has no end"))

    def hold(self, reader: str, position: str, seconds: int) -> None:
        """Make the daemon's log keep everything after a position."""
        query = urlencode({"reader": reader, "position": position, "seconds": seconds})
        self._request("POST", f"position?{query}").close()

    def command(self, call: str) -> None:
        """Send a POST request without a body. Raises the error that the daemon answers with."""
        answer = self.post(call, {}, SILENCE_SECONDS_MAX)
        answer.drain_conn()
        answer.release_conn()

    def delete(self, call: str) -> None:
        """Send a DELETE request."""
        self._request("DELETE", call).close()

    def problem(self, value: Mapping[str, Any]) -> PenstockError:
        """Return the error described by a problem document, using the daemon's error class."""
        detail = str(value.get("detail") or "it failed, and did not say why")
        return _named_error(value, detail) or StreamError(f"{self.url} failed: {detail}")

    def lost(self, problem: Exception) -> ConnectionLost:
        """Return the error for a response that broke off."""
        return self._lost(problem)

    def close(self) -> None:
        """Close the connections. The client can be reused."""
        self._pool.clear()
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        self._streams.close()

    def __repr__(self) -> str:
        return f"DaemonClient({self.url + self._path!r})"

    def _get(self, call: str, query: Query, *, stream: bool) -> urllib3.BaseHTTPResponse:
        fields = {name: str(value) for name, value in query.items() if value is not None}
        response = self._request("GET", call, fields=fields)
        if not stream:
            try:
                # Reads the whole body and returns the connection to the pool.
                _ = response.data
            except (HTTPError, OSError) as problem:
                raise self._lost(problem) from problem
        return response

    def _request(self, method: str, call: str, **arguments: Any) -> urllib3.BaseHTTPResponse:
        """Send a request to the member that captures the instance, and return the response, unread.

        Raises the error that the daemon reports.
        """
        for _ in range(_MEMBERS_FOLLOWED_MAX):
            try:
                return self._send(method, call, **arguments)
            except CapturedElsewhere as problem:
                if problem.address is None:
                    self.url = self._configured_url
                    raise
                scheme = self._configured_url.partition("://")[0]
                self.url = f"{scheme}://{problem.address}"
                if self.url != self._configured_url:
                    self._followed_url = self.url
        self.url = self._configured_url
        raise ServerBusy(
            f"{self.url} and other members of its fleet each name another one for {self._path}",
            hint="The instance is moving between members: penstock fleet status",
        )

    def _send(
        self, method: str, call: str, *, path: str | None = None, **arguments: Any
    ) -> urllib3.BaseHTTPResponse:
        if self._silent is not None:
            read_seconds = self._silent.seconds(self.url, self._silence_seconds)
            connect_seconds = min(read_seconds, _CONNECT_SECONDS_MAX)
            arguments.setdefault("timeout", Timeout(connect=connect_seconds, read=read_seconds))
        try:
            response = self._pool.request(
                method,
                f"{self.url}{path or self._path}/{call}",
                redirect=False,
                preload_content=False,
                decode_content=False,
                **arguments,
            )
            if self._silent is not None:
                self._silent.answered(self.url)
            if response.status == 200 and _has_length(response):
                return response
            if response.status == 200:
                # urllib3 accepts a truncated header as complete and treats the body as empty, so
                # refuse a response without a length.
                response.close()
                raise self._lost(ProtocolError("the answer's head does not say how long its body is"))
            body = response.read(_PROBLEM_BYTES_MAX)
            response.close()
        except SSLError as problem:
            raise self._untrusted(problem) from problem
        except MaxRetryError as problem:
            if isinstance(problem.reason, SSLError):
                raise self._untrusted(problem.reason) from problem
            raise self._lost(problem) from problem
        except (HTTPError, OSError) as problem:
            raise self._lost(problem) from problem
        raise self._problem(response, body)

    def _problem(self, response: urllib3.BaseHTTPResponse, body: bytes) -> PenstockError:
        """Return the error described by a response, using the daemon's error class."""
        value = _object(body) if response.headers.get("Content-Type", "").startswith(_PROBLEM_TYPE) else {}
        detail = str(value.get("detail") or f"HTTP status {response.status}")
        error = _named_error(value, detail)
        if error is not None:
            return error
        if response.status in _REFUSED:
            return AuthenticationFailed(
                f"{self.url}: {detail}", hint="Give the daemon's token: PENSTOCK_TOKEN, or token_file"
            )
        if response.status == _NOT_FOUND:
            return SourceMissing(f"{self.url}: {detail}", hint="Is this a penstock daemon, and a recent one?")
        if response.status in _AWAY:
            return ServerBusy(f"{self.url}: {detail}", hint="Is the daemon behind the proxy running?")
        if response.status == _FAILED:
            return StreamError(f"{self.url} failed: {detail}", hint="The daemon's own log says why")
        return self._foreign(detail)

    def _lost(self, problem: Exception) -> ConnectionLost:
        reason = problem.reason if isinstance(problem, MaxRetryError) else problem
        broken = isinstance(reason, ProtocolError)
        lost_url = self.url
        if self._silent is not None and isinstance(reason, HTTPTimeout):
            self._silent.silent(lost_url)
        # Try another member: any member of a fleet knows which member captures the instance, including the
        # member that was followed last.
        self.url = self._configured_url if lost_url != self._configured_url else self._followed_url
        return ConnectionLost(
            f"{lost_url} {'broke off' if broken else 'does not answer'}: {reason}",
            hint=lost_hint(lost_url, reason, "Is the daemon up? penstock serve penstock.yaml"),
        )

    def _untrusted(self, problem: Exception) -> AuthenticationFailed:
        return AuthenticationFailed(
            f"{self.url} cannot be trusted: {problem}",
            hint="Name the certificate authority with ssl_ca, and the daemon as its certificate does",
        )

    def _foreign(self, what: str) -> StreamError:
        return StreamError(f"{self.url} does not answer as a daemon does: {what}", hint="Check host and port")


def _has_length(response: urllib3.BaseHTTPResponse) -> bool:
    """Return whether a response states the length of its body, so that a truncated body is detected."""
    chunked = response.headers.get("Transfer-Encoding", "").lower() == "chunked"
    return chunked or response.headers.get("Content-Length", "").isdecimal()


def _headers(token: Secret) -> dict[str, str]:
    return {"Authorization": f"Bearer {token.reveal()}"} if token else {}


def _named_error(value: Mapping[str, Any], detail: str) -> PenstockError | None:
    """Return the error named by a problem document, None if it is not a Penstock error class."""
    kind = getattr(penstock.errors, str(value.get("type", "")), None)
    if not (isinstance(kind, type) and issubclass(kind, PenstockError)):
        return None
    position, hint = value.get("position"), value.get("hint")
    error = kind(
        detail,
        position=str(position) if position is not None else None,
        hint=str(hint) if hint is not None else None,
    )
    address = value.get("address")
    if isinstance(error, CapturedElsewhere) and isinstance(address, str) and is_host_port(address):
        error.address = address
    return error


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return the TLS context for daemon connections. Raises OptionInvalid for unusable files."""
    context = tls.context()
    # Trust the daemon's own certificate if `ssl_ca` contains it instead of its authority's.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _tls_arguments(tls: Tls | None) -> dict[str, Any]:
    """Return the TLS arguments of urllib3. Raises OptionInvalid."""
    if tls is None:
        return {}
    context = tls_context(tls)
    host_check = {} if context.check_hostname else {"assert_hostname": False}
    return {"ssl_context": context, **host_check}


def lost_hint(url: str, reason: object, otherwise: str) -> str:
    """Return the hint for a daemon that did not answer. A daemon that resets connections may expect TLS."""
    causes = (reason, *reason.args) if isinstance(reason, Exception) else ()
    if url.startswith("http://") and any(isinstance(cause, ConnectionResetError) for cause in causes):
        return f"Does it speak TLS? Write https:// or penstocks:// then. {otherwise}"
    return otherwise
