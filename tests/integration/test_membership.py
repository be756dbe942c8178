# SPDX-License-Identifier: Apache-2.0

import itertools
import json
import random
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.coordinate.assignment import Assignment
from penstock.coordinate.backends.memory import MemorySession, MemoryStore
from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.held_shard import (
    LOST,
    MOVED,
    PAUSED,
    RESET,
    RESIZED,
    SELECTED,
    STOPPING,
    HeldShard,
)
from penstock.coordinate.leadership import SETTLE_SECONDS, Leadership
from penstock.coordinate.lease import Lease
from penstock.coordinate.membership import Member
from penstock.coordinate.store import CoordinationStore, open_store
from penstock.coordinate.subscription_record import Selection, Subscription, Subscriptions
from penstock.errors import LeaseLost, OptionInvalid
from tests.support.coordinate import process as coordination_process
from tests.support.suite.nonempty import each
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.zookeeper import ZooKeeper

SHARDS = 8
_numbers = itertools.count(1)


class Subscriber:
    """A member of a subscription that records the events of its shards."""

    def __init__(self, url: str, subscription: Subscription, name: str, **options: float) -> None:
        self.store = open_store(url)
        self.gained: list[HeldShard] = []
        self.lost: list[tuple[int, str]] = []
        # The consumer's reaction when its member gives up the shard.
        self.ending: Callable[[HeldShard], None] = lambda held: None
        # Sessions and grace periods do not time out unless a test sets shorter ones.
        settings = {
            "session_seconds": WAIT_SECONDS_MAX,
            "grace_seconds": WAIT_SECONDS_MAX,
            "checkpoint_seconds": 0.1,
            **options,
        }
        self.member = Member(self.store, subscription, name, self.gained.append, self._lose, **settings)

    def _lose(self, held: HeldShard, why: str) -> None:
        self.ending(held)
        self.lost.append((held.shard, why))

    @property
    def shards(self) -> set[int]:
        """The shards that the member holds and may consume."""
        return {shard for shard, held in self.member.shards.items() if held.held}

    def close(self) -> None:
        """Leave."""
        self.member.stop()
        self.store.close()


class Crowd:
    """The subscribers of one subscription, in this process."""

    def __init__(self) -> None:
        self.url = f"memory://members-{next(_numbers)}"
        self.store = open_store(self.url)
        self.subscriptions = Subscriptions(self.store)
        self.subscription = self.subscriptions.create(Subscription("shop", "cache", shard_count=SHARDS))
        self.stack = ExitStack()
        self.stack.callback(self.store.close)
        self.subscribers: list[Subscriber] = []

    def join(self, name: str, **options: float) -> Subscriber:
        """Start a subscriber."""
        subscriber = Subscriber(self.url, self.subscription, name, **options)
        self.stack.callback(subscriber.close)
        self.subscribers.append(subscriber)
        subscriber.member.start()
        return subscriber

    def wait_spread(self, shards: int = SHARDS) -> None:
        """Wait until every shard is held, and the distribution is as even as possible."""

        def spread() -> bool:
            counts = [len(one.shards) for one in self.subscribers]
            held = [shard for one in self.subscribers for shard in one.shards]
            return sorted(held) == list(range(shards)) and max(counts) - min(counts) <= 1

        wait_until(spread)


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    made = Crowd()
    with made.stack:
        yield made


def at(offset: int) -> Checkpoint:
    """Return a checkpoint at an offset."""
    return Checkpoint.now(f"mysql-bin.000001:{offset}", server_key="one")


# --- One step after the other -----------------------------------------------------------------


def test_shards_spread_over_present_members_and_return_when_one_leaves(crowd: Crowd) -> None:
    one = crowd.join("one")
    crowd.wait_spread()
    assert one.member.leads
    two = crowd.join("two")
    crowd.wait_spread()
    assert len(one.gained) == SHARDS, "what it keeps is not taken again"
    crowd.subscribers.remove(one)
    one.close()
    assert {why for _, why in one.lost} == {MOVED, STOPPING}
    crowd.wait_spread()
    assert two.shards == set(range(SHARDS))
    wait_until(lambda: two.member.leads)


