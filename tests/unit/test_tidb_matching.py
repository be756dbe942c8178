# SPDX-License-Identifier: Apache-2.0
"""Matching prewrites with their outcomes: commit order, nothing lost, nothing early, in any interleaving."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import BinlogInconsistent
from penstock.tidb import matching as matching_module
from penstock.tidb.matching import Matching, Reason, Released, Verdict
from penstock.tidb.messages import BinlogHead, BinlogKind

START_TS = 1000


def prewrite(start_ts: int, content: str = "") -> tuple[BinlogHead, bytes]:
    digest = blake2b(f"{start_ts}{content}".encode(), digest_size=8).digest()
    return BinlogHead(BinlogKind.PREWRITE, start_ts, 0), digest


def commit(start_ts: int, commit_ts: int) -> tuple[BinlogHead, bytes]:
    return BinlogHead(BinlogKind.COMMIT, start_ts, commit_ts), b""


def rollback(start_ts: int) -> tuple[BinlogHead, bytes]:
    return BinlogHead(BinlogKind.ROLLBACK, start_ts, 0), b""


def matching_of(*binlogs: tuple[BinlogHead, bytes], released_ts: int = 0) -> Matching[int]:
    matching: Matching[int] = Matching(released_ts)
    for location, (head, digest) in enumerate(binlogs):
        assert matching.check(head, digest) is Verdict.STORE
        matching.add(head, digest, location)
    return matching


def test_transaction_waits_for_an_older_open_prewrite() -> None:
    matching = matching_of(prewrite(1), prewrite(3), commit(3, 5))
    assert matching.release() == []
    matching.add(*commit(1, 7), 3)
    assert matching.release() == [Released(5, 3, 1, 0), Released(7, 1, 0, None)]


def test_transaction_does_not_wait_for_a_prewrite_that_started_after_its_commit() -> None:
    matching = matching_of(prewrite(1), commit(1, 5), prewrite(6))
    assert matching.release() == [Released(5, 1, 0, 2)]


def test_rolled_back_transaction_vanishes_and_holds_nothing_back() -> None:
    matching = matching_of(prewrite(1), prewrite(3), commit(3, 5), rollback(1))
    assert matching.release() == [Released(5, 3, 1, None)]
    assert matching.replay_start() is None


def test_fake_waits_for_the_prewrites_that_were_open() -> None:
    matching = matching_of(prewrite(1))
    matching.add_fake(5)
    assert matching.release() == []
    matching.add(*commit(1, 3), 1)
    assert matching.release() == [Released(3, 1, 0, None), Released(5, 5, None, None)]


def test_fake_does_not_release_a_prewrite_of_the_same_number() -> None:
    matching = matching_of(prewrite(5))
    matching.add_fake(5)
    matching.add(*commit(5, 6), 1)
    assert matching.release() == [Released(5, 5, None, 0), Released(6, 5, 0, None)]


@pytest.mark.parametrize(
    ("binlog", "verdict"),
    [
        (prewrite(1), Verdict.REPEATED),
        (prewrite(3), Verdict.REPEATED),
        (commit(1, 5), Verdict.REPEATED),
        (rollback(9), Verdict.EMPTY),
        (rollback(7), Verdict.REPEATED),
        (prewrite(0), Verdict.EMPTY),
    ],
)
def test_repeated_and_empty_binlogs_are_not_stored(
    binlog: tuple[BinlogHead, bytes], verdict: Verdict
) -> None:
    matching = matching_of(prewrite(1), commit(1, 5), prewrite(3), prewrite(7), rollback(7))
    assert matching.check(*binlog) is verdict


@pytest.mark.parametrize(
    ("binlog", "reason"),
    [
        (prewrite(1, "other"), Reason.TWO_PREWRITES),
        (prewrite(3, "other"), Reason.TWO_PREWRITES),
        (prewrite(-3), Reason.BACKWARDS),
        (commit(9, 11), Reason.NO_PREWRITE),
        (commit(1, 6), Reason.TWO_OUTCOMES),
        (rollback(1), Reason.TWO_OUTCOMES),
        (commit(7, 8), Reason.TWO_OUTCOMES),
        (commit(4, 4), Reason.BACKWARDS),
        (commit(3, 2), Reason.BACKWARDS),
        ((BinlogHead(BinlogKind.PRE_DDL, 3, 0), b""), Reason.UNKNOWN_KIND),
    ],
)
def test_contradictions_are_refused_by_name(binlog: tuple[BinlogHead, bytes], reason: Reason) -> None:
    matching = matching_of(prewrite(1), commit(1, 2), prewrite(3), prewrite(4), prewrite(7), rollback(7))
    assert [entry.commit_ts for entry in matching.release()] == [2]
    with pytest.raises(BinlogInconsistent) as raised:
        matching.check(*binlog)
    assert raised.value.reason == reason


def test_commit_that_another_pump_released_is_counted_and_not_released() -> None:
    matching = matching_of(prewrite(1), released_ts=9)
    with pytest.raises(BinlogInconsistent, match="after 9 was released"):
        matching.check(*commit(1, 5))
    # TiKV's record is authoritative, so it closes the prewrite.
    matching.add(*commit(1, 5), 1)
    assert (matching.release(), matching.late, matching.open_count) == ([], 1, 0)


# --- Any interleaving -----------------------------------------------------------------------


def test_transaction_that_waits_for_its_release_is_not_accepted_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(matching_module, "PUMP_OUTCOMES_MAX", 1)
    matching = matching_of(prewrite(1), prewrite(3), prewrite(5), commit(3, 7), commit(5, 9))
    assert matching.check(*prewrite(3)) is Verdict.REPEATED
    for binlog in (prewrite(3), commit(3, 7), commit(1, 11)):
        matching.add(*binlog, 99)
    assert [each.start_ts for each in matching.release()] == [3, 5, 1]
    matching.add(*prewrite(13), 100)
    matching.add(*rollback(13), 101)
    assert len(matching._outcomes) == 1, "what was released is forgotten"


class Unruled(Matching[int]):
    """The control in the experiment: a broken variant that releases a transaction as soon as it has an
    outcome.
    """

    def oldest_open(self) -> None:
        return None


@dataclass
class Simulation:
    """TiDB servers that write to one Pump. The Pump may crash, and commits may get lost.

    For each transaction, a server draws the start timestamp and later writes the prewrite. After the
    acknowledgement, it draws the commit timestamp, and sends the outcome at any later time or never. TiKV
    knows the outcome as soon as the commit timestamp is drawn.
    """

    kind: type[Matching[int]]
    timestamp: int = START_TS
    begun: list[int] = field(default_factory=list)
    prewritten: list[int] = field(default_factory=list)
    outcomes: dict[int, int] = field(default_factory=dict)
    unsent: list[int] = field(default_factory=list)
    log: list[tuple[BinlogHead, bytes]] = field(default_factory=list)
    index: list[tuple[Released[int], int]] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.matching = self.kind(0, self._was_released)

    def step(self, choice: random.Random) -> None:
        """Perform a random step that is possible now."""
        steps: list[Callable[[random.Random], None]] = [self._begin, self._fake, self._crash]
        steps += [self._prewrite] * 3 if self.begun else []
        steps += [self._decide] * 3 if self.prewritten else []
        steps += [self._send] * 3 if self.unsent else []
        steps += [self._resolve] if self.matching.open_count else []
        choice.choice(steps)(choice)
        self._release()

    def finish(self) -> None:
        """Let every transaction end, and let the resolver decide the open transactions."""
        for start_ts in self.prewritten:
            self.outcomes[start_ts] = self._draw()
        self.prewritten.clear()
        self._resolve(random.Random(0))
        self._release()

    def _draw(self) -> int:
        self.timestamp += 1
        return self.timestamp

    def _begin(self, choice: random.Random) -> None:
        self.begun.append(self._draw())

    def _prewrite(self, choice: random.Random) -> None:
        start_ts = self.begun.pop(choice.randrange(len(self.begun)))
        self._store(*prewrite(start_ts))
        if choice.random() < 0.2:
            # The acknowledgement was lost, so the server repeats it.
            head, digest = prewrite(start_ts)
            assert self.matching.check(head, digest) is Verdict.REPEATED
        self.prewritten.append(start_ts)

    def _decide(self, choice: random.Random) -> None:
        start_ts = self.prewritten.pop(choice.randrange(len(self.prewritten)))
        self.outcomes[start_ts] = 0 if choice.random() < 0.3 else self._draw()
        if choice.random() < 0.7:
            self.unsent.append(start_ts)

    def _send(self, choice: random.Random) -> None:
        start_ts = self.unsent.pop(choice.randrange(len(self.unsent)))
        commit_ts = self.outcomes[start_ts]
        self._store(*(commit(start_ts, commit_ts) if commit_ts else rollback(start_ts)))

    def _resolve(self, choice: random.Random) -> None:
        """Query TiKV for the open prewrites, as the resolver does."""
        for open_prewrite in self.matching.open_prewrites():
            commit_ts = self.outcomes.get(open_prewrite.start_ts)
            if commit_ts is not None:
                start_ts = open_prewrite.start_ts
                self._store(*(commit(start_ts, commit_ts) if commit_ts else rollback(start_ts)))

    def _fake(self, choice: random.Random) -> None:
        self.matching.add_fake(self._draw())

    def _crash(self, choice: random.Random) -> None:
        """Lose the memory and the newest entries of the index, and replay the log."""
        if self.index:
            del self.index[len(self.index) - choice.randrange(min(4, len(self.index))) :]
        released, replay_start = self.index[-1] if self.index else (Released(0, 0, None, None), 0)
        self.matching = self.kind(released.commit_ts, self._was_released)
        for location in range(replay_start, len(self.log)):
            self.matching.add(*self.log[location], location)

    def _was_released(self, commit_ts: int, start_ts: int) -> bool:
        return any((entry.commit_ts, entry.start_ts) == (commit_ts, start_ts) for entry, _ in self.index)

    def _store(self, head: BinlogHead, digest: bytes) -> None:
        if self.matching.check(head, digest) is Verdict.STORE:
            self.log.append((head, digest))
            self.matching.add(head, digest, len(self.log) - 1)

    def _release(self) -> None:
        """Record the releases: a consumer sees each in order, and skips those that it saw before a crash."""
        released = self.matching.release()
        for entry in released:
            start = len(self.log) if entry.replay_start is None else entry.replay_start
            self.index.append((entry, start))
            if (entry.commit_ts, entry.start_ts) not in self.seen:
                assert not self.seen or entry.commit_ts > self.seen[-1][0], "released too early"
                self.seen.append((entry.commit_ts, entry.start_ts))

    def check(self) -> None:
        """Assert that every committed transaction was released, with its own prewrite, in commit order."""
        committed = sorted(
            (commit_ts, start_ts) for start_ts, commit_ts in self.outcomes.items() if commit_ts
        )
        transactions = [entry for entry, _ in self.index if entry.location is not None]
        assert [(entry.commit_ts, entry.start_ts) for entry in transactions] == committed
        located = [None if entry.location is None else self.log[entry.location][0] for entry in transactions]
        assert located == [BinlogHead(BinlogKind.PREWRITE, start_ts, 0) for _, start_ts in committed]
        assert [
            (commit_ts, start_ts) for commit_ts, start_ts in self.seen if commit_ts != start_ts
        ] == committed
        assert self.matching.late == 0


def simulate(kind: type[Matching[int]], seed: int, steps: int) -> None:
    simulation = Simulation(kind)
    choice = random.Random(seed)
    for _ in range(steps):
        simulation.step(choice)
    simulation.finish()
    simulation.check()


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 150))
def test_any_interleaving_is_released_in_commit_order_without_a_loss(seed: int, steps: int) -> None:
    simulate(Matching, seed, steps)


def test_without_the_release_rule_transactions_are_released_too_early() -> None:
    with pytest.raises((AssertionError, BinlogInconsistent)):
        simulate(Unruled, seed=3, steps=150)
