# SPDX-License-Identifier: Apache-2.0

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.coordinate.backends.memory import MemoryStore
from penstock.coordinate.checkpoint import TOKEN_MAX, Checkpoint, Checkpoints, ShardState
from penstock.coordinate.checkpoint_writer import CheckpointWriter
from penstock.coordinate.floors import NO_FLOORS, Floors
from penstock.coordinate.resize import reshaped, why_not
from penstock.coordinate.store import Record
from penstock.coordinate.subscription_record import Resizing, Subscription, Subscriptions
from penstock.errors import LeaseLost, OptionInvalid, PenstockError
from penstock.limits import SLOTS, SUBSCRIPTION_SHARDS_MAX
from penstock.model import Position
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

_names = itertools.count()

# A pause of the machine must not fail the test.
whenever = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    opened = MemoryStore(f"checkpoints-{next(_names)}")
    yield opened
    opened.close()


@pytest.fixture
def checkpoints(store: MemoryStore) -> Checkpoints:
    return Checkpoints(store, "/subscriptions/shop/cache")


def at(offset: int, *, epoch: int = 0, server_key: str = "one") -> Checkpoint:
    """Return a checkpoint at an offset."""
    return Checkpoint(str(Position(epoch, "mysql-bin.000001", offset)), "uuid:1-9", server_key, 5, 6)


# --- Fencing ----------------------------------------------------------------------------------


def test_checkpoint_round_trips_through_its_record(checkpoints: Checkpoints) -> None:
    assert checkpoints.read(3) is None
    assert checkpoints.state(3) == ShardState()
    assert checkpoints.take(3, 7) == ShardState(token=7)
    for offset in (100, 200, 150):
        checkpoints.write(3, 7, at(offset))
        assert checkpoints.read(3) == at(offset)
    assert checkpoints.take(3, 7).checkpoint == at(150)


def test_only_the_current_lease_holder_writes_a_checkpoint(
    store: MemoryStore, checkpoints: Checkpoints
) -> None:
    later = Checkpoints(store, checkpoints.subscription)
    checkpoints.take(0, 7)
    checkpoints.write(0, 7, at(100))
    assert later.take(0, 9).checkpoint == at(100)
    for attempt in (
        lambda: checkpoints.write(0, 7, at(200)),
        lambda: checkpoints.write(0, 7, at(200)),
        lambda: checkpoints.take(0, 7),
        lambda: checkpoints.write(0, 8, at(200)),
        # A caller that never acquired the shard holds no lease, whatever its token.
        lambda: checkpoints.write(0, 99, at(200)),
    ):
        with pytest.raises(LeaseLost):
            attempt()
    later.write(0, 9, at(300))
    assert checkpoints.read(0) == at(300)


def test_checkpoint_set_by_hand_fences_the_lease_holder(store: MemoryStore, checkpoints: Checkpoints) -> None:
    checkpoints.take(0, 7)
    checkpoints.write(0, 7, at(300))
    Checkpoints(store, checkpoints.subscription).reset(0, at(100))
    with pytest.raises(LeaseLost):
        checkpoints.write(0, 7, at(400))
    with pytest.raises(LeaseLost):
        checkpoints.take(0, 7)
    assert checkpoints.take(0, 8).checkpoint == at(100)
    checkpoints.write(0, 8, at(200))


def test_closed_shard_cannot_be_acquired(checkpoints: Checkpoints) -> None:
    checkpoints.take(0, 7)
    checkpoints.write(0, 7, at(300))
    assert checkpoints.close(0).checkpoint == at(300)
    assert checkpoints.close(0).fence == TOKEN_MAX
    for attempt in (
        lambda: checkpoints.write(0, 7, at(400)),
        lambda: checkpoints.take(0, 1000),
        lambda: checkpoints.reset(0, None),
    ):
        with pytest.raises(LeaseLost):
            attempt()


def test_new_shard_is_initialized_once(checkpoints: Checkpoints) -> None:
    checkpoints.begin(0, ShardState(at(100)))
    checkpoints.take(0, 7)
    checkpoints.write(0, 7, at(300))
    checkpoints.begin(0, ShardState(at(100)))
    assert checkpoints.read(0) == at(300)


