# SPDX-License-Identifier: Apache-2.0
"""A connection to a Redis server that has many commands under way: arrays of them are sent as they are, and
their answers, of one line each, are counted and not looked at one by one.
"""

import select
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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

# So much is sent before the answers of what was sent before are read: enough to keep the server at work.
BYTES_UNDER_WAY = 1 << 20
_ROWS_UNDER_WAY = 10_000

_RECEIVED_MAX = 1 << 18
_LINE_END = ord("\n")

_GRANT = "Grant the account what the guide of the redis sink lists: ACL SETUSER"

# The first word of an error is its code. Those that pass by themselves:
_PASSING = ("LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "OOM", "NOREPLICAS")
_BY_CODE: dict[str, tuple[type[PenstockError], str]] = {
    "NOAUTH": (AuthenticationFailed, "Set user and password of the sink"),
    "WRONGPASS": (AuthenticationFailed, "Check user and password of the sink"),
    "NOPERM": (PrivilegeMissing, _GRANT),
    "WRONGTYPE": (OptionInvalid, "A key of that name holds another type: choose another key template"),
    "MOVED": (OptionInvalid, "This is a node of a cluster: name a proxy in front of it"),
    "ASK": (OptionInvalid, "This is a node of a cluster: name a proxy in front of it"),
} | dict.fromkeys(_PASSING, (ServerBusy, "The batch is tried again"))


def client(endpoint: Endpoint, password: Secret | None) -> "redis.Redis":
    """Return a client, which connects when it is used. Raises OptionInvalid, DependencyMissing."""
    try:
        import redis
    except ImportError as problem:
        raise extra_missing("redis", "redis") from problem
    more = {} if endpoint.ca is None else {"ssl_ca_certs": str(endpoint.ca)}
    try:
        return redis.Redis.from_url(
            endpoint.url,
            username=endpoint.user,
            password=password.reveal() if password else None,
            protocol=2,
            socket_timeout=_ANSWER_SECONDS_MAX,
            socket_connect_timeout=_CONNECT_SECONDS_MAX,
            **more,
        )
    except ValueError as problem:
        raise OptionInvalid(
            f"{endpoint.url!r} is no Redis server: {problem}", hint="Write redis://host:6379/0"
        ) from problem


@contextmanager
def told() -> Iterator[None]:
    """Raise what the client raises as our own errors."""
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
    made = client(endpoint, password)
    with told():
        connection: Any = made.connection_pool.get_connection()
        connection.connect()
    # The client shakes hands; from here on the socket is ours.
    stream = connection._sock
    assert stream is not None
    connection._sock = None
    return Pipeline(stream)


def is_cluster_node(endpoint: Endpoint, password: Secret | None) -> bool:
    """Tell whether a server has only some of a cluster's keys; False where the account may not ask."""
    made = client(endpoint, password)
    try:
        with told():
            found: Any = made.info("cluster")
        return bool(found.get("cluster_enabled"))
    except PrivilegeMissing:
        return False
    finally:
        made.close()


def keys_like(endpoint: Endpoint, password: Secret | None, pattern: str) -> Iterator[pyarrow.Array]:
    """Yield the keys that fit a pattern, many at a time."""
    made = client(endpoint, password)
    try:
        cursor = None
        while cursor != 0:
            with told():
                cursor, keys = made.scan(cursor or 0, match=pattern, count=_KEYS_AT_ONCE)
            if keys:
                # A key that somebody else made may be no text; it is sent back as it came.
                options = pc.CastOptions(pyarrow.string(), allow_invalid_utf8=True)
                yield pc.cast(pyarrow.array(keys, pyarrow.binary()), options=options)
    finally:
        made.close()


class _UnderWay(NamedTuple):
    """What was sent, and is not answered yet."""

    keys: pyarrow.Array
    answers: int


class Pipeline:
    """A connection with commands under way. Used by one thread."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._sent: deque[_UnderWay] = deque()
        self._rest = b""
        self.bytes = 0

    def send(self, made: pyarrow.Array, keys: pyarrow.Array, answers: int = 1) -> None:
        """Send an array of commands, each answered by so many lines; `keys` tell errors what they were about.

        Raises ConnectionLost, and what the server's answers to earlier ones mean.
        """
        start = 0
        step = max(1, min(_ROWS_UNDER_WAY, len(made) * BYTES_UNDER_WAY // max(1, made.nbytes)))
        while start < len(made):
            piece = made.slice(start, step)
            self._write(piece)
            self._sent.append(_UnderWay(keys.slice(start, step), len(piece) * answers))
            start += step
            while len(self._sent) > 1:
                self._read(self._sent.popleft())

    def finish(self) -> None:
        """Return after everything was answered. Raises as `send` does."""
        while self._sent:
            self._read(self._sent.popleft())

    def close(self) -> None:
        """Let go of the connection."""
        self._stream.close()

    def __del__(self) -> None:
        self._stream.close()

    @property
    def is_open(self) -> bool:
        """Whether the server still holds a connection on which nothing is under way."""
        # A server that goes away says so, and one that stays has nothing to say.
        waiting = select.poll()
        waiting.register(self._stream, select.POLLIN)
        return not waiting.poll(0)

    def _write(self, piece: pyarrow.Array) -> None:
        # An array of strings keeps where each begins, and one more place for the end of the last.
        places = numpy.frombuffer(piece.buffers()[1], numpy.int32)
        first, last = places[piece.offset], places[piece.offset + len(piece)]
        data = memoryview(piece.buffers()[2])
        self.bytes += int(last - first)
        try:
            self._stream.sendall(data[first:last])
        except OSError as problem:
            raise ConnectionLost(f"Redis went away: {problem}") from problem

    def _read(self, sent: _UnderWay) -> None:
        answered = 0
        while answered < sent.answers:
            ends = numpy.flatnonzero(numpy.frombuffer(self._rest, numpy.uint8) == _LINE_END)
            ends = ends[: sent.answers - answered]
            if not len(ends):
                self._rest += self._receive()
                continue
            end = int(ends[-1]) + 1
            lines, self._rest = self._rest[:end], self._rest[end:]
            if lines.startswith(b"-") or b"\n-" in lines:
                raise _refused(lines, answered, sent)
            answered += len(ends)

    def _receive(self) -> bytes:
        try:
            received = self._stream.recv(_RECEIVED_MAX)
        except OSError as problem:
            raise ConnectionLost(f"Redis went away: {problem}") from problem
        if not received:
            raise ConnectionLost("Redis closed the connection")
        return received


def refusal(answer: str, position: str | None = None) -> PenstockError:
    """Return the error that an answer of Redis means; its first word is its code."""
    code = answer.split(" ", 1)[0]
    kind, hint = _BY_CODE.get(code, (ServerUnsupported, "See what the server's version offers"))
    return kind(f"Redis answers: {answer}", position=position, hint=hint)


def _refused(lines: bytes, answered: int, sent: _UnderWay) -> PenstockError:
    """Return the error of the first answer that is one."""
    for number, line in enumerate(lines.splitlines(), answered):
        if line.startswith(b"-"):
            key = sent.keys[number * len(sent.keys) // sent.answers].as_py()
            return refusal(line[1:].decode(errors="replace"), f"key {key!r}")
    raise AssertionError("no answer is an error")
