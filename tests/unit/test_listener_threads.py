# SPDX-License-Identifier: Apache-2.0
"""Request threads: the event loop is never blocked for long, and followers do not wait for searches."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import pytest

from penstock.errors import OptionInvalid
from penstock.logstore.log import Log
from penstock.model import TablePatterns
from penstock.serve.arrivals import Arrivals
from penstock.serve.canal.tables import EXPRESSIONS_MAX, CanalTables
from penstock.serve.http import changes
from penstock.serve.own_log import OwnSource
from penstock.serve.pieces import PieceMemory, Pieces, View
from penstock.serve.subscribers import Subscribers
from penstock.serve.subscription import Start, resolve_start
from penstock.serve.threads import _SEARCHING_THREADS, Threads
from tests.support.daemon.served_log import INSTANCE, LogInstance, captured_log, serving
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

# More searches than any pool has threads.
SEARCHES = 40


@pytest.fixture(scope="module")
def log() -> Iterator[Log]:
    with captured_log() as log:
        yield log


@pytest.mark.parametrize("start", [Start(time_us=1), Start(gtid_set="")])
def test_followers_receive_their_pieces_during_searches(
    log: Log, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    searching, end = threading.Event(), threading.Event()

    def search(*_: Any) -> Any:
        searching.set()
        end.wait(WAIT_SECONDS_MAX)
        raise OptionInvalid("nothing is searched for")

    monkeypatch.setattr(OwnSource, "find_time", search)
    monkeypatch.setattr(OwnSource, "find_gtid_set", search)

    async def follow() -> Any:
        pieces = Pieces(LogInstance(log), Arrivals(), PieceMemory(), Threads())
        searches = [asyncio.ensure_future(resolve_start(pieces, start)) for _ in range(SEARCHES)]
        try:
            await asyncio.to_thread(searching.wait, WAIT_SECONDS_MAX)
            async with asyncio.timeout(WAIT_SECONDS_MAX):
                first = await resolve_start(pieces, Start(position=log.earliest()))
                return await pieces.at(View("typed"), first.position)
        finally:
            end.set()
            await asyncio.gather(*searches, return_exceptions=True)

    assert asyncio.run(follow()) is not None


def test_request_for_changes_is_compiled_off_the_event_loop(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, answered = threading.Event(), threading.Event()

    def compile_slowly(*patterns: Any) -> TablePatterns:
        compiling.set()
        assert answered.wait(WAIT_SECONDS_MAX), "nobody is answered while patterns are compiled"
        return TablePatterns(*patterns)

    monkeypatch.setattr(changes, "TablePatterns", compile_slowly)
    with serving(log) as daemon:
        asked = {"tables": ["*.*"], "start": "latest", "wait_seconds": 0}
        answers: list[Any] = []
        reader = threading.Thread(
            target=lambda: answers.append(daemon.ask("POST", f"/v1/instances/{INSTANCE}/changes", asked))
        )
        reader.start()
        assert compiling.wait(WAIT_SECONDS_MAX)
        assert daemon.ask("GET", "/v1/status").status == 200
        answered.set()
        reader.join(WAIT_SECONDS_MAX)
        assert [answer.status for answer in answers] == [200]


def test_searches_of_clients_that_have_left_are_not_run(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    end = threading.Event()
    locate_time = Log.locate_time

    def search(log: Log, time_us: int) -> Any:
        searches.append(time_us)
        end.wait(WAIT_SECONDS_MAX)
        return locate_time(log, time_us)

    monkeypatch.setattr(Log, "locate_time", search)
    with serving(log) as daemon, ExitStack() as clients:

        def ask(time_us: int) -> HTTPConnection:
            connection = HTTPConnection("127.0.0.1", daemon.port(), timeout=WAIT_SECONDS_MAX)
            clients.callback(connection.close)
            connection.request("GET", f"/v1/instances/{INSTANCE}/locate?time_us={time_us}")
            return connection

        left = 'penstock_listener_requests_total{code="499",protocol="http"}'
        staying = [ask(number) for number in range(_SEARCHING_THREADS)]
        wait_until(lambda: len(searches) == _SEARCHING_THREADS)
        leaving = [ask(100 + number) for number in range(SEARCHES)]
        pool: Any = daemon.served.threads.searching
        wait_until(lambda: pool._work_queue.qsize() == SEARCHES)
        for connection in leaving:
            connection.close()
        wait_until(lambda: f"{left} {SEARCHES}" in str(daemon.ask("GET", "/metrics").body))
        staying.append(ask(99))
        end.set()
        assert [connection.getresponse().status for connection in staying] == [200] * len(staying)
    assert sorted(searches) == [*range(_SEARCHING_THREADS), 99]


def test_search_of_a_client_that_has_left_reads_no_further(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    reading, left, ended = threading.Event(), threading.Event(), threading.Event()
    read = Log.read

    def read_slowly(log: Log, *place: Any) -> Iterator[memoryview]:
        try:
            for buffer in read(log, *place):
                for start in range(0, len(buffer), 8):
                    reading.set()
                    left.wait(WAIT_SECONDS_MAX)
                    reads.append(start)
                    yield buffer[start : start + 8]
        finally:
            ended.set()

    monkeypatch.setattr(Log, "read", read_slowly)
    position = replace(last := log.extents()[-1].last, offset=last.offset - 1)
    with serving(log) as daemon:
        connection = HTTPConnection("127.0.0.1", daemon.port(), timeout=WAIT_SECONDS_MAX)
        connection.request("GET", f"/v1/instances/{INSTANCE}/transaction?position={position}")
        assert reading.wait(WAIT_SECONDS_MAX)
        connection.close()
        disconnect = 'penstock_listener_requests_total{code="499",protocol="http"} 1'
        wait_until(lambda: disconnect in str(daemon.ask("GET", "/metrics").body))
        left.set()
        assert ended.wait(WAIT_SECONDS_MAX)
    assert len(reads) == 1


@pytest.mark.parametrize("pattern", [f"/{'(' * 5000}{')' * 5000}/", "/a{99999999999999999999}/"])
def test_pattern_that_python_cannot_compile_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(OptionInvalid, match="is not a regular expression"):
        TablePatterns([pattern])


def test_number_of_canal_filters_is_bounded() -> None:
    expressions = [f"shop\\.t{number}" for number in range(EXPRESSIONS_MAX + 1)]
    with pytest.raises(OptionInvalid, match=f"at most {EXPRESSIONS_MAX}"):
        CanalTables(",".join(expressions), TablePatterns())
    assert CanalTables(",".join(expressions[1:]), TablePatterns()).matches("shop", f"t{EXPRESSIONS_MAX}")


def test_number_of_listed_idle_subscribers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.serve.subscribers.SUBSCRIBERS_IDLE_SHOWN_MAX", 3)
    subscribers = Subscribers()
    with subscribers.following("changes", INSTANCE, "constant"):
        for number in range(10):
            with subscribers.following("changes", INSTANCE, f"passing-{number}"):
                """It asks once."""
        names = {subscriber.name for subscriber in subscribers.all()}
    assert names == {"constant", "passing-7", "passing-8", "passing-9"}
