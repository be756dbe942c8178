# SPDX-License-Identifier: Apache-2.0
"""The log still equals the server's after a daemon's process, network, disk or servers fail under load."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymysql
import pytest

from penstock import read_binlog
from penstock.capture.kept_schemas import kept_schemas
from penstock.errors import LogFull
from penstock.logstore.epochs import stored_segments
from penstock.logstore.log import Log
from penstock.logstore.reader import LogReader
from penstock.model import Position
from tests.support.capture.captured_log import (
    assert_equal_to_server,
    capturing,
    head_of,
    purge,
    rotate,
    settings_of,
    wait_for,
)
from tests.support.daemon.process import DaemonProcess
from tests.support.logstore.source import SETTINGS, Captured, check_log
from tests.support.suite.fixture_types import StartServer
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tests.support.suite.sweep_seed import sweep_random
from tools.servers import Server
from tools.servers.proxy import Proxy

KILLS = 200 if os.environ.get("PENSTOCK_LONG") else 5

# The longest life of the daemon between kills: some die during the start, others at full speed.
LIFE_SECONDS_MAX = 0.8

# The lengths of the written values.
WIDTHS = (10, 200, 5_000, 60_000)


class Load:
    """Commits transactions of all sizes into one table from several sessions, with occasional rotations.

    `committed` counts completed commits, and `altered` counts changes of the table's definition. A commit
    that fails because the server fails is retried. Sessions end once they have committed `bytes_max` in
    total; `ended` is true when all have ended.
    """

    def __init__(
        self, server: Server, sessions: int = 2, widths: Sequence[int] = WIDTHS, bytes_max: int = 1 << 40
    ) -> None:
        self._server = server
        self._widths = widths
        self._bytes_left = bytes_max
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"load-{number}")
            for number in range(sessions)
        ]
        self.committed = self.altered = 0
        server.sql("CREATE DATABASE IF NOT EXISTS d")
        server.sql("CREATE TABLE IF NOT EXISTS d.t (a BIGINT PRIMARY KEY AUTO_INCREMENT, n INT, b LONGTEXT)")

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS_MAX)
            assert not thread.is_alive(), f"{thread.name} does not end"

    @property
    def ended(self) -> bool:
        """Whether all sessions have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def go_on(self, commits: int) -> None:
        """Wait until this many more commits were made, or all sessions have ended."""
        enough = self.committed + commits
        wait_until(lambda: self.committed >= enough or self.ended)

    def _run(self, number: int) -> None:
        dice = sweep_random(number)
        while not self._is_over():
            try:
                with self._server.connect() as connection, connection.cursor() as cursor:
                    self._commit(cursor, dice)
            except pymysql.err.MySQLError:
                # The server is down and will restart.
                time.sleep(0.05)

    def _commit(self, cursor: Any, dice: random.Random) -> None:
        while not self._is_over():
            cursor.execute("BEGIN")
            for _ in range(dice.randint(1, 4)):
                width = dice.choice(self._widths)
                cursor.execute("INSERT INTO d.t (n, b) VALUES (%s, REPEAT('y', %s))", (self.committed, width))
                self._bytes_left -= width
            cursor.execute("COMMIT")
            self.committed += 1
            if dice.random() < 0.01:
                cursor.execute("FLUSH BINARY LOGS")
                cursor.execute(f"ALTER TABLE d.t ADD COLUMN c{dice.getrandbits(40)} INT")
                self.altered += 1
            # Leave processor time for the other processes of the test.
            time.sleep(0.002)

    def _is_over(self) -> bool:
        return self._ending.is_set() or self._bytes_left <= 0


