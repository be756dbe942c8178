# SPDX-License-Identifier: Apache-2.0
"""A simulated fleet: real membership and placement, through deaths, partitions, pauses and clock jumps."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time

import pytest

from penstock.fleet.group import JOB_WORKERS
from penstock.fleet.jobs import JobSpec, apply_job
from penstock.fleet.leader import FleetLeadership
from penstock.fleet.placement import TOLERANCE, Work
from tests.support.fleet.simulation import SESSION_SECONDS, SimulatedTime, Simulation, simulated_time
from tests.support.suite.sweep_seed import sweep_random

IS_LONG = bool(os.environ.get("PENSTOCK_LONG"))
STEPS = 10_000 if IS_LONG else 200
# The time for the last faults to end and for the work to be balanced.
SETTLING_SECONDS = 700.0 if IS_LONG else 200.0

# A session ends, a leader is elected and reads the state, and the work begins; each step may be late by one
# poll.
UNHELD_SECONDS_MAX = 3 * SESSION_SECONDS


@pytest.fixture
def time() -> Iterator[SimulatedTime]:
    """The time that members live in."""
    with simulated_time() as time:
        yield time


def works(count: int, copies: int = 1) -> dict[str, Work]:
    """Return this many works by name."""
    return {f"shop-{number}": Work(f"shop-{number}", copies=copies) for number in range(count)}


def started(simulation: Simulation, count: int) -> Simulation:
    """Start this many members at once."""
    for number in range(count):
        simulation.start(f"host-{number}")
    return simulation


def assert_balanced(simulation: Simulation) -> None:
    """Assert that no member has more works than its share plus a tenth, rounded to whole works."""
    share = len(simulation.works) / len(simulation.processes)
    bound = max(share * (1 + TOLERANCE), -(-len(simulation.works) // len(simulation.processes)))
    assert max(simulation.loads().values()) <= bound


class Faults:
    """Injects random faults into a simulation, and checks the invariants after every step."""

    def __init__(self, simulation: Simulation, names: list[str]) -> None:
        self.simulation = simulation
        self.names = names
        # The last token of each work, and its holder.
        self.tokens: dict[str, tuple[int, str]] = {}
        self.unheld_since = dict.fromkeys(simulation.works, 0.0)
        self.faults = 0
        self.is_over = False
        simulation.at(20.0, self._strike)

    def check(self) -> None:
        """Assert that no work has two holders, and that tokens increase."""
        now, holders = self.simulation.time.now, self.simulation.holders()
        for work in self.simulation.works:
            held = holders.get(work, [])
            assert len(held) <= 1, f"{work} has {held} at {now}"
            if not held:
                waited = now - self.unheld_since[work]
                assert waited < UNHELD_SECONDS_MAX, f"nobody has done {work} for {waited} s at {now}"
                continue
            self.unheld_since[work] = now
            name, token = held[0]
            known, known_name = self.tokens.get(work, (0, name))
            assert token > known or (token, name) == (known, known_name), f"{work}: {held} after {known}"
            self.tokens[work] = token, name

    def _strike(self) -> None:
        """Cause a fault of a member, if enough other members run undisturbed."""
        simulation, dice = self.simulation, self.simulation.random
        if self.is_over:
            return
        simulation.at(dice.uniform(5.0, 60.0), self._strike)
        name = dice.choice(self.names)
        process = simulation.processes.get(name)
        well = [
            other
            for other in simulation.processes.values()
            if other.store.reachable and not other.is_paused and other is not process
        ]
        if process is None or len(well) < 2:
            return
        self.faults += 1
        # The fault delays the work that the member held or was about to receive.
        self.unheld_since = dict.fromkeys(self.unheld_since, simulation.time.now)
        seconds = dice.choice([1.0, 4.0, 9.0, 15.0, 40.0])
        fault = dice.choice(["kill", "pause", "cut", "jump"])
        if fault == "kill":
            simulation.kill(name)
            simulation.at(seconds, lambda: simulation.start(name))
        elif fault == "pause":
            simulation.pause(name, seconds)
        elif fault == "cut":
            simulation.cut(name, seconds)
        else:
            process.jump_us = dice.choice([-1, 1]) * dice.randrange(3600 * 1_000_000)


@pytest.mark.parametrize("seed", range(8 if IS_LONG else 1))
def test_work_has_one_holder_through_faults_and_is_never_left(time: SimulatedTime, seed: int) -> None:
    simulation = Simulation(
        sweep_random(seed), time, works(12, copies=2), zones=("a", "b"), lost_answers=0.002
    )
    names = [f"host-{number}" for number in range(5)]
    started(simulation, 5)
    faults = Faults(simulation, names)
    while simulation.steps < STEPS:
        simulation.run(10.0, faults.check)
    assert faults.faults > STEPS // 200
    faults.is_over = True
    simulation.run(SETTLING_SECONDS, faults.check)
    assert simulation.loads().keys() == set(names)
    assert simulation.are_all_held()
    assert_balanced(simulation)


def test_quiet_fleet_asks_the_store_less_than_once_per_member_and_second(time: SimulatedTime) -> None:
    rates = {}
    for members in (4, 16):
        simulation = started(Simulation(sweep_random(members), time, works(members * 5)), members)
        simulation.run(60.0)
        assert simulation.are_all_held()
        before = simulation.space.operations.total()
        simulation.run(60.0)
        rates[members] = (simulation.space.operations.total() - before) / 60.0 / members
    assert max(rates.values()) < 1.0
    assert rates[16] < 1.2 * rates[4], "the traffic of a member does not grow with the fleet"


@contextmanager
def measuring_placement() -> Iterator[list[float]]:
    """Yield the CPU seconds of each of the leader's turns inside the block."""
    seconds: list[float] = []
    lead = FleetLeadership.lead

    def measured(leadership: FleetLeadership) -> float:
        begun = process_time()
        try:
            return lead(leadership)
        finally:
            seconds.append(process_time() - begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FleetLeadership, "lead", measured)
        yield seconds


