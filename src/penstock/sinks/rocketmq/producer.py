# SPDX-License-Identifier: Apache-2.0
"""The queues of RocketMQ topics, and a producer that keeps messages in order within each queue.

A broker handles the requests of one connection in parallel. To keep the order, each queue has at most one
request in flight, which carries many messages. Requests for different queues run in parallel.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from penstock.errors import (
    AnswerTimedOut,
    ConnectionLost,
    OptionInvalid,
    PenstockError,
    ServerBusy,
    TransientError,
)
from penstock.model import Secret
from penstock.sinks.endpoint import Endpoint
from penstock.sinks.rocketmq.remoting import Answer, Connection, Request, error_of, read_json

_SCHEMES = {"rocketmq": False, "rocketmqs": True}
_PORT_DEFAULT = 9876
# The number of a broker that accepts messages. Its replicas have higher numbers.
_MASTER = "0"
_CAN_WRITE = 2
_CAN_READ_AND_WRITE = 6
# Limits of one request. A message that exceeds `_BATCH_BYTES` is sent in a separate request.
_BATCH_BYTES = 512 << 10
_BATCH_MESSAGES = 1000
# The maximum size of the messages that wait, in all queues. A batch may have many topics with many queues.
_WAITING_BYTES_MAX = 16 << 20
_PRODUCER_GROUP = "penstock"
# The topic whose settings a broker copies if it creates topics by itself.
_TEMPLATE_TOPIC = "TBW102"


class Queue(NamedTuple):
    """A queue of a topic on a broker."""

    broker: str
    number: int


class Servers:
    """The name servers, which list the brokers. Raises OptionInvalid."""

    def __init__(self, endpoint: Endpoint, password: Secret | None) -> None:
        self._endpoint = endpoint
        self._password = password
        parts = urlsplit(endpoint.url)
        try:
            self._tls = _SCHEMES[parts.scheme]
            hosts = [urlsplit(f"//{host}") for host in parts.netloc.split(",")]
            if not all(host.hostname for host in hosts) or parts.path not in ("", "/"):
                raise ValueError("it needs the host of a name server, and no path")
            self._addresses = [_address(host.hostname or "", host.port or _PORT_DEFAULT) for host in hosts]
        except (KeyError, ValueError) as problem:
            reason = (
                "the scheme is neither rocketmq nor rocketmqs" if isinstance(problem, KeyError) else problem
            )
            raise OptionInvalid(
                f"{endpoint.url!r} is no name server of RocketMQ: {reason}",
                hint="Write rocketmq://host1:9876,host2:9876",
            ) from problem

    def connect(self, address: str) -> Connection:
        """Connect to a broker or name server. Raises the same errors as `Connection`."""
        return Connection(address, self._endpoint, self._password, tls=self._tls)

    def masters(self) -> dict[str, str]:
        """Return the addresses of the brokers that accept messages, by name.

        Raises ConnectionLost, TlsFailed, ServerBusy, and the errors that brokers answer with.
        """
        with closing(self._name_server()) as connection:
            brokers = read_json(connection.call(Request.BROKERS, {}).body)["brokerAddrTable"]
        masters = _masters(brokers.values())
        if not masters:
            raise ServerBusy("the name servers of RocketMQ know no broker that accepts messages")
        return masters

    def queues(self, topic: str) -> list[Queue]:
        """Return the queues of a topic that accept messages, in the same order each time.

        A topic that does not exist has none. Raises the same errors as `masters`.
        """
        with closing(self._name_server()) as connection:
            fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
            reply = connection.answer(connection.send(Request.ROUTE_OF_TOPIC, fields))
        if reply.code == Answer.TOPIC_NOT_EXIST:
            return []
        if reply.code != Answer.SUCCESS:
            raise error_of(reply)
        route = read_json(reply.body)
        masters = _masters(route["brokerDatas"])
        return sorted(
            Queue(entry["brokerName"], number)
            for entry in route["queueDatas"]
            if entry["brokerName"] in masters and entry["perm"] & _CAN_WRITE
            for number in range(entry["writeQueueNums"])
        )

    def create(self, topic: str, queues: int) -> None:
        """Create a topic on all brokers, each with a number of queues. Raises the same errors as
        `masters`.
        """
        fields = {
            "topic": topic,
            "defaultTopic": _TEMPLATE_TOPIC,
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": str(_CAN_READ_AND_WRITE),
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
        for address in self.masters().values():
            with closing(self.connect(address)) as connection:
                connection.call(Request.CREATE_TOPIC, fields)

    def _name_server(self) -> Connection:
        """Connect to the first name server that answers."""
        for address in self._addresses[:-1]:
            try:
                return self.connect(address)
            except TransientError:
                continue
        return self.connect(self._addresses[-1])


@dataclass
class _Pending:
    """Messages that wait for their queue, and the request in flight."""

    messages: list[bytes] = field(default_factory=list)
    size: int = 0
    request: int | None = None


class Producer:
    """Connections to brokers with messages in flight. Used by one thread."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._masters = servers.masters()
        self._connections: dict[str, Connection] = {}
        self._pending: dict[tuple[str, Queue], _Pending] = {}
        self._waiting_bytes = 0

    def send(self, topic: str, queue: Queue, message: bytes) -> None:
        """Add a message to a queue of a topic.

        Raises ConnectionLost, TlsFailed, ServerBusy, and the error of an earlier message that failed.
        """
        pending = self._pending.setdefault((topic, queue), _Pending())
        is_full = pending.size + len(message) > _BATCH_BYTES or len(pending.messages) >= _BATCH_MESSAGES
        if pending.messages and is_full:
            self._flush(topic, queue, pending)
        pending.messages.append(message)
        pending.size += len(message)
        self._waiting_bytes += len(message)
        if self._waiting_bytes > _WAITING_BYTES_MAX:
            self._flush_all()

    def finish(self) -> None:
        """Wait until all messages are stored. Raises the same errors as `send`."""
        self._flush_all()
        for (_, queue), pending in self._pending.items():
            self._settle(queue, pending)
        self._pending.clear()

    def abort(self) -> bool:
        """Drop unsent messages. If no request is in flight, close the connections and return False."""
        is_under_way = False
        for pending in self._pending.values():
            pending.messages.clear()
            is_under_way |= pending.request is not None
        if not is_under_way:
            self.close()
        return is_under_way

    def settle(self) -> None:
        """Wait until no request is in flight, whether or not it succeeded. Raises AnswerTimedOut."""
        for (_, queue), pending in self._pending.items():
            if pending.request is None:
                continue
            try:
                self._connections[queue.broker].answer(pending.request)
            except AnswerTimedOut:
                raise
            except PenstockError:
                # The broker ended the connection, so it will not store the requests that it had not received.
                continue
            pending.request = None

    def close(self) -> None:
        """Close the connections. Messages in flight may be lost."""
        for connection in self._connections.values():
            connection.close()

    @property
    def is_open(self) -> bool:
        """Whether all connections are still open. Requires that no message is in flight."""
        return all(connection.is_open for connection in self._connections.values())

    def _flush_all(self) -> None:
        for (topic, queue), pending in self._pending.items():
            if pending.messages:
                self._flush(topic, queue, pending)

    def _flush(self, topic: str, queue: Queue, pending: _Pending) -> None:
        """Send the waiting messages once the queue has stored the earlier ones."""
        self._settle(queue, pending)
        # The fields of SendMessageRequestHeaderV2.
        fields = {
            "a": _PRODUCER_GROUP,
            "b": topic,
            "c": _TEMPLATE_TOPIC,
            "d": "4",
            "e": str(queue.number),
            "f": "0",
            "g": str(time.time_ns() // 1_000_000),
            "h": "0",
            "i": "",
            "j": "0",
            "k": "false",
            "l": "0",
            "m": "true",
            "n": queue.broker,
        }
        pending.request = self._connection(queue.broker).send(
            Request.SEND_BATCH, fields, b"".join(pending.messages)
        )
        self._waiting_bytes -= pending.size
        pending.messages, pending.size = [], 0

    def _settle(self, queue: Queue, pending: _Pending) -> None:
        if pending.request is None:
            return
        reply = self._connection(queue.broker).answer(pending.request)
        pending.request = None
        if reply.code != Answer.SUCCESS:
            raise error_of(reply)

    def _connection(self, broker: str) -> Connection:
        if broker not in self._connections:
            if broker not in self._masters:
                raise ConnectionLost(f"the broker {broker} of RocketMQ has no master")
            self._connections[broker] = self._servers.connect(self._masters[broker])
        return self._connections[broker]


class AbortedProducers:
    """Producers of aborted batches with requests that a broker may still store. Thread-safe.

    If a broker stored such a request after later changes, it would undo them. A process keeps these producers
    by cluster and topic template, because a new sink sends the aborted batch again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._producers: deque[Producer] = deque()

    @classmethod
    def of_topics(cls, url: str, topics: str) -> "AbortedProducers":
        """Return this process's aborted producers for a cluster's URL and a topic template."""
        return _ABORTED.setdefault((url, topics), cls())

    def add(self, producer: Producer) -> None:
        """Add a producer, whose unsent messages are dropped."""
        if producer.abort():
            self._producers.append(producer)

    def settle(self) -> None:
        """Wait until the brokers have answered the requests of all aborted batches. Raises AnswerTimedOut."""
        with self._lock:
            while self._producers:
                self._producers[0].settle()
                self._producers.popleft().close()


_ABORTED: dict[tuple[str, str], AbortedProducers] = {}


def _masters(brokers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    return {
        broker["brokerName"]: broker["brokerAddrs"][_MASTER]
        for broker in brokers
        if _MASTER in broker["brokerAddrs"]
    }


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
