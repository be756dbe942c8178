# SPDX-License-Identifier: Apache-2.0
"""A subscriber without daemons, for testing programs: it consumes the changes that a test supplies.

    changes = FakeChanges(key={"shop.orders": ["id"]}) changes.insert("shop.orders", {"id": 7, "status":
    "new"}) changes.update("shop.orders", {"id": 7, "status": "new"}, {"id": 7, "status": "paid"})
    FakeSubscriber(changes).run(my_callback) assert changes.consumed == 2

Batches, threads, acks, rollbacks and failures behave like those of the real subscriber. It ends when all
changes are processed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow

from penstock.client.consume import Consumer, Consumption
from penstock.client.consume_async import AsyncConsumption
from penstock.client.flow import FailurePolicy, Place
from penstock.client.owned import OwnedShard, OwnedShards, Rows
from penstock.client.split import Cut, split
from penstock.client.supply import Taker
from penstock.model import Position
from penstock.source.sharding import preimages_of, sharded, slots_of

_FILE = "fake-bin.000001"
# A fake transaction has the length of the shortest real transaction, so that each has its own commit
# version.
_TRANSACTION_BYTES = 16
_BEGUN = datetime(2020, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class _Transaction:
    table: str
    rows: pyarrow.RecordBatch
    end: Place


@dataclass
class FakeChanges:
    """The input of a fake subscriber, in order. Each call adds a transaction, committed one second after the
    previous one.

    `key` lists each table's primary key columns. Rows are sharded by the primary key, or by `shard_columns`.
    `schemas` sets the Arrow schema of a table. Without it, types are inferred from the values.
    """

    key: Mapping[str, Sequence[str]] = field(default_factory=dict)
    shard_columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    schemas: Mapping[str, pyarrow.Schema] = field(default_factory=dict)
    _transactions: list[_Transaction] = field(default_factory=list, repr=False)
    _done: dict[int, Position] = field(default_factory=dict, repr=False)

    def insert(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Add a transaction that inserts rows."""
        self._add(table, [("insert", row) for row in rows])

    def update(self, table: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        """Add a transaction that changes a row."""
        self._add(table, [("update_preimage", before), ("update_postimage", after)])

    def delete(self, table: str, *rows: Mapping[str, Any]) -> None:
        """Add a transaction that deletes rows."""
        self._add(table, [("delete", row) for row in rows])

    def arrow(self, table: str, rows: pyarrow.RecordBatch | pyarrow.Table) -> None:
        """Add a transaction of Arrow rows. If the rows have no `_change_type` column, all of them are
        inserts.
        """
        batch = rows if isinstance(rows, pyarrow.RecordBatch) else rows.combine_chunks().to_batches()[0]
        kinds = ["insert"] * batch.num_rows
        if "_change_type" in batch.schema.names:
            kinds = batch.column("_change_type").to_pylist()
            batch = batch.select([name for name in batch.schema.names if name != "_change_type"])
        self._append(table, batch, kinds)

    @property
    def consumed(self) -> int:
        """The number of transactions that every shard has consumed."""
        lowest = min((position.offset for position in self._done.values()), default=_TRANSACTION_BYTES)
        return lowest // _TRANSACTION_BYTES - 1

    def _add(self, table: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        values = [dict(row) for _, row in rows]
        batch = pyarrow.RecordBatch.from_pylist(values, schema=self.schemas.get(table))
        self._append(table, batch, [kind for kind, _ in rows])

    def _append(self, table: str, rows: pyarrow.RecordBatch, kinds: Sequence[str]) -> None:
        number = len(self._transactions) + 1
        start = Position(0, _FILE, number * _TRANSACTION_BYTES)
        commit_time = _BEGUN + timedelta(seconds=number)
        columns = {
            **{name: rows.column(name) for name in rows.schema.names},
            "_change_type": pyarrow.array(kinds, pyarrow.string()),
            "_commit_version": pyarrow.array([start.commit_version] * rows.num_rows, pyarrow.int64()),
            "_commit_timestamp": pyarrow.array([commit_time] * rows.num_rows, pyarrow.timestamp("us", "UTC")),
        }
        end = Place(
            Position(0, _FILE, (number + 1) * _TRANSACTION_BYTES),
            f"0-1-{number}",
            "fake",
            round(commit_time.timestamp() * 1e6),
        )
        batch = pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))
        self._transactions.append(_Transaction(table, batch, end))


class _FakeSupply:
    """See `penstock.client.supply.Supply`."""

    def __init__(self, changes: FakeChanges, shards: int) -> None:
        self._changes = changes
        self._count = shards
        self._owned = OwnedShards()
        self._taker: Taker | None = None

    def shards(self) -> Mapping[int, OwnedShard]:
        return self._owned.all()

    def start(self, taker: Taker) -> None:
        """Deliver all supplied changes."""
        self._taker = taker
        done = self._changes._done
        begin = Place(Position(0, _FILE, _TRANSACTION_BYTES))
        for number in range(self._count):
            done[number] = begin.position

            def moved(place: Place, number: int = number) -> None:
                done[number] = place.position

            shard = OwnedShard(number, 1, begin, moved, count=self._count)
            taker.gained(shard)
            self._owned.gain(shard)
        for transaction in self._changes._transactions:
            self._feed(transaction)
        taker.ended(None)

    def stop(self) -> None:
        assert self._taker is not None
        for shard in self._owned.all().values():
            self._owned.leave(shard)
            self._taker.lost(shard)
            shard.lose()

    def _feed(self, transaction: _Transaction) -> None:
        key = tuple(self._changes.key.get(transaction.table, ()))
        shard_columns = list(self._changes.shard_columns.get(transaction.table, key))
        preimages = preimages_of(transaction.rows)
        sharded_rows = sharded(
            transaction.rows,
            slots_of(transaction.rows, shard_columns, transaction.table, preimages),
            preimages,
            self._count,
        )
        with_slots = sharded_rows.rows.append_column("_shard_slot", pyarrow.array(sharded_rows.slots))
        cuts = {number: Cut(0) for number in range(self._count)}
        rows_of = dict(split(with_slots, self._count, cuts))
        for number, shard in self._owned.all().items():
            rows = rows_of.get(number)
            contents = [] if rows is None else [Rows(transaction.table, 1, key, rows, rows.nbytes)]
            shard.offer(contents, transaction.end)


class _FakeMember(Consumer):
    """A member of a subscription over fake changes, for one run."""

    def __init__(
        self,
        changes: FakeChanges,
        *,
        shards: int = 1,
        ack: str = "auto",
        on_failure: str = "retry",
        retries: int | None = None,
        pause_seconds: float = 0.0,
    ) -> None:
        super().__init__(_FakeSupply(changes, shards), FailurePolicy(on_failure, retries, pause_seconds), ack)


class FakeSubscriber(_FakeMember, Consumption):
    """Behaves like `penstock.client.Subscriber`, but delivers fake changes. Supports one run."""


class AsyncFakeSubscriber(_FakeMember, AsyncConsumption):
    """Behaves like `penstock.client.AsyncSubscriber`, but delivers fake changes. Supports one run."""
