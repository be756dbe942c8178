# SPDX-License-Identifier: Apache-2.0

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.coordinate import zookeeper_nodes
from penstock.coordinate.checkpoint import Checkpoint, Checkpoints
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import (
    ABSENT,
    CoordinationStore,
    Session,
    backend_names,
    decoded_name,
    path_of,
)
from penstock.errors import (
    CoordinationLost,
    LeaseLost,
    LimitExceeded,
    OptionInvalid,
    VersionConflict,
)
from penstock.limits import COORDINATION_RECORD_BYTES_MAX
from tests.support.coordinate import process as coordination_process
from tests.support.coordinate.backends import (
    OPERATION_SECONDS_SHORT,
    SESSION_SECONDS,
    SESSION_SECONDS_ENDED,
    SESSION_SECONDS_SHORT,
    Backend,
    MemoryBackend,
    SqliteBackend,
    ZooKeeperBackend,
    is_lost,
    until_answered,
)
from tests.support.suite.patience import PAUSE_SECONDS, WAIT_SECONDS_MAX, wait_until

# How much longer than the session timeout a handover may take on a busy machine. Pauses of the machine do not
# count: these are steps that take longer than STANDSTILL_SECONDS.
SLACK_SECONDS = 5.0
STANDSTILL_SECONDS = 0.25

LEASE = "/shop/lease"


# The memory store exists in a single process.
ALONE = "memory"


@pytest.fixture(params=backend_names())
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """Yield each backend of the package. A backend that is not available on this machine is an error."""
    makers: dict[str, Callable[[], Backend]] = {
        ALONE: MemoryBackend,
        "sqlite": lambda: SqliteBackend(tmp_path),
        "zookeeper": lambda: ZooKeeperBackend(request.getfixturevalue("zookeeper")),
    }
    with makers[request.param]() as opened:
        yield opened


# The backends that several processes can share.
between_processes = pytest.mark.parametrize(
    "backend", [name for name in backend_names() if name != ALONE], indirect=True
)


@pytest.fixture
def store(backend: Backend) -> CoordinationStore:
    return backend.open()


@pytest.fixture
def other(backend: Backend) -> CoordinationStore:
    """A second store over the records of `store`, as another process would open it."""
    return backend.open()


# --- Records ----------------------------------------------------------------------------------


def test_record_is_returned_as_written(store: CoordinationStore, other: CoordinationStore) -> None:
    for value in (b"", b"one", bytes(range(256)), b"\n" * 40, b"0123456789abcdef" * 3):
        store.put("/shop/orders", value)
        for reader in (store, other):
            record = reader.get("/shop/orders")
            assert record is not None
            assert record.value == value
            assert not record.of_session
    assert store.get("/shop") is None
    assert store.get("/shop/orders/below") is None


def test_record_is_replaced_only_at_the_version_that_was_read(
    store: CoordinationStore, other: CoordinationStore
) -> None:
    first = store.put("/shop/orders", b"1", ABSENT)
    with pytest.raises(VersionConflict):
        other.put("/shop/orders", b"other", ABSENT)
    second = other.put("/shop/orders", b"2", first)
    assert second > first
    with pytest.raises(VersionConflict):
        store.put("/shop/orders", b"3", first)
    with pytest.raises(VersionConflict):
        store.put("/shop/nothing", b"3", 0)
    third = store.put("/shop/orders", b"3")
    record = other.get("/shop/orders")
    assert record is not None
    assert (record.value, record.version) == (b"3", third)


def test_record_is_deleted_only_at_the_version_that_was_read(store: CoordinationStore) -> None:
    first = store.put("/shop/orders", b"1")
    second = store.put("/shop/orders", b"2")
    with pytest.raises(VersionConflict):
        store.delete("/shop/orders", first)
    store.delete("/shop/orders", second)
    assert store.get("/shop/orders") is None
    store.delete("/shop/orders")
    with pytest.raises(VersionConflict):
        store.delete("/shop/orders", second)


