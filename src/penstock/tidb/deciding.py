# SPDX-License-Identifier: Apache-2.0
"""The thread of a Pump that looks for the outcomes of its open prewrites, and stores them."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from penstock.errors import BinlogInconsistent, PenstockError
from penstock.tidb.decisions import Decisions
from penstock.tidb.group_commit import unexpected_reported
from penstock.tidb.pump_store import PumpStore
from penstock.tidb.resolver import Decision, Resolver

_RESOLVE_SECONDS = 1.0

# Runs a function with the store, in the storing thread, and returns its result.
StoreCall = Callable[[Callable[[PumpStore], Any]], Any]


class Deciding:
    """Looks up the outcomes of undecided transactions once per second, until it is stopped."""

    def __init__(
        self,
        name: str,
        resolver: Resolver,
        decisions: Decisions,
        store_call: StoreCall,
        note: Callable[[Exception], None],
    ) -> None:
        """`note` is called with each failure, after which the next pass tries again."""
        self.resolver = resolver
        # Pending decisions of an operator, and the decisions refused since the start, by start timestamp.
        self.decision_states: Mapping[int, str] = {}
        self._refused: dict[int, str] = {}
        self._decisions = decisions
        self._store_call = store_call
        self._note = note
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"pump-resolve-{name}", daemon=True)

    def start(self) -> None:
        """Start looking up outcomes."""
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End the thread; waits up to `seconds` for an answer of TiKV."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(seconds)

    def _run(self) -> None:
        while not self._stopping.wait(_RESOLVE_SECONDS):
            try:
                with unexpected_reported("decide transactions"):
                    open_prewrites = self._store_call(lambda store: store.matching.open_prewrites())
                    self._carry_out(self.resolver.resolve(open_prewrites, self._waiting_decisions()))
            except PenstockError as problem:
                self._note(problem)

    def _waiting_decisions(self) -> list[Decision]:
        """Return an operator's decisions, without those whose transactions already have an outcome."""
        waiting = [
            Decision(start_ts, commit_ts, by_operator=True)
            for start_ts, commit_ts in self._decisions.waiting()
        ]
        self.decision_states = self._refused | {each.start_ts: "waits for its prewrite" for each in waiting}
        if not waiting:
            return []
        outcomes = self._store_call(lambda store: [store.matching.outcome(each.start_ts) for each in waiting])
        for decision, outcome in zip(waiting, outcomes, strict=True):
            if outcome is not None:
                other = f"committed at {outcome}" if outcome else "was rolled back"
                self._close(
                    decision, None if outcome == decision.commit_ts else f"the transaction {other} before"
                )
        return [each for each, outcome in zip(waiting, outcomes, strict=True) if outcome is None]

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        if not decisions:
            return

        def write(store: PumpStore) -> Iterable[PenstockError | None]:
            writes = [
                store.decision(each.start_ts, each.commit_ts, by_operator=each.by_operator)
                for each in decisions
            ]
            store.write(writes)
            return [each.problem for each in writes]

        for decision, problem in zip(decisions, self._store_call(write), strict=True):
            # A stored prewrite's decision is recorded as carried out once its outcome is known, so record
            # only refusals here.
            if decision.by_operator and isinstance(problem, BinlogInconsistent):
                self._close(decision, problem.message)

    def _close(self, decision: Decision, refusal: str | None) -> None:
        if refusal is not None:
            self._refused[decision.start_ts] = f"refused: {refusal}"
        self._decisions.close(decision.start_ts, decision.commit_ts, refusal)