@whenever
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5), st.integers(0, 9)), max_size=30))
def test_checkpoint_is_written_by_the_last_member_that_acquired_the_shard(
    steps: list[tuple[bool, int, int]],
) -> None:
    store = MemoryStore(f"checkpoints-{next(_names)}")
    holders = {token: Checkpoints(store, "/shop") for token in range(1, 6)}
    last, stands = 0, None
    for takes, token, offset in steps:
        try:
            if takes:
                holders[token].take(0, token)
                assert token >= last
                last = token
            else:
                holders[token].write(0, token, at(offset))
                assert token == last
                stands = at(offset)
        except LeaseLost:
            assert token < last or (not takes and token != last)
        assert holders[1].read(0) == stands
    store.close()


# --- Floors and the change of the number of shards --------------------------------------------

counts = st.integers(1, 12)


@whenever
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), counts, st.data())
def test_resize_loses_and_duplicates_no_row(offsets: list[int], count: int, data: st.DataObject) -> None:
    ended = [ShardState(at(16 * offset), token=5, fence=TOKEN_MAX) for offset in offsets]
    resized = reshaped(ended, count)
    assert len(resized) == count
    for offset in range(1, 62):
        slot = data.draw(st.integers(0, SLOTS - 1))
        version = Position(0, "mysql-bin.000001", 16 * offset).commit_version
        before = offset < offsets[slot % len(offsets)]
        state = resized[slot % count]
        assert state.checkpoint is not None
        after = (
            16 * offset >= Position.parse(state.checkpoint.position).offset
            and version >= state.floors.table("one", 0)[slot]
        )
        # Each row is consumed exactly once: either before the change or after it.
        assert before != bool(after), (slot, offset)
        assert (state.token, state.fence) == (0, 0)


def test_events_of_all_shards_have_no_floor() -> None:
    floors = Floors((100, 200), "one", 0)
    assert floors.table("one", 0)[-1] == 0
    versions = np.array([50, 150, 250, 50], dtype=np.int64)
    slots = np.array([0, 1, 1, -1], dtype=np.int16)
    assert (versions >= floors.table("one", 0)[slots]).tolist() == [False, False, True, True]


@pytest.mark.parametrize(("server_key", "epoch"), [("two", 0), ("one", 1)])
def test_floors_do_not_apply_to_another_server_or_epoch(server_key: str, epoch: int) -> None:
    floors = Floors((100, 200), "one", 0)
    assert not floors.table(server_key, epoch).any()
    assert floors.after(at(10, epoch=epoch).position, server_key) == NO_FLOORS


def test_floors_end_once_the_shard_has_passed_them(checkpoints: Checkpoints) -> None:
    ended = [ShardState(at(160)), ShardState(at(320))]
    (resized,) = reshaped(ended, 1)
    checkpoints.begin(0, resized)
    assert checkpoints.take(0, 7).floors == resized.floors
    assert resized.floors
    checkpoints.write(0, 7, at(304))
    assert checkpoints.state(0).floors == resized.floors
    checkpoints.write(0, 7, at(320))
    assert not checkpoints.state(0).floors


def test_doubling_the_shards_needs_no_floors() -> None:
    resized = reshaped([ShardState(at(160)), ShardState(at(320))], 4)
    assert [state.checkpoint for state in resized] == [at(160), at(320), at(160), at(320)]
    assert not any(state.floors for state in resized)


@pytest.mark.parametrize(
    "states",
    [
        [ShardState(at(160)), ShardState()],
        [ShardState(at(160)), ShardState(at(320, server_key="two"))],
        [ShardState(at(160)), ShardState(at(160, epoch=1))],
        [ShardState(at(160), Floors((300, 400), "one", 0)), ShardState(at(320))],
    ],
    ids=["one not begun", "two servers", "two epochs", "not caught up"],
)
def test_indistinguishable_shards_stay_unchanged(states: list[ShardState]) -> None:
    assert why_not(states)
    fenced = [replace(state, token=4, fence=TOKEN_MAX) for state in states]
    assert reshaped(fenced, 5) == states