def test_names_are_listed_one_level_deep(store: CoordinationStore, other: CoordinationStore) -> None:
    odd = ["a/b", "..", "ü ñ", "50%", "new\nline", "."]
    for name in odd:
        store.put(path_of("shop", name, "record"), name.encode())
    store.put("/shopping", b"")
    assert sorted(decoded_name(name) for name in other.list("/shop")) == sorted(odd)
    assert list(other.list("/")) == ["shop", "shopping"]
    assert list(other.list("/nothing")) == []
    for name in odd:
        record = other.get(path_of("shop", name, "record"))
        assert record is not None
        assert record.value == name.encode()
        other.delete(path_of("shop", name, "record"))
    assert list(store.list("/")) == ["shopping"]


def test_records_below_a_path_are_read_at_once(
    store: CoordinationStore, other: CoordinationStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zookeeper_nodes, "READS_MAX", 3)
    values = {
        path_of("shop", "ü ñ/50%"): b"\0" * 40,
        "/shop/orders": b"",
        "/shop/orders/1": b"above",
        **{f"/shop/orders/1/{n}": bytes([n]) for n in range(7)},
        "/shop/orders/unread": b"unread",
    }
    for path, value in {**values, "/shopping": b"", "/shop": b"itself"}.items():
        other.put(path, value)
    session = other.session(SESSION_SECONDS)
    session.put_ephemeral("/shop/customers/lease", b"mine")
    expected = {path: other.get(path) for path in (*values, "/shop/customers/lease")}
    assert store.read_below("/shop", lambda path: not path.endswith("unread")) == {
        **expected,
        "/shop/orders/unread": None,
    }
    assert store.read_below("/nothing", lambda path: True) == {}
    assert store.read_below("/", lambda path: path == "/shopping")["/shopping"] == other.get("/shopping")


def test_record_may_have_child_records(store: CoordinationStore) -> None:
    store.put("/shop/orders/record", b"below")
    store.put("/shop/orders", b"above", ABSENT)
    record = store.get("/shop/orders")
    assert record is not None
    assert record.value == b"above"
    store.delete("/shop/orders", record.version)
    assert store.get("/shop/orders") is None
    assert store.get("/shop/orders/record") is not None


def test_oversized_record_is_refused(store: CoordinationStore) -> None:
    store.put("/shop/orders", b"x" * COORDINATION_RECORD_BYTES_MAX)
    with pytest.raises(LimitExceeded):
        store.put("/shop/orders", b"x" * (COORDINATION_RECORD_BYTES_MAX + 1))


def test_concurrent_threads_and_stores_lose_no_update(
    store: CoordinationStore, other: CoordinationStore
) -> None:
    counting = [
        threading.Thread(target=coordination_process.increment, args=(counting_store, "/count", 20))
        for counting_store in (store, store, other)
    ]
    for thread in counting:
        thread.start()
    for thread in counting:
        thread.join()
    record = store.get("/count")
    assert record is not None
    assert record.value == b"60"


@between_processes
def test_concurrent_processes_lose_no_update(backend: Backend) -> None:
    counting = [coordination_process.start("increment", backend.url, "/count", 50) for _ in range(2)]
    for process in counting:
        _, errors = process.communicate(timeout=WAIT_SECONDS_MAX)
        assert process.returncode == 0, errors
    record = backend.open().get("/count")
    assert record is not None
    assert record.value == b"100"


# --- Watches ----------------------------------------------------------------------------------