@pytest.mark.timing
def test_shard_is_released_when_its_consumer_has_ended(crowd: Crowd) -> None:
    one = crowd.join("one")
    crowd.wait_spread()
    may_end, asked = threading.Event(), threading.Event()

    def finish(held: HeldShard) -> None:
        asked.set()
        assert may_end.wait(WAIT_SECONDS_MAX)
        assert held.held, "it is ours until the consumer has ended"
        held.note(at(160 + 16 * held.shard))

    one.ending = finish
    two = crowd.join("two")
    assert asked.wait(WAIT_SECONDS_MAX)
    time.sleep(0.3)
    assert not two.gained
    may_end.set()
    crowd.wait_spread()
    for held in two.gained:
        assert held.checkpoint is not None
        assert held.checkpoint.position == at(160 + 16 * held.shard).position
        before = next(other for other in one.gained if other.shard == held.shard)
        assert held.token > before.token
        assert not before.held


@pytest.mark.timing
def test_consumer_that_does_not_end_is_fenced(crowd: Crowd) -> None:
    one = crowd.join("one", grace_seconds=0.5)
    crowd.wait_spread()
    late, seen = threading.Event(), []

    def linger(held: HeldShard) -> None:
        assert late.wait(WAIT_SECONDS_MAX)
        try:
            held.note(at(999))
        except LeaseLost as error:
            seen.append(error)

    one.ending = linger
    two = crowd.join("two")
    crowd.wait_spread()
    late.set()
    wait_until(lambda: len(seen) == SHARDS // 2)
    checkpoints = crowd.subscription.checkpoints(crowd.store)
    assert all(checkpoints.read(held.shard) is None for held in two.gained)


def test_moved_shard_stays_until_its_member_leaves(crowd: Crowd) -> None:
    one, two = crowd.join("one"), crowd.join("two")
    crowd.wait_spread()
    (shard, *_) = one.shards
    crowd.subscriptions.move("shop", "cache", shard, "two")
    wait_until(lambda: shard in two.shards)
    three = crowd.join("three")
    crowd.wait_spread()
    assert shard in two.shards
    crowd.subscribers.remove(two)
    two.close()
    crowd.wait_spread()
    checkpoint = crowd.subscriptions.get("shop", "cache")
    assert checkpoint is not None
    assert not checkpoint.pins
    assert shard in one.shards | three.shards


def test_checkpoint_set_by_hand_restarts_the_shard_there(crowd: Crowd) -> None:
    one = crowd.join("one")
    crowd.wait_spread()
    one.gained[3].note(at(320))
    assert one.gained[3].flush(WAIT_SECONDS_MAX)
    crowd.subscriptions.reset("shop", "cache", at(160), 3)
    wait_until(lambda: len(one.gained) == SHARDS + 1)
    again = one.gained[-1]
    assert (again.shard, one.lost) == (3, [(3, RESET)])
    assert again.checkpoint is not None
    assert again.checkpoint.position == at(160).position
    assert again.token > one.gained[3].token
    with pytest.raises(LeaseLost):
        one.gained[3].note(at(336))


def test_running_members_are_resized(crowd: Crowd) -> None:
    subscribers = [crowd.join("one"), crowd.join("two")]
    crowd.wait_spread()
    for one in subscribers:
        # A consumer may still finish the batch that it has begun, and the checkpoint after it is accepted.
        one.ending = lambda held: held.note(at(320 + 16 * held.shard))
        for held in one.gained:
            held.note(at(160))
    resized = crowd.subscriptions.resize("shop", "cache", 3, WAIT_SECONDS_MAX)
    assert (resized.shard_count, resized.resizing) == (3, None)
    crowd.wait_spread(3)
    assert {why for one in subscribers for _, why in one.lost} == {RESIZED}
    for one in subscribers:
        for held in one.member.shards.values():
            assert held.checkpoint is not None
            assert held.checkpoint.position == at(320).position
            assert held.floors.versions == tuple((320 + 16 * shard) >> 4 | 1 << 32 for shard in range(8))
    wait_until(lambda: crowd.subscriptions.generations(resized) == [resized.generation])


@pytest.mark.timing
def test_member_that_lost_its_session_stops_and_rejoins(crowd: Crowd) -> None:
    one = crowd.join("one")
    crowd.wait_spread()
    store, session = one.store, one.member._session
    assert isinstance(store, MemoryStore)
    assert isinstance(session, MemorySession)
    tokens = {held.shard: held.token for held in one.gained}
    store.lose(session)
    wait_until(lambda: len(one.gained) == 2 * SHARDS)
    assert one.lost.count((0, LOST)) == 1
    assert len(one.lost) == SHARDS
    crowd.wait_spread()
    assert all(held.token > tokens[held.shard] for held in one.gained[SHARDS:])


@pytest.mark.timing
def test_member_without_its_store_may_consume_nothing_until_it_returns(crowd: Crowd) -> None:
    one = crowd.join("one")
    crowd.wait_spread()
    assert isinstance(one.store, MemoryStore)
    one.store.away(True)
    assert one.shards == set()
    time.sleep(0.7)
    one.store.away(False)
    crowd.wait_spread()
    assert (len(one.gained), one.lost) == (SHARDS, [])


def test_member_of_a_deleted_subscription_stops_by_name(crowd: Crowd) -> None:
    one = crowd.join("one")
    crowd.wait_spread()
    crowd.subscriptions.delete("shop", "cache")
    with pytest.raises(OptionInvalid, match="deleted"):
        wait_until(lambda: one.member.wait(0.1))
    assert len(one.lost) == SHARDS
    assert list(crowd.store.list("/subscriptions")) == []


@pytest.mark.timing
def test_member_name_is_exclusive_and_a_dead_members_name_is_free(crowd: Crowd) -> None:
    left_behind = crowd.store.session(1.0)
    left_behind.put_ephemeral(crowd.subscription.members_path + "/one", b"{}")
    one = crowd.join("one")
    time.sleep(0.3)
    assert one.shards == set()
    left_behind.close()
    crowd.wait_spread()
    double = Subscriber(crowd.url, crowd.subscription, "one", session_seconds=0.5)
    double.member.start()
    with pytest.raises(OptionInvalid, match="'one' already"):
        wait_until(lambda: double.member.wait(0.1))
    double.close()
    assert one.shards == set(range(SHARDS))


@pytest.mark.timing
def test_name_is_not_released_while_all_processes_may_be_paused(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = crowd.subscription.members_path + "/one"
    left_behind = crowd.store.session(1.0)
    left_behind.put_ephemeral(path, b"{}")
    with monkeypatch.context() as patch:
        patch.setattr(MemorySession, "certain", property(lambda _: False))
        one = crowd.join("one", session_seconds=0.1)
        time.sleep(1.2)
        assert one.member.failure is None
        left_behind.close()
        wait_until(lambda: (record := crowd.store.get(path)) is not None and record.value != b"{}")
    crowd.wait_spread()


def test_superseded_leader_changes_nothing(crowd: Crowd) -> None:
    session = crowd.store.session(1.0)
    session.put_ephemeral(crowd.subscription.members_path + "/one", b"{}")
    lease = Lease.acquire(crowd.store, session, crowd.subscription.leader_path, "one")
    assert lease is not None
    later = Assignment(crowd.subscription.generation, lease.token + 1, {0: "two"})
    crowd.store.put(crowd.subscription.assignment_path, later.encode())
    leader = Leadership(crowd.store, lease, 1.0)
    leader.lead(crowd.subscription)
    time.sleep(2 * SETTLE_SECONDS)
    leader.lead(crowd.subscription)
    assert Assignment.of(crowd.store.get(crowd.subscription.assignment_path)) == later
    crowd.store.put(crowd.subscription.assignment_path, replace(later, token=0).encode())
    leader.lead(crowd.subscription)
    ours = Assignment.of(crowd.store.get(crowd.subscription.assignment_path))
    assert (ours.token, set(ours.owners.values())) == (lease.token, {"one"})


# --- Everything at once -----------------------------------------------------------------------


class Processes:
    """Members in separate processes, which join, leave and are killed."""

    def __init__(self, url: str, file: Path, chance: random.Random) -> None:
        self.url = url
        self.file = file
        self.chance = chance
        self.running: dict[str, subprocess.Popen[str]] = {}
        self.killed = 0

    def join(self) -> None:
        """Start a member, and wait until it takes part."""
        name = f"member-{next(_numbers)}"
        process = coordination_process.start("member", self.url, "shop", "cache", name, self.file, 1.5)
        self.running[name] = process
        assert process.stdout is not None
        assert process.stdout.readline() == "joined\n", process.communicate()[1]

    def leave(self, number: signal.Signals) -> None:
        """Make a member end, as a person or a crash would."""
        process = self.running.pop(self.chance.choice(sorted(self.running)))
        process.send_signal(number)
        _, errors = process.communicate(timeout=WAIT_SECONDS_MAX)
        if number == signal.SIGKILL:
            self.killed += 1
        else:
            assert process.returncode == 0, errors

    def close(self) -> None:
        """End all processes."""
        for process in self.running.values():
            process.kill()
            process.communicate()


@pytest.fixture(params=["sqlite", "zookeeper"])
def ensemble(request: pytest.FixtureRequest) -> ZooKeeper | None:
    """The server of the store that the processes share; None for a file."""
    return request.getfixturevalue("zookeeper") if request.param == "zookeeper" else None


@pytest.mark.timing
def test_joining_leaving_and_dying_members_never_share_a_shard(
    ensemble: ZooKeeper | None, tmp_path: Path
) -> None:
    url = f"sqlite://{tmp_path}/coordination.db"
    if ensemble is not None:
        url = f"zookeeper://{ensemble.hosts}/members-{next(_numbers)}"
    store = open_store(url, WAIT_SECONDS_MAX)
    subscription = Subscriptions(store).create(Subscription("shop", "cache", shard_count=SHARDS))
    processes = Processes(url, tmp_path / "deliveries", random.Random(7))
    try:
        for _ in range(5):
            processes.join()
        deadline = time.monotonic() + 7.0
        # Run until at least one process has been killed, which takes longer on a slow machine.
        while time.monotonic() < deadline or not processes.killed:
            time.sleep(processes.chance.uniform(0.2, 0.8))
            leaving = len(processes.running) > 2 and processes.chance.random() < 0.5
            if leaving:
                processes.leave(processes.chance.choice([signal.SIGKILL, signal.SIGTERM]))
            elif len(processes.running) < 6:
                processes.join()
        if ensemble is not None:
            ensemble.kill()
            ensemble.start()
        while len(processes.running) < 5:
            processes.join()
        wait_until(lambda: is_spread(store, subscription, set(processes.running)))
        # Once the processes stop changing, every shard is consumed.
        rested = tmp_path.joinpath("deliveries").stat().st_size
        wait_until(lambda: set(range(SHARDS)) <= shards_in(tmp_path / "deliveries", rested))
        for _ in tuple(processes.running):
            processes.leave(signal.SIGTERM)
        checkpoints = subscription.checkpoints(store)
        for shard, numbers in each(delivered(tmp_path / "deliveries").items()):
            checkpoint = checkpoints.read(shard)
            assert checkpoint is not None
            # A member that leaves in order has recorded everything that it consumed.
            assert checkpoint.position == at(numbers[-1] + 16).position
    finally:
        processes.close()
        store.close()


def is_spread(store: CoordinationStore, subscription: Subscription, members: set[str]) -> bool:
    """Return whether these members hold every shard, and their shard counts differ by at most one."""
    holders = [view.holder for view in Subscriptions(store).shards(subscription)]
    counts = Counter(holder.name for holder in holders if holder is not None)
    return None not in holders and set(counts) == members and max(counts.values()) - min(counts.values()) <= 1


def shards_in(file: Path, begin: int) -> set[int]:
    """Return the shards with deliveries after an offset of the file."""
    return {int(line.split()[0]) for line in file.read_bytes()[begin:].decode().splitlines()}


def delivered(file: Path) -> dict[int, list[int]]:
    """Return the deliveries of each shard, after checking that each holder continued where the previous
    holder ended.
    """
    numbers: dict[int, list[int]] = {shard: [] for shard in range(SHARDS)}
    tokens = dict.fromkeys(numbers, 0)
    for line in file.read_text().splitlines():
        shard, token, number = map(int, line.split())
        assert token >= tokens[shard], f"{line}: token {tokens[shard]} has consumed already"
        expected = numbers[shard][-1] + 16 if numbers[shard] else 4
        if token == tokens[shard]:
            assert number == expected, line
        else:
            # Rows that a killed holder had not recorded are repeated, and none is skipped.
            assert number <= expected, line
        tokens[shard] = token
        numbers[shard].append(number)
    return numbers


# --- Selections -----------------------------------------------------------------------------


def test_selection_holds_from_the_checkpoint_at_which_each_shard_is_taken_again(crowd: Crowd) -> None:
    first, second = crowd.join("a"), crowd.join("b")
    crowd.wait_spread()
    for subscriber in (first, second):
        for shard, held in subscriber.member.shards.items():
            held.note(at(100 + shard))
    selection = Selection(where="a = 1", changes=("insert",))
    changed = crowd.subscriptions.select("shop", "cache", lambda current: selection)
    checkpoints = changed.checkpoints(crowd.store)
    wait_until(lambda: all(checkpoints.state(shard).revision == 1 for shard in range(SHARDS)))
    crowd.wait_spread()
    assert [checkpoints.state(shard).revised_at for shard in range(SHARDS)] == [
        at(100 + shard).position for shard in range(SHARDS)
    ]
    assert {why for subscriber in (first, second) for _, why in subscriber.lost} == {SELECTED}
    for subscriber in (first, second):
        assert {held.subscription.selection for held in subscriber.member.shards.values()} == {selection}
    # Setting the same selection again does not disturb any member.
    assert crowd.subscriptions.select("shop", "cache", lambda current: selection) == changed


def test_paused_subscription_has_no_holder_until_it_is_resumed(crowd: Crowd) -> None:
    subscriber = crowd.join("a")
    crowd.wait_spread()
    paused = crowd.subscriptions.pause("shop", "cache", paused=True)
    wait_until(lambda: not crowd.subscriptions.held(paused))
    assert {why for _, why in subscriber.lost} == {PAUSED}
    # A member that joins now does not receive a shard either.
    other = crowd.join("b")
    wait_until(lambda: len(crowd.subscriptions.members(paused)) == 2)
    assert not subscriber.shards
    assert not other.shards
    crowd.subscriptions.pause("shop", "cache", paused=False)
    crowd.wait_spread()


def test_record_of_an_earlier_version_selects_what_its_members_ask_for() -> None:
    values = json.loads(Subscription("shop", "cache", ("shop.orders",)).encode())
    for name in ("selection", "revision", "paused"):
        del values[name]
    decoded = Subscription.decode(json.dumps(values).encode())
    assert decoded == Subscription("shop", "cache", ("shop.orders",))
    selected = replace(decoded, selection=Selection(("shop.t",), ("shop.u",), where="a = 1"), revision=3)
    assert Subscription.decode(selected.encode()) == selected
    assert selected.selected_tables == (("shop.t",), ("shop.u",))
