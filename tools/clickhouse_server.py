# SPDX-License-Identifier: Apache-2.0
"""ClickHouse's engine, embedded by chdb, behind the part of ClickHouse's HTTP interface that clients use.

python -m tools.clickhouse_server PORT FOLDER
"""

import gzip
import re
import sys
import tempfile
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import zstandard
from chdb._exceptions import ChdbError
from chdb.session import Session

# Request parameters that clients send, but that are not settings.
_REQUEST_PARAMETERS = (
    "query",
    "database",
    "query_id",
    "session_id",
    "session_timeout",
    "session_check",
    "compress",
    "decompress",
    "wait_end_of_query",
    "default_format",
    "user",
    "password",
    "client_protocol_version",
    "quota_key",
    "role",
)
# Settings of a server that the embedded engine rejects.
_SERVER_ONLY_SETTINGS = (
    "send_progress_in_http_headers",
    "http_headers_progress_interval_ms",
    "enable_http_compression",
)
_DATA_FOLLOWS = b" FORMAT Native\n"
_CODE = re.compile(r"Code: (\d+)")
_ENDS = re.compile(r";\s*\Z")


class Engine:
    """One session of the engine, which runs one statement at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._session = Session(str(folder / "kept"))
        self._lock = threading.Lock()

    def run(self, query: str, data: bytes, settings: dict[str, str], database: str, default: str) -> bytes:
        """Run a statement, with the data of an INSERT. Raises ChdbError."""
        query = _ENDS.sub("", query.strip())
        with self._lock, tempfile.NamedTemporaryFile(dir=self._folder) as data_file:
            if data:
                data_file.write(data)
                data_file.flush()
                head, separator, end = query.rpartition(" FORMAT ")
                assert separator, query
                query = f"{head} FROM INFILE '{data_file.name}' FORMAT {end}"
            self._session.query(f"USE {_quoted(database or 'default')}")
            for name, value in settings.items():
                self._session.query(f"SET {name} = {_literal(value)}")
            try:
                return bytes(self._session.query(query, default).bytes())
            finally:
                # Reset the settings, so that they do not apply to the next statement.
                for name in settings:
                    self._session.query(f"SET {name} = DEFAULT")


class Answering(BaseHTTPRequestHandler):
    """Answers the HTTP requests of one connection."""

    protocol_version = "HTTP/1.1"
    engine: Engine

    def do_GET(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        self._answer(self._chunks() if length is None else self.rfile.read(int(length)))

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""

    def _answer(self, body: bytes) -> None:
        parameters = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        body = _plain(body, self.headers.get("Content-Encoding", ""))
        if "query" in parameters:
            query, data = parameters["query"], body
        else:
            # The data of an INSERT may follow its statement.
            statement, form, data = body.partition(_DATA_FOLLOWS)
            query = (statement + form).decode()
        if not query:
            return self._send(200, b"Ok.\n")
        settings = {
            name: value
            for name, value in parameters.items()
            if name not in (*_REQUEST_PARAMETERS, *_SERVER_ONLY_SETTINGS)
        }
        default = self.headers.get("X-ClickHouse-Format", parameters.get("default_format", "TabSeparated"))
        try:
            content = self.engine.run(query, data, settings, parameters.get("database", ""), default)
        except ChdbError as problem:
            code_match = _CODE.search(str(problem))
            code = code_match[1] if code_match else "1001"
            return self._send(500, str(problem).encode(), {"X-ClickHouse-Exception-Code": code})
        return self._send(200, content)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"X-ClickHouse-Server-Display-Name": "chdb", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _chunks(self) -> bytes:
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)


def _plain(body: bytes, encoding: str) -> bytes:
    match encoding:
        case "gzip":
            return gzip.decompress(body)
        case "deflate":
            return zlib.decompress(body)
        case "zstd":
            return zstandard.ZstdDecompressor().decompressobj().decompress(body)
    assert not encoding, encoding
    return body


def _quoted(name: str) -> str:
    return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"


def _literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def main(port: int, folder: Path) -> None:
    """Serve until the process is terminated."""
    Answering.engine = Engine(folder)
    with ThreadingHTTPServer(("127.0.0.1", port), Answering) as server:
        server.serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
