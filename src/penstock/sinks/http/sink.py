# SPDX-License-Identifier: Apache-2.0
"""Sends changes as requests to an HTTP endpoint (a webhook): in order, with retries and an idempotency
key.
"""

import gzip
import hashlib
import hmac
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy
import pyarrow
import pyarrow.compute as pc
import urllib3
from pydantic import Field, field_validator
from urllib3.exceptions import HTTPError, SSLError
from urllib3.util import Timeout, make_headers

from penstock.changes import Changes, Target
from penstock.errors import (
    AccessDenied,
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    ServerBusy,
    TlsFailed,
)
from penstock.model import Secret
from penstock.retry import Backoff, Retry
from penstock.settings.values import Bytes, Seconds, SecretEnv, SecretText, one_secret
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.messages import messages_of
from penstock.sinks.sink import BatchMark, Delivery, Evolution, Finding, Receipt, Sink, Spread, Writer
from penstock.sinks.template import Template

EXTRA = ""

_CONNECT_SECONDS_MAX = 10.0
_BACKOFF = Backoff(longest=15.0)
# How much of an error response is shown.
_SHOWN_BYTES_MAX = 300
_TOO_MANY, _TIMEOUT, _EARLY = 429, 408, 425
_UNAUTHORIZED, _FORBIDDEN, _TOO_LARGE = 401, 403, 413

IDEMPOTENCY_HEADER = "Idempotency-Key"
SIGNATURE_HEADER = "Penstock-Signature"


class Settings(Endpoint):
    """Where requests go, and what is in them."""

    method: Literal["POST", "PUT", "PATCH"] = "POST"
    format: Literal["debezium", "debezium_schema", "maxwell", "canal_flat", "json"] = Field(
        default="json", description="the message format; json is Penstock's own"
    )
    body: Literal["lines", "array", "each"] = Field(
        default="lines",
        description="lines: several messages as JSON lines; array: as a JSON array; each: one request per"
        " message",
    )
    rows: int = Field(default=1000, ge=1, description="maximum messages per request")
    bytes: Bytes = Field(
        default=1 << 20, ge=1, description="maximum bytes of a request with several messages"
    )
    compression: Literal["none", "gzip"] = "none"
    headers: dict[str, str] = Field(
        default_factory=dict, description="additional headers; do not put secrets here"
    )
    token: SecretText | None = None
    token_file: Path | None = Field(default=None, description="a file with the bearer token")
    token_env: SecretEnv = Field(default=None, description="an environment variable with the bearer token")
    signing_key: SecretText | None = None
    signing_key_file: Path | None = Field(default=None, description="a file with the key that signs requests")
    signing_key_env: SecretEnv = Field(
        default=None, description="an environment variable with the key that signs requests"
    )
    timeout: Seconds = Field(default=30.0, gt=0, description="timeout for one response")
    retry: Seconds = Field(default=300.0, ge=0, description="how long to retry a request")
    order: Literal["key", "table", "commit"] = Field(
        default="key",
        description="the scope of ordering: key: changes of each key; table: changes of each table;"
        " commit: all changes",
    )

    @field_validator("headers")
    @classmethod
    def _no_secrets(cls, headers: dict[str, str]) -> dict[str, str]:
        for name in headers:
            if name.lower() in ("authorization", "cookie", "x-api-key"):
                raise ValueError(f"{name} would show in logs: give user and password, or token")
        return headers


