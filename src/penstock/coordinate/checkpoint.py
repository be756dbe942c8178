# SPDX-License-Identifier: Apache-2.0
"""How far each shard of a subscription has been consumed, written only by whoever holds the shard.

A shard's record has the checkpoint and the token of its holder. A new holder marks its token in it before
it reads; from then on a write under an earlier token finds another one and is refused, however late it
comes. `fence` refuses every token up to a number: the holder's, when somebody sets the checkpoint by hand,
and every token there can be, when the subscription has gone on to another generation of shards.
"""

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from penstock.coordinate.floors import NO_FLOORS, Floors
from penstock.coordinate.store import (
    ABSENT,
    HINT_RECORD,
    CoordinationStore,
    Record,
    path_of,
    reading_record,
)
from penstock.errors import LeaseLost, VersionConflict

# Larger than every token: nobody may write.
TOKEN_MAX = (1 << 63) - 1

# A conflict means that another has written; nobody but a holder, its follower and a person do.
_TRIES_MAX = 20


@dataclass(frozen=True)
class Checkpoint:
    """Everything before `position` was consumed.

    `position` is a place between transactions, as `Position` writes it, in the coordinates of the server
    that `server_key` names; `gtid_set` holds every transaction before it and finds the place on another
    server of the cluster, "" without GTIDs. `time_us` is the commit time of the last transaction consumed
    (0 for none), `updated_us` when this was noted; both microseconds UTC since 1970.
    """

    position: str
    gtid_set: str = ""
    server_key: str = ""
    time_us: int = 0
    updated_us: int = 0

    @classmethod
    def now(cls, position: str, gtid_set: str = "", server_key: str = "", time_us: int = 0) -> Self:
        """Make a checkpoint that is noted now."""
        return cls(position, gtid_set, server_key, time_us, time.time_ns() // 1000)


@dataclass(frozen=True)
class ShardState:
    """What stands about a shard: where it goes on, which rows of it were consumed before, and who may
    write.

    `token` is of the last holder (0: none yet); tokens up to `fence` may not write.
    """

    checkpoint: Checkpoint | None = None
    floors: Floors = NO_FLOORS
    token: int = 0
    fence: int = 0

    @property
    def closed(self) -> bool:
        """Whether the subscription has gone on to other shards, and nobody may write this one."""
        return self.fence == TOKEN_MAX

    def encode(self) -> bytes:
        """Return the record's value."""
        found: dict[str, Any] = {"token": self.token, "fence": self.fence}
        if self.checkpoint is not None:
            found["checkpoint"] = asdict(self.checkpoint)
        if self.floors:
            found["floors"] = self.floors.to_json()
        return json.dumps(found).encode()

    @classmethod
    def of(cls, record: Record | None) -> Self:
        """Read a shard's record; a shard without one was never held. Raises SchemaInvalid."""
        if record is None:
            return cls()
        with reading_record("the checkpoint of a shard", HINT_RECORD):
            found = json.loads(record.value)
            checkpoint = found.get("checkpoint")
            return cls(
                None if checkpoint is None else Checkpoint(**checkpoint),
                Floors.from_json(found["floors"]) if "floors" in found else NO_FLOORS,
                int(found["token"]),
                int(found["fence"]),
            )


def shard_path(subscription: str, generation: int, shard: int, *names: str) -> str:
    """Return the path of something of a shard, below a subscription's path."""
    return subscription + path_of("generations", str(generation), "shards", str(shard), *names)


class Checkpoints:
    """The checkpoints of a subscription's shards, in one generation of them. Safe for threads.

    `subscription` is its path: see `subscription_record.subscription_path`.
    """

    def __init__(self, store: CoordinationStore, subscription: str, generation: int = 1) -> None:
        self._store = store
        self.subscription = subscription
        self.generation = generation
        # The versions that our own writes gave, so that a write is one round trip.
        self._versions: dict[int, tuple[int, ShardState]] = {}

    def read(self, shard: int) -> Checkpoint | None:
        """Return a shard's checkpoint, None where it has none yet. Raises CoordinationLost."""
        return self.state(shard).checkpoint

    def state(self, shard: int) -> ShardState:
        """Return all that stands about a shard. Raises CoordinationLost."""
        return ShardState.of(self._store.get(self._path(shard)))

    def take(self, shard: int, token: int) -> ShardState:
        """Mark a shard as held under a token, and return where it goes on.

        From the return on no earlier holder can write. Raises LeaseLost where a later token stands
        there already or the token is fenced, and CoordinationLost.
        """
        for _ in range(_TRIES_MAX):
            version, state = self._fetch(shard)
            if token < state.token or token <= state.fence:
                raise self._lost(shard, token, state)
            taken = replace(state, token=token)
            if self._swap(shard, version, taken):
                return taken
        raise self._busy(shard)

    def write(self, shard: int, token: int, checkpoint: Checkpoint) -> None:
        """Note how far a shard was consumed, under the token it was taken with.

        Floors that the checkpoint has passed are dropped. Raises LeaseLost where the shard is no longer
        held under this token, and CoordinationLost, after which the checkpoint may or may not stand.
        """
        known = self._versions.get(shard)
        for _ in range(_TRIES_MAX):
            version, state = known or self._fetch(shard)
            if token != state.token or token <= state.fence:
                if known is None:
                    raise self._lost(shard, token, state)
                known = None
                continue
            floors = state.floors.after(checkpoint.position, checkpoint.server_key)
            if self._swap(shard, version, replace(state, checkpoint=checkpoint, floors=floors)):
                return
            known = None
        raise self._busy(shard)

    def reset(self, shard: int, checkpoint: Checkpoint | None) -> None:
        """Set a shard's checkpoint by hand; None: as if it had never been consumed.

        Whoever holds the shard can no longer write under its token, and floors are gone. Raises LeaseLost
        where the shard is of a generation that is over, and CoordinationLost.
        """
        for _ in range(_TRIES_MAX):
            version, state = self._fetch(shard)
            if state.closed:
                raise self._lost(shard, 0, state)
            if self._swap(shard, version, ShardState(checkpoint, NO_FLOORS, state.token, state.token)):
                return
        raise self._busy(shard)

    def close(self, shard: int) -> ShardState:
        """End the writing of a shard for good, and return what stands there. Raises CoordinationLost."""
        for _ in range(_TRIES_MAX):
            version, state = self._fetch(shard)
            if state.closed:
                return state
            ended = replace(state, fence=TOKEN_MAX)
            if self._swap(shard, version, ended):
                return ended
        raise self._busy(shard)

    def begin(self, shard: int, state: ShardState) -> None:
        """Put what a new shard begins with, unless it has begun. Raises CoordinationLost."""
        try:
            self._store.put(self._path(shard), state.encode(), ABSENT)
        except VersionConflict:
            # Another does the same from the same checkpoints, which no longer change, and was first.
            return

    def _path(self, shard: int) -> str:
        return shard_path(self.subscription, self.generation, shard, "checkpoint")

    def _fetch(self, shard: int) -> tuple[int, ShardState]:
        record = self._store.get(self._path(shard))
        return ABSENT if record is None else record.version, ShardState.of(record)

    def _swap(self, shard: int, version: int, state: ShardState) -> bool:
        """Write a state over a version; tell whether that version stood there."""
        self._versions.pop(shard, None)
        try:
            written = self._store.put(self._path(shard), state.encode(), version)
        except VersionConflict:
            return False
        self._versions[shard] = (written, state)
        return True

    def _lost(self, shard: int, token: int, state: ShardState) -> LeaseLost:
        place = f"{self.subscription}, shard {shard}"
        if state.closed:
            return LeaseLost("the subscription has gone on to another number of shards", position=place)
        if token == state.token:
            return LeaseLost("the checkpoint was set by hand", position=place)
        return LeaseLost(f"the shard is held under token {state.token}, not {token}", position=place)

    def _busy(self, shard: int) -> VersionConflict:
        return VersionConflict(
            f"others write the checkpoint all the time, {_TRIES_MAX} tries found it changed",
            position=f"{self.subscription}, shard {shard}",
        )
