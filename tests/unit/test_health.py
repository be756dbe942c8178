# SPDX-License-Identifier: Apache-2.0
import asyncio
import os
import socket
import threading
from pathlib import Path

from structlog.testing import capture_logs

from penstock.coordinate.store import open_store, path_of
from penstock.errors import CoordinationLost, LogDamaged, PenstockError, ServerBusy
from penstock.logstore.log import Log
from penstock.serve.arrivals import Arrivals
from penstock.serve.coordination import CoordinationProbe
from penstock.serve.health import Health
from penstock.serve.served import Served
from penstock.serve.systemd import notify_until_cancelled, watchdog_seconds
from penstock.serve.threads import run_in
from penstock.telemetry.readings import Readings
from tests.support.daemon.served_log import LogInstance, captured_log, serving
from tests.support.suite.patience import WAIT_SECONDS_MAX


class OpeningInstance(LogInstance):
    """An instance whose log cannot be queried yet, or can never be queried."""

    def __init__(self, log: Log, problem: PenstockError | None, state: str = "opening") -> None:
        super().__init__(log)
        self.problem = problem
        self.state = state

    def status(self) -> dict[str, object]:
        return {**super().status(), "state": self.state}

    def log(self) -> Log:
        if self.problem is not None:
            raise self.problem
        return super().log()


def health_of(*instances: OpeningInstance, coordination: CoordinationProbe | None = None) -> Health:
    served = Served({str(number): instance for number, instance in enumerate(instances)}, Arrivals())
    return Health(served, {"http", "canal"}, coordination)


def failed_checks(health: Health) -> set[str]:
    return {name for name, passed in asyncio.run(health.checks()).items() if not passed}


def test_daemon_is_ready_once_its_logs_are_open_and_its_listeners_accept() -> None:
    with captured_log() as log:
        instance = OpeningInstance(log, ServerBusy("the log is being opened"))
        health = health_of(instance)
        assert failed_checks(health) == {"log", "listeners"}
        assert not health.is_started()
        instance.problem = None
        assert not health.is_started()
        health.listening |= {"http", "canal"}
        assert failed_checks(health) == set()
        assert health.is_started()
        # A log that is reopened after a failed sync makes the daemon unready, but the daemon still counts as
        # started.
        instance.problem = ServerBusy("the log is being opened")
        assert failed_checks(health) == {"log"}
        assert health.is_started()


def test_stopped_instance_leaves_the_daemon_ready_for_the_others() -> None:
    with captured_log() as log:
        stopped = OpeningInstance(log, LogDamaged("a segment is damaged"), "stopped")
        health = health_of(stopped, OpeningInstance(log, None, "waiting"))
        health.listening |= {"http", "canal"}
        assert failed_checks(health) == set()
        assert health.is_started()
        alone = health_of(stopped)
        alone.listening |= {"http", "canal"}
        assert failed_checks(alone) == {"log"}


def test_lost_coordination_makes_the_daemon_unready() -> None:
    def lost() -> object:
        raise CoordinationLost("the store does not answer")

    with captured_log() as log:
        probe = CoordinationProbe("sqlite:///nowhere", lost, [])  # type: ignore[arg-type]
        health = health_of(OpeningInstance(log, None), coordination=probe)
        health.listening |= {"http", "canal"}
        assert failed_checks(health) == {"coordination"}
        assert health.is_started()


def test_unreadable_subscription_leaves_the_daemon_ready(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'coordination.db'}"
    store = open_store(url)
    store.put(path_of("subscriptions", "shop", "cache") + "/record", b"no record")
    probe = CoordinationProbe(url, lambda: store, ["shop"])
    with capture_logs() as logged:
        assert probe.failure() is None
    assert [line["event"] for line in logged] == ["subscriptions are missing from the metrics"]
    readings = Readings()
    probe.read(readings)
    assert set(readings.values("penstock_coordination_errors_total").values()) == {1}
    probe.close()


