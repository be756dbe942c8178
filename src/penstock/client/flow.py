# SPDX-License-Identifier: Apache-2.0
"""A subscriber's decisions, separate from their execution: no I/O, no clock, no threads.

`ShardFlow` tracks the deliveries of one shard: which are unacked, how far the checkpoint may advance, and
which are redelivered. `FailurePolicy` decides after a failed delivery. `choose` selects the daemon to read
from, and `DaemonBackoff` when to retry a failed one. The caller passes the time, in seconds of any monotonic
clock.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Generic, TypeVar

from penstock.commit_versions import epoch_base, next_epoch
from penstock.errors import (
    OptionInvalid,
    PenstockError,
    PositionInvalid,
    PositionPurged,
    ServerBehind,
    ServerChanged,
    TransientError,
)
from penstock.model import Position
from penstock.retry import RECONNECT, Backoff
from penstock.source.kept import EpochKey, epoch_shift

# The interval at which a subscriber checks whether another daemon has less load.
REEVALUATE_SECONDS = 90.0

ON_FAILURE = ("retry", "skip", "stop")
RETRIES_DEFAULT = 5

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Place:
    """A point in a log that is valid on every daemon: the position, its server, and the GTIDs before it.

    `time_us` is the commit time of the last transaction before it, in microseconds UTC since 1970, 0 if
    unknown. `fingerprint` identifies the position's file on a server. It is "" if the point is in a daemon's
    log.
    """

    position: Position
    gtid_set: str = ""
    server_key: str = ""
    time_us: int = 0
    fingerprint: str = ""

    def shifted(self, shift: int) -> "Place":
        """Return the same point in a log whose epoch bases are `shift` higher."""
        return replace(self, position=self.position.shifted(shift)) if shift else self


# --- One shard's deliveries -----------------------------------------------------------------


@dataclass
class Delivery(Generic[_Content]):
    """Content that was handed out and whose ack is pending.

    `place` is where reading continues after the content. `number` increases by one per delivery of a shard,
    and does not change on redelivery. `round` is the number of rollbacks before the content was handed out.
    """

    number: int
    content: _Content
    bytes: int
    place: Place
    round: int = 0
    tries: int = 0
    acked: bool = False


class ShardFlow(Generic[_Content]):
    """The deliveries and progress of one shard. Acks may arrive in any order, but take effect in delivery
    order.

    `done` is the place up to which everything has been consumed, and may be saved in a checkpoint. `read` is
    the place up to which everything has been added.
    """

    def __init__(self, start: Place) -> None:
        self.done = start
        self.read = start
        self.held_bytes = 0
        self.rollbacks = 0
        self._unacked: deque[Delivery[_Content]] = deque()
        self._handed = 0
        self._number = 0

    @property
    def waiting(self) -> int:
        """The number of deliveries that were not handed out yet."""
        return len(self._unacked) - self._handed

    def add(self, content: _Content, size: int) -> None:
        """Add the next content; `size` is in bytes. A following `advance` sets where reading continues after
        it.
        """
        self._unacked.append(Delivery(self._number, content, size, self.read))
        self._number += 1
        self.held_bytes += size

    def advance(self, place: Place) -> bool:
        """Record that everything before a place was added.

        Returns whether `done` moved, which happens only if nothing is unacked.
        """
        self.read = place
        if self._unacked:
            self._unacked[-1].place = place
            return False
        self.done = place
        return True

    def take(self) -> Delivery[_Content] | None:
        """Hand out the next delivery, None if none is waiting."""
        if self._handed == len(self._unacked):
            return None
        delivery = self._unacked[self._handed]
        delivery.round = self.rollbacks
        self._handed += 1
        return delivery

    def ack(self, number: int, round_: int) -> bool:
        """Process an ack; return whether `done` moved. Acks are idempotent.

        Raises OptionInvalid for a delivery that has been rolled back and will be redelivered.
        """
        first = self._unacked[0].number if self._unacked else self._number
        if number < first:
            return False
        if round_ != self.rollbacks:
            raise OptionInvalid(
                "this batch was rolled back, and is delivered again",
                position=str(self.done.position),
                hint="Ack the batch that comes after the rollback",
            )
        assert number - first < self._handed, "only what was handed out is acked"
        self._unacked[number - first].acked = True
        moved = False
        while self._unacked and self._unacked[0].acked:
            delivery = self._unacked.popleft()
            self._handed -= 1
            self.held_bytes -= delivery.bytes
            self.done = delivery.place
            moved = True
        return moved

    def rollback(self) -> int:
        """Go back to the last effective ack, and return the number of deliveries to repeat."""
        again = self._handed
        self.rollbacks += 1
        self._handed = 0
        for delivery in self._unacked:
            delivery.acked = False
        return again


# --- Failures -------------------------------------------------------------------------------


class Step(Enum):
    """What to do after a failed delivery."""

    RETRY = "retry"
    SKIP = "skip"
    STOP = "stop"


@dataclass(frozen=True)
class FailurePolicy:
    """How to react to failed deliveries: retry with exponential backoff, then skip or stop.

    If `on_failure` is "retry" or "stop", the subscriber ends after the last try. If it is "skip", the
    subscriber continues after the batch. A `retries` of None means RETRIES_DEFAULT for "retry", and no
    retries otherwise.
    """

    on_failure: str = "retry"
    retries: int | None = None
    pause_seconds: float = RECONNECT.first
    pause_seconds_max: float = RECONNECT.longest

    def __post_init__(self) -> None:
        if self.on_failure not in ON_FAILURE:
            raise OptionInvalid(
                f"on_failure {self.on_failure!r} is unknown", hint=f"Use one of {', '.join(ON_FAILURE)}"
            )
        if self.retries is not None and self.retries < 0:
            raise OptionInvalid(f"retries {self.retries} is less than 0", hint="Use 0 for no further try")

    @property
    def retries_max(self) -> int:
        """The number of retries after the first try."""
        if self.retries is not None:
            return self.retries
        return RETRIES_DEFAULT if self.on_failure == "retry" else 0

    def after(self, tries: int) -> tuple[Step, float]:
        """Return the next step after failed tries of one delivery, and the seconds to pause before it."""
        if tries <= self.retries_max:
            # No jitter, because the user has chosen how long a delivery is retried.
            return Step.RETRY, Backoff(self.pause_seconds, self.pause_seconds_max).bound(tries)
        return (Step.SKIP if self.on_failure == "skip" else Step.STOP), 0.0


# --- Which daemon ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """The state of a daemon: its epochs, the ends of its log, and its load.

    `load` counts the subscribers that it serves. `is_server` is true for a server's own log, because no other
    log can be ahead of it. `problem` is the reason if the daemon did not answer; the other fields are then
    empty.
    """

    load: int = 0
    epochs: Sequence[EpochKey] = ()
    earliest: Position | None = None
    head: Position | None = None
    problem: PenstockError | None = None
    is_server: bool = False


@dataclass(frozen=True)
class Fit:
    """How a place maps to a daemon's log, whose epoch base is lower by `shift`.

    `by_gtid_set` means that the daemon's log does not contain the position, and that the place must be
    located by its GTID set. In that case, `shift` ensures that later commit versions are greater than earlier
    ones.
    """

    shift: int
    by_gtid_set: bool = False


def fit(survey: Survey, place: Place) -> Fit:
    """Return how a place maps to a daemon's log.

    Raises ServerBehind if the log has not reached the place yet, PositionPurged if the log no longer has it,
    ServerChanged if the place belongs to another server and has no GTID set, and any problem of the daemon
    itself.
    """
    if survey.problem is not None:
        raise survey.problem
    if survey.earliest is None or survey.head is None:
        raise ServerBehind(
            "the daemon has nothing yet",
            position=str(place.position),
            hint="See how far it is: penstock status",
        )
    try:
        shift = epoch_shift([(place.position.epoch, place.server_key)], survey.epochs, "the daemon's log")
    except ServerChanged:
        if not place.gtid_set:
            raise
        # Choose a base above all commit versions of the place's epoch.
        lowest = min(epoch for epoch, _ in survey.epochs) if survey.epochs else 0
        following = next_epoch(place.position.epoch, place.position.file_number)
        return Fit(epoch_base(following) - epoch_base(lowest), by_gtid_set=True)
    daemon_position = place.shifted(-shift).position
    if daemon_position < survey.earliest:
        raise PositionPurged(
            f"the daemon's log begins at {survey.earliest}",
            position=str(place.position),
            hint="Set the subscription to where the log begins: penstock subscriptions reset",
        )
    if daemon_position > survey.head and survey.is_server:
        raise PositionInvalid(
            f"the server's log ends at {survey.head}",
            position=str(place.position),
            hint="Was the server reset or restored? Read the tables again, and begin with start='latest'",
        )
    if daemon_position > survey.head:
        raise ServerBehind(
            f"the daemon's log ends at {survey.head}",
            position=str(place.position),
            hint="This daemon lags behind another one: penstock status",
        )
    return Fit(shift)


_HOPEFUL = (TransientError, PositionPurged, ServerChanged)


@dataclass(frozen=True)
class Choice:
    """The number of the daemon to read from, and how each place maps to its log."""

    daemon: int
    fits: Mapping[int, Fit]


def choose(
    surveys: Mapping[int, Survey], places: Mapping[int, Place], current: int | None, preference: int = 0
) -> Choice:
    """Return the daemon to read from, whose log must have every shard's place.

    `surveys` is keyed by daemon number, `places` by shard. Daemons that locate the places by position are
    preferred to those that need GTID sets; among equals, the lowest load wins. The member leaves `current`
    only for a daemon whose load would still be lower with this member. `preference` is an arbitrary number
    that breaks ties differently for each member. If no daemon has all places, raises the error that is most
    likely to go away.
    """
    ranked = []
    problems: list[PenstockError] = []
    for number, survey in surveys.items():
        try:
            fits = {shard: fit(survey, place) for shard, place in places.items()}
        except PenstockError as problem:
            problems.append(problem)
            continue
        foreign = any(mapping.by_gtid_set for mapping in fits.values())
        # The current daemon's load already includes this member.
        load = survey.load if number == current else survey.load + 1
        turn = (number - preference) % (max(surveys) + 1)
        ranked.append((foreign, load, number != current, turn, Choice(number, fits)))
    if ranked:
        return min(ranked, key=lambda candidate: candidate[:-1])[-1]
    assert problems, "at least one daemon was asked"
    raise min(problems, key=hopelessness)


def hopelessness(problem: PenstockError) -> int:
    """Rank errors by how unlikely they are to go away. Transient errors come first, because the daemon may
    still have the place.
    """
    for rank, kind in enumerate(_HOPEFUL):
        if isinstance(problem, kind):
            return rank
    return len(_HOPEFUL)


@dataclass
class DaemonBackoff:
    """Tracks when each daemon may be asked again, with a backoff after consecutive failures."""

    _failures: dict[int, int] = field(default_factory=dict)
    _until: dict[int, float] = field(default_factory=dict)

    def failed(self, daemon: int, now: float) -> None:
        """Record a failure."""
        self._failures[daemon] = self._failures.get(daemon, 0) + 1
        self._until[daemon] = now + RECONNECT.pause(self._failures[daemon])

    def progressed(self, daemon: int) -> None:
        """Record progress of a daemon, which resets its failures."""
        self._failures.pop(daemon, None)
        self._until.pop(daemon, None)

    def ready(self, daemons: Sequence[int], now: float) -> list[int]:
        """Return the daemons that may be asked now."""
        return [daemon for daemon in daemons if self._until.get(daemon, now) <= now]

    def pause(self, daemons: Sequence[int], now: float) -> float:
        """Return the seconds until a daemon may be asked, 0 if a daemon may be asked now."""
        return max(min(self._until.get(daemon, now) for daemon in daemons) - now, 0.0)
