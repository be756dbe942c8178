# SPDX-License-Identifier: Apache-2.0
"""The merge of Pumps: commit order, nothing lost, nothing early, for any behaviour of the Pumps."""

from dataclasses import dataclass, field

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from penstock.errors import TransactionLate
from penstock.tidb.merge import Merge, PulledTransaction


def _transaction(commit_ts: int, start_ts: int = 0, size: int = 10) -> PulledTransaction:
    return PulledTransaction(commit_ts, start_ts or commit_ts - 1, bytes(size))


def _take_all(merge: Merge) -> list[int]:
    taken = []
    while transactions := merge.take():
        taken.append(transactions[0].commit_ts)
    return taken


# --- One example ----------------------------------------------------------------------------


def _merge_of_two_pumps_up_to_seven() -> tuple[Merge, list[int]]:
    merge = Merge(0)
    merge.join("first")
    merge.join("second")
    for commit_ts in (1, 3, 5, 7):
        merge.offer("first", _transaction(commit_ts))
    for commit_ts in (2, 4, 6):
        merge.offer("second", _transaction(commit_ts))
    merge.advance("second", 7)
    return merge, _take_all(merge)


def test_pump_that_announces_itself_joins_without_loss() -> None:
    merge, taken = _merge_of_two_pumps_up_to_seven()
    assert merge.join("third") == 7
    merge.offer("first", _transaction(9))
    merge.offer("second", _transaction(10))
    assert _take_all(merge) == [], "the third Pump may still send 8"
    for commit_ts in (8, 12):
        merge.offer("third", _transaction(commit_ts))
    merge.advance("first", 12)
    merge.advance("second", 12)
    assert taken + _take_all(merge) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]


def test_pump_that_does_not_announce_itself_is_reported_as_late() -> None:
    merge, taken = _merge_of_two_pumps_up_to_seven()
    listed_at = merge.position
    merge.offer("first", _transaction(9))
    merge.offer("second", _transaction(10))
    # The control: without the announcement, the merge cannot know that 8 will arrive.
    assert taken + _take_all(merge) == [1, 2, 3, 4, 5, 6, 7, 9]
    merge.join("third", listed_at)
    with pytest.raises(TransactionLate, match="third"):
        merge.offer("third", _transaction(8))


def test_transactions_of_one_commit_timestamp_are_taken_together() -> None:
    merge = Merge(0)
    merge.join("first")
    merge.join("second")
    merge.offer("first", _transaction(5, 3))
    merge.offer("second", _transaction(5, 2))
    assert [transaction.start_ts for transaction in merge.take()] == [2, 3]


def test_second_transaction_of_one_commit_timestamp_from_one_pump_is_refused() -> None:
    merge = Merge(0)
    merge.join("first")
    merge.offer("first", _transaction(5, 3))
    with pytest.raises(TransactionLate):
        merge.offer("first", _transaction(5, 2))


def test_buffer_is_bounded_while_a_pump_is_away() -> None:
    merge, bytes_max = Merge(0), 1000
    merge.join("present")
    merge.join("away")
    sent = 0
    while merge.has_room("present", bytes_max):
        sent += 1
        merge.offer("present", _transaction(2 * sent, size=100))
    assert merge.buffered_bytes == bytes_max
    assert merge.holding_back() == ["away"]
    assert merge.has_room("away", bytes_max), "reading it is the only way on"
    merge.offer("away", _transaction(3, size=100))
    assert not merge.has_room("away", bytes_max), "the first transaction has to be taken before"
    assert _take_all(merge) == [2, 3]


# --- All examples ---------------------------------------------------------------------------


@dataclass
class _Pump:
    """A Pump: the binlogs that it will send, in order. An entry without a start is a fake binlog."""

    sends: list[tuple[int, int | None]] = field(default_factory=list)
    serves: bool = True
    closing: bool = False


