# SPDX-License-Identifier: Apache-2.0
"""A daemon's response that is truncated at any byte is treated as a lost connection, never as a wrong or
empty response.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.errors import ConnectionLost
from penstock.source.daemon_address import DaemonAddress
from penstock.source.daemon_client import DaemonClient
from tests.support.suite.patience import WAIT_SECONDS_MAX

BODY = b'{"position": "mysql-bin.000001:4"}'
ANSWER = (
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\nPenstock-Stop: 38\r\n"
    b"Content-Length: " + str(len(BODY)).encode() + b"\r\n\r\n" + BODY
)

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/csv\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nid\n\r\n2\r\n7\n\r\n0\r\n\r\n"
)


@contextmanager
def answering(answer: bytes) -> Iterator[DaemonClient]:
    """Run a server that sends these bytes for each request and closes the connection cleanly."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        address = DaemonAddress.parse(f"penstock://127.0.0.1:{listener.getsockname()[1]}/shop")
        client = DaemonClient(address, url)
        try:
            yield client
        finally:
            client.close()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_whole_response_is_accepted() -> None:
    with answering(ANSWER) as client:
        assert client.ask("earliest") == {"position": "mysql-bin.000001:4"}
        assert client.content("head_bytes") == BODY
        assert b"".join(client.stream(0, "mysql-bin.000001", 4, 38)) == BODY


CALLS: dict[str, Callable[[DaemonClient], object]] = {
    "ask": lambda client: client.ask("earliest"),
    "content": lambda client: client.content("head_bytes"),
    "stream": lambda client: list(client.stream(0, "mysql-bin.000001", 4, 38)),
    "pieces": lambda client: list(client.pieces(client.post("as-of", {}, WAIT_SECONDS_MAX))),
}


@pytest.mark.parametrize("call", CALLS)
def test_truncated_response_is_a_lost_connection(call: str) -> None:
    for length in range(1, len(ANSWER)):
        with answering(ANSWER[:length]) as client, pytest.raises(ConnectionLost):
            CALLS[call](client)


def test_file_that_breaks_off_is_a_lost_connection() -> None:
    with answering(CHUNKED) as client:
        assert CALLS["pieces"](client) == [b"id\n", b"7\n"]
    # The last four bytes are the line breaks that end the response.
    for length in range(1, len(CHUNKED) - 4):
        with answering(CHUNKED[:length]) as client, pytest.raises(ConnectionLost):
            CALLS["pieces"](client)


@pytest.mark.parametrize(
    ("answer", "size", "content"), [(ANSWER, len(BODY), BODY), (CHUNKED, None, b"id\n7\n")]
)
def test_download_has_a_size_unless_a_proxy_removes_it(
    answer: bytes, size: int | None, content: bytes
) -> None:
    with answering(answer) as client:
        known_size, pieces = client.download("export")
        assert (known_size, b"".join(pieces)) == (size, content)
