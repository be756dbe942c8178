# SPDX-License-Identifier: Apache-2.0
"""The shards of this member, shared by several threads: one thread fills them, others consume and ack."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pyarrow

from penstock.client.batch import ChangeBatch
from penstock.client.deliveries import Deliveries
from penstock.client.flow import Delivery, Place, ShardFlow
from penstock.coordinate.floors import NO_FLOORS, Floors
from penstock.coordinate.subscription_record import AS_MEMBERS_ASK, Selection
from penstock.errors import LeaseLost
from penstock.limits import MIB

# How much of one shard is received ahead of its acks: enough that a consumer does not wait for the network.
HELD_BYTES_MAX = 64 * MIB

# If an unacked batch blocks reading for longer than this, it is logged.
STALLED_SECONDS = 30.0


@dataclass(frozen=True)
class Rows:
    """Rows of one table that belong to one shard; `size` is their approximate number of bytes."""

    table: str
    schema_version: int
    key: tuple[str, ...]
    batch: pyarrow.RecordBatch
    size: int


class OwnedShard:
    """One of `count` shards, from the time this member gains it until it loses it. Thread-safe.

    After `leave`, the shard hands out nothing more, but accepts acks of batches in progress. After `lose`,
    acks are rejected. `revision` increases when the subscription is resized, and when its `selection` of
    changes or its `shard_columns` (which assign rows to shards) are replaced. `moved` is called with the
    place up to which everything is acked, whenever that place advances. It must return quickly, and raises
    LeaseLost if the shard has another owner. While `is_held` returns False, nothing is handed out. `arrived`
    is called whenever there may be a batch to take, and when the shard is lost.
    """

    def __init__(
        self,
        shard: int,
        token: int,
        start: Place,
        moved: Callable[[Place], None],
        floors: Floors = NO_FLOORS,
        is_held: Callable[[], bool] = lambda: True,
        *,
        count: int = 1,
        revision: tuple[int, int] = (0, 0),
        selection: Selection = AS_MEMBERS_ASK,
        shard_columns: Mapping[str, Sequence[str]] = MappingProxyType({}),
        stored: Callable[[], Place] | None = None,
        deliveries: Deliveries | None = None,
    ) -> None:
        # Returns the stored place up to which everything is consumed; None if there is no store.
        self.stored = stored
        self.shard = shard
        self.token = token
        self.count = count
        self.revision = revision
        self.selection = selection
        self.shard_columns = shard_columns
        self.deliveries = deliveries or Deliveries()
        self.floors = floors
        self.arrived: Callable[[], None] = lambda: None
        self._moved = moved
        self._is_held = is_held
        self._flow: ShardFlow[Rows] = ShardFlow(start)
        self._lock = threading.Lock()
        self._taken = threading.Condition(self._lock)
        self._leaving = False
        self._lost = False

    @property
    def over(self) -> bool:
        """Whether no new work on the shard may start, because the shard is being released or was lost."""
        return self._leaving

    @property
    def read(self) -> Place:
        """The place after everything received."""
        with self._lock:
            return self._flow.read

    @property
    def done(self) -> Place:
        """The place after everything consumed."""
        with self._lock:
            return self._flow.done

    @property
    def is_full(self) -> bool:
        """Whether the buffer is full, so that receiving pauses."""
        return self._flow.held_bytes >= HELD_BYTES_MAX and not self._leaving

    @property
    def waiting(self) -> int:
        """The number of batches that can be taken."""
        return 0 if self._leaving else self._flow.waiting

    def is_current(self, batch: ChangeBatch) -> bool:
        """Return whether a batch was handed out after the last rollback."""
        return batch.round == self._flow.rollbacks

    def offer(self, contents: Sequence[Rows], end: Place | None) -> None:
        """Add received rows up to a place.

        Rows before `read` were already added, and are dropped. If `end` is None, the place is inside a
        transaction that is too large to buffer, and its rows are delivered before the end of the transaction
        is known.
        """
        with self._lock:
            if self._leaving or (end is not None and end.position < self._flow.read.position):
                return
            for rows in contents:
                self._flow.add(rows, rows.size)
            if end is not None and self._flow.advance(end):
                try:
                    self._moved(end)
                except LeaseLost:
                    # Another member has taken the shard. The coordination store reports the loss separately.
                    self._leaving = self._lost = True
                    return
        if contents:
            self.arrived()

    def take(self) -> ChangeBatch | None:
        """Hand out the next batch. Return None if none is waiting, the shard is being released, or its lease
        is uncertain.
        """
        with self._lock:
            delivery = self._flow.take() if not self._leaving and self._is_held() else None
        if delivery is None:
            return None
        self.deliveries.delivered(delivery.content.batch.num_rows)
        return self._batch(delivery)

    def ack(self, number: int, round_: int) -> None:
        """Process an ack. Raises LeaseLost if this member has lost the shard, OptionInvalid after a
        rollback.
        """
        with self._lock:
            if self._lost:
                raise LeaseLost(
                    f"shard {self.shard} has another owner by now, who gets this batch again",
                    position=str(self._flow.done.position),
                    hint="Write only what your store takes with the batch's token",
                )
            if self._flow.ack(number, round_):
                self._moved(self._flow.done)
                self._taken.notify_all()

    def rollback(self) -> int:
        """Redeliver everything after the last ack; return the number of batches."""
        with self._lock:
            again = self._flow.rollback()
        if again:
            self.arrived()
        return again

    def wait_for_room(self, going_on: Callable[[], bool], seconds: float) -> bool:
        """Wait until the shard has room.

        Return False if it is still full after `seconds`, or if `going_on` returns False.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            while self.is_full:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not going_on():
                    return False
                self._taken.wait(min(remaining, 0.1))
        return True

    def leave(self) -> None:
        """Stop handing out batches; acks of earlier batches still count."""
        with self._lock:
            self._leaving = True
            self._taken.notify_all()
        self.arrived()

    def lose(self) -> None:
        """Reject further acks, because another member may have the shard."""
        with self._lock:
            self._leaving = self._lost = True
            self._taken.notify_all()
        self.arrived()

    def _batch(self, delivery: Delivery[Rows]) -> ChangeBatch:
        number, round_, rows = delivery.number, delivery.round, delivery.content
        return ChangeBatch(
            rows.table,
            rows.batch,
            delivery.place,
            lambda: self.ack(number, round_),
            shard=self.shard,
            token=self.token,
            number=number,
            round=round_,
            schema_version=rows.schema_version,
            key=rows.key,
        )


