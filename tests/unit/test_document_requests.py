# SPDX-License-Identifier: Apache-2.0
"""Requests of document sinks, several at a time, without a server."""

import threading
from collections.abc import Callable
from typing import Any

import pyarrow
import pytest

from penstock.changes import Target
from penstock.errors import ServerBusy
from penstock.sinks.document.document_sink import DocumentWriter
from penstock.sinks.sink import make_sink, settings_of
from tests.support.suite.patience import WAIT_SECONDS_MAX


class _NoClient:
    def close(self) -> None:
        """Do nothing, because there is no client."""


class _Writer(DocumentWriter[_NoClient]):
    def _write(self, target: Target, rows: pyarrow.Table) -> None:
        raise AssertionError("no rows are written")

    def send_all(self, send: Callable[[int], int], requests: range) -> list[int]:
        return list(self._send_all(send, iter(requests)))


def writer_of(connections: int) -> _Writer:
    """Return a writer that sends this many requests at a time."""
    sink: Any = make_sink("mongodb", settings_of("mongodb")())
    sink._client = _NoClient()
    return _Writer(sink, 1, connections)


@pytest.mark.parametrize("connections", [2, 3])
def test_as_many_requests_run_at_a_time_as_there_are_connections(connections: int) -> None:
    together = threading.Barrier(connections)
    running, most, lock = 0, 0, threading.Lock()

    def send(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        # This request ends only if other requests run concurrently.
        together.wait(WAIT_SECONDS_MAX)
        with lock:
            running -= 1
        return number * number

    count = 4 * connections
    assert writer_of(connections).send_all(send, range(count)) == [number**2 for number in range(count)]
    assert most == connections


def test_one_connection_and_one_request_use_no_thread() -> None:
    threads: set[str] = set()

    def send(number: int) -> int:
        threads.add(threading.current_thread().name)
        return number

    assert writer_of(1).send_all(send, range(5)) == list(range(5))
    assert writer_of(2).send_all(send, range(1)) == [0]
    assert writer_of(2).send_all(send, range(0)) == []
    assert threads == {threading.current_thread().name}


def test_error_of_a_request_is_raised_once_the_others_have_ended() -> None:
    begun, refused, ended = threading.Event(), threading.Event(), threading.Event()

    def send(number: int) -> int:
        if number == 0:
            assert begun.wait(WAIT_SECONDS_MAX)
            refused.set()
            raise ServerBusy("too many requests")
        begun.set()
        assert refused.wait(WAIT_SECONDS_MAX)
        ended.set()
        return number

    with pytest.raises(ServerBusy, match="too many"):
        writer_of(2).send_all(send, range(2))
    assert ended.is_set()
