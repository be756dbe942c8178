# SPDX-License-Identifier: Apache-2.0
"""A pipelined connection to a Redis server.

Arrays of commands are sent without copying. Each answer is one line. Answers are only counted, except for
errors, which are parsed.
"""

import select
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import pyarrow
import pyarrow.compute as pc

from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    ServerBusy,
    ServerUnsupported,
)
from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint, connection_error
from penstock.sinks.sink import extra_missing

if TYPE_CHECKING:
    import redis

_CONNECT_SECONDS_MAX = 10.0
_ANSWER_SECONDS_MAX = 60.0
_KEYS_AT_ONCE = 1000

# Bytes to send before reading earlier answers, enough to keep the server busy.
BYTES_UNDER_WAY = 1 << 20
_ROWS_UNDER_WAY = 10_000

_RECEIVED_MAX = 1 << 18
_LINE_END = ord("\n")

HINT_CLUSTER = "The server is a node of a cluster: set cluster: true of the sink"
_GRANT = "Grant the account what the guide of the redis sink lists: ACL SETUSER"

# The first word of an error is its code. These errors are temporary:
_TEMPORARY = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "OOM", "NOREPLICAS")
_BY_CODE: dict[str, tuple[type[PenstockError], str]] = {
    "NOAUTH": (AuthenticationFailed, "Set user and password of the sink"),
    "WRONGPASS": (AuthenticationFailed, "Check user and password of the sink"),
    "NOPERM": (PrivilegeMissing, _GRANT),
    "WRONGTYPE": (OptionInvalid, "A key of that name holds another type: choose another key template"),
    "MOVED": (OptionInvalid, HINT_CLUSTER),
    "ASK": (OptionInvalid, HINT_CLUSTER),
} | dict.fromkeys(_TEMPORARY, (ServerBusy, "The batch is tried again"))


def client(endpoint: Endpoint, password: Secret | None) -> "redis.Redis":
    """Return a client, which connects on first use. Raises OptionInvalid, DependencyMissing."""
    try:
        import redis
    except ImportError as problem:
        raise extra_missing("redis", "redis") from problem
    options = {} if endpoint.ca is None else {"ssl_ca_certs": str(endpoint.ca)}
    try:
        return redis.Redis.from_url(
            endpoint.url,
            username=endpoint.user,
            password=password.reveal() if password else None,
            protocol=2,
            socket_timeout=_ANSWER_SECONDS_MAX,
            socket_connect_timeout=_CONNECT_SECONDS_MAX,
            **options,
        )
    except ValueError as problem:
        raise OptionInvalid(
            f"{endpoint.url!r} is no Redis server: {problem}", hint="Write redis://host:6379/0"
        ) from problem


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate the client's exceptions into Penstock errors."""
    from redis import exceptions

    try:
        yield
    except exceptions.AuthenticationError as problem:
        raise AuthenticationFailed(
            f"Redis refuses the account: {problem}", hint="Check user and password of the sink"
        ) from problem
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as problem:
        raise connection_error("Redis", problem) from problem
    except exceptions.NoPermissionError as problem:
        raise PrivilegeMissing(f"Redis answers: {problem}", hint=_GRANT) from problem
    except exceptions.RedisError as problem:
        raise ServerUnsupported(f"Redis answers: {problem}") from problem


def connect(endpoint: Endpoint, password: Secret | None) -> "Pipeline":
    """Return a connection that is ready for commands.

    Raises ConnectionLost, AuthenticationFailed, PrivilegeMissing, OptionInvalid, DependencyMissing.
    """
    return Pipeline(open_stream(endpoint, password))


def open_stream(endpoint: Endpoint, password: Secret | None) -> socket.socket:
    """Return a socket of an authenticated connection. Raises the same errors as `connect`."""
    redis_client = client(endpoint, password)
    with translate_errors():
        connection: Any = redis_client.connection_pool.get_connection()
        connection.connect()
    # Let the client authenticate, and then take over its socket.
    stream: socket.socket | None = connection._sock
    assert stream is not None
    connection._sock = None
    return stream


def is_cluster_node(endpoint: Endpoint, password: Secret | None) -> bool:
    """Return whether a server is a node of a cluster; False if the account may not ask."""
    redis_client = client(endpoint, password)
    try:
        with translate_errors():
            cluster_state: Any = redis_client.info("cluster")
        return bool(cluster_state.get("cluster_enabled"))
    except PrivilegeMissing:
        return False
    finally:
        redis_client.close()


def matching_keys(endpoint: Endpoint, password: Secret | None, pattern: str) -> Iterator[pyarrow.Array]:
    """Yield the keys that match a pattern, in pages."""
    with closing(client(endpoint, password)) as redis_client:
        cursor = None
        while cursor != 0:
            with translate_errors():
                cursor, keys = redis_client.scan(cursor or 0, match=pattern, count=_KEYS_AT_ONCE)
            if keys:
                # A key that another program wrote may be invalid text. It is sent back unchanged.
                options = pc.CastOptions(pyarrow.string(), allow_invalid_utf8=True)
                yield pc.cast(pyarrow.array(keys, pyarrow.binary()), options=options)


