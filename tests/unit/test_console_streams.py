# SPDX-License-Identifier: Apache-2.0
"""Pages of the console that are sent while their values arrive: their number, and when each one ends."""

import gc
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection, HTTPResponse

import pytest

from penstock.console import streams, tail
from tests.support.daemon.console import Browser, console_of
from tests.support.daemon.served_log import ServedLog, captured_log, serving
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until


@pytest.fixture(scope="module")
def daemon() -> Iterator[ServedLog]:
    with captured_log() as log, serving(log) as daemon:
        yield daemon


def test_streams_are_limited_and_released_when_the_browser_leaves(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(streams, "STREAMS_MAX", 1)
    with console_of(daemon) as browser:
        connection = HTTPConnection("127.0.0.1", browser.port, timeout=WAIT_SECONDS_MAX)
        connection.request("GET", "/tail?follow=1")
        answer = connection.getresponse()
        wait_until(lambda: b"nothing new" in answer.readline())
        refused = browser.get("/history", table="fuzzed.t", key="1")
        assert "too many people" in refused.words
        answer.close()
        connection.close()
        wait_until(lambda: "insert" in browser.get("/history", table="fuzzed.t", key="1").words)


def _reads(answer: HTTPResponse, text: bytes) -> bool:
    return text in answer.readline()


def test_one_session_leaves_streams_for_other_sessions(
    daemon: ServedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(streams, "SESSION_STREAMS_MAX", 2)
    # The slots of closed pages must not wait for the garbage collector.
    gc.disable()
    try:
        with console_of(daemon) as browser:
            browser.get("/")
            cookies = {"Cookie": "; ".join(f"{name}={value}" for name, value in browser.cookies.items())}
            followers = [
                HTTPConnection("127.0.0.1", browser.port, timeout=WAIT_SECONDS_MAX) for _ in range(2)
            ]
            answers = []
            for follower in followers:
                follower.request("GET", "/tail?follow=1", headers=cookies)
                answers.append(answer := follower.getresponse())
                wait_until(partial(_reads, answer, b"nothing new"))
            assert (
                "follows changes or searches the log on 2 pages"
                in browser.get("/history", table="fuzzed.t", key="1").words
            )
            other = Browser(browser.port)
            assert "insert" in other.get("/history", table="fuzzed.t", key="1").words
            for closable in (*answers, *followers):
                closable.close()
            wait_until(lambda: "insert" in browser.get("/history", table="fuzzed.t", key="1").words)
    finally:
        gc.enable()


def test_sessions_of_one_account_leave_streams_for_other_accounts() -> None:
    places = streams.Streams()

    def opened(session: str, account: str) -> tuple[streams.Stream, str]:
        stream = places.limited(session, lambda: iter([{"kind": "progress"}] * 9), account)
        part = next(stream)
        return stream, part.get("detail", part["kind"])

    followers = [opened(f"session {number // 4}", "reader") for number in range(9)]
    assert [kind for _, kind in followers[:8]] == ["progress"] * 8
    assert "account reader follows changes or searches the log on 8 pages" in followers[8][1]
    others = [opened("another session", "operator") for _ in range(4)]
    assert [kind for _, kind in others] == ["progress"] * 4
    assert "too many people" in opened("a third session", "auditor")[1]
    followers[0][0].close()
    assert opened("session 2", "reader")[1] == "progress"
    for stream, _ in (*followers, *others):
        stream.close()
    assert not places._open_of_accounts.keys() - {"reader"}
    # Without logins there are no other accounts.
    assert [opened(f"visitor {number // 4}", "")[1] for number in range(11)] == ["progress"] * 11


def test_stream_ends_at_its_next_part_after_its_browser_has_left() -> None:
    places = streams.Streams()
    stream = places.limited("session", lambda: iter([{"kind": "progress"}] * 3))
    assert next(stream) == {"kind": "progress"}
    stream.leave()
    assert list(stream) == []
