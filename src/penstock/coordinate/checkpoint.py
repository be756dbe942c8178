# SPDX-License-Identifier: Apache-2.0
"""The consumed position of each shard of a subscription, written only by the holder of the shard.

A shard's record contains the checkpoint and the fencing token of its holder. A new holder stores its token
before it reads the checkpoint. From then on, writes with an earlier token are rejected. `fence` rejects all
tokens up to a given number. This number is the holder's token if the checkpoint was reset by hand, and the
maximum if the subscription has moved to another generation of shards.
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

# A fence that is larger than every token, so it rejects all writers.
TOKEN_MAX = (1 << 63) - 1

# A conflict means that the holder, its successor or an operator wrote at the same time.
_TRIES_MAX = 20


@dataclass(frozen=True)
class Checkpoint:
    """Records that everything before `position` has been consumed.

    `position` lies between transactions, in the format of `Position`, and refers to the log of the server
    `server_key`. `gtid_set` contains all transactions before the position, and locates the position on
    another server of the cluster; it is "" without GTIDs. `time_us` is the commit time of the last consumed
    transaction (0 for none), and `updated_us` is the time of the checkpoint, both in microseconds since 1970,
    UTC. `fingerprint` identifies the position's file if it was read from the server itself.
    """

    position: str
    gtid_set: str = ""
    server_key: str = ""
    time_us: int = 0
    updated_us: int = 0
    fingerprint: str = ""

    @classmethod
    def now(
        cls, position: str, gtid_set: str = "", server_key: str = "", time_us: int = 0, fingerprint: str = ""
    ) -> Self:
        """Return a checkpoint with the current time."""
        return cls(position, gtid_set, server_key, time_us, time.time_ns() // 1000, fingerprint)


@dataclass(frozen=True)
class ShardState:
    """The state of a shard: its checkpoint, the rows that were already consumed before a resize, and who may
    write.

    `token` belongs to the last holder (0: none yet). Holders with a token up to `fence` may not write. From
    position `revised_at` on, the holder delivers the selection of `revision`.
    """

    checkpoint: Checkpoint | None = None
    floors: Floors = NO_FLOORS
    token: int = 0
    fence: int = 0
    revision: int = 0
    revised_at: str | None = None

    @property
    def closed(self) -> bool:
        """Whether the subscription has moved to other shards, so that nobody may write the checkpoint of this
        shard.
        """
        return self.fence == TOKEN_MAX

    def encode(self) -> bytes:
        """Return the value of the record."""
        values: dict[str, Any] = {"token": self.token, "fence": self.fence}
        if self.checkpoint is not None:
            checkpoint = asdict(self.checkpoint)
            if not self.checkpoint.fingerprint:
                # Leave out an empty fingerprint: versions without server subscriptions do not know the field.
                del checkpoint["fingerprint"]
            values["checkpoint"] = checkpoint
        if self.floors:
            values["floors"] = self.floors.to_json()
        if self.revision:
            values |= {"revision": self.revision, "revised_at": self.revised_at}
        return json.dumps(values).encode()

    @classmethod
    def of(cls, record: Record | None) -> Self:
        """Read a shard's record. A missing record means that the shard was never held. Raises
        SchemaInvalid.
        """
        if record is None:
            return cls()
        with reading_record("the checkpoint of a shard", HINT_RECORD):
            values = json.loads(record.value)
            checkpoint = values.get("checkpoint")
            return cls(
                None if checkpoint is None else Checkpoint(**checkpoint),
                Floors.from_json(values["floors"]) if "floors" in values else NO_FLOORS,
                int(values["token"]),
                int(values["fence"]),
                int(values.get("revision", 0)),
                values.get("revised_at"),
            )


def shard_path(subscription: str, generation: int, shard: int, *names: str) -> str:
    """Return the path of a shard's record, below a subscription's path."""
    return subscription + path_of("generations", str(generation), "shards", str(shard), *names)


class Checkpoints:
    """The checkpoints of a subscription's shards in one generation. Thread-safe.

    `subscription` is the subscription's path; see `subscription_record.subscription_path`.
    """

    def __init__(self, store: CoordinationStore, subscription: str, generation: int = 1) -> None:
        self._store = store
        self.subscription = subscription
        self.generation = generation
        # The record versions that this process's writes returned, so that the next write takes one round
        # trip.
        self._versions: dict[int, tuple[int, ShardState]] = {}

    def read(self, shard: int) -> Checkpoint | None:
        """Return a shard's checkpoint, None if there is none yet. Raises CoordinationLost."""
        return self.state(shard).checkpoint

    def state(self, shard: int) -> ShardState:
        """Return the state of a shard. Raises CoordinationLost."""
        return ShardState.of(self._store.get(self._path(shard)))

    def take(self, shard: int, token: int, revision: int = 0) -> ShardState:
        """Mark a shard as held under a token, with the subscription's revision; return its state.

        Once this method has returned, no earlier holder can write. Raises LeaseLost if a later token is
        stored or the token is fenced, and CoordinationLost.
        """
        for _ in range(_TRIES_MAX):
            version, state = self._fetch(shard)
            if token < state.token or token <= state.fence:
                raise self._lost(shard, token, state)
            taken = replace(state, token=token)
            if state.revision != revision:
                start = None if state.checkpoint is None else state.checkpoint.position
                taken = replace(taken, revision=revision, revised_at=start)
            if self._swap(shard, version, taken):
                return taken
        raise self._busy(shard)

    def write(self, shard: int, token: int, checkpoint: Checkpoint) -> None:
        """Write a shard's checkpoint under the token with which the shard was taken.

        Floors that the checkpoint has passed are dropped. Raises LeaseLost if the shard is no longer held
        under this token. After CoordinationLost, the checkpoint may or may not have been written.
        """
        cached = self._versions.get(shard)
        for _ in range(_TRIES_MAX):
            version, state = cached or self._fetch(shard)
            if token != state.token or token <= state.fence:
                if cached is None:
                    raise self._lost(shard, token, state)
                cached = None
                continue
            floors = state.floors.after(checkpoint.position, checkpoint.server_key)
            if self._swap(shard, version, replace(state, checkpoint=checkpoint, floors=floors)):
                return
            cached = None
        raise self._busy(shard)

    def reset(self, shard: int, checkpoint: Checkpoint | None) -> None:
        """Set a shard's checkpoint by hand; None means that nothing was consumed.

        Fences the current holder and drops the floors. Raises LeaseLost for a shard of a past generation, and
        CoordinationLost.
        """
        for _ in range(_TRIES_MAX):
            version, state = self._fetch(shard)
            if state.closed:
                raise self._lost(shard, 0, state)
            if self._swap(shard, version, ShardState(checkpoint, NO_FLOORS, state.token, state.token)):
                return
        raise self._busy(shard)

    def close(self, shard: int) -> ShardState:
        """Fence a shard permanently, and return its state. Raises CoordinationLost."""
        for _ in range(_TRIES_MAX):
            version, state = self._fetch(shard)
            if state.closed:
                return state
            ended = replace(state, fence=TOKEN_MAX)
            if self._swap(shard, version, ended):
                return ended
        raise self._busy(shard)

    def begin(self, shard: int, state: ShardState) -> None:
        """Write the initial state of a new shard, unless it already has a state. Raises CoordinationLost."""
        try:
            self._store.put(self._path(shard), state.encode(), ABSENT)
        except VersionConflict:
            # Another process has already written the same state, computed from the same final checkpoints.
            return

    def _path(self, shard: int) -> str:
        return shard_path(self.subscription, self.generation, shard, "checkpoint")

    def _fetch(self, shard: int) -> tuple[int, ShardState]:
        record = self._store.get(self._path(shard))
        return ABSENT if record is None else record.version, ShardState.of(record)

    def _swap(self, shard: int, version: int, state: ShardState) -> bool:
        """Write a state if the record still has the given version; return whether the state was written."""
        self._versions.pop(shard, None)
        try:
            written = self._store.put(self._path(shard), state.encode(), version)
        except VersionConflict:
            return False
        self._versions[shard] = (written, state)
        return True

    def _lost(self, shard: int, token: int, state: ShardState) -> LeaseLost:
        shard_path = f"{self.subscription}, shard {shard}"
        if state.closed:
            return LeaseLost("the subscription has gone on to another number of shards", position=shard_path)
        if token == state.token:
            return LeaseLost("the checkpoint was set by hand", position=shard_path)
        return LeaseLost(f"the shard is held under token {state.token}, not {token}", position=shard_path)

    def _busy(self, shard: int) -> VersionConflict:
        return VersionConflict(
            f"others write the checkpoint all the time, {_TRIES_MAX} tries found it changed",
            position=f"{self.subscription}, shard {shard}",
        )