class HttpSink(Sink):
    """Sends requests. Receivers recognise repeated requests by their idempotency key."""

    kind = "http"
    delivery = Delivery.AT_LEAST_ONCE
    keeps_state = False
    shares_columns = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.password = settings.secret()
        self.token = one_secret(settings.token, settings.token_file, settings.token_env, "token")
        self.signing_key = one_secret(
            settings.signing_key, settings.signing_key_file, settings.signing_key_env, "signing_key"
        )
        spreads = {"key": Spread.KEYS, "table": Spread.TABLES, "commit": Spread.WHOLE}
        self.spread = spreads[settings.order]

    def check(self) -> Sequence[Finding]:
        findings = []
        url = self.settings.url.partition("{")[0]
        with _pool(self.settings) as pool:
            try:
                answer = pool.request("HEAD", url, headers=_account(self), redirect=False, retries=False)
            except (HTTPError, OSError) as problem:
                raise _failure(url, problem) from problem
        if answer.status in (_UNAUTHORIZED, _FORBIDDEN):
            findings.append(Finding(url, f"answers {answer.status}", mend="Set user and password, or token"))
        return findings

    def plan(self, target: Target, evolution: Evolution) -> Sequence[str]:
        Template(self.settings.url, target)
        return ()

    def prepare(self, target: Target, evolution: Evolution) -> None:
        Template(self.settings.url, target)

    def open(self, mark: BatchMark, part: int) -> Writer:
        return _RequestWriter(self, mark, part)


make = HttpSink


class _RequestWriter(Writer):
    """Sends one task's part, request by request."""

    def __init__(self, sink: HttpSink, mark: BatchMark, part: int) -> None:
        self._sink = sink
        self._settings = sink.settings
        self._name = f"{mark.application}/{mark.number}/{part}"
        self._pool = _pool(sink.settings)
        # Count requests per table, so that numbering is stable when a batch is retried without a skipped
        # table.
        self._requests: Counter[str] = Counter()
        self._tables: Counter[str] = Counter()
        self._bytes = 0

    def write(self, changes: Changes) -> None:
        with self.working_on(changes.target.name):
            self._send_all(changes)
        self._tables[str(changes.target.name)] += len(changes)

    def _send_all(self, changes: Changes) -> None:
        name = str(changes.target.name)
        messages = messages_of(changes, self._settings.format)
        for url, indexes in _runs(Template(self._settings.url, changes.target), changes, messages.row):
            values = messages.value.take(pyarrow.array(indexes))
            for first, last in self._cuts(values):
                self._send(name, url, values[first:last].to_pylist())

    def finish(self) -> Receipt:
        self.abort()
        return Receipt(rows=self._tables.total(), bytes=self._bytes, tables=self._tables)

    def abort(self) -> None:
        self._pool.clear()

    def _cuts(self, values: pyarrow.Array) -> Iterator[tuple[int, int]]:
        """Yield the bounds of requests: as many messages as the settings allow, but at least one."""
        ends = numpy.cumsum(pc.binary_length(values).to_numpy(zero_copy_only=False) + 1)
        rows = 1 if self._settings.body == "each" else self._settings.rows
        first = 0
        while first < len(values):
            before = ends[first - 1] if first else 0
            fitting = int(numpy.searchsorted(ends, before + self._settings.bytes, side="right"))
            last = min(max(fitting, first + 1), first + rows)
            yield first, last
            first = last

    def _send(self, table: str, url: str, messages: Sequence[bytes]) -> None:
        match self._settings.body:
            case "lines":
                body, kind = b"".join(message + b"\n" for message in messages), "application/x-ndjson"
            case "array":
                body, kind = b"[" + b",".join(messages) + b"]", "application/json"
            case "each":
                body, kind = messages[0], "application/json"
        self._requests[table] += 1
        # The key covers the content, so a retry with other content gets another key.
        name = f"{self._name}/{table}/{self._requests[table]}/".encode()
        headers = {
            "Content-Type": kind,
            IDEMPOTENCY_HEADER: hashlib.sha256(name + body).hexdigest()[:32],
            **self._settings.headers,
            **_account(self._sink),
        }
        if self._settings.compression == "gzip":
            # Omit the modification time, so that a repeated request has the same bytes.
            body, headers["Content-Encoding"] = gzip.compress(body, 5, mtime=0), "gzip"
        self._bytes += len(body)
        self._deliver(url, body, headers)

    def _deliver(self, url: str, body: bytes, headers: dict[str, str]) -> None:
        """Send a request until it is accepted. Raises Penstock errors."""
        retry = Retry("sending a request again", backoff=_BACKOFF, seconds=self._settings.retry)
        retry.start()
        while True:
            wait = 0.0
            try:
                answer = self._pool.request(
                    self._settings.method,
                    url,
                    body=body,
                    headers=headers | self._signature(body),
                    redirect=False,
                    retries=False,
                )
                if 200 <= answer.status < 300:
                    return
                failed = _refusal(url, answer)
                wait = _retry_after(answer)
            except (HTTPError, OSError) as problem:
                failed = _failure(url, problem)
            if not isinstance(failed, ConnectionLost | ServerBusy):
                raise failed
            retry.wait(failed, at_least=wait, url=url)

    def _signature(self, body: bytes) -> dict[str, str]:
        """Return the signature header: the time, and a keyed hash of time and body."""
        key = self._sink.signing_key
        if key is None:
            return {}
        now = str(int(time.time()))
        signature = hmac.new(key.reveal().encode(), f"{now}.".encode() + body, hashlib.sha256)
        return {SIGNATURE_HEADER: f"t={now},sha256={signature.hexdigest()}"}


