# SPDX-License-Identifier: Apache-2.0
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pymysql
import pytest

from penstock._native import GtidSet
from penstock.binlog import read_binlog
from penstock.capture.receive import Receiver
from penstock.capture.status import State
from penstock.errors import ConnectionLost
from penstock.logstore.reader import LogReader
from penstock.model import Position
from penstock.mysql import replica
from penstock.mysql.replica import ReplicaStream
from penstock.settings.daemon import Settings
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    capturing,
    failing_over,
    head_of,
    purge,
    rotate,
    settings_of,
    wait_for,
    wait_for_position,
    wait_for_state,
)
from tests.support.capture.replicas import gtids_executed, replica_of
from tests.support.daemon.process import DaemonProcess
from tests.support.suite.fixture_types import FreshDatabase, StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_for_next_second, wait_until
from tools.servers import Server
from tools.servers.proxy import Cut, Proxy


def write(server: Server, database: str, transactions: int, width: int = 400) -> None:
    """Commit this many transactions of three changes each."""
    server.sql(f"CREATE TABLE IF NOT EXISTS {database}.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    insert = f"INSERT INTO {database}.t (b) VALUES (REPEAT('x', {width}));"
    with server.connect(client_flag=pymysql.constants.CLIENT.MULTI_STATEMENTS) as connection:
        for _ in range(transactions):
            with connection.cursor() as cursor:
                cursor.execute(f"BEGIN; {insert * 3} COMMIT")
                while cursor.nextset():
                    pass


def test_log_equals_the_servers_bytes_over_several_files(
    server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(server)
    start = head_of(server)
    write(server, database, 20)
    with capturing(settings_of(tmp_path, server.url(), start=str(start))) as capture:
        wait_for_position(capture, head_of(server))
        for _ in range(2):
            rotate(server)
            write(server, database, 20)
        # The counters are updated shortly after the bytes have been stored.
        status = wait_for(
            capture,
            lambda status: (
                status.lag_seconds == 0
                and status.position == str(head_of(server))
                and status.rows_per_second > 2 * status.transactions_per_second > 0
            ),
        )
        assert status.state is State.RUNNING
        assert status.gtid_set
    assert capture.snapshot().state is State.CLOSED
    assert assert_equal_to_server(tmp_path / "shop", server, start) > 60 * 3 * 400


def test_packet_of_more_than_sixteen_megabytes_is_accepted(
    start_server: StartServer, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    server = start_server("mariadb")
    database = fresh_database(server)
    start = head_of(server)
    with capturing(settings_of(tmp_path, server.url(), start=str(start))) as capture:
        server.sql("SET GLOBAL max_allowed_packet = 1 << 30")
        write(server, database, 1, width=17 << 20)
        wait_for_position(capture, head_of(server))
    assert assert_equal_to_server(tmp_path / "shop", server, start) > 3 * (17 << 20)


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_connection_cut_anywhere_loses_and_duplicates_no_byte(
    server_of: Any, fresh_database: FreshDatabase, tmp_path: Path, flavor: str
) -> None:
    server: Server = server_of(flavor)
    database = fresh_database(server)
    start = head_of(server)
    with Proxy(server.port) as proxy:
        source = proxy.through(server.url()) + "?ssl_mode=disabled"
        with capturing(settings_of(tmp_path, source, start=str(start))) as capture:
            wait_for_state(capture, State.RUNNING)
            cuts: list[tuple[int, Cut]] = [
                (9_000, "reset"),
                (20_000, "close"),
                (17_003, "reset"),
                (22_001, "close"),
            ]
            for size, how in cuts:
                proxy.cut_after(size, how, in_packet=size % 2 == 0)
                write(server, database, 20)
                wait_for_position(capture, head_of(server))
            status = capture.snapshot()
            assert status.connects > len(cuts)
            assert status.error is not None
            assert status.error.kind == "ConnectionLost"
    assert_equal_to_server(tmp_path / "shop", server, start)


def test_bytes_received_before_a_lost_connection_are_kept(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    write(mariadb_server, database, 1)
    start = head_of(mariadb_server)
    with Proxy(mariadb_server.port) as proxy:
        source = proxy.through(mariadb_server.url()) + "?ssl_mode=disabled"
        with capturing(settings_of(tmp_path, source, start=str(start))) as capture:
            wait_for_state(capture, State.RUNNING)
            proxy.refuse()
            proxy.cut_after(100_000, "close")
            mariadb_server.sql(f"INSERT INTO {database}.t (b) VALUES (REPEAT('x', 900));" * 200)
            status = wait_for_state(capture, State.WAITING)
            # The log holds all received bytes except the packets before the first event and the transaction
            # that was cut.
            assert status.position is not None
            assert Position.parse(status.position).offset - start.offset > 100_000 - 5_000


def test_dead_network_path_is_detected_by_silence(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(replica, "SILENCE_SECONDS_MAX", WAIT_SECONDS_MAX)
    database = fresh_database(mariadb_server)
    rotate(mariadb_server)
    start = head_of(mariadb_server)
    with Proxy(mariadb_server.port) as proxy:
        source = proxy.through(mariadb_server.url()) + "?ssl_mode=disabled"
        with capturing(settings_of(tmp_path, source, start=str(start))) as capture:
            wait_for_state(capture, State.RUNNING)
            # Heartbeats keep the connection alive. Nothing else would send this many bytes.
            heard = proxy.bytes_down
            wait_until(lambda: proxy.bytes_down > heard + 500)
            assert capture.snapshot().connects == 1
            assert head_of(mariadb_server) == start
            monkeypatch.setattr(replica, "SILENCE_SECONDS_MAX", 0.6)
            proxy.cut("reset")
            # Only the stream sends more bytes than this. A connection that ends while the machine is paused
            # sends fewer.
            proxy.cut_after(100_000, "silence")
            planned = proxy.cut_count
            wait_until(lambda: write(mariadb_server, database, 40) or proxy.cut_count > planned)
            status = wait_for_position(capture, head_of(mariadb_server))
            assert status.connects >= 3
            assert status.error is not None
            assert "no heartbeat" in status.error.message
            assert status.error.cleared_us is not None
            assert status.error.cleared_us > status.error.time_us
    assert_equal_to_server(tmp_path / "shop", mariadb_server, start)


def test_restarted_server_is_followed_again(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mariadb")
    server.sql("CREATE DATABASE d")
    with capturing(settings_of(tmp_path, server.url(), start="earliest")) as capture:
        write(server, "d", 10)
        wait_for_position(capture, head_of(server))
        server.kill()
        status = wait_for_state(capture, State.WAITING)
        assert status.error is not None
        assert status.lag_seconds is not None
        server.start()
        write(server, "d", 10)
        status = wait_for_position(capture, head_of(server))
        assert status.epoch == 0
    assert_equal_to_server(tmp_path / "shop", server)


def test_capture_continues_where_its_log_ends(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    start = head_of(mariadb_server)
    settings = settings_of(tmp_path, mariadb_server.url(), start=str(start))
    for _ in range(3):
        with capturing(settings) as capture:
            write(mariadb_server, database, 5)
            wait_for_position(capture, head_of(mariadb_server))
        write(mariadb_server, database, 5)
    with capturing(settings) as capture:
        wait_for_position(capture, head_of(mariadb_server))
    assert_equal_to_server(tmp_path / "shop", mariadb_server, start)


def test_purged_position_stops_by_name_unless_the_loss_is_accepted(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server("mysql")
    server.sql("CREATE DATABASE d")
    with capturing(settings_of(tmp_path, server.url(), start="earliest")) as capture:
        wait_for_position(capture, head_of(server))
    server_files = [path.name for path in server.binlog_files()]
    for _ in range(2):
        write(server, "d", 3)
        server.sql("FLUSH BINARY LOGS")
    newest = purge(server)
    with capturing(settings_of(tmp_path, server.url())) as capture:
        status = wait_for_state(capture, State.STOPPED)
        assert status.error is not None
        assert status.error.kind == "PositionPurged"
        # The log that was captured so far stays readable.
        log = capture.log()
        assert log.extents()[0].file == server_files[0]
    assert capture.snapshot().state is State.STOPPED
    with capturing(settings_of(tmp_path, server.url(), fail_on_data_loss=False)) as capture:
        write(server, "d", 3)
        status = wait_for_position(capture, head_of(server))
        assert "purged" in (status.note or "")
    assert LogReader.open(tmp_path / "shop").extents()[-1].file == newest


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_purged_file_without_missing_bytes_stops_nothing(
    start_server: StartServer, tmp_path: Path, flavor: str
) -> None:
    server = start_server(flavor)
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    with capturing(settings_of(tmp_path, server.url(), start="earliest")) as capture:
        held = wait_for_position(capture, head_of(server)).position
    for _ in range(2):
        server.sql("FLUSH BINARY LOGS")
    server.sql("INSERT INTO d.t (b) VALUES ('x')")
    newest = purge(server)
    assert held is not None
    assert Position.parse(held).file != newest
    with capturing(settings_of(tmp_path, server.url())) as capture:
        assert wait_for_position(capture, head_of(server)).note is None
    changes = [row for batch in read_binlog(tmp_path / "shop") for row in batch.to_arrow().to_pylist()]
    assert [row["b"] for row in changes] == ["x"]


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_semi_sync_commit_returns_after_it_is_durable(
    start_server: StartServer, tmp_path: Path, flavor: str
) -> None:
    server = semi_synchronous(start_server, flavor)
    settings = settings_of(tmp_path, server.url(), {"fsync": "never"}, semi_sync=True)
    with capturing(settings) as capture:
        assert wait_for_state(capture, State.RUNNING).semi_sync
        for _ in range(20):
            server.sql("INSERT INTO d.t (b) VALUES ('x')")
            durable = capture.snapshot().durable
            assert durable is not None
            assert Position.parse(durable) >= head_of(server)
    assert_every_commit_waited(server)


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
@pytest.mark.parametrize(
    "lost", [(ReplicaStream, "acknowledge"), (Receiver, "_store")], ids=["answer", "sync"]
)
def test_commit_waiting_for_a_lost_acknowledgement_returns_once_it_is_durable(
    start_server: StartServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flavor: str,
    lost: tuple[type, str],
) -> None:
    server = semi_synchronous(start_server, flavor)
    owner, name = lost
    whole, lose = getattr(owner, name), threading.Event()

    def losing(*arguments: Any) -> None:
        if lose.is_set():
            lose.clear()
            raise ConnectionLost("the connection ends here")
        whole(*arguments)

    monkeypatch.setattr(owner, name, losing)
    settings = settings_of(tmp_path, server.url(), {"fsync": "never"}, semi_sync=True)
    with capturing(settings) as capture:
        wait_for_state(capture, State.RUNNING)
        server.sql("INSERT INTO d.t (b) VALUES ('x')")
        lose.set()
        commit = threading.Thread(target=server.sql, args=("INSERT INTO d.t (b) VALUES ('y')",), daemon=True)
        commit.start()
        # MySQL sends a transaction to replicas before it counts the transaction as executed. In this test,
        # MySQL waits for Penstock's acknowledgement between these two steps.
        commit.join(WAIT_SECONDS_MAX)
        assert not commit.is_alive()
        durable = capture.snapshot().durable
        assert durable is not None
        assert Position.parse(durable) >= head_of(server)
        assert capture.snapshot().connects >= 2
    assert_every_commit_waited(server)
    assert_equal_to_server(tmp_path / "shop", server)


def semi_synchronous(start_server: StartServer, flavor: str) -> Server:
    """Start a server whose commits wait for a replica, with a timeout longer than any test."""
    server = start_server(flavor)
    name = semi_sync_name(server)
    if flavor == "mysql":
        server.sql("INSTALL PLUGIN rpl_semi_sync_source SONAME 'semisync_source.so'")
    server.sql("CREATE DATABASE d; CREATE TABLE d.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    server.sql(f"SET GLOBAL {name}_enabled = 1; SET GLOBAL {name}_timeout = 3600000")
    return server


def semi_sync_name(server: Server) -> str:
    return f"rpl_semi_sync_{'master' if server.family == 'mariadb' else 'source'}"


def assert_every_commit_waited(server: Server) -> None:
    assert server.sql(f"SHOW GLOBAL STATUS LIKE '{semi_sync_name(server)}_no_tx'")[0][1] == "0"


def test_capture_pauses_while_the_disk_is_full(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    start = head_of(mariadb_server)
    settings = settings_of(tmp_path, mariadb_server.url(), start=str(start))
    with capturing(_with_free_bytes_min(settings, 1 << 60)) as capture:
        write(mariadb_server, database, 3)
        status = wait_for_state(capture, State.HELD)
        assert "bytes are free" in (status.why or "")
        time.sleep(0.3)
        assert capture.snapshot().position is None
    with capturing(settings) as capture:
        wait_for_position(capture, head_of(mariadb_server))
    with capturing(settings) as capture:
        wait_for(capture, lambda status: status.lag_bytes == 0)
        log = capture.log()
        log.settings = log.settings.model_copy(update={"free_bytes_min": 1 << 60})
        # The server continues to commit, and the capture queries the position of the server's head while no
        # data arrives. Changes are stored in the log until the capture next checks the free space.
        write(mariadb_server, database, 3)
        wait_for_state(capture, State.HELD)
        write(mariadb_server, database, 3)
        wait_for(capture, lambda status: capture.measure_lag() or bool(status.lag_bytes))
        log.settings = settings.log_of("shop")
        wait_for_position(capture, head_of(mariadb_server))
    assert_equal_to_server(tmp_path / "shop", mariadb_server, start)


def _with_free_bytes_min(settings: Settings, size: int) -> Settings:
    return settings.model_copy(update={"log": settings.log.model_copy(update={"free_bytes_min": size})})


# --- Beginning ------------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_empty_log_starts_at_the_configured_position(
    server_of: Any, fresh_database: FreshDatabase, tmp_path: Path, flavor: str
) -> None:
    server: Server = server_of(flavor)
    database = fresh_database(server)
    rotate(server)
    write(server, database, 2)
    head = head_of(server)
    gtids = "@@global.gtid_binlog_pos" if server.family == "mariadb" else "@@global.gtid_executed"
    gtid_set = server.sql(f"SELECT {gtids}")[0][0].replace("\n", "")
    write(server, database, 2)
    for number, start in enumerate((str(head), gtid_set)):
        settings = settings_of(tmp_path / str(number), server.url(), start=start)
        with capturing(settings) as capture:
            wait_for_position(capture, head_of(server))
            log = capture.log()
            assert log.earliest() == head
            # Other tests of the server may have written with another server id.
            assert str(GtidSet.parse(log.gtid_set(head)).position()) == gtid_set
        assert_equal_to_server(tmp_path / str(number) / "shop", server, head)
    with capturing(settings_of(tmp_path / "latest", server.url())) as capture:
        wait_for_state(capture, State.RUNNING)
        end = head_of(server)
        write(server, database, 2)
        wait_for_position(capture, head_of(server))
    assert_equal_to_server(tmp_path / "latest" / "shop", server, end)


def test_empty_log_starts_at_the_file_that_holds_a_time(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mariadb")
    server.sql("CREATE DATABASE d")
    write(server, "d", 2)
    server.sql("FLUSH BINARY LOGS")
    # File creation times are in whole seconds.
    wait_for_next_second()
    write(server, "d", 2)
    moment = server.sql("SELECT DATE_FORMAT(UTC_TIMESTAMP(), '%Y-%m-%dT%H:%i:%sZ')")[0][0]
    with capturing(settings_of(tmp_path / "a", server.url(), start=moment)) as capture:
        wait_for_position(capture, head_of(server))
        earliest = capture.log().earliest()
        assert earliest is not None
        assert earliest.file == head_of(server).file
    with capturing(settings_of(tmp_path / "b", server.url(), start="2020-01-01")) as capture:
        wait_for_position(capture, head_of(server))
    assert LogReader.open(tmp_path / "b" / "shop").extents()[0].file == server.binlog_files()[0].name
    assert_equal_to_server(tmp_path / "b" / "shop", server)


# --- Another server -------------------------------------------------------------------------


@pytest.mark.parametrize("flavor", ["mysql", "mariadb"])
def test_replica_takes_over_without_a_gap_or_a_duplicate(
    start_server: StartServer, tmp_path: Path, flavor: str
) -> None:
    primary = start_server(flavor)
    follower = replica_of(primary, start_server)
    primary.sql("CREATE DATABASE d")
    settings = failing_over(tmp_path, primary, follower, "300ms")
    with capturing(settings) as capture:
        write(primary, "d", 10)
        wait_for_position(capture, head_of(primary))
        before = head_of(primary)
        wait_until(lambda: gtids_executed(follower) == gtids_executed(primary))
        primary.kill()
        write(follower, "d", 10)
        status = wait_for(capture, lambda status: status.epoch == 1 and status.position is not None)
        status = wait_for(capture, lambda status: status.position == f"1/{head_of(follower)}")
        assert status.note is None
        assert status.server == f"mysql://repl@127.0.0.1:{follower.port}"
        assert str(GtidSet.parse(status.gtid_set).position()) == gtids_executed(follower)
    log = LogReader.open(tmp_path / "shop")
    first, second = ([extent for extent in log.extents() if extent.epoch == epoch] for epoch in (0, 1))
    assert first[-1].end == before.offset
    assert log.gtid_set(second[0].first) == log.gtid_set(first[-1].last)
    assert_equal_to_server(tmp_path / "shop", follower)


@pytest.mark.deep(
    guard="tests/integration/test_capture_failures.py::test_hanging_server_is_abandoned_for_the_next_one"
)
def test_promoted_replica_is_followed_while_the_primary_hangs(
    start_server: StartServer, tmp_path: Path
) -> None:
    primary = start_server("mysql")
    follower = replica_of(primary, start_server)
    primary.sql("CREATE DATABASE d")
    settings = {
        "instances": {
            "shop": {
                "source": primary.url(),
                "servers": [f"127.0.0.1:{follower.port}"],
                "start": "earliest",
                "fail_over_after": "2s",
            }
        }
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        write(primary, "d", 10)
        daemon.wait_for(lambda status: status["position"] == str(head_of(primary)))
        wait_until(lambda: gtids_executed(follower) == gtids_executed(primary))
        assert primary.pid is not None
        os.kill(primary.pid, signal.SIGSTOP)
        try:
            follower.sql("STOP REPLICA")
            write(follower, "d", 10)
            daemon.wait_for(lambda status: status["position"] == f"1/{head_of(follower)}")
            # From this point on, no server answers.
            assert follower.pid is not None
            os.kill(follower.pid, signal.SIGSTOP)
            daemon.wait_for(lambda status: status["state"] != "running")
            started = time.monotonic()
            daemon.terminate()
            assert time.monotonic() - started < 15
        finally:
            for server in (primary, follower):
                if server.pid is not None:
                    os.kill(server.pid, signal.SIGCONT)


def test_server_missing_transactions_of_the_log_is_waited_for(
    start_server: StartServer, tmp_path: Path
) -> None:
    primary = start_server("mariadb")
    follower = replica_of(primary, start_server)
    primary.sql("CREATE DATABASE d")
    settings = failing_over(tmp_path, primary, follower, "100ms")
    with capturing(settings) as capture:
        write(primary, "d", 2)
        wait_until(lambda: gtids_executed(follower) == gtids_executed(primary))
        follower.sql("STOP SLAVE")
        write(primary, "d", 2)
        wait_for_position(capture, head_of(primary))
        primary.stop()
        status = wait_for(
            capture, lambda status: status.error is not None and status.error.kind == "ServerBehind"
        )
        assert status.epoch == 0
        primary.start()
        follower.sql("START SLAVE")
        status = wait_for_state(capture, State.RUNNING)
        assert status.missing_gtids is None
        write(primary, "d", 2)
        wait_for(
            capture,
            lambda status: status.state is State.RUNNING and status.gtid_set == gtids_executed(primary),
        )
