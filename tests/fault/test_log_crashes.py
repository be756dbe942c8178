# SPDX-License-Identifier: Apache-2.0
"""Power fails at every disk step of the log; unsynced bytes are kept, lost or garbled."""

import os

import pytest

from penstock.logstore.log import Log
from penstock.logstore.retention import Retention, RetentionPolicy
from penstock.model import Position
from tests.support.logstore.disk import Loss, PowerLost, SimulatedDisk
from tests.support.logstore.source import TIME_S, Captured, check_log, open_log
from tests.support.suite.nonempty import each
from tests.support.suite.sweep_seed import sweep_seed

LONG = bool(os.environ.get("PENSTOCK_LONG"))
# The everyday stride is a prime, so that the sample includes every kind of step.
STRIDE = 1 if LONG else 17
SEED_FIRST = sweep_seed(0)
SEEDS = range(SEED_FIRST, SEED_FIRST + (4 if LONG else 1))


class Scenario:
    """The lifetime of a log: segments of all kinds, syncs, a lost connection, retention, and a clean
    shutdown.
    """

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._time_s = TIME_S
        self.captured: Captured | None = None
        self.acknowledged: Position | None = None

    def run(self) -> None:
        """Run the scenario in an empty folder."""
        log = open_log(self._disk, self.clock)
        self.captured = Captured(log, each=self._each)
        self.captured.run()
        log.close()
        self.acknowledged = log.visible

    def clock(self) -> float:
        return self._time_s

    def _each(self, captured: Captured, number: int) -> None:
        if number % 3 == 0:
            captured.sync()
            self.acknowledged = captured.synced
        if number % 11 == 0:
            self._time_s += 3600
        if number == 20:
            policy = RetentionPolicy(age_seconds=None, bytes_max=9000)
            Retention(self._disk, captured.log.layout, policy).run(captured.log)


def steps() -> int:
    """Return the number of steps of the scenario."""
    disk = SimulatedDisk()
    Scenario(disk).run()
    return len(disk.steps)


def crash(stop_at: int, disk: SimulatedDisk) -> Position | None:
    """Run the scenario up to a step; return the position reported as durable."""
    disk.stop_at = stop_at
    scenario = Scenario(disk)
    with pytest.raises(PowerLost):
        scenario.run()
    return scenario.acknowledged


def reopened(disk: SimulatedDisk) -> Log:
    return open_log(disk)


@pytest.mark.parametrize("loss", Loss)
def test_power_failure_at_any_step_leaves_the_log_whole_up_to_its_last_sync(loss: Loss) -> None:
    last = steps()
    assert last > 300
    for seed in SEEDS:
        for stop_at in range(seed % STRIDE, last, STRIDE):
            disk = SimulatedDisk()
            acknowledged = crash(stop_at, disk)
            recovered = disk.after_power_failure(loss, seed * last + stop_at)
            check_recovered(recovered, acknowledged, f"{loss} {seed} {stop_at} {disk.steps[-1]}")


def test_kill_followed_by_power_failure_loses_nothing_durable() -> None:
    for stop_at in each(range(0, steps(), STRIDE)):
        disk = SimulatedDisk()
        acknowledged = crash(stop_at, disk)
        log = open_log(disk.after_kill())
        promised = log.durable
        assert acknowledged is None or (promised is not None and promised >= acknowledged), stop_at
        check_log(log)
        check_recovered(disk.after_power_failure(Loss.DROP, stop_at), promised, f"killed {stop_at}")


def check_recovered(disk: SimulatedDisk, acknowledged: Position | None, what: str) -> None:
    log = reopened(disk)
    visible = log.visible
    if acknowledged is not None:
        assert visible is not None, what
        assert visible >= acknowledged, what
    check_log(log)
    captured = Captured(log)
    captured.run()
    check_log(log, whole=True)
    log.close()
    again = open_log(disk)
    check_log(again, whole=True)
    again.close()