def test_probes_of_a_store_that_hangs_share_one_thread_and_delay_no_search() -> None:
    asked: list[str] = []
    hanging, end = threading.Event(), threading.Event()

    def hang() -> object:
        asked.append("asked")
        hanging.set()
        # Only the end of the test releases this probe. A timeout might release it before the check gives up.
        end.wait()
        raise CoordinationLost("the store does not answer")

    with captured_log() as log:
        probe = CoordinationProbe("sqlite:///nowhere", hang, [])  # type: ignore[arg-type]
        served = Served({"shop": OpeningInstance(log, None)}, Arrivals())
        health = Health(served, {"http"}, probe)

        async def check() -> None:
            probes = [asyncio.create_task(health.checks()) for _ in range(40)]
            try:
                await asyncio.to_thread(hanging.wait, WAIT_SECONDS_MAX)
                # A client that disconnects does not cancel the check for other clients.
                probes.pop().cancel()
                async with asyncio.timeout(WAIT_SECONDS_MAX):
                    for pool in (served.threads.searching, served.threads.reporting):
                        assert await run_in(pool, lambda: "free") == "free"
            finally:
                end.set()
            assert all(not checks["coordination"] for checks in await asyncio.gather(*probes))

        asyncio.run(check())
    assert len(asked) == 1


def test_daemon_starts_while_canal_waits_for_the_coordination_store() -> None:
    with captured_log() as log:
        health = health_of(OpeningInstance(log, None))
        assert not health.is_started()
        health.listening.add("http")
        assert health.is_started()
        assert failed_checks(health) == {"listeners"}


def test_health_needs_no_credentials_and_names_no_instance() -> None:
    with captured_log() as log, serving(log, {"token": "a-token"}) as daemon:
        for path in ("/livez", "/readyz", "/startupz"):
            answer = daemon.ask("GET", path, token="wrong", Host="10.0.0.7")
            assert answer.status == 200, answer.body
            assert b"shop" not in answer.body
        assert daemon.ask("GET", "/readyz").body == b"log: ok\nlisteners: ok\nserving: ok\n"
        assert daemon.ask("GET", "/readyz/", token="wrong").status == 401
        # A daemon's shutdown begins with this status, so that clients send no new requests.
        daemon.in_loop(daemon.served.arrivals.close)
        assert daemon.ask("GET", "/readyz").status == 503
        assert daemon.ask("GET", "/livez").status == 200


def receive(receiving: socket.socket) -> str:
    return receiving.recv(1024).decode()


def test_systemd_hears_ready_then_the_watchdog_then_stopping(tmp_path: Path) -> None:
    path = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(path))
        receiving.settimeout(WAIT_SECONDS_MAX)
        started: list[bool] = []
        environment = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "20000"}

        async def run() -> None:
            notifying = asyncio.create_task(notify_until_cancelled(lambda: bool(started), environment))
            await asyncio.sleep(0)
            receiving.setblocking(False)
            assert_silent(receiving)
            receiving.settimeout(WAIT_SECONDS_MAX)
            started.append(True)
            assert await asyncio.to_thread(receive, receiving) == "READY=1"
            assert await asyncio.to_thread(receive, receiving) == "WATCHDOG=1"
            assert await asyncio.to_thread(receive, receiving) == "WATCHDOG=1"
            notifying.cancel()
            await asyncio.wait({notifying})

        asyncio.run(run())
        said = receive(receiving)
        while said == "WATCHDOG=1":
            said = receive(receiving)
        assert said == "STOPPING=1"


def assert_silent(receiving: socket.socket) -> None:
    try:
        heard = receiving.recv(1024)
    except BlockingIOError:
        return
    raise AssertionError(heard)


def test_abstract_socket_is_notified() -> None:
    name = f"@penstock-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind("\0" + name[1:])
        receiving.settimeout(WAIT_SECONDS_MAX)

        async def run() -> None:
            notifying = asyncio.create_task(notify_until_cancelled(lambda: True, {"NOTIFY_SOCKET": name}))
            assert await asyncio.to_thread(receive, receiving) == "READY=1"
            notifying.cancel()

        asyncio.run(run())


def test_watchdog_of_another_process_is_not_fed() -> None:
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000"}) == 30
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}) == 30
    assert watchdog_seconds({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_seconds({}) is None


def test_nothing_is_notified_without_systemd() -> None:
    asyncio.run(notify_until_cancelled(lambda: False, {}))