def test_unstarted_shards_may_change_to_any_number() -> None:
    assert why_not([ShardState(), ShardState()]) is None
    assert reshaped([ShardState(), ShardState()], 3) == [ShardState()] * 3


def test_shard_state_round_trips_through_its_record() -> None:
    for state in (ShardState(), ShardState(at(160), Floors((1, 0, 5), "one", 2), 9, TOKEN_MAX)):
        assert ShardState.of(Record(state.encode(), 0, 1)) == state


# --- The registry -----------------------------------------------------------------------------

ODD = Subscription(
    "shop/1", "cache ü", ("shop.*",), ("shop.old",), 4, {"shop.orders": ("customer_id", "id")}, pins={2: "m"}
)


def test_subscription_round_trips_through_its_record(store: MemoryStore) -> None:
    subscriptions = Subscriptions(store)
    created = subscriptions.create(ODD)
    assert subscriptions.get("shop/1", "cache ü") == created
    assert subscriptions.create(ODD) == created
    subscriptions.create(Subscription("shop", "other"))
    assert [subscription.name for subscription in subscriptions.list()] == ["other", "cache ü"]
    assert subscriptions.list("shop/1") == [created]
    resizing = replace(created, resizing=Resizing(3, 9))
    assert Subscription.decode(resizing.encode()) == resizing


@pytest.mark.parametrize(
    "other",
    [
        replace(ODD, tables=()),
        replace(ODD, exclude=()),
        replace(ODD, shard_count=5),
        replace(ODD, shard_columns={}),
    ],
)
def test_subscription_with_different_settings_is_not_taken_for_the_same(
    store: MemoryStore, other: Subscription
) -> None:
    Subscriptions(store).create(ODD)
    with pytest.raises(OptionInvalid):
        Subscriptions(store).create(other)


@pytest.mark.parametrize("count", [0, SUBSCRIPTION_SHARDS_MAX + 1])
def test_number_of_shards_is_bounded(store: MemoryStore, count: int) -> None:
    with pytest.raises(OptionInvalid):
        Subscriptions(store).create(Subscription("shop", "cache", shard_count=count))
    subscriptions = Subscriptions(store)
    subscriptions.create(Subscription("shop", "cache"))
    with pytest.raises(OptionInvalid):
        subscriptions.resize("shop", "cache", count)


def test_deleted_subscription_leaves_no_record_for_a_new_one(store: MemoryStore) -> None:
    subscriptions = Subscriptions(store)
    first = subscriptions.create(ODD)
    old = first.checkpoints(store)
    old.take(0, 7)
    old.write(0, 7, at(100))
    subscriptions.delete("shop/1", "cache ü")
    subscriptions.delete("shop/1", "cache ü")
    assert list(store.list("/subscriptions")) == []
    second = subscriptions.create(ODD)
    assert second.generation > first.generation
    with pytest.raises(LeaseLost):
        old.write(0, 7, at(200))
    assert [view.state for view in subscriptions.shards(second)] == [ShardState()] * 4


def test_subscription_without_members_is_resized_at_once(store: MemoryStore) -> None:
    subscriptions = Subscriptions(store)
    subscription = subscriptions.create(Subscription("shop", "cache", shard_count=2))
    assert subscriptions.resize("shop", "cache", 3).shard_count == 3
    subscription = subscriptions.reset("shop", "cache", at(160))
    assert subscription.resets == 1
    subscription = subscriptions.reset("shop", "cache", at(320), 1)
    resized = subscriptions.resize("shop", "cache", 2)
    assert (resized.shard_count, resized.resizing) == (2, None)
    assert [view.state.checkpoint for view in subscriptions.shards(resized)] == [at(160), at(160)]
    with pytest.raises(OptionInvalid, match="caught up"):
        subscriptions.resize("shop", "cache", 5)
    assert subscriptions.get("shop", "cache") == resized
    wrongs: list[Callable[[], object]] = [
        lambda: subscriptions.reset("shop", "cache", None, 2),
        lambda: subscriptions.reset("shop", "nothing", None),
        lambda: subscriptions.move("shop", "cache", 0, "nobody"),
        lambda: subscriptions.move("shop", "cache", 2, "nobody"),
    ]
    for wrong in wrongs:
        with pytest.raises(OptionInvalid):
            wrong()


