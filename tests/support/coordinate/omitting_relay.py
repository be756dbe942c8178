# SPDX-License-Identifier: Apache-2.0
"""A relay to a ZooKeeper server that omits answers, as a server that has lost its leader may do."""

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

_LENGTH = struct.Struct("!i")


class OmittingRelay:
    """A relay that can omit an answer. As a context manager, it runs inside the block. Set `omits` to omit
    the next answer.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self.port: int = self._listener.getsockname()[1]
        self.omits = threading.Event()
        self.has_omitted = threading.Event()

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        for open_socket in self._sockets:
            _end(open_socket)
        for thread in self._threads[1:]:
            thread.join()
        for open_socket in (self._listener, *self._sockets):
            open_socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._server_port))
            self._sockets += [client, server]
            for relay, source, target in (
                (self._relay_requests, client, server),
                (self._relay_answers, server, client),
            ):
                thread = threading.Thread(target=self._run, args=(relay, source, target))
                self._threads.append(thread)
                thread.start()

    def _run(
        self,
        relay: Callable[[socket.socket, socket.socket], None],
        source: socket.socket,
        target: socket.socket,
    ) -> None:
        # One side has closed the connection.
        with suppress(OSError, struct.error):
            relay(source, target)
        _end(source)
        _end(target)

    def _relay_requests(self, source: socket.socket, target: socket.socket) -> None:
        while chunk := source.recv(1 << 16):
            target.sendall(chunk)

    def _relay_answers(self, source: socket.socket, target: socket.socket) -> None:
        with source.makefile("rb") as answers:
            while True:
                (length,) = _LENGTH.unpack(answers.read(_LENGTH.size))
                answer = answers.read(length)
                # Answers to pings and notifications of watches have negative numbers.
                (number,) = _LENGTH.unpack(answer[: _LENGTH.size])
                if number > 0 and self.omits.is_set():
                    self.omits.clear()
                    self.has_omitted.set()
                    continue
                target.sendall(_LENGTH.pack(length) + answer)


def _end(connected: socket.socket) -> None:
    # The connection may have ended.
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)
