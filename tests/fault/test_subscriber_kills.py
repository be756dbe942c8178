# SPDX-License-Identifier: Apache-2.0
"""Kill and disconnect subscribers, daemons and the coordination store under load: no change is lost.

A table holds counters. Each transaction increments the counters of some keys, so each key's changes are the
steps 1, 2, 3, ... Every process of the subscription records its rows before it acks them. The invariants:

- Under one token of a shard, each key's steps increase by one, and commit versions never decrease.
- The first step under a token is at most one after the last step under earlier tokens, so no change is
  missing.
- Under a token, only those rows are repeated whose checkpoint was still pending when the last owner ended.
- According to the clock, once rows have been delivered under a token, none are delivered under a smaller
  token of the same shard: there are never two owners.
- In the end each key's last step equals the counter in the table.
"""

import itertools
import os
import random
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import pymysql
import pytest

from tests.support.daemon.process import ROOT, DaemonProcess
from tests.support.programs.record import CHECKPOINT_SECONDS, SESSION_SECONDS, STARTED
from tests.support.suite.fixture_types import MissingPart, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tests.support.suite.sweep_seed import sweep_random
from tools.servers import PartMissing, Server
from tools.servers.proxy import Proxy
from tools.zookeeper import ZooKeeper

LONG = bool(os.environ.get("PENSTOCK_LONG"))
SECONDS = float(os.environ.get("PENSTOCK_KILL_SECONDS") or (240 if LONG else 7))

SUBSCRIBERS = 3
SHARDS = 6
KEYS = 60
# How many transactions each of the two writers must commit at least. If a writer stopped earlier, the faults
# would happen without load.
TRANSACTIONS_MIN = 50

# The longest delay of a checkpoint on a busy machine. Pauses of the machine beyond one second are excluded.
WRITING_SECONDS_MAX = 4.0
STANDSTILL_SECONDS = 0.5


class Counting:
    """Increments counters with random keys in small transactions, from two sessions, until the block ends."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ending = threading.Event()
        server.sql("CREATE DATABASE d")
        server.sql("CREATE TABLE d.counters (k INT PRIMARY KEY, step INT NOT NULL)")
        server.sql(f"INSERT INTO d.counters VALUES {', '.join(f'({key}, 0)' for key in range(KEYS))}")
        self.transactions = [0, 0]
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(2)]

    def __enter__(self) -> "Counting":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS_MAX)
            assert not thread.is_alive(), "it counts on"

    def counters(self) -> dict[int, int]:
        """Return each key's counter."""
        return {int(key): int(step) for key, step in self._server.sql("SELECT k, step FROM d.counters")}

    def _run(self, number: int) -> None:
        dice = sweep_random(number)
        with self._server.connect() as connection, connection.cursor() as cursor:
            while not self._ending.is_set():
                keys = sorted(dice.sample(range(KEYS), dice.choice((1, 1, 2, 10))))
                wanted = ", ".join(map(str, keys))
                try:
                    cursor.execute(f"UPDATE d.counters SET step = step + 1 WHERE k IN ({wanted})")
                except pymysql.err.OperationalError:
                    # A deadlock between the two connections rolled this transaction back.
                    continue
                self.transactions[number] += 1
                # Leave processor time for the other processes of the test.
                time.sleep(0.004)


