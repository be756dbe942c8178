# SPDX-License-Identifier: Apache-2.0
"""A live daemon as its operators and their tools see it."""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.coordinate.store import open_store
from penstock.coordinate.subscription_record import Subscription, Subscriptions
from penstock.telemetry.definitions import GROUPS
from tests.support.capture.captured_log import head_of, rotate
from tests.support.daemon.process import PENSTOCK, ROOT, DaemonProcess, Refused
from tests.support.daemon.scraping import samples
from tests.support.suite.fixture_types import FreshDatabase
from tests.support.suite.patience import WAIT_SECONDS_MAX, wait_until
from tools.servers import Server


@pytest.fixture
def systemd_socket(tmp_path: Path) -> Iterator[socket.socket]:
    """A socket for the notifications of a daemon."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiving:
        receiving.bind(str(tmp_path / "notify"))
        receiving.settimeout(WAIT_SECONDS_MAX)
        yield receiving


def scrape(daemon: DaemonProcess) -> dict[tuple[str, ...], float]:
    """Return the samples of a scrape by name and label values."""
    return samples(daemon.get("/metrics").decode())


def dump_threads(server: Server) -> list[int]:
    """Return the ids of the sessions that read the server's log."""
    return [int(row[0]) for row in server.sql("SHOW PROCESSLIST") if "Binlog Dump" in str(row[4])]


def test_live_daemon_reports_every_metric_of_the_registry(
    tmp_path: Path, server_of: Any, fresh_database: FreshDatabase, systemd_socket: socket.socket
) -> None:
    server: Server = server_of("mariadb")
    database = fresh_database(server)
    rotate(server)
    settings = {
        "listen": {"canal": "127.0.0.1:0"},
        "coordination": f"sqlite://{tmp_path}/coordination.db",
        "log": {"tier": f"file://{tmp_path}/tier", "folder": str(tmp_path / "log"), "block_bytes": 4096},
        "metrics": {"tables": 10},
        "processes": "per-instance",
        "instances": {"shop": {"source": server.url(), "start": str(head_of(server))}},
    }
    store = open_store(settings["coordination"])
    Subscriptions(store).create(Subscription("shop", "cache", shard_count=4))
    store.close()
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "600000000"}
    with DaemonProcess(tmp_path, settings, environment) as daemon:
        assert systemd_socket.recv(100) == b"READY=1"
        assert daemon.get("/startupz") == b"started: ok\n"
        daemon.wait_for(lambda status: status["state"] == "running")
        assert daemon.get("/readyz").count(b"ok") == 4
        server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b INT, c TEXT)")
        server.sql(f"ALTER DATABASE {database} CHARACTER SET latin1")
        # Write more than a block, which gives the log its first commit time.
        server.sql(f"INSERT INTO {database}.t VALUES (1, 1, ''), (2, 2, REPEAT('x', 10000))")
        server.sql(f"DELETE FROM {database}.t WHERE a = 1")
        for thread in dump_threads(server):
            server.sql(f"KILL {thread}")
        daemon.wait_for(lambda status: status["connects"] > 1 and status["state"] == "running")
        server.sql(f"UPDATE {database}.t SET b = 3")
        end = head_of(server)
        daemon.wait_for_head(end.file, end.offset)
        daemon.post("/v1/instances/shop/position", reader="cache", position=str(end))
        with pytest.raises(Refused):
            daemon.get("/metrics", {"Host": "elsewhere.example"})
        # The daemon surveys the server and syncs the log shortly after it connects.
        later = {("penstock_server_binlog_bytes", "shop"), ("penstock_log_durable_binlog_file", "shop")}
        wait_until(lambda: later <= scrape(daemon).keys())
        values = scrape(daemon)
        assert daemon.terminate() == 0
    assert systemd_socket.recv(100) == b"STOPPING=1"
    assert_values(values, f"{database}.t")
    defined = [
        definition
        for group in GROUPS
        if group.origin not in ("pipeline", "subscriber", "holder")
        for definition in group.definitions
        # The daemon has no Pump, no listener processes, no certificate, and watches no pipelines.
        if not definition.name.startswith(
            (
                "penstock_pump_",
                "penstock_listener_process_",
                "penstock_listener_certificate_",
                "penstock_verify_",
            )
        )
    ]
    reported = {name for name, *_ in values}
    # No reader has followed the log.
    assert {
        definition.name
        for definition in defined
        if not reported & {definition.name, f"{definition.name}_count"}
        and not definition.name.startswith("penstock_reader_")
    } == set()


