# SPDX-License-Identifier: Apache-2.0
"""The guard of a process ends the process's sessions once the process, and all processes that work for it,
have ended.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock.coordinate.lease import Holder, Lease
from penstock.coordinate.session_guard import SessionGuard
from penstock.coordinate.store import end_session, open_store
from tests.support.coordinate.backends import SESSION_SECONDS
from tests.support.suite.patience import wait_until

LEASE = "/shop/lease"

# Holds the lease. Prints the process ids of its guard and of a process that inherits the guard's pipe.
HOLDER = f"""
import subprocess, sys, time
from penstock.coordinate.lease import Lease
from penstock.coordinate.session_guard import SessionGuard
from penstock.coordinate.store import open_store
guard = SessionGuard()
guard.start()
store = open_store(sys.argv[1])
session = store.session({SESSION_SECONDS})
assert Lease.acquire(store, session, {LEASE!r}, "holder")
guard.note("test", sys.argv[1], session)
working = subprocess.Popen(["sleep", "600"], pass_fds=guard.descriptors())
print(guard.pid, working.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture(params=["sqlite", "zookeeper"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/coordination.db"
    return f"zookeeper://{request.getfixturevalue('zookeeper').hosts}/{tmp_path.name}"


@contextmanager
def holding(url: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Run a holder; yield it, and the ids of its guard and of the process that works for it."""
    words = [sys.executable, "-c", HOLDER, url]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            guard, working = map(int, holder.stdout.readline().split())
            yield holder, guard, working
        finally:
            holder.kill()


def ignored_signals(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("SigIgn:")), 16)


def test_guard_ends_the_session_of_a_killed_process_once_nothing_works_under_it(url: str) -> None:
    with holding(url) as (holder, guard, working), closing(open_store(url)) as store:
        held = Holder.of(store.get(LEASE))
        assert held is not None
        # A service manager signals all processes of a service that ends.
        wait_until(lambda: ignored_signals(guard) & 1 << signal.SIGTERM - 1)
        os.kill(guard, signal.SIGTERM)
        holder.kill()
        holder.wait()
        session = store.session(SESSION_SECONDS)
        assert Lease.acquire(store, session, LEASE, "other") is None
        os.kill(working, signal.SIGKILL)
        taken: list[Lease] = []

        def is_taken() -> bool:
            taken.extend(filter(None, [Lease.acquire(store, session, LEASE, "other")]))
            return bool(taken)

        assert wait_until(is_taken) < SESSION_SECONDS / 2
        assert taken[0].token > held.token
        wait_until(lambda: not Path(f"/proc/{guard}").exists())


def test_guard_that_is_stopped_leaves_the_session_to_its_process(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/coordination.db"
    guard = SessionGuard()
    with closing(open_store(url)) as store:
        session = store.session(SESSION_SECONDS)
        created = session.put_ephemeral(LEASE, b"")
        guard.start()
        guard.note("test", url, session)
        guard.stop()
        record = store.get(LEASE)
        assert record is not None
        assert record.created == created


def test_end_of_a_session_creates_no_file(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/removed/coordination.db"
    with closing(open_store(url)) as store:
        key = store.session(SESSION_SECONDS).key
    shutil.rmtree(tmp_path / "removed")
    end_session(url, key)
    assert list(tmp_path.iterdir()) == []


def test_process_goes_on_if_its_guard_dies_or_stands_still(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/coordination.db"
    with closing(open_store(url)) as store:
        session = store.session(SESSION_SECONDS)
        guard = SessionGuard()
        guard.start()
        assert guard.pid is not None
        os.kill(guard.pid, signal.SIGSTOP)
        # These are more notes than the pipe holds.
        for _ in range(2_000):
            guard.note("test", url, session)
        os.kill(guard.pid, signal.SIGKILL)
        guard.note("test", url, session)
        guard.stop()
        assert session.alive


def test_session_that_has_ended_may_be_ended_again(url: str) -> None:
    with closing(open_store(url)) as store:
        session, other = store.session(SESSION_SECONDS), store.session(SESSION_SECONDS)
        session.put_ephemeral(LEASE, b"")
        other.put_ephemeral(f"{LEASE}-other", b"")
        for _ in range(2):
            end_session(url, session.key)
            wait_until(lambda: store.get(LEASE) is None)
        assert store.get(f"{LEASE}-other") is not None
