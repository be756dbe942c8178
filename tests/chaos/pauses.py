# SPDX-License-Identifier: Apache-2.0
"""Measure how long a reader waits after its daemon has died: `python -m tests.chaos.pauses kill|freeze
COUNT`.

Two daemons have the log of an instance with continuous writes. The daemon that captures is killed or frozen
repeatedly. The pause is the longest time in which a subscriber receives nothing.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import structlog

from penstock.client import ChangeBatch, Subscriber
from tests.chaos.hosts import INSTANCE, Member, freeze, thaw
from tests.chaos.servers import Servers
from tests.chaos.traffic import Follower, Writer
from tests.support.suite.patience import wait_until
from tools.zookeeper import Ensemble

# The number of changes that a reader must receive before its pause counts as over.
_TRANSACTIONS_AFTER = 20


class Pauses:
    """Two daemons, a writer and a subscriber. As a context manager, it runs all processes inside the
    block.
    """

    def __init__(self, folder: Path, session: str) -> None:
        self._folder = folder
        self._session = session
        self._stack = ExitStack()
        self._arrived_at: list[float] = []

    def __enter__(self) -> "Pauses":
        enter = self._stack.enter_context
        servers, ensemble = enter(Servers()), enter(Ensemble())
        servers.primary.sql("CREATE DATABASE pauses")
        self._writer = Writer(servers, "pauses.t", "pauses")
        kind = {"processes": "single", "serve": "written", "session": self._session}
        self._members = {
            name: enter(Member(name, self._folder / name, ensemble, "pauses", servers.all[:1], kind))
            for name in "ab"
        }
        hosts = ",".join(member.address for member in self._members.values())
        subscriber = partial(
            Subscriber,
            f"penstock://{hosts}/{INSTANCE}",
            name="cache",
            tables=["pauses.t"],
            coordination=f"zookeeper://{ensemble.hosts}/pauses",
            begin="earliest",
            session_seconds=120.0,
        )
        self._wait_for_copy()
        enter(self._writer)
        self._follower = enter(_TimedFollower(subscriber, self._arrived_at))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, how: str) -> float:
        """Kill or freeze the member that captures; return the pause in seconds."""
        member = self._members[self._wait_for_copy()]
        # Without an earlier arrival, a pause has no beginning.
        self._wait_for(max(self._writer.step, 1))
        self._arrived_at[:-1] = []
        if how == "kill":
            member.daemon.kill()
        else:
            freeze(member)
        self._wait_for(self._writer.step + _TRANSACTIONS_AFTER)
        times = list(self._arrived_at)
        if how == "kill":
            member.daemon.start()
        else:
            thaw(member)
        return max(after - before for before, after in pairwise(times))

    def _wait_for(self, step: int) -> None:
        wait_until(lambda: self._follower.newest("pauses.t") >= step)

    def _wait_for_copy(self) -> str:
        """Wait until one member captures and the other has a copy in step; return the capturing member."""
        captured_by: list[str] = []

        def is_known() -> bool:
            row = self._members["a"].fleet_row()
            capturer = self._members.get(row["captured_by"])
            has_copy = [copy["state"] for copy in row["copies"]] == ["in step"]
            # A thawed member may not have noticed yet that another member has taken over.
            if has_copy and capturer is not None and capturer.daemon.status()["state"] == "running":
                captured_by.append(capturer.name)
            return bool(captured_by)

        wait_until(is_known)
        return captured_by[0]


class _TimedFollower(Follower):
    """A follower that records the times of its arrivals, in monotonic seconds."""

    def __init__(self, make_subscriber: partial[Subscriber], arrived_at: list[float]) -> None:
        super().__init__(make_subscriber)
        self._arrived_at = arrived_at

    def _keep(self, batch: ChangeBatch) -> None:
        self._arrived_at.append(time.monotonic())
        super()._keep(batch)


def main(words: Sequence[str]) -> int:
    """Measure, and print the pauses."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.pauses", description=__doc__)
    parser.add_argument("how", choices=("kill", "freeze"))
    parser.add_argument("count", type=int)
    parser.add_argument("--session", default="10s", help="fleet.session of the daemons")
    options = parser.parse_args(words)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with (
        tempfile.TemporaryDirectory(prefix="pauses-") as folder,
        Pauses(Path(folder), options.session) as pauses,
    ):
        seconds = sorted(pauses.measure(options.how) for _ in range(options.count))
    print(" ".join(f"{pause:.1f}" for pause in seconds))
    print(f"p50 {seconds[len(seconds) // 2]:.1f} s, largest {seconds[-1]:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
