# SPDX-License-Identifier: Apache-2.0
"""The messages between a daemon and its capture processes.

Each capture process has two private sockets: a stream for all messages, and one for datagrams that announce
newly visible data. A capture sends datagrams without ever waiting for the daemon. If there is no room for a
datagram, the next report on the stream makes up for it.
"""

import pickle
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError, ProcessFailed
from penstock.logstore.followed_log import LogReport
from penstock.logstore.holds import BrokenHold
from penstock.settings.daemon import Settings

_LENGTH = struct.Struct("<Q")
_DATAGRAM_BYTES_MAX = 1 << 20

# The kernel delivers messages in order with either socket type. Only Linux has SOCK_SEQPACKET, which is
# connected.
DATAGRAMS = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)


@dataclass(frozen=True)
class Start:
    """The first message to a capture process: what to capture.

    If the daemon holds a lease for the process's only instance, `permitted_until` is the time until which the
    process may capture it. It is None if no permission is needed.
    """

    settings: Settings
    instances: Sequence[str]
    permitted_until: float | None = None


@dataclass(frozen=True)
class Permit:
    """Permits a capture process to store received bytes `until` a time, in monotonic seconds of this host."""

    until: float


@dataclass(frozen=True)
class Report:
    """A capture process's report about itself, sent at least every REPORT_SECONDS."""

    statuses: Mapping[str, dict[str, Any]]
    logs: Mapping[str, LogReport]
    refusals: Mapping[str, PenstockError]
    broken_holds: Mapping[str, Sequence[BrokenHold]]


@dataclass(frozen=True)
class Request:
    """A request to call a function in the process at the other end of the channel. `number` identifies the
    answer.
    """

    number: int
    call: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """The result of a request, or the error that it raised."""

    number: int
    result: Any = None
    problem: PenstockError | None = None


class Channel:
    """Sends and receives messages over a stream socket. One thread receives; any thread may send."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Send a message; wait while the receiver is busy.

        Raises OSError if the receiver has ended, TimeoutError if sending took too long, which ends the
        channel in both directions.
        """
        content = pickle.dumps(message)
        with self._sending:
            try:
                self._stream.sendall(_LENGTH.pack(len(content)) + content)
            except TimeoutError:
                # Part of the message may have been sent, so the receiver could read no further message.
                self._shut_down(socket.SHUT_RDWR)
                raise

    def receive(self) -> Any:
        """Return the next message.

        Raises EOFError once the sender has ended, TimeoutError, ProcessFailed for a message of another
        version.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return _decode(self._read(length))

    def end(self) -> None:
        """Tell the other side that no more messages follow."""
        self._shut_down(socket.SHUT_WR)

    def _shut_down(self, how: int) -> None:
        # The other side may have ended.
        with suppress(OSError):
            self._stream.shutdown(how)

    def _read(self, length: int) -> bytes:
        content = bytearray()
        while len(content) < length:
            try:
                piece = self._stream.recv(length - len(content))
            except ConnectionError:
                piece = b""
            if not piece:
                raise EOFError("the process has ended")
            content += piece
        return bytes(content)


class Calls:
    """Calls functions in the process at the other end of a channel, and matches answers to calls.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._answers: dict[int, Future[Any]] = {}

    def call(self, channel: Channel, call: str, *arguments: Any, seconds: float) -> Any:
        """Call a function in the other process and return its result.

        Propagates the function's errors. Raises OSError if the process ends or does not answer in `seconds`.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = answer
        try:
            channel.send(Request(number, call, arguments))
            return answer.result(seconds)
        finally:
            with self._lock:
                self._answers.pop(number, None)

    def answered(self, message: Answer) -> None:
        """Pass an answer to its caller, if the caller still waits."""
        with self._lock:
            answer = self._answers.pop(message.number, None)
        if answer is not None and message.problem is not None:
            answer.set_exception(message.problem)
        elif answer is not None:
            answer.set_result(message.result)

    def end(self) -> None:
        """End all calls: the other process has ended."""
        with self._lock:
            answers, self._answers = self._answers, {}
        for answer in answers.values():
            answer.set_exception(OSError("the process has ended"))


def send_report(datagrams: socket.socket, name: str, report: LogReport) -> bool:
    """Announce newly visible data of an instance; return whether there was room for the datagram."""
    try:
        datagrams.send(pickle.dumps((name, report)), socket.MSG_DONTWAIT)
    except OSError:
        # There is no room, the datagram is too long, or nobody receives it.
        return False
    return True


def receive_reports(datagrams: socket.socket) -> dict[str, LogReport]:
    """Return the newest report of each instance that has arrived. Does not wait. Raises ProcessFailed."""
    reports: dict[str, LogReport] = {}
    while True:
        try:
            content = datagrams.recv(_DATAGRAM_BYTES_MAX, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionError):
            return reports
        if not content:
            return reports
        name, report = _decode(content)
        reports[name] = report


def _decode(content: bytes) -> Any:
    try:
        return pickle.loads(content)
    except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, TypeError, ValueError) as problem:
        raise ProcessFailed(
            f"a message of the daemon or its capture process cannot be read: {problem!r}",
            hint="Penstock was upgraded while the daemon was running: restart the daemon",
        ) from problem
