# SPDX-License-Identifier: Apache-2.0
"""Separate processes that use a coordination store, for contention and kills.

python -m tests.support.coordinate.process increment URL PATH COUNT
python -m tests.support.coordinate.process hold URL PATH HOLDER SECONDS
python -m tests.support.coordinate.process member URL INSTANCE SUBSCRIPTION NAME FILE SECONDS
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import structlog

from penstock.coordinate.checkpoint import Checkpoint
from penstock.coordinate.held_shard import HeldShard
from penstock.coordinate.lease import Lease
from penstock.coordinate.membership import Member
from penstock.coordinate.store import ABSENT, CoordinationStore, open_store
from penstock.coordinate.subscription_record import Subscriptions
from penstock.errors import CoordinationLost, LeaseLost, VersionConflict
from tests.support.suite.patience import WAIT_SECONDS_MAX

ROOT = Path(__file__).resolve().parents[3]


def start(*words: object) -> subprocess.Popen[str]:
    """Start a process with a verb and its arguments; its standard output is readable."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.coordinate.process", *map(str, words)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def increment(store: CoordinationStore, path: str, count: int) -> None:
    """Increment a number this many times, each time only if its version is still the version read."""
    done = 0
    while done < count:
        record = store.get(path)
        value = 0 if record is None else int(record.value)
        try:
            store.put(path, str(value + 1).encode(), ABSENT if record is None else record.version)
        except VersionConflict:
            continue
        done += 1


def hold(store: CoordinationStore, path: str, holder: str, seconds: float) -> None:
    """Hold a lease, print its token, and keep the lease until the process is killed.

    After a SIGSTOP and a SIGCONT, the process prints whether it still believes that it holds the lease. If it
    does not, it acquires the lease again under a new session.
    """
    held: Lease | None = None

    def goes_on(number: int, frame: FrameType | None) -> None:
        nonlocal held
        believes = held is not None and held.held
        print(believes, flush=True)
        if not believes:
            held = None

    signal.signal(signal.SIGCONT, goes_on)
    while True:
        if held is None:
            lease = _acquire(store, path, holder, seconds)
            held = lease
            print(lease.token, flush=True)
        # A signal may arrive in another thread. This thread handles it when it wakes.
        time.sleep(0.01)


def _acquire(store: CoordinationStore, path: str, holder: str, seconds: float) -> Lease:
    """Acquire a lease once it is free, retrying with a new session if a short session expires first."""
    while True:
        try:
            session = store.session(seconds)
            while session.alive:
                lease = Lease.acquire(store, session, path, holder)
                if lease is not None:
                    return lease
                time.sleep(0.01)
        except CoordinationLost:
            continue


def member(
    store: CoordinationStore, instance: str, subscription: str, name: str, file: str, seconds: float
) -> None:
    """Consume shards as a member, and append a line `shard token number` per delivery to a shared file.

    The checkpoint of a shard is the number of the last delivery before the checkpoint. SIGTERM makes the
    member leave the subscription regularly.
    """
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    signal.signal(signal.SIGTERM, stop)
    actual = Subscriptions(store).get(instance, subscription)
    assert actual is not None
    output = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    consumers: dict[int, threading.Thread] = {}

    def consume(held: HeldShard) -> None:
        number = 4 if held.checkpoint is None else int(held.checkpoint.position.rpartition(":")[2])
        while held.leaving is None:
            time.sleep(0.01)
            if not held.held:
                continue
            # A short line appended with one write is not torn.
            os.write(output, f"{held.shard} {held.token} {number}\n".encode())
            number += 16
            try:
                held.note(Checkpoint.now(f"mysql-bin.000001:{number}", server_key="one"))
            except LeaseLost:
                return

    def gained(held: HeldShard) -> None:
        consumers[held.token] = threading.Thread(target=consume, args=(held,), daemon=True)
        consumers[held.token].start()

    def lost(held: HeldShard, why: str) -> None:
        consumers.pop(held.token).join()

    with Member(
        store,
        actual,
        name,
        gained,
        lost,
        session_seconds=seconds,
        checkpoint_seconds=0.1,
        grace_seconds=WAIT_SECONDS_MAX,
    ) as joined:
        print("joined", flush=True)
        while not stopped.wait(0.05):
            joined.wait(0)


def main(words: list[str]) -> None:
    """Run one verb. Only the test reads its output."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    verb, url, *rest = words
    store = open_store(url, WAIT_SECONDS_MAX)
    if verb == "increment":
        increment(store, rest[0], int(rest[1]))
    elif verb == "hold":
        hold(store, rest[0], rest[1], float(rest[2]))
    else:
        member(store, rest[0], rest[1], rest[2], rest[3], float(rest[4]))
    store.close()


if __name__ == "__main__":
    main(sys.argv[1:])