@contextmanager
def daemon_of(
    tmp_path: Path, source: str, log: dict[str, Any] | None = None, **instance: Any
) -> Iterator[DaemonProcess]:
    """Run a daemon with one instance, `shop`, from the start of the server's log."""
    settings = {
        "log": {"folder": str(tmp_path / "log"), "segment_bytes": "1MiB", **(log or {})},
        "instances": {"shop": {"source": source, "start": "earliest", **instance}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        yield daemon


def settle(daemon: DaemonProcess, server: Server) -> None:
    """Wait until the daemon has captured the server's whole log."""
    head = head_of(server)
    daemon.wait_for_head(head.file, head.offset)


@pytest.mark.deep(keep=("mysql",))
@pytest.mark.timing
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("flavor", "fsync"), [("mysql", "seconds"), ("mariadb", "never")])
def test_daemon_killed_at_any_moment_loses_and_repeats_nothing(
    start_server: StartServer, tmp_path: Path, flavor: str, fsync: str
) -> None:
    server = start_server(flavor)
    dice = sweep_random(fsync)
    with Load(server) as load, daemon_of(tmp_path, server.url(), {"fsync": fsync}) as daemon:
        # From this point on, the log exists.
        daemon.wait_for(lambda status: status["position"] is not None)
        for kill in range(KILLS):
            time.sleep(dice.uniform(0, LIFE_SECONDS_MAX))
            daemon.kill()
            if kill % 2 == 0:
                # Bytes after the last whole transaction are unusable, and every reader reports that.
                LogReader.open(tmp_path / "log" / "shop")
            daemon.start()
        load.go_on(20)
        wait_until(lambda: load.altered)
        load.__exit__()
        settle(daemon, server)
        assert daemon.terminate() == 0
    compared = assert_equal_to_server(tmp_path / "log" / "shop", server)
    assert compared > 20_000 * KILLS
    assert_definition_is_kept(tmp_path / "log" / "shop", server)


def kill_capture(daemon: DaemonProcess) -> dict[str, Any]:
    """Kill the capture process of the instance; return the first status after its end."""
    process = daemon.wait_for(lambda status: status["process"]["pid"] is not None)["process"]["pid"]
    os.kill(process, signal.SIGKILL)
    return daemon.wait_for(lambda status: status["process"]["pid"] != process)


@pytest.mark.deep(
    guard="tests/unit/test_capture_processes.py::test_reason_of_a_defect_is_in_the_status_and_the_alert"
)
@pytest.mark.timing
@pytest.mark.timeout(1800)
def test_capture_process_killed_at_any_moment_loses_and_repeats_nothing(
    start_server: StartServer, tmp_path: Path
) -> None:
    server = start_server("mysql")
    dice = sweep_random("processes")
    instance = {"source": server.url(), "start": "earliest"}
    settings = {
        "log": {"folder": str(tmp_path / "log"), "segment_bytes": "1MiB"},
        "processes": "per-instance",
        "instances": {"shop": instance, "users": instance},
    }
    with Load(server) as load, DaemonProcess(tmp_path, settings) as daemon:
        daemon.wait_for(lambda status: status["position"] is not None)
        untouched = daemon.wait_for(lambda status: status["position"] is not None, "users")["process"]["pid"]
        reached = Position.parse(daemon.status()["position"])
        for kill in range(1, KILLS + 1):
            time.sleep(dice.uniform(0, LIFE_SECONDS_MAX))
            ended = kill_capture(daemon)
            assert ended["process"]["exits"][-1]["reason"] == "SIGKILL"
            # The supervisor also replaces a process that a busy machine has kept silent for long.
            assert ended["process"]["starts"] >= kill
            # Readers keep what they have received.
            assert Position.parse(ended["position"]) >= reached
            reached = Position.parse(ended["position"])
        load.go_on(20)
        load.__exit__()
        settle(daemon, server)
        head = head_of(server)
        daemon.wait_for_head(head.file, head.offset, "users")
        assert daemon.status("users")["process"] | {"exits": []} == {
            "pid": untouched,
            "starts": 1,
            "exits": [],
            "set_aside": False,
        }
        batches = read_binlog(f"penstock://127.0.0.1:{daemon.port}/shop", tables=["d.t"], columns=["a"])
        inserted = [key for batch in batches for key in batch.to_arrow().column("a").to_pylist()]
        assert sorted(inserted) == [row[0] for row in server.sql("SELECT a FROM d.t ORDER BY a")]
        processes = [daemon.status(name)["process"]["pid"] for name in ("shop", "users")]
        daemon.kill()
        # The killed processes have released the locks of their logs.
        wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
        daemon.start()
        settle(daemon, server)
        assert daemon.terminate() == 0
    for name in ("shop", "users"):
        assert_equal_to_server(tmp_path / "log" / name, server)


def assert_definition_is_kept(folder: Path, server: Server) -> None:
    """Assert that the definition kept with a log equals the server's current definition."""
    log = LogReader.open(folder)
    kept = kept_schemas(log).at(log.head()).schema("d", "t")
    assert kept is not None
    assert [column.name for column in kept.columns] == [row[0] for row in server.sql("SHOW COLUMNS FROM d.t")]
    assert len(kept.columns) > 3


@pytest.mark.timing
def test_network_cut_anywhere_loses_nothing(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mariadb")
    dice = sweep_random(7)
    with Proxy(server.port) as proxy, Load(server) as load:
        source = proxy.through(server.url()) + "?ssl_mode=disabled"
        with daemon_of(tmp_path, source) as daemon:
            daemon.wait_for(lambda status: status["state"] == "running")
            for _ in range(6):
                cuts = proxy.cut_count
                proxy.cut_after(dice.randint(1, 400_000), dice.choice(("reset", "close")))
                wait_until(lambda cuts=cuts: proxy.cut_count > cuts)  # type: ignore[misc]
            load.__exit__()
            settle(daemon, server)
            assert daemon.status()["connects"] > 2
    assert_equal_to_server(tmp_path / "log" / "shop", server)


@pytest.mark.timing
def test_server_that_dies_under_load_is_followed_after_its_restart(
    start_server: StartServer, tmp_path: Path
) -> None:
    # Without sync_binlog=1, a crash may lose transactions that a replica has seen but the server has not
    # synced.
    server = start_server("mariadb", sync_binlog=1)
    # MariaDB writes a long transaction in pieces. A kill between them leaves it torn, and the server sends no
    # later event.
    with Load(server, widths=(10, 200, 1000)) as load, daemon_of(tmp_path, server.url()) as daemon:
        for _ in range(2):
            load.go_on(30)
            server.kill()
            time.sleep(0.2)
            server.start()
        load.__exit__()
        settle(daemon, server)
        status = daemon.wait_for(lambda status: status["state"] == "running")
        assert status["epoch"] == 0
    assert_equal_to_server(tmp_path / "log" / "shop", server)


@pytest.mark.timing
def test_log_purged_under_a_dead_daemon_stops_it_by_name(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mariadb")
    with Load(server) as load, daemon_of(tmp_path, server.url()) as daemon:
        start = Position(0, "mysql-bin.000001", 100_000)
        daemon.wait_for(
            lambda reported: bool(reported["position"]) and Position.parse(reported["position"]) > start
        )
        daemon.kill()
        load.go_on(10)
        load.__exit__()
        rotate(server)
        purge(server)
        daemon.start()
        status = daemon.wait_for(lambda status: status["state"] == "stopped")
        assert status["error"]["kind"] == "PositionPurged"
        held = LogReader.open(tmp_path / "log" / "shop").head()
        assert held.file in status["error"]["message"]
        # The existing log stays readable.
        assert daemon.get("/v1/instances/shop/head")["position"] == str(held)


@pytest.mark.timing
def test_full_disk_pauses_capture_until_there_is_room(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("mariadb")
    with small_disk(tmp_path / "disk", 64) as disk:
        log = {
            "folder": str(disk),
            "free_bytes_min": "0B",
            "memory_bytes": "4MiB",
            "retention": {"age": "24h"},
        }
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(58 << 20))
        # This log needs more space than the ballast leaves, and less than the whole disk.
        with (
            Load(server, bytes_max=32 << 20) as load,
            daemon_of(tmp_path, server.url(), log) as daemon,
        ):
            status = daemon.wait_for(lambda status: status["state"] == "held")
            assert "no room" in status["why"]
            full = status["position"]
            load.go_on(20)
            load.__exit__()
            daemon.kill()
            daemon.start()
            status = daemon.wait_for(lambda status: status["state"] in ("held", "waiting"))
            ballast.unlink()
            settle(daemon, server)
            assert Position.parse(daemon.status()["position"]) > Position.parse(full)
        assert_equal_to_server(disk / "shop", server)


def test_log_that_cannot_open_on_a_full_disk_frees_space_by_itself(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1) as disk:
        with Log.open(disk / "shop", SETTINGS) as log:
            Captured(log).run()
        # The files that must be rebuilt after a kill need space.
        stored_segments(log.disk, log.layout)[-1].index_path.unlink()
        (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
        with pytest.raises(LogFull):
            Log.open(disk / "shop", SETTINGS)
        kept = {"retention": {"age": None, "bytes": 8000}, "memory_bytes": 0}
        with capturing(settings_of(disk, "mysql://nobody@127.0.0.1:1", kept)) as capture:
            wait_for(capture, lambda status: status.position is not None)
        with Log.open(disk / "shop", SETTINGS) as again:
            assert 0 < len(again.segments) < len(log.segments)
            check_log(again, whole=True)


@contextmanager
def small_disk(path: Path, mib: int) -> Iterator[Path]:
    """Mount a disk of this many MiB; skip without the privilege, or fail under `CI=true`."""
    path.mkdir()
    if os.geteuid() != 0 or os.system(f"mount -t tmpfs -o size={mib}m tmpfs '{path}' 2>/dev/null") != 0:
        part = "a small disk is missing: it needs the right to mount one"
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(part, pytrace=False)
        pytest.skip(part)
    try:
        yield path
    finally:
        os.system(f"umount '{path}'")
