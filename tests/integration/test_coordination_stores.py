# SPDX-License-Identifier: Apache-2.0

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from penstock.coordinate.backends.sqlite import SqliteSession
from penstock.coordinate.lease import Lease
from penstock.coordinate.store import ABSENT, CoordinationStore, open_store
from penstock.errors import AuthenticationFailed, CoordinationLost, DiskFailed, OptionInvalid
from tests.support.coordinate.backends import (
    OPERATION_SECONDS_SHORT,
    SESSION_SECONDS,
    SESSION_SECONDS_SHORT,
    SqliteBackend,
    ZooKeeperBackend,
    is_lost,
    until_answered,
)
from tests.support.coordinate.omitting_relay import OmittingRelay
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.zookeeper import ZooKeeper

LEASE = "/shop/lease"

# --- Opening ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "mysql://host",
        "memory://",
        "sqlite://host/path",
        "sqlite:///",
        "zookeeper:///root",
        "zookeeper://user:secret@/root",
        "zookeeper://user@host/root",
        "zookeeper://host:port/root",
        "zookeeper://host/a//b",
        "coordination.db",
    ],
)
def test_url_without_a_known_store_is_refused(url: str) -> None:
    with pytest.raises(OptionInvalid) as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


def test_foreign_file_is_refused_as_a_coordination_file(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is no database, and longer than the head of one " * 100)
    with pytest.raises(OptionInvalid):
        open_store(f"sqlite://{tmp_path}/text")
    with pytest.raises(DiskFailed):
        open_store(f"sqlite://{tmp_path}/text/below.db")
    store = open_store(f"sqlite://{tmp_path}/kept.db")
    store.put("/shop/orders", b"kept")
    store.close()
    again = open_store(f"sqlite://{tmp_path}/kept.db")
    record = again.get("/shop/orders")
    again.close()
    assert record is not None
    assert record.value == b"kept"


@pytest.mark.timing
def test_removed_file_is_detected(tmp_path: Path) -> None:
    with SqliteBackend(tmp_path) as backend:
        store = backend.open()
        session = store.session(SESSION_SECONDS_SHORT)
        store.put("/shop/orders", b"1")
        (file,) = tmp_path.glob("*.db")
        file.rename(tmp_path / "moved")
        other = backend.open()
        other.put("/shop/orders", b"2")
        with pytest.raises(DiskFailed):
            store.put("/shop/orders", b"3")
        wait_until(lambda: not session.alive)


# --- Specific to networked stores ------------------------------------------------------------------


def test_lost_response_is_neither_a_failure_nor_a_duplicate(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        store = backend.open()
        proxy = backend.proxies[-1]
        expected = 0
        for number in range(12):
            record = store.get("/count")
            assert (0 if record is None else int(record.value)) == expected
            version = ABSENT if record is None else record.version
            proxy.cut_after(1)
            store.put("/count", str(expected + 1).encode(), None if number % 4 == 3 else version)
            proxy.disarm()
            expected += 1
            if number % 4 == 2:
                proxy.cut_after(1)
                store.delete("/count", store_version(store, "/count"))
                proxy.disarm()
                expected = 0
        assert proxy.cut_count >= 12


def test_store_goes_on_after_a_response_was_left_out(zookeeper: ZooKeeper) -> None:
    with (
        OmittingRelay(zookeeper.port) as relay,
        closing(open_store(f"zookeeper://127.0.0.1:{relay.port}/left-out")) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        store.put("/shop/orders", b"1")
        relay.omits.set()
        first = pool.submit(store.get, "/shop/orders")
        assert relay.has_omitted.wait(WAIT_SECONDS_MAX)
        # The second response arrives in place of the first response.
        second = store.get("/shop/orders")
        assert first.result(WAIT_SECONDS_MAX) == second
        store.put("/shop/orders", b"2")


@pytest.mark.timing
def test_lease_with_a_lost_response_is_held(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        store = backend.open()
        session = store.session(SESSION_SECONDS)
        proxy = backend.proxies[-1]
        for number in range(4):
            proxy.cut_after(1, times=2)
            created = session.put_ephemeral(f"/shop/lease-{number}", b"mine")
            proxy.disarm()
            record = store.get(f"/shop/lease-{number}")
            assert record is not None
            assert record.created == created
            proxy.cut_after(1, times=2)
            session.remove(f"/shop/lease-{number}")
            proxy.disarm()
            assert store.get(f"/shop/lease-{number}") is None


@pytest.mark.timing
def test_silently_dead_connection_is_replaced(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        store = backend.open(OPERATION_SECONDS_SHORT)
        until_answered(lambda: store.put("/shop/orders", b"1"))
        backend.proxies[-1].cut("silence")
        wait_until(lambda: not is_lost(lambda: store.put("/shop/orders", b"2")))


@pytest.mark.timing
def test_server_that_accepts_a_connection_and_stays_silent_costs_no_session(
    zookeeper: ZooKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.coordinate.backends.zookeeper._WAIT_PART", 1 / 60)
    with ZooKeeperBackend(zookeeper) as backend:
        store = backend.open()
        lease = Lease.acquire(store, store.session(SESSION_SECONDS), LEASE, "one")
        assert lease is not None
        proxy = backend.proxies[-1]
        proxy.refuse()
        proxy.cut()
        silent = proxy.cut_count + 4
        # Each of the store's two connections retries by itself.
        proxy.cut_after(1, "silence", times=4)
        proxy.refuse(False)
        wait_until(lambda: proxy.cut_count == silent)
        wait_until(lambda: lease.held or lease.expired)
        assert lease.held


@pytest.mark.timing
def test_expired_session_blocks_no_waiter(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        store = backend.open()
        session = store.session(SESSION_SECONDS_SHORT)
        with backend.cut_off(store):
            started = time.monotonic()
            with pytest.raises(CoordinationLost):
                session.put_ephemeral(LEASE, b"mine")
            # The operation fails when the session expires. The store's own operation timeout is twice this
            # bound.
            assert time.monotonic() - started < WAIT_SECONDS_MAX / 2
            assert not session.alive


@pytest.mark.timing
def test_session_is_certain_for_no_longer_than_the_ensemble_keeps_it(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        session = backend.open().session(3600.0)
        # The ensemble shortens the session timeout to its maxSessionTimeout.
        assert session.seconds < 3600.0
        assert session.certain


def test_sessions_and_records_survive_an_outage_of_the_ensemble(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        store = backend.open()
        session = store.session(SESSION_SECONDS)
        lease = Lease.acquire(store, session, LEASE, "one")
        assert lease is not None
        store.put("/shop/orders", b"1")
        notified = threading.Event()
        store.watch("/shop/orders", notified.set)
        zookeeper.kill()
        try:
            wait_until(lambda: not lease.held)
        finally:
            zookeeper.start()
        wait_until(lambda: lease.held)
        record = store.get("/shop/orders")
        assert record is not None
        notified.clear()
        store.put("/shop/orders", b"2", record.version)
        assert notified.wait(WAIT_SECONDS_MAX)
        assert store.get(LEASE) is not None


def test_ensemble_account_protects_its_records_and_hides_its_password(zookeeper: ZooKeeper) -> None:
    with ZooKeeperBackend(zookeeper) as backend:
        url = backend.url.replace("zookeeper://", "zookeeper://penstock:s%40cret@")
        store = open_store(url, WAIT_SECONDS_MAX)
        store.put("/shop/orders", b"1")
        assert "cret" not in store.url + repr(store)
        for wrong in (backend.url, url.replace("cret", "cretly")):
            other = open_store(wrong, WAIT_SECONDS_MAX)
            with pytest.raises(AuthenticationFailed) as refused:
                other.get("/shop/orders")
            assert "cret" not in str(refused.value)
            other.close()
        store.close()


def store_version(store: CoordinationStore, path: str) -> int:
    """Return a record's version."""
    record = store.get(path)
    return ABSENT if record is None else record.version


def test_session_removed_by_another_process_is_never_certain_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(f"sqlite:///{tmp_path}/store.db", WAIT_SECONDS_MAX)
    session = store.session(1.0)
    assert isinstance(session, SqliteSession)
    certain: list[bool] = []
    end = session.end

    def end_noted(lost: bool) -> bool:
        certain.append(session.certain)
        return end(lost)

    monkeypatch.setattr(session, "end", end_noted)
    connection = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    with closing(connection):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM sessions")
        # The last heartbeat has expired, as after a pause of the process.
        session._certain_until = 0.0
        connection.execute("COMMIT")
    wait_until(lambda: not session.alive)
    assert certain == [False]
    store.close()
