# SPDX-License-Identifier: Apache-2.0
"""The state that a daemon's listener processes share: quotas, connection counts, subscribers."""

import asyncio
import os
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CapturedElsewhere, QuotaReached
from penstock.logstore.followed_log import LogReport
from penstock.logstore.log import Log
from penstock.model import Position
from penstock.processes.channel import DATAGRAMS, Channel
from penstock.processes.defects import EXIT_DEFECT
from penstock.processes.instance import ProcessInstance
from penstock.processes.listener_channel import ListenerStart, pass_connection, take_connection
from penstock.processes.listeners import COMMAND, ListenerProcesses
from penstock.processes.spawned import SpawnedProcess
from penstock.serve.accepting import Admission
from penstock.serve.access import WHOLE, Account, Quota
from penstock.serve.arrivals import Arrivals
from penstock.serve.connections import Connection, Connections, Traffic
from penstock.serve.forwarding import Forward
from penstock.serve.ptubes.session import ClientReport, Clients, Figures
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscriber, Subscribers
from penstock.serve.usage import SharedUsages
from penstock.settings.daemon import Settings
from tests.support.suite.patience import WAIT_SECONDS_MAX


@pytest.fixture
def usages() -> Iterator[tuple[SharedUsages, SharedUsages]]:
    """The usage of one account in two processes."""
    first = SharedUsages(1, 2)
    second = SharedUsages(1, 2, os.fdopen(os.dup(first.file.fileno()), "r+b", 0))
    yield first, second
    first.file.close()
    second.file.close()


def test_requests_of_an_account_are_counted_over_all_processes(
    usages: tuple[SharedUsages, SharedUsages],
) -> None:
    first, second = (
        Account("cache", quota=Quota(requests_max=2), usage=shared.usage(0, number))
        for number, shared in enumerate(usages)
    )
    with first.request(), second.request():
        with pytest.raises(QuotaReached), first.request():
            raise AssertionError("a third request began")
        # The second process dies during its request.
        usages[0].end_process(1)
        with first.request():
            pass


def test_bytes_of_an_account_are_limited_over_all_processes(
    usages: tuple[SharedUsages, SharedUsages],
) -> None:
    first, second = (
        Account("cache", quota=Quota(bytes_per_second=100), usage=shared.usage(0, number))
        for number, shared in enumerate(usages)
    )
    assert first.spend(100, now=50.0) == 0.0
    assert second.spend(100, now=50.0) == 1.0
    assert first.spend(0, now=51.0) == 0.0


def test_handshake_of_a_connection_that_was_handed_over_is_counted_until_it_ends() -> None:
    admission = Admission()
    admission.accepted(7, "10.0.0.1", with_handshake=True)
    admission.renumber(7, -1)
    # The next connection reuses the descriptor.
    admission.accepted(7, "10.0.0.2", with_handshake=True)
    admission.greeted(7)
    assert (admission.open, admission.in_handshake) == (2, 1)
    admission.greeted(-1)
    admission.closed(-1, "10.0.0.1")
    assert (admission.open, admission.in_handshake) == (1, 0)


def test_connection_passed_to_another_process_has_its_number_and_its_bytes() -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    near, far = socket.socketpair()
    with ours, theirs, near, far:
        ours.setblocking(False)
        theirs.setblocking(False)
        assert take_connection(theirs) is None
        pass_connection(ours, far, -3, "canal")
        far.close()
        passed = take_connection(theirs)
        assert passed is not None
        number, listener, connection = passed
        assert connection is not None
        with connection:
            near.sendall(b"GET")
            assert (number, listener, connection.recv(3)) == (-3, "canal", b"GET")
        ours.close()
        with pytest.raises(EOFError):
            take_connection(theirs)


