# SPDX-License-Identifier: Apache-2.0
"""Retries on a clock that advances only during pauses."""

import asyncio
import random
import threading
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.errors import ConnectionLost, OptionInvalid, TransientError
from penstock.retry import Backoff, Retry

AWAY = ConnectionLost("the server is away")


class Clock:
    """A simulated clock that records the pauses in order."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def longest_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every pause as long as its bound."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


def retry(clock: Clock, **options: Any) -> Retry:
    return Retry("asking again", sleep=clock.sleep, clock=clock.time, **options)


def fail(times: int, answer: str = "answer") -> Any:
    failures = iter([AWAY] * times)

    def attempt() -> str:
        for problem in failures:
            raise problem
        return answer

    return attempt


def test_bound_of_pauses_doubles_up_to_the_longest() -> None:
    backoff = Backoff(0.1, 10.0)
    assert [backoff.bound(failures) for failures in (1, 2, 3, 7, 8)] == [0.1, 0.2, 0.4, 6.4, 10.0]
    assert backoff.bound(10_000) == 10.0


def test_pauses_are_spread_over_all_of_their_bound() -> None:
    pauses = [Backoff(1.0, 8.0).pause(4) for _ in range(2000)]
    assert 0 <= min(pauses) < 0.5
    assert 7.5 < max(pauses) <= 8.0


@pytest.mark.usefixtures("longest_pauses")
def test_answer_after_failures_is_returned(clock: Clock) -> None:
    retrying = retry(clock, tries=3)
    assert retrying.run(fail(3)) == "answer"
    assert clock.pauses == [0.1, 0.2, 0.4]
    assert retrying.failures == 0


def test_last_error_is_raised_after_the_last_try(clock: Clock) -> None:
    with pytest.raises(ConnectionLost):
        retry(clock, tries=3).run(fail(4))
    assert len(clock.pauses) == 3


def test_other_errors_are_raised_at_once(clock: Clock) -> None:
    def attempt() -> None:
        raise OptionInvalid("never heals")

    with pytest.raises(OptionInvalid):
        retry(clock).run(attempt)
    assert not clock.pauses


@pytest.mark.usefixtures("longest_pauses")
def test_last_pause_ends_at_the_deadline(clock: Clock) -> None:
    with pytest.raises(ConnectionLost):
        retry(clock, seconds=1.0).run(fail(100))
    assert clock.pauses == pytest.approx([0.1, 0.2, 0.4, 0.3])


def test_deadline_may_count_from_before_the_first_failure(clock: Clock) -> None:
    retrying = retry(clock, seconds=1.0)
    retrying.start()
    clock.now += 1.0
    with pytest.raises(ConnectionLost):
        retrying.wait(AWAY)
    assert not clock.pauses


def test_progress_gives_back_tries_and_time(clock: Clock) -> None:
    retrying = retry(clock, tries=2, seconds=5.0)
    for _ in range(10):
        retrying.wait(AWAY)
        retrying.wait(AWAY)
        retrying.succeeded()
        clock.now += 60.0
    retrying.wait(AWAY)
    retrying.wait(AWAY)
    with pytest.raises(ConnectionLost):
        retrying.wait(AWAY)


@pytest.mark.usefixtures("longest_pauses")
def test_only_a_round_of_all_peers_pauses_and_the_last_round_is_completed(clock: Clock) -> None:
    retrying = retry(clock, tries=2, peers=3)
    for _ in range(8):
        retrying.wait(AWAY)
    assert clock.pauses == [0, 0, 0.1, 0, 0, 0.2, 0, 0]
    with pytest.raises(ConnectionLost):
        retrying.wait(AWAY)


@pytest.mark.usefixtures("longest_pauses")
def test_failure_that_weighs_more_uses_more_tries(clock: Clock) -> None:
    retrying = retry(clock, tries=4)
    retrying.wait(AWAY, weight=3)
    retrying.wait(AWAY)
    assert clock.pauses == pytest.approx([0.1, 0.8])
    with pytest.raises(ConnectionLost):
        retrying.wait(AWAY)


@pytest.mark.usefixtures("longest_pauses")
def test_pause_that_the_peer_asks_for_is_kept_or_the_error_raised(clock: Clock) -> None:
    retrying = retry(clock, seconds=10.0)
    retrying.wait(AWAY, at_least=7.0)
    assert clock.pauses == [7.0]
    with pytest.raises(ConnectionLost):
        retrying.wait(AWAY, at_least=7.0)


def test_stop_ends_the_pause_and_raises_the_error() -> None:
    stop = threading.Event()
    retrying = Retry("asking again", backoff=Backoff(3600.0, 3600.0), stop=stop, report=lambda _: stop.set())
    with pytest.raises(ConnectionLost):
        retrying.run(fail(1))


def test_every_pause_has_one_log_line_unless_it_is_short(clock: Clock) -> None:
    with capture_logs() as lines:
        retry(clock, tries=2).run(fail(2))
        retry(clock, tries=2, quiet_seconds=10.0).run(fail(2))
    assert [(line["event"], line["why"]) for line in lines] == [("asking again", str(AWAY))] * 2
    assert [line["after_seconds"] for line in lines] == [round(pause, 3) for pause in clock.pauses[:2]]


def test_asynchronous_tries_pause_without_blocking(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    answer = fail(2)

    async def attempt() -> str:
        return str(answer())

    assert asyncio.run(retry(clock, tries=2).run_async(attempt)) == "answer"
    assert len(clock.pauses) == 2
    answer = fail(3)
    with pytest.raises(TransientError):
        asyncio.run(retry(clock, tries=2).run_async(attempt))