class Pending(NamedTuple):
    """Commands that have been sent but not yet answered. Each row gets the same number of answers."""

    commands: pyarrow.Array
    keys: pyarrow.Array
    answers: int

    def row_of(self, answer: int) -> int:
        """Return the row that an answer belongs to."""
        return answer * len(self.keys) // self.answers


class Pipeline:
    """A connection with pending commands. Used by one thread."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sent: deque[Pending] = deque()
        self._rest = b""
        self.bytes = 0

    def send(self, encoded: pyarrow.Array, keys: pyarrow.Array, answers: int = 1) -> None:
        """Send an array of commands, each answered by `answers` lines. `keys` identify commands in errors.

        Raises ConnectionLost, and the error of an earlier command that failed.
        """
        start = 0
        step = max(1, min(_ROWS_UNDER_WAY, len(encoded) * BYTES_UNDER_WAY // max(1, encoded.nbytes)))
        while start < len(encoded):
            piece = encoded.slice(start, step)
            self._write(piece)
            self._sent.append(Pending(piece, keys.slice(start, step), len(piece) * answers))
            start += step
            while len(self._sent) > 1:
                self._read(self._sent.popleft())

    def finish(self) -> None:
        """Wait until everything is answered. Raises the same errors as `send`."""
        while self._sent:
            self._read(self._sent.popleft())

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def __del__(self) -> None:
        self._stream.close()

    @property
    def is_open(self) -> bool:
        """Whether the connection is still open. Requires that no command is pending."""
        # The socket becomes readable when the server closes the connection. While the connection is open and
        # idle, the socket is never readable.
        waiting = select.poll()
        waiting.register(self._stream, select.POLLIN)
        return not waiting.poll(0)

    def call(self, command: bytes) -> str:
        """Send a command and return its answer, even an error. Requires that no command is pending."""
        self._write_bytes(memoryview(command))
        while _LINE_END not in self._rest:
            self._rest += self._receive()
        answer, _, self._rest = self._rest.partition(b"\r\n")
        return answer.decode(errors="replace")

    def _write(self, piece: pyarrow.Array) -> None:
        # An array of strings stores the start of each string, and the end of the last one.
        offsets = numpy.frombuffer(piece.buffers()[1], numpy.int32)
        first, last = offsets[piece.offset], offsets[piece.offset + len(piece)]
        self._write_bytes(memoryview(piece.buffers()[2])[first:last])

    def _write_bytes(self, data: memoryview) -> None:
        self.bytes += len(data)
        try:
            self._stream.sendall(data)
        except OSError as problem:
            raise ConnectionLost(f"Redis went away: {problem}") from problem

    def _read(self, sent: Pending) -> None:
        answered = 0
        while answered < sent.answers:
            ends = numpy.flatnonzero(numpy.frombuffer(self._rest, numpy.uint8) == _LINE_END)
            ends = ends[: sent.answers - answered]
            if not len(ends):
                self._rest += self._receive()
                continue
            end = int(ends[-1]) + 1
            lines, self._rest = self._rest[:end], self._rest[end:]
            self._check(lines, answered, sent)
            answered += len(ends)

    def _check(self, lines: bytes, answered: int, sent: Pending) -> None:
        """Raise the first error in `lines`, which are answers to pending commands. `answered` is the number
        of answers that arrived before them.
        """
        if lines.startswith(b"-") or b"\n-" in lines:
            raise _first_error(lines, answered, sent)

    def _receive(self) -> bytes:
        try:
            received = self._stream.recv(_RECEIVED_MAX)
        except OSError as problem:
            raise ConnectionLost(f"Redis went away: {problem}") from problem
        if not received:
            raise ConnectionLost("Redis closed the connection")
        return received


def refusal(answer: str, position: str | None = None) -> PenstockError:
    """Return the error for an error answer of Redis, by its code."""
    code = answer.split(" ", 1)[0]
    kind, hint = _BY_CODE.get(code, (ServerUnsupported, "See what the server's version offers"))
    return kind(f"Redis answers: {answer}", position=position, hint=hint)


def _first_error(lines: bytes, answered: int, sent: Pending) -> PenstockError:
    """Return the error of the first error answer."""
    for number, line in enumerate(lines.splitlines(), answered):
        if line.startswith(b"-"):
            key = (
                sent.keys.cast(pyarrow.binary())[sent.row_of(number)]
                .as_py()
                .decode(errors="backslashreplace")
            )
            return refusal(line[1:].decode(errors="replace"), f"key {key!r}")
    raise AssertionError("no answer is an error")
