# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that records requests and sends the answers that a test configures."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Received:
    """One request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class HttpEndpoint:
    """An HTTP server that runs inside the block.

    `answers` contains the statuses and headers of the next responses; after them, the status is 200. A status
    of 0 records the request and closes the connection without a response. `bodies` contains the bodies of the
    next successful responses; after them, bodies are empty. `refusal` is the body of all other responses.
    """

    def __init__(self) -> None:
        self.received: list[Received] = []
        self.answers: deque[tuple[int, Mapping[str, str]]] = deque()
        self.bodies: deque[bytes] = deque()
        self.refusal = b"no, thank you"
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._answering())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, *statuses: int, **headers: str) -> None:
        """Set the statuses of the next answers."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.answers.extend((status, named) for status in statuses)

    def _answering(self) -> type[BaseHTTPRequestHandler]:
        endpoint = self

        class Answering(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _take(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.command != "HEAD":
                    endpoint.received.append(Received(self.command, self.path, dict(self.headers), body))
                status, headers = endpoint.answers.popleft() if endpoint.answers else (200, {})
                if status == 0:
                    self.close_connection = True
                    return
                said = endpoint.refusal
                if status < 300:
                    said = endpoint.bodies.popleft() if endpoint.bodies else b""
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(said)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(said)

            do_GET = do_HEAD = do_POST = do_PUT = _take

            def log_message(self, *words: Any) -> None:
                """Suppress the log line; the request is recorded."""

        return Answering
