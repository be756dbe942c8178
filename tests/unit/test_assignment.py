# SPDX-License-Identifier: Apache-2.0

from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.coordinate.assignment import Assignment, assign
from penstock.coordinate.store import Record

NAMES = [f"host-{number}" for number in range(9)]

# A pause of the machine must not fail the test.
whenever = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

members_of = st.lists(st.sampled_from(NAMES), unique=True, max_size=7)
shards_of = st.integers(1, 40)


@st.composite
def placed(draw: st.DrawFn) -> tuple[int, list[str], dict[int, str]]:
    """Draw a number of shards, the present members, and the earlier owners, including departed members."""
    shards = draw(shards_of)
    current = draw(st.dictionaries(st.integers(0, 45), st.sampled_from(NAMES), max_size=46))
    return shards, draw(members_of.filter(bool)), current


def loads(assignment: Mapping[int, str], members: Sequence[str]) -> list[int]:
    """Return the number of shards of each member."""
    counted = Counter(assignment.values())
    assert set(counted) <= set(members)
    return [counted[name] for name in members]


def kept(assignment: Mapping[int, str], current: Mapping[int, str]) -> int:
    """Return the number of shards that kept their member."""
    return sum(current.get(shard) == member for shard, member in assignment.items())


@whenever
@given(placed())
def test_every_shard_has_one_member_and_shards_are_spread_evenly(
    drawn: tuple[int, list[str], dict[int, str]],
) -> None:
    shards, members, current = drawn
    assignment = assign(shards, members, current)
    assert list(assignment) == list(range(shards))
    assert max(loads(assignment, members)) - min(loads(assignment, members)) <= 1


@whenever
@given(placed())
def test_assignment_moves_as_few_shards_as_possible(drawn: tuple[int, list[str], dict[int, str]]) -> None:
    shards, members, current = drawn
    had = Counter(member for shard, member in current.items() if shard < shards and member in members)
    least, more = divmod(shards, len(members))
    # Each member can keep as many shards as every member gets at least. A member that had more can keep one
    # further shard, as long as there are shards left over.
    most = sum(min(had[name], least) for name in members) + min(
        more, sum(had[name] > least for name in members)
    )
    assert kept(assign(shards, members, current), current) == most


@whenever
@given(placed(), st.randoms())
def test_every_member_computes_the_same_assignment(
    drawn: tuple[int, list[str], dict[int, str]], random: object
) -> None:
    shards, members, current = drawn
    shuffled = members.copy()
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assign(shards, shuffled, current) == assign(shards, members, current)
    settled = assign(shards, members, current)
    assert assign(shards, members, settled) == settled


@whenever
@given(placed(), st.dictionaries(st.integers(0, 45), st.sampled_from(NAMES), max_size=10))
def test_pinned_shard_stays_with_its_member(
    drawn: tuple[int, list[str], dict[int, str]], pins: dict[int, str]
) -> None:
    shards, members, current = drawn
    assignment = assign(shards, members, current, pins)
    assert list(assignment) == list(range(shards))
    valid = {shard: name for shard, name in pins.items() if shard < shards and name in members}
    assert all(assignment[shard] == name for shard, name in valid.items())
    # Only pins can give a member two shards more than another member.
    free = Counter(assignment[shard] for shard in range(shards) if shard not in valid)
    counts = dict(zip(members, loads(assignment, members), strict=True))
    assert all(counts[name] <= min(counts.values()) + 1 for name in members if free[name])


def test_no_members_means_no_assignment() -> None:
    assert assign(4, [], {0: "host-1"}) == {}


@pytest.mark.parametrize("owners", [{}, {0: "host-1", 11: "ü/ñ"}])
def test_assignment_round_trips_through_its_record(owners: dict[int, str]) -> None:
    written = Assignment(3, 77, owners)
    assert Assignment.of(Record(written.encode(), 0, 1)) == written
    assert Assignment.of(None).owners == {}
    assert written.shards_of("host-1") == ({0} if owners else set())
