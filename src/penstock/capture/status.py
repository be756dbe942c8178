# SPDX-License-Identifier: Apache-2.0
"""The capture state of an instance, in a form for people and a form for programs, and the instance's transfer
rates.
"""

import math
import time
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Self

from penstock.limits import HEARTBEAT_SECONDS
from penstock.telemetry.counters import Counter

# Rates are exponential averages, dominated by the last ten seconds.
_RATE_SECONDS = 10.0

# A server that has sent nothing for this long, not even a heartbeat, may have changes that Penstock does not
# know of.
_HONEST_SECONDS = 2 * HEARTBEAT_SECONDS


class State(StrEnum):
    """The state of an instance's capture."""

    OPENING = "opening"
    CONNECTING = "connecting"
    RUNNING = "running"
    HELD = "held"
    WAITING = "waiting"
    BEHIND = "behind"
    STOPPED = "stopped"
    CLOSED = "closed"
    ELSEWHERE = "elsewhere"


@dataclass(frozen=True)
class Failure:
    """An error in the status of a capture.

    `time_us` is when it occurred. `cleared_us` is when capture resumed after it, None if it has not resumed.
    Both are in microseconds since 1970, UTC.
    """

    kind: str
    message: str
    position: str | None
    hint: str | None
    time_us: int
    cleared_us: int | None = None


@dataclass(frozen=True)
class CaptureStatus:
    """A snapshot of a capture's status. Times are microseconds UTC since 1970, sizes bytes, rates per second.

    `position` is the end of the last complete transaction received, `durable` the end of the last transaction
    that survives a power failure. `lag_seconds` is 0 if the server's whole log has been received, None before
    its first packet. `lag_bytes` is None until it is measured. `note` is a warning for readers of the log.
    `prepared` lists the XA transactions that have waited for their outcome for an hour or more, with id and
    position. `missing_gtids` are transactions in the log that are missing from the last server: the server
    may be a lagging replica, or the transactions are lost. `tables_in_doubt` lists up to 100 tables that wait
    for their definition or stop their readers. Each has a reason, a position, a state and the command that
    resolves it. `commit_ts` is the commit timestamp of a TiDB cluster up to which the log is complete.
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
    commit_ts: int | None = None

    @classmethod
    def of_idle(
        cls, instance: str, state: State, why: str | None, tables: list[str], exclude_tables: list[str]
    ) -> Self:
        """Return the status of an instance that this process does not capture."""
        return cls(
            instance=instance,
            state=state,
            why=why,
            server=None,
            server_version=None,
            epoch=None,
            position=None,
            durable=None,
            earliest=None,
            gtid_set="",
            time_us=None,
            lag_seconds=None,
            lag_bytes=None,
            bytes_per_second=0.0,
            transactions_per_second=0.0,
            rows_per_second=0.0,
            log_bytes=0,
            segments=0,
            semi_sync=False,
            connects=0,
            note=None,
            error=None,
            tables=tables,
            exclude_tables=exclude_tables,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass
class CaptureCounts:
    """The failures and other events of a capture since its start, for metrics. Errors are counted by
    class.
    """

    errors: Counter = field(default_factory=Counter)
    disconnects: Counter = field(default_factory=Counter)
    failovers: int = 0


class Rate:
    """The rate of an event, as an exponentially decaying average.

    One thread adds events; any thread may read the rate. `clock` is monotonic seconds.
    """

    def __init__(self) -> None:
        self._state = (0.0, time.monotonic())

    def add(self, count: int, clock: float) -> None:
        """Count events that happen now."""
        rate, at = self._state
        self._state = (rate * math.exp((at - clock) / _RATE_SECONDS) + count / _RATE_SECONDS, clock)

    def per_second(self, clock: float) -> float:
        """Return the current rate."""
        rate, at = self._state
        return rate * math.exp(min(at - clock, 0.0) / _RATE_SECONDS)


def lag_seconds(
    now: float, heard_at: float | None, commit_time_us: int | None, caught_up: bool
) -> float | None:
    """Return how far behind the server the log may be; `now` and `heard_at` are seconds since 1970.

    If everything received is stored, the lag is 0 while heartbeats arrive, and the time since the last packet
    once they stop. Otherwise the lag is the age of the last commit received.
    """
    if heard_at is None:
        return None
    silence = max(now - heard_at, 0.0)
    if caught_up:
        return 0.0 if silence < _HONEST_SECONDS else silence
    if not commit_time_us:
        return silence
    return max(now - commit_time_us / 1e6, 0.0)
