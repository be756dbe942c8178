# SPDX-License-Identifier: Apache-2.0
"""Placement of work on members: complete, balanced, and with few moves."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fleet.placement import TOLERANCE, Host, Placement, Work, settled_at_us
from penstock.fleet.placement import place_works as place

SECOND_US = 1_000_000

_zones = st.sampled_from(["a", "b", "c"])
_hosts = st.lists(
    st.builds(
        Host,
        name=st.integers(0, 30).map(lambda number: f"host-{number}"),
        zone=_zones,
        weight=st.sampled_from([0.5, 1.0, 2.0]),
        works=st.none() | st.frozensets(st.integers(0, 40).map(lambda number: f"work-{number}")),
        drained=st.booleans(),
        hands_over=st.booleans(),
        away=st.booleans(),
        settled=st.booleans(),
    ),
    max_size=10,
    unique_by=lambda host: host.name,
)
_works = st.lists(
    st.builds(
        Work,
        name=st.integers(0, 40).map(lambda number: f"work-{number}"),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        zone=st.none() | _zones,
    ),
    max_size=30,
    unique_by=lambda work: work.name,
)
_current = st.dictionaries(
    st.integers(0, 40).map(lambda number: f"work-{number}"),
    st.integers(0, 30).map(lambda number: f"host-{number}"),
)


def place_works(works: list[Work], hosts: list[Host], current: dict[str, str]) -> dict[str, str]:
    """Place works whose logs have no copies; return the member of each work."""
    return dict(place(works, hosts, Placement(current)).owners)


def named(count: int, prefix: str = "host") -> list[Host]:
    """Return this many equal hosts."""
    return [Host(f"{prefix}-{number}") for number in range(count)]


def works(count: int) -> list[Work]:
    """Return this many equal works."""
    return [Work(f"work-{number}") for number in range(count)]


def moved(before: dict[str, str], after: dict[str, str]) -> set[str]:
    """Return the works whose member changed."""
    return {name for name, host in before.items() if after.get(name) != host}


def assert_balanced(owners: dict[str, str], hosts: list[Host]) -> None:
    """Assert that with equal hosts and equal works, no host exceeds its share by more than the tolerance."""
    counts = Counter(owners.values())
    share = len(owners) / len(hosts)
    assert max(counts.values()) <= max(share * (1 + TOLERANCE), -(-len(owners) // len(hosts)))


@settings(max_examples=40)
@given(_works, _hosts, _current)
def test_every_work_has_a_member_that_knows_it_in_its_zone(
    works: list[Work], hosts: list[Host], current: dict[str, str]
) -> None:
    owners = place_works(works, hosts, current)
    by_name = {host.name: host for host in hosts}
    zones = {host.zone for host in hosts if host.active}
    for work in works:
        able = [
            host for host in hosts if host.knows(work) and (work.zone not in zones or host.zone == work.zone)
        ]
        if not able:
            assert work.name not in owners
        else:
            assert by_name[owners[work.name]] in able
    assert owners.keys() <= {work.name for work in works}


@settings(max_examples=40)
@given(_works, _hosts, _current)
def test_placement_is_stable_under_its_own_result(
    works: list[Work], hosts: list[Host], current: dict[str, str]
) -> None:
    owners = place_works(works, hosts, current)
    assert place_works(works, hosts, owners) == owners
    assert place_works(works[::-1], hosts[::-1], current) == owners


def test_death_of_a_member_moves_its_work_only() -> None:
    hosts = named(10)
    before = place_works(works(100), hosts, {})
    after = place_works(works(100), hosts[1:], before)
    assert moved(before, after) == {name for name, host in before.items() if host == "host-0"}
    assert_balanced(after, hosts[1:])


def test_new_member_gets_its_share_and_nothing_else_moves() -> None:
    hosts = named(9)
    before = place_works(works(900), hosts, {})
    after = place_works(works(900), [*hosts, Host("new")], before)
    assert {after[name] for name in moved(before, after)} == {"new"}
    assert_balanced(after, [*hosts, Host("new")])


def test_drained_member_keeps_nothing() -> None:
    hosts = named(3)
    before = place_works(works(9), hosts, {})
    after = place_works(works(9), [Host("host-0", drained=True), *hosts[1:]], before)
    assert "host-0" not in after.values()
    assert moved(before, after) == {name for name, host in before.items() if host == "host-0"}


def test_weights_of_members_and_works_share_the_load() -> None:
    hosts = [Host("large", weight=3.0), Host("small")]
    heavy = [Work(f"work-{number}", weight=2.0 if number % 2 else 1.0) for number in range(40)]
    owners = place_works(heavy, hosts, {})
    load = Counter[str]()
    for work in heavy:
        load[owners[work.name]] += int(work.weight)
    assert load["large"] == pytest.approx(45, abs=2)


def test_work_returns_to_its_zone_once_that_has_a_member_again() -> None:
    work, near, far = Work("work", zone="a"), Host("near", zone="a"), Host("far", zone="b")
    away = place_works([work], [far], {})
    assert away == {"work": "far"}
    assert place_works([work], [near, far], away) == {"work": "near"}


def test_member_that_is_not_settled_gains_only_what_nobody_else_can_do() -> None:
    flapping = Host("flapping", settled=False)
    assert set(place_works(works(4), [flapping, Host("steady")], {}).values()) == {"steady"}
    assert set(place_works(works(4), [flapping], {}).values()) == {"flapping"}
    kept = place_works(works(4), named(2), {})
    assert place_works(works(4), [Host("host-0", settled=False), Host("host-1")], kept) == kept


def test_damper_grows_with_each_return_and_ends() -> None:
    joins = [second * SECOND_US for second in (0, 20, 40, 60, 80)]
    waits = [settled_at_us(joins[:count]) - joins[count - 1] for count in range(3, 6)]
    assert settled_at_us([]) == settled_at_us(joins[:2]) == 0
    assert waits == [15 * SECOND_US, 30 * SECOND_US, 60 * SECOND_US]
    assert settled_at_us([*joins, 10_000 * SECOND_US]) == 0


def test_work_of_a_member_is_there_while_the_member_can_do_it() -> None:
    moved = [Work("work-0", zone="a", member="host-1"), *works(3)[1:]]
    hosts = [Host("host-0", "a"), Host("host-1", "b"), Host("host-2", "a")]
    before = place_works(moved, hosts, {"work-0": "host-0"})
    assert before["work-0"] == "host-1"
    for absent in (hosts[::2], [hosts[0], Host("host-1", "b", drained=True), hosts[2]]):
        elsewhere = place_works(moved, absent, before)
        assert elsewhere["work-0"] in ("host-0", "host-2")
        assert place_works(moved, hosts, elsewhere)["work-0"] == "host-1"


def copied(count: int, copies: int = 2) -> list[Work]:
    """Return this many works whose logs have copies."""
    return [Work(f"work-{number}", copies=copies) for number in range(count)]


_copied_works = st.lists(
    st.builds(
        Work,
        name=st.integers(0, 20).map(lambda number: f"work-{number}"),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        zone=st.none() | _zones,
        copies=st.integers(1, 4),
    ),
    max_size=12,
    unique_by=lambda work: work.name,
)
_current_copies = st.dictionaries(
    st.integers(0, 20).map(lambda number: f"work-{number}"),
    st.lists(st.integers(0, 30).map(lambda number: f"host-{number}"), max_size=4, unique=True).map(tuple),
)


@settings(max_examples=60)
@given(_copied_works, _hosts, _current, _current_copies, st.integers(0, 2))
def test_copies_are_complete_apart_and_stable(
    works: list[Work],
    hosts: list[Host],
    current: dict[str, str],
    copies: dict[str, tuple[str, ...]],
    modulus: int,
) -> None:
    by_name = {host.name: host for host in hosts}
    now = Placement(current, copies)

    def in_step(work: str) -> list[str]:
        return [name for name in sorted(by_name) if modulus and len(name) % modulus == 0]

    placed = place(works, hosts, now, in_step)
    for work in works:
        able = [host for host in hosts if host.knows(work)]
        owner = placed.owners.get(work.name)
        if owner is None or work.copies == 1:
            assert work.name not in placed.copies
            continue
        holders = [by_name[owner], *(by_name[name] for name in placed.copies[work.name])]
        # Members that are drained or absent gain no copies, and keep the copies that they have.
        former = {*copies.get(work.name, ()), current.get(work.name)}
        assert all(host in able or (host.name in former and host.may_keep(work)) for host in holders)
        assert by_name[owner] in able or by_name[owner].hands_over_log(work)
        assert len(holders) == len(set(holders)) >= min(work.copies, len(able))
        zones = {host.zone for host in able}
        assert len({host.zone for host in holders}) >= min(work.copies, len(zones))
        before = by_name.get(current.get(work.name, ""))
        is_known = any(host.knows(work) for host in hosts)
        if before is not None and (before.knows(work) or before.hands_over_log(work)) and is_known:
            # The log continues on the member that has it, or that has nearly all of it.
            assert owner == before.name or owner in in_step(work.name)
        elif any(by_name[name] in able for name in copies.get(work.name, ()) if name in by_name):
            assert owner in copies[work.name]
    assert place(works[::-1], hosts[::-1], now, in_step) == placed
    # Once a copy is in step, its work may move again. Here copies are in step at once.
    for _ in range(3 if modulus else 0):
        placed = place(works, hosts, placed, in_step)
    assert place(works, hosts, placed, in_step) == placed


def test_death_of_a_member_moves_its_work_to_the_most_complete_copy() -> None:
    hosts, work = named(4), copied(1, copies=3)
    before = Placement({"work-0": "host-0"}, {"work-0": ("host-1", "host-2")})
    after = place(work, hosts[1:], before, lambda work: ["host-2", "host-1"])
    assert after == Placement({"work-0": "host-2"}, {"work-0": ("host-1", "host-3")})
    # A copy that is behind is better than none.
    assert place(work, hosts[1:], before).owners["work-0"] in ("host-1", "host-2")


def test_new_member_gets_copies_first_and_their_work_once_they_are_in_step() -> None:
    works, hosts = copied(12), named(3)
    before = place(works, hosts, Placement())
    hosts.append(Host("new"))
    awaited = place(works, hosts, before)
    assert awaited.owners == before.owners
    moving = {work for work, names in awaited.copies.items() if "new" in names}
    assert all(set(before.copies[work]) < set(awaited.copies[work]) for work in moving)
    assert len(moving) == 3
    after = place(works, hosts, awaited, lambda work: ["new"])
    assert {work for work, host in after.owners.items() if host == "new"} == moving


def test_copy_is_replaced_by_one_in_another_zone_only_once_that_is_in_step() -> None:
    hosts = [Host("a1", "a"), Host("a2", "a"), Host("b1", "b")]
    before = Placement({"work-0": "a1"}, {"work-0": ("a2",)})
    assert place(copied(1), hosts, before).copies["work-0"] == ("a2", "b1")
    both = Placement({"work-0": "a1"}, {"work-0": ("a2", "b1")})
    assert place(copied(1), hosts, both, lambda work: ["b1"]).copies["work-0"] == ("b1",)


def test_drained_member_hands_its_work_to_a_copy_in_step() -> None:
    hosts = [Host("host-0", drained=True), *named(4)[1:]]
    before = Placement({"work-0": "host-0"}, {"work-0": ("host-3",)})
    moved_to_copy = Placement({"work-0": "host-3"}, {"work-0": ("host-0",)})
    assert place(copied(1), hosts, before) == before
    assert place(copied(1), hosts, before, lambda work: ["host-3"]) == moved_to_copy
    hosts[0] = Host("host-0", drained=True, hands_over=False)
    assert place(copied(1), hosts, before) == moved_to_copy


def test_drained_member_without_a_copy_elsewhere_gets_one_first() -> None:
    hosts = [Host("host-0", drained=True), Host("host-1")]
    awaited = place(copied(1), hosts, Placement({"work-0": "host-0"}))
    assert awaited == Placement({"work-0": "host-0"}, {"work-0": ("host-1",)})
    after = place(copied(1), hosts, awaited, lambda work: ["host-1"])
    assert after == Placement({"work-0": "host-1"}, {"work-0": ("host-0",)})
    # No other member will ever have a copy.
    alone = [hosts[0], Host("host-1", works=frozenset())]
    assert place(copied(1), alone, Placement({"work-0": "host-0"})).owners == {}


def test_copy_in_step_is_better_than_one_in_the_zone_of_the_work() -> None:
    work = Work("work", zone="a", copies=3)
    hosts = [Host("near", "a"), Host("far", "b")]
    before = Placement({"work": "dead"}, {"work": ("near", "far")})
    after = place([work], hosts, before, lambda work: ["far"])
    assert after == Placement({"work": "far"}, {"work": ("near",)})
    assert place([work], hosts, after, lambda work: ["near", "far"]).owners == {"work": "near"}


def test_member_that_is_away_for_a_moment_keeps_its_copies_and_no_work() -> None:
    before = Placement(
        {"work-0": "host-0", "work-1": "host-1"}, {"work-0": ("host-1",), "work-1": ("host-2",)}
    )
    hosts = [named(4)[0], Host("host-1", away=True), *named(4)[2:]]
    after = place(copied(2), hosts, before)
    assert after.copies == {"work-0": ("host-1",), "work-1": ("host-1",)}
    assert after.owners == {"work-0": "host-0", "work-1": "host-2"}
    gone = place(copied(2), [hosts[0], *hosts[2:]], after)
    assert "host-1" not in {name for names in gone.copies.values() for name in names}


def test_copies_are_spread_over_members() -> None:
    hosts = named(10)
    after = place(copied(100), hosts, Placement())
    counts = Counter(name for names in after.copies.values() for name in names)
    assert_balanced(dict(after.owners), hosts)
    assert max(counts.values()) <= 11
    rest = place(copied(100), hosts[1:], after, lambda work: after.copies[work])
    assert all(
        rest.owners[work] in after.copies[work] for work, host in after.owners.items() if host == "host-0"
    )
    counts = Counter(name for names in rest.copies.values() for name in names)
    assert max(counts.values()) <= 16


def test_large_fleet_is_balanced_and_deaths_move_only_the_work_of_the_dead() -> None:
    _simulate(hosts=60, count=1400, deaths=6)


@pytest.mark.deep(
    guard="tests/unit/test_fleet_placement.py::"
    "test_large_fleet_is_balanced_and_deaths_move_only_the_work_of_the_dead"
)
def test_three_hundred_members_and_seven_thousand_works_are_balanced_after_deaths() -> None:
    _simulate(hosts=300, count=7000, deaths=30)


@pytest.mark.deep(
    guard="tests/unit/test_fleet_placement.py::"
    "test_large_fleet_is_balanced_and_deaths_move_only_the_work_of_the_dead"
)
def test_five_thousand_works_with_copies_are_placed_and_only_those_of_the_dead_move() -> None:
    hosts = [Host(f"host-{number}", zone=f"room-{number % 3}") for number in range(300)]
    works = copied(5000)
    before = place(works, hosts, Placement())
    assert place(works, hosts, before) == before
    dead = {host.name for host in random.Random(14).sample(hosts, 30)}
    after = place(works, [host for host in hosts if host.name not in dead], before)
    assert moved(dict(before.owners), dict(after.owners)) == {
        work for work, host in before.owners.items() if host in dead
    }
    for work, host in before.owners.items():
        if host in dead and not dead.intersection(before.copies[work]):
            assert after.owners[work] in before.copies[work]


def _simulate(hosts: int, count: int, deaths: int) -> None:
    members, dice = named(hosts), random.Random(14)
    before = place_works(works(count), members, {})
    assert_balanced(before, members)
    dead = {host.name for host in dice.sample(members, deaths)}
    alive = [host for host in members if host.name not in dead]
    after = place_works(works(count), alive, before)
    assert moved(before, after) == {name for name, host in before.items() if host in dead}
    assert_balanced(after, alive)
    back = place_works(works(count), members, after)
    assert {back[name] for name in moved(after, back)} <= dead
    assert_balanced(back, members)
