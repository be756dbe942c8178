# SPDX-License-Identifier: Apache-2.0
"""Determines the outcome of prewrites for which no outcome arrived, from TiKV's records or from an operator's
decision.

Looking up an outcome changes nothing in the cluster. If TiKV has a lock or no trace of a transaction, the
transaction stays undecided, and all later transactions wait for it. Only with `decide_after` is such a
transaction rolled back in the cluster.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from penstock.errors import LogDamaged, PenstockError, TransientError
from penstock.retry import Backoff
from penstock.tidb.cluster import Cluster, Outcome, TransactionStatus
from penstock.tidb.matching import OpenPrewrite
from penstock.tidb.release_index import Location

_log = structlog.get_logger(__name__)

# The outcome of a prewrite is looked up after this time, and then again with growing pauses.
_ASK_AFTER_SECONDS = 1.0
_ASK_AGAIN = Backoff(first=1.0, longest=30.0)
# The maximum number of lookups in one pass, oldest first.
_ASKED_MAX = 256
# A transaction that holds back later ones is reported after this time, and then again at this interval.
_REPORT_SECONDS = 60.0
_STALLED_SECONDS = 10.0


@dataclass
class _Unknown:
    """A prewrite whose outcome is unknown. Times are seconds of a monotonic clock."""

    since: float
    ask_at: float
    asked: int = 0
    reported_at: float = float("-inf")


@dataclass(frozen=True)
class Decision:
    """The outcome of a transaction. `commit_ts` is 0 if the transaction was rolled back."""

    start_ts: int
    commit_ts: int
    by_operator: bool = False


class Resolver:
    """Looks up the outcomes of open prewrites. Not thread-safe.

    `key_of` returns the key that identifies a transaction in TiKV. `hint_of` returns, for a start timestamp,
    the hint for an operator. A transaction that is still undecided after `decide_after` seconds is rolled
    back in the cluster; None means never.
    """

    def __init__(
        self,
        cluster: Cluster,
        key_of: Callable[[OpenPrewrite[Location]], bytes],
        hint_of: Callable[[int], str],
        decide_after: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._key_of = key_of
        self._hint_of = hint_of
        self._decide_after = decide_after
        self._clock = clock
        self._unknown: dict[int, _Unknown] = {}
        # Why the last lookup failed; None if it succeeded.
        self.problem: str | None = None

    def stalled_by(self) -> tuple[int, float] | None:
        """Return the oldest transaction that holds back later ones, and for how many seconds; None if there
        is none.
        """
        if not self._unknown:
            return None
        start_ts = min(self._unknown)
        seconds = self._clock() - self._unknown[start_ts].since
        return (start_ts, seconds) if seconds >= _STALLED_SECONDS else None

    def resolve(
        self, open_prewrites: Iterable[OpenPrewrite[Location]], by_operator: Iterable[Decision] = ()
    ) -> list[Decision]:
        """Return the outcomes that are known now. `open_prewrites` are all open prewrites.

        An operator's decisions about any other transactions are ignored for now.
        """
        now = self._clock()
        prewrites = {prewrite.start_ts: prewrite for prewrite in open_prewrites}
        self._unknown = {
            start_ts: self._unknown.get(start_ts) or _Unknown(now, now + _ASK_AFTER_SECONDS)
            for start_ts in prewrites
        }
        decided = [decision for decision in by_operator if decision.start_ts in prewrites]
        due = sorted(start_ts for start_ts, unknown in self._unknown.items() if unknown.ask_at <= now)
        for start_ts in due[:_ASKED_MAX]:
            try:
                status = self._ask(prewrites[start_ts], self._unknown[start_ts], now)
            except PenstockError as problem:
                self._note_problem(problem)
                self._postpone(self._unknown[start_ts], now)
                if isinstance(problem, TransientError):
                    # Stop here, because every other lookup would wait for the same timeout.
                    break
                continue
            self.problem = None
            if status.outcome is Outcome.UNDECIDED:
                self._postpone(self._unknown[start_ts], now)
                continue
            _log.info(
                "a prewrite without an outcome is decided",
                start_ts=start_ts,
                outcome=str(status.outcome),
                commit_ts=status.commit_ts,
            )
            decided.append(Decision(start_ts, status.commit_ts))
        self._report(now)
        return decided

    def _ask(self, prewrite: OpenPrewrite[Location], unknown: _Unknown, now: float) -> TransactionStatus:
        key = self._key_of(prewrite)
        if not key:
            raise LogDamaged(
                f"the prewrite {prewrite.start_ts} has no key", hint=self._hint_of(prewrite.start_ts)
            )
        status = self._cluster.transaction_status(prewrite.start_ts, key)
        is_late = self._decide_after is not None and now - unknown.since >= self._decide_after
        if status.outcome is not Outcome.UNDECIDED or not is_late:
            return status
        current_ts = self._cluster.timestamp()
        status = self._cluster.transaction_status(prewrite.start_ts, key, roll_back_at=current_ts)
        if status.outcome is Outcome.ROLLED_BACK:
            _log.warning(
                "an undecided transaction was rolled back in the cluster",
                start_ts=prewrite.start_ts,
                after_seconds=round(now - unknown.since),
                setting="tidb.pump.decide_after",
            )
        return status

    def _postpone(self, unknown: _Unknown, now: float) -> None:
        unknown.asked += 1
        unknown.ask_at = now + _ASK_AGAIN.bound(unknown.asked)

    def _note_problem(self, problem: PenstockError) -> None:
        text = str(problem)
        if text != self.problem:
            _log.warning("the outcomes of transactions cannot be asked for", why=text)
        self.problem = text

    def _report(self, now: float) -> None:
        """Report the transaction that holds back all later ones."""
        stalled = self.stalled_by()
        if stalled is None:
            return
        start_ts, seconds = stalled
        unknown = self._unknown[start_ts]
        if now - unknown.reported_at >= _REPORT_SECONDS:
            unknown.reported_at = now
            _log.error(
                "a transaction without an outcome holds back everything after it",
                start_ts=start_ts,
                seconds=round(seconds),
                waiting=len(self._unknown),
                why=self.problem or "TiKV has a lock of it, or no trace",
                hint=self._hint_of(start_ts),
            )
