# SPDX-License-Identifier: Apache-2.0
"""Pumps used by TiDB's own programs: the pump client with each of its strategies, and TiDB servers that are
killed under load.
"""

import contextlib
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pymysql
import pytest

from penstock.tidb.cluster import Cluster
from penstock.tidb.messages import BinlogHead, BinlogKind
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tests.support.tidb.binlogs import commit, prewrite
from tests.support.tidb.pump_client import PumpClient
from tools.servers.errors import PartMissing
from tools.servers.ports import free_port
from tools.tidb.peers import PeerCluster, TidbServer, programs, written

WRITERS = 8
TRANSACTIONS = 30

_TOKEN = re.compile(rb"token-[0-9a-f]{32}")


@pytest.fixture
def cluster(tmp_path: Path, missing_part: MissingPart) -> Iterator[PeerCluster]:
    try:
        programs()
    except PartMissing as problem:
        missing_part("TiDB's programs", str(problem))
    with PeerCluster(tmp_path / "cluster") as started:
        yield started


class PumpDaemon:
    """A daemon that acts as a Pump, and what was pulled from it."""

    def __init__(self, folder: Path, cluster: PeerCluster, **pump: Any) -> None:
        folder.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        tidb = {"roles": ["pump"], "pump": {"listen": self.address, "node_id": folder.name, **pump}}
        instance = {"source": f"tidb://{cluster.address}", "tidb": tidb}
        self.process = DaemonProcess(folder, {"instances": {"shop": instance}})

    def start(self) -> None:
        self.process.start()
        self.wait_until_online()

    def wait_until_online(self) -> None:
        wait_until(lambda: self.process.said().rpartition(" serving ")[2].count("the Pump is online"))

    def pull_until(self, commit_ts: int) -> list[bytes]:
        """Return all transactions up to a timestamp that the Pump has released completely."""
        payloads = []
        with PumpClient(self.address) as client:
            pulling = client.pull()
            for payload in pulling:
                head = BinlogHead.decode(payload)
                if head.commit_ts > commit_ts:
                    break
                if not head.is_fake:
                    payloads.append(payload)
        return payloads


@pytest.fixture
def pumps(tmp_path: Path, cluster: PeerCluster) -> Iterator[list[PumpDaemon]]:
    with ExitStack() as stack:
        daemons = [PumpDaemon(tmp_path / name, cluster) for name in ("pump-1", "pump-2")]
        for daemon in daemons:
            stack.callback(daemon.process.kill)
            daemon.start()
        yield daemons


def commits_of(pump: PumpDaemon, commit_ts: int) -> list[tuple[int, int]]:
    """Return the start and commit timestamps that a Pump released, which must be in commit order."""
    heads = [BinlogHead.decode(payload) for payload in pump.pull_until(commit_ts)]
    commits = [head.commit_ts for head in heads]
    assert commits == sorted(set(commits))
    assert {head.kind for head in heads} <= {BinlogKind.COMMIT}
    return [(head.start_ts, head.commit_ts) for head in heads]


@pytest.mark.deep(guard="tests/unit/test_tidb_pump.py::test_transactions_are_pulled_as_they_commit")
@pytest.mark.parametrize("strategy", ["range", "hash"])
def test_pump_client_spreads_transactions_over_all_pumps(
    cluster: PeerCluster, pumps: list[PumpDaemon], strategy: str
) -> None:
    words = ("-strategy", strategy, "-writers", str(WRITERS), "-transactions", str(TRANSACTIONS))
    transactions, _ = cluster.write(*words)
    committed = sorted(each for each in transactions if each[1])
    last_ts = max(commit_ts for _, commit_ts in committed)
    pulled = [commits_of(pump, last_ts) for pump in pumps]
    assert sorted(pulled[0] + pulled[1]) == committed
    assert all(pulled)


@pytest.mark.deep(guard="tests/unit/test_tidb_pump.py::test_unix_socket_is_the_same_pump")
def test_pump_client_writes_over_a_local_socket(tmp_path: Path, cluster: PeerCluster) -> None:
    socket = tmp_path / "pump.sock"
    pump = PumpDaemon(tmp_path / "pump-1", cluster, socket=str(socket))
    try:
        pump.start()
        words = ("-strategy", "local-unix", "-socket", str(socket), "-transactions", "3")
        transactions, _ = cluster.write(*words)
        committed = sorted(each for each in transactions if each[1])
        assert sorted(commits_of(pump, max(commit_ts for _, commit_ts in committed))) == committed
    finally:
        pump.process.kill()


def store_in_both(cluster: PeerCluster, pumps: list[PumpDaemon]) -> tuple[int, int]:
    """Write a prewrite to both Pumps, and its commit to the second Pump only. Return the timestamps.

    The pump client leaves the same state behind if the first Pump is killed before it acknowledges the
    prewrite.
    """
    with contextlib.closing(Cluster([cluster.address])) as storage:
        start_ts, commit_ts = storage.timestamp(), storage.timestamp()
        cluster_id = storage.cluster_id
    for pump in pumps:
        with PumpClient(pump.address, cluster_id) as client:
            client.write(prewrite(start_ts))
    with PumpClient(pumps[1].address, cluster_id) as client:
        client.write(commit(start_ts, commit_ts))
    return start_ts, commit_ts