def _pool(settings: Settings) -> urllib3.PoolManager:
    timeout = Timeout(connect=min(_CONNECT_SECONDS_MAX, settings.timeout), read=settings.timeout)
    return urllib3.PoolManager(
        timeout=timeout, ca_certs=None if settings.ca is None else str(settings.ca), cert_reqs="CERT_REQUIRED"
    )


def _account(sink: HttpSink) -> dict[str, str]:
    if sink.token is not None:
        return {"Authorization": f"Bearer {sink.token.reveal()}"}
    if sink.settings.user is not None:
        password = (sink.password or Secret("")).reveal()
        return {"Authorization": make_headers(basic_auth=f"{sink.settings.user}:{password}")["authorization"]}
    return {}


def _runs(template: Template, changes: Changes, rows: pyarrow.Array) -> Iterator[tuple[str, Any]]:
    """Yield runs of consecutive messages with the same address."""
    if template.constant is not None:
        if len(rows):
            yield template.constant, numpy.arange(len(rows))
        return
    texts = template.texts(changes).take(rows)
    if texts.null_count:
        raise OptionInvalid(
            f"{changes.target.name} has rows for which the address {template.text!r} is null",
            hint="Name columns that are never null, or filter those rows",
        )
    encoded = texts.dictionary_encode()
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    cuts = numpy.flatnonzero(numpy.diff(codes)) + 1
    for run in numpy.split(numpy.arange(len(rows)), cuts):
        if len(run):
            yield encoded.dictionary[int(codes[run[0]])].as_py(), run


def _retry_after(answer: urllib3.BaseHTTPResponse) -> float:
    """Return the seconds to wait that a response requests."""
    seconds = answer.headers.get("Retry-After", "")
    return min(float(seconds), _BACKOFF.longest) if seconds.isdecimal() else 0.0


def _refusal(url: str, answer: urllib3.BaseHTTPResponse) -> PenstockError:
    excerpt = answer.data[:_SHOWN_BYTES_MAX].decode("utf-8", "replace").strip()
    message = f"{url} answers {answer.status}{f': {excerpt}' if excerpt else ''}"
    if answer.status >= 500 or answer.status in (_TOO_MANY, _TIMEOUT, _EARLY):
        return ServerBusy(message, hint="Look at that service; the batch comes again")
    if answer.status == _UNAUTHORIZED:
        return AuthenticationFailed(message, hint="Set user and password, or token, of the http sink")
    if answer.status == _FORBIDDEN:
        return AccessDenied(message, hint="Give the account of the http sink the right to write there")
    if answer.status == _TOO_LARGE:
        return OptionInvalid(message, hint="Lower rows and bytes of the http sink")
    if 300 <= answer.status < 400:
        where = answer.headers.get("Location", "elsewhere")
        return OptionInvalid(message, hint=f"It has moved: set url of the http sink to {where}")
    return OptionInvalid(message, hint="Check url, method, format and body of the http sink")


def _failure(url: str, problem: Exception) -> PenstockError:
    if isinstance(problem, SSLError):
        return TlsFailed(f"{url}: {problem}", hint="Set ca of the http sink to the authority's certificate")
    return ConnectionLost(f"{url} does not answer: {problem}", hint="Check url of the http sink")