def test_connection_without_a_descriptor_for_it_keeps_its_number() -> None:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    near, far = socket.socketpair()
    with ours, theirs, near, far:
        ours.setblocking(False)
        theirs.setblocking(False)
        pass_connection(ours, far, -3, "canal")
        pass_connection(ours, far, -4, "http")
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest_free = os.dup(theirs.fileno())
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            assert take_connection(theirs) == (-3, "canal", None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        passed = take_connection(theirs)
        assert passed is not None
        number, _, connection = passed
        assert connection is not None
        with connection:
            assert number == -4


def test_message_that_is_taken_in_part_ends_the_channel_for_both_sides() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        theirs.settimeout(WAIT_SECONDS_MAX)
        channel = Channel(ours)
        with pytest.raises(TimeoutError):
            channel.send(bytes(1 << 22))
        with pytest.raises(BrokenPipeError):
            channel.send("would be read as a part of the first")
        with pytest.raises(EOFError):
            channel.receive()
        with pytest.raises(EOFError):
            Channel(theirs).receive()


def test_listener_process_that_cannot_read_a_message_ends(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"log": {"folder": str(tmp_path)}, "instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}}}
    )
    usages = SharedUsages(0, 2)
    stream, stream_there = socket.socketpair()
    datagrams, datagrams_there = socket.socketpair(type=DATAGRAMS)
    handed, handed_there = socket.socketpair(type=DATAGRAMS)
    with usages.file, stream, stream_there, datagrams, datagrams_there, handed, handed_there:
        descriptors = [own.fileno() for own in (stream_there, datagrams_there, handed_there)]
        process = SpawnedProcess(COMMAND, descriptors, inherited=(usages.file.fileno(),))
        try:
            Channel(stream).send(ListenerStart(settings, usages.file.fileno(), 0, 2))
            stream.sendall(struct.pack("<Q", 3) + b"abc")
            assert process.wait(WAIT_SECONDS_MAX)
        finally:
            process.kill()
    process_exit = process.exit(None)
    assert process_exit.reason == str(EXIT_DEFECT)
    assert any("cannot be read" in line for line in process_exit.lines)


def test_subscriber_that_changed_its_process_is_listed_once_at_its_latest_position() -> None:
    def subscriber(seen_us: int, offset: int, requests: int) -> Subscriber:
        position = Position(1, "mysql-bin.000001", offset)
        return Subscriber("changes", "shop", "cache", "", "", 5, position, 0, 2, 0, 100, requests, seen_us)

    key = "changes", "shop", "cache", None, frozenset[int]()
    subscribers = Subscribers()
    subscribers.report(0, {key: subscriber(20, 400, 0)})
    subscribers.report(1, {key: subscriber(30, 900, 1)})
    (listed,) = subscribers.all()
    assert (str(listed.position), listed.rows, listed.bytes, listed.requests) == (
        str(Position(1, "mysql-bin.000001", 900)),
        4,
        200,
        1,
    )
    # When a process ends, its subscribers are removed.
    subscribers.report(1, {})
    (listed,) = subscribers.all()
    assert listed.requests == 0
    assert subscribers.count("shop") == 1


def test_counts_of_a_process_are_added_once() -> None:
    daemon, process = Traffic(), Traffic()
    process.requests.add("http", "200")
    process.seconds["http"].observe(0.5)
    daemon.merge(process.take())
    process.requests.add("http", "200")
    daemon.merge(process.take())
    assert daemon.requests.counts() == {("http", "200"): 2}
    assert (sum(daemon.seconds["http"].counts()), daemon.seconds["http"].sum) == (1, 0.5)


def test_ptubes_clients_of_every_process_are_known_to_all() -> None:
    clients = Clients()
    here = Connection("ptubes", ("10.0.0.1", 4711), lambda: None)
    clients.of(here)
    figures = Figures(connected_ms=5)
    clients.elsewhere = {
        1: [ClientReport("10.0.0.2", 1, figures, "shop", "cache")],
        2: [
            ClientReport("10.0.0.3", 2, figures, "stock", "index"),
            ClientReport("10.0.0.3", 3, figures, None, ""),
        ],
    }
    assert [client.port for client in clients.all()] == [4711, 1, 2, 3]
    assert [instance for instance, _ in clients.sessions()] == ["shop", "stock"]
    assert clients.tasks(WHOLE) == ["cache", "index"]
    assert clients.tasks(Account("reader", instances=("shop",))) == ["cache"]
    here.end()
    assert [client.port for client in clients.all()] == [1, 2, 3]


def test_processes_are_told_of_the_instances_that_their_member_captures_only() -> None:
    asked = []

    class Instance:
        """An instance of a fleet that another member captures, as the store shows."""

        name = "shop"

        def log(self) -> Log:
            asked.append(self.name)
            raise CapturedElsewhere("shop is captured by member b")

        def status(self) -> dict[str, Any]:
            asked.append(self.name)
            return {}

    settings = Settings.model_validate({"instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}}})
    served = Served({"shop": Instance()}, Arrivals(), is_here=lambda name: False)
    usages = SharedUsages(0, 1)
    with usages.file:
        listeners = ListenerProcesses(settings, 0, served, Connections(), usages)
        assert listeners.published().statuses == {}
        listeners.arrived("shop")
    # Neither of the two requests reads the store.
    assert asked == []


def test_log_of_an_instance_that_another_member_captured_is_opened_again(tmp_path: Path) -> None:
    settings = Settings.model_validate(
        {"log": {"folder": str(tmp_path)}, "instances": {"shop": {"source": "mysql://u@127.0.0.1:1"}}}
    )
    instance = ProcessInstance("shop", settings.instances["shop"], settings.log_of("shop"))
    with closing(Log.open(tmp_path / "shop", settings.log_of("shop"))) as log:
        report = LogReport.of(log)
        instance.report(report)
        before = instance.log()
        instance.leave(CapturedElsewhere("shop is captured by member b"))
        with pytest.raises(CapturedElsewhere):
            instance.log()
        instance.report(report)
        assert instance.log() is not before


def forwarded(answer: bytes | None) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the request that the daemon receives, and the answer that the client receives.

    An `answer` of None means that no daemon is running.
    """

    async def forward() -> tuple[bytes, list[dict[str, Any]]]:
        ours, theirs = socket.socketpair()
        if answer is None:
            ours.close()
        sent: list[dict[str, Any]] = []
        parts = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> Any:
            part = next(parts, None)
            return part if part is not None else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "raw_path": b"/v1/instances/a%2Fb/position",
            "query_string": b"reader=x",
            "headers": [(b"host", b"daemon"), (b"content-length", b"2"), (b"connection", b"keep-alive")],
        }
        with theirs:
            forwarding = asyncio.ensure_future(Forward(lambda scope: ours)(scope, receive, send))
            received = b""
            if answer is not None:
                reader, writer = await asyncio.open_connection(sock=theirs)
                received = await reader.readuntil(b"{}")
                writer.write(answer)
                writer.close()
            await forwarding
        return received, sent

    return asyncio.run(forward())


def test_forwarded_request_is_answered_as_the_daemon_answers() -> None:
    received, sent = forwarded(
        b"HTTP/1.1 409 Conflict\r\ncontent-type: application/json\r\ncontent-length: 4\r\n\r\nnull"
    )
    assert received.startswith(b"POST /v1/instances/a%2Fb/position?reader=x HTTP/1.1\r\n")
    assert b"connection: close" in received.lower()
    assert sent[0]["status"] == 409
    assert (b"content-type", b"application/json") in sent[0]["headers"]
    assert b"".join(message.get("body", b"") for message in sent[1:]) == b"null"
    assert [message.get("more_body") for message in sent[1:]][-1] is False


def test_forwarded_request_without_a_daemon_is_refused_by_name() -> None:
    for answer in (None, b"", b"HTTP/1.1 200 OK\r\n"):
        _, sent = forwarded(answer)
        assert sent[0]["status"] == 503
        assert b"the daemon does not answer" in sent[1]["body"]


def test_part_of_an_answer_is_never_taken_for_all_of_it() -> None:
    with pytest.raises(ConnectionResetError):
        forwarded(b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\npart")


def test_tail_that_disconnects_is_no_longer_listed() -> None:
    subscribers = Subscribers()

    def follow(name: str, error: type[BaseException] | None) -> None:
        with suppress(asyncio.CancelledError), subscribers.following("changes", "shop", name):
            if error is not None:
                raise error

    follow("tail/host-1", asyncio.CancelledError)
    follow("tail/host-2", None)
    follow("cache", asyncio.CancelledError)
    assert {subscriber.name for subscriber in subscribers.all()} == {"tail/host-2", "cache"}
    with subscribers.following("changes", "shop", "tail/host-3"):
        follow("tail/host-3", asyncio.CancelledError)
        assert subscribers.count("shop") == 3