def test_watch_reports_every_change_below_its_path(
    store: CoordinationStore, other: CoordinationStore
) -> None:
    notified = threading.Event()
    watch = store.watch("/shop", notified.set)
    changes: list[Callable[[], object]] = [
        lambda: other.put("/shop/orders/record", b"1"),
        lambda: other.put("/shop/orders/record", b"2"),
        lambda: store.put("/shop/orders/record", b"3"),
        lambda: other.put("/shop/orders/deep/er", b""),
        lambda: other.delete("/shop/orders/record"),
        lambda: other.put("/shop/orders/record", b"4"),
        lambda: other.put("/shop", b"5"),
        lambda: other.delete("/shop"),
    ]
    for number, change in enumerate(changes):
        # A late notification of the previous change must not be mistaken for a notification of this change.
        wait_quiet(notified)
        change()
        assert notified.wait(WAIT_SECONDS_MAX), number
    watch.close()
    wait_quiet(notified)
    # The store still notifies another watch on the same path, but not the closed watch.
    still_told = threading.Event()
    store.watch("/shop", still_told.set)
    other.put("/shop/orders/record", b"6")
    assert still_told.wait(WAIT_SECONDS_MAX)
    assert not notified.is_set()


def test_notified_watcher_reads_the_change(store: CoordinationStore, other: CoordinationStore) -> None:
    notified = threading.Event()
    store.watch("/count", notified.set)
    for number in range(30):
        other.put("/count", str(number).encode())
        while True:
            assert notified.wait(WAIT_SECONDS_MAX), number
            notified.clear()
            record = store.get("/count")
            if record is not None and record.value == str(number).encode():
                break


# --- Sessions ---------------------------------------------------------------------------------


def test_records_of_a_session_are_deleted_with_it(store: CoordinationStore, other: CoordinationStore) -> None:
    session, another = store.session(SESSION_SECONDS), other.session(SESSION_SECONDS)
    created = session.put_ephemeral(LEASE, b"mine")
    assert session.put_ephemeral(LEASE, b"again") == created
    with pytest.raises(VersionConflict):
        another.put_ephemeral(LEASE, b"theirs")
    another.remove(LEASE)
    record = other.get(LEASE)
    assert record is not None
    assert (record.value, record.created, record.of_session) == (b"mine", created, True)
    assert session.alive
    assert session.certain
    session.close()
    assert not session.alive
    assert not session.certain
    wait_until(lambda: other.get(LEASE) is None)
    assert another.put_ephemeral(LEASE, b"theirs") > created
    another.remove(LEASE)
    assert store.get(LEASE) is None
    with pytest.raises(CoordinationLost):
        session.put_ephemeral(LEASE, b"late")


def test_session_lives_as_long_as_it_sends_heartbeats(
    store: CoordinationStore, other: CoordinationStore
) -> None:
    def lives_on() -> bool:
        wait_until(lambda: other.get(LEASE) is None)
        session = store.session(SESSION_SECONDS_SHORT)
        clock = AwakeClock()
        try:
            session.put_ephemeral(LEASE, b"mine")
            while clock.seconds < 2.5 * SESSION_SECONDS_SHORT:
                time.sleep(PAUSE_SECONDS)
                other.put("/count", b"")
                clock.tick()
            lives = session.certain and other.get(LEASE) is not None
        except CoordinationLost:
            lives = False
        clock.tick()
        session.close()
        # A pause of the machine stops the heartbeats, so the test then proves nothing.
        assert lives or clock.stood_still, "the session ended"
        return lives

    wait_until(lives_on)


def test_expired_session_is_reported_and_its_records_are_deleted(
    backend: Backend, store: CoordinationStore, other: CoordinationStore
) -> None:
    session = store.session(SESSION_SECONDS_ENDED)
    lost, notified = threading.Event(), threading.Event()
    session.on_lost(lost.set)
    session.put_ephemeral(LEASE, b"mine")
    other.watch(LEASE, notified.set)
    notified.clear()
    backend.expire(store, session)
    assert lost.wait(WAIT_SECONDS_MAX)
    assert not session.alive
    wait_until(lambda: other.get(LEASE) is None)
    assert notified.wait(WAIT_SECONDS_MAX)
    late = threading.Event()
    session.on_lost(late.set)
    assert late.is_set()
    with pytest.raises(CoordinationLost):
        session.put_ephemeral(LEASE, b"late")