def decide_open_prewrites(pump: PumpDaemon, outcomes: dict[int, int]) -> None:
    """Decide, as an operator would, the prewrites whose outcome is in another Pump.

    TiKV has no trace of the pump client's transactions, so the Pump holds them back, and all later
    transactions too.
    """

    def is_decided() -> bool:
        status = penstock("pump", "status", pump.process.config, "--json").one
        if stalled := status.get("stalled_by"):
            start_ts = stalled["start_ts"]
            commit_ts = outcomes[start_ts]
            outcome = ("--commit", commit_ts) if commit_ts else ("--rollback",)
            penstock("pump", "decide", pump.process.folder / "log/shop.pump", start_ts, *outcome)
        return not status["open"]

    wait_until(is_decided)


@pytest.mark.deep(guard="tests/unit/test_tidb_pump.py::test_binlogctl_pauses_and_resumes_a_pump")
def test_pump_client_survives_pumps_that_are_killed_and_paused(
    cluster: PeerCluster, pumps: list[PumpDaemon]
) -> None:
    repeated = store_in_both(cluster, pumps)
    writing = cluster.start_writing("-writers", "4", "-transactions", "100")
    pumps[0].process.kill()
    pumps[0].start()
    # SIGTERM pauses the Pump, so the client sends new transactions to the other Pump.
    assert pumps[1].process.terminate() == 0
    pumps[1].start()
    output, errors = writing.communicate(timeout=WAIT_SECONDS_MAX)
    assert writing.returncode == 0, errors[-4000:]
    transactions = [repeated, *written(output)[0]]
    for pump in pumps:
        decide_open_prewrites(pump, dict(transactions))
    committed = sorted(each for each in transactions if each[1])
    last_ts = max(commit_ts for _, commit_ts in committed)
    pulled = [commits_of(pump, last_ts) for pump in pumps]
    assert repeated in pulled[0]
    assert sorted(set(pulled[0] + pulled[1])) == committed


# --- TiDB servers ---------------------------------------------------------------------------


class Bank:
    """Connections that insert and update rows; each transaction has a unique token."""

    def __init__(self, server: TidbServer, number: int) -> None:
        self._server = server
        self._number = number
        self.committed = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with self._server.connect() as connection, connection.cursor() as cursor:
                while not self.done.is_set():
                    cursor.execute("BEGIN")
                    for row in range(2):
                        token = f"token-{uuid.uuid4().hex}"
                        cursor.execute(
                            "INSERT INTO bank.entries (writer, row_number_, token) VALUES (%s, %s, %s)",
                            (self._number, row, token),
                        )
                    connection.commit()
                    self.committed += 1
        except pymysql.Error:
            # The server was killed.
            return


@pytest.mark.deep(guard="tests/unit/test_tidb_pump.py::test_lost_commit_is_found_in_tikv")
def test_servers_and_pumps_killed_under_load_lose_and_repeat_nothing(
    cluster: PeerCluster, pumps: list[PumpDaemon]
) -> None:
    first = cluster.start_server("range")
    second = cluster.start_server("hash")
    with first.connect() as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE bank")
        cursor.execute(
            "CREATE TABLE bank.entries (id BIGINT PRIMARY KEY AUTO_INCREMENT, writer INT, row_number_ INT,"
            " token VARCHAR(50))"
        )
    banks = [Bank((first, second)[number % 2], number) for number in range(6)]
    for bank in banks:
        bank.thread.start()
    wait_until(lambda: sum(bank.committed for bank in banks) > 60)
    pumps[0].process.kill()
    pumps[0].start()
    wait_until(lambda: sum(bank.committed for bank in banks) > 120)
    first.kill()
    survivors = [bank for bank in banks if bank._server is second]
    before = sum(bank.committed for bank in survivors)
    wait_until(lambda: sum(bank.committed for bank in survivors) > before + 60)
    for bank in banks:
        bank.done.set()
        bank.thread.join()
    with second.connect() as connection, connection.cursor() as cursor:
        # Reading resolves the locks of the killed server, which decides its transactions.
        cursor.execute("SELECT token FROM bank.entries")
        tokens = sorted(row[0] for row in cursor.fetchall())
        connection.commit()
        cursor.execute("BEGIN")
        cursor.execute("SELECT @@tidb_current_ts")
        ((last_ts,),) = cursor.fetchall()
    payloads = [payload for pump in pumps for payload in pump.pull_until(int(last_ts))]
    # A prewrite that a killed Pump stored but did not acknowledge is also in another Pump.
    transactions = {BinlogHead.decode(payload).start_ts: payload for payload in payloads}
    pulled = sorted(token.decode() for payload in transactions.values() for token in _TOKEN.findall(payload))
    assert pulled == tokens
    assert len(tokens) > 200
    refused = [penstock("pump", "status", pump.process.config, "--json").one["refused"] for pump in pumps]
    assert set().union(*refused) <= {"not online"}
