# SPDX-License-Identifier: Apache-2.0
"""How the capture of an instance stands, for people and programs, and the figures behind it."""

import math
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from penstock.limits import HEARTBEAT_SECONDS

# What a rate shows is mostly of the last ten seconds.
_RATE_SECONDS = 10.0

# A server that says nothing for this long, not even that it has nothing, may have changes unknown to us.
_HONEST_SECONDS = 2 * HEARTBEAT_SECONDS


class State(StrEnum):
    """What the capture of an instance is doing."""

    OPENING = "opening"
    CONNECTING = "connecting"
    RUNNING = "running"
    HELD = "held"
    WAITING = "waiting"
    BEHIND = "behind"
    STOPPED = "stopped"
    CLOSED = "closed"


@dataclass(frozen=True)
class Failure:
    """An error as the status shows it. `time_us` is when it came, `cleared_us` when capture went on after it,
    both in microseconds UTC since 1970; None as long as it has not."""

    kind: str
    message: str
    position: str | None
    hint: str | None
    time_us: int
    cleared_us: int | None = None


@dataclass(frozen=True)
class CaptureStatus:
    """A snapshot. Times are microseconds UTC since 1970, sizes bytes, rates per second.

    `position` is the end of the last whole transaction received, `durable` of the last that outlasts a power
    failure. `lag_seconds` is 0 where everything that the server has is here, None before its first word;
    `lag_bytes` is None where it was not asked yet. `note` says what a reader of the log must know about it,
    `prepared` which XA transactions have waited for an hour or more: the id and the position of each.
    `missing_gtids` are transactions of the log that the server last asked lacks: it may be a replica that is
    behind, or they are lost.
    `tables_in_doubt` (the first 100 are listed) wait for their definition or stop their readers: each comes
    with reason, since where, state and the command that helps.
    """

    instance: str
    state: State
    why: str | None
    server: str | None
    server_version: str | None
    epoch: int | None
    position: str | None
    durable: str | None
    earliest: str | None
    gtid_set: str
    time_us: int | None
    lag_seconds: float | None
    lag_bytes: int | None
    bytes_per_second: float
    transactions_per_second: float
    rows_per_second: float
    log_bytes: int
    segments: int
    semi_sync: bool
    connects: int
    note: str | None
    error: Failure | None
    missing_gtids: str | None = None
    tables_in_doubt: list[dict[str, Any]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    exclude_tables: list[str] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


class Rate:
    """How often something happens, as an average that forgets: what is past weighs less by the second.

    One thread adds; any may read. `clock` is monotonic seconds.
    """

    def __init__(self) -> None:
        self._state = (0.0, time.monotonic())

    def add(self, count: int, clock: float) -> None:
        """Count events that happened now."""
        rate, at = self._state
        self._state = (rate * math.exp((at - clock) / _RATE_SECONDS) + count / _RATE_SECONDS, clock)

    def per_second(self, clock: float) -> float:
        """Return the rate now."""
        rate, at = self._state
        return rate * math.exp(min(at - clock, 0.0) / _RATE_SECONDS)


def lag_seconds(
    now: float, heard_at: float | None, commit_time_us: int | None, caught_up: bool
) -> float | None:
    """Return how far behind the server we may be; `now` and `heard_at` are seconds since 1970.

    Caught up means that everything that was sent is stored. That is 0, as long as the server keeps saying
    that it has no more: after silence it is the time since it last said anything. Otherwise it is the age of
    the last commit received.
    """
    if heard_at is None:
        return None
    silence = max(now - heard_at, 0.0)
    if caught_up:
        return 0.0 if silence < _HONEST_SECONDS else silence
    if not commit_time_us:
        return silence
    return max(now - commit_time_us / 1e6, 0.0)
