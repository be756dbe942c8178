# SPDX-License-Identifier: Apache-2.0
"""The metrics and health of a process that is not a daemon: a pipeline, or a program with a subscriber.

    with publish_metrics(subscriber.read_metrics, address="127.0.0.1:9400"):
        subscriber.run(handle)

`GET /metrics`, `/livez`, `/readyz` and `/startupz` need no credentials. They show numbers, and the names of
pipelines, sinks, sources and subscriptions; no table and no value.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog

from penstock.errors import OptionInvalid
from penstock.model import is_loopback
from penstock.settings.listen import split_host_port
from penstock.telemetry.otlp import OtlpPush
from penstock.telemetry.process import read_process
from penstock.telemetry.prometheus import exposition
from penstock.telemetry.readings import Readings, Report

_log = structlog.get_logger(__name__)

# A scraper that does not send its request or read the response for this long is dropped.
_IDLE_SECONDS = 10.0
READINGS_PATH = "/readings"
_CONNECTIONS_MAX = 16
_POLL_SECONDS = 0.1


@contextmanager
def publish_metrics(
    report: Report,
    *,
    address: str | None = None,
    otlp: str | None = None,
    interval: float = 60.0,
    is_ready: Callable[[], bool] = lambda: True,
) -> Iterator[str | None]:
    """Serve metrics at an address, host:port, and push them to an OpenTelemetry collector every `interval`
    seconds, inside the block; yield the bound address.

    Raises OptionInvalid for an address that cannot be used, DependencyMissing for OTLP without its packages.
    """

    def read() -> Readings:
        readings = Readings()
        report(readings)
        read_process(readings)
        return readings

    with ExitStack() as stack:
        bound = None
        if address is not None:
            bound = stack.enter_context(_serving(address, read, is_ready))
        if otlp is not None:
            stack.enter_context(_pushing(OtlpPush(otlp), read, interval))
        yield bound


@contextmanager
def _serving(address: str, read: Callable[[], Readings], is_ready: Callable[[], bool]) -> Iterator[str]:
    try:
        host, port = split_host_port(address)
        server = _Server((host, port), read, is_ready)
    except (ValueError, OSError) as problem:
        raise OptionInvalid(
            f"metrics cannot be served at {address}: {problem}", hint="Write host:port: 127.0.0.1:9400"
        ) from problem
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), name="metrics", daemon=True)
    thread.start()
    port = server.server_address[1]
    bound = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if not is_loopback(host):
        _log.warning("metrics are open to the network", address=bound)
    _log.info("serving metrics", address=bound)
    try:
        yield bound
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def _pushing(push: OtlpPush, read: Callable[[], Readings], interval: float) -> Iterator[None]:
    stopping = threading.Event()

    def push_until_stopped() -> None:
        while not stopping.is_set():
            # Wait before each push, so that the last push includes the counts from the end of the run.
            stopping.wait(interval)
            problem = push.push(read())
            if problem is not None:
                _log.warning("metrics were not pushed", why=problem)

    thread = threading.Thread(target=push_until_stopped, name="otlp", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(_IDLE_SECONDS)
        push.close()


class _Server(ThreadingHTTPServer):
    """Answers a few scrapers at once, each in a thread, and refuses more."""

    daemon_threads = True
    # An unfinished response does not delay the end of the process.
    block_on_close = False

    def __init__(
        self, address: tuple[str, int], read: Callable[[], Readings], is_ready: Callable[[], bool]
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.read, self.is_ready = read, is_ready
        self._free = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        super().__init__(address, _Scrape)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape failed", client=str(client_address), exc_info=True)


class _Scrape(BaseHTTPRequestHandler):
    """One scrape or probe per connection."""

    server: _Server
    timeout = _IDLE_SECONDS
    server_version, sys_version = "penstock", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            body, media_type = exposition(self.server.read(), self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, body, media_type)
        elif path == READINGS_PATH:
            # This response is for the worker that runs this process as a job.
            body = json.dumps(self.server.read().to_json()).encode()
            self._answer(HTTPStatus.OK, body, "application/json")
        elif path == "/livez":
            self._answer(HTTPStatus.OK, b"alive: ok\n")
        elif path in ("/readyz", "/startupz"):
            is_ready = self.server.is_ready()
            status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
            self._answer(status, b"running: ok\n" if is_ready else b"running: failed\n")
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"There are /metrics, /livez, /readyz and /startupz.\n")

    def _answer(self, status: HTTPStatus, body: bytes, media_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""