class RecordingProcess:
    """A process that consumes the subscription. Its connection to the store can be cut, and the process can
    be killed.
    """

    def __init__(self, folder: Path, number: int, url: str, zookeeper: ZooKeeper) -> None:
        self.record = folder / f"record-{number}"
        self.output = folder / f"output-{number}"
        self.proxy = Proxy(zookeeper.port)
        self._words = [url, f"zookeeper://127.0.0.1:{self.proxy.port}/penstock", "d.counters", str(SHARDS)]
        self._process: subprocess.Popen[bytes] | None = None
        self._begins = 0

    def start(self) -> None:
        """Start it."""
        with self.output.open("ab") as output:
            self._begins = output.tell()
            program = [sys.executable, "-m", "tests.support.programs.record", str(self.record), *self._words]
            self._process = subprocess.Popen(
                program, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """Kill the process as a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """Shut the process down cleanly as soon as it can handle the signal, and return its exit status."""
        assert self._process is not None
        wait_until(lambda: STARTED.encode() in self.output.read_bytes()[self._begins :])
        self._process.terminate()
        return self._process.wait(WAIT_SECONDS_MAX)


@dataclass(frozen=True, order=True)
class Delivered:
    """One row as a process received it."""

    at: int
    shard: int
    token: int
    version: int
    key: int
    step: int


def deliveries(folder: Path) -> list[Delivered]:
    """Return every delivered row, ordered by time, with the rows of a batch in batch order.

    An incomplete line is skipped: it is still being written, or its process was killed.
    """
    delivered = []
    for record in sorted(folder.glob("record-*")):
        lines = (line.removesuffix(" .") for line in record.read_text().splitlines() if line.endswith(" ."))
        delivered += [Delivered(*map(int, line.split())) for line in lines]
    return sorted(delivered, key=lambda delivery: delivery.at)


# --- What is held ---------------------------------------------------------------------------


@dataclass
class Trouble:
    """The times at which some process could not reach the store, in nanoseconds of the monotonic clock.

    As a context manager, it also records pauses of the machine inside the block.
    """

    spans: list[tuple[int, int]] = field(default_factory=list)
    _ending: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _watch(self) -> None:
        last = time.monotonic_ns()
        while not self._ending.wait(STANDSTILL_SECONDS / 10):
            now = time.monotonic_ns()
            if now - last > STANDSTILL_SECONDS * 1e9:
                self.spans.append((last, now))
            last = now

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the duration of the block, and of the short time after it in which sessions recover."""
        started = time.monotonic_ns()
        try:
            yield
        finally:
            self.spans.append((started, time.monotonic_ns() + round(2 * SESSION_SECONDS * 1e9)))

    def reaches(self, begin: int, end: int) -> bool:
        """Return whether an interval overlaps any recorded fault."""
        return any(begin <= until and end >= since for since, until in self.spans)


def assert_one_owner_at_a_time(delivered: list[Delivered]) -> None:
    """Assert that after a larger token has delivered rows of a shard, no smaller token delivers any."""
    largest: dict[int, Delivered] = {}
    for shard in delivered:
        last = largest.get(shard.shard)
        assert last is None or shard.token >= last.token, f"{shard} after {last}"
        largest[shard.shard] = shard


def assert_ordered(delivered: list[Delivered], counters: dict[int, int]) -> None:
    """Assert that each token delivers each key's steps one by one, starting where earlier tokens ended."""
    of_token: dict[tuple[int, int], list[Delivered]] = defaultdict(list)
    shard_of: dict[int, int] = {}
    for segment in delivered:
        of_token[segment.shard, segment.token].append(segment)
        assert shard_of.setdefault(segment.key, segment.shard) == segment.shard, (
            f"{segment} was in another shard before"
        )
    reached: dict[int, int] = defaultdict(int)
    for owned in (of_token[shard_and_token] for shard_and_token in sorted(of_token)):
        steps: dict[int, int] = {}
        version = 0
        for segment in owned:
            assert segment.version >= version, f"{segment} comes after commit version {version}"
            version = segment.version
            if segment.key in steps:
                assert segment.step == steps[segment.key] + 1, (
                    f"{segment} comes after step {steps[segment.key]}"
                )
            else:
                assert segment.step <= reached[segment.key] + 1, (
                    f"{segment} begins behind step {reached[segment.key]}"
                )
            steps[segment.key] = segment.step
        for key, step in steps.items():
            reached[key] = max(reached[key], step)
    assert dict(reached) == {key: step for key, step in counters.items() if step}


def assert_only_the_tail_repeats(delivered: list[Delivered], trouble: Trouble) -> int:
    """Assert that tokens repeat only rows delivered just before an owner's end; return their number."""
    last_of: dict[tuple[int, int], int] = {}
    for shard in delivered:
        last_of[shard.shard, shard.token] = shard.at
    last_by_step: dict[tuple[int, int], Delivered] = {}
    repeats = 0
    allowed = round((CHECKPOINT_SECONDS + WRITING_SECONDS_MAX) * 1e9)
    for shard in sorted(
        delivered, key=lambda this_shard: (this_shard.shard, this_shard.token, this_shard.at)
    ):
        before = last_by_step.get((shard.key, shard.step))
        if before is not None:
            assert before.token < shard.token, f"{shard} was given under its own token already"
            repeats += 1
            end = last_of[before.shard, before.token]
            assert end - before.at <= allowed or trouble.reaches(before.at, end), f"{shard} repeats {before}"
        last_by_step[shard.key, shard.step] = shard
    return repeats


# --- The test -------------------------------------------------------------------------------


@pytest.mark.deep(
    guard="tests/integration/test_membership.py::test_joining_leaving_and_dying_members_never_share_a_shard"
)
@pytest.mark.timing
@pytest.mark.timeout(900)
def test_any_killed_member_loses_nothing_keeps_order_and_no_shard_has_two_owners(
    start_server: StartServer, missing_part: MissingPart, tmp_path: Path
) -> None:
    server = start_server("mariadb")
    dice = sweep_random(20)
    trouble = Trouble()
    settings = {"instances": {"shop": {"source": server.url(), "start": "earliest"}}}
    with ExitStack() as stack:
        stack.enter_context(trouble)
        zookeeper = ZooKeeper()
        try:
            stack.enter_context(zookeeper)
        except PartMissing as error:
            missing_part("ZooKeeper", str(error))
        daemons = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            daemons.append(stack.enter_context(DaemonProcess(tmp_path / name, settings)))
        ways = [stack.enter_context(Proxy(daemon.port)) for daemon in daemons]
        url = f"penstock://{','.join(f'127.0.0.1:{way.port}' for way in ways)}/shop"
        processes = [RecordingProcess(tmp_path, number, url, zookeeper) for number in range(SUBSCRIBERS)]
        for process in processes:
            stack.enter_context(process.proxy)
        counting = stack.enter_context(Counting(server))
        for process in processes:
            process.start()
            stack.callback(process.kill)
        wait_for(lambda: len({delivery.shard for delivery in deliveries(tmp_path)}) == SHARDS, tmp_path)
        troubles = _troubles(dice, trouble, processes, daemons, ways, zookeeper)
        deadline = time.monotonic() + SECONDS
        count = 0
        while time.monotonic() < deadline or count < len(troubles):
            # Every kind of fault happens before any kind is repeated.
            if count % len(troubles) == 0:
                dice.shuffle(troubles)
            troubles[count % len(troubles)]()
            count += 1
            time.sleep(dice.uniform(0.1, 1.2))
        counting.__exit__()
        assert min(counting.transactions) >= TRANSACTIONS_MIN, f"too little load: {counting.transactions}"
        counters = counting.counters()
        wait_for(lambda: _reached(deliveries(tmp_path)) == counters, tmp_path)
        assert [process.terminate() for process in processes] == [0] * SUBSCRIBERS
    delivered = deliveries(tmp_path)
    assert_one_owner_at_a_time(delivered)
    assert_ordered(delivered, counters)
    repeats = assert_only_the_tail_repeats(delivered, trouble)
    tokens = {(shard.shard, shard.token) for shard in delivered}
    print(f"{count} troubles, {len(delivered)} rows, {repeats} of them again, {len(tokens)} owners")
    assert len(tokens) > SHARDS, "no shard ever moved"


def _troubles(
    dice: random.Random,
    trouble: Trouble,
    processes: list[RecordingProcess],
    daemons: list[DaemonProcess],
    ways: list[Proxy],
    zookeeper: ZooKeeper,
) -> list[Callable[[], None]]:
    """Return the faults as functions. Calling one causes the fault for a while, and then repairs it."""

    # The long outage ends the session, and other members take over; the short outage does not.
    outages = itertools.cycle((2.5, 0.3))

    def subscriber_dies() -> None:
        process = dice.choice(processes)
        process.kill()
        time.sleep(dice.uniform(0, 1.5 * SESSION_SECONDS))
        process.start()

    def daemon_dies() -> None:
        daemon = dice.choice(daemons)
        daemon.kill()
        time.sleep(dice.uniform(0, 0.5))
        daemon.start()

    def daemon_is_cut_off() -> None:
        dice.choice(ways).cut(dice.choice(("reset", "close")))

    def store_dies() -> None:
        with trouble.noted():
            zookeeper.kill()
            time.sleep(dice.uniform(0, SESSION_SECONDS))
            zookeeper.start()

    def subscriber_is_cut_off_from_the_store() -> None:
        proxy = dice.choice(processes).proxy
        with trouble.noted():
            proxy.refuse()
            proxy.cut(dice.choice(("reset", "silence")))
            time.sleep(next(outages) * SESSION_SECONDS)
            proxy.refuse(False)
            proxy.resume()

    return [
        subscriber_dies,
        daemon_dies,
        daemon_is_cut_off,
        store_dies,
        subscriber_is_cut_off_from_the_store,
    ]


def _reached(delivered: list[Delivered]) -> dict[int, int]:
    reached = dict.fromkeys(range(KEYS), 0)
    for delivery in delivered:
        reached[delivery.key] = max(reached[delivery.key], delivery.step)
    return reached


def wait_for(condition: Callable[[], bool], folder: Path) -> None:
    """Wait for a condition, and raise with the output of the processes if it does not hold in time."""

    def holds() -> bool:
        # Reading every row costs processor time of the shared machine.
        time.sleep(0.1)
        return condition()

    try:
        wait_until(holds)
    except AssertionError as problem:
        said = "\n".join(output.read_text()[-2000:] for output in sorted(folder.glob("output-*")))
        problem.add_note(f"{len(deliveries(folder))} rows came\n{said}")
        raise