def test_closed_session_is_not_reported_as_lost(store: CoordinationStore) -> None:
    session = store.session(SESSION_SECONDS)
    lost = threading.Event()
    session.on_lost(lost.set)
    session.close()
    assert not lost.wait(0.3)


# --- Leases and fencing -----------------------------------------------------------------------


def test_lease_has_one_holder_and_tokens_rise(backend: Backend) -> None:
    tokens = []
    for number in range(4):
        store, other = backend.open(), backend.open()
        lease = Lease.acquire(store, store.session(SESSION_SECONDS), LEASE, f"one-{number}")
        assert lease is not None
        session = other.session(SESSION_SECONDS)
        assert Lease.acquire(other, session, LEASE, "two") is None
        assert lease.held
        tokens.append(lease.token)
        lease.release()
        assert not lease.held
        following = Lease.acquire(other, session, LEASE, "two")
        assert following is not None
        tokens.append(following.token)
        other.delete(LEASE)
        store.close()
        other.close()
    assert tokens == sorted(set(tokens))


def test_holder_of_a_lost_lease_writes_no_checkpoint(
    backend: Backend, store: CoordinationStore, other: CoordinationStore
) -> None:
    session = store.session(SESSION_SECONDS_ENDED)
    lease = Lease.acquire(store, session, LEASE, "one")
    assert lease is not None
    mine, follower_checkpoints = Checkpoints(store, "/shop"), Checkpoints(other, "/shop")
    assert mine.take(0, lease.token).checkpoint is None
    first = Checkpoint.now("mysql-bin.000001:100", "uuid:1-5", "key", 7)
    mine.write(0, lease.token, first)
    backend.expire(store, session)
    wait_until(lambda: other.get(LEASE) is None)
    following = Lease.acquire(other, other.session(SESSION_SECONDS), LEASE, "two")
    assert following is not None
    assert follower_checkpoints.take(0, following.token).checkpoint == first
    with pytest.raises(LeaseLost):
        mine.write(0, lease.token, Checkpoint.now("mysql-bin.000001:200"))
    with pytest.raises(LeaseLost):
        mine.take(0, lease.token)
    assert follower_checkpoints.read(0) == first
    # This process learns with its next heartbeat that the store has ended the session.
    wait_until(lambda: not lease.held)


def test_unresponsive_store_is_reported_lost_and_recovers(backend: Backend, other: CoordinationStore) -> None:
    store = backend.open(OPERATION_SECONDS_SHORT)
    session = until_answered(lambda: store.session(SESSION_SECONDS))
    lease = until_answered(lambda: Lease.acquire(store, session, LEASE, "one"))
    notified = threading.Event()
    until_answered(lambda: store.watch("/shop", notified.set))
    version = until_answered(lambda: store.put("/shop/orders", b"1"))
    with backend.cut_off(store):
        took = wait_until(lambda: is_lost(lambda: store.put("/shop/orders", b"2", version)))
        assert took < SESSION_SECONDS, "an operation has a time of its own"
    wait_until(lambda: not is_lost(lambda: store.get("/shop/orders")))
    wait_until(lambda: lease is not None and lease.held)
    notified.clear()
    other.put("/shop/orders", b"3")
    assert notified.wait(WAIT_SECONDS_MAX)


