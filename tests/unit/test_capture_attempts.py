# SPDX-License-Identifier: Apache-2.0
import random

import pytest

from penstock.capture import attempts as attempts_module
from penstock.capture.attempts import STREAM_TRIES_MAX, Attempts
from penstock.errors import (
    AuthenticationFailed,
    ChecksumMismatch,
    ConnectionLost,
    DiskFailed,
    DumpReplaced,
    LogDamaged,
    LogFull,
    LogLocked,
    PenstockError,
    PositionPurged,
    ServerBehind,
    TlsFailed,
)
from penstock.limits import (
    FAIL_OVER_REMEMBERED_SECONDS,
    RECONNECT_PAUSE_SECONDS_MAX,
)
from penstock.retry import RECONNECT


class Clock:
    """A clock that does not advance until the test moves it."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(attempts_module, "time", clock)
    return clock


def attempts(servers: int = 2, fail_over_after: float = 60.0) -> Attempts:
    made = Attempts(servers, fail_over_after)
    made.chosen = 0
    return made


@pytest.mark.parametrize(("fail_over_after", "chosen"), [(10.0, 1), (60.0, 0)])
def test_silence_of_a_server_counts_towards_the_fail_over(
    fail_over_after: float, chosen: int, clock: Clock
) -> None:
    attempts_made = attempts(fail_over_after=fail_over_after)
    assert attempts_made.failed(ConnectionLost("silent", silent_seconds=15.0)) is None
    assert attempts_made.chosen == chosen


def test_lost_server_is_retried_before_the_next_server_is_tried(clock: Clock) -> None:
    made = attempts(fail_over_after=60.0)
    assert made.failed(ConnectionLost("gone")) is None
    assert made.chosen == 0
    clock.seconds += 60
    assert made.failed(ConnectionLost("gone")) is None
    assert made.chosen == 0
    clock.seconds += 0.01
    assert made.failed(ConnectionLost("gone")) is None
    assert made.chosen == 1
    # The next server gets its own period before the capture leaves it.
    assert made.failed(ConnectionLost("gone")) is None
    assert made.chosen == 1


@pytest.mark.usefixtures("longest_pauses")
def test_the_next_server_is_asked_when_its_time_has_come_and_without_a_pause(clock: Clock) -> None:
    made, begun = attempts(fail_over_after=10.0), clock.seconds
    pause = 0.0
    while made.chosen == 0:
        assert made.failed(ConnectionLost("gone")) is None
        pause = made.pause_seconds()
        clock.seconds += pause + 0.01
    assert clock.seconds - begun < 11
    assert pause == RECONNECT.first
    # If every server refuses, the pauses between attempts grow.
    pauses = []
    for _ in range(9):
        assert made.failed(ServerBehind("no")) is None
        pauses.append(made.pause_seconds())
    assert pauses == sorted(pauses)
    assert pauses[-1] == RECONNECT_PAUSE_SECONDS_MAX


def test_progress_resets_earlier_failures(clock: Clock) -> None:
    made = attempts(fail_over_after=60.0)
    made.failed(ConnectionLost("gone"))
    clock.seconds += 61
    made.progressed()
    made.failed(ConnectionLost("gone"))
    assert made.chosen == 0


def test_each_change_of_servers_doubles_the_patience_until_it_resets(clock: Clock) -> None:
    made = attempts(fail_over_after=10.0)
    made.progressed()

    def seconds_until_change() -> float:
        """Make the server fail every half second until the capture chooses another server, which then sends
        data.
        """
        begun, chosen = clock.seconds, made.chosen
        while made.chosen == chosen:
            assert made.failed(ConnectionLost("gone")) is None
            clock.seconds += 0.5
        made.progressed()
        return clock.seconds - begun

    patience = [seconds_until_change() for _ in range(9)]
    assert [round(seconds / 10) for seconds in patience] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    clock.seconds += FAIL_OVER_REMEMBERED_SECONDS
    assert round(seconds_until_change() / 10) == 1


@pytest.mark.parametrize("kind", [ServerBehind, AuthenticationFailed, TlsFailed])
def test_unsuitable_server_is_skipped_at_once(kind: type[PenstockError]) -> None:
    made = attempts(servers=3)
    for chosen in (1, 2, 0, 1):
        assert made.failed(kind("no")) is None
        assert made.chosen == chosen


def test_purged_position_stops_capture_once_every_server_has_refused_it() -> None:
    made = attempts()
    first = PositionPurged("purged on the first")
    assert made.failed(first) is None
    assert made.failed(ConnectionLost("the second is away")) is None
    assert made.chosen == 1
    assert made.failed(PositionPurged("purged on the second")) is first


def test_unreadable_bytes_stop_capture_unless_other_failures_come_between() -> None:
    made = attempts(servers=1)
    for _ in range(20):
        assert made.failed(ConnectionLost("gone")) is None
    for _ in range(STREAM_TRIES_MAX):
        assert made.failed(ChecksumMismatch("spoilt")) is None
    assert isinstance(made.failed(ChecksumMismatch("spoilt")), ChecksumMismatch)
    made.progressed()
    assert made.failed(ChecksumMismatch("spoilt")) is None


@pytest.mark.parametrize("kind", [LogFull, DiskFailed, LogLocked])
def test_log_failure_is_never_attributed_to_the_server(kind: type[PenstockError], clock: Clock) -> None:
    made = attempts(fail_over_after=60.0)
    assert made.failed(ConnectionLost("gone")) is None
    for _ in range(3):
        clock.seconds += 31
        assert made.failed(kind("our own")) is None
    assert made.failed(ConnectionLost("gone")) is None
    assert made.chosen == 0


def test_permanent_error_stops_capture_at_once() -> None:
    damaged = LogDamaged("broken")
    assert attempts().failed(damaged) is damaged


@pytest.fixture
def longest_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every pause as long as its bound."""
    monkeypatch.setattr(random, "uniform", lambda low, high: high)


@pytest.mark.usefixtures("longest_pauses")
def test_backoff_doubles_up_to_a_bound_and_never_gives_up() -> None:
    made = attempts()
    pauses = [made.pause_seconds() for _ in range(2000)]
    assert pauses[:3] == [RECONNECT.first * factor for factor in (1, 2, 4)]
    assert pauses[-1] == RECONNECT_PAUSE_SECONDS_MAX
    made.progressed()
    assert made.pause_seconds() == RECONNECT.first


@pytest.mark.usefixtures("longest_pauses")
def test_backoff_grows_while_two_replicas_replace_each_other(clock: Clock) -> None:
    made = attempts()
    pauses = []
    for _ in range(9):
        # Each server sends data before the capture switches to the other server.
        made.progressed()
        made.failed(DumpReplaced("another replica has our id"))
        pauses.append(made.pause_seconds())
        clock.seconds += pauses[-1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RECONNECT_PAUSE_SECONDS_MAX
    clock.seconds += 3600
    made.progressed()
    made.failed(DumpReplaced("another replica has our id"))
    assert made.pause_seconds() == pauses[0]


def test_pauses_of_a_single_server_that_stays_away_grow_to_their_limit(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    attempts = Attempts(servers=1, fail_over_after=10.0)
    attempts.chosen = 0
    pauses = []
    for _ in range(12):
        attempts.failed(ConnectionLost("connection refused"))
        pauses.append(attempts.pause_seconds())
        clock.seconds += pauses[-1]
    assert pauses == sorted(pauses)
    assert pauses[-1] == RECONNECT_PAUSE_SECONDS_MAX
