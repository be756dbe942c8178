# SPDX-License-Identifier: Apache-2.0
"""The shards that are ours, as several threads see them: one fills them, others consume and ack."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow

from penstock.client.batch import ChangeBatch
from penstock.client.flow import Delivery, Place, ShardFlow
from penstock.coordinate.floors import NO_FLOORS, Floors
from penstock.errors import LeaseLost
from penstock.limits import MIB

# What of one shard is received ahead of its acks: enough that a consumer never waits for the network.
HELD_BYTES_MAX = 64 * MIB

# An unacked batch that holds everything up for so long is worth a line in the log.
STALLED_SECONDS = 30.0


@dataclass(frozen=True)
class Rows:
    """Rows of one table that belong to one shard; `size` is about how many bytes they are."""

    table: str
    schema_version: int
    key: tuple[str, ...]
    batch: pyarrow.RecordBatch
    size: int


class OwnedShard:
    """One shard of `count`, from the moment that it is gained until it is lost. Safe for threads.

    First it is left, and gives nothing more but takes acks of what is being worked on; then it is lost, and
    no ack counts. `generation` grows when a subscription gets another number of shards.

    `moved` is called, quickly, with each place up to which everything is acked; it raises LeaseLost where the
    shard has another owner. While `is_held` says no, nothing is handed out. `arrived` is called whenever
    there may be something to take, or the shard was lost.
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
        generation: int = 0,
        stored: Callable[[], Place] | None = None,
    ) -> None:
        # Before which place everything is consumed as the store has it, where there is one.
        self.stored = stored
        self.shard = shard
        self.token = token
        self.count = count
        self.generation = generation
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
        """Whether nothing of the shard is to be begun any more: it is being given up, or lost."""
        return self._leaving

    @property
    def read(self) -> Place:
        """The place behind everything that was received."""
        with self._lock:
            return self._flow.read

    @property
    def done(self) -> Place:
        """The place behind everything that is consumed."""
        with self._lock:
            return self._flow.done

    @property
    def is_full(self) -> bool:
        """Whether so much is held that no more is received for now."""
        return self._flow.held_bytes >= HELD_BYTES_MAX and not self._leaving

    @property
    def waiting(self) -> int:
        """How many batches can be taken."""
        return 0 if self._leaving else self._flow.waiting

    def is_current(self, batch: ChangeBatch) -> bool:
        """Tell whether a batch was handed out after the last rollback."""
        return batch.round == self._flow.rollbacks

    def offer(self, contents: Sequence[Rows], end: Place | None) -> None:
        """Take what was received up to a place; what lies before `read` has been taken already.

        None is inside a transaction that is too large to be held: it is handed out before its end is known.
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
                    # Who took the shard has told the store; that we lost it comes from there.
                    self._leaving = self._lost = True
                    return
        if contents:
            self.arrived()

    def take(self) -> ChangeBatch | None:
        """Hand out the next batch, None where there is none, or the shard is not ours as far as we know."""
        with self._lock:
            delivery = self._flow.take() if not self._leaving and self._is_held() else None
        return None if delivery is None else self._batch(delivery)

    def ack(self, number: int, round_: int) -> None:
        """Take an ack. Raises LeaseLost where the shard is no longer ours, OptionInvalid after a rollback."""
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
        """Let everything behind the last ack be delivered again; return how many batches that is."""
        with self._lock:
            again = self._flow.rollback()
        if again:
            self.arrived()
        return again

    def wait_for_room(self, going_on: Callable[[], bool], seconds: float) -> bool:
        """Wait until the shard is not full. False where it is after so many seconds, or when called off."""
        deadline = time.monotonic() + seconds
        with self._lock:
            while self.is_full:
                left = deadline - time.monotonic()
                if left <= 0 or not going_on():
                    return False
                self._taken.wait(min(left, 0.1))
        return True

    def leave(self) -> None:
        """Hand out nothing more; acks of what was handed out count still."""
        with self._lock:
            self._leaving = True
            self._taken.notify_all()
        self.arrived()

    def lose(self) -> None:
        """Let no ack count any more: another may have the shard."""
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
    """All shards that are ours, by number. `version` rises with every gain and loss. Safe for threads."""

    def __init__(self) -> None:
        self._shards: dict[int, OwnedShard] = {}
        self._changed = threading.Condition()
        self.version = 0

    def gain(self, shard: OwnedShard) -> None:
        """Take a shard in."""
        with self._changed:
            self._shards[shard.shard] = shard
            self.version += 1
            self._changed.notify_all()

    def leave(self, shard: OwnedShard) -> None:
        """Give a shard up: nothing more is handed out of it."""
        with self._changed:
            if self._shards.get(shard.shard) is shard:
                del self._shards[shard.shard]
            self.version += 1
            self._changed.notify_all()
        shard.leave()

    def all(self) -> Mapping[int, OwnedShard]:
        """Return them as they are now."""
        with self._changed:
            return dict(self._shards)

    def wait(self, version: int, seconds: float) -> None:
        """Wait until the shards are others than at a version, or so many seconds are over, or woken."""
        with self._changed:
            if self.version == version:
                self._changed.wait(seconds)

    def wake(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self.version += 1
            self._changed.notify_all()


def roll_back(shards: Mapping[int, OwnedShard], shard: int | None) -> int:
    """Let what is unacked of one shard, or of all, be delivered again; return how many batches that is.

    Raises LeaseLost where the shard is not among them.
    """
    if shard is not None and shard not in shards:
        raise LeaseLost(f"shard {shard} is not ours", hint="See who has it: penstock subscriptions show")
    return sum(one.rollback() for number, one in shards.items() if shard in (None, number))
