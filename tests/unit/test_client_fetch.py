# SPDX-License-Identifier: Apache-2.0
import json
import ssl
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from penstock.client.fetch import BatchFrame, ChangesAnswer, EndFrame, Frame, PositionFrame
from penstock.errors import ConnectionLost, OptionInvalid, PositionPurged, StreamError
from penstock.model import Position
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from tests.support.suite.patience import WAIT_SECONDS_MAX
from tools.servers import certificate

# A timeout that is meant to expire.
SILENCE_SECONDS_SHORT = 0.5


def frame(content: bytes = b"", **header: Any) -> bytes:
    head = json.dumps({**header, "bytes": len(content)}).encode()
    return struct.pack(">I", len(head)) + head + content


def arrow(count: int) -> bytes:
    batch = pyarrow.record_batch({"id": pyarrow.array(range(count), pyarrow.int64())})
    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


BATCH = frame(arrow(1000), kind="batch", table="shop.orders", rows=1000, schema_version=7, key=["id"])
POSITION = frame(
    kind="position",
    position="2/mysql-bin.000003:1542",
    gtid_set="0-1-9",
    server_key="x",
    time_us=5,
    behind_bytes=6,
)
END = frame(kind="end", why="wait")


class ChunkServer(ThreadingHTTPServer):
    """Answers every call with the configured chunks. If the last chunk is withheld, the response is
    truncated.
    """

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.whole = True
        # If set, the server goes silent instead of ending its response, until it is closed.
        self.silent = threading.Event()
        self.closing = threading.Event()
        self.asked: list[Any] = []
        self.connections = 0
        super().__init__(("127.0.0.1", 0), _Answering)

    def answer(self, content: bytes, chunk_bytes: int, whole: bool = True) -> None:
        """Set the response, split into chunks of a size."""
        self.chunks = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
        self.whole = whole


class _Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChunkServer

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in self.server.chunks:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        self.wfile.flush()
        if self.server.silent.is_set():
            self.server.closing.wait()
        if self.server.whole:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def log_message(self, *_: Any) -> None:
        """Suppress the log line."""


@pytest.fixture
def server() -> Iterator[ChunkServer]:
    with ChunkServer() as started:
        threading.Thread(target=started.serve_forever, args=(0.01,), daemon=True).start()
        yield started
        started.closing.set()
        started.shutdown()


@pytest.fixture
def client(server: ChunkServer) -> DaemonClient:
    address = DaemonAddress.parse(f"penstock://127.0.0.1:{server.server_port}/shop")
    return DaemonClient(address, address.base_urls[0])


def read(client: DaemonClient) -> list[Frame]:
    return list(ChangesAnswer(client, {"tables": ["shop.*"]}, WAIT_SECONDS_MAX).frames())


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000, 7, 1])
def test_frames_are_read_for_any_packet_boundaries(
    server: ChunkServer, client: DaemonClient, chunk_bytes: int
) -> None:
    server.answer(BATCH + BATCH + POSITION + END, chunk_bytes)
    first, second, position, end = read(client)
    assert server.asked == [{"tables": ["shop.*"]}]
    for batch in (first, second):
        assert isinstance(batch, BatchFrame)
        assert (batch.table, batch.rows, batch.schema_version, batch.key) == ("shop.orders", 1000, 7, ("id",))
        assert batch.to_arrow().column("id").to_pylist() == list(range(1000))
    assert position == PositionFrame(Position(2, "mysql-bin.000003", 1542), "0-1-9", "x", 5, 6)
    assert end == EndFrame("wait")
    # A complete response leaves the connection usable for the next request.
    assert read(client)[-1] == end
    assert server.connections == 1