def test_interrupted_resize_is_completed_by_the_next_member(store: MemoryStore) -> None:
    subscriptions = Subscriptions(store)
    subscription = subscriptions.create(Subscription("shop", "cache", shard_count=2))
    subscriptions.reset("shop", "cache", at(160))
    resized = subscriptions.change(
        "shop",
        "cache",
        lambda subscription: replace(subscription, resizing=Resizing(3, subscriptions.next_generation())),
    )
    subscription.checkpoints(store).close(0)
    with pytest.raises(OptionInvalid, match="3 shards"):
        subscriptions.resize("shop", "cache", 4)
    first, second = subscriptions.finish_resize(resized), subscriptions.finish_resize(resized)
    assert first == second == subscriptions.get("shop", "cache")
    assert first.shard_count == 3
    assert [view.state.checkpoint for view in subscriptions.shards(first)] == [at(160)] * 3


def test_shards_with_other_columns_start_at_the_lowest_checkpoint(store: MemoryStore) -> None:
    subscriptions = Subscriptions(store)
    asked = {"shop.orders": ("id",)}
    wanted = {"shop.orders": ("customer",)}
    created = subscriptions.create(Subscription("shop", "cache", shard_count=2, shard_columns=asked))
    subscriptions.reset("shop", "cache", at(320))
    subscriptions.reset("shop", "cache", at(160), 1)
    keyed = subscriptions.rekey("shop", "cache", lambda current: wanted)
    assert (keyed.shard_columns, keyed.members_shard_columns) == (wanted, asked)
    assert keyed.generation > created.generation
    assert keyed.keyed_at == at(160).position
    assert [view.state for view in subscriptions.shards(keyed)] == [ShardState(at(160))] * 2
    assert Subscription.decode(keyed.encode()) == keyed
    for columns in (asked, wanted):
        # A program may request either its previous selection or the selection that an operator has set.
        requested = Subscription("shop", "cache", shard_count=2, shard_columns=columns)
        assert subscriptions.create(requested) == keyed
    with pytest.raises(OptionInvalid, match="subscriptions set"):
        subscriptions.create(Subscription("shop", "cache", shard_count=2))
    assert subscriptions.rekey("shop", "cache", lambda current: wanted) == keyed
    again = subscriptions.rekey("shop", "cache", lambda current: current.members_shard_columns)
    assert (again.shard_columns, again.asked_shard_columns) == (asked, None)


def test_columns_of_shards_that_cannot_be_compared_stay(store: MemoryStore) -> None:
    subscriptions = Subscriptions(store)
    created = subscriptions.create(Subscription("shop", "cache", shard_count=2))
    subscriptions.reset("shop", "cache", at(160), 1)
    with pytest.raises(OptionInvalid, match="no checkpoint yet"):
        subscriptions.rekey("shop", "cache", lambda current: {"a.b": ("c",)})
    subscriptions.change(
        "shop",
        "cache",
        lambda current: replace(
            current, resizing=Resizing(2, subscriptions.next_generation(), {"a.b": ("c",)})
        ),
    )
    with pytest.raises(OptionInvalid, match="being changed"):
        subscriptions.rekey("shop", "cache", lambda current: {"a.b": ("d",)})
    interrupted = subscriptions.get("shop", "cache")
    assert interrupted is not None
    assert Subscription.decode(interrupted.encode()) == interrupted
    finished = subscriptions.finish_resize(interrupted)
    assert (finished.shard_columns, finished.shard_count) == (created.shard_columns, 2)
    assert [view.state.checkpoint for view in subscriptions.shards(finished)] == [None, at(160)]


