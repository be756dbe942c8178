# SPDX-License-Identifier: Apache-2.0
"""What a subscriber decides, and nothing of how it is done: no I/O, no clock, no threads.

`ShardFlow` keeps one shard's deliveries in order: what is unacked, where its checkpoint may go, what comes
again. `FailurePolicy` says what follows a failed delivery. `choose` says which daemon is read from, and
`Backoff` when one that failed is asked again. Whoever holds them gives the time, in seconds of any clock
that only rises.
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
    PositionPurged,
    ServerBehind,
    ServerChanged,
    TransientError,
)
from penstock.model import Position
from penstock.source.kept import EpochKey, epoch_shift

# Every so often a subscriber looks whether another daemon has less to do.
REEVALUATE_SECONDS = 90.0

ON_FAILURE = ("retry", "skip", "stop")
RETRIES_DEFAULT = 5
PAUSE_SECONDS_FIRST = 0.1
PAUSE_SECONDS_MAX = 10.0

_Content = TypeVar("_Content")


@dataclass(frozen=True)
class Place:
    """A place in a log that holds on every daemon: the position, whose it is, and the GTIDs before it.

    `time_us` is when the last transaction before it was committed, in microseconds UTC since 1970, 0 where
    that is not known.
    """

    position: Position
    gtid_set: str = ""
    server_key: str = ""
    time_us: int = 0

    def shifted(self, shift: int) -> "Place":
        """Return the same place in a log whose epochs have bases that are `shift` higher."""
        return replace(self, position=self.position.shifted(shift))


# --- One shard's deliveries -----------------------------------------------------------------


@dataclass
class Delivery(Generic[_Content]):
    """Something that is handed out, until it is acked. `place` is where reading goes on behind it.

    `number` rises by one in a shard and stays the same when it is delivered again; `round` is the count of
    rollbacks before it was handed out.
    """

    number: int
    content: _Content
    bytes: int
    place: Place
    round: int = 0
    tries: int = 0
    acked: bool = False


class ShardFlow(Generic[_Content]):
    """One shard: deliveries in order, acks in any order that take effect in order, and where it stands.

    `done` is the place behind everything that is consumed: what a checkpoint may say. `read` is the place
    behind everything that was added.
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
    def unacked(self) -> int:
        """How many deliveries are not acked, or acked behind one that is not."""
        return len(self._unacked)

    @property
    def waiting(self) -> int:
        """How many deliveries were not handed out yet."""
        return len(self._unacked) - self._handed

    def add(self, content: _Content, size: int) -> None:
        """Take what comes next; `size` is its bytes. `advance` says where reading goes on behind it."""
        self._unacked.append(Delivery(self._number, content, size, self.read))
        self._number += 1
        self.held_bytes += size

    def advance(self, place: Place) -> bool:
        """Note that everything before a place was added. True where `done` moved, as nothing is unacked."""
        self.read = place
        if self._unacked:
            self._unacked[-1].place = place
            return False
        self.done = place
        return True

    def take(self) -> Delivery[_Content] | None:
        """Hand out the next delivery, None where there is none."""
        if self._handed == len(self._unacked):
            return None
        delivery = self._unacked[self._handed]
        delivery.round = self.rollbacks
        self._handed += 1
        return delivery

    def ack(self, number: int, round_: int) -> bool:
        """Take an ack; True where `done` moved. An ack that came already changes nothing.

        Raises OptionInvalid for a delivery that was rolled back meanwhile: it comes again.
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
        """Go back to the last ack that took effect, and return how many deliveries come again."""
        again = self._handed
        self.rollbacks += 1
        self._handed = 0
        for delivery in self._unacked:
            delivery.acked = False
        return again


# --- Failures -------------------------------------------------------------------------------


class Step(Enum):
    """What follows a failed delivery."""

    RETRY = "retry"
    SKIP = "skip"
    STOP = "stop"


@dataclass(frozen=True)
class FailurePolicy:
    """What follows a failed delivery: so many more tries, with a pause that doubles, then a skip or the end.

    `on_failure` "retry" and "stop" end the subscriber after the last try, "skip" goes on behind the batch.
    `retries` None is RETRIES_DEFAULT for "retry" and none for the others.
    """

    on_failure: str = "retry"
    retries: int | None = None
    pause_seconds: float = PAUSE_SECONDS_FIRST
    pause_seconds_max: float = PAUSE_SECONDS_MAX

    def __post_init__(self) -> None:
        if self.on_failure not in ON_FAILURE:
            raise OptionInvalid(
                f"on_failure {self.on_failure!r} is unknown", hint=f"Use one of {', '.join(ON_FAILURE)}"
            )
        if self.retries is not None and self.retries < 0:
            raise OptionInvalid(f"retries {self.retries} is less than 0", hint="Use 0 for no further try")

    @property
    def retries_max(self) -> int:
        """How many tries follow the first."""
        if self.retries is not None:
            return self.retries
        return RETRIES_DEFAULT if self.on_failure == "retry" else 0

    def after(self, tries: int) -> tuple[Step, float]:
        """Return what follows so many failed tries of one delivery, and the seconds to pause before it."""
        if tries <= self.retries_max:
            return Step.RETRY, pause_after(tries, self.pause_seconds, self.pause_seconds_max)
        return (Step.SKIP if self.on_failure == "skip" else Step.STOP), 0.0


def pause_after(
    failures: int, first: float = PAUSE_SECONDS_FIRST, longest: float = PAUSE_SECONDS_MAX
) -> float:
    """Return the seconds to wait after so many failures in a row, 1 or more: they double, up to a bound."""
    # Past a thousand doublings a float has no room; the bound is reached long before.
    return min(first * 2.0 ** min(failures - 1, 64), longest)


# --- Which daemon ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """What a daemon says of itself: its epochs, from where to where its log goes, and how much it has to do.

    `load` counts the subscribers that it serves. `problem` is why it could not say: then the rest is empty.
    """

    load: int = 0
    epochs: Sequence[EpochKey] = ()
    earliest: Position | None = None
    head: Position | None = None
    problem: PenstockError | None = None


@dataclass(frozen=True)
class Fit:
    """How a place lies in a daemon's log: `shift` lower in the base of its epoch.

    `by_gtid_set` says that its position means nothing there, so it is to be found by its GTID set; `shift`
    then keeps the commit versions that follow above those before.
    """

    shift: int
    by_gtid_set: bool = False


def fit(survey: Survey, place: Place) -> Fit:
    """Return how a place lies in a daemon's log.

    Raises ServerBehind where the daemon has not got there yet, PositionPurged where it no longer has it,
    ServerChanged where it is another server's and has no GTID set, and the daemon's own problem.
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
        # Above every number that this place's commit versions have.
        lowest = min(epoch for epoch, _ in survey.epochs) if survey.epochs else 0
        following = next_epoch(place.position.epoch, place.position.file_number)
        return Fit(epoch_base(following) - epoch_base(lowest), by_gtid_set=True)
    here = place.shifted(-shift).position
    if here < survey.earliest:
        raise PositionPurged(
            f"the daemon's log begins at {survey.earliest}",
            position=str(place.position),
            hint="Set the subscription to where the log begins: penstock subscriptions reset",
        )
    if here > survey.head:
        raise ServerBehind(
            f"the daemon's log ends at {survey.head}",
            position=str(place.position),
            hint="It is behind another daemon: penstock status",
        )
    return Fit(shift)


