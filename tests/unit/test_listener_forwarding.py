# SPDX-License-Identifier: Apache-2.0
"""Listener processes forward their clients' requests unchanged, and a process that can no longer report to
the daemon ends at once.
"""

import asyncio
import gc
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs

from penstock.processes.channel import DATAGRAMS
from penstock.processes.listener_channel import ListenerStart, pass_connection, take_connection
from penstock.processes.listener_process import ListenerProcess
from penstock.processes.listeners import ListenerProcess as WatchedProcess
from penstock.processes.listeners import ListenerProcesses
from penstock.processes.spawned import SpawnedProcess
from penstock.serve.arrivals import Arrivals
from penstock.serve.connections import Connections
from penstock.serve.served import Served
from penstock.serve.subscribers import Subscribers
from penstock.serve.usage import SharedUsages
from penstock.settings.daemon import Settings
from tests.support.daemon.served_log import serving
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import open_log
from tests.support.suite.patience import WAIT_SECONDS_MAX

CLIENT = ("192.0.2.7", 4711)
SETTINGS = Settings.model_validate(
    {"listen": {"http": "127.0.0.1:0"}, "instances": {"shop": {"source": "mysql://nobody@127.0.0.1:1"}}}
)
REQUEST = b"GET /v1/instances HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class ProcessThread(threading.Thread):
    """A listener process, run in a thread, and the daemon's ends of its sockets."""

    def __init__(self) -> None:
        super().__init__()
        pairs = socket.socketpair(), socket.socketpair(type=DATAGRAMS), socket.socketpair(type=DATAGRAMS)
        (self.stream, self.datagrams, self.handed), ends = zip(*pairs, strict=True)
        self.handed.setblocking(False)
        usages = SharedUsages(0, 2)
        self._process = ListenerProcess(
            *ends, ListenerStart(SETTINGS, os.dup(usages.file.fileno()), number=0, processes=2)
        )
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            self._process.serve_until_stopped()
        except RuntimeError as problem:
            self.problem = problem
        finally:
            gc.unfreeze()


@contextmanager
def running_process() -> Iterator[ProcessThread]:
    """Run the code of a listener process inside the block."""
    process = ProcessThread()
    process.start()
    try:
        yield process
    finally:
        # The process detects the end of its daemon.
        process.stream.close()
        process.join(WAIT_SECONDS_MAX)
        process.datagrams.close()
        process.handed.close()
    assert not process.is_alive()


def test_process_forwards_a_request_with_the_number_of_its_connection() -> None:
    near, far = socket.socketpair()
    with running_process() as process, near:
        with far:
            pass_connection(process.handed, far, -7, "http")
        near.sendall(REQUEST)
        process.handed.settimeout(WAIT_SECONDS_MAX)
        passed = take_connection(process.handed)
        assert passed is not None
        number, listener, forwarded = passed
        with forwarded:
            forwarded.settimeout(WAIT_SECONDS_MAX)
            assert (number, listener, forwarded.recv(3)) == (-7, "http", b"GET")


def test_daemon_serves_forwarded_requests_for_connections_that_it_handed_over_only() -> None:
    async def addresses() -> list[tuple[str, int]]:
        served: asyncio.Queue[tuple[str, int]] = asyncio.Queue()

        async def serve_here(connection: socket.socket, address: tuple[str, int]) -> None:
            connection.close()
            served.put_nowait(address)

        connections = Connections()
        listeners = ListenerProcesses(SETTINGS, 0, Served({}, Arrivals()), connections, SharedUsages(0, 1))
        process = WatchedProcess(listeners, 0)
        process.peers[-1] = "http", CLIENT
        ours, theirs = socket.socketpair(type=DATAGRAMS)
        ours.setblocking(False)
        with socket.create_server(("127.0.0.1", 0)) as bound, theirs:
            port = connections.listen("http", bound, over_tls=False)
            listeners.begin({"http": port}, serve_here, lambda listener, accepting: None)
            listeners.ready(process, ours)
            for number in (-2, 0, 5, -1):
                near, far = socket.socketpair()
                with near, far:
                    pass_connection(theirs, far, number, "http")
            first = await asyncio.wait_for(served.get(), WAIT_SECONDS_MAX)
            listeners.lost(process, ours)
            port.close()
        return [first, *(served.get_nowait() for _ in range(served.qsize()))]

    assert asyncio.run(addresses()) == [CLIENT]


def test_forwarded_request_is_logged_and_listed_with_the_address_of_its_client() -> None:
    token = "t" * 32
    with (
        open_log(SimulatedDisk()) as log,
        serving(log, {"token": token}) as served,
        capture_logs() as lines,
    ):
        answers = []
        for head in (b"", f"Authorization: Bearer {token}\r\n".encode()):
            near, far = socket.socketpair()
            far.setblocking(False)
            served.in_loop(partial(served.listener.serve_accepted, far, CLIENT, over_tls=False))
            with near, near.makefile("rb") as answer:
                near.settimeout(WAIT_SECONDS_MAX)
                near.sendall(REQUEST.replace(b"instances", b"connections").replace(b"Host", head + b"Host"))
                answers.append(answer.read())
    assert [answer.split()[1] for answer in answers] == [b"401", b"200"]
    assert b'"peer":"192.0.2.7","port":4711' in answers[1]
    assert [line["peer"] for line in lines if line["event"] == "a request is refused"] == [CLIENT[0]]


def test_process_whose_reports_fail_ends_at_once_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(subscribers: Subscribers) -> None:
        raise RuntimeError("no subscribers")

    monkeypatch.setattr(Subscribers, "here", fail)
    with capture_logs() as lines, running_process() as process:
        process.join(WAIT_SECONDS_MAX)
        assert not process.is_alive(), "the daemon has not ended"
    assert str(process.problem) == "no subscribers"
    (line,) = [line for line in lines if line["event"] == "the reports to the daemon failed"]
    assert (line["error"], line["why"]) == ("RuntimeError", "no subscribers")


def test_exit_report_of_a_process_with_a_defect_names_the_error() -> None:
    script = (
        "from penstock.processes.defects import end_after_defect; end_after_defect(ValueError('no room'))"
    )
    process = SpawnedProcess([sys.executable, "-c", script], [])
    assert process.wait(WAIT_SECONDS_MAX)
    assert process.exit(None).text() == "exit status 70: ValueError: no room"