# --- The writer -------------------------------------------------------------------------------


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    with CheckpointWriter(0.2) as opened:
        yield opened


def test_newest_checkpoint_is_written_once_per_interval(
    store: MemoryStore, checkpoints: Checkpoints, writer: CheckpointWriter
) -> None:
    checkpoints.take(0, 7)
    shard = writer.open(checkpoints, 0, 7)
    started = time.monotonic()
    for offset in range(1, 200):
        shard.note(at(offset))
        time.sleep(0.002)
    took = time.monotonic() - started
    wait_until(lambda: checkpoints.read(0) == at(199))
    wait_until(lambda: shard.written == at(199))
    record = store.get("/subscriptions/shop/cache/generations/1/shards/0/checkpoint")
    assert record is not None
    assert record.version <= took / 0.2 + 3


def test_flush_writes_the_checkpoint_at_once(checkpoints: Checkpoints, writer: CheckpointWriter) -> None:
    checkpoints.take(0, 7)
    shard = writer.open(checkpoints, 0, 7)
    for offset in (16, 32):
        shard.note(at(offset))
        assert shard.flush(WAIT_SECONDS_MAX)
        assert checkpoints.read(0) == at(offset)
    assert shard.flush(WAIT_SECONDS_MAX)


def test_unavailable_store_is_retried_until_it_returns(
    store: MemoryStore, checkpoints: Checkpoints, writer: CheckpointWriter
) -> None:
    checkpoints.take(0, 7)
    shard = writer.open(checkpoints, 0, 7)
    store.away(True)
    shard.note(at(16))
    assert not shard.flush(0.3)
    shard.note(at(32))
    store.away(False)
    wait_until(lambda: checkpoints.read(0) == at(32))
    assert shard.lost is None


def test_lost_shard_is_reported_once_and_accepts_no_more(
    store: MemoryStore, checkpoints: Checkpoints, writer: CheckpointWriter
) -> None:
    errors: list[PenstockError] = []
    said = threading.Event()

    def lost(error: PenstockError) -> None:
        errors.append(error)
        said.set()

    checkpoints.take(0, 7)
    checkpoints.take(1, 7)
    shard, other = writer.open(checkpoints, 0, 7, lost), writer.open(checkpoints, 1, 7, lost)
    Checkpoints(store, checkpoints.subscription).take(0, 8)
    shard.note(at(16))
    assert said.wait(WAIT_SECONDS_MAX)
    for refused in (lambda: shard.note(at(32)), lambda: shard.flush(1.0)):
        with pytest.raises(LeaseLost):
            refused()
    other.note(at(16))
    assert other.flush(WAIT_SECONDS_MAX)
    assert len(errors) == 1
    assert isinstance(errors[0], LeaseLost)


def test_released_checkpoint_is_not_written(checkpoints: Checkpoints, writer: CheckpointWriter) -> None:
    checkpoints.take(0, 7)
    shard = writer.open(checkpoints, 0, 7)
    shard.note(at(16))
    assert shard.flush(WAIT_SECONDS_MAX)
    shard.note(at(32))
    shard.close()
    with pytest.raises(LeaseLost):
        shard.note(at(48))
    # The writer visits pending checkpoints in turn: when another shard's is written, the released one was
    # visited too.
    checkpoints.take(1, 7)
    other = writer.open(checkpoints, 1, 7)
    for offset in (16, 32):
        other.note(at(offset))
        wait_until(lambda offset=offset: other.written == at(offset))  # type: ignore[misc]
    assert checkpoints.read(0) == at(16)


def test_pending_checkpoint_is_written_on_close(checkpoints: Checkpoints) -> None:
    checkpoints.take(0, 7)
    with CheckpointWriter(WAIT_SECONDS_MAX) as writer:
        shard = writer.open(checkpoints, 0, 7)
        for offset in (16, 32):
            shard.note(at(offset))
            wait_until(lambda: shard.written is not None)
        writer.close(WAIT_SECONDS_MAX)
    assert checkpoints.read(0) == at(32)
