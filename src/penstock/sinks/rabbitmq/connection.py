# SPDX-License-Identifier: Apache-2.0
"""Connections to RabbitMQ: for declarations, and for messages that the broker confirms.

Pika's blocking channel waits for the confirmation of each message. This channel allows many unconfirmed
messages at a time. When it reaches the limit, it runs pika's own event loop until enough of them are
confirmed.
"""

import logging
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from penstock.errors import (
    AuthenticationFailed,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    ServerUnsupported,
)
from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint, connection_error
from penstock.sinks.sink import HINT_GONE, extra_missing

# The library logs each lost connection as several errors, which Penstock reports itself.
logging.getLogger("pika").addHandler(logging.NullHandler())

_CONNECT_SECONDS_MAX = 10.0
_HANDSHAKE_SECONDS_MAX = 30.0
# A broker without memory or disk space, or a queue without a majority, confirms nothing for a while.
_CONFIRM_SECONDS_MAX = 60.0
_CLOSE_SECONDS_MAX = 5.0
# Bounds of unconfirmed messages. When a bound is reached, the event loop runs until half of them are
# confirmed.
_MESSAGES_UNDER_WAY_MAX = 4000
_BYTES_UNDER_WAY_MAX = 16 << 20

_DEFAULT_ACCOUNT = "guest"
_SCHEMES = ("amqp", "amqps")


_GRANT = "Grant the account what the guide of the rabbitmq sink lists, on its virtual host"


def library() -> Any:
    """Return the module `pika`. Raises DependencyMissing."""
    try:
        import pika
        import pika.adapters.blocking_connection
        import pika.adapters.select_connection
        import pika.exceptions
    except ImportError as problem:
        raise extra_missing("pika", "rabbitmq") from problem
    return pika


def parameters(endpoint: Endpoint, password: Secret | None) -> list[Any]:
    """Return the library's parameters for each host of the URL. Raises OptionInvalid, DependencyMissing."""
    pika = library()
    parts = urlsplit(endpoint.url)
    account = endpoint.user or _DEFAULT_ACCOUNT
    word = password.reveal() if password else (_DEFAULT_ACCOUNT if endpoint.user is None else "")
    tls = parts.scheme == "amqps"
    try:
        if parts.scheme not in _SCHEMES:
            raise ValueError("the scheme is neither amqp nor amqps")
        hosts = [urlsplit(f"//{host}") for host in parts.netloc.split(",")]
        context = ssl.create_default_context(cafile=endpoint.ca) if tls else None
        return [
            pika.ConnectionParameters(
                host=host.hostname or "127.0.0.1",
                port=host.port or (5671 if tls else 5672),
                virtual_host=unquote(parts.path[1:]) or "/",
                credentials=pika.PlainCredentials(account, word, erase_on_connect=False),
                ssl_options=pika.SSLOptions(context, host.hostname) if context is not None else None,
                # The sink runs the library's event loop only while it writes, so it cannot answer heartbeats.
                heartbeat=0,
                blocked_connection_timeout=_CONFIRM_SECONDS_MAX,
                socket_timeout=_CONNECT_SECONDS_MAX,
                stack_timeout=_HANDSHAKE_SECONDS_MAX,
            )
            for host in hosts
        ]
    except (ValueError, ssl.SSLError, OSError) as problem:
        raise OptionInvalid(
            f"{endpoint.url!r} is no RabbitMQ broker: {problem}", hint="Write amqp://host:5672/vhost"
        ) from problem


@contextmanager
def declaring(endpoint: Endpoint, password: Secret | None) -> Iterator[Any]:
    """Connect for declarations: yield a blocking connection, and translate the library's exceptions."""
    pika = library()
    hosts = parameters(endpoint, password)
    try:
        connection = pika.BlockingConnection(hosts)
        try:
            yield connection
        finally:
            if connection.is_open:
                connection.close()
    except (pika.exceptions.AMQPError, OSError) as problem:
        raise error_of(problem) from problem


def error_of(problem: BaseException) -> PenstockError:
    """Return the Penstock error for an exception of the library."""
    errors = library().exceptions
    cause = _cause(problem)
    message = f"RabbitMQ answers: {cause}"
    if isinstance(cause, errors.ProbableAuthenticationError | errors.AuthenticationError):
        return AuthenticationFailed(message, hint="Check user and password of the sink")
    if isinstance(cause, errors.ProbableAccessDeniedError):
        return PrivilegeMissing(message, hint="Create the virtual host, and grant the account access to it")
    if isinstance(cause, errors.ConnectionBlockedTimeout):
        return ServerBusy("RabbitMQ accepts no messages: it is short of memory or disk space")
    if isinstance(cause, errors.ChannelClosedByBroker):
        match cause.reply_code:
            case 403:
                return PrivilegeMissing(message, hint=_GRANT)
            case 404:
                return SchemaChanged(message, hint=HINT_GONE)
            case 405 | 541:
                return ServerBusy(message)
            case 406:
                return OptionInvalid(
                    message,
                    hint="Set claim_check for large messages, or another exchange or queue_type, as the"
                    " answer says",
                )
        return ServerUnsupported(message)
    return connection_error("RabbitMQ", cause)


def _cause(problem: BaseException) -> BaseException:
    """Return the underlying exception of a failed connection. The library nests the exceptions of its
    attempts, one for each host.
    """
    attempts = getattr(problem, "exceptions", None) or [getattr(problem, "exception", None)]
    return problem if attempts[-1] is None else _cause(attempts[-1])


