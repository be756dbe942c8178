# SPDX-License-Identifier: Apache-2.0
"""A reverse proxy that serves another server below a path, as nginx does with proxy_buffering off."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.suite.patience import WAIT_SECONDS_MAX

_PIECE_BYTES = 4096


class Proxy:
    """A running reverse proxy: its `url`, the cookies set through it, and the paths that it refused because
    they are outside its base path.
    """

    def __init__(self) -> None:
        self.url = ""
        self.cookies: list[str] = []
        self.refused: list[str] = []


@contextmanager
def proxied(port: int, base_path: str) -> Iterator[Proxy]:
    """Inside the block, run a reverse proxy that serves a local port below a base path."""
    proxy = Proxy()

    class Forwarding(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(None)

        def do_POST(self) -> None:
            self._forward(self.rfile.read(int(self.headers["Content-Length"])))

        def _forward(self, body: bytes | None) -> None:
            if not self.path.startswith(f"{base_path}/"):
                proxy.refused.append(self.path)
                self.send_error(404)
                return
            connection = HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS_MAX)
            try:
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                        self.send_header(name, value)
                    if name.lower() == "set-cookie":
                        proxy.cookies.append(value)
                self.send_header("Connection", "close")
                self.end_headers()
                while piece := answer.read1(_PIECE_BYTES):
                    self.wfile.write(piece)
            except (BrokenPipeError, ConnectionResetError):
                self.close_connection = True
            finally:
                connection.close()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Forwarding) as server:
        server.daemon_threads = True
        proxy.url = f"http://127.0.0.1:{server.server_port}{base_path}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield proxy
        finally:
            server.shutdown()
            thread.join(WAIT_SECONDS_MAX)
