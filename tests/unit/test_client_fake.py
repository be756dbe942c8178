# SPDX-License-Identifier: Apache-2.0
import asyncio
import threading
import time
from collections import defaultdict

import pyarrow
import pytest

from penstock.client import AsyncFakeSubscriber, ChangeBatch, FakeChanges, FakeSubscriber
from penstock.client.supply import Taker
from penstock.errors import LeaseLost, OptionInvalid, StreamError
from tests.support.suite.patience import WAIT_SECONDS_MAX


def changes(count: int = 10) -> FakeChanges:
    fed = FakeChanges(key={"shop.orders": ["id"]})
    for number in range(count):
        fed.insert("shop.orders", {"id": number, "status": "new"})
    return fed


def ids(batch: ChangeBatch) -> list[int]:
    return batch.to_arrow().column("id").to_pylist()  # type: ignore[no-any-return]


def test_callback_receives_every_change_in_order() -> None:
    fed, got = changes(), []
    FakeSubscriber(fed).run(lambda batch: got.extend(ids(batch)))
    assert got == list(range(10))
    assert fed.consumed == 10


def test_rows_are_objects_and_an_update_is_one_object() -> None:
    fed = FakeChanges(key={"shop.orders": ["id"]})
    fed.insert("shop.orders", {"id": 7, "status": "new"})
    fed.update("shop.orders", {"id": 7, "status": "new"}, {"id": 8, "status": "paid"})
    fed.delete("shop.orders", {"id": 8, "status": "paid"})
    rows = [row for batch in FakeSubscriber(fed) for row in batch.rows()]
    assert [(row.change_type, row.key) for row in rows] == [
        ("insert", (7,)),
        ("update", (8,)),
        ("delete", (8,)),
    ]
    update = rows[1]
    assert update.before == {"id": 7, "status": "new"}
    assert update.after == {"id": 8, "status": "paid"}
    assert update["status"] == "paid"
    assert rows[0].commit_version < update.commit_version < rows[2].commit_version


def test_update_between_two_shards_is_a_delete_and_an_insert() -> None:
    fed = FakeChanges(key={"shop.orders": ["id"]})
    fed.insert("shop.orders", {"id": 7})
    fed.update("shop.orders", {"id": 7}, {"id": 8})
    fed.update("shop.orders", {"id": 8}, {"id": 10})
    rows_by_shard: dict[int, list[tuple[str, int]]] = defaultdict(list)
    lock = threading.Lock()

    def keep(batch: ChangeBatch) -> None:
        with lock:
            rows_by_shard[batch.shard] += [(row.change_type, row["id"]) for row in batch.rows()]

    FakeSubscriber(fed, shards=2).run(keep)
    assert sorted(rows_by_shard.values()) == [
        [("insert", 7), ("delete", 7)],
        [("insert", 8), ("update", 10)],
    ]


def test_shards_are_consumed_concurrently_and_each_in_order() -> None:
    fed = FakeChanges(key={"shop.orders": ["id"]})
    for step in range(5):
        for number in range(20):
            fed.insert("shop.orders", {"id": number, "step": step})
    got: dict[int, list[tuple[int, int]]] = defaultdict(list)
    threads: set[threading.Thread] = set()

    def keep(batch: ChangeBatch) -> None:
        # The id of an ended thread may be reused.
        threads.add(threading.current_thread())
        got[batch.shard] += [(row["id"], row["step"]) for row in batch.rows()]

    FakeSubscriber(fed, shards=4).run(keep)
    assert set(got) == set(range(4))
    assert len(threads) == 4
    shard_of = {number: shard for shard, rows in got.items() for number, _ in rows}
    assert len(shard_of) == 20
    for rows in got.values():
        for number in {number for number, _ in rows}:
            assert [step for shard, step in rows if shard == number] == [0, 1, 2, 3, 4]


def test_arrow_rows_are_passed_on_unchanged() -> None:
    fed = FakeChanges()
    fed.arrow("shop.orders", pyarrow.table({"id": [1, 2], "_change_type": ["insert", "delete"]}))
    (batch,) = FakeSubscriber(fed)
    assert [row.change_type for row in batch.rows()] == ["insert", "delete"]


@pytest.mark.parametrize(
    ("on_failure", "retries", "delivered", "raised"),
    [("retry", 2, 4, None), ("retry", 1, 3, ValueError), ("skip", 0, 2, None), ("stop", None, 2, ValueError)],
)
def test_failing_callback_is_handled_by_the_error_policy(
    on_failure: str, retries: int | None, delivered: int, raised: type[Exception] | None
) -> None:
    fed, tries = changes(3), []

    def fail(batch: ChangeBatch) -> None:
        tries.append(ids(batch)[0])
        if ids(batch) == [1] and len(tries) <= 3:
            raise ValueError("no room")

    subscriber = FakeSubscriber(fed, on_failure=on_failure, retries=retries)
    if raised is not None:
        with pytest.raises(raised, match="no room"):
            subscriber.run(fail)
        assert tries == [0, *[1] * (delivered - 1)]
        assert fed.consumed == 1
    else:
        subscriber.run(fail)
        assert tries == [0, *[1] * (delivered - 1), 2]
        assert fed.consumed == 3
        assert subscriber.skipped == (on_failure == "skip")


def test_manual_acks_take_effect_in_order() -> None:
    fed = changes(4)
    batches = list(FakeSubscriber(fed, ack="manual"))
    assert fed.consumed == 0
    batches[1].ack()
    batches[3].ack()
    assert fed.consumed == 0
    batches[0].ack()
    assert fed.consumed == 2
    batches[2].ack()
    assert fed.consumed == 4