class ConfirmedChannel:
    """A channel on which the broker confirms each message. Used by one thread.

    Raises ConnectionLost, AuthenticationFailed, PrivilegeMissing, OptionInvalid, DependencyMissing.
    """

    def __init__(self, endpoint: Endpoint, password: Secret | None, unroutable_may_drop: bool) -> None:
        self._unroutable_may_drop = unroutable_may_drop
        self._failed: PenstockError | None = None
        # The size of each unconfirmed message, by its number (the delivery tag), in order.
        self._under_way: dict[int, int] = {}
        self._bytes_under_way = 0
        self._sent = 0
        self._connection: Any = None
        hosts = parameters(endpoint, password)
        for number, host in enumerate(hosts):
            try:
                self._open(host)
                return
            except ConnectionLost:
                self.close()
                if number + 1 == len(hosts):
                    raise
            except BaseException:
                self.close()
                raise
            self._failed = None

    def publish(self, exchange: str, routing_key: str, body: bytes, properties: Any) -> None:
        """Send a message. Raises an error if an earlier message failed."""
        with self._translate_errors():
            self._channel.basic_publish(exchange, routing_key, body, properties, mandatory=True)
        self._sent += 1
        self._under_way[self._sent] = len(body)
        self._bytes_under_way += len(body)
        if len(self._under_way) >= _MESSAGES_UNDER_WAY_MAX or self._bytes_under_way >= _BYTES_UNDER_WAY_MAX:
            self._wait(_MESSAGES_UNDER_WAY_MAX // 2, _BYTES_UNDER_WAY_MAX // 2)

    def flush(self) -> None:
        """Wait until the broker has confirmed all messages. Raises an error if the broker refused a
        message.
        """
        self._wait(0, 0)

    @property
    def is_open(self) -> bool:
        """Whether the connection is still open. Requires that every message is confirmed."""
        self._loop.call_later(0.0, lambda: None)
        self._poll()
        return self._failed is None and bool(self._channel.is_open)

    def close(self) -> None:
        """Close the connection. Unconfirmed messages may be lost."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS_MAX
        with suppress(library().exceptions.AMQPError, OSError):
            if not connection.is_closed:
                connection.close()
            while not connection.is_closed and time.monotonic() < deadline:
                self._loop.call_later(0.1, lambda: None)
                self._poll()
        self._loop.deactivate_poller()
        self._loop.close()

    def _open(self, host: Any) -> None:
        pika = library()
        adapters = pika.adapters.select_connection
        self._loop = adapters.IOLoop()
        self._loop.activate_poller()
        opened: list[Any] = []
        self._connection = adapters.SelectConnection(
            host,
            on_open_callback=opened.append,
            on_open_error_callback=lambda _, problem: self._fail(error_of(problem)),
            on_close_callback=lambda _, problem: self._fail(error_of(problem)),
            custom_ioloop=self._loop,
        )
        self._run_until(lambda: bool(opened))
        self._channel = self._connection.channel(on_open_callback=opened.append)
        self._channel.add_on_close_callback(lambda _, problem: self._fail(error_of(problem)))
        self._channel.add_on_return_callback(self._returned)
        self._run_until(lambda: len(opened) > 1)
        self._channel.confirm_delivery(self._confirmed, callback=opened.append)
        self._run_until(lambda: len(opened) > 2)

    def _wait(self, messages: int, size: int) -> None:
        """Wait until the unconfirmed messages are within bounds of their number and size."""
        self._run_until(lambda: len(self._under_way) <= messages and self._bytes_under_way <= size)

    def _run_until(self, is_done: Callable[[], bool]) -> None:
        deadline, before = time.monotonic() + _CONFIRM_SECONDS_MAX, len(self._under_way)
        while not is_done():
            self._raise()
            with self._translate_errors():
                self._poll()
            if len(self._under_way) < before:
                deadline, before = time.monotonic() + _CONFIRM_SECONDS_MAX, len(self._under_way)
            if time.monotonic() > deadline:
                raise ServerBusy(f"RabbitMQ confirms nothing for {_CONFIRM_SECONDS_MAX:g} s")
        self._raise()

    def _poll(self) -> None:
        """Wait for the next event of the connection, for a few seconds at most."""
        self._loop.poll()
        self._loop.process_timeouts()

    def _confirmed(self, frame: Any) -> None:
        method = frame.method
        if type(method).__name__ != "Ack":
            self._fail(ServerBusy("RabbitMQ rejected a message: a queue is full or has no majority"))
        if method.multiple:
            confirmed = []
            for number in self._under_way:
                if number > method.delivery_tag:
                    break
                confirmed.append(number)
        else:
            confirmed = [method.delivery_tag]
        for number in confirmed:
            self._bytes_under_way -= self._under_way.pop(number, 0)

    def _returned(self, channel: Any, method: Any, properties: Any, body: bytes) -> None:
        if not self._unroutable_may_drop:
            self._fail(
                OptionInvalid(
                    f"RabbitMQ has no queue for the routing key {method.routing_key!r} of the exchange"
                    f" {method.exchange!r}",
                    hint="Bind a queue, or restart the pipeline so that it does; or set unroutable: drop",
                )
            )

    def _fail(self, problem: PenstockError) -> None:
        if self._failed is None:
            self._failed = problem

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (library().exceptions.AMQPError, OSError) as problem:
            # The broker has closed the channel or the connection, and has given a reason.
            self._raise()
            raise error_of(problem) from problem
