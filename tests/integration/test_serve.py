# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock._native import GtidSet
from penstock.model import Position
from tests.support.capture.captured_log import assert_equal_to_server, head_of, rotate
from tests.support.daemon.process import PENSTOCK, ROOT, DaemonProcess, Refused
from tests.support.logstore.kept_log import penstock
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server, certificate

IDLE_BYTES_MAX = 300 << 20
# The longest allowed wait of a request.
LONGEST_WAIT = 55


def cli(*words: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line and return what it printed."""
    return subprocess.run(
        [*PENSTOCK, *words], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX
    )


@pytest.fixture(scope="module")
def table(server_of: Any) -> Iterator[str]:
    """A table of the shared MariaDB server, for the whole module."""
    server: Server = server_of("mariadb")
    server.sql("CREATE DATABASE served; CREATE TABLE served.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    yield "served.t"
    server.sql("DROP DATABASE served")


@pytest.fixture(scope="module")
def start(table: str, server_of: Any) -> Position:
    """The position at which this module's daemon starts, after the checkpoint that MariaDB writes into a new
    file with a delay.
    """
    rotate(server_of("mariadb"))
    return head_of(server_of("mariadb"))


@pytest.fixture(scope="module")
def daemon(
    tmp_path_factory: pytest.TempPathFactory, server_of: Any, start: Position
) -> Iterator[DaemonProcess]:
    """A daemon that captures the shared MariaDB server, for the whole module."""
    settings = {"instances": {"shop": {"source": server_of("mariadb").url(), "start": str(start)}}}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), settings) as running:
        yield running


def insert(server: Server, table: str, count: int = 1, width: int = 100) -> Position:
    """Commit this many changes, and return the resulting end of the server's log."""
    server.sql(f"INSERT INTO {table} (b) VALUES (REPEAT('x', {width}));" * count)
    return head_of(server)


def shop(daemon: DaemonProcess, call: str, **query: Any) -> Any:
    return daemon.get(f"/v1/instances/shop/{call}", **query)


# --- The log over HTTP ----------------------------------------------------------------------


def test_ranges_equal_the_servers_bytes(
    daemon: DaemonProcess, mariadb_server: Server, table: str, start: Position
) -> None:
    insert(mariadb_server, table, 5)
    rotate(mariadb_server)
    head = insert(mariadb_server, table, 5, width=100_000)
    daemon.wait_for_head(head.file, head.offset)
    extents = shop(daemon, "extents")["extents"]
    assert (extents[0]["file"], extents[0]["start"]) == (start.file, start.offset)
    assert (extents[-1]["file"], extents[-1]["end"]) == (head.file, head.offset)
    for path in mariadb_server.binlog_files():
        for one in (extent for extent in extents if extent["file"] == path.name):
            own = path.read_bytes()
            assert shop(daemon, "bytes", **{**one, "stop": one["end"]}) == own[one["start"] : one["end"]]
            middle = (one["start"] + one["end"]) // 2
            assert (
                shop(daemon, "bytes", epoch=0, file=path.name, start=middle, stop=middle + 7)
                == (own[middle : middle + 7])
            )
            # Without a stop, or with a stop after the end, the response ends at the end of the log.
            behind = {"epoch": 0, "file": path.name, "start": middle}
            assert shop(daemon, "bytes", **behind) == own[middle : one["end"]]
            assert shop(daemon, "bytes", **behind, stop=1 << 40) == own[middle : one["end"]]
            assert shop(daemon, "head_bytes", epoch=0, file=path.name)[:4] == b"\xfebin"
    assert shop(daemon, "bytes", epoch=0, file=head.file, start=head.offset) == b""


def test_positions_are_located(
    daemon: DaemonProcess, mariadb_server: Server, table: str, start: Position
) -> None:
    before = insert(mariadb_server, table, 2)
    gtid_set = mariadb_server.sql("SELECT @@global.gtid_binlog_pos")[0][0]
    after = insert(mariadb_server, table, 2)
    daemon.wait_for_head(after.file, after.offset)
    assert shop(daemon, "earliest") == {"position": str(start)}
    logged = shop(daemon, "gtid_set", position=str(before))["gtid_set"]
    # Other tests of the server may have written with a different server id.
    assert str(GtidSet.parse(logged).position()) == gtid_set
    located = Position.parse(shop(daemon, "locate", gtid_set=gtid_set)["position"])
    assert start <= located <= before
    located = Position.parse(shop(daemon, "locate", time_us=time.time_ns() // 1000 + 10**9)["position"])
    assert located <= after
    assert shop(daemon, "epochs")["epochs"][0]["server_key"].startswith("mariadb:")
    definitions = json.dumps(shop(daemon, "schema", position=str(after), table=table))
    assert "longtext" in definitions


@pytest.mark.timing
def test_waiting_request_for_the_head_returns_with_the_commit(
    daemon: DaemonProcess, mariadb_server: Server, table: str
) -> None:
    head = insert(mariadb_server, table)
    daemon.wait_for_head(head.file, head.offset)
    came: list[tuple[Position, float]] = []

    def wait() -> None:
        position = Position.parse(shop(daemon, "head", after=str(head), timeout=LONGEST_WAIT)["position"])
        came.append((position, time.monotonic()))

    waiting = [threading.Thread(target=wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    # Waiting requests do not poll, so little CPU is used; the web server's own timer ticks ten times a
    # second.
    wait_until(lambda: share_of_a_processor(daemon) < 0.3)
    assert came == []
    committed = time.monotonic()
    insert(mariadb_server, table)
    for thread in waiting:
        thread.join(WAIT_SECONDS_MAX)
    assert len(came) == 5
    assert all(found > head for found, _ in came)
    # The requests were woken by the commit, not by their timeout.
    assert max(at for _, at in came) - committed < LONGEST_WAIT / 2
    started = time.monotonic()
    head = head_of(mariadb_server)
    assert shop(daemon, "head", after=str(head), timeout=0.3) == {"position": str(head)}
    assert 0.2 < time.monotonic() - started < LONGEST_WAIT / 2


def share_of_a_processor(daemon: DaemonProcess) -> float:
    """Return the processor share of a daemon, measured over a second."""
    started, cpu = time.monotonic(), daemon.cpu_seconds()
    time.sleep(1.0)
    return (daemon.cpu_seconds() - cpu) / (time.monotonic() - started)


@pytest.mark.parametrize(
    ("path", "query", "status", "kind"),
    [
        ("/v1/instances/shoe/head", {}, 404, "SourceMissing"),
        ("/v1/instances/shop/bytes", {"file": "mysql-bin.000001"}, 400, "OptionInvalid"),
        ("/v1/instances/shop/gtid_set", {"position": "nowhere"}, 416, "PositionInvalid"),
        ("/v1/instances/shop/gtid_set", {"position": "mysql-bin.999999:4"}, 416, "PositionInvalid"),
        ("/v1/instances/shop/locate", {"time_us": 1, "gtid_set": "0-1-1"}, 400, "OptionInvalid"),
        ("/v1/instances/shop/locate", {"time_us": "yesterday"}, 400, "OptionInvalid"),
        ("/v1/instances/shop/locate", {"time_us": "9" * 5000}, 400, "OptionInvalid"),
        (
            "/v1/instances/shop/gtid_set",
            {"position": "mysql-bin.000001:" + "9" * 5000},
            416,
            "PositionInvalid",
        ),
        ("/v1/nothing", {}, 404, "about:blank"),
    ],
)
def test_errors_are_reported_by_class(
    daemon: DaemonProcess, path: str, query: dict[str, Any], status: int, kind: str
) -> None:
    with pytest.raises(Refused) as refused:
        daemon.get(path, **query)
    assert (refused.value.status, refused.value.problem["type"]) == (status, kind)
    assert refused.value.problem["detail"]


def test_bytes_missing_from_the_log_are_purged(
    daemon: DaemonProcess, mariadb_server: Server, table: str, start: Position
) -> None:
    head = insert(mariadb_server, table)
    daemon.wait_for_head(head.file, head.offset)
    with pytest.raises(Refused) as refused:
        shop(daemon, "bytes", epoch=0, file=start.file, start=4)
    assert refused.value.problem["type"] in ("PositionPurged", "SequenceGap")


def test_foreign_host_name_is_refused(daemon: DaemonProcess) -> None:
    with pytest.raises(Refused) as refused:
        daemon.get("/v1/status", headers={"Host": "attacker.example"})
    assert refused.value.problem["type"] == "AuthenticationFailed"
    assert daemon.get("/v1/status", headers={"Host": f"localhost:{daemon.port}"})["instances"]


def test_browser_page_stores_no_position(daemon: DaemonProcess, start: Position) -> None:
    query = {"reader": "page", "position": str(start)}
    for origin in ("https://attacker.example", "null", "http://localhost.attacker.example:80"):
        with pytest.raises(Refused) as refused:
            daemon.fetch("/v1/instances/shop/position", {"Origin": origin}, "POST", **query)
        assert refused.value.status == 401
    assert daemon.get("/v1/status", {"Origin": "http://localhost:3000"})["instances"]


def test_position_stored_by_a_reader_is_held(
    daemon: DaemonProcess, mariadb_server: Server, table: str
) -> None:
    head = insert(mariadb_server, table)
    daemon.wait_for_head(head.file, head.offset)
    noted = daemon.post("/v1/instances/shop/position", reader="cache", position=str(head), seconds=60)
    assert noted["position"] == str(head)
    assert (daemon.folder / "log" / "shop" / "holds" / "cache.json").exists()
    with pytest.raises(Refused) as refused:
        daemon.post("/v1/instances/shop/position", reader="cache", position=str(head), seconds=10**19)
    assert "longer than a hold may last" in str(refused.value.problem)


# --- The verbs ------------------------------------------------------------------------------


def test_status_shows_each_instance(daemon: DaemonProcess, mariadb_server: Server, table: str) -> None:
    head = insert(mariadb_server, table)
    daemon.wait_for_head(head.file, head.offset)
    shown = cli("status", "--config", str(daemon.config))
    assert shown.returncode == 0, shown.stderr
    assert "running" in shown.stdout

    def is_up_to_date() -> bool:
        status = penstock("status", "--url", f"http://127.0.0.1:{daemon.port}", "--json", "shop").one
        assert status["position"] == str(head)
        # Without a recent event, the daemon does not know whether the server has more changes.
        return (status["state"], status["lag_seconds"]) == ("running", 0)

    wait_until(is_up_to_date)
    missing = penstock("status", "--url", f"http://127.0.0.1:{daemon.port}", "shoe")
    assert (missing.code, "SourceMissing" in missing.err) == (2, True)


def test_settings_are_validated_before_anything_starts(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("instances: {shop: {source: mysql://a@b, start: someday}, stock: {source: mysql://a@b}}")
    done = cli("serve", str(file), "--check")
    assert done.returncode == 2
    assert "instances.shop.start" in done.stderr
    file.write_text("instances: {shop: {source: mysql://a@127.0.0.1:1, log: {free_bytes_min: 1000TiB}}}")
    done = cli("serve", str(file), "--check")
    assert done.returncode == 2
    assert "instances.shop: mysql://a@127.0.0.1:1: Can't connect" in done.stderr
    assert "log.free_bytes_min" in done.stderr
    assert not (tmp_path / "penstock-log").exists()
    schema = json.loads(cli("serve", "--schema").stdout)
    assert "instances" in schema["properties"]


def test_occupied_port_is_reported_before_anything_starts(daemon: DaemonProcess, tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "listen": {"http": f"127.0.0.1:{daemon.port}"},
                "log": {"folder": str(tmp_path / "log")},
                "instances": {"shop": {"source": "mysql://a@127.0.0.1:1"}},
            }
        )
    )
    done = cli("serve", str(file))
    assert (done.returncode, "OptionInvalid" in done.stderr) == (2, True)
    assert not (tmp_path / "log").exists()


# --- A daemon's life ------------------------------------------------------------------------


def test_valid_token_is_accepted(tmp_path: Path) -> None:
    settings = {
        "listen": {"token_env": "TEST_TOKEN"},
        "instances": {"shop": {"source": "mysql://nobody@127.0.0.1:1"}},
    }
    with DaemonProcess(tmp_path, settings, {"TEST_TOKEN": "sesame-7070"}) as daemon:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic sesame-7070"}):
            with pytest.raises(Refused) as refused:
                daemon.get("/v1/status", headers=headers)
            assert (refused.value.status, refused.value.problem["type"]) == (401, "AuthenticationFailed")
        daemon.token = "sesame-7070"
        status = daemon.wait_for(lambda status: status["state"] == "waiting")
        assert status["error"]["kind"] == "ConnectionLost"
        assert "sesame" not in daemon.said() + json.dumps(status)
        assert daemon.terminate() == 0


def test_status_is_shown_over_tls_with_the_settings(tmp_path: Path) -> None:
    certificate.make(tmp_path / "tls")
    names = certificate.server_options(tmp_path / "tls")
    settings = {
        "listen": {"tls": {"cert": names["ssl-cert"], "key": names["ssl-key"]}, "token": "sesame"},
        "instances": {"shop": {"source": "mysql://nobody@127.0.0.1:1"}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        (shown,) = penstock("status", "--config", daemon.config, "--json").objects
        assert shown["instance"] == "shop"
        plain = penstock("status", "--url", f"http://127.0.0.1:{daemon.port}")
        assert (plain.code, "ConnectionLost" in plain.err) == (4, True)
        other = penstock("status", "--url", f"https://127.0.0.1:{daemon.port}")
        assert (other.code, "AuthenticationFailed" in other.err) == (2, True)


@pytest.mark.timing
def test_daemon_asked_to_stop_leaves_everything_durable(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    rotate(mariadb_server)
    mariadb_server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    start = head_of(mariadb_server)
    settings = {
        "log": {"folder": str(tmp_path / "log"), "fsync": "never"},
        "instances": {"shop": {"source": mariadb_server.url(), "start": str(start)}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        head = insert(mariadb_server, f"{database}.t", 20)
        daemon.wait_for_head(head.file, head.offset)
        assert daemon.terminate() == 0
        assert_equal_to_server(tmp_path / "log" / "shop", mariadb_server, start)
        noted = json.loads((tmp_path / "log" / "shop" / "position.json").read_text())
        assert (noted["file"], noted["offset"]) == (head.file, head.offset)
        # The second process continues from that position.
        daemon.start()
        head = insert(mariadb_server, f"{database}.t", 20)
        daemon.wait_for_head(head.file, head.offset)
    assert_equal_to_server(tmp_path / "log" / "shop", mariadb_server, start)


def test_eight_idle_instances_stay_small_and_one_failure_leaves_the_others_running(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    url = mariadb_server.url()
    instances: dict[str, Any] = {f"shop{number}": {"source": url} for number in range(8)}
    instances["gone"] = {"source": url, "start": "mysql-bin.999999:4"}
    with DaemonProcess(tmp_path, {"instances": instances}, environment={}) as daemon:
        daemon.wait_for(lambda status: status["state"] == "stopped", "gone")
        for number in range(8):
            daemon.wait_for(lambda status: status["state"] == "running", f"shop{number}")
        assert daemon.status("gone")["error"]["kind"] == "PositionInvalid"
        head = insert_somewhere(mariadb_server, fresh_database)
        for number in range(8):
            daemon.wait_for_head(head.file, head.offset, f"shop{number}")
        assert daemon.resident_bytes() < IDLE_BYTES_MAX
        expected = {**{f"shop{number}": "running" for number in range(8)}, "gone": "stopped"}
        wait_until(lambda: states_of(daemon) == expected)
        shown = penstock("status", "--config", daemon.config)
        assert (shown.code, "PositionInvalid" in shown.out) == (1, True)


def states_of(daemon: DaemonProcess) -> dict[str, str]:
    return {instance["instance"]: instance["state"] for instance in daemon.get("/v1/instances")["instances"]}


@pytest.mark.timing
def test_memory_log_throttles_the_server_for_its_readers(
    mariadb_server: Server, fresh_database: FreshDatabase, tmp_path: Path
) -> None:
    database = fresh_database(mariadb_server)
    mariadb_server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    start = head_of(mariadb_server)
    settings = {
        "log": {"mode": "memory", "memory_bytes": "4MiB"},
        "instances": {"shop": {"source": mariadb_server.url(), "start": str(start)}},
    }
    with DaemonProcess(tmp_path, settings) as daemon:
        first = insert(mariadb_server, f"{database}.t")
        daemon.wait_for_head(first.file, first.offset)
        call = "/v1/instances/shop/position"
        daemon.post(call, reader="cache", position=str(first))
        head = insert(mariadb_server, f"{database}.t", 80, width=100_000)
        status = daemon.wait_for(lambda status: status["state"] == "held")
        assert "cache" in status["why"]
        # The position does not move while the log is held, whatever the server sends.
        for _ in range(20):
            assert daemon.status()["position"] == status["position"]
        assert Position.parse(status["position"]).offset - first.offset < 4 << 20
        while Position.parse(status["position"]) < head:
            reached = status["position"]
            daemon.post(call, reader="cache", position=reached)
            status = daemon.wait_for(lambda one, reached=reached: one["position"] != reached)
        assert not (tmp_path / "penstock-log").exists()


def insert_somewhere(server: Server, fresh_database: FreshDatabase) -> Position:
    database = fresh_database(server)
    server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY AUTO_INCREMENT, b LONGTEXT)")
    return insert(server, f"{database}.t")