def assert_values(values: dict[tuple[str, ...], float], table: str) -> None:
    """Assert the known values of a scrape after two rows were inserted, one deleted, and one updated."""
    rows = "penstock_capture_rows_total"
    counted = {
        operation: values[rows, "shop", operation, table] for operation in ("insert", "update", "delete")
    }
    assert counted == {"insert": 2, "update": 1, "delete": 1}
    assert values["penstock_capture_state", "shop", "running"] == 1
    assert values["penstock_capture_state", "shop", "stopped"] == 0
    assert values["penstock_capture_connects_total", "shop"] == 2
    assert values["penstock_capture_disconnects_total", "shop", "ConnectionLost"] == 1
    assert values["penstock_capture_statements_total", "shop", "applied"] >= 1
    assert values["penstock_capture_statements_total", "shop", "ignored"] >= 1
    assert values["penstock_capture_lag_bytes", "shop"] == 0
    assert values["penstock_log_holds", "shop"] == 1
    assert values["penstock_log_hold_bytes", "shop", "cache"] == 0
    assert values["penstock_server_kept_bytes_before_capture", "shop"] > 0
    assert values["penstock_server_earliest_timestamp_seconds", "shop"] > 1.6e9
    assert values["penstock_subscription_shards", "shop", "cache"] == 4
    assert values["penstock_subscription_shards_unowned", "shop", "cache"] == 4
    assert values["process_open_fds",] > 0


def test_history_of_a_row_is_searched_in_a_live_daemon(
    tmp_path: Path, server_of: Any, fresh_database: FreshDatabase
) -> None:
    server: Server = server_of("mariadb")
    database = fresh_database(server)
    rotate(server)
    settings = {"instances": {"shop": {"source": server.url(), "start": str(head_of(server))}}}
    with DaemonProcess(tmp_path, settings) as daemon:
        server.sql(f"CREATE TABLE {database}.t (a INT PRIMARY KEY, b VARCHAR(20))")
        server.sql(f"INSERT INTO {database}.t VALUES (6, 'other'), (7, 'new')")
        server.sql(f"UPDATE {database}.t SET b = 'paid' WHERE a = 7")
        server.sql(f"UPDATE {database}.t SET a = 8 WHERE a = 7")
        server.sql(f"TRUNCATE {database}.t")
        end = head_of(server)
        daemon.wait_for_head(end.file, end.offset)
        words = [
            *PENSTOCK,
            "history",
            f"{database}.t",
            "7",
            "--url",
            f"http://127.0.0.1:{daemon.port}",
            "--json",
        ]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS_MAX)
    assert done.returncode == 0, done.stderr
    first, *parts = (json.loads(line) for line in done.stdout.splitlines())
    assert first["readers"] == []
    shown = [part.get("change") or part["text"].split()[0] for part in parts]
    assert shown == ["TRUNCATE", "update", "update", "insert", "CREATE"]
    assert parts[0]["empties"]
    assert [(part["before"], part["after"]) for part in parts[1:4]] == [
        ({"a": 7, "b": "paid"}, {"a": 8, "b": "paid"}),
        ({"a": 7, "b": "new"}, {"a": 7, "b": "paid"}),
        (None, {"a": 7, "b": "new"}),
    ]
    assert len({part["gtid"] for part in parts[1:4]}) == 3
