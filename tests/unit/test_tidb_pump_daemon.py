# SPDX-License-Identifier: Apache-2.0
"""`penstock serve` as a Pump, in a process that is killed, and the commands that operate on this Pump."""

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.kept_log import penstock
from tests.support.suite.patience import wait_until
from tests.support.tidb.binlogs import commit, matched, prewrite
from tests.support.tidb.pump_client import PumpClient
from tools.servers.ports import free_port
from tools.tidb.cluster import FakeCluster

KILLS = 4


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as fake:
        yield fake


@pytest.fixture
def daemon(tmp_path: Path, cluster: FakeCluster) -> Iterator[DaemonProcess]:
    pump = {"listen": f"127.0.0.1:{free_port()}", "node_id": "pump-1"}
    instance = {"source": f"tidb://{cluster.address}", "tidb": {"roles": ["pump"], "pump": pump}}
    process = DaemonProcess(tmp_path, {"instances": {"shop": instance}})
    yield process
    process.kill()


def address_of(daemon: DaemonProcess) -> str:
    address: str = daemon.settings["instances"]["shop"]["tidb"]["pump"]["listen"]
    return address


def write_until_accepted(client: PumpClient, payload: bytes) -> None:
    """Repeat a write until it is acknowledged, as TiDB's client does."""

    def is_accepted() -> bool:
        try:
            client.write(payload)
        except grpc.RpcError as problem:
            if problem.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return False
        return True

    wait_until(is_accepted)


@pytest.mark.deep(
    guard="tests/unit/test_tidb_pump_daemon.py::test_pump_of_a_killed_daemon_is_whole_and_operable"
)
def test_daemon_killed_under_load_loses_and_repeats_nothing(daemon: DaemonProcess) -> None:
    daemon.start()
    written: list[int] = []
    done = threading.Event()

    def write_transactions() -> None:
        with PumpClient(address_of(daemon)) as client:
            start_ts = 1
            while not done.is_set():
                write_until_accepted(client, prewrite(start_ts))
                write_until_accepted(client, commit(start_ts, start_ts + 1))
                written.append(start_ts)
                start_ts += 2

    writer = threading.Thread(target=write_transactions)
    writer.start()
    for kill in range(1, KILLS + 1):
        wait_until(lambda kill=kill: len(written) > kill * 40)
        daemon.kill()
        daemon.start()
    wait_until(lambda: len(written) > (KILLS + 1) * 40)
    done.set()
    writer.join()
    with PumpClient(address_of(daemon)) as client:
        pulled = client.pull_some(len(written))
    assert pulled == [matched(start_ts, start_ts + 1) for start_ts in written]


def test_pump_of_a_killed_daemon_is_whole_and_operable(daemon: DaemonProcess, tmp_path: Path) -> None:
    daemon.start()
    folder = tmp_path / "log/shop.pump"
    with PumpClient(address_of(daemon)) as client:
        write_until_accepted(client, prewrite(3))
        daemon.kill()
        daemon.start()
        write_until_accepted(client, b"")
        status = penstock("pump", "status", daemon.config, "--json").one
        assert (status["instance"], status["open"]) == ("shop", 1)
        assert "open              1" in penstock("pump", "status", daemon.config).lines
        assert penstock("pump", "decide", folder, 3, "--commit", 3).code == 2
        assert penstock("pump", "decide", folder, 3).code == 2
        assert penstock("pump", "decide", tmp_path, 3, "--rollback").code == 2
        assert penstock("pump", "decide", folder, 3, "--commit", 5).code == 0
        assert client.pull_some(1) == [matched(3, 5)]
    assert daemon.terminate() == 0
    unreachable = penstock("pump", "status", daemon.config)
    assert (unreachable.code, "does not answer" in unreachable.err) == (4, True)
    assert penstock("log", "verify", folder).code == 0
