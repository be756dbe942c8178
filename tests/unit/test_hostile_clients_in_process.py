# SPDX-License-Identifier: Apache-2.0
"""Hostile clients attack every listener while a log is written; readers still receive the log."""

import asyncio
import threading
import time

import pytest

from penstock.serve.arrivals import Arrivals
from tests.support.daemon.hostile_clients import attack
from tests.support.daemon.served_log import INSTANCE, serving
from tests.support.logstore.disk import SimulatedDisk
from tests.support.logstore.source import Captured, open_log, server_files
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until

LISTENERS = ("http", "canal", "ptubes", "ptubes_monitor")
CLIENTS = 80


class Written:
    """A capture that appends another piece each time the test allows it, while clients are connected."""

    def __init__(self, arrivals: Arrivals) -> None:
        self.arrivals = arrivals
        self.pieces = threading.Semaphore(0)

    def each(self, _: Captured, __: int) -> None:
        self.arrivals.arrived(INSTANCE)
        assert self.pieces.acquire(timeout=WAIT_SECONDS_MAX)


@pytest.mark.deep(
    guard="tests/unit/test_hostile_clients_in_process.py::test_log_is_written_and_read_during_hostile_connections",
    keep=("canal",),
)
@pytest.mark.parametrize("name", LISTENERS)
def test_log_is_written_and_read_during_hostile_connections(name: str) -> None:
    listen = dict.fromkeys(LISTENERS[1:], "127.0.0.1:0")
    last = server_files()[-1]
    with open_log(SimulatedDisk()) as log, serving(log, listen) as daemon:
        written = Written(daemon.served.arrivals)
        capturing = threading.Thread(target=Captured(log, each=written.each).run)
        capturing.start()
        attacked = threading.Event()

        def hostile() -> None:
            asyncio.run(attack(daemon.port(name), name, CLIENTS, seed=7))
            attacked.set()

        attacking = threading.Thread(target=hostile)
        attacking.start()
        seen = set()
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        # A short attack may end before the third piece is written.
        while not attacked.is_set() or len(seen) <= 2:
            assert time.monotonic() < deadline, "readers see nothing new, or the attack does not end"
            written.pieces.release()
            seen.add(daemon.ask("GET", f"/v1/instances/{INSTANCE}/head").json["position"])
        written.pieces.release(1_000_000)
        capturing.join(WAIT_SECONDS_MAX)
        head = daemon.ask("GET", f"/v1/instances/{INSTANCE}/head").json["position"]
        assert head == f"1/{last.name}:{len(last.content)}"
        attacking.join(WAIT_SECONDS_MAX)
        wait_until(lambda: daemon.in_loop(lambda: daemon.ports.connections.admission.open) == 0)