class OwnedShards:
    """All shards of this member, by number. `version` increases with every gain and loss. Thread-safe."""

    def __init__(self) -> None:
        self._shards: dict[int, OwnedShard] = {}
        self._changed = threading.Condition()
        self.version = 0

    def gain(self, shard: OwnedShard) -> None:
        """Add a shard."""
        with self._changed:
            self._shards[shard.shard] = shard
            self.version += 1
            self._changed.notify_all()

    def leave(self, shard: OwnedShard) -> None:
        """Remove a shard, which then hands out nothing more."""
        with self._changed:
            if self._shards.get(shard.shard) is shard:
                del self._shards[shard.shard]
            self.version += 1
            self._changed.notify_all()
        shard.leave()

    def all(self) -> Mapping[int, OwnedShard]:
        """Return the current shards."""
        with self._changed:
            return dict(self._shards)

    def wait(self, version: int, seconds: float) -> None:
        """Wait until the version changes, `seconds` have passed, or `wake` is called."""
        with self._changed:
            if self.version == version:
                self._changed.wait(seconds)

    def wake(self) -> None:
        """Wake all waiting threads."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()


def roll_back(shards: Mapping[int, OwnedShard], shard: int | None) -> int:
    """Redeliver the unacked batches of one shard, or of all; return the number of batches.

    Raises LeaseLost if the member does not have the shard.
    """
    if shard is not None and shard not in shards:
        raise LeaseLost(f"shard {shard} is not ours", hint="See who has it: penstock subscriptions show")
    return sum(owned_shard.rollback() for number, owned_shard in shards.items() if shard in (None, number))
