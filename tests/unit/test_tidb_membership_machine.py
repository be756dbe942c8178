# SPDX-License-Identifier: Apache-2.0
"""Pumps that come, pause, go and lose their registry entries, and a drainer that is killed: nothing is lost.

The merge, the members and their files are real, on a disk in memory. Tests put binlogs into the merge in
place of a reader.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import TransactionLate
from penstock.tidb.known_pumps import KnownPumps
from penstock.tidb.membership import PumpMembers
from penstock.tidb.merge import PulledTransaction
from penstock.tidb.pulling import MergeQueue, PumpReader
from penstock.tidb.registry import NodeState, Registry
from tests.support.logstore.disk import SimulatedDisk
from tests.support.tidb.registered_pumps import MemoryEtcd, StandInReader

FOLDER = Path("/log")
PUMPS_MAX = 4


@dataclass
class _Pump:
    """A Pump: the binlogs that it will send, in order. An entry without a start is a fake binlog."""

    sends: list[tuple[int, int | None]] = field(default_factory=list)
    serves: bool = True
    state: NodeState = NodeState.ONLINE

    @property
    def last_ts(self) -> int:
        return self.sends[-1][0] if self.sends else 0


class MembershipMachine(RuleBasedStateMachine):
    """Runs drainers one after another on the same log, with at most a few Pumps at a time."""

    records_pumps = True
    waits_until_durable = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = self.number = self.stored_ts = self.durable_ts = self.saved_ts = 0
        self.etcd, self.disk = MemoryEtcd(), SimulatedDisk()
        self.pumps: dict[str, _Pump] = {}
        self.truth: list[tuple[int, int]] = []
        self.log: list[tuple[int, int]] = []
        self.start_drainer(0)
        self.join()
        self.join()

    def start_drainer(self, position: int) -> None:
        self.queue = MergeQueue(position, 1 << 20)
        known = (KnownPumps if self.records_pumps else _Forgetful)(self.disk, FOLDER)
        self.readers: dict[str, StandInReader] = {}
        self.members = PumpMembers(
            Registry(self.etcd),
            self.queue,
            known,
            self._open_reader,
            (lambda: self.durable_ts) if self.waits_until_durable else (lambda: 1 << 62),
        )
        self.members.refresh()

    def _open_reader(self, pump: str, address: str) -> PumpReader:
        self.readers[pump] = StandInReader(address)
        return cast(PumpReader, self.readers[pump])

    def _pump(self, choice: int) -> tuple[str, _Pump]:
        return sorted(self.pumps.items())[choice % len(self.pumps)]

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    def _register(self, name: str) -> None:
        pump = self.pumps[name]
        self.etcd.put(name, pump.state, pump.last_ts if pump.state is NodeState.OFFLINE else 0)

    # --- The Pumps --------------------------------------------------------------------------

    @rule(choice=st.integers(0, 5))
    def write(self, choice: int) -> None:
        _, pump = self._pump(choice)
        if pump.state is NodeState.ONLINE:
            _, start, commit = self._tick(), self._tick(), self._tick()
            self.truth.append((commit, start))
            pump.sends.append((commit, start))

    @rule(choice=st.integers(0, 5))
    def send_fake(self, choice: int) -> None:
        _, pump = self._pump(choice)
        if pump.state is NodeState.ONLINE:
            pump.sends.append((self._tick(), None))

    @precondition(lambda self: len(self.pumps) < PUMPS_MAX)
    @rule()
    def join(self) -> None:
        self.number += 1
        name = f"pump {self.number}"
        self.pumps[name] = _Pump()
        self._register(name)
        # The Pump accepts its first transaction only after the members were refreshed.
        self.members.refresh()

    @rule(choice=st.integers(0, 5))
    def pause_or_resume(self, choice: int) -> None:
        _, pump = self._pump(choice)
        pump.serves = not pump.serves

    @rule(choice=st.integers(0, 5), loss=st.sampled_from(["damaged", "deleted", "correct"]))
    def change_entry(self, choice: int, loss: str) -> None:
        name, _ = self._pump(choice)
        if loss == "damaged":
            self.etcd.damage(name)
        elif loss == "deleted":
            self.etcd.delete(name)
        else:
            self._register(name)

    @rule(choice=st.integers(0, 5))
    def take_offline(self, choice: int) -> None:
        name, pump = self._pump(choice)
        if sum(each.state is NodeState.ONLINE for each in self.pumps.values()) > 1:
            pump.state = NodeState.OFFLINE
            self._register(name)

    @rule()
    def remove_pumps_that_left(self) -> None:
        for name, pump in list(self.pumps.items()):
            has_left = pump.state is NodeState.OFFLINE and self.queue.reached(name) is None
            if has_left and len(self.pumps) > 1:
                # A damaged entry would hold back the other Pumps until somebody corrects it.
                self._register(name)
                # The Pump's binlogs cannot be read again.
                del self.pumps[name]

    @rule(choice=st.integers(0, 5))
    def retire(self, choice: int) -> None:
        self.take_offline(choice)
        self.pull(choice, 10_000)
        self.members.refresh()
        self.remove_pumps_that_left()

    # --- The drainer ------------------------------------------------------------------------

    @rule()
    def refresh(self) -> None:
        self.members.refresh()

    @rule(choice=st.integers(0, 5), count=st.integers(1, 4))
    def pull(self, choice: int, count: int) -> None:
        name, pump = self._pump(choice)
        reached, reader = self.queue.reached(name), self.readers.get(name)
        if not pump.serves or reached is None or reader is None or reader.silence is None:
            return
        for commit, start in [entry for entry in pump.sends if entry[0] > reached][:count]:
            if start is None:
                self.queue.advance(name, commit)
            else:
                self.queue.offer(name, PulledTransaction(commit, start, b"rows"))

    @rule(bytes_max=st.sampled_from([1, 8, 1 << 20]))
    def append_to_log(self, bytes_max: int) -> None:
        taken, self.stored_ts = self.queue.take(bytes_max, 0.0)
        self.log += [(each.commit_ts, each.start_ts) for transactions in taken for each in transactions]

    @rule(saves=st.booleans())
    def make_durable(self, *, saves: bool) -> None:
        self.append_to_log(1 << 20)
        self.durable_ts = self.stored_ts
        if saves:
            self.saved_ts = self.durable_ts

    @rule()
    def crash(self) -> None:
        self.log = [entry for entry in self.log if entry[0] <= self.durable_ts]
        position = max([self.saved_ts, *(commit for commit, _ in self.log)])
        self.durable_ts = position
        self.start_drainer(position)

    @invariant()
    def log_is_the_beginning_of_the_truth(self) -> None:
        end = self.log[-1][0] if self.log else 0
        assert self.log == sorted(entry for entry in self.truth if entry[0] <= end)

    def teardown(self) -> None:
        for name, pump in self.pumps.items():
            pump.serves = True
            if pump.state is NodeState.ONLINE:
                pump.sends.append((self._tick(), None))
            self._register(name)
        for _ in range(3):
            # An offline Pump leaves, and then no longer holds back the other Pumps.
            self.members.refresh()
            for choice in range(len(self.pumps)):
                self.pull(choice, 10_000)
            self.make_durable(saves=True)
        assert self.log == sorted(self.truth)


class _Forgetful(KnownPumps):
    """Known Pumps that are never written to files."""

    def put(self, pump: str, after: int | None) -> None:
        pass

    def take_discarded(self) -> Any:
        return ()


_SETTINGS = settings(max_examples=25, stateful_step_count=30, deadline=None)
# A control ends at its first failure, which need not be shrunk.
_CONTROL_SETTINGS = settings(_SETTINGS, max_examples=1000, phases=[Phase.generate], derandomize=True)


def test_log_is_every_transaction_in_commit_order_whatever_happens_to_the_registry() -> None:
    run_state_machine_as_test(MembershipMachine, settings=_SETTINGS)


# This seed leads to a failure within a few examples.
@seed(17)
class _WithoutRecords(MembershipMachine):
    records_pumps = False


class _WithoutWaiting(MembershipMachine):
    waits_until_durable = False


@pytest.mark.parametrize("control", [_WithoutRecords, _WithoutWaiting])
def test_control_without_records_or_before_a_pump_is_durable_fails(control: type[MembershipMachine]) -> None:
    with pytest.raises((AssertionError, TransactionLate)):
        run_state_machine_as_test(control, settings=_CONTROL_SETTINGS)