def place_and_replace(
    time: SimulatedTime, members: int, instances: int, jobs: int, deaths: int
) -> tuple[float, float]:
    """Place instances and jobs, let members die; return the CPU seconds of both placements."""
    dice = sweep_random(members)
    daemons = started(Simulation(dice, time, works(instances)), members)
    workers = Simulation(dice, time, {f"job-{n}": Work(f"job-{n}") for n in range(jobs)}, JOB_WORKERS)
    started(workers, members)
    store = next(iter(workers.processes.values())).store
    for name in workers.works:
        apply_job(store, JobSpec(name, "run", (), "name: x"))
    placed, replaced = 0.0, 0.0
    for simulation in (daemons, workers):
        with measuring_placement() as seconds:
            simulation.run(30.0)
        placed += max(seconds)
        assert simulation.are_all_held()
        assert_balanced(simulation)
        before = {work: held[0] for work, held in simulation.holders().items()}
        dead = dice.sample(sorted(simulation.processes), deaths)
        for name in dead:
            simulation.kill(name)
        with measuring_placement() as seconds:
            simulation.run(60.0)
        replaced += max(seconds)
        assert simulation.are_all_held()
        assert_balanced(simulation)
        after = {work: held[0] for work, held in simulation.holders().items()}
        assert {work for work in before if after[work] != before[work]} == {
            work for work, (name, _) in before.items() if name in dead
        }
    return placed, replaced


def test_deaths_move_the_work_of_the_dead_only_and_leave_the_rest_balanced(time: SimulatedTime) -> None:
    place_and_replace(time, members=8, instances=40, jobs=16, deaths=2)


@pytest.mark.deep(
    guard="tests/unit/test_fleet_simulation.py::"
    "test_deaths_move_the_work_of_the_dead_only_and_leave_the_rest_balanced"
)
def test_three_hundred_members_place_seven_thousand_works_in_two_seconds(time: SimulatedTime) -> None:
    placed, replaced = place_and_replace(time, members=300, instances=5000, jobs=2000, deaths=30)
    assert placed < 2.0
    assert replaced < 1.0