_HOPEFUL = (TransientError, PositionPurged, ServerChanged)


@dataclass(frozen=True)
class Choice:
    """The daemon to read from, by its number, and how each place lies in its log."""

    daemon: int
    fits: Mapping[int, Fit]


def choose(
    surveys: Mapping[int, Survey], places: Mapping[int, Place], current: int | None, preference: int = 0
) -> Choice:
    """Return the daemon to read from, so that it has every shard's place.

    `surveys` are those that were asked, by number, `places` those of the shards, by shard. A place that is
    there by its position goes before one that must be found by its GTID set, then the least load. `current`
    is left only for one that, with us, would still have less to do; `preference`, any number, spreads equals
    over the daemons. Raises what the daemon that comes nearest says where none has them all.
    """
    ranked = []
    problems: list[PenstockError] = []
    for number, survey in surveys.items():
        try:
            fits = {shard: fit(survey, place) for shard, place in places.items()}
        except PenstockError as problem:
            problems.append(problem)
            continue
        foreign = any(one.by_gtid_set for one in fits.values())
        # We are counted where we are, and would be where we went.
        load = survey.load if number == current else survey.load + 1
        turn = (number - preference) % (max(surveys) + 1)
        ranked.append((foreign, load, number != current, turn, Choice(number, fits)))
    if ranked:
        return min(ranked, key=lambda one: one[:-1])[-1]
    assert problems, "at least one daemon was asked"
    raise min(problems, key=hopelessness)


def hopelessness(problem: PenstockError) -> int:
    """Rank reasons: what passes by itself first, as the daemon that says so may have the place after all."""
    for rank, kind in enumerate(_HOPEFUL):
        if isinstance(problem, kind):
            return rank
    return len(_HOPEFUL)


@dataclass
class Backoff:
    """When each of several daemons may be asked again after failures in a row."""

    _failures: dict[int, int] = field(default_factory=dict)
    _until: dict[int, float] = field(default_factory=dict)

    def failed(self, daemon: int, now: float) -> None:
        """Note a failure."""
        self._failures[daemon] = self._failures.get(daemon, 0) + 1
        self._until[daemon] = now + pause_after(self._failures[daemon])

    def progressed(self, daemon: int) -> None:
        """Note that a daemon gave something: its failures are forgotten."""
        self._failures.pop(daemon, None)
        self._until.pop(daemon, None)

    def ready(self, daemons: Sequence[int], now: float) -> list[int]:
        """Return those that may be asked now."""
        return [one for one in daemons if self._until.get(one, now) <= now]

    def pause(self, daemons: Sequence[int], now: float) -> float:
        """Return the seconds until one of them may be asked, 0 where one may be now."""
        return max(min(self._until.get(one, now) for one in daemons) - now, 0.0)
