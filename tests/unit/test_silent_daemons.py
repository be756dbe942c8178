# SPDX-License-Identifier: Apache-2.0

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.client.daemons import Daemons
from penstock.errors import CapturedElsewhere, ConnectionLost
from penstock.limits import SILENCE_SECONDS_MAX
from penstock.source.daemon_address import DaemonAddress
from penstock.source.silent_daemons import SilentDaemons


def test_silent_daemon_is_waited_for_briefly_and_longer_with_time() -> None:
    now = 100.0
    daemons = SilentDaemons(lambda: now)
    assert daemons.seconds("a", 15.0) == 15.0
    daemons.silent("a")
    assert daemons.seconds("a", 15.0) < 1.0
    assert daemons.seconds("b", 15.0) == 15.0
    now += 20.0
    daemons.silent("a")
    assert 1.0 < daemons.seconds("a", 15.0) < 15.0
    now += 3600.0
    assert daemons.seconds("a", 15.0) == 15.0
    daemons.answered("a")
    assert daemons.seconds("a", 15.0) == 15.0


def test_page_waits_for_a_silent_daemon_within_a_bound() -> None:
    now = 100.0
    daemons = SilentDaemons(lambda: now, seconds_max=3.0)
    daemons.silent("a")
    now += 3600.0
    assert (daemons.seconds("a", 15.0), daemons.seconds("b", 15.0)) == (3.0, 15.0)


@contextmanager
def frozen() -> Iterator[str]:
    """Yield the host and port of a stopped process, which accepts connections but never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def naming(capturer: str) -> Iterator[str]:
    """Yield the host and port of a member that names another member as the capturer in every response."""
    problem = {"type": "CapturedElsewhere", "detail": "it is captured elsewhere", "address": capturer}
    body = json.dumps(problem).encode()
    head = (
        "HTTP/1.1 421 Misdirected\r\nConnection: close\r\nContent-Type: application/problem+json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(head.encode() + body)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_subscriber_does_not_wait_for_a_silent_daemon_that_another_member_names() -> None:
    with frozen() as silent, naming(silent) as member:
        daemons = Daemons(DaemonAddress.parse(f"penstock://{silent},{member}/shop"))
        with pytest.raises(ConnectionLost):
            daemons.changes(0, {}, 0.05)
        began = time.monotonic()
        surveys = daemons.survey([0, 1])
        assert time.monotonic() - began < SILENCE_SECONDS_MAX / 2
        daemons.close()
    problems = [survey.problem for survey in surveys.values()]
    assert all(isinstance(problem, ConnectionLost | CapturedElsewhere) for problem in problems), problems