class MergeMachine(RuleBasedStateMachine):
    """Pumps that write, pause, join and leave, and a drainer that loses connections and crashes."""

    merge_type: type[Merge] = Merge
    announces = True

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0
        self.number = 0
        self.pumps: dict[str, _Pump] = {}
        self.truth: list[tuple[int, int]] = []
        self.log: list[tuple[int, int]] = []
        self.merge = self.merge_type(0)
        self.join()
        self.join()
        self.discover()

    def _pump(self, choice: int) -> tuple[str, _Pump]:
        return sorted(self.pumps.items())[choice % len(self.pumps)]

    def _tick(self) -> int:
        self.clock += 1
        return self.clock

    @rule(choice=st.integers(0, 5), copies=st.sampled_from(["one", "copied", "same timestamp"]))
    def write(self, choice: int, copies: str) -> None:
        name, pump = self._pump(choice)
        if pump.closing:
            return
        _, start, commit = self._tick(), self._tick(), self._tick()
        self.truth.append((commit, start))
        pump.sends.append((commit, start))
        other_name, other = self._pump(choice + 1)
        if other_name == name or other.closing:
            return
        if copies == "copied":
            other.sends.append((commit, start))
        elif copies == "same timestamp":
            other.sends.append((commit, start - 1))
            self.truth.append((commit, start - 1))

    @rule(choice=st.integers(0, 5))
    def send_fake(self, choice: int) -> None:
        self._pump(choice)[1].sends.append((self._tick(), None))

    @rule(choice=st.integers(0, 5), count=st.integers(1, 4))
    def pull(self, choice: int, count: int) -> None:
        name, pump = self._pump(choice)
        if not pump.serves or name not in self.merge.members:
            return
        # A stream starts after the last binlog of the merge, as after a lost connection.
        reached = self.merge.reached(name)
        for commit, start in [entry for entry in pump.sends if entry[0] > reached][:count]:
            if start is None:
                self.merge.advance(name, commit)
            else:
                self.merge.offer(name, _transaction(commit, start))

    @rule()
    def catch_up(self) -> None:
        for choice in range(len(self.pumps)):
            self.send_fake(choice)
            self.pull(choice, 10_000)
        self.append_to_log(10_000)

    @rule(count=st.integers(1, 5))
    def append_to_log(self, count: int) -> None:
        for _ in range(count):
            self.log += [(transaction.commit_ts, transaction.start_ts) for transaction in self.merge.take()]

    @precondition(lambda self: len(self.pumps) < 5)
    @rule()
    def join(self) -> None:
        self.number += 1
        self.pumps[f"pump {self.number}"] = _Pump()
        if self.announces:
            self.merge.join(f"pump {self.number}")

    @rule()
    def discover(self) -> None:
        for name in self.pumps:
            self.merge.join(name)

    @rule(choice=st.integers(0, 5))
    def pause_or_resume(self, choice: int) -> None:
        pump = self._pump(choice)[1]
        pump.serves = not pump.serves

    @precondition(lambda self: len(self.pumps) > 1)
    @rule(choice=st.integers(0, 5))
    def close(self, choice: int) -> None:
        pump = self._pump(choice)[1]
        pump.closing = True
        pump.sends.append((self._tick(), None))

    @precondition(lambda self: len(self.pumps) > 1)
    @rule()
    def leave(self) -> None:
        for name, pump in list(self.pumps.items()):
            if pump.closing and len(self.pumps) > 1 and self.merge.position >= pump.sends[-1][0]:
                del self.pumps[name]
                self.merge.leave(name)

    @rule(lost=st.integers(0, 3))
    def crash(self, lost: int) -> None:
        timestamps = sorted({commit for commit, _ in self.log})
        kept = timestamps[: max(len(timestamps) - lost, 0)]
        position = kept[-1] if kept else 0
        # Pumps that left had waited until the log was durable.
        durable = max((commit for commit, _ in self.log if not self._is_pullable(commit)), default=0)
        position = max(position, durable)
        self.log = [entry for entry in self.log if entry[0] <= position]
        self.merge = self.merge_type(position)
        for name in self.pumps:
            self.merge.join(name)

    def _is_pullable(self, commit_ts: int) -> bool:
        wanted = {entry for entry in self.truth if entry[0] == commit_ts}
        return wanted <= {entry for pump in self.pumps.values() for entry in pump.sends}

    @invariant()
    def log_is_the_beginning_of_the_truth(self) -> None:
        end = self.log[-1][0] if self.log else 0
        assert self.log == sorted(entry for entry in self.truth if entry[0] <= end)

    def teardown(self) -> None:
        now = self._tick()
        for name, pump in self.pumps.items():
            self.merge.join(name)
            pump.serves = True
            pump.sends.append((now, None))
        for choice in range(len(self.pumps)):
            self.pull(choice, 10_000)
        self.append_to_log(10_000)
        assert self.log == sorted(self.truth)
        assert self.merge.position == now


_SETTINGS = settings(max_examples=40, stateful_step_count=30)
# A control ends at its first failure, which need not be shrunk.
_CONTROL_SETTINGS = settings(_SETTINGS, max_examples=1000, phases=[Phase.generate])


def test_log_is_every_transaction_in_commit_order() -> None:
    run_state_machine_as_test(MergeMachine, settings=_SETTINGS)


class _EagerMerge(Merge):
    """A merge without the rule: it releases everything that any member has sent."""

    @property
    def frontier(self) -> int:
        return max((entry[0] for entry in self._queue), default=self._position)


class _EagerMachine(MergeMachine):
    merge_type = _EagerMerge


class _UnannouncedMachine(MergeMachine):
    announces = False


@pytest.mark.parametrize("control", [_EagerMachine, _UnannouncedMachine])
def test_control_without_the_rule_or_without_announcements_fails(control: type[MergeMachine]) -> None:
    with pytest.raises((AssertionError, TransactionLate)):
        run_state_machine_as_test(control, settings=_CONTROL_SETTINGS)