def test_disconnected_holder_is_uncertain_then_lost_and_fenced(backend: Backend) -> None:
    store = backend.open()
    session, lease = wait_for_lease(store, "one", SESSION_SECONDS_SHORT)
    mine = Checkpoints(store, "/shop")
    mine.take(0, lease.token)
    lost = threading.Event()
    lease.on_lost(lost.set)
    with backend.cut_off(store):
        wait_until(lambda: not lease.held)
        if isinstance(backend, MemoryBackend):
            backend.expire(store, session)
        assert lost.wait(WAIT_SECONDS_MAX)
        assert not session.alive
    other = backend.open()
    _, following = wait_for_lease(other, "two")
    assert following.token > lease.token
    Checkpoints(other, "/shop").take(0, following.token)
    wait_until(lambda: not is_lost(lambda: store.get("/shop/orders")))
    with pytest.raises(LeaseLost):
        mine.write(0, lease.token, Checkpoint.now("mysql-bin.000001:200"))


@between_processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_dead_holder_is_replaced_within_its_session_timeout(backend: Backend, number: signal.Signals) -> None:
    store = backend.open()
    session = store.session(SESSION_SECONDS)
    with holding(backend) as holder:
        token = int(said(holder))
        while (taken := Lease.acquire(store, session, LEASE, "two")) is not None:
            # The machine paused for the whole session timeout. The holder notices and acquires the lease
            # again.
            holder.send_signal(signal.SIGCONT)
            assert said(holder) == "False"
            taken.release()
            token = int(said(holder))
        holder.send_signal(number)
        clock = AwakeClock()
        following: list[Lease] = []

        def is_followed() -> bool:
            clock.tick()
            following.extend(filter(None, [Lease.acquire(store, session, LEASE, "two")]))
            return bool(following)

        wait_until(is_followed)
        assert clock.seconds < SESSION_SECONDS_SHORT + SLACK_SECONDS
        assert following[0].token > token
        if number == signal.SIGSTOP:
            # The holder notices by its own clock before any other notification.
            holder.send_signal(signal.SIGCONT)
            assert said(holder) == "False"


# --- Opening ----------------------------------------------------------------------------------


def test_store_is_refused_in_a_forked_process(store: CoordinationStore) -> None:
    store.put("/shop/orders", b"1")
    child = os.fork()
    if child == 0:
        try:
            store.get("/shop/orders")
        except OptionInvalid:
            os._exit(7)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_closed_store_refuses_calls(store: CoordinationStore) -> None:
    session = store.session(SESSION_SECONDS)
    store.close()
    store.close()
    assert not session.alive
    with pytest.raises(CoordinationLost):
        store.get("/shop/orders")


# --- Small things -----------------------------------------------------------------------------


def wait_quiet(notified: threading.Event) -> None:
    """Wait until a watch has reported every past change."""
    while notified.wait(0.2):
        notified.clear()


def wait_for_lease(
    store: CoordinationStore, holder: str, seconds: float = SESSION_SECONDS
) -> tuple[Session, Lease]:
    """Acquire a lease once it is free, retrying with a new session if a short session expires first."""
    acquired: list[tuple[Session, Lease]] = []

    def is_taken() -> bool:
        try:
            session = store.session(seconds)
            lease = Lease.acquire(store, session, LEASE, holder)
        except CoordinationLost:
            return False
        if lease is None:
            session.close()
        else:
            acquired.append((session, lease))
        return bool(acquired)

    wait_until(is_taken)
    return acquired[0]


@contextmanager
def holding(backend: Backend) -> Iterator["subprocess.Popen[str]"]:
    """Run a process that holds the lease under a short session inside the block; kill it at the end."""
    holder = coordination_process.start("hold", backend.url, LEASE, "one", SESSION_SECONDS_SHORT)
    try:
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def said(process: "subprocess.Popen[str]") -> str:
    """Return the next line printed by a process."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


class AwakeClock:
    """Measures the time between its ticks, excluding pauses of the machine."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.stood_still = False
        self._last = time.monotonic()

    def tick(self) -> None:
        """Add the time since the last tick."""
        now = time.monotonic()
        step, self._last = now - self._last, now
        self.seconds += min(step, STANDSTILL_SECONDS)
        self.stood_still = self.stood_still or step > STANDSTILL_SECONDS