def test_unacked_batches_are_redelivered_after_a_rollback() -> None:
    fed, got = changes(4), []
    subscriber = FakeSubscriber(fed, ack="manual")
    for batch in subscriber:
        got.append(ids(batch)[0])
        if got == [0, 1, 2]:
            first = batch
            assert subscriber.rollback() == 2
            with pytest.raises(OptionInvalid):
                first.ack()
        elif len(got) == 1 or len(got) > 3:
            batch.ack()
    assert got == [0, 1, 2, 1, 2, 3]
    assert fed.consumed == 4


def test_batch_rolled_back_during_its_callback_is_redelivered_even_if_the_callback_fails() -> None:
    fed, got = changes(3), []
    subscriber = FakeSubscriber(fed, on_failure="skip")

    def roll_back_once(batch: ChangeBatch) -> None:
        got.extend(ids(batch))
        if len(got) == 1:
            subscriber.rollback()
            raise ValueError("no room")

    subscriber.run(roll_back_once)
    assert got == [0, 0, 1, 2]
    assert fed.consumed == 3


def test_batch_rolled_back_during_its_coroutine_is_redelivered() -> None:
    got = []

    async def consume() -> None:
        subscriber = AsyncFakeSubscriber(changes(3), on_failure="skip")

        def roll_back_once(batch: ChangeBatch) -> None:
            got.extend(ids(batch))
            if len(got) == 1:
                subscriber.rollback()
                raise ValueError("no room")

        await asyncio.wait_for(subscriber.run(roll_back_once), WAIT_SECONDS_MAX)

    asyncio.run(consume())
    assert got == [0, 0, 1, 2]


# The exit also ends the thread, silently in production but with a warning under pytest.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_exit_inside_a_callback_ends_the_subscriber() -> None:
    fed = changes(3)

    def leave(batch: ChangeBatch) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        FakeSubscriber(fed).run(leave)
    assert fed.consumed == 0


def test_leaving_the_loop_leaves_its_batch_unacked() -> None:
    fed = changes(3)
    with FakeSubscriber(fed) as subscriber:
        for batch in subscriber:
            if ids(batch) == [1]:
                break
    assert fed.consumed == 1


def test_leaving_the_block_ends_a_loop_that_is_still_referenced(monkeypatch: pytest.MonkeyPatch) -> None:
    # If the loop does not end, the subscriber waits this long for the batch that the loop holds.
    monkeypatch.setattr("penstock.client.consume.IN_HAND_SECONDS", WAIT_SECONDS_MAX)
    fed = changes(3)
    with FakeSubscriber(fed) as subscriber:
        loop = iter(subscriber)
        batch = next(loop)
        started = time.monotonic()
    assert time.monotonic() - started < WAIT_SECONDS_MAX / 2
    with pytest.raises(LeaseLost):
        batch.ack()
    assert list(loop) == []


def test_asyncio_subscriber_receives_the_same_changes() -> None:
    async def consume(fed: FakeChanges) -> tuple[list[int], list[int]]:
        called: list[int] = []
        looped: list[int] = []

        async def keep(batch: ChangeBatch) -> None:
            await asyncio.sleep(0)
            called.extend(ids(batch))

        await AsyncFakeSubscriber(fed, shards=2).run(keep)
        async with AsyncFakeSubscriber(fed, shards=2) as subscriber:
            async for batch in subscriber:
                looped.extend(ids(batch))
        return called, looped

    fed = changes()
    called, looped = asyncio.run(consume(fed))
    assert sorted(called) == sorted(looped) == list(range(10))
    assert fed.consumed == 10


def test_failing_coroutine_is_retried_and_then_ends_the_subscriber() -> None:
    tries = []

    async def fail(batch: ChangeBatch) -> None:
        tries.append(ids(batch)[0])
        raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        asyncio.run(AsyncFakeSubscriber(changes(3), retries=2).run(fail))
    assert tries == [0, 0, 0]


def test_program_may_stop_the_subscriber_inside_its_callback() -> None:
    fed, got = changes(), []
    subscriber = FakeSubscriber(fed)

    def keep(batch: ChangeBatch) -> None:
        got.extend(ids(batch))
        if len(got) == 3:
            subscriber.stop()

    subscriber.run(keep)
    assert got == [0, 1, 2]
    # The batch during which the subscriber stopped was consumed.
    assert fed.consumed == 3


def test_unknown_ack_mode_is_refused() -> None:
    with pytest.raises(OptionInvalid):
        FakeSubscriber(changes(), ack="never")


def ends_with(subscriber: FakeSubscriber | AsyncFakeSubscriber, problem: Exception) -> None:
    """Let the supply of a subscriber end with an error instead of at the last change."""
    start = subscriber._supply.start
    subscriber._supply.start = lambda taker: start(  # type: ignore[method-assign]
        Taker(taker.gained, taker.lost, lambda _: taker.ended(problem))
    )


@pytest.mark.parametrize("way", ["run", "for", "async run", "async for"])
def test_everything_that_arrived_before_an_error_is_delivered(way: str) -> None:
    fed, got, problem = changes(200), [], StreamError("a row cannot be read")

    def consume() -> None:
        subscriber = FakeSubscriber(fed)
        ends_with(subscriber, problem)
        if way == "run":
            subscriber.run(lambda batch: got.extend(ids(batch)))
        for batch in subscriber:
            got.extend(ids(batch))

    async def consume_async() -> None:
        subscriber = AsyncFakeSubscriber(fed)
        ends_with(subscriber, problem)
        if way == "async run":
            await subscriber.run(lambda batch: got.extend(ids(batch)))
        async for batch in subscriber:
            got.extend(ids(batch))

    with pytest.raises(StreamError) as raised:
        asyncio.run(consume_async()) if way.startswith("async") else consume()
    assert raised.value is problem
    assert got == list(range(200))
    assert fed.consumed == 200