@pytest.mark.parametrize("left_out", [1, len(END), len(END) + 5])
def test_truncated_response_is_a_lost_connection_after_its_whole_frames(
    server: ChunkServer, client: DaemonClient, left_out: int
) -> None:
    server.answer((POSITION + POSITION + END)[:-left_out], 50, whole=False)
    frames = ChangesAnswer(client, {}, WAIT_SECONDS_MAX).frames()
    assert isinstance(next(frames), PositionFrame)
    with pytest.raises(ConnectionLost):
        list(frames)


def test_silence_is_reported_as_a_lost_connection(server: ChunkServer, client: DaemonClient) -> None:
    server.answer(POSITION, 50)
    server.silent.set()
    with pytest.raises(ConnectionLost):
        # If the machine pauses, the first frame arrives too late as well.
        list(ChangesAnswer(client, {}, SILENCE_SECONDS_SHORT).frames())


def test_another_thread_can_interrupt_a_pending_response(server: ChunkServer, client: DaemonClient) -> None:
    server.answer(POSITION, 50)
    server.silent.set()
    answer = ChangesAnswer(client, {}, WAIT_SECONDS_MAX)
    frames = answer.frames()
    next(frames)
    threading.Timer(0.05, answer.cut).start()
    with pytest.raises(ConnectionLost):
        next(frames)


def test_truncated_tls_response_is_never_read_as_plain_bytes(server: ChunkServer, tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "tls" / "server.pem", tmp_path / "tls" / "server-key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    authority = tmp_path / "tls" / "authority.pem"
    text = f"penstocks://127.0.0.1:{server.server_port}/shop?ssl_ca={authority}"
    address = DaemonAddress.parse(text)
    server.answer(POSITION, 50)
    server.silent.set()
    answer = ChangesAnswer(DaemonClient(address, address.base_urls[0]), {}, WAIT_SECONDS_MAX)
    frames = answer.frames()
    next(frames)
    reading = answer._socket
    assert isinstance(reading, ssl.SSLSocket)
    answer.cut()
    assert reading.version() is not None, "it decrypts what is still to be read"
    with pytest.raises(ConnectionLost):
        next(frames)


def test_problem_during_a_response_is_raised_as_the_daemon_sent_it(
    server: ChunkServer, client: DaemonClient
) -> None:
    whole_problem = {
        "type": "PositionPurged",
        "detail": "gone",
        "position": "mysql-bin.000001:4",
        "hint": "begin anew",
    }
    server.answer(POSITION + frame(kind="problem", **whole_problem), 50)
    with pytest.raises(PositionPurged) as problem:
        read(client)
    assert (problem.value.position, problem.value.hint) == ("mysql-bin.000001:4", "begin anew")


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xff\xff\xff" + bytes(100),
        struct.pack(">I", 5) + b"hello",
        frame(kind="surprise"),
        frame(kind="batch"),
        struct.pack(">I", 31) + b'{"kind":"end","bytes":-1234567}',
    ],
)
def test_malformed_frame_is_refused_by_name(
    server: ChunkServer, client: DaemonClient, content: bytes
) -> None:
    server.answer(content, 50)
    with pytest.raises(StreamError, match=r"127\.0\.0\.1"):
        read(client)


def test_malformed_arrow_rows_are_refused(server: ChunkServer, client: DaemonClient) -> None:
    server.answer(frame(b"no arrow", kind="batch", table="d.t", rows=1, schema_version=1, key=[]) + END, 50)
    batch, _ = read(client)
    assert isinstance(batch, BatchFrame)
    with pytest.raises(StreamError, match=r"d\.t"):
        batch.to_arrow()


def test_refusal_precedes_any_frame(client: DaemonClient, server: ChunkServer) -> None:
    server.RequestHandlerClass = _Refusing
    with pytest.raises(OptionInvalid, match="no such column"):
        ChangesAnswer(client, {}, WAIT_SECONDS_MAX)


class _Refusing(_Answering):
    def do_POST(self) -> None:
        body = json.dumps({"type": "OptionInvalid", "detail": "no such column"}).encode()
        self.send_response(400)
        self.send_header("Content-Type", "application/problem+json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
