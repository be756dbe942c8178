# SPDX-License-Identifier: Apache-2.0
"""The order of merged transactions: by commit time up to the lowest watermark, in any order of arrival."""

from dataclasses import dataclass
from random import Random

from penstock.merge.commit_order import CommitOrder

MEMBERS = ("db1", "db2", "db3")
RUNS = 200
# An upper bound of the commit times in these tests.
LATEST_US = 1_000


@dataclass(frozen=True)
class Commit:
    """A transaction, with its time and its number in its member's log."""

    member: str
    time_us: int
    number: int


def random_logs(random: Random) -> dict[str, list[Commit]]:
    """Return logs whose times increase, with many ties."""
    times = {member: sorted(random.choices(range(1, 30), k=random.randint(0, 12))) for member in MEMBERS}
    return {
        member: [Commit(member, time_us, number) for number, time_us in enumerate(times[member])]
        for member in MEMBERS
    }


def merged(random: Random, logs: dict[str, list[Commit]], *, ends: bool = True) -> list[Commit]:
    """Return the transactions in the order in which they are taken. They are offered in a random
    interleaving.

    The watermark of a member moves at random to any time that is not after the member's next transaction.
    With `ends`, each member's watermark finally moves past its last transaction.
    """
    order: CommitOrder[Commit] = CommitOrder(MEMBERS)
    offered = dict.fromkeys(MEMBERS, 0)
    taken: list[Commit] = []
    while unoffered := [member for member in MEMBERS if offered[member] < len(logs[member])]:
        member = random.choice(unoffered)
        following = logs[member][offered[member]]
        if random.random() < 0.4:
            order.advance(member, random.randint(0, following.time_us))
        else:
            order.offer(member, following.time_us, following, LATEST_US)
            offered[member] += 1
        if random.random() < 0.5:
            taken += [commit for _, commit in order.take()]
    if ends:
        for member in MEMBERS:
            order.advance(member, LATEST_US)
    taken += [commit for _, commit in order.take()]
    return taken


def test_any_interleaving_gives_each_transaction_once_in_commit_order() -> None:
    for seed in range(RUNS):
        random = Random(seed)
        logs = random_logs(random)
        everything = [commit for log in logs.values() for commit in log]
        expected = sorted(everything, key=lambda commit: (commit.time_us, commit.member, commit.number))
        assert merged(random, logs) == expected, seed


def test_nothing_is_taken_that_a_silent_member_may_still_precede() -> None:
    for seed in range(RUNS):
        random = Random(seed)
        logs = random_logs(random)
        taken = merged(random, logs, ends=False)
        everything = [commit for log in logs.values() for commit in log]
        expected = sorted(everything, key=lambda commit: (commit.time_us, commit.member, commit.number))
        assert taken == expected[: len(taken)], seed


def test_clocks_that_disagree_lose_nothing_and_keep_each_members_order() -> None:
    for seed in range(RUNS):
        random = Random(seed)
        order: CommitOrder[Commit] = CommitOrder(MEMBERS)
        taken: list[Commit] = []
        for number in range(30):
            member = random.choice(MEMBERS)
            # A clock that jumps forward and back, and a watermark that is later than the following
            # transactions.
            order.offer(member, random.randint(0, 10 * LATEST_US), Commit(member, 0, number), 10 * number)
            order.advance(random.choice(MEMBERS), 10 * number)
            taken += [commit for _, commit in order.take()]
        for member in MEMBERS:
            order.advance(member, LATEST_US)
        taken += [commit for _, commit in order.take()]
        assert sorted(commit.number for commit in taken) == list(range(30)), seed
        for member in MEMBERS:
            numbers = [commit.number for commit in taken if commit.member == member]
            assert numbers == sorted(numbers), seed


def test_a_clock_that_is_years_ahead_holds_nothing_back() -> None:
    order: CommitOrder[str] = CommitOrder(("db1", "db2"))
    order.offer("db1", 10**18, "from the future", 100)
    order.advance("db2", 101)
    assert list(order.take()) == [("db1", "from the future")]


def test_members_that_hold_back_the_next_transaction_are_named() -> None:
    order: CommitOrder[str] = CommitOrder(MEMBERS)
    assert order.held_back_by() == []
    order.offer("db2", 5, "second", LATEST_US)
    assert order.held_back_by() == ["db1", "db3"]
    order.advance("db3", 5)
    assert order.held_back_by() == ["db1"]
    # If two transactions have the same time, that of the first member comes first. So db1 may still deliver a
    # transaction that must come earlier.
    order.advance("db1", 5)
    assert order.held_back_by() == ["db1"]
    order.offer("db1", 5, "first", LATEST_US)
    assert list(order.take()) == [("db1", "first")]
    order.advance("db1", 6)
    assert list(order.take()) == [("db2", "second")]


def test_clock_of_this_host_that_is_set_back_holds_nothing_back() -> None:
    order: CommitOrder[str] = CommitOrder(("db1", "db2"))
    order.offer("db1", 1_000, "first", 1_000)
    order.offer("db2", 1_000, "second", 1_000)
    order.advance("db1", 1_100)
    order.advance("db2", 1_100)
    assert list(order.take()) == [("db1", "first"), ("db2", "second")]
    order.limit(500)
    order.offer("db2", 450, "third", 500)
    order.offer("db2", 501, "fourth", 501)
    order.advance("db1", 502)
    assert list(order.take()) == [("db2", "third"), ("db2", "fourth")]


def test_transactions_that_wait_have_no_time_after_a_clock_that_is_set_back() -> None:
    order: CommitOrder[str] = CommitOrder(("db1", "db2"))
    order.offer("db1", 1_000, "first", 1_000)
    order.limit(500)
    order.advance("db2", 501)
    assert list(order.take()) == [("db1", "first")]
